"""One player's optimizer: AdamW, its schedule, its clip, and a step that needs no device synchronisation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from kineograph.core.errors import InputError
from kineograph.core.transfer import to_device
from kineograph.train.config import PlayerConfig
from kineograph.train.dtensors import local_parameter, shard_like, to_local, total_norm
from kineograph.train.low_memory_adamw import LowMemoryState, Rule


def learning_rate_at(config: PlayerConfig, step: int, steps: int) -> float:
    """Learning rate of the update that makes step `step` + 1: warm-up, then constant, cosine or linear to `final_lr`."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    if config.schedule == "constant":
        return config.lr
    done = min(1.0, (step - config.warmup) / max(1, steps - config.warmup))
    share = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.lr * (config.final_lr + (1 - config.final_lr) * share)


class Optimizer:
    """AdamW over named parameters, by torch's fused kernel or by lean.py. Moments are kept and restored by name, never by position.

    Gradients arrive as d(sum)/dθ; `step` divides by the count, unscales and clips inside the fused kernel, and a
    non-finite gradient turns the update into nothing there too, so the host never waits for the device.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: PlayerConfig) -> None:
        self.config = config
        self.parameters = dict(parameters)
        self.parts = {name: local_parameter(p) for name, p in self.parameters.items()}
        decays = {name: self.parts[name] for name, p in self.parameters.items() if p.ndim >= 2}
        vectors = {name: p for name, p in self.parts.items() if name not in decays}
        self.lean: dict[str, LowMemoryState] = {}
        if config.optimizer != "adamw":
            self.decays = set(decays)
            eight = config.optimizer == "adamw_8bit"
            self.lean = {
                name: LowMemoryState(self.parts[name], eight, p.numel()) for name, p in self.parameters.items()
            }
            return
        groups = [
            {"params": list(decays.values()), "weight_decay": config.weight_decay},
            {"params": list(vectors.values()), "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
        )

    def step(self, rate: float, divisor: Tensor) -> tuple[Tensor, Tensor]:
        """Update with gradients / divisor, clipped. → gradient norm, and 1.0 where the update was skipped (0-d, on device)."""
        gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        for name, gradient in gradients.items():
            self.parts[name].grad = to_local(gradient)
        norm = total_norm(gradients.values()) / divisor
        skipped = (~torch.isfinite(norm)).to(torch.float32)
        if self.config.clip is not None:
            divisor = divisor * torch.clamp(norm / self.config.clip, min=1.0)
        if self.lean:
            self._lean_step(rate, divisor.to(torch.float32), skipped)
        else:
            for group in self.adamw.param_groups:
                group["lr"] = rate
            # The attributes that torch's GradScaler sets: the fused kernel divides by grad_scale and obeys found_inf.
            self.adamw.grad_scale = divisor.to(torch.float32)  # type: ignore[attr-defined]
            self.adamw.found_inf = skipped  # type: ignore[attr-defined]
            self.adamw.step()
        for name, p in self.parameters.items():
            p.grad = self.parts[name].grad = None
        return norm, skipped

    def _lean_step(self, rate: float, divisor: Tensor, skipped: Tensor) -> None:
        config = self.config
        numbers = (rate, config.weight_decay, *config.betas, config.eps, 0.0)
        rate_, decay, beta1, beta2, eps, zero = to_device(torch.tensor(numbers), divisor.device)
        for name, lean in self.lean.items():
            lean.update(Rule(rate_, decay if name in self.decays else zero, beta1, beta2, eps, divisor, skipped))

    @property
    def moment_bytes(self) -> int:
        """Of the state that the first step makes: two moments for each parameter, of its own type, or what a leaner optimizer keeps."""
        return sum(self.moment_bytes_of(name) for name in self.parts)

    def moment_bytes_of(self, name: str) -> int:
        part = self.parts[name]
        return self.lean[name].bytes if self.lean else 2 * part.numel() * part.element_size()

    def state(self) -> dict[str, Tensor]:
        """`exp_avg.<parameter>` and so on; DTensors where the parameter is one."""
        states = (
            {name: lean.state for name, lean in self.lean.items()}
            if self.lean
            else {name: self.adamw.state.get(p, {}) for name, p in self.parts.items()}
        )
        return {
            f"{kind}.{name}": shard_like(value, self.parameters[name])
            for name, state in states.items()
            for kind, value in state.items()
        }

    def rooms_for(self, keys: Iterable[str]) -> dict[str, Tensor]:
        """Empty tensors for saved `exp_avg.<parameter>` and so on; DTensors where the parameter is one."""
        rooms: dict[str, Tensor] = {}
        for name, kinds in self._by_parameter(keys).items():
            fresh = self.lean[name].fresh() if self.lean else self._fresh(self.parts[name])
            if not fresh.keys() >= set(kinds):
                raise self._kept_otherwise(name, set(kinds) - fresh.keys())
            rooms |= {f"{kind}.{name}": shard_like(fresh[kind], self.parameters[name]) for kind in kinds}
        return rooms

    @staticmethod
    def _fresh(part: nn.Parameter) -> dict[str, Tensor]:
        """`step` is a float32 scalar on the parameter's device, as the fused kernel wants it."""
        moments = {kind: torch.zeros_like(part, requires_grad=False) for kind in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.zeros((), device=part.device), **moments}

    def _by_parameter(self, keys: Iterable[str]) -> dict[str, list[str]]:
        """Which kinds there are of which parameter."""
        found: dict[str, list[str]] = {}
        for key in keys:
            kind, _, name = key.partition(".")
            found.setdefault(name, []).append(kind)
        if not found.keys() <= self.parts.keys():
            raise InputError(
                f"the saved optimizer has moments of {', '.join(sorted(found.keys() - self.parts.keys())[:3])}, which this task does not train"
            )
        return found

    def _kept_otherwise(self, name: str, kinds: Iterable[str]) -> InputError:
        return InputError(
            f"the saved optimizer kept {name} as {', '.join(sorted(kinds))}, and optimizer={self.config.optimizer} does not: "
            "resume with the value that the run began with"
        )

    def load(self, state: Mapping[str, Tensor]) -> None:
        """What `state` returned."""
        for name, found in self._by_parameter(state).items():
            p = self.parts[name]
            kinds = {kind: to_local(state[f"{kind}.{name}"]) for kind in found}
            fits = self.lean[name].load(kinds) if self.lean else kinds.keys() <= {"step", "exp_avg", "exp_avg_sq"}
            if not fits:
                raise self._kept_otherwise(name, kinds)
            if self.lean:
                continue
            self.adamw.state[p] = {kind: value.to(p.device) for kind, value in kinds.items()}


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
