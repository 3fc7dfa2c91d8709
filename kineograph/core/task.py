"""The Task seam: one stage's modules, losses and sampling. The Trainer knows nothing else about a family."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kineograph.core.batch import Batch, Prompts, Shape
from kineograph.core.config import StageConfig
from kineograph.core.errors import InputError
from kineograph.core.noise import Noise

MOST_SHAPES = 128  # that a compiled module is prepared for, training and drawing counted apart
LARGE = 500_000_000  # weights in blocks


@dataclass(frozen=True)
class Mean:
    """A mean that can still be joined with others: over micro-batches, ranks and validation batches."""

    sum: Tensor
    count: Tensor | float

    def value(self) -> Tensor:
        return self.sum / self.count


@dataclass
class Loss:
    """What one player descends, and the named parts it is made of (for the log, detached by whoever reads them)."""

    total: Mean
    terms: dict[str, Mean] = field(default_factory=dict)


@dataclass
class BuildContext:
    """What a Task may ask for when it is built. With `assets` from a saved stage it never needs the data."""

    shape: Shape
    seed: int = 0
    stage: Callable[[str], Task] = lambda name: _no_stage(name)  # a trained earlier stage, frozen, by its name
    captions: Callable[[], list[str]] = list  # training captions, to learn a vocabulary from
    assets: dict[str, str] = field(default_factory=dict)
    note: Callable[[str], None] = print  # a line for the log ("perceptual loss is off: …")
    name: str = ""  # of the stage: what its draws are keyed by, where several stages draw for one picture


def _no_stage(name: str) -> Task:
    raise KeyError(f"stage {name!r} is not available here")


class Task(nn.Module):
    """One stage. Subclasses fill in this interface; a module that holds one names it `TASK`.

    Earlier stages that it uses (a codec, a base generator) are kept in `self.stages`, a plain dict and not a module, so that
    they are neither trained nor saved here. Parameters belong to players: groups that train against each other or apart, each with its own optimizer,
    schedule, clip and EMA. What the players of one step share is computed once by `forward`.
    """

    Config: ClassVar[type[StageConfig]]
    always_encode = False  # whether steps ask the frozen stages also where a cache holds what they make of the data
    players: ClassVar[tuple[str, ...]] = ("model",)
    reads: ClassVar[frozenset[str]] = frozenset({"pixels"})  # of "pixels", "captions"; what training needs
    supports_buckets: bool = False  # trains on clips of several shapes, each batch of one (data.buckets)
    continues: ClassVar[bool] = False  # `sample` takes `prompts.prime` as the first frames of the clip that it gives
    enlarges: bool = False  # `sample` takes `prompts.prime` as the picture that it makes larger
    animates: bool = False  # `sample` begins with the first frame of a real sample that stands beside the prompt
    inpaints: bool = (
        False  # `sample` takes `prompts.prime` as a picture of which it draws anew what `prompts.mask` says
    )

    def __init__(self) -> None:
        super().__init__()
        self.stages: dict[str, Task] = {}
        self.precision = "auto"  # what it is trained in, and so judged in
        self.sample_size: tuple[int, int] | None = None  # of what `sample` gives; None: that of the data

    @classmethod
    def build(cls, config: Any, context: BuildContext) -> Task:
        raise NotImplementedError

    @classmethod
    def reads_for(cls, config: Any) -> frozenset[str]:
        """What training needs under this config: an unconditional model needs no captions."""
        return cls.reads

    # training ----------------------------------------------------------------------------------------------------

    def check_precision(self, precision: str) -> None:
        """Refuse, with a ConfigError, a precision (fp32, bf16, fp16) that this task cannot be trained in."""

    def trainable(self, player: str) -> list[nn.Module]:
        """The modules whose parameters this player owns."""
        raise NotImplementedError

    def is_active(self, player: str, step: int) -> bool:
        """Whether this player takes part in this step (a discriminator may start late or rest)."""
        return True

    def forward(self, batch: Batch, noise: Noise) -> Any:
        """What the players of a step share: reconstructions, hidden states, targets."""
        raise NotImplementedError

    def loss(self, player: str, shared: Any) -> Loss:
        raise NotImplementedError

    def validate(self, batch: Batch, noise: Noise) -> dict[str, Mean]:
        """Named means over a validation batch, in eval mode with EMA weights and fixed noise. The lowest `loss` is the best."""
        found = self.loss(self.players[0], self(batch, noise))
        return {"loss": found.total, **found.terms}

    # seeing ------------------------------------------------------------------------------------------------------

    def reconstruct(self, batch: Batch) -> Tensor | None:
        """Pixels to show beside the input, for codecs; None for what does not reconstruct."""
        return None

    @property
    def reconstructs(self) -> bool:
        return type(self).reconstruct is not Task.reconstruct

    def sample(self, prompts: Prompts, options: Any) -> Tensor:
        """Pixels for prompts, B T C H W, float in [0, 1]; `options` is the stage's `sample` config."""
        raise NotImplementedError

    def resize_reference(self, pixels: Tensor) -> Tensor:
        """Real pixels, B T C H W, in the size that `sample` draws, to be held against what it gives."""
        return pixels

    def prime_size(self, options: Any) -> tuple[int, int] | None:
        """Of a picture that is to be enlarged: the size in which it is given; None: in that of what is drawn."""
        return None

    def describe_start(self, prompts: Prompts) -> str | None:
        """What `sample` would draw from with these prompts, in words for a label, where captions alone do not say it."""
        return None

    def takes_captions(self) -> bool:
        """Whether `sample` draws after captions: by itself, or through a stage that draws for it."""
        return "captions" in self.reads

    @property
    def can_sample(self) -> bool:
        return type(self).sample is not Task.sample

    def sample_latents(self, prompts: Prompts, options: Any) -> Tensor:
        """What `sample` would decode, undecoded: latents B t c h w or tokens B t h w."""
        raise NotImplementedError

    @property
    def can_sample_latents(self) -> bool:
        return type(self).sample_latents is not Task.sample_latents

    # what can be computed once -----------------------------------------------------------------------------------

    @classmethod
    def can_cache(cls, config: Any) -> bool:
        """Whether `precompute` has something to give under this config."""
        return False

    @classmethod
    def cache_facts(cls, config: Any) -> dict[str, Any]:
        """What `precompute` depends on besides the data, the stages that the config refers to and its `text`: digests of files, options.
        A cache that was made under others is another cache."""
        return {}

    def precompute(self, batch: Batch) -> dict[str, Tensor]:
        """What a cache may hold of a batch instead of pixels and captions: `tokens`, `latents` or `image_embed`, and where what reads
        captions is frozen `text_embed`, and `text_embeds` with `text_mask`; `first_frame`, uint8, where clips' first frames are needed as they are."""
        raise NotImplementedError

    # how the outside treats it -----------------------------------------------------------------------------------

    def compile_targets(self) -> list[nn.Module]:
        """Modules that torch.compile takes one by one, in place."""
        return []

    def blocks(self) -> list[nn.Module]:
        """Repeated blocks: the units of activation checkpointing and sharding."""
        return []

    def assets(self) -> dict[str, str]:
        """Text that a rebuild needs beside the weights, such as a learned vocabulary."""
        return {}

    def remap_init(self, weights: dict[str, Tensor], where: str) -> dict[str, Tensor]:
        """Weights that a stage starts from (`init`) by the names that they have here. Refuses, with an InputError, what is no start for it."""
        return weights

    @classmethod
    def memory_savers(cls, config: Any) -> dict[str, Any]:
        """Keys of the stage and the values with which it would need less memory, each on its own, for `kineo doctor` to try."""
        return {}

    def tokens_per_clip(self) -> int | None:
        """Sequence length of the network that trains here, for estimates; None where there is no sequence."""
        return None


def player_parameters(task: Task, player: str) -> dict[str, nn.Parameter]:
    """A player's trainable parameters by their names in the task, in a fixed order, each once."""
    owned = {id(p) for module in task.trainable(player) for p in module.parameters() if p.requires_grad}
    return {name: p for name, p in task.named_parameters() if id(p) in owned}


def sample_shape(task: Task, shape: Shape) -> Shape:
    """The shape of what a task draws, where its data have `shape`."""
    height, width = task.sample_size or (shape.height, shape.width)
    return replace(shape, height=height, width=width)


def is_large(task: Task) -> bool:
    """Whether blocks are compiled one by one: dynamo compiles one and takes it for all that are alike. The whole of CogVideoX-2B took 155 s,
    and would again for each bucket's shape; a step of so many weights is too long for graphs to shorten it."""
    return sum(p.numel() for block in task.blocks() for p in block.parameters()) >= LARGE


def compile_task(task: Task, graphs: bool, by_block: bool = False) -> None:
    """torch.compile on the parts that the task names, in place; `graphs` runs them as CUDA graphs, so that the host launches
    one graph instead of hundreds of kernels. `by_block` takes blocks, and their forward passes alone, in place of a part that holds them:
    what is done with a block before and after it (by processes that shard it, say) is not compiled."""
    if task.supports_buckets:  # every bucket is a compilation of its own, and dynamo gives up after a few
        dynamo: Any = importlib.import_module("torch._dynamo.config")
        dynamo.recompile_limit = max(dynamo.recompile_limit, MOST_SHAPES)
    blocks = {id(block) for block in task.blocks()} if by_block else set()
    for block in task.blocks() if by_block else []:
        block.forward = torch.compile(block.forward, dynamic=False)  # type: ignore[method-assign]
    for module in task.compile_targets():
        if any(id(part) in blocks for part in module.modules()):
            continue
        # A module without weights is a kernel or two: copying its inputs into a graph would cost more than it saves.
        graphed = graphs and any(True for _ in module.parameters())
        module.compile(dynamic=False, mode="reduce-overhead" if graphed else "default")


def is_fake_or_meta() -> bool:
    """Whether tensors that are made now have a shape alone: on the meta device, or where a run is estimated. Weights are not read then."""
    probe = torch.empty(0)
    return probe.is_meta or type(probe) is not Tensor


def freeze(module: nn.Module) -> nn.Module:
    """Eval mode, no gradients, and deaf to `.train()` of whatever holds it."""
    module.eval().requires_grad_(False)
    for part in module.modules():
        part.train = lambda mode=True, _part=part: _part  # type: ignore[method-assign,assignment,misc]
    return module


def is_frozen(module: nn.Module) -> bool:
    return "train" in module.__dict__


def frozen_names(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """Names of the outermost frozen modules inside."""
    for name, child in module.named_children():
        if is_frozen(child):
            yield prefix + name
        else:
            yield from frozen_names(child, f"{prefix}{name}.")


def task_state_dict(task: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint holds of a task: parameters and buffers, without frozen helpers (they come from elsewhere)."""
    frozen = tuple(f"{name}." for name in frozen_names(task))
    return (
        {name: value for name, value in task.state_dict().items() if not name.startswith(frozen)}
        if frozen
        else task.state_dict()
    )


def load_weights(task: nn.Module, weights: dict[str, Tensor]) -> None:
    """Strict: every name of `weights_of` must be there, and nothing else."""
    check_weights(task, weights)
    task.load_state_dict(weights, strict=False)


def check_weights(task: nn.Module, names: Collection[str]) -> None:
    """Refuse weights that lack a name of `weights_of` or have one too many."""
    expected, found = task_state_dict(task).keys(), set(names)
    missing, unexpected = sorted(expected - found), sorted(found - expected)
    if missing or unexpected:
        raise InputError(
            f"the saved weights do not fit {type(task).__name__}: missing {missing[:3] or 'none'}, unexpected {unexpected[:3] or 'none'} "
            f"({len(missing)} and {len(unexpected)} names); load them with the config they were trained with"
        )
