"""What a peer gets from the race: our plan of its family, with data, sizes and minutes; and the clock of its stages."""

from __future__ import annotations

import math
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers import autocast, count_parameters
from kineograph.core.batch import Batch, Shape
from kineograph.core.config_file import load_file
from kineograph.core.errors import RunFailed
from kineograph.core.run_folder import RunFolder
from kineograph.core.task import Codec
from kineograph.run.open_data import open_data
from kineograph.run.plan import make_plan
from kineograph.stage.data import VOCABULARY_CAPTIONS, StageData
from kineograph.stage.spec import Plan, StagePlan
from kineograph.train import checkpoint

Step = Callable[[Any], Tensor | float]


class Bf16Failed(RunFailed):
    """The peer has to begin again in fp32."""


@dataclass
class Stage:
    """A stage of a peer, in the place of one or several stages of our plan. Its clock starts when it is opened."""

    track: Track
    title: str
    plans: list[StagePlan]
    started: float = field(default_factory=time.perf_counter)
    batch: int = 0
    steps: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        # Micro-batches of our plan fit into the memory.
        self.batch = self.plans[-1].train.batch_size // self.plans[-1].train.accumulate
        self.precision = self.trained_in = self.track.precision

    @property
    def limit(self) -> float:
        return sum(plan.train.seconds or 0.0 for plan in self.plans)

    @property
    def shape(self) -> Shape:
        return self.plans[-1].spec.data.shape

    def autocast(self) -> AbstractContextManager[Any]:
        return autocast(self.track.device, self.precision)

    def train(self, step: Step, prepare: Callable[[Batch], Any] = lambda batch: batch, keep: bool = False) -> None:
        """Run optimizer steps until the time is over. `keep`: prepare each batch of the data once, then repeat them in random order."""
        while True:
            try:
                for item in self._items(prepare, keep):
                    self._step(step, item)
                    self.seconds = time.perf_counter() - self.started
                    if self.seconds >= self.limit:
                        print(f"{self.title}: {self.steps} steps in {self.seconds:.1f} s", flush=True)
                        return
            except torch.OutOfMemoryError:
                if self.batch == 1:
                    raise
                self.batch //= 2
                torch.cuda.empty_cache()
                self.track.note(f"{self.title}: batches of {self.batch}, since larger ones do not fit into memory")

    def draw_with(self, draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`draw`, which goes over to fp32 where it crashes in bf16."""

        def survive(*arguments: Any) -> Tensor:
            try:
                return draw(*arguments)
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, TypeError, ValueError) as error:
                if self.precision != "bf16":
                    raise
                self.precision = "fp32"
                self.track.note(
                    f"{self.title}: fp32 in use after training, since it crashes in bf16 ({_shorten(error)})"
                )
                return draw(*arguments)

        return survive

    def _step(self, step: Step, item: Any) -> None:
        try:
            loss = float(step(item))
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, ValueError) as error:
            if self.precision != "bf16" or self.steps:
                raise
            self.precision = self.trained_in = "fp32"
            self.track.note(f"{self.title}: fp32, since it crashes in bf16 ({_shorten(error)})")
            loss = float(step(item))
        if not math.isfinite(loss):
            kind = Bf16Failed if self.precision == "bf16" else RunFailed
            raise kind(f"{self.title}: the loss is {loss} at step {self.steps} in {self.precision}")
        self.steps += 1
        if self.steps % 100 == 1:
            print(f"{self.title}: step {self.steps}, loss {loss:.4g}", flush=True)

    def _items(self, prepare: Callable[[Batch], Any], keep: bool) -> Iterator[Any]:
        data = self.track.open_data(self.plans[-1])
        loader = self.track.open_loader(data, self.batch)
        epoch, kept = len(data.source) // self.batch, []
        for (batch,) in loader.steps(0, 2**40):
            kept.append(prepare(batch.to(self.track.device)))
            yield kept[-1]
            if not keep:
                kept.clear()
            elif len(kept) == epoch:
                break
        while True:
            yield random.choice(kept)


@dataclass
class Track:
    """One peer with one seed."""

    race: Path
    family: str
    seed: int
    device: torch.device
    precision: str
    rate: float = 1.0  # factor of the peer's learning rates
    notes: list[str] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    _data: dict[str, StageData] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tree = load_file(self.race / "plans" / f"{self.family}.yaml")
        self.plan: Plan = make_plan({**tree, "seed": self.seed})

    @property
    def shape(self) -> Shape:
        """What is drawn."""
        return self.plan.stages[-1].spec.data.shape

    @property
    def codec(self) -> StagePlan:
        return next(stage for stage in self.plan.stages if issubclass(stage.spec.task, Codec))

    @property
    def generators(self) -> list[StagePlan]:
        """All stages but the codec."""
        return [stage for stage in self.plan.stages if stage.name != self.codec.name]

    def note(self, line: str) -> None:
        if line not in self.notes:
            self.notes.append(line)
            print(f"note: {line}", flush=True)

    def open_data(self, plan: StagePlan) -> StageData:
        if plan.name not in self._data:
            self._data[plan.name] = open_data(plan, self.plan.seed, note=print, opened=dict(self._data))
        return self._data[plan.name]

    def open_loader(self, data: StageData, batch: int) -> Any:
        loader = data.loader()
        loader.batch_size, loader.accumulate = batch, 1
        return loader

    def begin(self, title: str, *plans: StagePlan) -> Stage:
        """Start the clock of a stage, before its models are built."""
        self.open_data(plans[-1])
        self.stages.append(Stage(self, title, list(plans)))
        return self.stages[-1]

    def count_ours(self, *plans: StagePlan) -> int:
        """Parameters of our trained stages, those which later ones start from counted once."""
        run = RunFolder(self.race / "runs" / f"{self.family}-0")
        skipped = {getattr(plan.spec.config, "init", None) for plan in plans}
        total = 0
        for plan in plans:
            steps = checkpoint.saved_steps(run.checkpoints(plan.name))
            if not steps:
                raise RunFailed(f"{run.path} has no trained stage {plan.name} to match in size: finish the race first")
            if plan.name not in skipped:
                shapes = checkpoint.checkpoint_at(run.checkpoints(plan.name), steps[-1]).shapes("model")
                total += sum(map(math.prod, shapes.values()))
        return total

    def make_words(self, length: int) -> Words:
        source = self.open_data(self.plan.stages[-1]).source
        captions = (
            caption
            for index in range(min(len(source), VOCABULARY_CAPTIONS))
            for caption in source.formatted_captions(index)
        )
        return Words.learn(captions, length)


@dataclass
class Words:
    """Captions → numbers of words: 0 is padding, 1 an unknown word."""

    numbers: dict[str, int]
    length: int

    @classmethod
    def learn(cls, captions: Iterator[str], length: int) -> Words:
        counts = Counter(word for caption in captions for word in _split(caption))
        return cls({word: number for number, (word, _) in enumerate(counts.most_common(8190), 2)}, length)

    @property
    def size(self) -> int:
        return len(self.numbers) + 2

    def encode(self, captions: list[str] | None, device: torch.device) -> Tensor:
        """B L"""
        rows = [[self.numbers.get(word, 1) for word in _split(caption)][: self.length] for caption in captions or []]
        return torch.tensor([row + [0] * (self.length - len(row)) for row in rows], device=device)


class TextStandIn(nn.Module):
    """In the place of T5: embeddings of words and positions, and as many layers as our text encoder has. Padding is zero."""

    def __init__(self, words: Words, config: Any) -> None:
        super().__init__()
        self.words, self.width = words, config.width or 256
        self.embedding = nn.Embedding(words.size, self.width)
        self.positions = nn.Parameter(0.02 * torch.randn(words.length, self.width))
        layer = nn.TransformerEncoderLayer(
            self.width, config.heads, 4 * self.width, config.dropout, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, config.depth, enable_nested_tensor=False) if config.depth else None

    def forward(self, captions: list[str] | None) -> Tensor:
        """→ B L D"""
        ids = self.words.encode(captions, self.positions.device)
        mask, hidden = ids != 0, self.embedding(ids) + self.positions
        if self.layers is not None:
            mask_or_first = mask | (torch.arange(ids.shape[1], device=ids.device) == 0)  # no row without a key
            hidden = self.layers(hidden, src_key_padding_mask=~mask_or_first)
        return torch.where(mask[..., None], hidden, 0.0)


def make_text_stand_in(track: Track, stage: StagePlan) -> TextStandIn:
    text: Any = stage.spec.config.text  # type: ignore[attr-defined]
    layers = f" and {text.depth} transformer layer{'s' * (text.depth > 1)}, as many as ours" if text.depth else ""
    track.note(
        f"text: in the place of T5, which cannot be fetched: embeddings of words and positions{layers}, learned jointly"
    )
    return TextStandIn(track.make_words(text.length), text).to(track.device)


def drop_captions(captions: list[str] | None, share: float) -> list[str]:
    """For guidance: the null text in the place of some captions."""
    return ["" if random.random() < share else caption for caption in captions or []]


def fit_size(build: Callable[[int], nn.Module], target: int, step: int, most: int = 4096) -> int:
    """The multiple of `step` with which a model has nearest to `target` parameters; they grow with it."""

    def distance(size: int) -> float:
        try:
            with torch.device("meta"):
                return count_parameters(build(size).parameters()) / target
        except (AssertionError, ValueError):  # sizes that a constructor refuses
            return 0.0
        except (NotImplementedError, RuntimeError):  # constructors that compute
            return count_parameters(build(size).parameters()) / target

    low, high = 1, 2
    while high * step < most and distance(high * step) < 1:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if distance(middle * step) < 1 else (low, middle)
    nearest = min((low, high), key=lambda size: abs(math.log(max(distance(size * step), 1e-9))))
    return nearest * step


def make_step(
    stage: Stage,
    loss: Callable[[Any], Tensor],
    optimizer: torch.optim.Optimizer,
    clip: float | None = None,
    average: Any = None,
) -> Step:
    """Forward under autocast, backward, clip, optimizer step, EMA."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def step(item: Any) -> Tensor:
        optimizer.zero_grad()
        with stage.autocast():
            value = loss(item)
        value.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        if average is not None:
            average.update()
        return value.detach()

    return step


def average_weights(module: nn.Module) -> Any:
    """EMA of 0.995, which these trainers' option ema_beta promises; it starts with less."""
    from ema_pytorch import EMA

    return EMA(module, beta=0.995, update_after_step=0, update_every=1, include_online_model=False)


def nearest_power(codes: int) -> int:
    return int(2 ** round(math.log2(codes)))


def _split(caption: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", caption.lower())


def _shorten(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]
