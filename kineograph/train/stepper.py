"""One optimizer step of a Task: forward, each player's loss, backward, optimizer, EMA.

Nothing here waits for the device: losses, norms and skip counts stay there until the Trainer fetches them together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from kineograph.core import distributed
from kineograph.core.batch import Batch
from kineograph.core.capabilities import ChecksPrecision
from kineograph.core.device_copy import fetch_floats
from kineograph.core.errors import ConfigError
from kineograph.core.noise import Noise, key_of
from kineograph.core.task import Loss, Task, check_weights, player_parameters, task_state_dict
from kineograph.train.activation_checkpointing import checkpoint_activations
from kineograph.train.checkpoint import Checkpoint
from kineograph.train.compile import compile_task, is_compiled, is_large, uses_cuda_graphs
from kineograph.train.config import PlayerConfig, TrainConfig
from kineograph.train.ddp import GradientAverage, ReplicatedTask
from kineograph.train.dtensors import to_local
from kineograph.train.ema import Ema, swap_in_averages
from kineograph.train.fsdp import ShardedTask, check_sharding
from kineograph.train.optim import LossScale, Optimizer, learning_rate_at
from kineograph.train.parallel import Layout, ParallelConfig
from kineograph.train.precision import autocast, resolve_precision
from kineograph.train.sequence_parallel import apply_sequence_parallel
from kineograph.train.step_timer import StepTimer
from kineograph.train.tensor_parallel import apply_tensor_parallel, check_tensor_parallel, parallel_plans


def check_layout(task: Task, parallel: ParallelConfig, players: Mapping[str, PlayerConfig]) -> None:
    """Raise a ConfigError for a layout that the task or an optimizer does not support."""
    for name, player in players.items():
        if parallel.tensor > 1 and player.optimizer == "adamw_8bit":
            raise ConfigError(
                f"train.parallel.tensor={parallel.tensor} would split the rows that optimizer=adamw_8bit of {name} quantizes in blocks: "
                "use adamw_split, or train.parallel=shard"
            )
        if parallel.offload and player.optimizer != "adamw":
            raise ConfigError(
                f"train.parallel.offload=true keeps weights in main memory, where optimizer={player.optimizer} of {name} does not run: "
                "use optimizer=adamw, or offload=false"
            )
    if parallel.layout != "replicate":
        check_sharding(task)
    if parallel.static_graph and len(task.players) > 1:
        raise ConfigError(
            f"train.parallel.static_graph=true is an option of DDP, which {type(task).__name__} with its players {', '.join(task.players)} "
            "does not use: set it to false for this stage"
        )
    if parallel.tensor > 1:
        check_tensor_parallel(task, parallel.tensor)
    if parallel.sequence > 1:
        parallel_plans(task, "sequence", parallel.sequence)


def _is_on(task: Task, device: torch.device) -> bool:
    index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
    tensors = [*task.parameters(), *task.buffers()]
    return all(tensor.device.type == device.type and tensor.device.index == index for tensor in tensors)


class Stepper:
    """A Task with an optimizer and an EMA per player."""

    def __init__(
        self,
        task: Task,
        config: TrainConfig,
        players: Mapping[str, PlayerConfig] | None = None,
        device: torch.device | str = "cpu",
        seed: int = 0,
        may_compile: Callable[[], bool] = lambda: True,
    ) -> None:
        """`may_compile`: False while another process compiles the same task into torch's cache; steps are not compiled until then."""
        self.device = torch.device(device)
        if self.device.type == "cuda":
            # Shapes repeat from step to step: let cuDNN find its fastest kernels once. Which they are varies from run to run.
            torch.backends.cudnn.benchmark = not torch.are_deterministic_algorithms_enabled()
        self.layout = Layout(config.parallel, self.device, config.timeout)
        # A task of fake tensors cannot be moved, and is built where it is needed.
        self.task = task if _is_on(task, self.device) else task.to(self.device)
        self.config = config
        self.seed = seed
        self._may_compile = may_compile
        self.is_waiting = False  # for the compiler
        self.precision = resolve_precision(config.precision, self.device)
        if isinstance(task, ChecksPrecision):
            task.check_precision(self.precision)
        task.precision = config.precision
        self.players = {name: (players or {}).get(name, config) for name in task.players}
        self.sharded: ShardedTask | None = None
        self._prepare()
        self.parameters = {name: player_parameters(task, name) for name in task.players}
        self.optimizers = {name: Optimizer(self.parameters[name], self.players[name]) for name in task.players}
        self.emas = {
            name: Ema(self.parameters[name], self.players[name].ema)
            for name in task.players
            if self.players[name].ema.decay > 0
        }
        self.timer = StepTimer(self.device)
        self._requires_grad = dict.fromkeys(task.players, True)
        self.scale = LossScale(self.device) if self.precision == "fp16" else None
        self.skipped = torch.zeros((), device=self.device)  # updates skipped because the gradient was not finite
        self.skipped_in_a_row = torch.zeros((), device=self.device)
        self._set_up_reduction()

    def _prepare(self) -> None:
        """Apply to the task's blocks, in this order: tensor or sequence parallelism, activation checkpointing, compilation, FSDP2."""
        config, task, parallel = self.config, self.task, self.config.parallel
        if self.layout and parallel.tensor > 1:
            apply_tensor_parallel(task, self.layout.mesh["tensor"])
        if self.layout and parallel.sequence > 1:
            apply_sequence_parallel(task, self.layout.mesh["sequence"].get_group())
        if config.checkpointing:
            for block in task.blocks():
                checkpoint_activations(block, None if config.checkpointing is True else config.checkpointing)
        by_block = config.compile == "blocks" or (config.compile == "auto" and is_large(task))
        self.graphs = uses_cuda_graphs(config, self.device) and not by_block
        self.compiles = is_compiled(config, self.device)
        if self.compiles:
            compile_task(task, self.graphs, by_block or (bool(self.layout) and parallel.communicates_in_forward))
            if self.layout and (config.checkpointing or self.graphs):
                # Dynamo splits graphs at DDP's buckets, which fails in recomputed blocks and in CUDA graphs.
                torch._dynamo.config.optimize_ddp = False
        if self.layout.shards:
            self.sharded = ShardedTask(task, self.layout, self.precision)

    def compile_stages(self) -> None:
        """Compile the frozen stages too, for a task that runs them every step because no cache holds their outputs."""
        if self.compiles:
            for stage in self.task.stages.values():
                compile_task(stage, graphs=False)

    def _set_up_reduction(self) -> None:
        """Choose how gradients are averaged over processes."""
        self.wrapped: ReplicatedTask | ShardedTask | None = self.sharded
        self.gradient_averages: dict[str, list[GradientAverage]] = {name: [] for name in self.task.players}
        if not self.layout:
            return
        parallel = self.config.parallel
        if len(self.task.players) == 1 and not self.sharded and parallel.tensor == 1:
            self.wrapped = ReplicatedTask(self.task, parallel.bucket_mb, parallel.find_unused, parallel.static_graph)
            return
        keys = parallel.bucket_mb, parallel.find_unused
        for player, parameters in self.parameters.items():
            replicated = {name: p for name, p in parameters.items() if not isinstance(p, DTensor)}
            self.gradient_averages[player].append(GradientAverage(replicated, *keys))
            if parallel.tensor > 1:
                split = {name: p for name, p in parameters.items() if isinstance(p, DTensor)}
                self.gradient_averages[player].append(GradientAverage(split, *keys, self.layout.data_group))

    def step(
        self, step: int, batches: Sequence[Batch], position: float | None = None, pace: float = 1
    ) -> dict[str, Tensor]:
        """Make the update from `step` to `step` + 1 completed steps. → named 0-d tensors, still on the device.

        `position`: how far the schedule is, in steps of `config.steps`, if that is not `step` (train.minutes); `pace`: how far a step takes it.
        """
        position = step if position is None else position
        self.is_waiting = self.compiles and not self._may_compile()
        with torch.compiler.set_stance("force_eager") if self.is_waiting else nullcontext():
            losses = self.accumulate_gradients(step, batches, int(position))
        values: dict[str, Tensor] = {}
        overflow = torch.zeros((), device=self.device)
        for name, loss in losses.items():
            with self.timer.part("sync"):
                terms, count = loss.reduce()
            divisor = count / self.config.batch_size * (self.scale.value if self.scale else 1.0)
            if self.layout:  # gradients are averaged over data ranks, not summed
                divisor = divisor / self.layout.data_world
            lr = learning_rate_at(self.players[name], position, self.config.steps)
            with self.timer.part("optimizer"):
                norm, skipped = self.optimizers[name].step(lr, divisor)
                overflow = torch.maximum(overflow, skipped)
                if name in self.emas:
                    self.emas[name].update(step + 1, position + pace, pace)
            prefix = "" if name == self.task.players[0] else f"{name}/"
            values |= {prefix + term: value for term, value in terms.items()} | {f"{prefix}gradient_norm": norm}
        if self.scale:
            self.scale.update(overflow)
        self.skipped = self.skipped + overflow
        self.skipped_in_a_row = (self.skipped_in_a_row + 1) * overflow
        return values

    def accumulate_gradients(
        self, step: int, batches: Sequence[Batch], schedule_step: int | None = None
    ) -> dict[str, _LossSums]:
        """Add the gradients of these micro-batches to the parameters of every active player. → its losses by player."""
        schedule_step = step if schedule_step is None else schedule_step
        # For dropout and revived codes: one seed per data rank; ranks that share a model have the same.
        rank_key = (distributed.data_rank(),) if distributed.data_rank() else ()
        torch.manual_seed(key_of(self.seed, step, "torch", *rank_key) >> 1)
        if self.graphs:
            torch.compiler.cudagraph_mark_step_begin()
        active = [name for name in self.task.players if self.task.is_active(name, schedule_step)]
        losses: dict[str, _LossSums] = {name: _LossSums() for name in active}
        for number, batch in enumerate(batches, 1):
            batch = batch.to(self.device)
            noise = Noise(self.seed, step, batch.slots, schedule_step=schedule_step)
            if self.wrapped is not None and active:
                with self.wrapped.micro_batch(is_last=number == len(batches)):
                    with self.timer.part("forward"), autocast(self.precision, self.device):
                        loss = self.wrapped.loss(batch, noise)
                    if number == len(batches):
                        self.timer.align()  # the backward pass reduces gradients
                    self._backward(loss)
                losses[active[0]].add(loss)
            else:
                self._accumulate_players(active, batch, noise, losses)
        for name in active:
            for average in self.gradient_averages[name]:
                with self.timer.part("sync"):
                    average()
        return losses

    def _backward(self, loss: Loss, inputs: Sequence[Tensor] | None = None) -> None:
        """Add gradients to `inputs`; None: to all that require them."""
        # The constant batch size keeps sums over many tokens in range; `step` replaces it by the true count.
        total = loss.total.sum / self.config.batch_size
        with self.timer.part("backward"):
            (total * self.scale.value if self.scale else total).backward(inputs=inputs)

    def _accumulate_players(self, active: list[str], batch: Batch, noise: Noise, losses: dict[str, _LossSums]) -> None:
        """Add one micro-batch's gradients to the parameters of every active player."""
        self._enable_gradients(active)
        with self.timer.part("forward"), autocast(self.precision, self.device):
            shared = self.task(batch, noise)
        # The first player goes last: only it backpropagates through the shared forward pass, and frees it.
        for name in reversed(active):
            self._enable_gradients([name])
            with self.timer.part("forward"), autocast(self.precision, self.device):
                loss = self.task.loss(name, shared)
            # `inputs` keeps the others out of the shared pass, so that nothing has to be retained: a graph that lives on into the next
            # player's pass may hold memory of a CUDA graph that is replayed there, which torch refuses.
            self._backward(loss, None if name == active[0] else list(self.parameters[name].values()))
            losses[name].add(loss)
            del loss
        self._enable_gradients(active)

    def _enable_gradients(self, names: list[str]) -> None:
        """Let only the parameters of these players require gradients."""
        for name, parameters in self.parameters.items():
            requires_grad = name in names
            if self._requires_grad[name] != requires_grad:
                self._requires_grad[name] = requires_grad
                for p in parameters.values():
                    p.requires_grad_(requires_grad)

    def learning_rates(self, position: float) -> dict[str, float]:
        """Learning rates of the update at `position` of the schedule, for the log."""
        first = self.task.players[0]
        return {
            "lr" if name == first else f"{name}/lr": learning_rate_at(config, position, self.config.steps)
            for name, config in self.players.items()
        }

    @contextmanager
    def eval_mode(self, ema: bool = True) -> Iterator[Task]:
        """Yield the task with averaged weights, in eval mode and without gradients; restore it afterwards."""
        was_training = self.task.training
        self.task.eval()
        try:
            with (
                swap_in_averages(list(self.emas.values()) if ema else []),
                self.sharded.unsharded() if self.sharded else nullcontext(),
                torch.no_grad(),
                # Validation and sampling have many shapes, each used rarely: compiling would not pay off.
                torch.compiler.set_stance("force_eager"),
                autocast(self.precision, self.device),
            ):
                yield self.task
        finally:
            self.task.train(was_training)

    def find_nonfinite(self) -> list[str]:
        """Names of the task's tensors, and of their averages, that hold nan or inf. Every process must call this."""
        tensors = task_state_dict(self.task) | {
            f"{name} (averaged)": value for ema in self.emas.values() for name, value in ema.state().items()
        }
        floats = {name: to_local(value) for name, value in tensors.items() if value.is_floating_point()}
        bad = (
            torch.stack([(~value.isfinite()).any().to(self.device) for value in floats.values()]).float()
            if floats
            else torch.zeros(0)
        )
        # Shards differ between processes, and model-parallel ones are no data ranks.
        parts = distributed.all_gather_floats(bad.tolist())
        return [name for name, *each in zip(floats, *parts, strict=True) if any(each)]

    # Checkpoints ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Numbers that the next step depends on, fetched from the device at once."""
        scale = self.scale.state() if self.scale else {}
        numbers = fetch_floats({"skipped": self.skipped, "skipped_in_a_row": self.skipped_in_a_row, **scale})
        return {
            "ema_updates": {name: ema.updates for name, ema in self.emas.items()},
            "scale": {name: numbers.pop(name) for name in scale} or None,
            **numbers,
        }

    def local_state(self) -> dict[str, dict[str, Tensor]]:
        """Every tensor that the next step depends on; of a DTensor each process saves its shard."""
        saved = {
            "model": task_state_dict(self.task),
            "optimizer": {
                f"{player}/{key}": value
                for player, optimizer in self.optimizers.items()
                for key, value in optimizer.state().items()
            },
        }
        if self.emas:
            saved["ema"] = self._averages()
        return saved

    def _averages(self) -> dict[str, Tensor]:
        """The model's state with averages in place of weights, in float32; a tied weight has its average under both names."""
        averages = {name: value for ema in self.emas.values() for name, value in ema.state().items()}
        weights = {name: p for ema in self.emas.values() for name, p in ema.parameters.items()}
        by_address = {to_local(p).data_ptr(): name for name, p in weights.items() if p.numel()}
        state: dict[str, Tensor] = {}
        for name, value in task_state_dict(self.task).items():
            own = name if name in averages else by_address.get(to_local(value).data_ptr(), "")
            is_averaged = own in averages and weights[own].shape == value.shape
            state[name] = averages[own] if is_averaged else value
        return state

    def load(self, saved: Checkpoint) -> None:
        check_weights(self.task, saved.shapes("model"))
        saved.load_into("model", task_state_dict(self.task))
        if saved.has("optimizer"):  # not before the first step
            self._load_optimizers(saved)
        state = saved.state()["stepper"]
        for name, ema in self.emas.items():
            saved.load_into("ema", ema.state())
            ema.updates = state["ema_updates"].get(name, 0)
        if self.scale and state["scale"]:
            self.scale.load(state["scale"])
        self.skipped.fill_(state["skipped"])
        self.skipped_in_a_row.fill_(state["skipped_in_a_row"])

    def _load_optimizers(self, saved: Checkpoint) -> None:
        targets: dict[str, Tensor] = {}
        saved_keys = saved.shapes("optimizer").keys()
        for name, optimizer in self.optimizers.items():
            keys = [key.removeprefix(f"{name}/") for key in saved_keys if key.startswith(f"{name}/")]
            targets |= {f"{name}/{key}": value for key, value in optimizer.allocate(keys).items()}
        saved.load_into("optimizer", targets)


class _LossSums:
    """Sums and counts of one player's loss and its terms, over micro-batches."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, Tensor] = {}

    def add(self, loss: Loss) -> None:
        for name, mean in {"loss": loss.total, **loss.terms}.items():
            total = mean.sum.detach().to(torch.float32)
            count = mean.count.detach() if isinstance(mean.count, Tensor) else torch.full_like(total, mean.count)
            self.sums[name] = self.sums[name] + total if name in self.sums else total
            self.counts[name] = self.counts[name] + count if name in self.counts else count

    def reduce(self) -> tuple[dict[str, Tensor], Tensor]:
        """Means over all micro-batches and data ranks, and the count of the loss."""
        names = list(self.sums)
        stacked = torch.stack([self.sums[name] for name in names] + [self.counts[name] for name in names])
        sums, counts = distributed.all_reduce_(stacked).chunk(2)
        means = {name: sums[i] / counts[i] for i, name in enumerate(names)}
        return means, counts[names.index("loss")]
