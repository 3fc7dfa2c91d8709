"""Keys of DALLE2-pytorch's configs and ours. dalle2_config.py translates what depends on several keys."""

from __future__ import annotations

from typing import Any

from kineograph.core.config import Tree
from kineograph.interop.key_translation import Convert, Row, choose, count, counts, flag, number, only, text

CLIP_FOLDER = "clip"
CLIPS = {
    "ViT-B/32": "openai/clip-vit-base-patch32",
    "ViT-B/16": "openai/clip-vit-base-patch16",
    "ViT-L/14": "openai/clip-vit-large-patch14",
    "ViT-L/14@336px": "openai/clip-vit-large-patch14-336",
}
METRICS = {"FID": "fid", "IS": "is", "KID": "kid", "LPIPS": "lpips"}
PRECISION = choose({True: "bf16", False: "fp32"})
SCHEDULES = choose({name: name for name in ("cosine", "linear", "quadratic", "sigmoid")})

# Their defaults, where ours differ.
EMA: Tree = {"ema_update_after_step": 100, "ema_update_every": 10}  # those of ema_pytorch
UNET_DEFAULTS: Tree = {
    "dim_mults": [1, 2, 4, 8],
    "num_resnet_blocks": 2,
    "self_attn": False,
    "attn_dim_head": 32,
    "cond_on_image_embeds": False,
    "add_image_embeds_to_time": True,
}
DECODER_DEFAULTS: Tree = {
    "decoder": {"learned_variance": True, "beta_schedule": None, "sample_timesteps": None, "timesteps": 1000},
    "data": {"batch_size": 64, "splits": {"val": 0.15, "test": 0.1}},
    "train": {"epochs": 20, "lr": 1e-4, "wd": 0.01, "max_grad_norm": 0.5, "warmup_steps": 0, "ema_beta": 0.999, "amp": False,
              "cond_scale": 1.0, "save_every_n_samples": 100_000, "n_sample_images": 6, **EMA},
}  # fmt: skip
PRIOR_DEFAULTS: Tree = {
    "prior": {"condition_on_text_encodings": True, "predict_x_start": True, "cond_drop_prob": 0.0,
              "sampling_clamp_l2norm": False, "sampling_final_clamp_l2norm": False},
    "data": {"splits": {"val": 0.15, "test": 0.1}},
    "train": {"lr": 1.1e-4, "wd": 6.02e-2, "max_grad_norm": 0.5, "warmup_steps": 0, "ema_beta": 0.99, "amp": False, "epochs": 1,
              **EMA},
}  # fmt: skip
DYNAMIC_QUANTILE = 0.95
EVALUATION_SAMPLES = 1000
PRIOR_EPS = 1e-6  # of Adam


def _read_levels(value: Any) -> Any:
    return flag(value) if isinstance(value, bool) else [flag(part) for part in value]


def _read_blocks(value: Any) -> Any:
    return [count(value)] if isinstance(value, (int, float)) else counts(value)


BOTH: list[Row] = [
    ("data.splits.val", "data.validation", number),
    ("data.splits.test", "data.test", number),
    ("data.splits.train", None, number),  # the rest
    ("train.ema_beta", "train.ema.decay", number),
    ("train.ema_update_after_step", "train.ema.start", count),
    ("train.ema_update_every", "train.ema.every", count),
    ("train.amp", "train.precision", PRECISION),
    ("tracker.log.wandb_project", "train.wandb.project", text),
    ("tracker.log.wandb_entity", "train.wandb.entity", text),
    ("tracker.log.wandb_run_id", "train.wandb.id", text),
    ("tracker.log.wandb_resume", None, only(True, False)),
    ("tracker.overwrite_data_path", None, only(False)),
]
DECODER_ROWS: list[Row] = [
    ("seed", "seed", count),
    ("data.webdataset_base_url", "data.shards", text),
    ("data.img_embeddings_url", "data.img_embeddings_folder", text),
    ("data.text_embeddings_url", "data.text_encodings_folder", text),
    ("data.num_workers", "train.workers", count),
    ("data.start_shard", "data.start_shard", count),
    ("data.end_shard", "data.end_shard", count),
    ("data.shard_width", "data.shard_width", count),
    ("data.index_width", "data.index_width", count),
    ("data.shuffle_train", "data.shuffle", flag),
    ("data.resample_train", "data.resample", flag),
    ("decoder.channels", "data.channels", count),
    ("decoder.loss_type", None, only("l2")),
    ("train.find_unused_parameters", "train.parallel.find_unused", flag),
    ("train.static_graph", "train.parallel.static_graph", flag),
    ("train.save_every_n_samples", "train.save_every_samples", count),
    ("train.n_sample_images", "train.samples", count),
    ("train.device", "train.device", text),
    ("train.epoch_samples", "train.epoch_samples", count),
    ("train.validation_samples", "train.validation_samples", count),
    ("train.save_immediately", "train.save_first", flag),
    ("evaluate.n_evaluation_samples", "train.evaluation_samples", count),
    ("evaluate.FID.feature", "train.metric_options.fid_features", count),
    ("evaluate.KID.subset_size", "train.metric_options.kid_subset_size", count),
    ("evaluate.KID.subsets", "train.metric_options.kid_subsets", count),
    ("evaluate.IS.splits", "train.metric_options.is_splits", count),
    ("evaluate.LPIPS.net_type", None, only("vgg")),
    *BOTH,
]
UNET: list[Row] = [
    ("dim", ".width", count),
    ("dim_mults", ".multipliers", counts),
    ("num_resnet_blocks", ".blocks", _read_blocks),
    ("self_attn", ".self_attention", _read_levels),
    ("attn_dim_head", ".head_width", count),
    ("attend_at_middle", ".middle_attention", flag),
    ("num_image_tokens", ".image_tokens", count),
    ("memory_efficient", ".efficient", flag),
    ("self_cond", ".self_conditioning", flag),
    ("checkpoint_during_training", ".train.checkpointing", flag),
    ("lowres_cond", None, only(True, False)),  # every U-Net but the first is
    ("channels", None, only(3)),
]
# One value for all U-Nets, or a list of one each.
PER_UNET: list[tuple[str, str, Convert]] = [
    ("decoder.timesteps", "diffusion.steps", count),
    ("decoder.vb_loss_weight", "diffusion.vb_weight", number),
    ("decoder.image_cond_drop_prob", "image_dropout", number),
    ("decoder.text_cond_drop_prob", "text_dropout", number),
    ("decoder.p2_loss_weight_k", "diffusion.p2_k", number),
    ("decoder.use_dynamic_thres", "sample.clip", choose({True: "dynamic", False: "static"})),
    ("decoder.dynamic_thres_percentile", "sample.clip_quantile", number),
    ("decoder.learned_variance", "diffusion.learned_variance", flag),
    ("decoder.p2_loss_weight_gamma", "diffusion.p2_gamma", number),
    ("decoder.random_crop_sizes", "crop", count),
    ("train.lr", "train.lr", number),
    ("train.wd", "train.weight_decay", number),
    ("train.warmup_steps", "train.warmup", count),
    ("train.max_grad_norm", "train.clip", number),
    ("train.cond_scale", "sample.guidance", number),
    ("train.unet_training_mask", "skip", lambda value: not flag(value)),
]
PRIOR_ROWS: list[Row] = [
    ("net.dim", ".width", count),
    ("net.depth", ".depth", count),
    ("net.heads", ".heads", count),
    ("net.ff_mult", ".mlp_ratio", number),
    ("net.attn_dropout", ".dropout", number),
    ("net.ff_dropout", ".dropout", number),
    ("net.num_timesteps", ".diffusion.steps", count),
    ("timesteps", ".diffusion.steps", count),
    ("sample_timesteps", ".sample.steps", count),
    ("cond_drop_prob", ".caption_dropout", number),
    ("beta_schedule", ".diffusion.schedule", SCHEDULES),
    ("sampling_clamp_l2norm", ".sample.sphere", flag),
    ("sampling_final_clamp_l2norm", ".sample.normalize", flag),
    ("loss_type", None, only("l2")),
    ("image_size", None, count),  # embeddings have no size
    ("image_channels", None, only(3)),
]
PRIOR_DATA: list[Row] = [
    ("data.image_url", "data.image_embeddings", text),
    ("data.meta_url", "data.metadata", text),
    ("train.lr", "train.lr", number),
    ("train.wd", "train.weight_decay", number),
    ("train.max_grad_norm", "train.clip", number),
    ("train.warmup_steps", "train.warmup", count),
    ("train.random_seed", "seed", count),
    *BOTH,
]
