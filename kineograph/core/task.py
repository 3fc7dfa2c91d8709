"""The Task seam: the modules, losses and sampling of one stage. The Trainer knows nothing else about a family."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn

from kineograph.core.batch import Batch, Shape
from kineograph.core.config import StageConfig
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.noise import Noise
from kineograph.core.notes import Note

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T", bound="Task")


@dataclass(frozen=True)
class Mean:
    """A sum and a count, so that means join over micro-batches, ranks and validation batches."""

    sum: Tensor
    count: Tensor | float

    def value(self) -> Tensor:
        return self.sum / self.count


@dataclass
class Loss:
    """The loss of one player and its named terms for the log."""

    total: Mean
    terms: dict[str, Mean] = field(default_factory=dict)


def _no_stage(name: str) -> Task:
    raise KeyError(f"stage {name!r} is not available here")


@dataclass
class BuildContext:
    """The inputs of `Task.build` beside the config. With the `assets` of a saved stage no data is read."""

    shape: Shape
    seed: int = 0
    # A trained earlier stage, frozen, by its name.
    stage: Callable[[str], Task] = _no_stage
    # The training captions, to learn a vocabulary from.
    captions: Callable[[], list[str]] = list
    assets: dict[str, str] = field(default_factory=dict)
    # Writes a line to the log.
    note: Note = print
    # The stage's name: the key of its noise where several stages draw for one picture.
    name: str = ""
    # False: the stage is loaded to encode, draw or be evaluated, and networks of its losses may be missing.
    for_training: bool = True

    def codec(self, name: str, key: str = "codec") -> Codec:
        """The earlier stage `name`, which must be a codec; `key` is the config key that names it."""
        stage = self.stage(name)
        if not isinstance(stage, Codec):
            raise ConfigError(f"{key}={name} is not a codec: name a stage of vqgan, cvivit or causal_vae")
        return stage

    def token_codec(self, name: str, key: str = "codec") -> tuple[Codec, int]:
        """The earlier stage `name`, which must be a codec with a codebook, and the size of its vocabulary."""
        codec = self.stage(name)
        if not isinstance(codec, Codec) or codec.vocabulary is None:
            raise ConfigError(f"{key}={name} gives no tokens: name a codec with a codebook, such as vqgan or cvivit")
        return codec, codec.vocabulary


class Task(nn.Module):
    """One stage. A module that holds a subclass names it `TASK`.

    Parameters belong to players: groups that train against each other or apart, each with its own optimizer, schedule, clip and EMA.
    Earlier stages (a codec, a base generator) go into `stages`, a plain dict, so that they are neither trained nor saved here.
    What only some tasks can do is declared by inheriting a protocol of core/capabilities.py.
    """

    Config: ClassVar[type[StageConfig]]

    def __init__(self, players: tuple[str, ...] = ("model",), reads: frozenset[str] = frozenset({"pixels"})) -> None:
        super().__init__()
        self.players = players
        # The fields of the data that training needs: "pixels", "captions", "sketch", "audio".
        self.reads = reads
        self.stages: dict[str, Task] = {}
        # Set by the trainer; sampling and evaluation use it too.
        self.precision = "auto"

    @classmethod
    def build(cls, config: Any, context: BuildContext) -> Self:
        """Build the stage. The constructor takes both, unless a class says otherwise."""
        make: Any = cls
        return make(config, context)

    def stage(self, key: str, kind: type[T]) -> T:
        """The earlier stage under `key`; `build` has checked its type."""
        stage = self.stages[key]
        assert isinstance(stage, kind), key
        return stage

    def train(self, mode: bool = True) -> Self:
        """Set training mode everywhere but in frozen parts."""
        if is_frozen(self):
            return self
        super().train(mode)
        for part in frozen_parts(self).values():
            part.eval()
        return self

    # training ----------------------------------------------------------------------------------------------------

    def trainable(self, player: str) -> list[nn.Module]:
        """The modules whose parameters this player owns."""
        raise NotImplementedError

    def is_active(self, player: str, step: int) -> bool:
        """Whether this player trains in this step; a discriminator may start late."""
        return True

    def forward(self, batch: Batch, noise: Noise) -> Any:
        """Compute what the players of a step share: reconstructions, hidden states, targets."""
        raise NotImplementedError

    def loss(self, player: str, shared: Any) -> Loss:
        """The loss of `player`, from the result of `forward`."""
        raise NotImplementedError

    def validate(self, batch: Batch, noise: Noise) -> dict[str, Mean]:
        """Named means over a batch, in eval mode with EMA weights and fixed noise. The lowest `loss` is the best."""
        loss = self.loss(self.players[0], self(batch, noise))
        return {"loss": loss.total, **loss.terms}

    # for compilation, sharding and checkpoints -------------------------------------------------------------------

    def compile_targets(self) -> list[nn.Module]:
        """Modules that torch.compile compiles one by one, in place."""
        return []

    def blocks(self) -> list[nn.Module]:
        """Repeated blocks: the units of activation checkpointing and sharding."""
        return []

    def assets(self) -> dict[str, str]:
        """Text that a rebuild needs beside the weights, such as a learned vocabulary."""
        return {}

    def tokens_per_clip(self) -> int | None:
        """Sequence length of the trained network, for estimates; None where there is no sequence."""
        return None


class Codec(Task):
    """A stage that turns pixels into tokens or latents and back."""

    # False: latents are continuous.
    has_codebook: ClassVar[bool] = True
    # Number of codes; None for continuous latents.
    vocabulary: int | None = None
    # Channels of the latents that `encode_latents` gives; None: it gives none.
    latent_channels: int | None = None
    # Of the clips that it was trained on.
    shape: Shape

    def shape_for(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Token grid (t, h, w) of a clip; raises a ConfigError that names the sizes that fit."""
        raise NotImplementedError

    def clip_lengths(self, most: int, height: int, width: int) -> dict[int, int]:
        """Numbers of frames up to `most` that fit, each with its latent frames."""
        lengths = {}
        for frames in range(1, most + 1):
            try:
                lengths[frames] = self.shape_for(frames, height, width)[0]
            except ConfigError:  # such as 4 frames, where a codec takes 1 + 4k
                continue
        return lengths

    def mask_for(self, frame_mask: Tensor) -> Tensor:
        """B T → B t: which latent frames hold a real frame, where clips of a batch differ in length."""
        raise NotImplementedError

    def encode(self, pixels: Tensor, frame_mask: Tensor | None = None) -> Tensor:
        """B T C H W in [0, 1] → tokens B t h w, int64; or latents B t c h w."""
        raise NotImplementedError

    def decode(self, tokens: Tensor) -> Tensor:
        """Tokens B t h w, or latents B t c h w → B T C H W in [0, 1]."""
        raise NotImplementedError

    def encode_latents(self, pixels: Tensor) -> Tensor:
        """B T C H W in [0, 1] → B t c h w; with a codebook, the values before quantization."""
        return self.encode(pixels)

    def decode_latents(self, latents: Tensor) -> Tensor:
        """B t c h w → B T C H W in [0, 1]; with a codebook, through the nearest codes."""
        return self.decode(latents)


class PosteriorCodec(Codec):
    """A variational codec: it encodes to a distribution over latents."""

    has_codebook: ClassVar[bool] = False

    @property
    def spatial(self) -> int:
        """Pixels on a side of a latent."""
        raise NotImplementedError

    @property
    def scale(self) -> Tensor | float:
        """Latents are multiplied by this, so that their variance is about 1."""
        raise NotImplementedError

    def posterior(self, pixels: Tensor, frame_mask: Tensor | None = None) -> Tensor:
        """B T C H W in [0, 1] → mean and log-variance, B t 2c h w, not scaled."""
        raise NotImplementedError

    def latents_of(self, posterior: Tensor, noise: Noise | None = None, name: str = "posterior") -> Tensor:
        """A scaled sample of the posterior; without noise, its mean."""
        raise NotImplementedError


def find_codec(task: Task) -> Codec | None:
    """The codec that a generator's tokens or latents are made by; None for a stage without one."""
    codec = task.stages.get("codec")
    return codec if isinstance(codec, Codec) else None


def player_parameters(task: Task, player: str) -> dict[str, nn.Parameter]:
    """A player's trainable parameters by their names in the task, in a fixed order, each once."""
    owned = {id(p) for module in task.trainable(player) for p in module.parameters() if p.requires_grad}
    return {name: p for name, p in task.named_parameters() if id(p) in owned}


def is_fake_or_meta() -> bool:
    """Whether new tensors have a shape but no data: on the meta device, or in an estimate. Weights are not read then."""
    probe = torch.empty(0)
    return probe.is_meta or type(probe) is not Tensor


# Frozen parts ----------------------------------------------------------------------------------------------------


def freeze(module: M) -> M:
    """Eval mode and no gradients; `Task.train` leaves it in eval mode, and checkpoints leave it out."""
    module.eval().requires_grad_(False)
    vars(module)["_frozen"] = True
    return module


def is_frozen(module: nn.Module) -> bool:
    return "_frozen" in vars(module)


def frozen_parts(module: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    """The outermost frozen modules inside, by name."""
    parts: dict[str, nn.Module] = {}
    for name, child in module.named_children():
        if is_frozen(child):
            parts[prefix + name] = child
        else:
            parts |= frozen_parts(child, f"{prefix}{name}.")
    return parts


# Weights ---------------------------------------------------------------------------------------------------------


def task_state_dict(task: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers as a checkpoint holds them: without frozen parts, which come from elsewhere."""
    frozen = tuple(f"{name}." for name in frozen_parts(task))
    return {name: value for name, value in task.state_dict().items() if not name.startswith(frozen)}


def load_weights(task: nn.Module, weights: dict[str, Tensor]) -> None:
    """Load weights with exactly the names and shapes of `task_state_dict`."""
    check_shapes(task, {name: tuple(value.shape) for name, value in weights.items()})
    task.load_state_dict(weights, strict=False)


def check_shapes(task: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse weights whose names and shapes are not those of `task_state_dict`."""
    check_weights(task, shapes)
    for name, value in task_state_dict(task).items():
        if shapes[name] != tuple(value.shape):
            raise InputError(
                f"the saved weights do not fit {type(task).__name__}: {name} has shape {list(shapes[name])}, and this task "
                f"needs {list(value.shape)}; load them with the config they were trained with"
            )


def check_weights(task: nn.Module, names: Collection[str]) -> None:
    """Refuse weights whose names are not those of `task_state_dict`."""
    expected, given = task_state_dict(task).keys(), set(names)
    missing, unexpected = sorted(expected - given), sorted(given - expected)
    if missing or unexpected:
        raise InputError(
            f"the saved weights do not fit {type(task).__name__}: missing {missing[:3] or 'none'}, unexpected {unexpected[:3] or 'none'} "
            f"({len(missing)} and {len(unexpected)} names); load them with the config they were trained with"
        )
