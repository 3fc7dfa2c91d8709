"""The CogVideoX task: diffusion training on a codec's latents, and validation by timestep range."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from kineograph.codec.causal_vae import CausalVAE
from kineograph.core.batch import Batch, Prompts
from kineograph.core.capabilities import (
    ChecksHealth,
    HasLatentShape,
    HasMemorySavers,
    RemapsInit,
    SupportsAnimation,
    SupportsBuckets,
    SupportsCaching,
    SupportsContinuation,
    SupportsLatentSampling,
    SupportsLossMasks,
    SupportsReconstruction,
    SupportsSampling,
)
from kineograph.core.config_file import load_file
from kineograph.core.health import LOSS_FALLS, Limit
from kineograph.core.noise import Noise
from kineograph.core.protocols import TextEncoder
from kineograph.core.task import BuildContext, Loss, Mean, Task, freeze, is_fake_or_meta
from kineograph.core.weight_files import digest_folder
from kineograph.family.cogvideox import sampling, tuning
from kineograph.family.cogvideox.config import CogVideoXConfig, CogVideoXSample, check_weights_folder
from kineograph.family.cogvideox.diffusers_weights import check_state, load_network
from kineograph.family.cogvideox.latent_space import LatentClips, LatentSpace, check_size
from kineograph.family.cogvideox.network import Transformer
from kineograph.family.cogvideox.text_conditioning import TextConditioning
from kineograph.family.cogvideox.transformer_config import Latents
from kineograph.process.diffusion import Diffusion

STORED = {"fp32": torch.float32, "bf16": torch.bfloat16}


class SampleErrors(NamedTuple):
    error: Tensor  # B


class CogVideoX(
    Task,
    SupportsSampling,
    SupportsLatentSampling,
    SupportsContinuation,
    SupportsAnimation,
    SupportsReconstruction,
    SupportsCaching,
    SupportsBuckets,
    SupportsLossMasks,
    HasLatentShape,
    HasMemorySavers,
    RemapsInit,
    ChecksHealth,
):
    Config = CogVideoXConfig

    def __init__(self, config: CogVideoXConfig, context: BuildContext) -> None:
        super().__init__(reads=config.reads())
        self.config, self.shape = config, context.shape
        if config.codec is not None:
            codec = context.stage(config.codec)
        else:
            codec = freeze(released_codec(cast(str, config.weights), context, config.tile, config.patch))
        self.stages["codec"] = codec
        self.space = LatentSpace(codec, config.codec or f"{config.weights}/vae", config)
        self.codec = self.space.codec  # a frozen submodule, so that checkpoints leave it out by this name
        self.latents = self.space.shape_for(self.shape.frames, self.shape.height, self.shape.width)
        self.texts = TextConditioning(config, context)
        self.diffusion = Diffusion(config.diffusion)
        self.network = self._network(context)
        if config.weights is not None:
            # After loading: for another model's folder, the error should name the shape first.
            tuning.check_positions(self.network, config.weights, context.name)
            if config.codec is None:
                tuning.check_first_frame(config, context.name)
            tuning.check_scheduler(config, context.name, context.note)

    def _network(self, context: BuildContext) -> Transformer:
        """Build the transformer with its initial weights, and select what trains."""
        config, saved = self.config, context.assets.get(tuning.ASSET)
        # With tune=full the checkpoint holds all weights.
        folder = config.weights if saved is None or config.tune != "full" else None
        self._base = saved
        blank = is_fake_or_meta()
        place = torch.device("meta") if folder is not None and not blank else torch.empty(0).device
        with place:
            network = Transformer(
                config,
                self.space.channels,
                self.texts.width,
                self.texts.length,
                base=self.latents,
                fused=not config.uses_lora,
            )
        _cast_parameters(network, STORED[config.weights_in])
        if folder is not None and not blank:
            network.to_empty(device="cpu")
            state = tuning.open_transformer_weights(folder)
            load_network(network, state, f"{folder}/transformer")
            if saved is None:
                self._base = tuning.describe_base_weights(folder, state)
            else:
                tuning.check_base_weights(saved, state, folder)
        elif folder is not None and (Path(folder).expanduser() / "transformer").is_dir():
            # On fake tensors the folder may not exist yet.
            check_state(network, tuning.open_transformer_weights(folder), f"{folder}/transformer")
        tuning.select_trainable(network, config)
        return network

    @property
    def text(self) -> TextEncoder | None:
        return self.texts.encoder

    # training ------------------------------------------------------------------------------------------------------

    def can_bucket(self) -> bool:
        return self.config.positions != "rotary+learned"  # the table has rows for one shape

    def trainable(self, player: str) -> list[nn.Module]:
        return [self.network, self.texts] if self.texts.trained else [self.network]

    def shape_for(self, frames: int, height: int, width: int) -> Latents:
        """Latents (t, h, w) of a clip; a ConfigError names sizes that fit."""
        return self.space.shape_for(frames, height, width)

    def predict(
        self, x_t: Tensor, t: Tensor, text: Tensor, image: Tensor | None = None, times: Tensor | None = None
    ) -> Tensor:
        """The network's prediction, B t c h w; `image` is the first-frame condition, `times` B t marks real latent frames."""
        size = (x_t.shape[1], x_t.shape[3], x_t.shape[4])
        positions = self.network.positions_for(size, text.shape[1], x_t.device)
        return self.network(x_t if image is None else torch.cat([x_t, image], dim=2), t, text, positions, times)

    def compute_errors(self, clips: LatentClips, text: Tensor, t: Tensor, eps: Tensor) -> Tensor:
        """Squared error per sample, B, float32, over real latent frames."""
        x_t = self.diffusion.add_noise(clips.x0, eps, t)
        output = self.predict(x_t, t, text, self.space.build_condition(clips.first, clips.padding, x_t), clips.times)
        if clips.times is None:
            return self.diffusion.squared_error(output, clips.x0, eps, t, clips.positions)
        real = clips.times[:, :, None, None, None]
        right = torch.where(real, output.float(), self.diffusion.target(clips.x0, eps, t))  # no error at padding
        error = self.diffusion.squared_error(right, clips.x0, eps, t, clips.positions)
        return error * (real.shape[1] / clips.times.sum(1))

    def forward(self, batch: Batch, noise: Noise) -> SampleErrors:
        clips = self.space.encode_batch(batch, noise, self.training)
        dropped = noise.bernoulli("caption dropout", self.config.caption_dropout) if self.training else None
        text = self.texts.encode_batch(batch, dropped)
        # Timesteps are stratified over the batch, shifted by a draw per step in training and fixed in validation.
        t = self._draw_timesteps(noise, 0, self.diffusion.steps, "time" if self.training else None)
        return SampleErrors(self.compute_errors(clips, text, t, noise.normal("noise", *clips.x0.shape[1:])))

    def loss(self, player: str, shared: SampleErrors) -> Loss:
        return Loss(Mean(shared.error.sum(), float(len(shared.error))))

    def health_limits(self) -> tuple[Limit, ...]:
        return (LOSS_FALLS,) if self.config.weights is None else ()  # released weights begin where they end

    def _draw_timesteps(self, noise: Noise, low: int, high: int, name: str | None = None) -> Tensor:
        """Timesteps spread evenly over [low, high) by a sample's slot in the global batch."""
        return low + (noise.spread(name) * (high - low)).long()

    def validate(self, batch: Batch, noise: Noise) -> dict[str, Mean]:
        """The loss in every timestep range with fixed noise, and their mean: the loss at drawn timesteps is too noisy to compare."""
        clips = self.space.encode_batch(batch, noise, training=False)
        text = self.texts.encode_batch(batch)
        eps = noise.normal("noise", *clips.x0.shape[1:])
        edges = [
            number * self.diffusion.steps // self.config.validation_bins
            for number in range(self.config.validation_bins + 1)
        ]
        errors = {
            f"loss/t{low:04d}-{high - 1:04d}": self.compute_errors(
                clips, text, self._draw_timesteps(noise, low, high), eps
            )
            for low, high in pairwise(edges)
        }
        count = float(len(batch))
        total = torch.stack(list(errors.values())).sum()
        return {
            "loss": Mean(total, count * len(errors)),
            **{name: Mean(error.sum(), count) for name, error in errors.items()},
        }

    # reconstruction and sampling -----------------------------------------------------------------------------------

    def can_reconstruct(self) -> bool:
        """A codec that is a stage of its own shows its reconstructions there."""
        return self.config.codec is None

    def reconstruct(self, batch: Batch) -> Tensor:
        """Clips through the released VAE: the upper bound of what the transformer can draw."""
        return self.space.decode(self.space.encode(batch.video))

    def can_animate(self) -> bool:
        return self.config.first_frame

    def sample(self, prompts: Prompts, options: CogVideoXSample) -> Tensor:
        return sampling.sample_clips(self, prompts, options)

    def sample_latents(self, prompts: Prompts, options: CogVideoXSample) -> Tensor:
        return sampling.sample_latents(self, prompts, options)

    # caching -------------------------------------------------------------------------------------------------------

    @classmethod
    def cache_facts(cls, config: CogVideoXConfig) -> dict[str, Any]:
        """Digests of the VAE and text encoder in `weights`, and whether first frames are stored."""
        facts: dict[str, Any] = {"first_frame": "kept" if config.first_frame else False}
        if config.codec is None:
            facts["vae"] = digest_folder(Path(str(config.weights)).expanduser() / "vae")
            facts["tile"] = config.tile
        if config.text.name is not None:
            facts["text_encoder"] = digest_folder(Path(config.text.name).expanduser())
        return facts

    def always_encode(self) -> bool:
        """The first frame gets its noise before the codec, in every step."""
        return self.config.first_frame

    @torch.no_grad()
    def precompute(self, batch: Batch) -> dict[str, Tensor]:
        """The posterior, the first frame for image to video, and text embeddings if the encoder is frozen."""
        return {**self.space.precompute(batch), **self.texts.precompute(batch)}

    # compilation, checkpoints, memory ------------------------------------------------------------------------------

    def compile_targets(self) -> list[nn.Module]:
        return [self.network, *(self.text.compile_targets() if self.text is not None else [])]

    def blocks(self) -> list[nn.Module]:
        return list(self.network.blocks)

    def assets(self) -> dict[str, str]:
        base = {tuning.ASSET: self._base} if self._base is not None else {}
        return {**self.texts.assets(), **base}

    def remap_init(self, weights: dict[str, Tensor], where: str) -> dict[str, Tensor]:
        return tuning.remap_init(self.network, self.config, weights, where)

    @classmethod
    def memory_savers(cls, config: CogVideoXConfig) -> dict[str, Any]:
        keys: dict[str, Any] = {}
        if config.weights_in == "fp32":
            keys["weights_in"] = "bf16"
        if config.weights is not None and not config.uses_lora:
            keys["tune"] = "lora"
        return keys

    def tokens_per_clip(self) -> int:
        t, h, w = self.network.token_grid((self.latents[0] + self.space.padding(self.latents[0]), *self.latents[1:]))
        return t * h * w + self.texts.length


def released_codec(folder: str, context: BuildContext, tile: tuple[int, int] | None, patch: int) -> CausalVAE:
    """The VAE of a diffusers folder. On fake tensors the folder may not exist yet: then the released VAE's shape is used."""
    from kineograph.codec.causal_vae_weights import config_from_diffusers, load_diffusers_vae

    path = Path(folder).expanduser()
    place = path / "vae" / "config.json"
    if not is_fake_or_meta():
        check_weights_folder(folder, "transformer vae")
        return load_diffusers_vae(path, context.shape, tile=tile)
    config = config_from_diffusers(load_file(place) if place.is_file() else {}, str(place), tile=tile)
    check_size(context.shape.height, context.shape.width, config.spatial * patch)
    return CausalVAE(config, context.shape)


def _cast_parameters(network: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters by replacing them: `Module.to` cannot convert fake tensors."""
    for module in network.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
