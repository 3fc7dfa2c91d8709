"""Our transformer against diffusers' with the same random weights, for the kind of each released shape: outputs, gradients, names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import CogVideoXTransformer3DModel
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from diffusers.pipelines.cogvideo.pipeline_cogvideox import get_resize_crop_region_for_grid
from torch import Tensor

from kineograph.core.config import parse
from kineograph.core.errors import InputError
from kineograph.family.cogvideox import diffusers_weights
from kineograph.family.cogvideox.network import OFS, Transformer
from kineograph.family.cogvideox.transformer_config import RELEASED, TransformerShape

TEXT, LENGTH, CHANNELS = 24, 5, 4
SMALL = {"depth": 2, "heads": 3, "head_width": 32, "time_width": 16, "base_size": (8, 12), "base_frames": 3}


def shape_for(kind: str, **keys: Any) -> TransformerShape:
    released = {key: value for key, value in RELEASED[kind].items() if key in TransformerShape.model_fields}
    return parse(TransformerShape, {**released, **SMALL, **keys})


def ours(kind: str, fused: bool = True, **keys: Any) -> Transformer:
    return Transformer(shape_for(kind, **keys), CHANNELS, TEXT, LENGTH, base=(3, 8, 12), fused=fused)


def theirs_for(network: Transformer) -> CogVideoXTransformer3DModel:
    """With random weights, norms and biases too."""
    config = diffusers_weights.diffusers_config(network, TEXT, LENGTH)
    model = CogVideoXTransformer3DModel(**{key: value for key, value in config.items() if not key.startswith("_")})
    torch.manual_seed(1)
    for tensor in [*model.parameters(), *(b for name, b in model.named_buffers() if name in model.state_dict())]:
        tensor.data.normal_(std=0.2)
        if tensor.ndim == 1 and tensor.shape[0] % 3:  # scales of norms around 1 would do too; none is 0
            tensor.data += 0.5
    return model


def rotary(network: Transformer, size: tuple[int, int, int]) -> tuple[Tensor, Tensor] | None:
    """As the pipeline makes it."""
    shape, grid = network.shape, network.token_grid(size)
    if shape.positions == "sincos":
        return None
    base = (network.base_size[0] // shape.patch, network.base_size[1] // shape.patch)
    if shape.patch_time == 1:
        crop = get_resize_crop_region_for_grid(grid[1:], base[1], base[0])
        return get_3d_rotary_pos_embed(shape.head_width, crop, grid[1:], grid[0])
    return get_3d_rotary_pos_embed(shape.head_width, None, grid[1:], grid[0], grid_type="slice", max_size=(50, 50))


def run_theirs(model: Any, network: Transformer, latents: Tensor, t: Tensor, text: Tensor) -> Tensor:
    size = (latents.shape[1], *latents.shape[3:])
    ofs = torch.full((1,), OFS) if network.shape.ofs else None
    return model(latents, text, t, ofs=ofs, image_rotary_emb=rotary(network, size), return_dict=False)[0]


def run_ours(network: Transformer, latents: Tensor, t: Tensor, text: Tensor) -> Tensor:
    return network(
        latents, t, text, network.positions_for((latents.shape[1], *latents.shape[3:]), text.shape[1], text.device)
    )


def inputs(network: Transformer, size: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(2)
    frames, height, width = size
    latents = torch.randn(2, frames, network.read_channels, height, width)
    return latents, torch.tensor([7, 803]), torch.randn(2, LENGTH, TEXT)


def close(found: Tensor, wanted: Tensor) -> None:
    assert ((found - wanted).norm() / wanted.norm()).item() < 1e-4


def size_for(kind: str) -> tuple[int, int, int]:
    return (4, 8, 12) if kind.startswith("1.5") else (3, 8, 12)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", RELEASED)
def test_outputs_and_gradients_agree(kind: str, fused: bool) -> None:
    network = ours(kind, fused)
    model = theirs_for(network)
    diffusers_weights.load_network(network, model.state_dict())
    given = inputs(network, size_for(kind))
    wanted, found = run_theirs(model, network, *given), run_ours(network, *given)
    assert wanted.std() > 0.1
    close(found, wanted)
    target = torch.randn_like(wanted)
    ((wanted - target) ** 2).mean().backward()
    ((found - target) ** 2).mean().backward()
    expected = dict(model.named_parameters())
    noise = 1e-8 * max(p.grad.norm() for p in expected.values())  # a bias of all keys changes nothing without rotary
    checked = 0
    for name, parameter in network.named_parameters():
        if name == "positions.table":
            continue  # a buffer there
        names = diffusers_weights.diffusers_names(name)
        for part, theirs in zip(parameter.grad.chunk(len(names)), names, strict=True):
            gradient = expected[theirs].grad.reshape(part.shape)
            assert (part - gradient).norm() <= 1e-4 * gradient.norm() + noise, name
            checked += 1
    assert checked == len(expected)


@pytest.mark.parametrize("kind", ["2b", "5b", "1.5-5b"])
@pytest.mark.parametrize("size", [(2, 12, 8), (4, 4, 20), (6, 16, 16)])
def test_other_sizes_agree(kind: str, size: tuple[int, int, int]) -> None:
    """Portrait, narrow, longer: positions follow the size."""
    network = ours(kind)
    model = theirs_for(network)
    diffusers_weights.load_network(network, model.state_dict())
    given = inputs(network, size)
    close(run_ours(network, *given), run_theirs(model, network, *given))


@pytest.mark.parametrize("kind", RELEASED)
def test_weights_come_back_as_they_went_in(kind: str) -> None:
    network = ours(kind)
    state = {name: value.float() for name, value in theirs_for(network).state_dict().items()}
    diffusers_weights.load_network(network, state)
    found = diffusers_weights.network_state(network)
    assert found.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("kind", RELEASED)
def test_configs_come_back_as_they_went_in(kind: str) -> None:
    network = ours(kind)
    config = diffusers_weights.diffusers_config(network, TEXT, LENGTH)
    again = parse(TransformerShape, diffusers_weights.read_shape(config))
    assert again == network.shape.model_copy(update={"first_frame_inverse_scale": False})  # the VAE's config says that


@pytest.mark.parametrize("kind", RELEASED)
def test_an_exported_folder_knows_the_size_it_is_drawn_at(kind: str) -> None:
    """Of the released folders: diffusers lays out positions for these."""
    shape = parse(TransformerShape, {k: v for k, v in RELEASED[kind].items() if k in TransformerShape.model_fields})
    with torch.device("meta"):
        network = Transformer(shape, 16, 4096, 226, base=(13, 60, 90))
    config = diffusers_weights.diffusers_config(network, 4096, 226)
    size = (config["sample_height"], config["sample_width"], config["sample_frames"])
    assert size == ((300, 300, 81) if kind.startswith("1.5") else (60, 90, 49))


def test_released_parameter_counts() -> None:
    """As the released models have them: 1.69 and 5.57 billion."""
    for kind, count in {"2b": 1_693_847_616, "5b": 5_570_283_072}.items():
        shape = parse(TransformerShape, {k: v for k, v in RELEASED[kind].items() if k in TransformerShape.model_fields})
        with torch.device("meta"):
            network = Transformer(shape, 16, 4096, 226, base=(13, 60, 90))
            model = CogVideoXTransformer3DModel(
                **{
                    k: v
                    for k, v in diffusers_weights.diffusers_config(network, 4096, 226).items()
                    if k != "_class_name"
                }
            )
        found = sum(p.numel() for p in network.parameters())
        assert found == sum(p.numel() for p in model.parameters())
        assert abs(found / count - 1) < 0.01


def test_a_missing_unknown_or_misshapen_weight_is_named() -> None:
    network = ours("5b")
    state = dict(diffusers_weights.network_state(network))
    key = "transformer_blocks.1.attn1.to_k.weight"
    with pytest.raises(InputError, match=f"lacks {key}"):
        diffusers_weights.load_network(network, {name: value for name, value in state.items() if name != key})
    with pytest.raises(InputError, match=r"unknown ofs_embedding\.linear_1\.weight"):
        diffusers_weights.load_network(network, {**state, "ofs_embedding.linear_1.weight": torch.zeros(1)})
    with pytest.raises(InputError, match=f"{key} is 2 × 2, and this network needs 96 × 96"):
        diffusers_weights.load_network(network, {**state, key: torch.zeros(2, 2)})


def test_a_shape_that_diffusers_has_not_is_refused() -> None:
    with pytest.raises(InputError, match="norm_eps"):
        diffusers_weights.read_shape({"norm_eps": 1e-6})
    with pytest.raises(InputError, match="grid=slice"):
        diffusers_weights.diffusers_config(ours("5b", grid="slice"), TEXT, LENGTH)


def test_a_learned_table_serves_other_sizes() -> None:
    """The first frames of the table for fewer of them; stretched in space; the trained size is exact."""
    network = ours("5b-i2v")
    diffusers_weights.load_network(network, theirs_for(network).state_dict())
    table = network.positions
    assert table is not None
    whole = table(LENGTH, (3, 4, 6))[0]
    assert torch.equal(table(LENGTH, (2, 4, 6))[0], whole[: LENGTH + 2 * 24])
    assert table(LENGTH, (3, 6, 4)).shape == (1, LENGTH + 72, 96)
    assert torch.equal(table(LENGTH - 2, (3, 4, 6))[0, LENGTH - 2 :], whole[LENGTH:])
