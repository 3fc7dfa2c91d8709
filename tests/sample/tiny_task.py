"""The smallest tasks that behave like real ones, and runs made with them: what sampling, evaluation and comparison are tested on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

import torch
from einops import rearrange, repeat
from pydantic import Field
from torch import Tensor, nn

from kineograph.core.batch import Batch, Prompts
from kineograph.core.capabilities import SupportsContinuation, SupportsReconstruction, SupportsSampling
from kineograph.core.config import Config, StageConfig, Tree
from kineograph.core.errors import ConfigError
from kineograph.core.noise import Noise
from kineograph.core.run_folder import RunFolder
from kineograph.core.task import BuildContext, Codec, Loss, Mean, Task, task_state_dict
from kineograph.stage.build import build_task
from kineograph.stage.spec import read_stage
from kineograph.train import checkpoint


class TinyCodecConfig(StageConfig):
    levels: int = 4


class TinyCodec(Codec, SupportsReconstruction):
    """Brightness of 8 × 8 blocks, in a few levels."""

    Config = TinyCodecConfig

    def __init__(self, config: TinyCodecConfig) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))
        self.vocabulary = config.levels

    @classmethod
    def build(cls, config: TinyCodecConfig, context: BuildContext) -> TinyCodec:
        return cls(config)

    def trainable(self, player: str) -> list[nn.Module]:
        return [self]

    def encode(self, pixels: Tensor, frame_mask: Tensor | None = None) -> Tensor:
        blocks = rearrange(pixels, "b t c (h i) (w j) -> b t h w (c i j)", i=8, j=8).mean(-1)
        return (blocks * self.gain * (self.vocabulary - 1)).round().long().clamp(0, self.vocabulary - 1)

    def mask_for(self, frame_mask: Tensor) -> Tensor:
        return frame_mask

    def decode(self, tokens: Tensor) -> Tensor:
        return repeat(tokens / (self.vocabulary - 1), "b t h w -> b t 3 (h 8) (w 8)")

    def shape_for(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        if height % 8 or width % 8:
            raise ConfigError(f"size={height}x{width} does not fit tiny: use multiples of 8")
        return frames, height // 8, width // 8

    def reconstruct(self, batch: Batch) -> Tensor:
        return self.decode(self.encode(batch.video))

    def forward(self, batch: Batch, noise: Noise) -> Tensor:
        return (self.reconstruct(batch) - batch.video).square().flatten(1).mean(1) * self.gain

    def loss(self, player: str, shared: Tensor) -> Loss:
        return Loss(Mean(shared.sum(), float(len(shared))))


class TinySampling(Config):
    guidance: float = Field(1.0, ge=0)
    steps: int = Field(2, ge=1)
    palette: tuple[float, ...] = (0.1,)


class TinyConfig(StageConfig):
    references: ClassVar[tuple[str, ...]] = ("codec",)
    codec: str | None = None
    sample: TinySampling = TinySampling()

    def reads(self) -> frozenset[str]:
        return frozenset({"pixels", "captions"})


class TinyGenerator(Task, SupportsSampling, SupportsContinuation):
    """Noise, plus the length of the caption as brightness; with dropout, so that a wrong mode shows."""

    Config = TinyConfig

    def __init__(self, config: TinyConfig, context: BuildContext) -> None:
        super().__init__(reads=config.reads())
        self.shape = context.shape
        self.stages = {"codec": context.stage(config.codec)} if config.codec else {}
        self.scale = nn.Parameter(torch.tensor(0.1))
        self.mix = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)

    @classmethod
    def build(cls, config: TinyConfig, context: BuildContext) -> TinyGenerator:
        return cls(config, context)

    def trainable(self, player: str) -> list[nn.Module]:
        return [self]

    def forward(self, batch: Batch, noise: Noise) -> Tensor:
        brightness = batch.video.flatten(1).mean(1)
        return (brightness - self.scale + 0.1 * noise.uniform("wobble")).square()

    def loss(self, player: str, shared: Tensor) -> Loss:
        return Loss(Mean(shared.sum(), float(len(shared))))

    def compile_targets(self) -> list[nn.Module]:
        return [self.mix]

    def sample(self, prompts: Prompts, options: TinySampling) -> Tensor:
        frames = prompts.frames or self.shape.frames
        height, width = prompts.height or self.shape.height, prompts.width or self.shape.width
        pixels = prompts.noise.uniform("pixels", frames, self.shape.channels, height, width)
        hint = self.dropout(self.mix(torch.ones(len(prompts), 4, device=pixels.device)).tanh()).mean(1)
        lengths = torch.tensor([len(text) for text in prompts.captions or [""] * len(prompts)], device=pixels.device)
        less = torch.tensor([len(text) for text in prompts.negative or [""] * len(prompts)], device=pixels.device)
        level = options.guidance * (0.01 * (lengths - less) + hint) + sum(options.palette) / options.steps
        pixels = (
            0.5 * level.sigmoid()[:, None, None, None, None] + pixels * self.scale
        )  # inside [0, 1], so that nothing hides in a clamp
        if prompts.prime is not None:
            pixels[:, : prompts.prime.shape[1]] = prompts.prime
        return pixels


class Silent(StageConfig):
    def reads(self) -> frozenset[str]:
        return frozenset({"pixels", "captions"})


class OptionlessGenerator(TinyGenerator):
    """Has nothing to set when it samples, and continues nothing."""

    Config = Silent  # type: ignore[assignment]

    def can_continue(self) -> bool:
        return False

    def __init__(self, config: Silent, context: BuildContext) -> None:
        super().__init__(TinyConfig(task=config.task), context)

    def sample(self, prompts: Prompts, options: None) -> Tensor:
        return super().sample(prompts, TinySampling())


class UncaptionedConfig(TinyConfig):
    def reads(self) -> frozenset[str]:
        return frozenset({"pixels"})


class UncaptionedGenerator(TinyGenerator):
    Config = UncaptionedConfig


class PairCodec(TinyCodec):
    """The first frame alone, then two frames a token."""

    def shape_for(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        if frames % 2 == 0:
            raise ConfigError(f"frames={frames} does not fit pairs: use 2k + 1 (1, 3, 5 …)")
        return 1 + (frames - 1) // 2, *super().shape_for(1, height, width)[1:]


class CountingSampling(TinySampling):
    overlap: int = Field(3, ge=1)


class CountingConfig(TinyConfig):
    sample: CountingSampling = CountingSampling()


class Counting(TinyGenerator):
    """Frames that count on from those given: their number in red, the length of the caption in green, their noise in blue."""

    Config = CountingConfig
    STEP = 1 / 255

    def usual_overlap(self, options: CountingSampling) -> int:
        return options.overlap

    def sample(self, prompts: Prompts, options: CountingSampling) -> Tensor:
        frames, prime = prompts.frames or self.shape.frames, prompts.prime
        given = prime.shape[1] if prime is not None else 0
        for number in (frames, given) if prime is not None else (frames,):
            self.stages["codec"].shape_for(number, self.shape.height, self.shape.width)
        pixels = torch.zeros(len(prompts), frames, 3, self.shape.height, self.shape.width)
        last = prime[:, -1, 0].mean((1, 2)) if prime is not None else torch.full((len(prompts),), -self.STEP)  # B
        new = torch.arange(1, frames - given + 1)
        pixels[:, given:, 0] = (last[:, None] + new * self.STEP).remainder(1.0)[..., None, None]
        pixels[:, given:, 1] = torch.tensor([len(text) / 255 for text in prompts.captions or [""]])[:, None, None, None]
        pixels[:, given:, 2] = prompts.noise.uniform("blue", frames)[:, given:, None, None]
        if prime is not None:
            pixels[:, :given] = prime * 0.5 + 0.25  # as decoded: not quite what was given
        return pixels


HERE = "tests.sample.tiny_task"


def tree_for(
    frames: int = 1,
    generator: str | None = "TinyGenerator",
    codec: bool = True,
    steps: int = 20,
    codec_task: str = "TinyCodec",
    **data: object,
) -> Tree:
    """A resolved config as `kineo train` saves it."""
    stages: Tree = {}
    if codec:
        stages["tokenizer"] = {"task": f"{HERE}.{codec_task}"}
    if generator:
        stages["generator"] = {"task": f"{HERE}.{generator}"}
        if generator != "OptionlessGenerator" and codec:
            stages["generator"]["codec"] = "tokenizer"
    for stage in stages.values():
        stage["data"] = {"source": "moving_digits", "size": [32, 32], "frames": frames, "channels": 3, **data}
        stage["train"] = {"steps": steps}
    return {"name": "tiny", "preset": None, "resolved": True, "seed": 3, "prompts": "auto", "stages": stages}


def save_stage(run: RunFolder, name: str, step: int, ema: bool = True, tweak: float = 0.0) -> Task:
    """Write a checkpoint as the Trainer does: fresh weights, with an average that differs from them. → the task, with the average."""
    torch.manual_seed(step)
    loaded = {}
    for earlier in run.config()["stages"]:
        if earlier == name:
            break
        loaded[earlier] = build_task(read_stage(run.config(), earlier), lambda other: loaded[other], print)
    task = build_task(read_stage(run.config(), name), lambda other: loaded[other], print)
    weights = {key: value.clone() for key, value in task_state_dict(task).items()}
    tensors = {"model": weights}
    if ema:
        tensors["ema"] = {key: value + 0.01 + tweak for key, value in weights.items()}
        task.load_state_dict(tensors["ema"])
    checkpoint.save(run.checkpoints(name), step, tensors, {"assets": {}, "best": None, "elapsed": 1.0})
    return task


def make_run(place: Path, /, *stages: str, step: int = 20, **settings: object) -> RunFolder:
    """A run with the named stages trained (all of them, by default)."""
    run = RunFolder(place)
    place.mkdir(parents=True)
    tree = tree_for(**settings)  # type: ignore[arg-type]
    run.write_config(tree)
    for name in stages or tree["stages"]:
        save_stage(run, name, step)
    return run


def log(run: RunFolder, *records: dict) -> None:
    with open(run.metrics_file, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
