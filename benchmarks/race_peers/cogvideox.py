"""diffusers: AutoencoderKLCogVideoX and CogVideoXTransformer3DModel from scratch, drawn by its pipeline."""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from benchmarks.race_peers.contestant import Contestant, Trained
from benchmarks.race_peers.track import Stage, Track, drop_captions, fit_size, make_step, make_text_stand_in

CAPTION_DROPOUT = 0.1
TEMPORAL = 4


def train(track: Track) -> Trained:
    from diffusers import CogVideoXDDIMScheduler, CogVideoXPipeline, CogVideoXTransformer3DModel

    vae, vae_stage = train_codec(track)
    plan: Any = track.generators[-1].spec.config
    shape, spatial = track.shape, 2 ** (len(vae.config.block_out_channels) - 1)
    text = make_text_stand_in(track, track.generators[-1])

    def build(head_width: int) -> Any:
        return CogVideoXTransformer3DModel(
            num_attention_heads=plan.heads,
            attention_head_dim=head_width,
            in_channels=vae.config.latent_channels,
            out_channels=vae.config.latent_channels,
            time_embed_dim=plan.time_width,
            text_embed_dim=text.width,
            num_layers=plan.depth,
            sample_width=shape.width // spatial,
            sample_height=shape.height // spatial,
            sample_frames=shape.frames,
            max_text_seq_length=text.words.length,
            spatial_interpolation_scale=1.0,
        )

    target = track.count_ours(*track.generators) - sum(p.numel() for p in text.parameters())
    head_width = fit_size(build, target, 8)
    stage = track.begin("generator", *track.generators)
    model = build(head_width).to(track.device)
    schedule = CogVideoXDDIMScheduler(  # of the 2B model
        prediction_type="v_prediction", rescale_betas_zero_snr=True, timestep_spacing="trailing", snr_shift_scale=3.0
    )
    parameters = [*model.parameters(), *text.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4 * track.rate, betas=(0.9, 0.95), weight_decay=1e-4)
    track.note("generator: AdamW 1e-4 and clip 1, our choice; latents encoded once")
    track.note(f"generator: {CAPTION_DROPOUT} of the captions are dropped, which guidance needs; our choice")
    cumulative = schedule.alphas_cumprod.to(track.device)

    @torch.no_grad()
    def encode(batch: Any) -> tuple[Any, list[str] | None]:
        with vae_stage.autocast():
            return vae.encode(_to_model(batch.video)).latent_dist, batch.captions

    def loss(item: tuple[Any, list[str] | None]) -> Tensor:
        posterior, captions = item
        clean = rearrange(posterior.sample().float() * vae.config.scaling_factor, "b c t h w -> b t c h w")
        noise = torch.randn_like(clean)
        times = torch.randint(0, schedule.config.num_train_timesteps, (len(clean),), device=track.device)
        noisy = schedule.add_noise(clean, noise, times)
        output = model(
            hidden_states=noisy,
            encoder_hidden_states=text(drop_captions(captions, CAPTION_DROPOUT)),
            timestep=times,
            return_dict=False,
        )[0].float()
        predicted = schedule.get_velocity(output, noisy, times)  # of a v-prediction: the clean latents
        weights = 1 / (1 - cumulative[times])
        return (weights * (predicted - clean).square().flatten(1).mean(1)).mean()

    stage.train(make_step(stage, loss, optimizer, clip=1.0), prepare=encode, keep=True)
    model.eval()
    text.eval()
    pipeline = CogVideoXPipeline(tokenizer=None, text_encoder=None, vae=vae, transformer=model, scheduler=schedule)  # type: ignore[arg-type]
    pipeline.set_progress_bar_config(disable=True)

    def draw(captions: list[str]) -> Tensor:
        with stage.autocast():
            return pipeline(
                prompt_embeds=text(captions),
                negative_prompt_embeds=text([""] * len(captions)),
                height=shape.height,
                width=shape.width,
                num_frames=shape.frames,
                max_sequence_length=text.words.length,
                output_type="pt",
            ).frames

    def reconstruct(clips: Tensor) -> Tensor:
        with vae_stage.autocast():
            return _to_pixels(vae.decode(vae.encode(_to_model(clips)).latent_dist.mode()).sample)

    return Trained(stage.draw_with(draw), [vae, model, text], vae_stage.draw_with(reconstruct))


def train_codec(track: Track) -> tuple[Any, Stage]:
    from diffusers import AutoencoderKLCogVideoX

    plan: Any = track.codec.spec.config
    training: Any = track.codec.train
    levels = len(plan.widths)

    def build(width: int) -> Any:
        return AutoencoderKLCogVideoX(
            in_channels=track.shape.channels,
            out_channels=track.shape.channels,
            down_block_types=("CogVideoXDownBlock3D",) * levels,
            up_block_types=("CogVideoXUpBlock3D",) * levels,
            block_out_channels=tuple(width * widths // plan.widths[0] for widths in plan.widths),
            latent_channels=plan.latent_channels,
            layers_per_block=plan.layers,
            norm_num_groups=plan.groups,
            temporal_compression_ratio=TEMPORAL,
            sample_height=track.shape.height,
            sample_width=track.shape.width,
        )

    width = fit_size(build, track.count_ours(track.codec), plan.groups)
    stage = track.begin("codec", track.codec)
    vae = build(width).to(track.device)
    rate = training.lr * track.rate
    track.note(f"codec: squared error, and our KL weight and AdamW of {rate:g}, constant")
    optimizer = torch.optim.AdamW(vae.parameters(), lr=rate, betas=training.betas, weight_decay=0.0)

    def loss(batch: Any) -> Tensor:
        pixels = _to_model(batch.video)
        posterior = vae.encode(pixels).latent_dist
        error = (vae.decode(posterior.sample()).sample.float() - pixels).square().mean()
        return error + plan.kl * posterior.kl().float().mean() / pixels[0].numel()

    def step_and_keep(batch: Any) -> Tensor | float:
        value = step(batch)
        last.append(batch)
        del last[:-1]
        return value

    last: list[Any] = []
    step = make_step(stage, loss, optimizer, clip=1.0)
    stage.train(step_and_keep)
    vae.eval()
    with torch.no_grad(), stage.autocast():
        deviation = float(vae.encode(_to_model(last[0].video)).latent_dist.sample().float().std())
    vae.register_to_config(scaling_factor=1 / deviation)
    return vae, stage


def _to_model(clips: Tensor) -> Tensor:
    return rearrange(2 * clips - 1, "b t c h w -> b c t h w")


def _to_pixels(clips: Tensor) -> Tensor:
    return rearrange(clips.float() / 2 + 0.5, "b c t h w -> b t c h w").clamp(0, 1)


PEER = Contestant("cogvideox", "diffusers", "0.42.1", "diffusers", train, needs=())
