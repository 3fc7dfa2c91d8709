"""One player's optimizer: AdamW, learning-rate schedule, gradient clipping, and the fp16 loss scale."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from kineograph.core.device_copy import copy_to_device
from kineograph.core.errors import InputError
from kineograph.train.config import PlayerConfig
from kineograph.train.dtensors import local_parameter, shard_like, to_local, total_norm
from kineograph.train.low_memory_adamw import LowMemoryState, UpdateRule


def learning_rate_at(config: PlayerConfig, step: float, steps: int) -> float:
    """Learning rate of the update from `step` to `step` + 1 of the schedule: warm-up, then constant, cosine or linear to `final_lr`."""
    if step < config.warmup:
        return min(config.lr, config.lr * (step + 1) / config.warmup)
    if config.schedule == "constant":
        return config.lr
    done = min(1.0, (step - config.warmup) / max(1, steps - config.warmup))
    share = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.lr * (config.final_lr + (1 - config.final_lr) * share)


class Optimizer:
    """AdamW over named parameters, by torch's fused kernel or by low_memory_adamw.py. Its state is saved by name.

    Gradients arrive as d(sum)/dθ. The kernel divides by the count, unscales, clips, and skips an update whose gradient
    is not finite, so the host never waits for the device.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: PlayerConfig) -> None:
        self.config = config
        self.parameters = dict(parameters)
        self.parts = {name: local_parameter(p) for name, p in self.parameters.items()}
        self.is_offloaded = any(part.device.type == "cpu" for part in self.parts.values())
        self.decayed = {name for name, p in self.parameters.items() if p.ndim >= 2}
        self.low_memory: dict[str, LowMemoryState] = {}
        if config.optimizer != "adamw":
            is_8bit = config.optimizer == "adamw_8bit"
            self.low_memory = {
                name: LowMemoryState(self.parts[name], is_8bit, p.numel()) for name, p in self.parameters.items()
            }
            return
        matrices = [part for name, part in self.parts.items() if name in self.decayed]
        vectors = [part for name, part in self.parts.items() if name not in self.decayed]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
        )

    def step(self, rate: float, divisor: Tensor) -> tuple[Tensor, Tensor]:
        """Update with gradients / divisor, clipped. → gradient norm, and 1.0 if the update was skipped (0-d, on device)."""
        gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        for name, gradient in gradients.items():
            self.parts[name].grad = to_local(gradient)
        norm = total_norm(gradients.values()) / divisor
        skipped = (~torch.isfinite(norm)).to(torch.float32)
        if self.config.clip is not None:
            divisor = divisor * torch.clamp(norm / self.config.clip, min=1.0)
        if self.low_memory:
            self._low_memory_step(rate, divisor.to(torch.float32), skipped)
        else:
            for group in self.adamw.param_groups:
                group["lr"] = rate
            # As torch's GradScaler does: the fused kernel divides by grad_scale and skips where found_inf is set.
            scale, found_inf = divisor.to(torch.float32), skipped
            if self.is_offloaded:  # the kernel's own copies to main memory do not wait for the device
                scale, found_inf = scale.cpu(), found_inf.cpu()
            self.adamw.grad_scale, self.adamw.found_inf = scale, found_inf  # type: ignore[attr-defined]
            self.adamw.step()
        for name, p in self.parameters.items():
            p.grad = self.parts[name].grad = None
        return norm, skipped

    def _low_memory_step(self, rate: float, divisor: Tensor, skipped: Tensor) -> None:
        config = self.config
        numbers = (rate, config.weight_decay, *config.betas, config.eps, 0.0)
        lr, decay, beta1, beta2, eps, zero = copy_to_device(torch.tensor(numbers), divisor.device)
        for name, state in self.low_memory.items():
            weight_decay = decay if name in self.decayed else zero
            state.update(UpdateRule(lr, weight_decay, beta1, beta2, eps, divisor, skipped))

    def state_bytes(self, name: str) -> int:
        """Bytes of a parameter's state on this rank, which the first step allocates."""
        part = self.parts[name]
        return self.low_memory[name].bytes if self.low_memory else 2 * part.numel() * part.element_size()

    def state(self) -> dict[str, Tensor]:
        """`exp_avg.<parameter>` …; DTensors where the parameter is one."""
        states = (
            {name: state.tensors for name, state in self.low_memory.items()}
            if self.low_memory
            else {name: self.adamw.state.get(p, {}) for name, p in self.parts.items()}
        )
        return {
            f"{kind}.{name}": shard_like(value, self.parameters[name])
            for name, state in states.items()
            for kind, value in state.items()
        }

    def allocate(self, keys: Iterable[str]) -> dict[str, Tensor]:
        """Allocate the state that a checkpoint has under `keys`. → its tensors by key, to load the saved values into."""
        saved_kinds: dict[str, set[str]] = {}
        for key in keys:
            kind, _, name = key.partition(".")
            saved_kinds.setdefault(name, set()).add(kind)
        unknown = sorted(saved_kinds.keys() - self.parts.keys())
        if unknown:
            raise InputError(
                f"the saved optimizer has moments of {', '.join(unknown[:3])}, which this task does not train"
            )
        for name, kinds in saved_kinds.items():
            state = self.low_memory[name].allocate() if self.low_memory else self._allocate_adamw(self.parts[name])
            if kinds != state.keys():
                raise InputError(
                    f"the saved optimizer has {', '.join(sorted(kinds))} of {name}, which does not fit optimizer={self.config.optimizer}: "
                    "resume with the optimizer that the run began with"
                )
        return self.state()

    def _allocate_adamw(self, part: nn.Parameter) -> dict[str, Tensor]:
        """The fused kernel needs `step` as a float32 scalar on the parameter's device."""
        state = {"step": torch.zeros((), device=part.device)}
        state |= {kind: torch.zeros_like(part, requires_grad=False) for kind in ("exp_avg", "exp_avg_sq")}
        self.adamw.state[part] = state
        return state


class LossScale:
    """Dynamic loss scale for fp16, on the device: halves after an overflow, doubles after 2,000 good steps in a row."""

    def __init__(self, device: torch.device, start: float = 2.0**16, patience: int = 2000) -> None:
        self.value = torch.tensor(start, device=device)
        self.good = torch.zeros((), device=device)
        self.patience = patience

    def update(self, overflow: Tensor) -> None:
        good = torch.where(overflow > 0, torch.zeros_like(self.good), self.good + 1)
        grown = good >= self.patience
        self.value = torch.where(overflow > 0, self.value * 0.5, torch.where(grown, self.value * 2.0, self.value))
        self.good = torch.where(grown, torch.zeros_like(good), good)

    def state(self) -> dict[str, Tensor]:
        return {"value": self.value, "good": self.good}

    def load(self, state: Mapping[str, float]) -> None:
        self.value.fill_(state["value"])
        self.good.fill_(state["good"])
