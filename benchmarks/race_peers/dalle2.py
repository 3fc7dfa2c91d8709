"""dalle2-pytorch: CLIP of x-clip, diffusion prior and a cascade of U-Nets, the last two by its own trainers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.race_peers.contestant import Contestant, Trained
from benchmarks.race_peers.track import Bf16Failed, Stage, Step, Track, Words, fit_size, make_step

TIMESTEPS, DECODER_STEPS, PRIOR_STEPS = 1000, (250, 27), 64


def train(track: Track) -> Trained:
    by_task = {stage.spec.config.task: stage for stage in track.plan.stages}
    prior_config: Any = by_task["dalle2.prior"].spec.config
    words = track.make_words(by_task["clip"].spec.config.text.length)  # type: ignore[attr-defined]
    track.note("text: its CLIP (x-clip) trained as a stage, over the captions' words")
    track.note(f"prior: as wide as CLIP's embedding, which its sequence of both needs; {PRIOR_STEPS} DDIM steps")
    width = prior_config.width
    clip = _train_clip(track, words, width)
    prior = _train_prior(track, clip, words, width)
    decoder = _train_decoder(track, clip, width)
    stage = track.stages[-1]

    def draw(captions: list[str]) -> Tensor:
        with stage.autocast():
            embeddings = prior.sample(words.encode(captions, track.device))
            return decoder.sample(image_embed=embeddings.float())[:, None]

    return Trained(stage.draw_with(draw), [clip, prior.diffusion_prior.net, decoder.decoder.unets])


def _train_clip(track: Track, words: Words, width: int) -> Any:
    from x_clip import CLIP

    plan = next(stage for stage in track.plan.stages if stage.spec.config.task == "clip")
    config: Any = plan.spec.config

    def build(image_width: int) -> Any:
        return CLIP(
            dim_text=width,
            dim_latent=width,
            num_text_tokens=words.size,
            text_enc_depth=max(1, config.text.depth),
            text_heads=config.text.heads,
            text_dim_head=width // config.text.heads,
            text_seq_len=words.length,
            dim_image=image_width,
            visual_enc_depth=config.depth,
            visual_heads=config.heads,
            visual_dim_head=image_width // config.heads,
            visual_image_size=plan.spec.data.shape.height,
            visual_patch_size=config.patch,
            channels=track.shape.channels,
        )

    image_width = fit_size(build, track.count_ours(plan), 4 * config.heads)
    stage = track.begin("clip", plan)
    clip = build(image_width).to(track.device)
    track.note("clip: x-clip has no trainer: Adam of 3e-4, without EMA")

    def loss(batch: Any) -> Tensor:
        return clip(words.encode(batch.captions, track.device), batch.video[:, 0], return_loss=True)

    stage.train(make_step(stage, loss, torch.optim.Adam(clip.parameters(), lr=3e-4 * track.rate)))
    return clip.eval()


def _make_accelerator(track: Track, precision: str) -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=track.device.type == "cpu", mixed_precision="bf16" if precision == "bf16" else "no")


def _by_trainer(stage: Stage, loss: Callable[[Any], float], update: Callable[[], None]) -> Step:
    """A step of its trainer, whose autocast cannot be turned off any more."""

    def step(batch: Any) -> float:
        try:
            value = loss(batch)
        except (RuntimeError, TypeError) as error:
            if stage.precision == "bf16" and not isinstance(error, torch.OutOfMemoryError):
                raise Bf16Failed(f"{stage.title} crashes in bf16: {error}") from error
            raise
        update()
        return value

    return step


def _train_prior(track: Track, clip: Any, words: Words, width: int) -> Any:
    from dalle2_pytorch import DiffusionPrior, DiffusionPriorNetwork, DiffusionPriorTrainer

    plan = next(stage for stage in track.plan.stages if stage.spec.config.task == "dalle2.prior")
    config: Any = plan.spec.config

    def build(depth: int) -> Any:
        return DiffusionPriorNetwork(
            dim=width, depth=depth, heads=config.heads, dim_head=width // config.heads, max_text_len=words.length
        )

    depth = fit_size(build, track.count_ours(plan), 1, most=64)
    stage = track.begin("prior", plan)
    prior = DiffusionPrior(
        net=build(depth), clip=clip, image_channels=track.shape.channels, timesteps=TIMESTEPS,
        sample_timesteps=PRIOR_STEPS, cond_drop_prob=0.2,
    )  # fmt: skip
    trainer = DiffusionPriorTrainer(
        prior.to(track.device), accelerator=_make_accelerator(track, stage.precision), lr=3e-4 * track.rate, wd=1e-2,
        ema_beta=0.99, ema_update_after_step=0, ema_update_every=1,
    )  # fmt: skip
    track.note("trainers: lr 3e-4 and weight decay 0.01, their defaults; EMA 0.99 from the first step on, our choice")

    def loss(batch: Any) -> float:
        return trainer(text=words.encode(batch.captions, track.device), image=batch.video[:, 0])

    trainer.train()
    stage.train(_by_trainer(stage, loss, trainer.update))
    return trainer.eval()


def _train_decoder(track: Track, clip: Any, width: int) -> Any:
    from dalle2_pytorch import Decoder, DecoderTrainer, Unet

    plans = [stage for stage in track.plan.stages if stage.spec.config.task == "dalle2"]

    def make_builder(number: int) -> Any:
        config: Any = plans[number].spec.config
        levels = min(3, max(2, len(config.multipliers)))

        def build(size: int) -> Any:
            return Unet(
                dim=size, image_embed_dim=width, cond_dim=size, channels=track.shape.channels,
                dim_mults=(1, 2, 4)[:levels], num_resnet_blocks=max(1, max(config.blocks)), lowres_cond=number > 0,
                cond_on_image_embeds=number == 0, attend_at_middle=number == 0, memory_efficient=number > 0,
            )  # fmt: skip

        return build

    builders = [make_builder(number) for number in range(len(plans))]
    sizes = [fit_size(build, track.count_ours(plan), 8) for build, plan in zip(builders, plans, strict=True)]
    stage = track.begin("decoder 1", plans[0])
    decoder = Decoder(
        unet=tuple(build(size) for build, size in zip(builders, sizes, strict=True)), clip=clip,
        image_sizes=tuple(plan.spec.data.shape.height for plan in plans), channels=track.shape.channels,
        timesteps=TIMESTEPS, sample_timesteps=DECODER_STEPS[: len(plans)],
    )  # fmt: skip
    trainer = DecoderTrainer(
        decoder.to(track.device), accelerator=_make_accelerator(track, stage.precision), lr=3e-4 * track.rate, wd=1e-2,
        ema_beta=0.99, ema_update_after_step=0, ema_update_every=1,
    )  # fmt: skip
    trainer.to(track.device)
    for number, plan in enumerate(plans, 1):
        if number > 1:
            stage = track.begin(f"decoder {number}", plan)

        def loss(batch: Any, number: int = number) -> float:
            return trainer(batch.video[:, 0], unet_number=number)

        def update(number: int = number) -> None:
            trainer.update(unet_number=number)

        trainer.train()
        stage.train(_by_trainer(stage, loss, update))
    return trainer.eval()


PEER = Contestant("dalle2", "dalle2-pytorch", "1.15.6", "dalle2_pytorch", train, needs=("torchvision", "x_clip"))
