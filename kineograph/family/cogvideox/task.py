"""CogVideoX as a stage: training on a codec's latents, validation by ranges of noise, and what the outside asks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from kineograph.core.batch import Batch, Prompts
from kineograph.core.config import load_file
from kineograph.core.noise import Noise
from kineograph.core.task import BuildContext, Loss, Mean, Task, freeze, is_fake_or_meta
from kineograph.core.weight_files import files_digest
from kineograph.family.cogvideox import sampling, tuning
from kineograph.family.cogvideox.config import CogVideoXConfig, CogVideoXSample, check_folder
from kineograph.family.cogvideox.latents import Clips, LatentSpace, check_sides
from kineograph.family.cogvideox.network import Transformer
from kineograph.family.cogvideox.shapes import Latents
from kineograph.family.cogvideox.texts import Texts
from kineograph.family.cogvideox.weights import check_state, load_network
from kineograph.process.diffusion import Diffusion
from kineograph.text.conditioning import modules_to_compile, reads_for

STORED = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Scored(NamedTuple):
    error: Tensor  # of each sample, B


class CogVideoX(Task):
    Config = CogVideoXConfig
    continues = True

    @classmethod
    def reads_for(cls, config: CogVideoXConfig) -> frozenset[str]:
        return reads_for(config.text)

    @classmethod
    def can_cache(cls, config: CogVideoXConfig) -> bool:
        return True

    def __init__(self, config: CogVideoXConfig, context: BuildContext) -> None:
        super().__init__()
        self.config, self.shape = config, context.shape
        self.animates = config.first_frame
        self.always_encode = config.first_frame  # it gets its noise before the codec, in every step
        if config.codec is not None:
            codec = context.stage(config.codec)
        else:
            codec = cast(Task, freeze(released_codec(cast(str, config.weights), context, config.tile, config.patch)))
        self.stages["codec"] = codec
        self.codec: Any = codec  # a submodule under one name: what is frozen is in no checkpoint, by that name
        self.space = LatentSpace(self.codec, config.codec or f"{config.weights}/vae", config)
        self.latents = self.space.shape_for(self.shape.frames, self.shape.height, self.shape.width)
        self.texts = Texts(config, context)
        self.diffusion = Diffusion(config.diffusion)
        self.network = self._network(context)
        if config.weights is not None:
            # After its weights: of another model's folder its shape is to be said, not its schedule.
            tuning.check_positions(self.network, config.weights, context.name)
            if config.codec is None:
                tuning.check_first_frame(config, context.name)
            tuning.check_scheduler(config, context.name, context.note)
        self.reads = self.reads_for(config)  # type: ignore[misc]
        self.supports_buckets = config.positions != "rotary+learned"  # a table has rows for one shape

    @classmethod
    def build(cls, config: CogVideoXConfig, context: BuildContext) -> CogVideoX:
        return cls(config, context)

    def _network(self, context: BuildContext) -> Transformer:
        """The transformer with its starting weights, and what of it trains."""
        config, saved = self.config, context.assets.get(tuning.ASSET)
        # A stage that trains everything has everything in its checkpoint.
        folder = config.weights if saved is None or config.tune != "full" else None
        self._base = saved
        blank = is_fake_or_meta()
        place = torch.device("meta") if folder is not None and not blank else torch.empty(0).device
        with place, _numbers_of(STORED[config.weights_in]):
            network = Transformer(
                config,
                self.space.channels,
                self.texts.width,
                self.texts.length,
                base=self.latents,
                fused=not config.adapts,
            )
        if folder is not None and not blank:
            network.to_empty(device="cpu")
            state = tuning.released_weights(folder)
            load_network(network, state, f"{folder}/transformer")
            if saved is None:
                self._base = tuning.base_asset(folder, state)
            else:
                tuning.check_base(saved, state, folder)
        elif (
            folder is not None and (Path(folder).expanduser() / "transformer").is_dir()
        ):  # where sizes matter it may be yet to come
            check_state(network, tuning.released_weights(folder), f"{folder}/transformer")
        tuning.choose(network, config)
        return network

    @property
    def text(self) -> Any:
        """The encoder of captions."""
        return self.texts.encoder

    # training ------------------------------------------------------------------------------------------------------

    def trainable(self, player: str) -> list[nn.Module]:
        return [self.network, self.texts] if self.texts.trained else [self.network]

    def shape_for(self, frames: int, height: int, width: int) -> Latents:
        """Latents of a clip; a ConfigError says which sizes fit when this one does not."""
        return self.space.shape_for(frames, height, width)

    def predict(self, x_t: Tensor, t: Tensor, text: Tensor, image: Tensor | None = None) -> Tensor:
        """What the network answers, B t c h w; `image` is what it reads beside the noisy latents."""
        size = (x_t.shape[1], x_t.shape[3], x_t.shape[4])
        at = self.network.places(size, text.shape[1], x_t.device)
        return self.network(x_t if image is None else torch.cat([x_t, image], dim=2), t, text, at)

    def scored(self, clips: Clips, text: Tensor, t: Tensor, eps: Tensor) -> Tensor:
        """The squared error of each sample in the objective's own form, B, float32; of the latent frames that are real, where some are not."""
        x_t = self.diffusion.add_noise(clips.x0, eps, t)
        output = self.predict(x_t, t, text, self.space.shown(clips.first, clips.padding, x_t))
        if clips.times is None:
            return self.diffusion.squared_error(output, clips.x0, eps, t)
        real = clips.times[:, :, None, None, None]
        right = torch.where(real, output.float(), self.diffusion.target(clips.x0, eps, t))  # no error at the others
        return self.diffusion.squared_error(right, clips.x0, eps, t) * (real.shape[1] / clips.times.sum(1))

    def forward(self, batch: Batch, noise: Noise) -> Scored:
        clips = self.space.read(batch, noise, self.training)
        dropped = noise.happens("caption dropout", self.config.caption_dropout) if self.training else None
        text = self.texts.of_batch(batch, dropped)
        # In training each step shifts the levels of its samples alike: any level is as likely as any other, and a batch covers them all. In
        # judging a sample has the same one every time.
        t = self._level(noise, 0, self.diffusion.steps, "time" if self.training else None)
        return Scored(self.scored(clips, text, t, noise.normal("noise", *clips.x0.shape[1:])))

    def loss(self, player: str, shared: Scored) -> Loss:
        return Loss(Mean(shared.error.sum(), float(len(shared.error))))

    def _level(self, noise: Noise, low: int, high: int, name: str | None = None) -> Tensor:
        """Spread evenly over [low, high) by a sample's place in the global batch."""
        return low + (noise.spread(name) * (high - low)).long()

    def validate(self, batch: Batch, noise: Noise) -> dict[str, Mean]:
        """The loss in every range of noise levels, with the same noise each time, and their mean: the plain loss is nearly flat, and moves
        with the levels that happen to be drawn."""
        clips = self.space.read(batch, noise, training=False)
        text = self.texts.of_batch(batch)
        eps = noise.normal("noise", *clips.x0.shape[1:])
        edges = [
            number * self.diffusion.steps // self.config.validation_bins
            for number in range(self.config.validation_bins + 1)
        ]
        errors = {
            f"loss/t{low:04d}-{high - 1:04d}": self.scored(clips, text, self._level(noise, low, high), eps)
            for low, high in pairwise(edges)
        }
        count = float(len(batch))
        total = torch.stack(list(errors.values())).sum()
        return {
            "loss": Mean(total, count * len(errors)),
            **{name: Mean(error.sum(), count) for name, error in errors.items()},
        }

    # seeing --------------------------------------------------------------------------------------------------------

    @property
    def reconstructs(self) -> bool:
        """Where the VAE is no stage that shows it already."""
        return self.config.codec is None

    def reconstruct(self, batch: Batch) -> Tensor | None:
        """Clips through the released VAE: what the transformer can draw is no better."""
        return self.space.decode(self.space.encode(batch.video)) if self.reconstructs else None

    def sample(self, prompts: Prompts, options: CogVideoXSample) -> Tensor:
        return sampling.draw(self, prompts, options)

    def sample_latents(self, prompts: Prompts, options: CogVideoXSample) -> Tensor:
        return sampling.draw_latents(self, prompts, options)

    # what can be computed once -------------------------------------------------------------------------------------

    @classmethod
    def cache_facts(cls, config: CogVideoXConfig) -> dict[str, Any]:
        """What of `weights` made the latents and the texts, and whether first frames are kept. A stage that is named as `codec` is known by
        its own digest."""
        facts: dict[str, Any] = {"first_frame": "kept" if config.first_frame else False}
        if config.codec is None:
            facts["vae"] = files_digest(Path(str(config.weights)).expanduser() / "vae")
            facts["tile"] = config.tile
        if config.text.name is not None:
            facts["text_encoder"] = files_digest(Path(config.text.name).expanduser())
        return facts

    @torch.no_grad()
    def precompute(self, batch: Batch) -> dict[str, Tensor]:
        """The posterior (not one sample of it), the first frame of image to video, and the text where its encoder is frozen."""
        return {**self.space.cached(batch), **self.texts.precomputed(batch)}

    # how the outside treats it -------------------------------------------------------------------------------------

    def compile_targets(self) -> list[nn.Module]:
        return [self.network, *modules_to_compile(self.texts.reader)]

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
        if config.weights is not None and not config.adapts:
            keys["tune"] = "lora"
        return keys

    def tokens_per_clip(self) -> int:
        t, h, w = self.network.grid_of((self.latents[0] + self.space.padding(self.latents[0]), *self.latents[1:]))
        return t * h * w + self.texts.length


def released_codec(folder: str, context: BuildContext, tile: tuple[int, int] | None, patch: int) -> Task:
    """The VAE of a folder of diffusers' form, for tokens of `patch` latents on a side. Where only sizes matter the folder may be yet to come:
    then it is the released one's."""
    from kineograph.codec.causal_vae import CausalVAE
    from kineograph.codec.causal_vae_weights import config_from_diffusers, load_diffusers_vae

    path = Path(folder).expanduser()
    place = path / "vae" / "config.json"
    if not is_fake_or_meta():
        check_folder(folder, "transformer vae")
        return load_diffusers_vae(path, context.shape, tile=tile)
    config = config_from_diffusers(load_file(place) if place.is_file() else {}, str(place), tile=tile)
    check_sides(context.shape.height, context.shape.width, config.spatial * patch)
    return CausalVAE(config, context.shape)


@contextmanager
def _numbers_of(dtype: torch.dtype) -> Iterator[None]:
    """Parameters made inside are of this type from the start: tensors without numbers cannot be converted."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
