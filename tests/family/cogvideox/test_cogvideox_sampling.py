"""Clips from noise: solvers and guidance, given frames, first frames, padding, other sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kineograph.core.batch import Prompts
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.noise import Noise
from kineograph.family.cogvideox import CogVideoX, CogVideoXSample
from kineograph.family.cogvideox.sampling import sample_latents

from .conftest import CAPTIONS, Make, ToyCodec, clips

NOISE = Noise.for_rows(1, 0, 2)
ASKED = Prompts(NOISE, captions=CAPTIONS[:2])


def options(**keys: Any) -> CogVideoXSample:
    return CogVideoXSample(**{"steps": 4, "guidance": 2.0, **keys})


def knowing(task: CogVideoX, x0: Tensor) -> CogVideoX:
    """A stage whose network knows the answer: v that leads to x0 from anywhere."""

    def predict(x_t: Tensor, t: Tensor, text: Tensor, image: Tensor | None = None) -> Tensor:
        target = x0.repeat(len(x_t) // len(x0), 1, 1, 1, 1)
        kept = torch.tensor(task.diffusion.alpha_bar)[t].view(-1, 1, 1, 1, 1).float()
        return (kept.sqrt() * x_t - target) / (1 - kept).sqrt()

    task.predict = predict  # type: ignore[method-assign]
    return task


@pytest.mark.parametrize("solver", ["ddim", "dpm_solver", "dpm_solver_sde"])
@pytest.mark.parametrize("schedule", ["constant", "cosine", "oscillating"])
def test_every_solver_and_guidance_reaches_what_the_network_knows(make: Make, solver: str, schedule: str) -> None:
    real = clips(2).video
    task = knowing(make(), ToyCodec().encode(real))
    found = task.sample(ASKED, options(solver=solver, guidance_schedule=schedule))
    assert torch.allclose(found, ToyCodec().decode(ToyCodec().encode(real)), atol=1e-4)


def test_samples_are_clips_and_repeat(make: Make) -> None:
    task = make().eval()
    one, two = (task.sample(ASKED, options()) for _ in range(2))
    assert one.shape == (2, 9, 1, 8, 8)
    assert torch.equal(one, two)
    assert one.min() >= 0 and one.max() <= 1
    alone = task.sample(replace(ASKED, noise=NOISE.rows(1, 2), captions=CAPTIONS[1:2]), options())
    assert torch.allclose(alone, one[1:], atol=1e-5)  # a sample does not depend on what is drawn beside it


def test_guidance_runs_both_halves_in_one_call(make: Make) -> None:
    task = make().eval()
    rows: list[int] = []
    forward = task.network.forward
    task.network.forward = lambda x, *rest: rows.append(len(x)) or forward(x, *rest)  # type: ignore[method-assign]
    guided = task.sample(ASKED, options(guidance=3.0))
    assert rows == [4] * 4
    rows.clear()
    plain = task.sample(ASKED, options(guidance=1.0))
    assert rows == [2] * 4
    assert not torch.allclose(guided, plain)
    rows.clear()
    task.sample(Prompts(NOISE), options())  # nothing is asked for
    assert rows == [2] * 4


def test_a_caption_and_a_negative_one_change_the_clip(make: Make) -> None:
    task = make().eval()
    found = task.sample(ASKED, options())
    assert not torch.allclose(found, task.sample(replace(ASKED, captions=CAPTIONS[2:]), options()))
    assert not torch.allclose(found, task.sample(replace(ASKED, negative=CAPTIONS[2:]), options()))


def test_other_frames_and_sizes_can_be_drawn(make: Make) -> None:
    task = make().eval()
    found = task.sample(replace(ASKED, frames=5, height=12, width=4), options())
    assert found.shape == (2, 5, 1, 12, 4)
    with pytest.raises(ConfigError, match=r"frames=6 .* 4k\+1"):
        task.sample(replace(ASKED, frames=6), options())


def test_padding_in_time_is_noise_at_first_and_dropped_at_last(make: Make) -> None:
    task = make(patch_time=2, grid="slice").eval()
    seen: list[Tensor] = []
    predict = task.predict
    task.predict = lambda x, *rest: seen.append(x) or predict(x, *rest)  # type: ignore[method-assign]
    found = sample_latents(task, ASKED, options(guidance=1.0))
    assert found.shape[1] == 3 and seen[0].shape[1] == 4
    assert not torch.equal(seen[0][:, 0], seen[0][:, 1])
    assert task.sample(ASKED, options()).shape[1] == 9


@pytest.mark.parametrize("patch_time", [1, 2])
def test_a_clip_goes_on_from_given_frames(make: Make, patch_time: int) -> None:
    task = make(patch_time=patch_time, grid="slice").eval()
    prime = clips(2).video[:, :5]
    asked = replace(ASKED, prime=prime)
    found = task.sample(asked, options())
    assert torch.equal(found[:, :5], prime)
    latents = sample_latents(task, asked, options())
    assert torch.allclose(latents[:, :2], ToyCodec().encode(prime))
    other = task.sample(replace(asked, prime=1 - prime), options())
    assert not torch.allclose(found[:, 5:], other[:, 5:])  # what follows knows what was given
    assert not torch.allclose(found, task.sample(asked, options(resample=2)))


def test_given_frames_must_fit(make: Make) -> None:
    task = make()
    for frames, error, message in ((3, ConfigError, r"4k\+1"), (9, InputError, "give fewer")):
        with pytest.raises(error, match=message):
            task.sample(replace(ASKED, prime=torch.rand(2, frames, 1, 8, 8)), options())
    with pytest.raises(InputError, match="resize it"):
        task.sample(replace(ASKED, prime=torch.rand(2, 1, 1, 4, 8)), options())


def test_image_to_video_starts_from_a_picture(make: Make) -> None:
    task = make(first_frame=True).eval()
    prime = clips(2).video[:, :1]
    seen: list[Tensor] = []
    predict = task.predict
    task.predict = lambda x, t, text, image: seen.append(image) or predict(x, t, text, image)  # type: ignore[method-assign]
    found = task.sample(replace(ASKED, prime=prime), options())
    assert torch.equal(found[:, :1], prime)
    image = seen[0]
    assert len(image) == 4 and torch.equal(image[:2], image[2:])  # guidance is by text alone
    assert (image[:2, 0] - ToyCodec().encode(prime)[:, 0]).abs().max() < 0.2 and not image[:, 1:].any()
    assert not torch.allclose(found[:, 1:], task.sample(replace(ASKED, prime=1 - prime), options())[:, 1:])
    seen.clear()
    task.sample(ASKED, options())
    assert not seen[0].any()  # no picture: as on the training clips that were shown none
    seen.clear()
    task.sample(replace(ASKED, batch=clips(2)), options())
    assert seen[0].any()  # while training, the validation clip's first frame


def test_a_model_that_learned_it_reads_the_clip_that_goes_on(make: Make) -> None:
    prime = clips(2).video[:, :5]
    seen: list[Tensor] = []
    for share, read in ((0.0, 1), (0.5, 2)):
        task = make(first_frame=True, image={"clip": share}).eval()
        predict = task.predict
        task.predict = lambda x, t, text, image, predict=predict: seen.append(image) or predict(x, t, text, image)
        found = task.sample(replace(ASKED, prime=prime), options())
        assert torch.equal(found[:, :5], prime)
        assert seen[-1].flatten(2).any(-1).sum(1).tolist() == [read] * 4
    torch.testing.assert_close(seen[-1][:2, :2], ToyCodec().encode(prime))
