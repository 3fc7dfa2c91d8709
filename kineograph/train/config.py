"""Config keys of training: `train.*` for all stages, `stages.x.train.*` for one, `stages.x.players.p.*` for one player."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from kineograph.core.config import Config
from kineograph.core.metric_options import MetricOptions
from kineograph.train.parallel import ParallelConfig


class EmaConfig(Config):
    decay: float = Field(0.999, ge=0, lt=1)
    """Decay of the moving average; 0 turns it off. Ramps up as min(decay, (1 + n) / (10 + n)) over n updates."""
    every: int = Field(1, ge=1)
    """Steps between updates."""
    start: int = Field(0, ge=0)
    """Until this step the average is a copy of the weights."""


class PlayerConfig(Config):
    """The optimizer of one player."""

    lr: float = Field(3e-4, ge=0)
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.99)
    eps: float = Field(1e-8, gt=0)
    optimizer: Literal["adamw", "adamw_split", "adamw_8bit"] = "adamw"
    """adamw_split: bf16 weights are updated as in fp32, with 16 more bits for each. adamw_8bit: that, and 8-bit moments: 2 bytes a weight
    instead of 8."""
    weight_decay: float = Field(0.01, ge=0)
    """For matrices only; vectors (biases, norms, scales) are not decayed."""
    warmup: int = Field(100, ge=0)
    """Steps over which the learning rate rises linearly from 0."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Schedule of the learning rate from the end of the warm-up to `steps`."""
    final_lr: float = Field(0.0, ge=0, le=1)
    """Final learning rate of cosine and linear, as a fraction of lr."""
    clip: float | None = Field(1.0, gt=0)
    """Maximum gradient norm of this player; null: no clipping."""
    ema: EmaConfig = EmaConfig()


class WandbConfig(Config):
    """Where the tracker `wandb` logs to."""

    project: str | None = None
    """Null: WANDB_PROJECT of the environment, or kineograph."""
    entity: str | None = None
    """User or team; null: the account's default."""
    id: str | None = Field(None, pattern=r"^[\w-]+$")
    """Null: random. A resumed run keeps the id in its folder, `wandb/kineograph.json`."""


class HubConfig(Config):
    """Where the tracker `hub` uploads checkpoints to."""

    repo: str | None = Field(None, pattern=r"^[\w.-]+/[\w.-]+$")
    """A model repository of the Hugging Face hub, `owner/name`, created if it does not exist; null: only the folder RUN/hub is written."""
    private: bool = True
    """Create the repository as a private one."""


class TrainConfig(PlayerConfig):
    steps: int = Field(1000, ge=1)
    """Optimizer steps."""
    epochs: float | None = Field(None, gt=0)
    """Length in passes over the training items, instead of `steps`, which is computed from it when training starts."""
    minutes: float | None = Field(None, gt=0, le=10**6)
    """Length in minutes by the clock, compilation included. What the recipe counts in `steps` (warm-up, schedule, *_every) keeps its share."""
    minutes_share: float = Field(1.0, gt=0, le=1)
    """The part of `minutes` that a stage takes. Where the shares of all stages add up to 1, `minutes` is the time of the run."""
    batch_size: int = Field(32, ge=1)
    """Global: over all processes and micro-batches."""
    accumulate: int = Field(1, ge=1)
    """Micro-batches per step."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """auto: bf16 on GPUs that support it, fp32 elsewhere."""
    compile: Literal["auto", "graphs", "blocks"] | bool = "auto"
    """torch.compile; graphs: with CUDA graphs; blocks: compile equal blocks once, so that compile time does not grow with depth;
    auto: on GPUs only, blocks from half a billion parameters, otherwise graphs if accumulate=1."""
    compile_ahead: bool = False
    """Compile in a second process, which needs the memory of the stage once more; the first steps run uncompiled meanwhile. One process only."""
    checkpointing: bool | Literal["light", "selective"] = False
    """Recompute activations of the repeated blocks in the backward pass: less memory, more time. selective: keep the outputs of attention;
    light: also those of all matrix products but the widest."""
    deterministic: bool = False
    """The same command gives the same losses and weights, bit by bit, on the same kind of GPU, or on a CPU with as many threads. Slower."""
    device: str = "auto"
    """auto: a GPU if there is one."""
    log_every: int = Field(10, ge=1)
    """Steps between lines of metrics.jsonl."""
    epoch_samples: int | None = Field(None, ge=1, le=10**13)
    """Save, validate, evaluate and draw after so many training samples instead of every *_every steps; *_every=0 still turns a phase off."""
    save_every: int = Field(1000, ge=1)
    """Steps between checkpoints."""
    save_every_samples: int | None = Field(None, ge=1, le=10**13)
    """Training samples between snapshots: checkpoints that keep_last never deletes."""
    save_first: bool = False
    """Also save a checkpoint at step 0."""
    keep_last: int = Field(2, ge=1)
    """Checkpoints to keep, besides the best one and the snapshots."""
    sample_every: int = Field(1000, ge=0)
    """Steps between drawing samples; 0: never."""
    sample_first: bool = False
    """Also draw samples at step 0, before training."""
    samples: int = Field(8, ge=1)
    """Number of `prompts` to draw."""
    sample_frames: int | None = Field(None, ge=1)
    """Frames per sample; null: as in training."""
    format: Literal["auto", "gif", "mp4", "png"] = "auto"
    """File format of samples; auto: png for one frame, gif for more."""
    show: Literal["media", "latents"] = "media"
    """Write samples and validation inputs as media, or their latents as safetensors without decoding them."""
    grids: tuple[Literal["train", "validation", "test"], ...] = ()
    """Splits for which a grid shows real items beside samples drawn from their captions."""
    caption_prefix: str = ""
    """Prefix of the captions of logged pictures."""
    validate_every: int = Field(500, ge=0)
    """Steps between validations; 0: never."""
    validate_epochs: float | None = Field(10.0, gt=0)
    """Validate after so many passes over the training items where that is sooner than `validate_every`, at least 50 steps apart; null: only
    `validate_every` counts."""
    validation_samples: int = Field(256, ge=1)
    """Held-out items per validation."""
    metrics: tuple[str, ...] = ()
    """Metrics of the averaged weights during training, named as for `kineo evaluate`; those that do not apply to a stage are skipped."""
    evaluate_every: int = Field(1000, ge=0)
    """Steps between computing `metrics`; 0: never."""
    evaluation_samples: int = Field(256, ge=1)
    """Samples per evaluation."""
    metric_options: MetricOptions = MetricOptions()
    """How `metrics` are computed, as papers and packages differ; options of `kineo evaluate` too."""
    max_nonfinite: int = Field(20, ge=1)
    """A step with a non-finite gradient is skipped; this many in a row end the run."""
    health: Literal["stop", "warn", "off"] = "stop"
    """What a fatal finding about the stage (docs/health.md) does: stop ends the run with code 1 before the next stage trains on it; warn
    prints it and goes on; off looks for nothing."""
    workers: Annotated[int, Field(ge=0, le=1024)] | Literal["auto"] = "auto"
    """Data worker processes; 0: read in the training process; auto: half the cores, at most 8."""
    keep_decoded: bool = True
    """Keep the decoded items of a folder in memory if all fit into a quarter of what is free. The samples are the same."""
    timeout: float = Field(600.0, gt=0)
    """Seconds to wait for data or another process before the run fails."""
    watchdog: float | None = Field(None, gt=0)
    """Seconds without progress (a step, or a batch validated, evaluated or drawn) after which a process writes its stacks to RUN/logs and
    exits with code 1; null: never."""
    peak_tflops: float | None = Field(None, gt=0)
    """Peak of one device in 10¹² floating-point operations per second, for `time/mfu`; null: the value known for the GPU."""
    parallel: ParallelConfig = ParallelConfig()
    """How processes share the model: replicate, shard, hybrid, or a mapping."""
    trackers: tuple[Literal["tensorboard", "wandb", "hub"], ...] = ("tensorboard",)
    wandb: WandbConfig = WandbConfig()
    hub: HubConfig = HubConfig()
    log_checkpoints: bool = False
    """Give checkpoints to wandb, as artifacts with the aliases latest and best, and to hub."""

    @property
    def micro_batch_size(self) -> int:
        """Samples of all processes in one forward pass, in training and in validation."""
        return max(1, self.batch_size // self.accumulate)

    @property
    def seconds(self) -> float | None:
        """The time that the stage may take; None: as long as `steps` take."""
        return None if self.minutes is None else 60 * self.minutes * self.minutes_share

    @model_validator(mode="after")
    def _check_minutes(self) -> TrainConfig:
        if self.minutes is not None and self.deterministic:
            raise ValueError(
                f"minutes={self.minutes:g} ends by the clock, which differs from run to run, and deterministic=true promises the same "
                "weights every time: set steps instead of minutes, or deterministic=false"
            )
        return self

    @model_validator(mode="after")
    def _check_compile_ahead(self) -> TrainConfig:
        if self.compile_ahead and self.compile is False:
            raise ValueError("compile_ahead=true has no effect with compile=false: remove it, or set compile=auto")
        if self.compile_ahead and self.deterministic:
            raise ValueError(
                "compile_ahead=true compiles as soon as the second process is ready, which differs from run to run, and deterministic=true "
                "promises the same weights every time: set one of them to false"
            )
        return self

    @model_validator(mode="after")
    def _check_static_graph(self) -> TrainConfig:
        if self.parallel.static_graph and self.accumulate > 1:
            raise ValueError(
                f"parallel.static_graph=true does not work with accumulate={self.accumulate}, which torch's DDP refuses: use one of the two"
            )
        return self

    @model_validator(mode="after")
    def _check_log_checkpoints(self) -> TrainConfig:
        if self.log_checkpoints and not {"wandb", "hub"} & set(self.trackers):
            raise ValueError(
                f"log_checkpoints=true needs the tracker wandb or hub, and trackers={list(self.trackers)}: add one, or set log_checkpoints=false"
            )
        if "hub" in self.trackers and not self.log_checkpoints:
            raise ValueError("the tracker hub takes checkpoints: set log_checkpoints=true, or leave it out of trackers")
        return self
