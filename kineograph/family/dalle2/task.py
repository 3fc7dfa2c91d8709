"""The decoder task: diffusion training of one U-Net of the cascade, from pixels or latents."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kineograph.core.batch import Batch, Prompts, Shape, weigh_positions
from kineograph.core.capabilities import (
    ChecksHealth,
    ChecksPrecision,
    DescribesStart,
    HasSampleSize,
    RoutesCaptions,
    SupportsCaching,
    SupportsInpainting,
    SupportsLossMasks,
    SupportsSampling,
    SupportsUpscaling,
)
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.health import LOSS_FALLS, Limit
from kineograph.core.noise import Noise, key_of
from kineograph.core.protocols import TextEncoder
from kineograph.core.task import BuildContext, Loss, Mean, Task
from kineograph.family.dalle2 import sampling
from kineograph.family.dalle2.conditioning import Conditioner, EmbeddingPrior
from kineograph.family.dalle2.config import DecoderConfig, DecoderSample
from kineograph.family.dalle2.image_space import (
    LatentSpace,
    PixelSpace,
    augment,
    crop_squares,
    downsample,
    normalize,
    upsample,
)
from kineograph.family.dalle2.network import Condition, DecoderNetwork
from kineograph.process.diffusion import Diffusion
from kineograph.process.loss_ranges import loss_by_timestep
from kineograph.text.clip_embedding import IMAGE
from kineograph.text.conditioning import compute_cached_text


class SampleErrors(NamedTuple):
    error: Tensor  # B
    bound: Tensor | None  # B, the variational bound; None without learned variance
    t: Tensor  # B, timesteps


class ErrorTerms(nn.Module):
    """Errors of a prediction; a module, so that it can be compiled."""

    def __init__(self, diffusion: Diffusion) -> None:
        super().__init__()
        self.diffusion = diffusion

    def forward(
        self, output: Tensor, x0: Tensor, eps: Tensor, x_t: Tensor, t: Tensor, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """`positions`: the weight of each, B 1 h w; None: all count alike."""
        error = self.diffusion.squared_error(output, x0, eps, t, positions)
        learned = self.diffusion.config.learned_variance
        return error, self.diffusion.variational_bound(output, x0, x_t, t, positions) if learned else None


class Decoder(
    Task,
    SupportsSampling,
    SupportsUpscaling,
    SupportsInpainting,
    SupportsCaching,
    SupportsLossMasks,
    HasSampleSize,
    DescribesStart,
    RoutesCaptions,
    ChecksHealth,
    ChecksPrecision,
):
    Config = DecoderConfig

    def __init__(self, config: DecoderConfig, context: BuildContext) -> None:
        super().__init__(reads=config.reads())
        self.config, self.name = config, context.name
        self.shape = shape = _resize_shape(context.shape, config)
        self._load_stage = context.stage  # for the stages that only sampling needs
        if config.codec is not None:
            codec = self.stages["codec"] = context.codec(config.codec)
            self.space: PixelSpace | LatentSpace = LatentSpace(codec, config.codec, config.latent_scale, shape)
        else:
            self.space = PixelSpace(shape)
        self._check_sizes()
        self.conditioner = Conditioner(config, context, self.stages)
        self.diffusion = Diffusion(config.diffusion)
        self.error_terms = ErrorTerms(self.diffusion)
        clip, channels = self.conditioner.image_clip, self.space.channels
        self.network = DecoderNetwork(
            config,
            channels,
            self.diffusion.output_channels(channels),
            image_width=clip.width if clip is not None else None,
            text_width=self.text.width if self.text is not None else None,
            low_res=shape.channels if self.can_upscale() else None,
        )
        if config.prior is not None or (clip is not None and clip.reads_captions):
            self.reads |= {"captions"}

    def _check_sizes(self) -> None:
        config, shape, grid = self.config, self.shape, self.space.grid
        size_key = "data.size" if config.size is None else "size"
        config.check_size(*grid, key=size_key if config.codec is None else "the latents' size")
        small = config.low_res_size
        if small is not None and (small[0] >= shape.height or small[1] >= shape.width):
            raise ConfigError(
                f"low_res_size={small[0]}×{small[1]} is not smaller than {size_key}={shape.height}×{shape.width}: lower low_res_size"
            )
        if config.crop is not None and config.crop > min(grid):
            raise ConfigError(f"crop={config.crop} does not fit maps of {grid[0]}×{grid[1]}: use at most {min(grid)}")

    def check_precision(self, precision: str) -> None:
        if precision == "fp16" and self.config.diffusion.learned_variance:
            raise ConfigError(
                "train.precision=fp16 does not fit diffusion.learned_variance=true: small log-variances underflow and the loss becomes NaN; "
                "use bf16 or fp32, or learned_variance=false"
            )

    @property
    def text(self) -> TextEncoder | None:
        return self.conditioner.text

    # training ------------------------------------------------------------------------------------------------------

    def trainable(self, player: str) -> list[nn.Module]:
        return [module for module in (self.network, self.text) if module is not None]

    def draw_timesteps(self, noise: Noise) -> Tensor:
        """B, int64. In validation they are fixed and spread evenly over all timesteps."""
        if self.training:
            return noise.integers("time", self.diffusion.steps)
        return (noise.spread() * self.diffusion.steps).long()

    def draw_dropout(self, noise: Noise) -> tuple[Tensor | None, Tensor | None]:
        """Independent draws of the rows without image embedding and without text, B each; None in validation."""
        if not self.training:
            return None, None
        image = noise.bernoulli("image dropout", self.config.image_dropout)
        return image, noise.bernoulli("text dropout", self.config.text_dropout)

    def encode_batch(self, batch: Batch, noise: Noise) -> Condition:
        return self.conditioner.encode_batch(batch, *self.draw_dropout(noise))

    def make_low_res(self, pixels: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        """B C H W in [0, 1] → the low-resolution image upsampled to the grid, B C h w in [−1, 1], and its noise level, B"""
        assert self.config.low_res_size is not None
        low_res = normalize(downsample(pixels, self.config.low_res_size))
        level = torch.zeros(len(low_res), device=low_res.device)
        if self.training:
            low_res, level = augment(low_res, self.config.augment, noise)
        return upsample(low_res, self.space.grid), level

    def crop(self, maps: list[Tensor], noise: Noise) -> list[Tensor]:
        """Cut the same square of all maps; in validation the central one."""
        size = self.config.crop
        if size is None:
            return maps
        rows, columns = (side - size + 1 for side in self.space.grid)
        if self.training:
            top, left = noise.integers("crop top", rows), noise.integers("crop left", columns)
        else:
            top, left = (torch.full_like(noise.slots, count // 2) for count in (rows, columns))
        return [crop_squares(each, size, top, left) for each in maps]

    def predict(
        self,
        x_t: Tensor,
        t: Tensor,
        condition: Condition,
        low_res: Tensor | None = None,
        level: Tensor | None = None,
        previous: Tensor | None = None,
    ) -> Tensor:
        """The network's prediction; `previous` is for self-conditioning."""
        if self.config.self_conditioning and previous is None:
            previous = torch.zeros_like(x_t)
        return self.network(x_t, t, *condition, low_res, level, previous)

    def clamp_x0(self, x0: Tensor) -> Tensor:
        """x̂0 for self-conditioning; latents have no range."""
        return x0.clamp(-1, 1) if self.config.codec is None else x0

    def uses_previous(self, noise: Noise) -> bool:
        """Whether this step self-conditions on a prediction: every other step in training, always in validation."""
        if not self.config.self_conditioning:
            return False
        return not self.training or bool(key_of(noise.seed, noise.step, "self-conditioning") % 2)

    def forward(self, batch: Batch, noise: Noise) -> SampleErrors:
        x0 = self.space.encode_batch(batch)
        share = batch.loss_share(*self.space.grid)
        low_res = level = None
        if self.can_upscale():
            if batch.pixels is None:
                raise InputError("super-resolution needs pixels to downsample: train from pixels, not from a cache")
            low_res, level = self.make_low_res(self.resize_reference(batch.video)[:, 0], noise)
            x0, low_res, *shares = self.crop([x0, low_res, *([] if share is None else [share])], noise)
            share = shares[0] if shares else None
        condition = self.encode_batch(batch, noise)
        t, eps = self.draw_timesteps(noise), noise.normal("noise", *x0.shape[1:])
        x_t = self.diffusion.add_noise(x0, eps, t)
        previous = None
        if self.uses_previous(noise):
            with torch.no_grad():
                output = self.predict(x_t, t, condition, low_res, level)
                previous = self.clamp_x0(self.diffusion.to_x0(x_t, t, output)).clone()
        output = self.predict(x_t, t, condition, low_res, level, previous)
        positions = None if share is None else weigh_positions(share)
        error, bound = self.error_terms(output, x0, eps, x_t, t, positions)
        return SampleErrors(error, bound, t)

    def loss(self, player: str, shared: SampleErrors) -> Loss:
        count = float(len(shared.error))
        total = Mean(self._sample_losses(shared).sum(), count)
        if shared.bound is None:
            return Loss(total)
        return Loss(total, {"error": Mean(shared.error.sum(), count), "bound": Mean(shared.bound.sum(), count)})

    def _sample_losses(self, shared: SampleErrors) -> Tensor:
        """B"""
        if shared.bound is None:
            return shared.error
        return shared.error + self.config.diffusion.vb_weight * self.diffusion.steps * shared.bound

    def validate(self, batch: Batch, noise: Noise) -> dict[str, Mean]:
        """The loss, its terms, and the loss by quarter of the timesteps."""
        shared = self(batch, noise)
        loss = self.loss("model", shared)
        ranges = loss_by_timestep(self._sample_losses(shared), shared.t, self.diffusion.steps)
        return {"loss": loss.total, **loss.terms, **ranges}

    def health_limits(self) -> tuple[Limit, ...]:
        return (LOSS_FALLS,)

    # sampling ------------------------------------------------------------------------------------------------------

    def _load_sampling_stage(self, key: str, name: str | None) -> Task | None:
        """The stage `name`, loaded when it is first needed."""
        if name is not None and key not in self.stages:
            self.stages[key] = self._load_stage(name)
        return self.stages.get(key)

    def load_prior(self) -> EmbeddingPrior | None:
        stage = self._load_sampling_stage("prior", self.config.prior)
        if stage is not None and not isinstance(stage, EmbeddingPrior):
            raise InputError(
                f"prior={self.config.prior} gives no image embeddings: name a stage with task=dalle2.prior"
            )
        return stage

    def load_lower_decoder(self) -> Decoder | None:
        """The stage below in the cascade, which samples the low-resolution image."""
        stage = self._load_sampling_stage("low_res", self.config.low_res)
        if stage is not None and not isinstance(stage, Decoder):
            raise InputError(f"low_res={self.config.low_res} is not a dalle2 stage: name the decoder below this one")
        return stage

    def sample(self, prompts: Prompts, options: DecoderSample) -> Tensor:
        return sampling.sample_images(self, prompts, options)[:, None]

    def sample_size(self) -> tuple[int, int]:
        return self.shape.height, self.shape.width

    def resize_reference(self, pixels: Tensor) -> Tensor:
        return downsample(pixels[:, 0], self.sample_size())[:, None]

    def describe_start(self, prompts: Prompts) -> str | None:
        return sampling.describe_start(self, prompts)

    def can_upscale(self) -> bool:
        return self.config.low_res_size is not None

    def can_inpaint(self) -> bool:
        return True

    def prime_size(self, options: DecoderSample) -> tuple[int, int] | None:
        return sampling.prime_size(self, options)

    def takes_captions(self) -> bool:
        if "captions" in self.reads:
            return True
        try:
            lower = self.load_lower_decoder()
        except InputError:  # not trained yet: this stage upscales given images only
            return False
        return lower is not None and lower.takes_captions()

    # caching, compilation, checkpoints -----------------------------------------------------------------------------

    @classmethod
    def can_cache(cls, config: DecoderConfig) -> bool:
        """Latents; or pixels in the size of the samples, where a CLIP would otherwise run in every step."""
        if config.low_res_size is not None:
            return False
        return config.codec is not None or (config.runs_clip and (config.reads_images or config.clip_text))

    @classmethod
    def cache_facts(cls, config: DecoderConfig) -> dict[str, Any]:
        return {} if config.size is None else {"size": list(config.size)}

    @torch.no_grad()
    def precompute(self, batch: Batch) -> dict[str, Tensor]:
        clip = self.conditioner.image_clip
        embeddings = {} if clip is None else {IMAGE: clip.images(batch)}
        if isinstance(self.space, LatentSpace):
            picture = {"latents": self.space.encode_batch(batch)[:, None] / self.config.latent_scale}
        else:
            pixels = downsample(batch.video[:, 0], self.space.grid)[:, None]
            picture = {"pixels": pixels.mul(255).round().clamp(0, 255).to(torch.uint8)}
        return {**picture, **embeddings, **compute_cached_text(self.text, batch)}

    def compile_targets(self) -> list[nn.Module]:
        return [self.network, self.error_terms, *(self.text.compile_targets() if self.text is not None else [])]

    def blocks(self) -> list[nn.Module]:
        return self.network.unet.checkpoint_units()

    def assets(self) -> dict[str, str]:
        return self.text.assets() if self.text is not None else {}


def _resize_shape(shape: Shape, config: DecoderConfig) -> Shape:
    """The shape of samples for data of `shape`; refuses sizes that downsampling cannot give."""
    if shape.frames != 1:
        raise ConfigError(f"data.frames={shape.frames} does not fit dalle2, which draws images: set data.frames=1")
    if config.size is None:
        return shape
    height, width = config.size
    if height > shape.height or width > shape.width or height * shape.width != width * shape.height:
        raise ConfigError(
            f"size={height}×{width} does not fit data.size={shape.height}×{shape.width}: images are downsampled in proportion; "
            "raise data.size, or change or remove size"
        )
    return replace(shape, height=height, width=width)
