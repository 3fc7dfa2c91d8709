"""YAML files of CogVideoX's SAT training → Kineograph's YAML. What has no counterpart stands below as a comment; nothing is dropped in silence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kineograph.core.config import Tree, dump_yaml, load_file, merge, nest, parse
from kineograph.core.errors import InputError
from kineograph.family.cogvideox.shapes import RELEASED, TransformerShape
from kineograph.interop.sat_keys import (
    CLASSES,
    DISCRETIZATIONS,
    DRAW,
    GUIDERS,
    LORA,
    MODULES,
    NET,
    RELEASED_FOLDER,
    SAMPLERS,
    STAGE,
    TABLE,
    VAE,
    Convert,
    count,
    equal,
    flag,
    inside,
    last_of,
    number,
    patch_of,
)
from kineograph.run.plan import make_plan

FIRST_STEPS = 100  # of a fine-tuning


def translate(files: Sequence[Path]) -> str:
    """SAT's files, later ones over earlier ones, as a Kineograph YAML with comments."""
    tree: Tree = {}
    for path in files:
        tree = merge(tree, load_file(path))
    if not any(key in tree for key in ("args", "model", "deepspeed", "data")) or "stages" in tree:
        what = "is Kineograph's own" if "stages" in tree else "has none of the sections args, data, deepspeed and model"
        raise InputError(f"{files[0]} is no config of SAT: it {what}")
    reading = _Reading(tree)
    ours = reading.translated()
    if ours.get("stages"):
        make_plan(ours)  # what is printed can be used
    heading = f"# Kineograph's form of {', '.join(path.name for path in files)}"
    left = [f"# not translated: {key} = {json.dumps(value)}" for key, value in reading.left.items()]
    return "\n".join([heading, *reading.remarks, dump_yaml(ours).rstrip(), *left])


class _Reading:
    """A SAT config of which keys are taken one by one; what is left at the end was not translated."""

    def __init__(self, tree: Tree) -> None:
        self.left = _flat(tree)
        self.ours: Tree = {}
        self.remarks: list[str] = []

    def take(self, key: str, convert: Convert = lambda value: value) -> Any:
        """A key's value; None where it is not there, or is not one that can be translated."""
        if key not in self.left:
            return None
        try:
            value = convert(self.left[key])
        except (ValueError, TypeError, AttributeError):
            return None
        del self.left[key]
        return value

    def give(self, key: str, value: Any) -> None:
        self.ours = merge(self.ours, nest(key, value))

    def remark(self, text: str) -> None:
        self.remarks.append(f"# {text}")

    def translated(self) -> Tree:
        has_model = any(key.startswith("model.") for key in self.left)
        if has_model:
            text = {"kind": "t5", "padding": "read"}
            self.give(STAGE, {"task": "cogvideox", "weights": RELEASED_FOLDER, "text": text})
        given: Tree = {}
        for theirs, ours, convert in TABLE:
            found = self.left.get(theirs)
            value = self.take(theirs, convert)
            if value is None or ours is None:
                continue
            if given.setdefault(ours, value) != value:  # another key has said otherwise: this one stays untranslated
                self.left[theirs] = found
                continue
            self.give(ours, value)
        for key, name in CLASSES.items():
            self.take(key, last_of(name))
        self._cadence()
        self._learning_rate()
        self._batch()
        self._precision()
        self._split()
        self._loaded(has_model)
        if has_model:
            self._network()
            self._codec()
            self._diffusion()
            self._tuning()
            self._by_name()
            self.give("train.ema.decay", 0)  # SAT trains CogVideoX without an average of the weights
        if self.ours.get("data", {}).get("folder"):
            self.give("data.source", "folder")
        return {key: self.ours[key] for key in ("name", "seed", "data", "train", "stages") if key in self.ours}

    # training --------------------------------------------------------------------------------------------------------

    def _cadence(self) -> None:
        every = self.take("args.eval_interval", count)
        if every is not None:  # SAT draws its samples where it validates, and writes them as MP4
            self.give("train", {"validate_every": every, "sample_every": every, "format": "mp4"})
        rounds, size = self.take("args.eval_iters", count), self.take("args.eval_batch_size", count)
        if rounds is not None:
            self.give("train.validation_samples", rounds * (size or 1))

    def _learning_rate(self) -> None:
        """SAT lowers it linearly after a warm-up of 1 % of the steps unless told, and a fine-tuning begins with 100 steps at a twentieth of it:
        what its files leave to SAT's own defaults is said here, where the defaults are others."""
        steps = self.ours.get("train", {}).get("steps")
        if steps is None:
            return
        given = "args.lr_decay_style" in self.left
        style = self.take("args.lr_decay_style", last_of("constant", "linear", "cosine"))
        if style is None and not given:
            style = "linear"
        if style is not None:
            self.give("train.schedule", style)
        ratio = self.take("args.lr_decay_ratio", number)
        if style == "cosine":
            self.give("train.final_lr", ratio if ratio is not None else 0.1)
        share = self.take("args.warmup", number)
        warmup = round(steps * (share if share is not None else 0.01))
        if self.left.get("args.mode") == "finetune":
            self.take("args.mode")
            warmup = max(warmup, FIRST_STEPS)
            self.remark(f"SAT takes the first {FIRST_STEPS} steps of a fine-tuning at lr / 20; here lr rises over them")
        self.give("train.warmup", warmup)

    def _batch(self) -> None:
        """SAT counts a GPU's micro-batch; here batch_size is global, and accumulate divides it."""
        micro = self.take("deepspeed.train_micro_batch_size_per_gpu", count)
        plain = self.take("args.batch_size", count)
        micro = micro if micro is not None else plain
        steps = self.take("deepspeed.gradient_accumulation_steps", count)
        other = self.take("args.gradient_accumulation_steps", count)
        steps = steps or other or 1
        if micro is not None:
            self.give("train", {"batch_size": micro * steps, "accumulate": steps})
            self.remark(
                f"train.batch_size={micro * steps} is {micro} × {steps} for one GPU; it is global here: multiply it by the number of GPUs"
            )

    def _precision(self) -> None:
        for name in ("bf16", "fp16"):
            flags = [self.take(f"deepspeed.{name}.enabled", flag), self.take(f"args.{name}", flag)]
            if any(flags):
                self.give("train.precision", name)

    def _split(self) -> None:
        def shares(value: Any) -> list[float]:
            parts = [float(part) for part in str(value).split(",")]
            if len(parts) != 3 or min(parts) < 0 or not sum(parts):
                raise ValueError
            return [part / sum(parts) for part in parts]

        found = self.take("args.split", shares)
        if found:
            self.give("data", {"validation": round(found[1], 6), "test": round(found[2], 6)})

    def _loaded(self, has_model: bool) -> None:
        place = self.take("args.load", str)
        source = place if place is not None else self.take(f"{VAE}.ckpt_path", str)
        if source is None:
            return
        folder = source.rstrip("/").partition("/transformer" if place else "/vae/")[0]
        self.take(f"{VAE}.ckpt_path", inside(f"{folder}/vae/"))
        self.remark(f"{'args.load' if place else 'ckpt_path'} = {source}: make the folder {RELEASED_FOLDER} of it by")
        self.remark(
            f"  kineo import {folder} --from sat --run runs/sat && kineo export runs/sat --to diffusers {RELEASED_FOLDER}"
        )
        adapts = f"{LORA}.r" in self.left  # adapters need weights below them, whoever loads these
        if has_model and place is None and not adapts:
            self.give(STAGE, {"weights": None, "codec": "runs/sat/vae"})  # the transformer starts from nothing

    # model -----------------------------------------------------------------------------------------------------------

    def _network(self) -> None:
        width, heads = self.take(f"{NET}.hidden_size", count), self.ours["stages"]["generator"].get("heads")
        if width is not None and heads:
            self.give(f"{STAGE}.head_width", width // heads)
        patch = self.take(f"{NET}.patch_size", patch_of)
        if patch is not None:
            self.give(STAGE, {"patch": patch[1], "patch_time": patch[0]})
        into, out = self.take(f"{NET}.in_channels", count), self.take(f"{NET}.out_channels", count)
        noised = self.take("model.noised_image_input", flag)
        first = bool(noised) or (into is not None and out is not None and into == 2 * out)
        if first:
            self.give(f"{STAGE}.first_frame", True)
        if self.take(f"{NET}.ofs_embed_dim", count):
            self.give(f"{STAGE}.ofs", True)
        self._positions(timed=patch is not None and patch[0] > 1)

    def _positions(self, timed: bool) -> None:
        kind = self.take(f"{MODULES}.pos_embed_config.target", last_of("Basic3DPositionEmbeddingMixin", "Rotary3DPositionEmbeddingMixin"))  # fmt: skip
        params = f"{MODULES}.pos_embed_config.params"
        high, wide = (self.take(f"{NET}.latent_{side}", count) for side in ("height", "width"))
        rate = self.take(f"{NET}.time_compressed_rate", equal(4)) or 4
        frames = self.take(f"{NET}.num_frames", count)
        if high is not None and wide is not None:
            self.give(f"{STAGE}.base_size", [high, wide])
        if frames is not None:
            self.give(f"{STAGE}.base_frames", (frames - 1) // rate + 1)
        if kind == "Basic3DPositionEmbeddingMixin":
            self.give(f"{STAGE}.positions", "sincos")
            space = self.take(f"{params}.height_interpolation", number)
            other = self.take(f"{params}.width_interpolation", equal(space))
            if space is not None:
                self.give(f"{STAGE}.space_scale", space)
                if other is None:
                    self.remark("height and width have one space_scale here: that of height")
            time = self.take(f"{params}.time_interpolation", number)
            if time is not None:
                self.give(f"{STAGE}.time_scale", time)
        elif kind is not None:
            learned = self.take(f"{params}.learnable_pos_embed", flag)
            self.give(f"{STAGE}.positions", "rotary+learned" if learned else "rotary")
            self.take(f"{params}.hidden_size_head", equal(64))
            if timed:
                self.give(f"{STAGE}.grid", "slice")

    def _codec(self) -> None:
        """The VAE comes with the weights; what is said of it is taken where it is the released one."""
        fixed = {
            "ch": 128, "ch_mult": [1, 2, 2, 4], "z_channels": 16, "num_res_blocks": 3, "double_z": True, "in_channels": 3, "out_ch": 3,
            "attn_resolutions": [], "dropout": 0.0,
        }  # fmt: skip
        for part in ("encoder", "decoder"):
            for key, value in fixed.items():
                self.take(f"{VAE}.{part}_config.params.{key}", equal(value))
        self.take(f"{VAE}.ignore_keys", equal(["loss"]))

    def _diffusion(self) -> None:
        shifts: list[float] = []
        for place in DISCRETIZATIONS:
            kind = self.take(f"{place}.target", last_of("ZeroSNRDDPMDiscretization"))
            if kind is not None:
                self.give(f"{STAGE}.diffusion", {"schedule": "scaled_linear", "zero_terminal": True, "objective": "v"})
                shift = self.left.get(f"{place}.params.shift_scale", 1.0)
                shifts += [float(shift)] if isinstance(shift, (int, float)) else []
        if shifts:
            self.give(f"{STAGE}.diffusion.shift", shifts[0])
            # One schedule serves training and drawing here: another one's shift stays untranslated.
            for place in DISCRETIZATIONS:
                self.take(f"{place}.params.shift_scale", equal(shifts[0]))
        solver = self.take("model.sampler_config.target", last_of(*SAMPLERS))
        if solver is not None:
            self.give(f"{STAGE}.sample.solver", SAMPLERS[solver])
        guider = self.take(f"{DRAW}.guider_config.target", last_of(*GUIDERS))
        if guider is not None:
            self.give(f"{STAGE}.sample.guidance_schedule", GUIDERS[guider])
        steps = self.ours["stages"]["generator"].get("sample", {}).get("steps")
        self.take(f"{DRAW}.guider_config.params.num_steps", equal(steps))

    def _tuning(self) -> None:
        rank = self.take(f"{LORA}.r", count)
        frozen = self.take("model.not_trainable_prefixes", equal(["all"]))
        if rank is None:
            if frozen:
                self.remark("not_trainable_prefixes says that nothing is trained, and there is no lora_config")
            return
        if self.ours.get("train", {}).get("precision") == "bf16":  # as SAT keeps them, which is how they are released
            self.give(f"{STAGE}.weights_in", "bf16")
        alpha = self.take(f"{LORA}.lora_alpha", number)
        self.give(STAGE, {"tune": "lora", "lora": {"rank": rank, "alpha": alpha if alpha is not None else 1}})

    def _by_name(self) -> None:
        """The keys of a released shape as its name."""
        stage = self.ours["stages"]["generator"]
        keys = TransformerShape.model_fields.keys()
        shape = parse(TransformerShape, {key: stage[key] for key in keys if key in stage}, STAGE)
        for name, released in RELEASED.items():
            same = TransformerShape.model_validate({key: value for key, value in released.items() if key in keys})
            # Where nothing is laid out for a size, the size makes no difference.
            sized = {"base_size", "base_frames"} if shape.grid == "slice" or shape.positions == "sincos" else set()
            unread = sized | {"first_frame_inverse_scale"}
            if shape.model_dump(exclude=unread) == same.model_dump(exclude=unread):
                stage = {key: value for key, value in stage.items() if key not in keys}
                self.ours["stages"]["generator"] = {"task": stage.pop("task"), "shape": name, **stage}
                return


def _flat(tree: Any, prefix: str = "") -> Tree:
    """Dotted keys; entries of lists of mappings by their numbers."""
    flat: Tree = {}
    for key, value in tree.items():
        if isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value):
            value = {str(number): entry for number, entry in enumerate(value)}
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
