"""SAT weights: what SAT calls diffusers' tensors (the inverse, written here) is mapped back to them exactly."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kineograph.core.errors import InputError
from kineograph.interop.lora_file import merge_lora
from kineograph.interop.sat_weights import (
    convert_transformer,
    convert_vae,
    extract_adapters,
    infer_transformer_config,
    locate_sat,
    read_sat_file,
)
from tests.interop.tiny import tiny_transformer, tiny_vae

WHERE = Path("mp_rank_00_model_states.pt")
BACK = {
    "norm_final.": "transformer.final_layernorm.",
    "time_embedding.linear_1.": "time_embed.0.",
    "time_embedding.linear_2.": "time_embed.2.",
    "ofs_embedding.linear_1.": "ofs_embed.0.",
    "ofs_embedding.linear_2.": "ofs_embed.2.",
    "patch_embed.pos_embedding": "mixins.pos_embed.pos_embedding",
    "patch_embed.": "mixins.patch_embed.",
    "norm_out.norm.": "mixins.final_layer.norm_final.",
    "norm_out.linear.": "mixins.final_layer.adaLN_modulation.1.",
    "proj_out.": "mixins.final_layer.linear.",
}
BLOCK = {
    "norm1.norm.": "transformer.layers.{}.input_layernorm.",
    "norm2.norm.": "transformer.layers.{}.post_attention_layernorm.",
    "attn1.to_out.0.": "transformer.layers.{}.attention.dense.",
    "attn1.norm_q.": "mixins.adaln_layer.query_layernorm_list.{}.",
    "attn1.norm_k.": "mixins.adaln_layer.key_layernorm_list.{}.",
    "ff.net.0.proj.": "transformer.layers.{}.mlp.dense_h_to_4h.",
    "ff.net.2.": "transformer.layers.{}.mlp.dense_4h_to_h.",
}


def as_sat(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A transformer of diffusers as SAT would keep it."""
    sat: dict[str, Tensor] = {}
    for key, value in state.items():
        block = re.match(r"transformer_blocks\.(\d+)\.(.*)", key)
        if block is None:
            old = next(name for name in BACK if key.startswith(name))
            sat[key.replace(old, BACK[old], 1)] = value
            continue
        number, rest = block.groups()
        kind = rest.rpartition(".")[2]
        prefix = f"transformer_blocks.{number}"
        if rest.startswith("attn1.to_q."):
            parts = [state[f"{prefix}.attn1.to_{letter}.{kind}"] for letter in "qkv"]
            sat[f"transformer.layers.{number}.attention.query_key_value.{kind}"] = torch.cat(parts)
        elif rest.startswith("norm1.linear."):
            attention, mlp = (state[f"{prefix}.norm{n}.linear.{kind}"].chunk(6) for n in (1, 2))
            order = [*attention[:3], *mlp[:3], *attention[3:], *mlp[3:]]
            sat[f"mixins.adaln_layer.adaLN_modulations.{number}.1.{kind}"] = torch.cat(order)
        elif not rest.startswith(("norm2.linear.", "attn1.to_k.", "attn1.to_v.")):
            old = next(name for name in BLOCK if rest.startswith(name))
            sat[BLOCK[old].format(number) + rest.removeprefix(old)] = value
    sat["mixins.pos_embed.freqs_sin"] = sat["mixins.pos_embed.freqs_cos"] = torch.zeros(2)
    sat["transformer.word_embeddings.embed_tokens.weight"] = torch.zeros(1, 2)
    return {f"model.diffusion_model.{key}": value for key, value in sat.items()}


def vae_as_sat(state: dict[str, Tensor]) -> dict[str, Tensor]:
    sat = {}
    for key, value in state.items():
        key = re.sub(r"\.mid_block\.resnets\.(\d)", lambda m: f".mid.block_{int(m[1]) + 1}", key)
        key = re.sub(r"\.down_blocks\.(\d)\.resnets\.", r".down.\1.block.", key)
        key = re.sub(r"\.down_blocks\.(\d)\.downsamplers\.0\.", r".down.\1.downsample.", key)
        key = re.sub(r"\.up_blocks\.(\d)\.resnets\.", lambda m: f".up.{3 - int(m[1])}.block.", key)
        key = re.sub(r"\.up_blocks\.(\d)\.upsamplers\.0\.", lambda m: f".up.{3 - int(m[1])}.upsample.", key)
        sat[key.replace(".conv_shortcut.", ".nin_shortcut.")] = value
    return sat | {"loss.logvar": torch.zeros(())}


SHAPES: list[dict[str, Any]] = [
    {},
    {"use_rotary_positional_embeddings": True, "use_learned_positional_embeddings": True, "in_channels": 8},
    {"use_rotary_positional_embeddings": True, "patch_size_t": 2, "in_channels": 8, "ofs_embed_dim": 8, "patch_bias": False, "max_text_seq_length": 224},
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=["2b", "5b-i2v", "1.5-i2v"])
def test_a_transformer_comes_back_exactly(shape: dict[str, Any]) -> None:
    model = tiny_transformer(**shape)
    expected = model.state_dict()
    found = convert_transformer(as_sat(expected), WHERE)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    config = infer_transformer_config(found, WHERE)
    if shape.get("patch_size_t") is None:
        config["max_text_seq_length"] = 12  # not in the shapes: that of the releases is taken
    wrong = {key: value for key, value in config.items() if model.config[key] != value}
    assert not wrong


def test_the_fixed_positions_of_2b_are_left_out() -> None:
    """They are sines, which every implementation makes itself; only a learned table is weights."""
    expected = tiny_transformer().state_dict()
    sat = as_sat(expected) | {"model.diffusion_model.mixins.pos_embed.pos_embedding": torch.zeros(1, 20, 32)}
    assert convert_transformer(sat, WHERE).keys() == expected.keys()


def test_adapters_of_a_tuned_checkpoint_are_added_with_alpha_1() -> None:
    """matrix_A and matrix_B beside `original`, as SAT's LoRA layers keep them."""
    model = tiny_transformer()
    sat, rank = as_sat(model.state_dict()), 4
    source = torch.Generator().manual_seed(6)
    tuned, deltas = {}, {}
    for key, value in sat.items():
        layer = re.search(r"layers\.(\d+)\.attention\.(query_key_value|dense)\.", key)
        tuned[key.replace(".weight", ".original.weight").replace(".bias", ".original.bias") if layer else key] = value
        if layer and key.endswith(".weight"):
            for part, name in enumerate(("to_q", "to_k", "to_v") if layer[2] == "query_key_value" else ("to_out.0",)):
                down, up = torch.randn(rank, 32, generator=source), torch.randn(32, rank, generator=source)
                stem = key.removesuffix("weight")
                tuned |= {f"{stem}matrix_A.{part}": down, f"{stem}matrix_B.{part}": up}
                deltas[f"transformer_blocks.{layer[1]}.attn1.{name}.weight"] = up @ down / rank
    state = convert_transformer(tuned, WHERE)
    assert state.keys() == model.state_dict().keys() and len(deltas) == 8
    found = dict(merge_lora(state, extract_adapters(tuned, WHERE)))
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value + deltas.get(name, 0), rtol=1e-5, atol=1e-5)
    lost = next(key for key in tuned if "matrix_B" in key)
    with pytest.raises(InputError, match="lacks one"):
        extract_adapters({key: value for key, value in tuned.items() if key != lost}, WHERE)
    assert extract_adapters(sat, WHERE) == {}


def test_a_vae_comes_back_exactly() -> None:
    expected = tiny_vae().state_dict()
    for prefix in ("", "first_stage_model."):
        found = convert_vae({prefix + key: value for key, value in vae_as_sat(expected).items()}, WHERE)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_strangers_are_named() -> None:
    with pytest.raises(InputError, match=r"mp_rank_00_model_states.pt holds transformer\.layers\.0\.odd"):
        convert_transformer({"model.diffusion_model.transformer.layers.0.odd.weight": torch.zeros(1)}, WHERE)
    with pytest.raises(InputError, match="holds strange"):
        convert_vae({"strange": torch.zeros(1)}, WHERE)
    with pytest.raises(InputError, match=r"lacks patch_embed.proj.weight"):
        infer_transformer_config({}, WHERE)


def test_files_are_found_and_read_as_tensors_alone(tmp_path: Path) -> None:
    folder = tmp_path / "transformer" / "1000"
    folder.mkdir(parents=True)
    (tmp_path / "transformer" / "latest").write_text("1000\n")
    with pytest.raises(InputError, match=r"mp_rank_00_model_states.pt"):
        locate_sat(tmp_path)
    state = {"model.diffusion_model.time_embed.0.weight": torch.randn(3)}
    torch.save({"module": state, "iteration": 1000}, folder / "mp_rank_00_model_states.pt")
    (tmp_path / "vae").mkdir()
    torch.save({"state_dict": state}, tmp_path / "vae" / "3d-vae.pt")
    found = locate_sat(tmp_path)
    assert found.keys() == {"transformer", "vae"}
    for path in found.values():
        read = read_sat_file(path)
        assert read.keys() == state.keys() and torch.equal(*read.values(), *state.values())


class Trap:
    """Unpickling this would leave a trace."""

    sprung = False

    def __reduce__(self) -> tuple:
        return (setattr, (Trap, "sprung", True))


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "trap.pt"
    torch.save({"module": {"a": torch.zeros(1)}, "args": Trap()}, path)
    with pytest.raises(InputError, match="never unpickled"):
        read_sat_file(path)
    assert not Trap.sprung
    torch.save({"module": {"a": torch.zeros(100)}}, path)
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(InputError, match="truncated"):
        read_sat_file(path)
    torch.save({"step": 3}, path)
    with pytest.raises(InputError, match="no state dict"):
        read_sat_file(path)
    with pytest.raises(InputError, match="does not exist"):
        read_sat_file(tmp_path / "nowhere.pt")
