"""A token critic as a stage: learns which tokens of a frozen generator are wrong, and selects those that sampling masks again."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kineograph.core.batch import Batch, Prompts
from kineograph.core.capabilities import RoutesCaptions, SupportsSampling
from kineograph.core.errors import ConfigError
from kineograph.core.noise import Noise
from kineograph.core.task import BuildContext, Loss, Task
from kineograph.family.muse.config import CriticConfig, MuseSample
from kineograph.family.muse.network import Condition, MuseNetwork
from kineograph.family.muse.task import Muse
from kineograph.process.guidance import check_generator_dropout
from kineograph.process.masking import Critic, CriticLoss, score_critic


class MuseCritic(Task, SupportsSampling, RoutesCaptions):
    Config = CriticConfig

    def __init__(self, config: CriticConfig, context: BuildContext) -> None:
        generator = context.stage(config.generator)
        if not isinstance(generator, Muse):
            raise ConfigError(f"generator={config.generator} is no muse stage: name a stage with task=muse")
        super().__init__(reads=generator.reads)
        self.config = config
        self.stages["generator"] = generator
        self._check_guidance(config.sample)
        text_width = generator.text.width if generator.text is not None else None
        self.network = MuseNetwork(config, generator.vocabulary, generator.grid, text_width, generator.low_res)
        self.score = nn.Linear(config.width, 1)

    @property
    def generator(self) -> Muse:
        return self.stage("generator", Muse)

    def _check_guidance(self, options: MuseSample) -> None:
        config = self.generator.config
        if config.text.kind != "none":
            check_generator_dropout(
                self.config.generator, options.guidance, config.caption_dropout, config.init is not None
            )

    def trainable(self, player: str) -> list[nn.Module]:
        return [self.network, self.score]

    def score_tokens(self, tokens: Tensor, condition: Condition) -> Tensor:
        """B N 1, high = looks wrong."""
        return self.score(self.network(tokens, condition.text, condition.mask, condition.low_res))

    def forward(self, batch: Batch, noise: Noise) -> CriticLoss:
        generator = self.generator
        with torch.no_grad():
            tokens = generator.get_tokens(batch)
            share = generator.config.caption_dropout
            dropped = noise.bernoulli("caption dropout", share) if self.training else None
            condition = generator.encode_batch(batch, dropped)
            masked, rows = generator.predict(tokens, condition, noise)
            filled, wrong = generator.resample_masked(rows, masked, tokens, noise, self.config.temperature)
        return score_critic(self.score_tokens(filled, condition), masked, wrong)

    def loss(self, player: str, shared: CriticLoss) -> Loss:
        return shared.loss()

    def sample(self, prompts: Prompts, options: MuseSample) -> Tensor:
        self._check_guidance(options)

        def make_critic(condition: Condition) -> Critic:
            return lambda tokens, step: self.score_tokens(tokens, condition)[..., 0]

        return self.generator.sample(prompts, options, make_critic)

    def takes_captions(self) -> bool:
        return self.generator.takes_captions()

    def compile_targets(self) -> list[nn.Module]:
        return [self.network]

    def blocks(self) -> list[nn.Module]:
        return list(self.network.transformer.blocks)

    def tokens_per_clip(self) -> int:
        return self.generator.tokens_per_clip()


TASK = MuseCritic
