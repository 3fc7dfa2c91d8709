"""Keywords of phenaki-pytorch, nuwa-pytorch and muse-maskgit-pytorch, and our keys. A dot in front: a key of the stage."""

from __future__ import annotations

from typing import Any

from kineograph.interop.key_translation import Row, choose, count, flag, number, numbers, only

T5 = "google/t5-v1_1-base"


def _read_size(value: Any) -> Any:
    return [count(side) for side in value] if isinstance(value, list) else count(value)


L2 = choose({True: "l2", False: "l1"})
KMEANS = choose({True: 10, False: 0})  # iterations on the first batch
CODEC_TRAINER: list[Row] = [
    ("num_train_steps", ".train.steps", count),
    ("image_size", "data.size", _read_size),
    ("lr", ".train.lr", number),
    ("wd", ".train.weight_decay", number),
    ("max_grad_norm", ".players.generator.clip", number),
    ("discr_max_grad_norm", ".players.discriminator.clip", number),
    ("save_results_every", ".train.sample_every", count),
    ("save_model_every", ".train.save_every", count),
    ("valid_frac", "data.validation", number),
    ("random_split_seed", "data.split_seed", count),
    ("ema_update_after_step", ".train.ema.start", count),
    ("ema_update_every", ".train.ema.every", count),
    ("apply_grad_penalty_every", ".adversarial.penalty_every", count),
]
CVIVIT: list[Row] = [
    ("dim", ".width", count),
    ("heads", ".heads", count),
    ("image_size", "data.size", _read_size),
    ("channels", "data.channels", count),
    ("patch_size", ".patch", _read_size),
    ("temporal_patch_size", ".temporal_patch", count),
    ("spatial_depth", ".spatial_depth", count),
    ("temporal_depth", ".temporal_depth", count),
]
MASKGIT: list[Row] = [
    ("dim", ".width", count),
    ("depth", ".depth", count),
    ("heads", ".heads", count),
    ("dim_context", None, count),  # that of the text encoder
]
PHENAKI: list[Row] = [
    ("steps", ".sample.steps", count),
    ("cond_drop_prob", ".caption_dropout", number),
]
SELF_CRITIC: list[Row] = [("self_token_critic", ".critic", choose({True: "self", False: None}))]
TOKEN_CRITIC: list[Row] = [
    ("dim", ".critic_width", count),
    ("depth", ".critic_depth", count),
    ("heads", ".critic_heads", count),
    ("num_tokens", None, count),
    ("max_seq_len", None, count),
    ("dim_context", None, count),
    ("has_cross_attn", None, only(True)),
]
PHENAKI_TRAINER: list[Row] = [
    ("train_num_steps", ".train.steps", count),
    ("train_lr", ".train.lr", number),
    ("wd", ".train.weight_decay", number),
    ("adam_betas", ".train.betas", numbers),
    ("max_grad_norm", ".train.clip", number),
    ("save_and_sample_every", ".train.sample_every", count),
    ("num_samples", ".train.samples", count),
    ("sample_num_frames", ".train.sample_frames", count),
    ("ema_decay", ".train.ema.decay", number),
    ("ema_update_every", ".train.ema.every", count),
    ("convert_image_to", "data.channels", choose({"RGB": 3, "L": 1, "RGBA": 4, "LA": 2})),
    ("amp", None, only(False)),
]
NUWA_VAE: list[Row] = [
    ("dim", ".width", count),
    ("image_size", "data.size", _read_size),
    ("channels", "data.channels", count),
    ("l2_recon_loss", ".loss", L2),
    ("use_attn", ".attention", flag),
    ("vq_use_cosine_sim", None, only(True)),
]
NUWA_QUANTIZER: list[Row] = [
    ("vq_codebook_dim", ".quantizer.dim", count),
    ("vq_decay", ".quantizer.decay", number),
    ("vq_commitment_weight", ".quantizer.commitment", number),
    ("vq_kmeans_init", ".quantizer.kmeans", KMEANS),
]
NUWA: list[Row] = [
    ("dim", ".width", count),
    ("dec_depth", ".depth", count),
    ("dec_heads", ".heads", count),
    ("image_size", "data.size", _read_size),
    ("max_video_frames", "data.frames", count),
    ("embed_gradient_frac", ".embedding_gradient", number),
    ("shift_video_tokens", ".token_shift", flag),
    ("dec_reversible", ".train.checkpointing", flag),  # both recompute activations to save memory
]
NUWA_SOUND: list[Row] = [
    ("num_audio_tokens", "stages.sound_tokenizer.quantizer.codes", count),
]
NUWA_TRAINER: list[Row] = [
    ("num_train_steps", ".train.steps", count),
    ("lr", ".train.lr", number),
    ("wd", ".train.weight_decay", number),
    ("max_grad_norm", ".train.clip", number),
    ("save_model_every", ".train.save_every", count),
    ("save_results_every", ".train.sample_every", count),
    ("num_sampled_frames", ".train.sample_frames", count),
]
MUSE_VAE: list[Row] = [
    ("dim", ".width", count),
    ("channels", "data.channels", count),
    ("l2_recon_loss", ".loss", L2),
]
MUSE_LFQ: list[Row] = [("lfq_kwargs.diversity_gamma", ".quantizer.diversity", number)]
MUSE_VQ: list[Row] = [
    ("vq_kwargs.codebook_dim", ".quantizer.dim", count),
    ("vq_kwargs.decay", ".quantizer.decay", number),
    ("vq_kwargs.commitment_weight", ".quantizer.commitment", number),
]
MUSE_TRANSFORMER: list[Row] = [
    ("dim", ".width", count),
    ("depth", ".depth", count),
    ("heads", ".heads", count),
    ("ff_mult", ".mlp_ratio", number),
    ("self_cond", ".self_conditioning", flag),
    ("seq_len", None, count),  # that of the token grid
    ("flash", None, only(True, False)),
]
MUSE_MASKGIT: list[Row] = [
    ("image_size", ".data.size", _read_size),
    ("cond_drop_prob", ".caption_dropout", number),
]
# Parts of other calls, and what a trainer makes itself.
_PARTS = ("vae", "sketch_vae", "cvivit", "maskgit", "critic", "phenaki", "nuwa", "transformer", "cond_vae", "base", "superres", "token_critic")  # fmt: skip
_EMA = ("use_ema", "ema_beta", "results_folder", "batch_size", "grad_accum_every", "train_on_images", "num_frames", "accelerate_kwargs")  # fmt: skip
_IMAGES = ("folder", "images_memmap_path", "images_memmap_shape")
_NUWA = ("sparse_3dna_kernel_size", "sparse_3dna_dilation", "text_enc_depth", "text_max_seq_len")
_GAN = ("use_vgg_and_gan", "use_hinge_loss", "lookup_free_quantization", "codebook_size", "attn_dropout", "ff_dropout", "dim_head")  # fmt: skip


def _list_keywords(rows: list[Row], *more: str) -> frozenset[str]:
    return frozenset({theirs.partition(".")[0] for theirs, *_ in rows} | {*more, *_PARTS})


CLASSES: dict[str, dict[str, frozenset[str]]] = {
    "phenaki": {
        "CViViT": _list_keywords(CVIVIT, *_GAN, "discr_base_dim"),
        "CViViTTrainer": _list_keywords(CODEC_TRAINER, *_EMA, "folder"),
        "MaskGit": _list_keywords(MASKGIT, "num_tokens", "max_seq_len", "unconditional", "dim_head"),
        "TokenCritic": frozenset({"has_cross_attn"}),
        "Phenaki": _list_keywords(PHENAKI, "max_text_len", "t5_name", "self_token_critic", "critic_loss_weight"),
        "PhenakiTrainer": _list_keywords(PHENAKI_TRAINER, *_EMA, "folder", "sample_texts_file_path", "sample_texts", "fp16"),
    },
    "nuwa": {
        "VQGanVAE": _list_keywords(NUWA_VAE, *_GAN, "num_layers", "vq_codebook_size", "vq_codebook_dim"),
        "VQGanVAETrainer": _list_keywords(CODEC_TRAINER, *_EMA, *_IMAGES),
        "NUWA": _list_keywords(NUWA, *_NUWA),
        "NUWASketch": _list_keywords(NUWA, *_NUWA, "sketch_enc_depth", "sketch_max_video_frames"),
        "NUWAVideoAudio": _list_keywords([*NUWA, *NUWA_SOUND], *_NUWA, "num_audio_tokens_per_video_frame"),
        "GifVideoDataset": frozenset({"folder", "channels"}),
        "MnistDataset": frozenset({"num_videos", "videos_memmap_path", "text_memmap_path", "num_digits", "num_frames"}),
        "NUWATrainer": _list_keywords(NUWA_TRAINER, "dataset", "batch_size", "grad_accum_every", "results_folder"),
    },
    "muse": {
        "VQGanVAE": _list_keywords([*MUSE_VAE, *MUSE_LFQ, *MUSE_VQ], *_GAN, "layers", "discr_layers"),
        "VQGanVAETrainer": _list_keywords(CODEC_TRAINER, *_EMA, "folder"),
        "MaskGitTransformer": _list_keywords(MUSE_TRANSFORMER, "t5_name", "num_tokens", "dim_head"),
        "MaskGit": _list_keywords(MUSE_MASKGIT, "cond_image_size", "self_token_critic", "critic_loss_weight"),
    },
}  # fmt: skip

# Their defaults, where ours differ; by package and class.
_CODEC_DEFAULTS: dict[str, Any] = {
    "lr": 3e-4,
    "ema_beta": 0.995,
    "save_results_every": 100,
    "save_model_every": 1000,
    "valid_frac": 0.05,
    "random_split_seed": 42,
    "apply_grad_penalty_every": 4,
}
_NUWA_DEFAULTS: dict[str, Any] = {
    "dec_depth": 6,
    "dec_heads": 8,
    "max_video_frames": 5,
    "embed_gradient_frac": 0.2,
    "sparse_3dna_kernel_size": 3,
    "sparse_3dna_dilation": 1,
}
DEFAULTS: dict[tuple[str, str], dict[str, Any]] = {
    ("phenaki", "CViViT"): {"heads": 8, "use_vgg_and_gan": True, "use_hinge_loss": True, "discr_base_dim": 16},
    ("phenaki", "CViViTTrainer"): _CODEC_DEFAULTS | {"num_frames": 17, "max_grad_norm": 0.5, "wd": 0.0},
    ("phenaki", "MaskGit"): {"heads": 8, "depth": 6},
    ("phenaki", "Phenaki"): {"steps": 18, "cond_drop_prob": 0.25, "max_text_len": 128},
    ("phenaki", "PhenakiTrainer"): {
        "batch_size": 16,
        "num_frames": 17,
        "train_lr": 1e-4,
        "train_num_steps": 100000,
        "ema_update_every": 10,
        "ema_decay": 0.995,
        "adam_betas": [0.9, 0.99],
        "wd": 0.0,
        "save_and_sample_every": 1000,
        "num_samples": 25,
    },
    ("nuwa", "VQGanVAE"): {
        "use_vgg_and_gan": True,
        "use_hinge_loss": True,
        "num_layers": 4,
        "vq_codebook_size": 512,
        "vq_codebook_dim": 256,
        "vq_decay": 0.8,
        "vq_commitment_weight": 1.0,
        "use_attn": True,
    },
    ("nuwa", "VQGanVAETrainer"): _CODEC_DEFAULTS | {"wd": 0.0, "ema_update_after_step": 2000, "ema_update_every": 10},
    ("nuwa", "NUWA"): _NUWA_DEFAULTS | {"text_enc_depth": 6, "text_enc_heads": 8},
    ("nuwa", "NUWASketch"): _NUWA_DEFAULTS,
    ("nuwa", "NUWAVideoAudio"): _NUWA_DEFAULTS
    | {"text_enc_depth": 6, "text_enc_heads": 8, "text_rotary_pos_emb": False, "dec_reversible": True},
    ("nuwa", "MnistDataset"): {"num_digits": 2, "num_frames": 10, "image_size": 64, "channels": 1},
    ("nuwa", "NUWATrainer"): {
        "lr": 3e-4,
        "wd": 0.01,
        "batch_size": 4,
        "grad_accum_every": 8,
        "max_grad_norm": 0.5,
        "save_model_every": 2500,
        "save_results_every": 1000,
    },
    ("muse", "VQGanVAE"): {
        "use_vgg_and_gan": True,
        "use_hinge_loss": True,
        "layers": 4,
        "codebook_size": 65536,
        "discr_layers": 4,
        "lfq_kwargs": {"diversity_gamma": 4.0},
    },
    ("muse", "VQGanVAETrainer"): _CODEC_DEFAULTS,
    ("muse", "MaskGitTransformer"): {"heads": 8},
    ("muse", "MaskGit"): {"cond_drop_prob": 0.5},
}
