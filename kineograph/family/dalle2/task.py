"""DALL-E 2's decoder as a stage: one U-Net of a cascade, its training and its pictures."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from kineograph.core.batch import Batch, Prompts, Shape
from kineograph.core.capabilities import (
    ChecksPrecision,
    DescribesStart,
    HasSampleSize,
    RoutesCaptions,
    SupportsCaching,
    SupportsInpainting,
    SupportsSampling,
    SupportsUpscaling,
)
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.noise import Noise, key_of
from kineograph.core.protocols import TextEncoder
from kineograph.core.task import BuildContext, Loss, Mean, Task
from kineograph.family.dalle2 import sampling
from kineograph.family.dalle2.conditioning import Conditioner, Prior
from kineograph.family.dalle2.config import DecoderConfig, DecoderSample
from kineograph.family.dalle2.latents import Latents, Pixels, inward
from kineograph.family.dalle2.low_res import cut, enlarge, shrink, spoil
from kineograph.family.dalle2.network import Condition, DecoderNetwork
from kineograph.process.diffusion import Diffusion
from kineograph.text.clip_embedding import ClipEmbedder
from kineograph.text.conditioning import compute_cached_text


@dataclass
class Scored:
    """Of each sample, B."""

    error: Tensor
    bound: Tensor | None  # of the variational bound; None where the variance is not learned


class Scores(nn.Module):
    """How wrong an output is; a module so that it can be compiled into a kernel or two."""

    def __init__(self, diffusion: Diffusion) -> None:
        super().__init__()
        self.diffusion = diffusion

    def forward(self, output: Tensor, x0: Tensor, eps: Tensor, x_t: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
        error = self.diffusion.squared_error(output, x0, eps, t)
        learned = self.diffusion.config.learned_variance
        return error, self.diffusion.variational_bound(output, x0, x_t, t) if learned else None


def _drawn(config: DecoderConfig, data: Shape) -> Shape:
    """What is drawn, of data of this shape."""
    if config.size is None:
        return data
    height, width = config.size
    if height > data.height or width > data.width or height * data.width != width * data.height:
        raise ConfigError(
            f"size={height}×{width} does not fit data.size={data.height}×{data.width}: what is drawn is learned from pictures that are made "
            "smaller, in the same proportions; raise data.size, or leave size out"
        )
    return replace(data, height=height, width=width)


class Decoder(
    Task,
    SupportsSampling,
    SupportsUpscaling,
    SupportsInpainting,
    SupportsCaching,
    HasSampleSize,
    DescribesStart,
    RoutesCaptions,
    ChecksPrecision,
):
    Config = DecoderConfig

    @classmethod
    def can_cache(cls, config: DecoderConfig) -> bool:
        return config.codec is not None and config.low_res_size is None and not config.reads_images

    @classmethod
    def cache_facts(cls, config: DecoderConfig) -> dict[str, Any]:
        return {} if config.size is None else {"size": list(config.size)}

    def __init__(self, config: DecoderConfig, context: BuildContext) -> None:
        super().__init__(reads=config.reads())
        shape = context.shape
        if shape.frames != 1:
            raise ConfigError(f"data.frames={shape.frames} does not fit dalle2, which draws images: set data.frames=1")
        self.config, self.name = config, context.name
        self.shape = shape = _drawn(config, shape)
        self._stage = context.stage  # for stages that only drawing needs
        if config.codec is not None:
            codec = self.stages["codec"] = context.codec(config.codec)
            self.space: Pixels | Latents = Latents(codec, config.codec, config.latent_scale, shape)
        else:
            self.space = Pixels(shape)
        config.check_size(*self.space.grid, key=self._size_key if config.codec is None else "the latents' size")
        self._check_low_res(config)
        self.conditioner = Conditioner(config, context, self.stages)
        self.diffusion = Diffusion(config.diffusion)
        self.scores = Scores(self.diffusion)
        self.network = DecoderNetwork(
            config,
            self.space.channels,
            self.diffusion.output_channels(self.space.channels),
            self.conditioner.image_width,
            self.conditioner.text_width,
            shape.channels if self.can_upscale() else None,
        )
        if config.prior is not None or (config.reads_images and self.conditioner.clip_reads_captions):
            self.reads |= {"captions"}

    @classmethod
    def build(cls, config: DecoderConfig, context: BuildContext) -> Decoder:
        return cls(config, context)

    @property
    def _size_key(self) -> str:
        """Which key says what is drawn."""
        return "data.size" if self.config.size is None else "size"

    def _check_low_res(self, config: DecoderConfig) -> None:
        small, shape = config.low_res_size, self.shape
        if small is not None and (small[0] >= shape.height or small[1] >= shape.width):
            raise ConfigError(
                f"low_res_size={small[0]}×{small[1]} is not smaller than {self._size_key}={shape.height}×{shape.width}: super-resolution enlarges"
            )
        if config.crop is not None and config.crop > min(self.space.grid):
            raise ConfigError(
                f"crop={config.crop} does not fit maps of {self.space.grid[0]}×{self.space.grid[1]}: use at most {min(self.space.grid)}"
            )

    def check_precision(self, precision: str) -> None:
        if precision == "fp16" and self.config.diffusion.learned_variance:
            raise ConfigError(
                "train.precision=fp16 does not fit diffusion.learned_variance=true: the variational bound's small log-variances are lost "
                "in fp16 and the loss becomes NaN; use bf16 or fp32, or learned_variance=false"
            )

    @property
    def clip(self) -> ClipEmbedder | None:
        return self.conditioner.clip

    @property
    def text(self) -> TextEncoder | None:
        return self.conditioner.text

    # training ------------------------------------------------------------------------------------------------------

    def trainable(self, player: str) -> list[nn.Module]:
        return [module for module in (self.network, self.conditioner.text) if module is not None]

    def times(self, noise: Noise) -> Tensor:
        """B, int64. In validation spread evenly over all noise levels, and the same for a sample every time."""
        if self.training:
            return noise.integers("time", self.diffusion.steps)
        return (noise.spread() * self.diffusion.steps).long()

    def dropped(self, noise: Noise) -> tuple[Tensor | None, Tensor | None]:
        """Which rows lose their image embedding, and which their text; independent draws."""
        if not self.training:
            return None, None
        return noise.bernoulli("image dropout", self.config.image_dropout), noise.bernoulli(
            "text dropout", self.config.text_dropout
        )

    def smaller(self, pixels: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        """B C H W in [0, 1], as drawn → the smaller picture laid over the grid, B C h w in [−1, 1], and the noise in it, B."""
        assert self.config.low_res_size is not None
        small = inward(shrink(pixels, self.config.low_res_size))
        level = torch.zeros(len(small), device=small.device)
        if self.training:
            small, level = spoil(small, self.config.augment, noise)
        return enlarge(small, self.space.grid), level

    def cropped(self, x0: Tensor, low_res: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        size = self.config.crop
        if size is None:
            return x0, low_res
        room = [side - size + 1 for side in self.space.grid]
        if self.training:
            places = [noise.integers(name, most) for name, most in zip(("crop top", "crop left"), room, strict=True)]
        else:
            places = [torch.full_like(noise.slots, most // 2) for most in room]
        top, left = places
        return cut(x0, size, top, left), cut(low_res, size, top, left)

    def condition(self, batch: Batch, noise: Noise) -> Condition:
        return self.conditioner.of_batch(batch, *self.dropped(noise))

    def predict(
        self,
        x_t: Tensor,
        t: Tensor,
        condition: Condition,
        low_res: Tensor | None = None,
        level: Tensor | None = None,
        previous: Tensor | None = None,
    ) -> Tensor:
        """What the network answers, in the objective's own form."""
        if self.config.self_conditioning and previous is None:
            previous = torch.zeros_like(x_t)
        return self.network(
            x_t, t, condition.image, condition.missing, condition.text, condition.mask, low_res, level, previous
        )

    def in_range(self, x0: Tensor) -> Tensor:
        """A predicted picture as later steps see it."""
        return x0.clamp(-1, 1) if self.config.codec is None else x0

    def recalls(self, noise: Noise) -> bool:
        """Whether this step reads an earlier prediction: every other one in training, always when judged."""
        if not self.config.self_conditioning:
            return False
        return not self.training or bool(key_of(noise.seed, noise.step, "self-conditioning") % 2)

    def forward(self, batch: Batch, noise: Noise) -> Scored:
        x0 = self.space.read(batch)
        low_res = level = None
        if self.can_upscale():
            if batch.pixels is None:
                raise InputError(
                    "super-resolution reads pixels to make them smaller: train from pixels, not from a cache"
                )
            low_res, level = self.smaller(self.resize_reference(batch.video)[:, 0], noise)
            x0, low_res = self.cropped(x0, low_res, noise)
        condition = self.condition(batch, noise)
        t, eps = self.times(noise), noise.normal("noise", *x0.shape[1:])
        x_t = self.diffusion.add_noise(x0, eps, t)
        previous = None
        if self.recalls(noise):
            with torch.no_grad():
                found = self.predict(x_t, t, condition, low_res, level)
                previous = self.in_range(self.diffusion.to_x0(x_t, t, found)).clone()
        output = self.predict(x_t, t, condition, low_res, level, previous)
        return Scored(*self.scores(output, x0, eps, x_t, t))

    def loss(self, player: str, shared: Scored) -> Loss:
        count = float(len(shared.error))
        if shared.bound is None:
            return Loss(Mean(shared.error.sum(), count))
        weight = self.config.diffusion.vb_weight * self.diffusion.steps
        total = shared.error + weight * shared.bound
        terms = {"error": Mean(shared.error.sum(), count), "bound": Mean(shared.bound.sum(), count)}
        return Loss(Mean(total.sum(), count), terms)

    # drawing -------------------------------------------------------------------------------------------------------

    def drawing_stage(self, key: str) -> Task | None:
        """The stage that `prior` or `low_res` names, loaded when it is first needed; None: none is named."""
        name = getattr(self.config, key)
        if name is not None and key not in self.stages:
            self.stages[key] = self._stage(name)
        return self.stages.get(key)

    def sample_size(self) -> tuple[int, int]:
        return self.shape.height, self.shape.width

    def resize_reference(self, pixels: Tensor) -> Tensor:
        return shrink(pixels[:, 0], (self.shape.height, self.shape.width))[:, None]

    def describe_start(self, prompts: Prompts) -> str | None:
        return sampling.describe_start(self, prompts)

    def can_upscale(self) -> bool:
        return self.config.low_res_size is not None

    def can_inpaint(self) -> bool:
        return True

    def prime_size(self, options: DecoderSample) -> tuple[int, int] | None:
        return sampling.prime_size(self, options)

    def takes_captions(self) -> bool:
        """An upsampler may know nothing of text itself: the picture that it enlarges is drawn after the caption."""
        if "captions" in self.reads:
            return True
        try:
            below = self.lower_decoder()
        except InputError:  # not trained: it enlarges given pictures only
            return False
        return below is not None and below.takes_captions()

    def lower_decoder(self) -> Decoder | None:
        """The stage that draws the picture to enlarge; None: none is named."""
        stage = self.drawing_stage("low_res")
        if stage is not None and not isinstance(stage, Decoder):
            raise InputError(f"low_res={self.config.low_res} is not a dalle2 stage: name the decoder below this one")
        return stage

    def prior(self) -> Prior | None:
        stage = self.drawing_stage("prior")
        if stage is not None and not isinstance(stage, Prior):
            raise InputError(f"prior={self.config.prior} gives no image embeddings: name a stage of dalle2.prior")
        return stage

    def sample(self, prompts: Prompts, options: DecoderSample) -> Tensor:
        return sampling.draw(self, prompts, options)[:, None]

    @torch.no_grad()
    def precompute(self, batch: Batch) -> dict[str, Tensor]:
        """Latents, and the text where its encoder is frozen."""
        latents = self.space.read(batch)[:, None] / self.config.latent_scale
        return {"latents": latents, **compute_cached_text(self.text, batch)}

    # how the outside treats it -------------------------------------------------------------------------------------

    def compile_targets(self) -> list[nn.Module]:
        return [self.network, self.scores, *(self.text.compile_targets() if self.text is not None else [])]

    def blocks(self) -> list[nn.Module]:
        return self.network.unet.checkpoint_units()

    def assets(self) -> dict[str, str]:
        return self.text.assets() if self.text is not None else {}
