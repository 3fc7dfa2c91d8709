"""The same numbers as diffusers' AutoencoderKLCogVideoX, from the same weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kineograph.codec.causal_vae import CausalVAE
from kineograph.codec.causal_vae_weights import (
    config_from_diffusers,
    config_to_diffusers,
    load_diffusers_vae,
    weights_to_diffusers,
)
from kineograph.core.batch import Shape
from kineograph.core.errors import InputError

diffusers = pytest.importorskip("diffusers")

TINY = {
    "block_out_channels": (8, 8, 16, 16), "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 4,
    "down_block_types": ("CogVideoXDownBlock3D",) * 4, "up_block_types": ("CogVideoXUpBlock3D",) * 4,
    "sample_height": 64, "sample_width": 96, "scaling_factor": 0.7,
}  # fmt: skip
RELEASED = {
    "_class_name": "AutoencoderKLCogVideoX", "_diffusers_version": "0.30.0.dev0", "act_fn": "silu",
    "block_out_channels": [128, 256, 256, 512], "down_block_types": ["CogVideoXDownBlock3D"] * 4, "force_upcast": True,
    "in_channels": 3, "latent_channels": 16, "latents_mean": None, "latents_std": None, "layers_per_block": 3,
    "norm_eps": 1e-06, "norm_num_groups": 32, "out_channels": 3, "sample_height": 480, "sample_width": 720,
    "scaling_factor": 1.15258426, "shift_factor": None, "temporal_compression_ratio": 4,
    "up_block_types": ["CogVideoXUpBlock3D"] * 4, "use_post_quant_conv": False, "use_quant_conv": False,
}  # fmt: skip
SHAPE = Shape(17, 64, 96, 3, 8.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A diffusers folder with random weights, zeros and biases included."""
    torch.manual_seed(0)
    theirs = diffusers.AutoencoderKLCogVideoX(**TINY)
    for p in theirs.parameters():
        torch.nn.init.normal_(p, std=0.15)
    path = tmp_path_factory.mktemp("diffusers")
    theirs.save_pretrained(path / "vae")
    return path


@pytest.fixture(scope="module")
def theirs(folder):
    return diffusers.AutoencoderKLCogVideoX.from_pretrained(folder / "vae").eval()


@pytest.fixture(scope="module")
def ours(folder):
    return load_diffusers_vae(folder, SHAPE).eval()


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    assert found.shape == wanted.shape
    return bool((found - wanted).abs().max() <= 1e-5 * wanted.abs().max())


def inside(pixels: torch.Tensor) -> torch.Tensor:
    """B T C H W in [0, 1] → as theirs takes it"""
    return pixels.transpose(1, 2) * 2 - 1


def outside(sample: torch.Tensor) -> torch.Tensor:
    return ((sample.transpose(1, 2) + 1) / 2).clamp(0, 1)


@torch.no_grad()
@pytest.mark.parametrize("frames", [1, 9, 17, 49])
def test_posterior_and_pixels_are_theirs(ours, theirs, frames):
    pixels = torch.rand(2, frames, 3, 16, 24)
    wanted = theirs.encode(inside(pixels)).latent_dist
    assert close(ours.posterior(pixels).transpose(1, 2), wanted.parameters)
    assert close(ours.encode(pixels).transpose(1, 2), wanted.mean * 0.7)
    latents = torch.randn(2, ours.shape_for(frames, 16, 24)[0], 4, 2, 3)
    assert close(ours.decode(latents), outside(theirs.decode(latents.transpose(1, 2) / 0.7).sample))


@torch.no_grad()
def test_an_even_number_of_latents_is_encoded_as_theirs_and_decoded_to_as_many_frames_as_it_came_from(ours, theirs):
    """Theirs takes the first of an even number for any other, and paints 16 frames for 13."""
    pixels = torch.rand(1, 13, 3, 16, 16)
    assert close(ours.posterior(pixels).transpose(1, 2), theirs.encode(inside(pixels)).latent_dist.parameters)
    latents = ours.encode(pixels)
    assert ours.decode(latents).shape == pixels.shape
    assert theirs.decode(latents.transpose(1, 2) / 0.7).sample.shape[2] == 16


@torch.no_grad()
@pytest.mark.parametrize(("height", "width"), [(64, 96), (72, 40)])
def test_tiles_are_theirs(folder, theirs, height, width):
    ours = load_diffusers_vae(folder, SHAPE, tile=[48, 40], tile_overlap=[1 / 6, 1 / 5]).eval()
    theirs.enable_tiling(48, 40)
    try:
        pixels = torch.rand(1, 9, 3, height, width)
        assert close(ours.posterior(pixels).transpose(1, 2), theirs.encode(inside(pixels)).latent_dist.parameters)
        latents = torch.randn(1, 3, 4, height // 8, width // 8)
        assert close(ours.decode(latents), outside(theirs.decode(latents.transpose(1, 2) / 0.7).sample))
    finally:
        theirs.use_tiling = False


def test_gradients_are_theirs(folder, theirs):
    ours = load_diffusers_vae(folder, SHAPE)
    pixels = torch.rand(1, 17, 3, 16, 16)
    z = ours._moments(pixels)[:, :4]
    torch.cat(list(ours._chunks(z)), dim=2).square().mean().backward()
    theirs.zero_grad()
    theirs.decode(theirs.encode(inside(pixels)).latent_dist.mean).sample.square().mean().backward()
    for name, p in theirs.named_parameters():
        found = dict(ours.named_parameters())[name].grad
        assert (found - p.grad).abs().max() <= 1e-3 * p.grad.abs().max() + 1e-9, name


@torch.no_grad()
def test_ours_goes_back_to_a_folder_that_theirs_reads(ours, theirs, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_to_diffusers(ours)))
    save_file(weights_to_diffusers(ours), tmp_path / "diffusion_pytorch_model.safetensors")
    again = diffusers.AutoencoderKLCogVideoX.from_pretrained(tmp_path)
    assert again.config.scaling_factor == pytest.approx(0.7)
    pixels = torch.rand(1, 9, 3, 16, 16)
    assert torch.equal(again.encode(inside(pixels)).latent_dist.mean, theirs.encode(inside(pixels)).latent_dist.mean)
    assert close(load_diffusers_vae(tmp_path, SHAPE).eval().encode(pixels), ours.encode(pixels))


def test_sharded_weights_are_read_and_checked_against_their_index(folder, ours, tmp_path):
    theirs = diffusers.AutoencoderKLCogVideoX.from_pretrained(folder / "vae")
    theirs.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    found = load_diffusers_vae(tmp_path, SHAPE)
    assert all(torch.equal(p, dict(ours.named_parameters())[name]) for name, p in found.named_parameters())
    index = tmp_path / "diffusion_pytorch_model.safetensors.index.json"
    said = json.loads(index.read_text())
    said["weight_map"].popitem()
    index.write_text(json.dumps(said))
    with pytest.raises(InputError, match=r"which .*index\.json does not list"):
        load_diffusers_vae(tmp_path, SHAPE)


def test_the_released_config_and_its_names_fit():
    config = config_from_diffusers(RELEASED)
    assert (config.widths, config.layers, config.latent_channels, config.scale) == (
        (128, 256, 256, 512),
        3,
        16,
        1.15258426,
    )
    assert (config.temporal, config.spatial, config.groups, config.norm, config.chunk) == (4, 8, 32, "chunk", 2)
    with torch.device("meta"):
        ours = CausalVAE(config, Shape(49, 480, 720, 3, 8.0))
        theirs = diffusers.AutoencoderKLCogVideoX(**{k: v for k, v in RELEASED.items() if not k.startswith("_")})
    assert {n: p.shape for n, p in weights_to_diffusers(ours).items()} == {
        n: p.shape for n, p in theirs.state_dict().items()
    }
    assert ours.shape_for(49, 480, 720) == (13, 60, 90)


def test_what_does_not_fit_is_refused(folder, ours, tmp_path):
    for key, value in {"act_fn": "gelu", "use_quant_conv": True, "temporal_compression_ratio": 8}.items():
        with pytest.raises(InputError, match=f"{key}={value!r} is not supported"):
            config_from_diffusers({**RELEASED, key: value})
    with pytest.raises(InputError, match="is of a AutoencoderKL: causal_vae needs AutoencoderKLCogVideoX"):
        config_from_diffusers({"_class_name": "AutoencoderKL"})
    weights = weights_to_diffusers(ours)
    broken = Path(shutil.copytree(folder / "vae", tmp_path / "broken"))
    for change, message in (
        ({"encoder.extra": torch.zeros(1)}, r"diffusion_pytorch_model\.safetensors holds encoder\.extra"),
        ({"decoder.conv_out.conv.bias": torch.zeros(2)}, r"decoder\.conv_out\.conv\.bias is 2, but its config says 3"),
    ):
        save_file({**weights, **change}, broken / "diffusion_pytorch_model.safetensors")
        with pytest.raises(InputError, match=message):
            load_diffusers_vae(broken, SHAPE)
    save_file({"encoder.conv_in.conv.bias": torch.zeros(8)}, broken / "diffusion_pytorch_model.safetensors")
    with pytest.raises(InputError, match=r"broken lacks decoder\..* and \d+ more"):
        load_diffusers_vae(broken, SHAPE)
    (broken / "diffusion_pytorch_model.safetensors").write_bytes(b"short")
    with pytest.raises(InputError, match="is not a complete safetensors file"):
        load_diffusers_vae(broken, SHAPE)
    (broken / "diffusion_pytorch_model.safetensors").unlink()
    (broken / "diffusion_pytorch_model.bin").touch()
    with pytest.raises(InputError, match=r"neither .*there is diffusion_pytorch_model\.bin \(pickles are not read"):
        load_diffusers_vae(broken, SHAPE)
    with pytest.raises(InputError, match=r"conv_in\.conv\.weight is 8 × 3 × 3 × 3 × 3, but its config says 8 × 1"):
        load_diffusers_vae(folder, Shape(9, 64, 96, 1, 8.0))
    with pytest.raises(InputError, match=r"config\.json does not exist: give a diffusers folder"):
        load_diffusers_vae(tmp_path, SHAPE)
    with pytest.raises(InputError, match="norm=frame, chunk=2"):
        config_to_diffusers(load_diffusers_vae(folder, SHAPE, norm="frame"))
