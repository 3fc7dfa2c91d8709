"""YAML files of CogVideoX's SAT training → Kineograph's YAML. What has no counterpart stands below as a comment; nothing is dropped in silence."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kineograph.core.config import Tree, dump_yaml, load_file, merge, nest, parse
from kineograph.core.errors import InputError
from kineograph.family.cogvideox.shapes import RELEASED, TransformerShape
from kineograph.run.plan import make_plan

Convert = Callable[[Any], Any]
_NET, _MODULES = "model.network_config.params", "model.network_config.params.modules"
_DATA, _ADAM = "data.params", "deepspeed.optimizer.params"
_DRAW = "model.sampler_config.params"
_TEXT = "model.conditioner_config.params.emb_models.0"
_VAE = "model.first_stage_config.params"
_DENOISER = "model.denoiser_config.params"
_LOSS = "model.loss_fn_config.params.sigma_sampler_config.params"
_STAGE = "stages.generator"
RELEASED_FOLDER = "released"


def _name(*known: str) -> Convert:
    """The last part of a dotted target, where it is one that is meant here."""

    def convert(value: Any) -> Any:
        last = str(value).rpartition(".")[2]
        if last not in known:
            raise ValueError
        return last

    return convert


def _words(text: Any) -> str:
    """A run's name is a folder's name."""
    return re.sub(r"[^\w.-]+", "-", str(text)).strip("-") or "sat"


def _one(value: Any) -> Any:
    """The only entry of a list."""
    if isinstance(value, list) and len(value) == 1:
        return value[0]
    if isinstance(value, str):
        return value
    raise ValueError


def _number(value: Any) -> int | float:
    """PyYAML's readers take 1e-4 for a word; SAT's files are full of them."""
    number = float(value)
    return int(number) if number.is_integer() and not isinstance(value, float) and "e" not in str(value) else number


def _count(value: Any) -> int:
    number = float(value)
    if not number.is_integer():
        raise ValueError
    return int(number)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _patch(value: Any) -> tuple[int, int]:
    """2 or [2, 2, 2] → in time, on a side."""
    sides = [_count(side) for side in value] if isinstance(value, list) else [1, _count(value), _count(value)]
    time, height, width = sides
    return time, _known(height, width)


def _only(*allowed: Any) -> Convert:
    """A value that says what is so here anyhow."""

    def convert(value: Any) -> None:
        if value not in allowed:
            raise ValueError

    return convert


# SAT's key, ours, and how the value changes. A ValueError leaves the key untranslated; ours=None: what it says is so here anyhow.
_TABLE: list[tuple[str, str | None, Convert]] = [
    ("args.experiment_name", "name", _words),
    ("args.seed", "seed", _count),
    ("args.train_iters", "train.steps", _count),
    ("args.log_interval", "train.log_every", _count),
    ("args.save_interval", "train.save_every", _count),
    ("args.num_workers", "train.workers", _count),
    ("args.lr", "train.lr", _number),
    ("args.train_data", "data.folder", _one),
    ("args.checkpoint_activations", "train.checkpointing", _flag),
    ("deepspeed.gradient_clipping", "train.clip", _number),
    (f"{_ADAM}.lr", "train.lr", _number),
    (f"{_ADAM}.betas", "train.betas", lambda value: [_number(part) for part in value]),
    (f"{_ADAM}.eps", "train.eps", _number),
    (f"{_ADAM}.weight_decay", "train.weight_decay", _number),
    (f"{_DATA}.video_size", "data.size", lambda value: [_count(side) for side in value]),
    (f"{_DATA}.fps", "data.fps", _number),
    (f"{_DATA}.max_num_frames", "data.frames", _count),
    (f"{_NET}.num_layers", f"{_STAGE}.depth", _count),
    (f"{_NET}.num_attention_heads", f"{_STAGE}.heads", _count),
    (f"{_NET}.time_embed_dim", f"{_STAGE}.time_width", _count),
    (f"{_NET}.transformer_args.checkpoint_activations", "train.checkpointing", _flag),
    (f"{_NET}.elementwise_affine", None, _only(True)),
    (f"{_MODULES}.adaln_layer_config.params.qk_ln", None, _only(True)),
    (f"{_MODULES}.pos_embed_config.params.text_length", f"{_STAGE}.text.length", _count),
    (f"{_TEXT}.params.max_length", f"{_STAGE}.text.length", _count),
    (f"{_TEXT}.params.model_dir", f"{_STAGE}.text.name", str),
    (f"{_TEXT}.is_trainable", None, _only(False)),
    (f"{_TEXT}.input_key", None, _only("txt")),
    (f"{_TEXT}.ucg_rate", f"{_STAGE}.caption_dropout", _number),
    ("model.noised_image_dropout", f"{_STAGE}.image.dropout", _number),
    (f"{_DENOISER}.num_idx", f"{_STAGE}.diffusion.steps", _count),
    (f"{_DENOISER}.quantize_c_noise", None, _only(False)),
    (f"{_LOSS}.num_idx", f"{_STAGE}.diffusion.steps", _count),
    (f"{_LOSS}.uniform_sampling", None, _only(True)),
    ("model.loss_fn_config.params.offset_noise_level", None, _only(0, 0.0)),
    ("model.loss_fn_config.params.fixed_frames", None, _only(0)),
    (f"{_DRAW}.fixed_frames", None, _only(0)),
    (f"{_DRAW}.num_steps", f"{_STAGE}.sample.steps", _count),
    (f"{_DRAW}.guider_config.params.scale", f"{_STAGE}.sample.guidance", _number),
    (f"{_DRAW}.guider_config.params.exp", None, _only(5)),
    ("model.scale_factor", None, _only(1.15258426, 0.7)),  # as the VAE was released
    (f"{_VAE}.loss_config.target", None, _name("Identity")),
    (f"{_VAE}.regularizer_config.target", None, _name("DiagonalGaussianRegularizer")),
]
# Classes that stand for what CogVideoX always does.
_CLASSES = {
    "model.network_config.target": "DiffusionTransformer",
    f"{_MODULES}.patch_embed_config.target": "ImagePatchEmbeddingMixin",
    f"{_MODULES}.adaln_layer_config.target": "AdaLNMixin",
    f"{_MODULES}.final_layer_config.target": "FinalLayerMixin",
    f"{_MODULES}.lora_config.target": "LoraMixin",
    "model.denoiser_config.target": "DiscreteDenoiser",
    f"{_DENOISER}.weighting_config.target": "EpsWeighting",
    f"{_DENOISER}.scaling_config.target": "VideoScaling",
    "model.conditioner_config.target": "GeneralConditioner",
    f"{_TEXT}.target": "FrozenT5Embedder",
    "model.loss_fn_config.target": "VideoDiffusionLoss",
    "model.loss_fn_config.params.sigma_sampler_config.target": "DiscreteSampling",
    f"{_VAE.removesuffix('.params')}.target": "VideoAutoencoderInferenceWrapper",
    f"{_VAE}.encoder_config.target": "ContextParallelEncoder3D",
    f"{_VAE}.decoder_config.target": "ContextParallelDecoder3D",
    "data.target": "SFTDataset",
}
_DISCRETIZATIONS = (f"{_DENOISER}.discretization_config", f"{_LOSS}.discretization_config", f"{_DRAW}.discretization_config")  # fmt: skip
_SAMPLERS = {"VPSDEDPMPP2MSampler": "dpm_solver_sde", "VideoDDIMSampler": "ddim"}
_GUIDERS = {"DynamicCFG": "cosine", "VanillaCFG": "constant"}


def translate(files: Sequence[Path]) -> str:
    """SAT's files, later ones over earlier ones, as a Kineograph YAML with comments."""
    tree: Tree = {}
    for path in files:
        tree = merge(tree, load_file(path))
    if not any(key in tree for key in ("args", "model", "deepspeed", "data")):
        raise InputError(f"{files[0]} is no config of SAT: it has none of the sections args, data, deepspeed and model")
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
            self.give(_STAGE, {"task": "cogvideox", "weights": RELEASED_FOLDER, "text": text})
        given: Tree = {}
        for theirs, ours, convert in _TABLE:
            found = self.left.get(theirs)
            value = self.take(theirs, convert)
            if value is None or ours is None:
                continue
            if given.setdefault(ours, value) != value:  # another key has said otherwise: this one stays untranslated
                self.left[theirs] = found
                continue
            self.give(ours, value)
        for key, name in _CLASSES.items():
            self.take(key, _name(name))
        self._cadence()
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
        if self.ours.get("data", {}).get("folder"):
            self.give("data.source", "folder")
        return {key: self.ours[key] for key in ("name", "seed", "data", "train", "stages") if key in self.ours}

    # training --------------------------------------------------------------------------------------------------------

    def _cadence(self) -> None:
        every = self.take("args.eval_interval", _count)
        if every is not None:  # SAT draws its samples where it validates
            self.give("train", {"validate_every": every, "sample_every": every})
        count, size = self.take("args.eval_iters", _count), self.take("args.eval_batch_size", _count)
        if count is not None:
            self.give("train.validation_samples", count * (size or 1))

    def _batch(self) -> None:
        """SAT counts a GPU's micro-batch; here batch_size is global, and accumulate divides it."""
        micro = self.take("deepspeed.train_micro_batch_size_per_gpu", _count)
        plain = self.take("args.batch_size", _count)
        micro = micro if micro is not None else plain
        steps = self.take("deepspeed.gradient_accumulation_steps", _count)
        other = self.take("args.gradient_accumulation_steps", _count)
        steps = steps or other or 1
        if micro is not None:
            self.give("train", {"batch_size": micro * steps, "accumulate": steps})
            self.remark(
                f"train.batch_size={micro * steps} is {micro} × {steps} for one GPU; it is global here: multiply it by the number of GPUs"
            )

    def _precision(self) -> None:
        for name in ("bf16", "fp16"):
            flags = [self.take(f"deepspeed.{name}.enabled", _flag), self.take(f"args.{name}", _flag)]
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
        source = place if place is not None else self.take(f"{_VAE}.ckpt_path", str)
        if source is None:
            return
        folder = source.rstrip("/").partition("/transformer" if place else "/vae/")[0]
        self.take(f"{_VAE}.ckpt_path", lambda value: _known(str(value).startswith(f"{folder}/vae/"), True))
        self.remark(f"{'args.load' if place else 'ckpt_path'} = {source}: make the folder {RELEASED_FOLDER} of it by")
        self.remark(
            f"  kineo import {folder} --from sat --run runs/sat && kineo export runs/sat --to diffusers {RELEASED_FOLDER}"
        )
        if has_model and place is None:
            self.give(_STAGE, {"weights": None, "codec": "runs/sat/vae"})  # the transformer starts from nothing

    # model -----------------------------------------------------------------------------------------------------------

    def _network(self) -> None:
        width, heads = self.take(f"{_NET}.hidden_size", _count), self.ours["stages"]["generator"].get("heads")
        if width is not None and heads:
            self.give(f"{_STAGE}.head_width", width // heads)
        patch = self.take(f"{_NET}.patch_size", _patch)
        if patch is not None:
            self.give(_STAGE, {"patch": patch[1], "patch_time": patch[0]})
        into, out = self.take(f"{_NET}.in_channels", _count), self.take(f"{_NET}.out_channels", _count)
        noised = self.take("model.noised_image_input", _flag)
        first = bool(noised) or (into is not None and out is not None and into == 2 * out)
        if first:
            self.give(f"{_STAGE}.first_frame", True)
        if self.take(f"{_NET}.ofs_embed_dim", _count):
            self.give(f"{_STAGE}.ofs", True)
        self._positions(timed=patch is not None and patch[0] > 1)

    def _positions(self, timed: bool) -> None:
        kind = self.take(f"{_MODULES}.pos_embed_config.target", _name("Basic3DPositionEmbeddingMixin", "Rotary3DPositionEmbeddingMixin"))  # fmt: skip
        params = f"{_MODULES}.pos_embed_config.params"
        high, wide = (self.take(f"{_NET}.latent_{side}", _count) for side in ("height", "width"))
        rate = self.take(f"{_NET}.time_compressed_rate", lambda value: _known(_count(value), 4)) or 4
        frames = self.take(f"{_NET}.num_frames", _count)
        if high is not None and wide is not None:
            self.give(f"{_STAGE}.base_size", [high, wide])
        if frames is not None:
            self.give(f"{_STAGE}.base_frames", (frames - 1) // rate + 1)
        if kind == "Basic3DPositionEmbeddingMixin":
            self.give(f"{_STAGE}.positions", "sincos")
            space = self.take(f"{params}.height_interpolation", _number)
            other = self.take(f"{params}.width_interpolation", lambda value: _known(_number(value), space))
            if space is not None:
                self.give(f"{_STAGE}.space_scale", space)
                if other is None:
                    self.remark("height and width have one space_scale here: that of height")
            time = self.take(f"{params}.time_interpolation", _number)
            if time is not None:
                self.give(f"{_STAGE}.time_scale", time)
        elif kind is not None:
            learned = self.take(f"{params}.learnable_pos_embed", _flag)
            self.give(f"{_STAGE}.positions", "rotary+learned" if learned else "rotary")
            self.take(f"{params}.hidden_size_head", lambda value: _known(_count(value), 64))
            if timed:
                self.give(f"{_STAGE}.grid", "slice")

    def _codec(self) -> None:
        """The VAE comes with the weights; what is said of it is taken where it is the released one."""
        fixed = {
            "ch": 128, "ch_mult": [1, 2, 2, 4], "z_channels": 16, "num_res_blocks": 3, "double_z": True, "in_channels": 3, "out_ch": 3,
            "attn_resolutions": [], "dropout": 0.0,
        }  # fmt: skip
        for part in ("encoder", "decoder"):
            for key, value in fixed.items():
                self.take(f"{_VAE}.{part}_config.params.{key}", lambda found, value=value: _known(found, value))
        self.take(f"{_VAE}.ignore_keys", lambda value: _known(value, ["loss"]))

    def _diffusion(self) -> None:
        shifts = []
        for place in _DISCRETIZATIONS:
            kind = self.take(f"{place}.target", _name("ZeroSNRDDPMDiscretization"))
            if kind is not None:
                self.give(f"{_STAGE}.diffusion", {"schedule": "scaled_linear", "zero_terminal": True, "objective": "v"})
                shifts.append(self.left.get(f"{place}.params.shift_scale", 1.0))
        if shifts:
            for place in (
                _DISCRETIZATIONS
            ):  # one schedule serves training and drawing here: another one's shift stays untranslated
                self.take(f"{place}.params.shift_scale", lambda value: _known(_number(value), shifts[0]))
            if isinstance(shifts[0], (int, float)):
                self.give(f"{_STAGE}.diffusion.shift", float(shifts[0]))
        solver = self.take("model.sampler_config.target", _name(*_SAMPLERS))
        if solver is not None:
            self.give(f"{_STAGE}.sample.solver", _SAMPLERS[solver])
        guider = self.take(f"{_DRAW}.guider_config.target", _name(*_GUIDERS))
        if guider is not None:
            self.give(f"{_STAGE}.sample.guidance_schedule", _GUIDERS[guider])
        steps = self.ours["stages"]["generator"].get("sample", {}).get("steps")
        self.take(f"{_DRAW}.guider_config.params.num_steps", lambda value: _known(_count(value), steps))

    def _tuning(self) -> None:
        place = f"{_MODULES}.lora_config.params"
        rank = self.take(f"{place}.r", _count)
        frozen = self.take("model.not_trainable_prefixes", lambda value: _known(value, ["all"]))
        if rank is None:
            if frozen:
                self.remark("not_trainable_prefixes says that nothing is trained, and there is no lora_config")
            return
        alpha = self.take(f"{place}.lora_alpha", _number)
        self.give(_STAGE, {"tune": "lora", "lora": {"rank": rank, "alpha": alpha if alpha is not None else 1}})

    def _by_name(self) -> None:
        """The keys of a released shape as its name."""
        stage = self.ours["stages"]["generator"]
        keys = TransformerShape.model_fields.keys()
        shape = parse(TransformerShape, {key: stage[key] for key in keys if key in stage}, _STAGE)
        for name, released in RELEASED.items():
            same = TransformerShape.model_validate({key: value for key, value in released.items() if key in keys})
            # Where nothing is laid out for a size, the size makes no difference.
            sized = {"base_size", "base_frames"} if shape.grid == "slice" or shape.positions == "sincos" else set()
            unread = sized | {"first_frame_inverse_scale"}
            if shape.model_dump(exclude=unread) == same.model_dump(exclude=unread):
                stage = {key: value for key, value in stage.items() if key not in keys}
                self.ours["stages"]["generator"] = {"task": stage.pop("task"), "shape": name, **stage}
                return


def _known(value: Any, expected: Any) -> Any:
    same = math.isclose(value, expected) if isinstance(value, float) and isinstance(expected, (int, float)) else value == expected  # fmt: skip
    if not same:
        raise ValueError
    return value


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
