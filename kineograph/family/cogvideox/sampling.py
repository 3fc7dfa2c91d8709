"""Clips from noise: from a caption, from a caption and a first frame, or going on from given frames."""

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
def draw(task: CogVideoX, prompts: Prompts, options: CogVideoXSample) -> Tensor:
    """B T C H W in [0, 1]. What is given as `prompts.prime` stands at the beginning as it is."""
    prime = _checked(task, prompts)
    pixels = task.space.decode(draw_latents(task, prompts, options))
    if prime is not None:  # a codec changes what it only passes on
        pixels = torch.cat([prime.to(pixels.dtype), pixels[:, prime.shape[1] :]], dim=1)
    if pixels.is_cuda:
        torch.cuda.empty_cache()  # a decoder's maps are larger than anything in training: others may need the room
    return pixels.clamp(0, 1)


@torch.no_grad()
def draw_latents(task: CogVideoX, prompts: Prompts, options: CogVideoXSample) -> Tensor:
    """B t c h w, scaled, without padding: what `draw` decodes."""
    space, noise, prime = task.space, prompts.noise, _checked(task, prompts)
    frames, height, width = _size(task, prompts)
    t, h, w = space.shape_for(frames, height, width)
    padding = space.padding(t)
    shape = (t + padding, space.channels, h, w)
    wanted, other = task.texts.of_prompts(prompts)
    guide = other is not None and options.uses_guidance
    text = torch.cat([wanted, other]) if guide and other is not None else wanted
    x = noise.normal(f"start {shape}", *shape)
    image = space.shown(_first_frame(task, prompts, prime), padding, x)
    if image is not None and guide:
        image = torch.cat([image, image])

    x0 = solve(
        task.diffusion,
        lambda x, t: task.predict(x, t, text, image),
        x,
        options,
        noise=lambda number: noise.normal(f"step {number} {shape}", *shape),
        guide=guide,
        inpaint=_known(task, prime, x, padding, options),
    )
    return x0[:, padding:]


def _size(task: CogVideoX, prompts: Prompts) -> tuple[int, int, int]:
    return prompts.frames or task.shape.frames, prompts.height or task.shape.height, prompts.width or task.shape.width


def _checked(task: CogVideoX, prompts: Prompts) -> Tensor | None:
    """The given frames, if a clip can begin with them."""
    prime = prompts.prime
    frames, height, width = _size(task, prompts)
    if prime is None:
        return None
    if prime.shape[0] != len(prompts) or tuple(prime.shape[3:]) != (height, width):
        raise InputError(
            f"prime has shape {tuple(prime.shape)}, and {len(prompts)} clips of {height} × {width} pixels are to be drawn: make them alike"
        )
    if prime.shape[1] >= frames:
        raise InputError(
            f"prime has {prime.shape[1]} frames and {frames} are drawn: give fewer (its last ones), so that something is left to draw"
        )
    task.shape_for(prime.shape[1], height, width)
    return prime


def _first_frame(task: CogVideoX, prompts: Prompts, prime: Tensor | None) -> Tensor | None:
    """Latents of the picture that an image-to-video model starts from: of what is given, or of a real clip beside the prompt. Of all given
    frames, where it was trained to go on from clips."""
    if not task.config.first_frame:
        return None
    if prime is not None and prime.shape[1] > 1 and task.config.image.clip:
        return task.space.clip(prime)
    if prime is not None:
        pixels = prime[:, :1]
    elif prompts.batch is not None and prompts.batch.pixels is not None:
        pixels = prompts.batch.video[:, :1]
    else:
        return None  # as trained on the share of clips that showed none
    return task.space.image(pixels, prompts.noise, training=False)


def _known(task: CogVideoX, prime: Tensor | None, x: Tensor, padding: int, options: CogVideoXSample) -> Inpaint | None:
    """Latents of the given frames hold at every step. A single first frame of image to video is what the network reads already."""
    if prime is None or (task.config.first_frame and prime.shape[1] == 1):
        return None
    given = task.space.encode(prime)  # B k c h w
    known = torch.zeros_like(x)
    known[:, padding : padding + given.shape[1]] = given
    known[:, :padding] = given[:, :1]
    mask = torch.zeros(1, x.shape[1], 1, 1, 1, dtype=torch.bool, device=x.device)
    mask[:, : padding + given.shape[1]] = True
    return Inpaint(known, mask, options.resample)
