"""SAT's training YAML of CogVideoX → Kineograph's YAML. Keys without a counterpart are listed in comments at the end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kineograph.core.config import Tree, merge, parse
from kineograph.core.config_file import load_file
from kineograph.core.errors import InputError
from kineograph.family.cogvideox.transformer_config import RELEASED, TransformerShape
from kineograph.interop.key_translation import KeyTranslation, class_name, count, equal, flag, number
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
    patch_size,
    path_under,
    single_entry,
)

FINETUNE_WARMUP = 100  # steps


def translate(files: Sequence[Path]) -> str:
    """Translate SAT's files, later ones override earlier ones, to a Kineograph YAML with comments."""
    tree: Tree = {}
    for path in files:
        tree = merge(tree, load_file(path))
    if not any(key in tree for key in ("args", "model", "deepspeed", "data")) or "stages" in tree:
        problem = "is Kineograph's own" if "stages" in tree else "has none of the sections args, data, deepspeed, model"
        raise InputError(f"{files[0]} is not a config of SAT: it {problem}")
    keys = KeyTranslation(tree)
    _Translator(keys).translate()
    return keys.render(", ".join(path.name for path in files), lists_moved=False)


class _Translator:
    def __init__(self, keys: KeyTranslation) -> None:
        self.keys, self.left = keys, keys.left
        self.take, self.put, self.get, self.remark = keys.take, keys.put, keys.get, keys.remark

    def translate(self) -> None:
        has_model = any(key.startswith("model.") for key in self.left)
        if has_model:
            text = {"kind": "t5", "padding": "read"}
            self.put(STAGE, {"task": "cogvideox", "weights": RELEASED_FOLDER, "text": text})
        self.keys.move_all(TABLE)
        for key, name in CLASSES.items():
            self.take(key, class_name(name))
        self._translate_intervals()
        self._translate_learning_rate()
        self._translate_batch()
        self._translate_precision()
        self._translate_split()
        self._load_weights(has_model)
        if has_model:
            self._translate_network()
            self._translate_codec()
            self._translate_diffusion()
            self._translate_lora()
            self._name_shape()
            self.put("train.ema.decay", 0)  # SAT trains CogVideoX without EMA
        if self.get("data.folder"):
            self.put("data.source", "folder")

    # training --------------------------------------------------------------------------------------------------------

    def _translate_intervals(self) -> None:
        every = self.take("args.eval_interval", count)
        if every is not None:  # SAT samples when it validates, as MP4
            self.put("train", {"validate_every": every, "sample_every": every, "format": "mp4"})
        rounds, size = self.take("args.eval_iters", count), self.take("args.eval_batch_size", count)
        if rounds is not None:
            self.put("train.validation_samples", rounds * (size or 1))

    def _translate_learning_rate(self) -> None:
        """Write out SAT's defaults, which differ from ours: linear decay after a warm-up of 1 % of the steps.

        Its fine-tuning begins with 100 steps at a twentieth of the rate.
        """
        steps = self.get("train.steps")
        if steps is None:
            return
        has_style = "args.lr_decay_style" in self.left
        style = self.take("args.lr_decay_style", class_name("constant", "linear", "cosine"))
        if style is None and not has_style:
            style = "linear"
        if style is not None:
            self.put("train.schedule", style)
        ratio = self.take("args.lr_decay_ratio", number)
        if style == "cosine":
            self.put("train.final_lr", ratio if ratio is not None else 0.1)
        share = self.take("args.warmup", number)
        warmup = round(steps * (share if share is not None else 0.01))
        if self.left.get("args.mode") == "finetune":
            self.take("args.mode")
            warmup = max(warmup, FINETUNE_WARMUP)
            self.remark(
                f"SAT trains the first {FINETUNE_WARMUP} steps of a fine-tuning at lr / 20; here lr rises over them"
            )
        self.put("train.warmup", warmup)

    def _translate_batch(self) -> None:
        """SAT's batch size is a GPU's micro-batch; ours is global, and divided by accumulate."""
        micro = self.take("deepspeed.train_micro_batch_size_per_gpu", count)
        plain = self.take("args.batch_size", count)
        micro = micro if micro is not None else plain
        steps = self.take("deepspeed.gradient_accumulation_steps", count)
        other = self.take("args.gradient_accumulation_steps", count)
        steps = steps or other or 1
        if micro is not None:
            self.put("train", {"batch_size": micro * steps, "accumulate": steps})
            self.remark(
                f"train.batch_size={micro * steps} is {micro} × {steps} for one GPU; it is global: multiply it by the number of GPUs"
            )

    def _translate_precision(self) -> None:
        for name in ("bf16", "fp16"):
            flags = [self.take(f"deepspeed.{name}.enabled", flag), self.take(f"args.{name}", flag)]
            if any(flags):
                self.put("train.precision", name)

    def _translate_split(self) -> None:
        def shares(value: Any) -> list[float]:
            parts = [float(part) for part in str(value).split(",")]
            if len(parts) != 3 or min(parts) < 0 or not sum(parts):
                raise ValueError
            return [part / sum(parts) for part in parts]

        split = self.take("args.split", shares)
        if split:
            self.put("data", {"validation": round(split[1], 6), "test": round(split[2], 6)})
        folder = self.get("data.folder")
        held_out = self.take("args.valid_data", single_entry) if folder else None
        if held_out == folder and folder:  # validated on what is trained, as by validation=0
            self.put("data.validation", 0.0)
        elif held_out is not None:
            self.put("data.validation_folder", held_out)

    def _load_weights(self, has_model: bool) -> None:
        checkpoint = self.take("args.load", str)
        source = checkpoint if checkpoint is not None else self.take(f"{VAE}.ckpt_path", str)
        if source is None:
            return
        folder = source.rstrip("/").partition("/transformer" if checkpoint else "/vae/")[0]
        self.take(f"{VAE}.ckpt_path", path_under(f"{folder}/vae/"))
        self.remark(
            f"{'args.load' if checkpoint else 'ckpt_path'} = {source}: convert it to the folder {RELEASED_FOLDER} with"
        )
        self.remark(
            f"  kineo import {folder} --from sat --run runs/sat && kineo export runs/sat --to diffusers {RELEASED_FOLDER}"
        )
        has_lora = f"{LORA}.r" in self.left  # adapters need base weights in any case
        if has_model and checkpoint is None and not has_lora:
            self.put(STAGE, {"weights": None, "codec": "runs/sat/vae"})  # the transformer is trained from scratch

    # model -----------------------------------------------------------------------------------------------------------

    def _translate_network(self) -> None:
        width, heads = self.take(f"{NET}.hidden_size", count), self.get(f"{STAGE}.heads")
        if width is not None and heads:
            self.put(f"{STAGE}.head_width", width // heads)
        patch = self.take(f"{NET}.patch_size", patch_size)
        if patch is not None:
            self.put(STAGE, {"patch": patch[1], "patch_time": patch[0]})
        inputs, outputs = (self.take(f"{NET}.{side}_channels", count) for side in ("in", "out"))
        noised = self.take("model.noised_image_input", flag)
        if noised or (inputs is not None and outputs is not None and inputs == 2 * outputs):
            self.put(f"{STAGE}.first_frame", True)
        if self.take(f"{NET}.ofs_embed_dim", count):
            self.put(f"{STAGE}.ofs", True)
        self._translate_positions(patch_in_time=patch is not None and patch[0] > 1)

    def _translate_positions(self, patch_in_time: bool) -> None:
        kind = self.take(f"{MODULES}.pos_embed_config.target", class_name("Basic3DPositionEmbeddingMixin", "Rotary3DPositionEmbeddingMixin"))  # fmt: skip
        params = f"{MODULES}.pos_embed_config.params"
        height, width = (self.take(f"{NET}.latent_{side}", count) for side in ("height", "width"))
        rate = self.take(f"{NET}.time_compressed_rate", equal(4)) or 4
        frames = self.take(f"{NET}.num_frames", count)
        if height is not None and width is not None:
            self.put(f"{STAGE}.base_size", [height, width])
        if frames is not None:
            self.put(f"{STAGE}.base_frames", (frames - 1) // rate + 1)
        if kind == "Basic3DPositionEmbeddingMixin":
            self.put(f"{STAGE}.positions", "sincos")
            space = self.take(f"{params}.height_interpolation", number)
            other = self.take(f"{params}.width_interpolation", equal(space))
            if space is not None:
                self.put(f"{STAGE}.space_scale", space)
                if other is None:
                    self.remark("height and width share one space_scale here: that of height is used")
            time = self.take(f"{params}.time_interpolation", number)
            if time is not None:
                self.put(f"{STAGE}.time_scale", time)
        elif kind is not None:
            learned = self.take(f"{params}.learnable_pos_embed", flag)
            self.put(f"{STAGE}.positions", "rotary+learned" if learned else "rotary")
            self.take(f"{params}.hidden_size_head", equal(64))
            if patch_in_time:
                self.put(f"{STAGE}.grid", "slice")

    def _translate_codec(self) -> None:
        """The VAE comes with the weights: its keys need no translation where they describe the released one."""
        fixed = {
            "ch": 128, "ch_mult": [1, 2, 2, 4], "z_channels": 16, "num_res_blocks": 3, "double_z": True, "in_channels": 3, "out_ch": 3,
            "attn_resolutions": [], "dropout": 0.0,
        }  # fmt: skip
        for part in ("encoder", "decoder"):
            for key, value in fixed.items():
                self.take(f"{VAE}.{part}_config.params.{key}", equal(value))
        self.take(f"{VAE}.ignore_keys", equal(["loss"]))

    def _translate_diffusion(self) -> None:
        shifts: list[float] = []
        for place in DISCRETIZATIONS:
            kind = self.take(f"{place}.target", class_name("ZeroSNRDDPMDiscretization"))
            if kind is not None:
                self.put(f"{STAGE}.diffusion", {"schedule": "scaled_linear", "zero_terminal": True, "objective": "v"})
                shift = self.left.get(f"{place}.params.shift_scale", 1.0)
                shifts += [float(shift)] if isinstance(shift, (int, float)) else []
        if shifts:
            self.put(f"{STAGE}.diffusion.shift", shifts[0])
            # Training and sampling share one schedule here: a different shift stays untranslated.
            for place in DISCRETIZATIONS:
                self.take(f"{place}.params.shift_scale", equal(shifts[0]))
        solver = self.take("model.sampler_config.target", class_name(*SAMPLERS))
        if solver is not None:
            self.put(f"{STAGE}.sample.solver", SAMPLERS[solver])
        guider = self.take(f"{DRAW}.guider_config.target", class_name(*GUIDERS))
        if guider is not None:
            self.put(f"{STAGE}.sample.guidance_schedule", GUIDERS[guider])
        steps = self.get(f"{STAGE}.sample.steps")
        self.take(f"{DRAW}.guider_config.params.num_steps", equal(steps))

    def _translate_lora(self) -> None:
        rank = self.take(f"{LORA}.r", count)
        frozen = self.take("model.not_trainable_prefixes", equal(["all"]))
        if rank is None:
            if frozen:
                self.remark("not_trainable_prefixes freezes everything, and there is no lora_config")
            return
        if self.get("train.precision") == "bf16":  # as in SAT and in the released weights
            self.put(f"{STAGE}.weights_in", "bf16")
        alpha = self.take(f"{LORA}.lora_alpha", number)
        self.put(STAGE, {"tune": "lora", "lora": {"rank": rank, "alpha": alpha if alpha is not None else 1}})

    def _name_shape(self) -> None:
        """Replace the keys of a released shape by its name."""
        stage = self.get(STAGE)
        keys = TransformerShape.model_fields.keys()
        shape = parse(TransformerShape, {key: stage[key] for key in keys if key in stage}, STAGE)
        for name, released in RELEASED.items():
            candidate = TransformerShape.model_validate({key: value for key, value in released.items() if key in keys})
            # The base size matters only where positions are laid out for it.
            sized = {"base_size", "base_frames"} if shape.grid == "slice" or shape.positions == "sincos" else set()
            ignored = sized | {"first_frame_inverse_scale"}
            if shape.model_dump(exclude=ignored) == candidate.model_dump(exclude=ignored):
                stage = {key: value for key, value in stage.items() if key not in keys}
                self.keys.ours["stages"]["generator"] = {"task": stage.pop("task"), "shape": name, **stage}
                return
