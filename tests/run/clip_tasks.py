"""A codec and a generator for clips, as small as they get: what the run's plumbing for video is tested on."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, cast

import torch
import yaml
from einops import rearrange, repeat
from torch import Tensor, nn

from kineograph.core.batch import Batch, Prompts
from kineograph.core.capabilities import (
    SupportsBuckets,
    SupportsCaching,
    SupportsLatentSampling,
    SupportsReconstruction,
    SupportsSampling,
)
from kineograph.core.config import Config, StageConfig, merge, nest
from kineograph.core.errors import ConfigError
from kineograph.core.noise import Noise
from kineograph.core.task import BuildContext, Codec, Loss, Mean, Task
from kineograph.text import TextConfig, build_text

SEEN: list[
    tuple[Tensor, Tensor | None, list[str] | None]
] = []  # tokens, frame mask and captions of every training batch


BASE: dict[str, Any] = {
    "seed": 1,
    "data": {"source": "moving_digits", "size": 16, "frames": 5, "glyphs": 2, "stills": 0.5, "count": 48},
    "train": {
        "steps": 3, "batch_size": 16, "log_every": 1, "save_every": 3, "validate_every": 3, "validation_samples": 2, "ema": {"decay": 0.9},
        "sample_every": 0, "samples": 2, "workers": 0, "warmup": 1, "trackers": [], "device": "cpu",
    },
    "stages": {
        "codec": {"task": "tests.run.clip_tasks.ClipCodec"},
        "generator": {"task": "tests.run.clip_tasks.ClipGenerator", "codec": "codec"},
    },
}  # fmt: skip


def train(
    folder: Path,
    name: str = "run",
    lines: list[str] | None = None,
    dataset: Any = None,
    stages: dict[str, Any] | None = None,
    on_log: Any = None,
    **changes: Any,
) -> Path:
    """Train BASE with some keys changed (`data__count=4`), or other stages, in `folder/name`; what the log says goes to `lines`."""
    from kineograph.run.train import train as run_train

    tree = BASE if stages is None else {**BASE, "stages": stages}
    for path, value in changes.items():
        tree = merge(tree, nest(path.replace("__", "."), value))
    config = folder / f"{name}.yaml"
    config.write_text(yaml.safe_dump(tree, sort_keys=False))
    SEEN.clear()
    told = lines if lines is not None else []
    return run_train(
        [str(config)], run=folder / name, dataset=dataset, on_log=on_log, note=told.append, quiet=lines is None
    )


class ClipCodecConfig(StageConfig):
    pass


class ClipCodec(Codec, SupportsReconstruction, SupportsBuckets):
    """Brightness of 8 × 8 blocks in 16 levels: of the first frame, then of each second frame."""

    Config = ClipCodecConfig
    vocabulary: int | None = 16

    def __init__(self, config: ClipCodecConfig, context: BuildContext) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))
        self.shape = context.shape
        self.shape_for(context.shape.frames, context.shape.height, context.shape.width)

    @classmethod
    def build(cls, config: ClipCodecConfig, context: BuildContext) -> ClipCodec:
        return cls(config, context)

    def shape_for(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        if frames % 2 == 0 or height % 8 or width % 8:
            raise ConfigError(f"{frames} frames of {height}×{width} do not fit: use 1 + 2 k of multiples of 8")
        return 1 + frames // 2, height // 8, width // 8

    def mask_for(self, frame_mask: Tensor) -> Tensor:
        return torch.cat([frame_mask[:, :1], frame_mask[:, 1::2]], 1)

    def encode(self, pixels: Tensor, frame_mask: Tensor | None = None) -> Tensor:
        chosen = pixels[:, [0, *range(2, pixels.shape[1], 2)]]
        blocks = rearrange(chosen, "b t c (h i) (w j) -> b t h w (c i j)", i=8, j=8).mean(-1)
        return (blocks * 15).round().long()

    def decode(self, tokens: Tensor) -> Tensor:
        frames = torch.cat([tokens[:, :1], tokens[:, 1:].repeat_interleave(2, 1)], 1)
        return repeat(frames / 15, "b t h w -> b t c (h 8) (w 8)", c=3)

    def reconstruct(self, batch: Batch) -> Tensor:
        return self.decode(self.encode(batch.video)) * self.gain

    def trainable(self, player: str) -> list[nn.Module]:
        return [self]

    def forward(self, batch: Batch, noise: Noise) -> Tensor:
        return (self.reconstruct(batch) - batch.video).square().flatten(1).mean(1)

    def loss(self, player: str, shared: Tensor) -> Loss:
        return Loss(Mean(shared.sum(), float(len(shared))))


class ClipSampling(Config):
    pass


class ClipConfig(StageConfig):
    references: ClassVar[tuple[str, ...]] = ("codec",)
    codec: str
    text: TextConfig = TextConfig(width=8, depth=0, positions="learned", length=24)
    sample: ClipSampling = ClipSampling()

    def reads(self) -> frozenset[str]:
        return self.text.reads()


class ClipGenerator(Task, SupportsSampling, SupportsCaching, SupportsBuckets):
    """Guesses each token from the caption, whatever its time; padded times are not scored."""

    Config = ClipConfig

    def __init__(self, config: ClipConfig, context: BuildContext) -> None:
        super().__init__(reads=config.reads())
        self.shape = context.shape
        self.stages["codec"] = context.stage(config.codec)
        self.text = cast(Any, build_text(config.text, context))
        self.head = nn.Linear(8, cast(Any, self.stages["codec"]).vocabulary)

    @classmethod
    def build(cls, config: ClipConfig, context: BuildContext) -> ClipGenerator:
        return cls(config, context)

    def tokens(self, batch: Batch) -> Tensor:
        codec = cast(Any, self.stages["codec"])
        return batch.tokens if batch.tokens is not None else codec.encode(batch.video, batch.frame_mask)

    def precompute(self, batch: Batch) -> dict[str, Tensor]:
        return {"tokens": self.tokens(batch)}

    def read(self, captions: list[str] | None, rows: int) -> Tensor:
        if self.text is None:
            return torch.zeros(rows, 8, device=self.head.weight.device)
        embeddings, mask = self.text.encode(captions)
        return (embeddings * mask[..., None]).sum(1)

    def trainable(self, player: str) -> list[nn.Module]:
        return [self]

    def forward(self, batch: Batch, noise: Noise) -> tuple[Tensor, Tensor]:
        tokens = self.tokens(batch)
        if self.training:
            SEEN.append((tokens, batch.frame_mask, batch.captions))
        mask = (
            cast(Any, self.stages["codec"]).mask_for(batch.frame_mask)
            if batch.frame_mask is not None
            else torch.ones(tokens.shape[:2], dtype=torch.bool)
        )
        logits = self.head(self.read(batch.captions, len(batch))).log_softmax(-1)  # B V
        losses = -logits.gather(1, tokens.flatten(1)).view(tokens.shape)
        weights = mask[:, :, None, None].expand_as(losses).float()
        return losses * weights, weights

    def loss(self, player: str, shared: tuple[Tensor, Tensor]) -> Loss:
        losses, weights = shared
        return Loss(Mean(losses.sum(), weights.sum()))

    def sample(self, prompts: Prompts, options: Any) -> Tensor:
        logits = self.head(self.read(prompts.captions, len(prompts)))
        codec = cast(Any, self.stages["codec"])
        shape = codec.shape_for(prompts.frames or self.shape.frames, self.shape.height, self.shape.width)
        return codec.decode(repeat(logits.argmax(-1), "b -> b t h w", t=shape[0], h=shape[1], w=shape[2]))

    def assets(self) -> dict[str, str]:
        return self.text.assets() if self.text is not None else {}


class BlockCodec(ClipCodec):
    """The same in numbers instead of levels."""

    vocabulary = None
    has_codebook = False

    def posterior(self, pixels: Tensor) -> Tensor:
        """Mean and logarithm of the variance of each block, B t 2 h w."""
        chosen = pixels[:, [0, *range(2, pixels.shape[1], 2)]]
        blocks = rearrange(chosen, "b t c (h i) (w j) -> b t h w (c i j)", i=8, j=8)
        return torch.stack([blocks.mean(-1), blocks.var(-1).add(1e-3).log()], dim=2)


class LatentGenerator(
    Task, SupportsSampling, SupportsLatentSampling, SupportsReconstruction, SupportsCaching, SupportsBuckets
):
    """Guesses the brightness of a clip from noise; what it reads can be kept as a posterior."""

    Config = ClipConfig

    def __init__(self, config: ClipConfig, context: BuildContext) -> None:
        super().__init__(reads=config.reads())
        self.shape = context.shape
        self.stages["codec"] = context.stage(config.codec)
        self.level = nn.Parameter(torch.zeros(()))

    @classmethod
    def build(cls, config: ClipConfig, context: BuildContext) -> LatentGenerator:
        return cls(config, context)

    def posterior(self, batch: Batch) -> Tensor:
        return batch.latents if batch.latents is not None else cast(Any, self.stages["codec"]).posterior(batch.video)

    def precompute(self, batch: Batch) -> dict[str, Tensor]:
        rows = len(batch)
        text = torch.arange(rows * 6, dtype=torch.float32).view(rows, 3, 2) / 100
        mask = torch.ones(rows, 3, dtype=torch.bool)
        return {"latents": self.posterior(batch), "text_embeds": text, "text_mask": mask}

    def trainable(self, player: str) -> list[nn.Module]:
        return [self]

    def forward(self, batch: Batch, noise: Noise) -> Tensor:
        mean, log_variance = self.posterior(batch).unbind(2)
        drawn = mean + (log_variance / 2).exp() * noise.normal("posterior", *mean.shape[1:])
        if self.training:
            SEEN.append((drawn, batch.frame_mask, batch.captions))
        return (drawn - self.level).square().flatten(1).mean(1)

    def loss(self, player: str, shared: Tensor) -> Loss:
        return Loss(Mean(shared.sum(), float(len(shared))))

    def sample_latents(self, prompts: Prompts, options: Any) -> Tensor:
        codec = cast(Any, self.stages["codec"])
        shape = codec.shape_for(prompts.frames or self.shape.frames, self.shape.height, self.shape.width)
        return prompts.noise.normal("start", shape[0], 1, *shape[1:]) * 0.1 + self.level

    def sample(self, prompts: Prompts, options: Any) -> Tensor:
        latents = self.sample_latents(prompts, options)  # B t 1 h w
        return cast(Any, self.stages["codec"]).decode(latents[:, :, 0].clamp(0, 1) * 15)

    def reconstruct(self, batch: Batch) -> Tensor:
        return cast(Any, self.stages["codec"]).reconstruct(batch)
