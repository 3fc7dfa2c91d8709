"""The size of samples beside that of the CLIP's input, and of given images."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from kineograph.core.batch import Shape
from kineograph.core.capabilities import sample_shape
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.task import freeze
from kineograph.data.open_source import DataConfig
from kineograph.family.dalle2 import Decoder
from kineograph.family.dalle2.image_space import downsample
from kineograph.sample.limits import ClipLimits
from kineograph.sample.prime import read_prime

from .conftest import PLAIN, ToyClip, batch_of, prompts_of
from .test_decoder_sampling import Halves, cascade, draw


class RecordingClip(ToyClip):
    """Records the sizes of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, ...]] = []

    def embed_images(self, pixels, frame_mask=None):
        self.sizes.append(tuple(pixels.shape[-2:]))
        return super().embed_images(pixels, frame_mask)


def test_clip_reads_data_size_and_the_network_its_own(make, noise):
    clip = freeze(RecordingClip())
    task = make(stages={"clip": clip}, size=32, draws=16)
    seen = []
    task.network.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    task(batch_of(size=32), noise)
    assert clip.sizes == [(32, 32)] and seen == [(4, 3, 16, 16)]
    assert draw(task, prompts_of(2, captions=["a", "b"])).shape == (2, 1, 3, 16, 16)
    torch.testing.assert_close(
        task.space.encode_batch(batch_of(size=32)), downsample(batch_of(size=32).video[:, 0], (16, 16)) * 2 - 1
    )
    assert sample_shape(task, Shape(1, 32, 32, 3, 8.0)) == Shape(1, 16, 16, 3, 8.0)


def test_size_equal_to_data_size_changes_nothing(make, noise):
    a, b = make(size=16), make(size=16, draws=16)
    torch.testing.assert_close(a(batch_of(), noise).error, b(batch_of(), noise).error, rtol=0, atol=0)


def test_reference_images_are_antialiased(make):
    """Metrics compare samples with real images: both must be downsampled in the same way."""
    stripes = torch.zeros(1, 1, 3, 32, 32)
    stripes[..., ::2] = 1
    assert (make(size=32, draws=16).resize_reference(stripes) - 0.5).abs().max() < 0.2


def test_super_resolution_with_size(make, noise):
    task = make(size=64, draws=32, low_res_size=16, **PLAIN)
    assert draw(task, prompts_of(4, batch=batch_of(size=64))).shape == (4, 1, 3, 32, 32)
    small, _ = task.eval().make_low_res(task.resize_reference(batch_of(size=64).video)[:, 0], noise)
    assert small.shape == (4, 3, 32, 32)


def test_latents_with_size(make, noise):
    task = make(stages={"halves": Halves()}, size=32, draws=16, codec="halves", **PLAIN)
    assert task.space.grid == (8, 8) and task.space.encode_batch(batch_of(size=32)).shape == (4, 12, 8, 8)
    task(batch_of(size=32), noise)
    assert Decoder.cache_facts(task.config) == {"size": [16, 16]} and Decoder.cache_facts(make().config) == {}


def test_sizes_that_do_not_fit_the_data_are_refused(make):
    for size in (32, (16, 8)):
        with pytest.raises(ConfigError, match=r"size=\d+×\d+ does not fit data\.size=16×16: .*raise data\.size"):
            make(size=16, draws=size)
    with pytest.raises(ConfigError, match=r"low_res_size=16×16 is not smaller than size=16×16"):
        make(size=32, draws=16, low_res_size=16)
    with pytest.raises(InputError, match=r"trained for \(1, 16, 16\)"):
        draw(make(size=32, draws=16, **PLAIN), prompts_of(2, height=32, width=32))


def test_note_on_images_smaller_than_the_clip_input(make):
    clip = freeze(ToyClip())
    clip.picture_size = (32, 32)
    notes: list[str] = []
    make(stages={"clip": clip}, size=16, notes=notes)
    assert len(notes) == 1 and "clip=clip takes images of 32×32" in notes[0] and "raise data.size" in notes[0]
    notes.clear()
    make(stages={"clip": clip}, size=32, draws=16, notes=notes)
    assert notes == []


# Images to upscale -----------------------------------------------------------------------------------------------


def load_prime(task, prime, start=None):
    """As `kineo sample --prime` reads it."""
    options = task.config.sample.model_copy(update={"start": start})
    data = DataConfig(size=(32, 32))
    return read_prime(prime, ClipLimits(task, "dalle2", task.shape), data, 1, None, options, lambda line: None)


def test_small_image_is_not_resized(make, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "small.png")
    _, middle, large = cascade(make)
    seen = []
    middle.network.register_forward_pre_hook(lambda m, a, k: seen.append(k["low_res"]), with_kwargs=True)
    large.network.register_forward_pre_hook(lambda m, a, k: seen.append(k["low_res"]), with_kwargs=True)
    frames = load_prime(large, tmp_path / "small.png").frames  # resizing twice would change it
    assert torch.equal(frames[0], torch.from_numpy(pixels).permute(2, 0, 1).float() / 255)
    draw(large, prompts_of(1, prime=frames[None]))
    expected = torch.nn.functional.interpolate(frames * 2 - 1, (32, 32), mode="bicubic", antialias=True)
    torch.testing.assert_close(seen[0], expected)


def test_prime_has_the_size_of_the_stage_that_starts(make):
    """8 → 16 → 32: the middle stage upscales 8 pixels."""
    _, middle, large = cascade(make)
    assert large.prime_size(large.config.sample) == (16, 16)
    prime = torch.rand(1, 3, 8, 8)
    frames = load_prime(large, prime, "middle").frames
    assert torch.equal(frames, prime)
    seen = []
    middle.network.register_forward_pre_hook(lambda m, a, k: seen.append(k["low_res"]), with_kwargs=True)
    draw(large, prompts_of(1, prime=frames[None]), start="middle")
    torch.testing.assert_close(
        seen[0], torch.nn.functional.interpolate(prime * 2 - 1, (16, 16), mode="bicubic", antialias=True)
    )
    with pytest.raises(InputError, match=r"sample\.start=nowhere is no super-resolution stage"):
        load_prime(large, prime, "nowhere")
