"""A token critic as a stage: it learns which of a frozen generator's tokens are wrong, and steers what is drawn again."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kineograph.core.batch import Batch, Prompts
from kineograph.core.capabilities import SupportsContinuation, SupportsSampling
from kineograph.core.errors import ConfigError
from kineograph.core.noise import Noise
from kineograph.core.task import BuildContext, Loss, Task
from kineograph.family.phenaki.config import CriticConfig, PhenakiSample
from kineograph.family.phenaki.network import TokenCritic
from kineograph.family.phenaki.sampling import draw
from kineograph.family.phenaki.task import Phenaki
from kineograph.process.guidance import check_generator_dropout
from kineograph.process.masking import CriticLoss, score_critic


class PhenakiCritic(Task, SupportsSampling, SupportsContinuation):
    Config = CriticConfig

    def __init__(self, config: CriticConfig, context: BuildContext) -> None:
        generator = context.stage(config.generator)
        if not isinstance(generator, Phenaki):
            raise ConfigError(f"generator={config.generator} is no phenaki stage: name the stage whose task is phenaki")
        super().__init__(reads=generator.reads)
        self.config = config
        self.stages |= {"generator": generator, "codec": generator.codec}
        self._check_guidance(config.sample)
        self.critic = TokenCritic(config, config.rotary, generator.vocabulary, generator.grid, generator.text_width)

    @classmethod
    def build(cls, config: CriticConfig, context: BuildContext) -> PhenakiCritic:
        return cls(config, context)

    @property
    def generator(self) -> Phenaki:
        return self.stage("generator", Phenaki)

    def _check_guidance(self, options: PhenakiSample) -> None:
        drawn = self.generator.config
        if drawn.text.kind != "none":
            check_generator_dropout(
                self.config.generator, options.guidance, drawn.caption_dropout, drawn.init is not None
            )

    def trainable(self, player: str) -> list[nn.Module]:
        return [self.critic]

    def forward(self, batch: Batch, noise: Noise) -> CriticLoss:
        generator = self.generator
        with torch.no_grad():
            clips, words = generator.clips(batch), generator.words(batch, noise, drop=self.training)
            masked, rows = generator.predict(clips, words, noise)
            found = generator.challenge(clips, words, masked, rows, noise, self.config.temperature)
        return score_critic(self.critic(found.clips, words), masked, found.wrong)

    def loss(self, player: str, shared: CriticLoss) -> Loss:
        return shared.loss()

    def sample(self, prompts: Prompts, options: PhenakiSample) -> Tensor:
        self._check_guidance(options)
        return draw(self.generator, prompts, options, self.critic)

    def usual_overlap(self, options: PhenakiSample) -> int | None:
        return options.overlap

    def compile_targets(self) -> list[nn.Module]:
        return [self.critic.network]

    def blocks(self) -> list[nn.Module]:
        return list(self.critic.network.transformer.blocks)

    def tokens_per_clip(self) -> int:
        return self.generator.tokens_per_clip()


TASK = PhenakiCritic
