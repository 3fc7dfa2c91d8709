"""Sampling of a cascade: each U-Net samples an image, conditioned on the image of the stage below; upscaling; inpainting."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kineograph.core.batch import Prompts
from kineograph.core.errors import InputError, NotTrained
from kineograph.family.dalle2.config import DecoderSample
from kineograph.family.dalle2.image_space import Size, add_noise, downsample, normalize, upsample
from kineograph.process.solvers import Clip, Inpaint, dynamic_clip, find_first_timestep, solve, static_clip
from kineograph.text.clip_embedding import IMAGE

if TYPE_CHECKING:
    from kineograph.family.dalle2.task import Decoder


@torch.no_grad()
def sample_images(task: Decoder, prompts: Prompts, options: DecoderSample) -> Tensor:
    """B C H W in [0, 1]."""
    _check_request(task, prompts, options)
    positive, negative = task.conditioner.encode_prompts(prompts, task.load_prior)
    low_res, level = _build_low_res(task, prompts, options)
    guide = negative is not None and options.uses_guidance
    condition = positive.concat(negative) if guide and negative is not None else positive

    def repeat_rows(value: Tensor | None) -> Tensor | None:
        return torch.cat([value, value]) if guide and value is not None else value

    low_res = repeat_rows(low_res)
    prepared = task.network.prepare(condition, repeat_rows(level))
    # Keyed by the stage: independent of the other stages, and the same alone and in a cascade.
    noise, shape = prompts.noise.keyed_by(task.name), (task.space.channels, *task.space.grid)
    start = noise.normal("start", *shape)
    previous = torch.zeros_like(start) if task.config.self_conditioning else None

    def denoise(x: Tensor, t: Tensor) -> Tensor:
        return task.network(x, t, low_res=low_res, previous=repeat_rows(previous), **prepared._asdict())

    def keep_previous(x0: Tensor) -> Tensor:
        """Clip x̂0, and keep it for self-conditioning."""
        nonlocal previous
        x0 = x0 if clip is None else clip(x0)
        previous = task.clamp_x0(x0)
        return x0

    clip = _make_clip(task, options)
    x0 = solve(
        task.diffusion,
        denoise,
        start,
        options.model_copy(update={"clip": "none"}),  # `clip` instead
        noise=lambda number: noise.normal(f"step {number}", *shape),
        guide=guide,
        clip=keep_previous if task.config.self_conditioning else clip,
        inpaint=_build_inpaint(task, prompts, options),
        first=find_first_timestep(task.diffusion, options.steps) if clip is None else None,
    )
    pixels = task.space.decode(x0)
    if prompts.mask is not None and prompts.prime is not None:  # the codec's reconstruction would differ
        pixels = torch.where(prompts.mask[:, None], pixels, prompts.prime[:, 0])
    return pixels


def _check_request(task: Decoder, prompts: Prompts, options: DecoderSample) -> None:
    shape = task.shape
    size = (prompts.frames or 1, prompts.height or shape.height, prompts.width or shape.width)
    if size != (1, shape.height, shape.width):
        raise InputError(
            f"frames × height × width = {size} cannot be drawn: this decoder was trained for {(1, shape.height, shape.width)}"
        )
    if options.low_res_noise > task.config.augment.noise:
        raise InputError(
            f"sample.low_res_noise={options.low_res_noise} is above augment.noise={task.config.augment.noise}, the most in training: lower it"
        )
    if options.start is not None and prompts.prime is None:
        raise InputError(f"sample.start={options.start} needs an image to upscale: give one with --prime")


def _make_clip(task: Decoder, options: DecoderSample) -> Clip | None:
    """The clip of the options; None for latents, which have no range."""
    if options.clip == "none" or task.config.codec is not None:
        return None
    return static_clip() if options.clip == "static" else dynamic_clip(options.clip_quantile)


def describe_start(task: Decoder, prompts: Prompts) -> str | None:
    """The label of evaluation: sources of images and embeddings; None for captions as text, or noise alone."""
    source, _ = task.conditioner.find_image_source(prompts, task.load_prior)
    name = task.config.prior
    skipped = name is not None and prompts.captions is not None and not prompts.from_items
    untrained = f" (prior={name} is not trained)" if skipped else ""
    labels: list[str | None] = [
        {
            "prior": f"captions, through prior={name}",
            "embedding": f"{IMAGE} of the data{untrained}",
            "caption": "captions, their CLIP embeddings taken for images'",
            "picture": f"the real pictures' CLIP embeddings{untrained}",
            "nothing": None,
        }[source]
    ]
    if task.can_upscale() and prompts.prime is None:
        lower = _find_lower(task, prompts)
        size = " × ".join(map(str, task.config.low_res_size or ()))
        labels.insert(0, f"real pictures made smaller, {size}" if lower is None else lower.describe_start(prompts))
    return "; ".join(label for label in dict.fromkeys(labels) if label is not None) or None


# The low-resolution image ----------------------------------------------------------------------------------------


def _build_low_res(task: Decoder, prompts: Prompts, options: DecoderSample) -> tuple[Tensor | None, Tensor | None]:
    """→ the low-resolution image upsampled to the grid, B C h w in [−1, 1], and its noise level, B"""
    if not task.can_upscale():
        return None, None
    low_res = normalize(_get_low_res_image(task, prompts, options))
    level = torch.full((len(low_res),), options.low_res_noise, device=low_res.device)
    if options.low_res_noise:
        low_res = add_noise(low_res, level, prompts.noise.keyed_by(task.name))
    return upsample(low_res, task.space.grid), level


def _get_low_res_image(task: Decoder, prompts: Prompts, options: DecoderSample) -> Tensor:
    """B C h w in [0, 1]: the given image, one sampled by the stage below, or the real sample beside the prompt."""
    size = task.config.low_res_size
    assert size is not None
    if prompts.prime is not None and prompts.mask is None and options.start is None:
        return downsample(prompts.prime[:, 0], size)
    lower = _find_lower(task, prompts)
    if lower is not None:
        return _sample_lower(task, lower, prompts, options, size)
    if prompts.batch is None or prompts.batch.pixels is None or prompts.prime is not None:
        remedy = (
            "give a picture to upscale with --prime" if prompts.mask is None else "inpaint with a stage that has one"
        )
        raise InputError(f"this super-resolution stage names no low_res stage to sample the smaller image: {remedy}")
    return downsample(task.resize_reference(prompts.batch.video)[:, 0], size)


def _find_lower(task: Decoder, prompts: Prompts) -> Decoder | None:
    """The stage below; None if the config names none, or if a real sample replaces its image: as asked, or since it is not trained yet."""
    if prompts.from_items and prompts.batch is not None and prompts.batch.pixels is not None and prompts.prime is None:
        return None
    try:
        return task.load_lower_decoder()
    except NotTrained:
        if prompts.batch is None or prompts.batch.pixels is None or prompts.prime is not None:
            raise
        return None


def _sample_lower(task: Decoder, lower: Decoder, prompts: Prompts, options: DecoderSample, size: Size) -> Tensor:
    config, lower_size = task.config, (lower.shape.height, lower.shape.width)
    if lower_size != size:
        raise InputError(
            f"low_res={config.low_res} draws {lower_size[0]}×{lower_size[1]} and low_res_size is {size[0]}×{size[1]}: make them equal"
        )
    changes: dict[str, Any] = {}
    # A stage without conditions passes the requested guidance down.
    if not (config.reads_images or config.reads_text) and options.guidance != config.sample.guidance:
        changes["guidance"] = options.guidance
    prime, mask = prompts.prime, prompts.mask
    if prime is not None and mask is None:
        changes["start"] = _get_lower_start(task, lower, options)
    if prime is not None and mask is not None:
        prime, mask = downsample(prime[:, 0], size)[:, None], _downsample_mask(mask, size)
    lower_prompts = replace(prompts, prime=prime, mask=mask, height=None, width=None)
    return lower.sample(lower_prompts, lower.config.sample.model_copy(update=changes))[:, 0]


def prime_size(task: Decoder, options: DecoderSample) -> Size | None:
    """The size of a given image: the low-resolution size of the stage that upscales it first."""
    if options.start is None or not task.can_upscale():
        return task.config.low_res_size
    lower = task.load_lower_decoder()
    start = _get_lower_start(task, lower, options)
    assert lower is not None
    return lower.prime_size(lower.config.sample.model_copy(update={"start": start}))


def _get_lower_start(task: Decoder, lower: Decoder | None, options: DecoderSample) -> str | None:
    """`sample.start` for the stage below; None if it is the one that starts."""
    if lower is None or not lower.can_upscale():
        raise InputError(
            f"sample.start={options.start} is no super-resolution stage of this cascade: remove it to start at the last stage"
        )
    return None if options.start == task.config.low_res else options.start


# Inpainting ------------------------------------------------------------------------------------------------------


def _build_inpaint(task: Decoder, prompts: Prompts, options: DecoderSample) -> Inpaint | None:
    if prompts.mask is None or prompts.prime is None:
        return None
    known = ~_downsample_mask(prompts.mask, task.space.grid)[:, None]  # B 1 h w
    return Inpaint(task.space.encode(prompts.prime[:, 0]), known, options.resample)


def _downsample_mask(mask: Tensor, size: Size) -> Tensor:
    """B H W → B h w, True where any pixel is."""
    return F.adaptive_max_pool2d(mask[:, None].float(), size)[:, 0] > 0
