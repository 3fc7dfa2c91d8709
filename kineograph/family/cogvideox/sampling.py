"""Sampling: from a caption, from a caption and a first frame, or continuing given frames."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kineograph.core.batch import Prompts
from kineograph.core.errors import InputError
from kineograph.family.cogvideox.config import CogVideoXSample
from kineograph.process.solvers import Inpaint, solve

if TYPE_CHECKING:
    from kineograph.family.cogvideox.task import CogVideoX


@torch.no_grad()
def sample_clips(task: CogVideoX, prompts: Prompts, options: CogVideoXSample) -> Tensor:
    """B T C H W in [0, 1]. Clips begin with the frames of `prompts.prime` unchanged."""
    prime = _check_prime(task, prompts)
    pixels = task.space.decode(sample_latents(task, prompts, options))
    if prime is not None:  # the codec's reconstruction would differ
        pixels = torch.cat([prime.to(pixels.dtype), pixels[:, prime.shape[1] :]], dim=1)
    if pixels.is_cuda:
        torch.cuda.empty_cache()  # the decoder's feature maps are larger than anything in training
    return pixels.clamp(0, 1)


@torch.no_grad()
def sample_latents(task: CogVideoX, prompts: Prompts, options: CogVideoXSample) -> Tensor:
    """Scaled latents B t c h w without padding."""
    space, noise, prime = task.space, prompts.noise, _check_prime(task, prompts)
    frames, height, width = _clip_size(task, prompts)
    t, h, w = space.shape_for(frames, height, width)
    padding = space.padding(t)
    shape = (t + padding, space.channels, h, w)
    wanted, other = task.texts.encode_prompts(prompts)
    guide = other is not None and options.uses_guidance
    text = torch.cat([wanted, other]) if guide and other is not None else wanted
    x = noise.normal(f"start {shape}", *shape)
    image = space.build_condition(_first_frame(task, prompts, prime), padding, x)
    if image is not None and guide:
        image = torch.cat([image, image])

    x0 = solve(
        task.diffusion,
        lambda x, t: task.predict(x, t, text, image),
        x,
        options,
        noise=lambda number: noise.normal(f"step {number} {shape}", *shape),
        guide=guide,
        inpaint=_build_inpaint(task, prime, x, padding, options),
    )
    return x0[:, padding:]


def _clip_size(task: CogVideoX, prompts: Prompts) -> tuple[int, int, int]:
    return prompts.frames or task.shape.frames, prompts.height or task.shape.height, prompts.width or task.shape.width


def _check_prime(task: CogVideoX, prompts: Prompts) -> Tensor | None:
    """Refuse given frames that do not fit the clips."""
    prime = prompts.prime
    frames, height, width = _clip_size(task, prompts)
    if prime is None:
        return None
    if prime.shape[0] != len(prompts) or tuple(prime.shape[3:]) != (height, width):
        raise InputError(
            f"prime has shape {tuple(prime.shape)}, and {len(prompts)} clips of {height} × {width} pixels are sampled: resize it"
        )
    if prime.shape[1] >= frames:
        raise InputError(f"prime has {prime.shape[1]} frames and clips have {frames}: give fewer frames, the last ones")
    task.shape_for(prime.shape[1], height, width)
    return prime


def _first_frame(task: CogVideoX, prompts: Prompts, prime: Tensor | None) -> Tensor | None:
    """The image-to-video condition: the given frame, or the first frame of the real clip beside the prompt; all given frames
    if the model was trained to continue clips."""
    if not task.config.first_frame:
        return None
    if prime is not None and prime.shape[1] > 1 and task.config.image.clip:
        return task.space.encode_prefix(prime)
    if prime is not None:
        pixels = prime[:, :1]
    elif prompts.batch is not None and prompts.batch.pixels is not None:
        pixels = prompts.batch.video[:, :1]
    else:
        return None  # unconditional, as in image dropout
    return task.space.encode_first_frame(pixels, prompts.noise, training=False)


def _build_inpaint(
    task: CogVideoX, prime: Tensor | None, x: Tensor, padding: int, options: CogVideoXSample
) -> Inpaint | None:
    """Fix the latents of given frames at every step. An image-to-video model already reads a single first frame."""
    if prime is None or (task.config.first_frame and prime.shape[1] == 1):
        return None
    latents = task.space.encode(prime)  # B k c h w
    known = torch.zeros_like(x)
    known[:, padding : padding + latents.shape[1]] = latents
    known[:, :padding] = latents[:, :1]
    mask = torch.zeros(1, x.shape[1], 1, 1, 1, dtype=torch.bool, device=x.device)
    mask[:, : padding + latents.shape[1]] = True
    return Inpaint(known, mask, options.resample)
