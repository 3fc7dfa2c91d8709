"""The Phenaki critic task: learns which tokens of a frozen generator are wrong, to select those that sampling masks again."""

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
from kineograph.family.phenaki.sampling import sample_clips
from kineograph.family.phenaki.task import Phenaki
from kineograph.process.guidance import check_generator_dropout
from kineograph.process.masking import CriticLoss, score_critic


class PhenakiCritic(Task, SupportsSampling, SupportsContinuation):
    Config = CriticConfig

    def __init__(self, config: CriticConfig, context: BuildContext) -> None:
        generator = context.stage(config.generator)
        if not isinstance(generator, Phenaki):
            raise ConfigError(f"generator={config.generator} is no phenaki stage: name a stage with task=phenaki")
        super().__init__(reads=generator.reads)
        self.config = config
        self.stages |= {"generator": generator, "codec": generator.codec}
        self._check_guidance(config.sample)
        self.critic = TokenCritic(config, config.rotary, generator.vocabulary, generator.grid, generator.text_width)

    @property
    def generator(self) -> Phenaki:
        return self.stage("generator", Phenaki)

    def _check_guidance(self, options: PhenakiSample) -> None:
        config = self.generator.config
        if config.text.kind != "none":
            check_generator_dropout(
                self.config.generator, options.guidance, config.caption_dropout, config.init is not None
            )

    def trainable(self, player: str) -> list[nn.Module]:
        return [self.critic]

    def forward(self, batch: Batch, noise: Noise) -> CriticLoss:
        generator = self.generator
        with torch.no_grad():
            clips, text = generator.get_clips(batch), generator.encode_text(batch, noise, drop=self.training)
            masked, rows = generator.predict(clips, text, noise)
            resampled = generator.resample_masked(clips, text, masked, rows, noise, self.config.temperature)
        return score_critic(self.critic(resampled.clips, text), masked, resampled.wrong)

    def loss(self, player: str, shared: CriticLoss) -> Loss:
        return shared.loss()

    def sample(self, prompts: Prompts, options: PhenakiSample) -> Tensor:
        self._check_guidance(options)
        return sample_clips(self.generator, prompts, options, self.critic)

    def usual_overlap(self, options: PhenakiSample) -> int | None:
        return options.overlap

    def compile_targets(self) -> list[nn.Module]:
        return [self.critic.network]

    def blocks(self) -> list[nn.Module]:
        return list(self.critic.network.transformer.blocks)

    def tokens_per_clip(self) -> int:
        return self.generator.tokens_per_clip()


TASK = PhenakiCritic
