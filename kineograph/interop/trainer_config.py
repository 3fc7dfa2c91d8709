"""Keyword arguments of the trainers of phenaki-pytorch, nuwa-pytorch and muse-maskgit-pytorch → Kineograph's YAML, key by key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kineograph.core.config import Tree, dump_yaml
from kineograph.core.errors import InputError
from kineograph.interop.key_translation import (
    KeyTranslation,
    Row,
    choose,
    count,
    counts,
    equal,
    flag,
    number,
    only,
    up_to,
)
from kineograph.interop.trainer_calls import Call, read_calls
from kineograph.interop.trainer_keys import (
    CLASSES,
    CODEC_TRAINER,
    CVIVIT,
    DEFAULTS,
    MASKGIT,
    MUSE_MASKGIT,
    MUSE_TRANSFORMER,
    MUSE_VAE,
    NUWA,
    NUWA_QUANTIZER,
    NUWA_TRAINER,
    NUWA_VAE,
    PHENAKI,
    PHENAKI_TRAINER,
    T5,
)
from kineograph.run.plan import make_plan

PACKAGES = tuple(CLASSES)
Stage = Callable[[KeyTranslation, str, str], None]


def translate(path: Path, package: str) -> str:
    """→ Kineograph's YAML, with a comment for every keyword"""
    calls = read_calls(path, CLASSES[package])
    names = _name_calls(calls)
    keys = KeyTranslation(
        {name: DEFAULTS.get((package, call.name), {}) | call.keywords for name, call in zip(names, calls)}
    )
    by_class = {call.name: name for name, call in reversed(list(zip(names, calls)))}
    {"phenaki": _phenaki, "nuwa": _nuwa, "muse": _muse}[package](keys, by_class, dict(zip(names, calls)))
    if not keys.get("stages"):
        raise InputError(f"{path} holds no model: add the call of one of {', '.join(CLASSES[package])}")
    keys.put("name", path.stem)
    ours: Tree = {key: keys.ours[key] for key in ("name", "prompts", "data", "train", "stages") if key in keys.ours}
    make_plan(ours)  # check that the result is valid
    heading = f"# Kineograph's form of {path.name}"
    return "\n".join(
        [heading, *keys.remarks, dump_yaml(ours).rstrip(), *keys.list_translated_keys(), *keys.list_untranslated_keys()]
    )


def _name_calls(calls: list[Call]) -> list[str]:
    """A class's name, with a number from its second call on."""
    seen: dict[str, int] = {}
    names = []
    for call in calls:
        seen[call.name] = seen.get(call.name, 0) + 1
        names.append(call.name if seen[call.name] == 1 else f"{call.name}#{seen[call.name]}")
    return names


def _rows(rows: list[Row], call: str, stage: str) -> list[Row]:
    """A table for one call; keys of ours that begin with a dot are those of the stage."""
    return [
        (f"{call}.{theirs}", f"{stage}{ours}" if ours is not None and ours.startswith(".") else ours, convert)
        for theirs, ours, convert in rows
    ]


# Parts of several packages -----------------------------------------------------------------------------------------


def _train(keys: KeyTranslation, call: str, stage: str, rows: list[Row]) -> None:
    """The trainer of one stage. Its batch is a micro-batch of one process; ours is global, and divided by accumulate."""
    size, parts = keys.take(f"{call}.batch_size", count), keys.take(f"{call}.grad_accum_every", count) or 1
    if size is not None:
        keys.put(f"{stage}.train", {"batch_size": size * parts, "accumulate": parts})
        keys.moved[f"{call}.batch_size"] = f"{stage}.train.batch_size"
        keys.moved[f"{call}.grad_accum_every"] = f"{stage}.train.accumulate"
        if parts > 1:
            keys.remark(
                f"{stage}.train.batch_size={size * parts} is {size} × {parts}; it is global: multiply it by the number of GPUs"
            )
    keys.move_all(_rows(rows, call, stage))
    keys.put(f"{stage}.train.sample_first", True)  # they draw at step 0 too
    if keys.take(f"{call}.use_ema", flag) is False:
        keys.put(f"{stage}.train.ema.decay", 0.0)
        keys.take(f"{call}.ema_beta")
    keys.move(f"{call}.ema_beta", f"{stage}.train.ema.decay", number)
    folder = keys.take(f"{call}.results_folder")
    if folder is not None:
        keys.remark(f"results_folder={folder}: kineo train … --run {str(folder).removeprefix('./')}")
    precision = choose({"fp16": "fp16", "bf16": "bf16", "no": "fp32"})
    keys.move(f"{call}.accelerate_kwargs.mixed_precision", f"{stage}.train.precision", precision)
    keys.take(f"{call}.accelerate_kwargs", only({}))
    if keys.take(f"{call}.train_on_images", flag):
        keys.take(f"{call}.num_frames")
        keys.put("data.frames", 1)
        keys.moved[f"{call}.train_on_images"] = "data.frames"
    elif f"{call}.num_frames" in keys.left:
        keys.move(f"{call}.num_frames", "data.frames", count)
    if keys.get("data.folder") is not None:
        keys.put("data.source", "folder")


def _game(keys: KeyTranslation, call: str, stage: str) -> None:
    """Perceptual and adversarial loss of a codec."""
    has_game = keys.take(f"{call}.use_vgg_and_gan", flag)
    hinge = keys.take(f"{call}.use_hinge_loss", flag)
    if has_game is False:
        keys.put(f"{stage}.perceptual", {"weight": 0})
        keys.moved[f"{call}.use_vgg_and_gan"] = f"{stage}.perceptual.weight"
        return
    keys.put(f"{stage}.adversarial", {"loss": "bce" if hinge is False else "hinge"})
    keys.put(f"{stage}.perceptual", {"weights": "lpips-vgg16"})
    keys.moved[f"{call}.use_vgg_and_gan"] = f"{stage}.adversarial, {stage}.perceptual"
    keys.moved[f"{call}.use_hinge_loss"] = f"{stage}.adversarial.loss"


def _quantizer(keys: KeyTranslation, call: str, stage: str, size: str, lookup_free: bool) -> None:
    codes = keys.take(f"{call}.{size}", count)
    if codes is not None:
        keys.put(f"{stage}.quantizer", {"kind": "lfq" if lookup_free else "vq", "codes": codes})
        keys.moved[f"{call}.{size}"] = f"{stage}.quantizer.codes"


def _heads(keys: KeyTranslation, call: str, stage: str, prefix: str = "") -> None:
    """Heads are width / heads wide here; a dim_head that differs stays untranslated."""
    width, heads = keys.get(f"{stage}.width"), keys.get(f"{stage}.heads")
    if width and heads:
        keys.take(f"{call}.{prefix}dim_head", equal(width / heads))


def _dropout(keys: KeyTranslation, call: str, stage: str) -> None:
    """One dropout here for attention and MLP."""
    value = keys.move(f"{call}.attn_dropout", f"{stage}.dropout", number)
    keys.take(f"{call}.ff_dropout", equal(value if value is not None else 0))


def _leave_parts(keys: KeyTranslation, calls: dict[str, Call]) -> None:
    """Objects given by position are the parts that the stages name."""
    for name, call in calls.items():
        for key in call.parts:
            keys.moved[f"{name}.{key}"] = f"the stage of {call.parts[key]}"


# Packages ----------------------------------------------------------------------------------------------------------


def _phenaki(keys: KeyTranslation, named: dict[str, str], calls: dict[str, Call]) -> None:
    tokenizer, generator = "stages.tokenizer", "stages.generator"
    if "CViViT" in named:
        call = named["CViViT"]
        keys.put(tokenizer, {"task": "cvivit", "loss": "l2"})
        keys.move_all(_rows(CVIVIT, call, tokenizer))
        _quantizer(
            keys, call, tokenizer, "codebook_size", keys.take(f"{call}.lookup_free_quantization", flag) is not False
        )
        _game(keys, call, tokenizer)
        if keys.get(f"{tokenizer}.adversarial"):
            keys.move(f"{call}.discr_base_dim", f"{tokenizer}.adversarial.width", count)
        _heads(keys, call, tokenizer)
        _dropout(keys, call, tokenizer)
    if "CViViTTrainer" in named:
        keys.put(f"{tokenizer}.task", "cvivit")
        _train(keys, named["CViViTTrainer"], tokenizer, CODEC_TRAINER)
    if "MaskGit" in named:
        call = named["MaskGit"]
        keys.put(generator, {"task": "phenaki", "codec": "tokenizer"})
        keys.move_all(_rows(MASKGIT, call, generator))
        _heads(keys, call, generator)
        _dropout(keys, call, generator)
        keys.take(f"{call}.num_tokens", equal(keys.get(f"{tokenizer}.quantizer.codes")))
        keys.take(f"{call}.max_seq_len", count)  # positions are those of the token grid
        text = {"kind": "none"} if keys.take(f"{call}.unconditional", flag) else {"kind": "t5", "name": T5}
        keys.put(f"{generator}.text", text)
    if "Phenaki" in named:
        call = named["Phenaki"]
        keys.put(generator, {"task": "phenaki", "codec": "tokenizer"})
        keys.move_all(_rows(PHENAKI, call, generator))
        if keys.get(f"{generator}.text.kind") == "t5":
            keys.take(f"{call}.t5_name", lambda name: keys.put(f"{generator}.text.name", name))
        critic = "TokenCritic" in named and "TokenCritic" in [c.name for c in calls.values()]
        if keys.take(f"{call}.self_token_critic", flag):
            keys.put(f"{generator}.critic", "self")
            keys.moved[f"{call}.self_token_critic"] = f"{generator}.critic"
            keys.move(f"{call}.critic_loss_weight", f"{generator}.critic_weight", number)
        elif critic:
            keys.put(f"{generator}.critic", "network")
            critic_call = named["TokenCritic"]
            for theirs, ours in (("dim", "critic_width"), ("depth", "critic_depth"), ("heads", "critic_heads")):
                keys.move(f"{critic_call}.{theirs}", f"{generator}.{ours}", count)
            keys.take(f"{critic_call}.num_tokens", count)
            keys.take(f"{critic_call}.max_seq_len", count)
            keys.take(f"{critic_call}.has_cross_attn", only(True))
        if keys.get(f"{generator}.critic"):
            schedules = {"decay": "falling", "fixed": "constant", "increase": "rising"}
            keys.move(
                f"{call}.critic_noise_anneal_schedule", f"{generator}.sample.critic_noise_schedule", choose(schedules)
            )
        else:
            keys.take(f"{call}.critic_noise_anneal_schedule")
            keys.take(f"{call}.critic_loss_weight", equal(1))
    if "PhenakiTrainer" in named:
        call = named["PhenakiTrainer"]
        keys.put(generator, {"task": "phenaki", "codec": "tokenizer"})
        for key in ("sample_texts_file_path", "sample_texts"):
            keys.move(f"{call}.{key}", "prompts")
        _train(keys, call, generator, PHENAKI_TRAINER)
        if keys.take(f"{call}.fp16", flag):
            keys.put(f"{generator}.train.precision", "fp16")
            keys.moved[f"{call}.fp16"] = f"{generator}.train.precision"
    if keys.get(generator) and not keys.get(tokenizer):
        keys.put(tokenizer, {"task": "cvivit"})
        keys.remark(
            "the tokenizer is not in the file: give the call of CViViT too, or name a trained one, stages.generator.codec=RUN/tokenizer"
        )
    if keys.get(generator):
        keys.ours["stages"] = {
            "tokenizer": keys.ours["stages"]["tokenizer"],
            "generator": keys.ours["stages"]["generator"],
        }
    _leave_parts(keys, calls)


def _vqgan_levels(keys: KeyTranslation, call: str, stage: str, layers: str, blocks: str) -> None:
    """`layers` halvings. Here each level after the first halves, so there is one more level, of the width of the first.

    One number of residual blocks counts for the coarsest level there.
    """
    halvings = keys.take(f"{call}.{layers}", up_to(16)) or 4
    multipliers = keys.take(f"{call}.layer_mults", lambda value: [count(part) for part in value])
    multipliers = multipliers or [2**level for level in range(halvings)]
    keys.put(stage, {"patch": 1, "multipliers": [1, *multipliers]})
    keys.moved[f"{call}.{layers}"] = f"{stage}.multipliers"

    def each(value: Any) -> list[int]:
        return [0, *counts(value)] if isinstance(value, list) else [*[0] * halvings, count(value)]

    if not keys.move(f"{call}.{blocks}", f"{stage}.blocks", each):
        keys.put(f"{stage}.blocks", each(1))


def _nuwa(keys: KeyTranslation, named: dict[str, str], calls: dict[str, Call]) -> None:
    tokenizer, generator = "stages.tokenizer", "stages.generator"
    if "VQGanVAE" in named:
        call = named["VQGanVAE"]
        keys.put(tokenizer, {"task": "vqgan"})
        keys.move_all(_rows(NUWA_VAE, call, tokenizer))
        _vqgan_levels(keys, call, tokenizer, "num_layers", "num_resnet_blocks")
        _quantizer(keys, call, tokenizer, "vq_codebook_size", lookup_free=False)
        keys.move_all(_rows(NUWA_QUANTIZER, call, tokenizer))
        _game(keys, call, tokenizer)
    if "VQGanVAETrainer" in named:
        keys.put(f"{tokenizer}.task", "vqgan")
        _train(keys, named["VQGanVAETrainer"], tokenizer, CODEC_TRAINER)
    if "NUWA" in named or "NUWATrainer" in named:
        keys.put(generator, {"task": "nuwa", "codec": "tokenizer"})
    if "NUWA" in named:
        call = named["NUWA"]
        keys.move_all(_rows(NUWA, call, generator))
        _heads(keys, call, generator, "dec_")
        _dropout(keys, call, generator)
        _nuwa_window(keys, call, generator)
        heads, width = keys.take(f"{call}.text_enc_heads", count) or 8, keys.get(f"{generator}.width")
        text = {"kind": "learned", "width": width, "heads": heads, "depth": keys.take(f"{call}.text_enc_depth", count)}
        text["positions"] = "rotary" if keys.take(f"{call}.text_rotary_pos_emb", flag) is not False else "learned"
        text["length"] = keys.take(f"{call}.text_max_seq_len", count) or 256
        text["vocabulary"] = keys.take(f"{call}.text_num_tokens", count) or 49408
        keys.put(f"{generator}.text", {key: value for key, value in text.items() if value is not None})
        keys.moved[f"{call}.text_…"] = f"{generator}.text.*"
    if "NUWATrainer" in named:
        _train(keys, named["NUWATrainer"], generator, NUWA_TRAINER)
        keys.put(f"{generator}.train.ema.decay", 0.0)  # theirs has none
    if keys.get(generator) and not keys.get(tokenizer):
        keys.put(tokenizer, {"task": "vqgan"})
        keys.remark(
            "the tokenizer is not in the file: give the call of VQGanVAE too, or set stages.generator.codec=RUN/tokenizer"
        )
    if keys.get(generator):
        keys.ours["stages"] = {
            "tokenizer": keys.ours["stages"]["tokenizer"],
            "generator": keys.ours["stages"]["generator"],
        }
    _leave_parts(keys, calls)


def _nuwa_window(keys: KeyTranslation, call: str, stage: str) -> None:
    """A kernel of k frames, its own included. Dilations 1 … n cycle over the blocks."""

    def triple(value: Any) -> list[int]:
        sides = [count(side) for side in value] if isinstance(value, list) else [count(value)] * 3
        keys.remark(
            "the window is centred in rows and columns; nuwa-pytorch's lies above and to the left, in every frame"
        )
        return sides

    def dilations(value: Any) -> list[int]:
        return [count(part) for part in value] if isinstance(value, list) else list(range(1, up_to(64)(value) + 1))

    keys.move(f"{call}.sparse_3dna_kernel_size", f"{stage}.window", triple)
    keys.move(f"{call}.sparse_3dna_dilation", f"{stage}.dilations", dilations)


def _muse(keys: KeyTranslation, named: dict[str, str], calls: dict[str, Call]) -> None:
    tokenizer = "stages.tokenizer"
    if "VQGanVAE" in named:
        call = named["VQGanVAE"]
        keys.put(tokenizer, {"task": "vqgan"})
        keys.move_all(_rows(MUSE_VAE, call, tokenizer))
        _vqgan_levels(keys, call, tokenizer, "layers", "encdec_num_resnet_blocks")
        _quantizer(
            keys, call, tokenizer, "codebook_size", keys.take(f"{call}.lookup_free_quantization", flag) is not False
        )
        _game(keys, call, tokenizer)
        if keys.get(f"{tokenizer}.adversarial"):
            keys.move(f"{call}.discr_layers", f"{tokenizer}.adversarial.levels", count)
    if "VQGanVAETrainer" in named:
        keys.put(f"{tokenizer}.task", "vqgan")
        _train(keys, named["VQGanVAETrainer"], tokenizer, CODEC_TRAINER)
    gits = [(name, call) for name, call in calls.items() if call.name == "MaskGit"]
    gits.sort(key=lambda pair: f"{pair[0]}.cond_image_size" in keys.left)  # the base before super-resolution
    by_variable = {call.variable: name for name, call in calls.items()}
    for name, git in gits:
        is_large = f"{name}.cond_image_size" in keys.left
        stage = "stages.superres" if is_large else "stages.generator"
        keys.put(stage, {"task": "muse", "codec": "tokenizer", "text": {"kind": "t5", "name": T5}})
        inner = by_variable.get(git.parts.get("transformer", git.parts.get("1", "")), named.get("MaskGitTransformer"))
        if inner is not None:
            keys.move_all(_rows(MUSE_TRANSFORMER, inner, stage))
            keys.take(f"{inner}.t5_name", lambda value, stage=stage: keys.put(f"{stage}.text.name", value))  # type: ignore[misc]
            _heads(keys, inner, stage)
            keys.take(f"{inner}.num_tokens", equal(keys.get(f"{tokenizer}.quantizer.codes")))
        keys.move_all(_rows(MUSE_MASKGIT, name, stage))
        if keys.take(f"{name}.self_token_critic", flag):
            keys.put(f"{stage}.critic", "self")
            keys.moved[f"{name}.self_token_critic"] = f"{stage}.critic"
            keys.move(f"{name}.critic_loss_weight", f"{stage}.critic_weight", number)
        if is_large and keys.get("stages.generator"):
            keys.put(f"{stage}.low_res", "generator")
            keys.move(f"{name}.cond_image_size", f"{stage}.low_res_size", count)
    if gits and not keys.get(tokenizer):
        keys.put(tokenizer, {"task": "vqgan"})
        keys.remark(
            "the tokenizer is not in the file: give the call of VQGanVAE too, or set stages.generator.codec=RUN/tokenizer"
        )
    order = [name for name in ("tokenizer", "generator", "superres") if name in keys.ours.get("stages", {})]
    if order:
        keys.ours["stages"] = {name: keys.ours["stages"][name] for name in order}
    _leave_parts(keys, calls)
