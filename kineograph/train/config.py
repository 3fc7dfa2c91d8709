"""Config keys of training: `train.*` for every stage, `stages.x.train.*` for one, `stages.x.players.p.*` for one player."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from kineograph.core.config import Config
from kineograph.train.parallel import ParallelConfig


class EmaConfig(Config):
    decay: float = Field(0.999, ge=0, lt=1)
    """Weight of the past; 0 turns the moving average off. Ramps up as min(decay, (1 + n) / (10 + n)) over n updates."""
    every: int = Field(1, ge=1)
    """Update once in so many steps."""
    start: int = Field(0, ge=0)
    """Before this step the average is a plain copy of the weights."""


class PlayerConfig(Config):
    """How one player's parameters move."""

    lr: float = Field(3e-4, ge=0)
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.99)
    eps: float = Field(1e-8, gt=0)
    optimizer: Literal["adamw", "adamw_split", "adamw_8bit"] = "adamw"
    """adamw_split: weights that are kept in bf16 move as in fp32, by 16 more bits beside each. adamw_8bit: that, and moments in 8 bits, 2 bytes a
    weight in place of 8."""
    weight_decay: float = Field(0.01, ge=0)
    """On matrices only; vectors (biases, norms, scales) never decay."""
    warmup: int = Field(100, ge=0)
    """Steps over which the learning rate rises linearly from 0."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """What it does after the warm-up, until `steps`."""
    final_lr: float = Field(0.0, ge=0, le=1)
    """Where cosine and linear end, as a share of lr."""
    clip: float | None = Field(1.0, gt=0)
    """Largest gradient norm of this player; null does not clip."""
    ema: EmaConfig = EmaConfig()


class WandbConfig(Config):
    """Where a run with the tracker `wandb` goes."""

    project: str | None = None
    """Null: the environment's WANDB_PROJECT, or kineograph."""
    entity: str | None = None
    """User or team; null: the account's own."""
    id: str | None = Field(None, pattern=r"^[\w-]+$")
    """Null: made up at the first start. A run that goes on continues under the id in its folder, `wandb/kineograph.json`."""


class TrainConfig(PlayerConfig):
    steps: int = Field(1000, ge=1)
    """Optimizer steps."""
    batch_size: int = Field(32, ge=1)
    """Global: over all processes and accumulation."""
    accumulate: int = Field(1, ge=1)
    """Micro-batches a step."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """auto: bf16 on GPUs that have it, fp32 elsewhere."""
    compile: Literal["auto", "graphs", "blocks"] | bool = "auto"
    """torch.compile; graphs: as CUDA graphs too; blocks: one block for all that are alike, so that compiling does not grow with depth;
    auto: on GPUs, blocks from half a billion weights on, below that graphs where nothing is accumulated."""
    checkpointing: bool | Literal["light", "selective"] = False
    """Recompute activations of the repeated blocks in the backward pass: less memory, more time. selective: not what attention gives;
    light: nor what matrix products give, but for the widest."""
    device: str = "auto"
    """auto: the GPU where there is one."""
    log_every: int = Field(10, ge=1)
    epoch_samples: int | None = Field(None, ge=1)
    """Train so many samples, then save, validate, evaluate and draw: in place of the steps of *_every, where 0 still leaves a phase out."""
    save_every: int = Field(1000, ge=1)
    save_every_samples: int | None = Field(None, ge=1)
    """Samples between snapshots: checkpoints that keep_last never deletes."""
    save_first: bool = False
    """Save a checkpoint at step 0 too."""
    keep_last: int = Field(2, ge=1)
    """Checkpoints kept, beside the best one and the snapshots."""
    sample_every: int = Field(1000, ge=0)
    """0: never."""
    samples: int = Field(8, ge=1)
    """How many of `prompts` are drawn then."""
    sample_frames: int | None = Field(None, ge=1)
    """Frames a sample; null: as trained."""
    format: Literal["auto", "gif", "mp4", "png"] = "auto"
    """How samples are written; auto: png for one frame, gif for more."""
    show: Literal["media", "latents"] = "media"
    """What is kept of samples and of validation's inputs: media; or latents, which are not decoded, as safetensors."""
    grids: tuple[Literal["train", "validation", "test"], ...] = ()
    """Splits of which real items are shown beside what is drawn for their captions, with the samples."""
    caption_prefix: str = ""
    """Put before captions where pictures are logged."""
    validate_every: int = Field(500, ge=0)
    """0: never."""
    validation_samples: int = Field(256, ge=1)
    metrics: tuple[str, ...] = ()
    """Metrics that judge the averaged weights while training, named as for `kineo evaluate`; those that do not apply to a stage rest."""
    evaluate_every: int = Field(1000, ge=0)
    """0: never."""
    evaluation_samples: int = Field(256, ge=1)
    max_nonfinite: int = Field(20, ge=1)
    """Steps with a non-finite gradient are skipped; so many in a row end the run."""
    workers: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Data worker processes; 0 reads in the training process; auto: half the cores, at most 8."""
    timeout: float = Field(600.0, gt=0)
    """Seconds to wait for data (or another process) before giving up."""
    watchdog: float | None = Field(None, gt=0)
    """Seconds without a step (or a batch judged, drawn or validated) in any process after which all write their stacks to RUN/logs and end; null: never."""
    peak_tflops: float | None = Field(None, gt=0)
    """What one device could do at most, in 10¹² operations a second, for `time/mfu`; null: as known of the GPU."""
    parallel: ParallelConfig = ParallelConfig()
    """How processes share the work: replicate, shard, hybrid, or a mapping."""
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ("tensorboard",)
    wandb: WandbConfig = WandbConfig()
    log_checkpoints: bool = False
    """Keep checkpoints with the tracker too, as artifacts (wandb), under the aliases latest and best."""

    @model_validator(mode="after")
    def _somewhere_to_keep_them(self) -> TrainConfig:
        if self.log_checkpoints and "wandb" not in self.trackers:
            raise ValueError(
                f"log_checkpoints=true needs a tracker that keeps files, and trackers={list(self.trackers)} has none: add wandb, or leave it out"
            )
        return self
