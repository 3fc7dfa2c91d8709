"""The loss of models of tokens, masked or autoregressive, and its terms for the log."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from kineograph.core.task import Loss, Mean


@dataclass
class TokenLoss:
    """Sums over the predicted tokens of a batch, without padding."""

    cross_entropy: Tensor
    correct: Tensor
    count: Tensor
    critic: Tensor | None = None  # loss of a critic that shares the network
    targets: dict[str, Mean] = field(default_factory=dict)  # about the tokens, in validation

    def loss(self, critic_weight: float = 1.0) -> Loss:
        terms = {
            "cross_entropy": Mean(self.cross_entropy.detach(), self.count),
            "accuracy": Mean(self.correct, self.count),
        }
        total = self.cross_entropy
        if self.critic is not None:
            total = total + critic_weight * self.critic
            terms["critic"] = Mean(self.critic.detach(), self.count)
        return Loss(Mean(total, self.count), terms | self.targets)
