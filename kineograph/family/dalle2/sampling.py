"""Pictures from noise: one U-Net of the cascade at a time, each from the picture that the one below drew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from kineograph.core.batch import Prompts
from kineograph.core.errors import InputError, NotTrained
from kineograph.core.noise import Noise, key_of
from kineograph.family.dalle2.config import DecoderSample
from kineograph.family.dalle2.latents import inward
from kineograph.family.dalle2.low_res import add_noise, enlarge, shrink
from kineograph.process.solvers import Inpaint, dynamic_clip, solve, static_clip
from kineograph.text.clip_embedding import IMAGE

if TYPE_CHECKING:
    from kineograph.family.dalle2.task import Decoder


@torch.no_grad()
def draw(task: Decoder, prompts: Prompts, options: DecoderSample) -> Tensor:
    """B C H W in [0, 1]."""
    _check(task, prompts, options)
    wanted, other = task.conditioner.of_prompts(prompts, task.prior)
    low_res, level = _low_res(task, prompts, options)
    guide = other is not None and options.uses_guidance
    both = wanted.join(other) if guide and other is not None else wanted

    def rows(value: Tensor) -> Tensor:
        return torch.cat([value, value]) if guide else value

    low_res = rows(low_res) if low_res is not None else None
    given = task.network.prepare(both, rows(level) if level is not None else None)
    noise, shape = _own_noise(task, prompts), (task.space.channels, *task.space.grid)
    start = noise.normal("start", *shape)
    recalled = [torch.zeros_like(start) if task.config.self_conditioning else None]

    def denoise(x: Tensor, t: Tensor) -> Tensor:
        previous = rows(recalled[0]) if recalled[0] is not None else None
        return task.network(
            x, t, mask=given.mask, low_res=low_res, previous=previous, added=given.added, memory=given.memory
        )

    limit = _limit(task, options)

    def clip(x0: Tensor) -> Tensor:
        x0 = limit(x0)
        if recalled[0] is not None:
            recalled[0] = task.in_range(x0)  # the prediction of a step, as training shows it to the next
        return x0

    x0 = solve(
        task.diffusion,
        denoise,
        start,
        options,
        noise=lambda number: noise.normal(f"step {number}", *shape),
        guide=guide,
        clip=clip,
        inpaint=_inpaint(task, prompts, options),
    )
    pixels = task.space.decode(x0)
    if prompts.mask is not None and prompts.prime is not None:  # a codec changes what it only passes on
        pixels = torch.where(prompts.mask[:, None], pixels, prompts.prime[:, 0])
    return pixels


def _own_noise(task: Decoder, prompts: Prompts) -> Noise:
    """The draws of this U-Net: those of a cascade's others are independent of them, and the same whichever of them is asked."""
    noise = prompts.noise
    return Noise(key_of(noise.seed, task.name), noise.step, noise.slots)


def _check(task: Decoder, prompts: Prompts, options: DecoderSample) -> None:
    shape = task.shape
    asked = (prompts.frames or 1, prompts.height or shape.height, prompts.width or shape.width)
    if asked != (1, shape.height, shape.width):
        raise InputError(
            f"frames × height × width = {asked} cannot be drawn: this decoder was trained for {(1, shape.height, shape.width)}"
        )
    if prompts.mask is not None and prompts.prime is None:
        raise InputError(
            "a mask says which part of a picture is drawn anew, and there is no picture: give one with --prime"
        )
    if prompts.prime is not None and prompts.mask is None and not task.can_upscale():
        raise InputError(
            "this decoder draws from noise: a given picture needs a mask of what is drawn anew (--mask), or a super-resolution stage"
        )
    if options.low_res_noise > task.config.augment.noise:
        raise InputError(
            f"sample.low_res_noise={options.low_res_noise} is more than this stage saw in training: augment.noise={task.config.augment.noise}"
        )
    if options.start is not None and prompts.prime is None:
        raise InputError(
            f"sample.start={options.start} says which stage enlarges a given picture first: give one with --prime"
        )


def _limit(task: Decoder, options: DecoderSample) -> Callable[[Tensor], Tensor]:
    """Pixels have a range; latents have none."""
    if options.clip == "none" or task.config.codec is not None:
        return lambda x0: x0
    return static_clip() if options.clip == "static" else dynamic_clip(options.clip_quantile)


def describe_start(task: Decoder, prompts: Prompts) -> str | None:
    """What a label says; None where a caption is read as text, and nothing else is."""
    source, _ = task.conditioner.image_source(prompts, task.prior)
    name = task.config.prior
    untrained = f" (prior={name} is not trained)" if name is not None and prompts.captions is not None else ""
    told: list[str | None] = [
        {
            "prior": f"captions, through prior={name}",
            "embedding": f"{IMAGE} of the data{untrained}",
            "caption": "captions, their CLIP embeddings taken for images'",
            "picture": f"the real pictures' CLIP embeddings{untrained}",
            "nothing": None,
        }[source]
    ]
    if task.can_upscale() and prompts.prime is None:
        below = _below(task, prompts)
        size = " × ".join(map(str, task.config.low_res_size or ()))
        told.insert(0, f"real pictures made smaller, {size}" if below is None else below.describe_start(prompts))
    return "; ".join(part for part in dict.fromkeys(told) if part is not None) or None


# The smaller picture ---------------------------------------------------------------------------------------------


def _low_res(task: Decoder, prompts: Prompts, options: DecoderSample) -> tuple[Tensor | None, Tensor | None]:
    """Laid over the grid, B C h w in [−1, 1], and the noise in it, B."""
    if not task.can_upscale():
        return None, None
    small = inward(_small_picture(task, prompts, options))
    level = torch.full((len(small),), options.low_res_noise, device=small.device)
    if options.low_res_noise:
        small = add_noise(small, level, _own_noise(task, prompts))
    return enlarge(small, task.space.grid), level


def _small_picture(task: Decoder, prompts: Prompts, options: DecoderSample) -> Tensor:
    """B C h w in [0, 1]: made of a given picture, or drawn by the stage below, or made of a real sample beside the prompt."""
    size = task.config.low_res_size
    assert size is not None
    enlarged = prompts.prime is not None and prompts.mask is None
    if enlarged and options.start is None:
        assert prompts.prime is not None
        return shrink(prompts.prime[:, 0], size)  # as `prime_size` asks for it, it is that size
    real = prompts.batch.pixels if prompts.batch is not None else None
    below = _below(task, prompts)
    if below is not None:
        return _drawn_below(task, below, prompts, options, size)
    if real is None or prompts.prime is not None:
        raise InputError(
            "this super-resolution stage has no low_res stage that draws the smaller picture: "
            + (
                "redraw parts (--mask) with one that has"
                if prompts.mask is not None
                else "give a picture to enlarge with --prime"
            )
        )
    return shrink(task.resize_reference(real.float() / 255)[:, 0], size)


def _below(task: Decoder, prompts: Prompts) -> Decoder | None:
    """The stage that draws the smaller picture; None: there is none, or it is not trained and a real picture is at hand."""
    try:
        return task.lower_decoder()
    except NotTrained:  # pictures while this stage trains are made of real ones
        if prompts.batch is None or prompts.batch.pixels is None or prompts.prime is not None:
            raise
        return None


def _drawn_below(
    task: Decoder, below: Decoder, prompts: Prompts, options: DecoderSample, size: tuple[int, int]
) -> Tensor:
    name = task.config.low_res
    if (below.shape.height, below.shape.width) != size:
        raise InputError(
            f"low_res={name} draws {below.shape.height}×{below.shape.width} and low_res_size is {size[0]}×{size[1]}: make them alike"
        )
    prime, mask = prompts.prime, prompts.mask
    chosen = below.config.sample
    own = task.config
    if not (own.reads_images or own.reads_text) and options.guidance != own.sample.guidance:
        chosen = chosen.model_copy(
            update={"guidance": options.guidance}
        )  # asked for here, where there is nothing to guide
    if (
        prime is not None and mask is None
    ):  # enlarged first by the stage below, or by one below that: in the size that it has
        chosen = chosen.model_copy(update={"start": _start_below(task, below, options)})
    if prime is not None and mask is not None:
        prime, mask = shrink(prime[:, 0], size)[:, None], _coarser(mask, size)
    inner = replace(prompts, prime=prime, mask=mask, height=None, width=None)
    return below.sample(inner, chosen)[:, 0]


def prime_size(task: Decoder, options: DecoderSample) -> tuple[int, int] | None:
    """A given picture comes in the size of what the U-Net that enlarges it first reads: more pixels would be made up, and lost again."""
    if options.start is None or not task.can_upscale():
        return task.config.low_res_size
    below = task.lower_decoder()
    if below is None:
        raise _no_start(options)
    return below.prime_size(below.config.sample.model_copy(update={"start": _start_below(task, below, options)}))


def _start_below(task: Decoder, below: Decoder, options: DecoderSample) -> str | None:
    """`sample.start` as the stage below is told it."""
    if not below.can_upscale():
        raise _no_start(options)
    return None if options.start == task.config.low_res else options.start


def _no_start(options: DecoderSample) -> InputError:
    return InputError(
        f"sample.start={options.start} is no super-resolution stage of this cascade: leave it out to start at the last"
    )


# Inpainting ------------------------------------------------------------------------------------------------------


def _inpaint(task: Decoder, prompts: Prompts, options: DecoderSample) -> Inpaint | None:
    if prompts.mask is None or prompts.prime is None:
        return None
    kept = ~_coarser(prompts.mask, task.space.grid)[:, None]  # B 1 h w
    return Inpaint(task.space.encode(prompts.prime[:, 0]), kept, options.resample)


def _coarser(mask: Tensor, size: tuple[int, int]) -> Tensor:
    """B H W → B h w: a place is drawn anew where any of its pixels is."""
    return F.adaptive_max_pool2d(mask[:, None].float(), size)[:, 0] > 0
