"""LoRA files: diffusers loads what is written here and answers alike; what diffusers, peft and kohya wrote is read here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file

from kineograph.core.errors import InputError
from kineograph.interop.lora_file import FILE, Adapter, Lora, merge_lora, read_lora, write_lora
from tests.interop.tiny import answer, tiny_pipeline, tiny_transformer

TARGETS = ("to_q", "to_k", "to_v", "to_out.0")


def random_lora(model: torch.nn.Module, rank: int = 3, alpha: float = 7.0) -> Lora:
    source = torch.Generator().manual_seed(5)
    lora = {}
    for name, module in model.named_modules():
        if name.endswith(TARGETS):
            out, into = module.weight.shape
            down, up = (torch.randn(*shape, generator=source) / 4 for shape in ((rank, into), (out, rank)))
            lora[name] = Adapter(down, up, alpha)
    return lora


def with_lora(lora: Lora) -> torch.Tensor:
    model = tiny_transformer()
    model.load_state_dict(dict(merge_lora(model.state_dict(), lora)))
    return answer(model)


def test_what_is_merged_is_rounded_once() -> None:
    """An adapter adds less than bf16 resolves: asked for in fp32, nothing of it is lost."""
    state = {"layer.weight": torch.ones(2, 2, dtype=torch.bfloat16), "layer.bias": torch.zeros(2, dtype=torch.bfloat16)}
    lora = {"layer": Adapter(torch.full((1, 2), 1e-2), torch.full((2, 1), 1e-2), 1.0)}
    assert dict(merge_lora(state, lora))["layer.weight"].dtype == torch.bfloat16
    torch.testing.assert_close(dict(merge_lora(state, lora, torch.float32))["layer.weight"], torch.full((2, 2), 1.0001))


def same(one: Lora, two: Lora) -> bool:
    return one.keys() == two.keys() and all(
        torch.allclose(one[name].delta(), two[name].delta(), atol=1e-6) for name in one
    )


@pytest.mark.parametrize("mixed", [False, True])
def test_diffusers_loads_what_is_written_and_answers_alike(tmp_path: Path, mixed: bool) -> None:
    """With alpha ≠ rank, and ranks and alphas that differ between modules."""
    lora = random_lora(tiny_transformer())
    if mixed:
        name = "transformer_blocks.1.attn1.to_k"
        lora[name] = random_lora(tiny_transformer(), rank=2, alpha=9.0)[name]
        other = "transformer_blocks.0.attn1.to_q"
        lora[other] = Adapter(lora[other].down, lora[other].up, 1.0)
    write_lora(tmp_path, lora)
    pipeline = tiny_pipeline()
    plain = answer(pipeline.transformer)
    pipeline.load_lora_weights(tmp_path)
    theirs = answer(pipeline.transformer)
    torch.testing.assert_close(theirs, with_lora(lora), rtol=1e-4, atol=1e-5)
    assert (theirs - plain).abs().max() > 1e-2
    assert same(read_lora(tmp_path), lora)


def test_what_diffusers_saves_is_read(tmp_path: Path) -> None:
    pipeline = tiny_pipeline()
    pipeline.transformer.add_adapter(LoraConfig(r=3, lora_alpha=12, target_modules=list(TARGETS), init_lora_weights=False))  # fmt: skip
    expected = answer(pipeline.transformer)
    from diffusers.utils import convert_state_dict_to_diffusers
    from peft.utils import get_peft_model_state_dict

    layers = get_peft_model_state_dict(pipeline.transformer)
    pipeline.save_lora_weights(
        tmp_path / "new",
        transformer_lora_layers=layers,
        transformer_lora_adapter_metadata=pipeline.transformer.peft_config["default"].to_dict(),
    )
    torch.testing.assert_close(with_lora(read_lora(tmp_path / "new")), expected, rtol=1e-4, atol=1e-5)
    # without metadata alpha is the rank, as diffusers itself takes it
    pipeline.save_lora_weights(tmp_path / "bare", transformer_lora_layers=layers)
    assert {adapter.scale for adapter in read_lora(tmp_path / "bare").values()} == {1.0}
    # the older names: lora.down, lora.up
    old = {f"transformer.{key}": value for key, value in convert_state_dict_to_diffusers(layers).items()}
    assert any(".lora.down." in key for key in old)
    save_file({key: value.contiguous() for key, value in old.items()}, tmp_path / "old.safetensors")
    assert same(read_lora(tmp_path / "old.safetensors"), read_lora(tmp_path / "bare"))


@pytest.mark.parametrize("rslora", [False, True])
def test_what_peft_saves_is_read(tmp_path: Path, rslora: bool) -> None:
    config = LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=list(TARGETS),
        init_lora_weights=False,
        use_rslora=rslora,
        alpha_pattern={"attn1.to_v": 2},
    )
    model = get_peft_model(tiny_transformer(), config)
    expected = answer(model)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(with_lora(read_lora(tmp_path)), expected, rtol=1e-4, atol=1e-5)


def test_kohya_names_are_undone_with_the_names_of_the_model(tmp_path: Path) -> None:
    model = tiny_transformer()
    lora = random_lora(model)
    tensors = {}
    for name, adapter in lora.items():
        flat = "lora_transformer_" + name.replace(".", "_")
        tensors |= {f"{flat}.lora_down.weight": adapter.down, f"{flat}.lora_up.weight": adapter.up}
        tensors[f"{flat}.alpha"] = torch.tensor(adapter.alpha)
    save_file(tensors, tmp_path / "kohya.safetensors")
    names = [name for name, _ in model.named_modules()]
    assert same(read_lora(tmp_path / "kohya.safetensors", names), lora)
    with pytest.raises(InputError, match="not a module of this model"):
        read_lora(tmp_path / "kohya.safetensors", names[:3])


def test_an_adapter_of_fused_qkv_is_three(tmp_path: Path) -> None:
    model = tiny_transformer()
    down, up = torch.randn(3, 32), torch.randn(96, 3)
    save_file(
        {
            "transformer.transformer_blocks.0.attn1.to_qkv.lora_A.weight": down,
            "transformer.transformer_blocks.0.attn1.to_qkv.lora_B.weight": up,
        },
        tmp_path / FILE,
    )
    found = read_lora(tmp_path)
    assert list(found) == [f"transformer_blocks.0.attn1.to_{letter}" for letter in "qkv"]
    torch.testing.assert_close(torch.cat([adapter.delta() for adapter in found.values()]), up @ down)
    assert set(dict(merge_lora(model.state_dict(), found))) == set(model.state_dict())


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    model = tiny_transformer()
    name = "transformer_blocks.0.attn1.to_q"

    def said(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> str:
        save_file(tensors, tmp_path / FILE, metadata=metadata)
        with pytest.raises(InputError) as error:
            dict(merge_lora(model.state_dict(), read_lora(tmp_path)))
        return str(error.value)

    a, b = f"transformer.{name}.lora_A.weight", f"transformer.{name}.lora_B.weight"
    down, up = torch.zeros(3, 32), torch.zeros(32, 3)
    assert "only down" in said({a: down})
    assert "rank × in" in said({a: down, b: torch.zeros(32, 2)})
    assert "another model" in said({a: torch.zeros(3, 8), b: up})
    assert "lora_magnitude" in said({a: down, b: up, f"transformer.{name}.lora_magnitude_vector": torch.zeros(32)})
    assert "no adapter" in said({}) and "ghost" in said({a.replace(name, "ghost"): down, b.replace(name, "ghost"): up})
    assert "readable JSON" in said({a: down, b: up}, {"lora_adapter_metadata": "{"})
    dora = json.dumps({"transformer.use_dora": True})
    assert "use_dora" in said({a: down, b: up}, {"lora_adapter_metadata": dora})
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(InputError, match="pickles are refused"):
        read_lora(tmp_path / "x.bin")
    (tmp_path / FILE).unlink()
    with pytest.raises(InputError, match="has neither"):
        read_lora(tmp_path)
