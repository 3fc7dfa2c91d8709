"""Keyword arguments of the trainers of phenaki-pytorch, nuwa-pytorch and muse-maskgit-pytorch → Kineograph's YAML, key by key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kineograph.core.errors import InputError
from kineograph.interop.key_translation import (
    KeyTranslation,
    Part,
    Row,
    choose,
    count,
    counts,
    equal,
    flag,
    number,
    only,
    text,
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
    MUSE_QUANTIZER,
    MUSE_TRANSFORMER,
    MUSE_VAE,
    NUWA,
    NUWA_QUANTIZER,
    NUWA_TRAINER,
    NUWA_VAE,
    PHENAKI,
    PHENAKI_TRAINER,
    SELF_CRITIC,
    T5,
    TOKEN_CRITIC,
)

PACKAGES = tuple(CLASSES)
CODECS = {"phenaki": ("cvivit", "CViViT"), "nuwa": ("vqgan", "VQGanVAE"), "muse": ("vqgan", "VQGanVAE")}
STAGES = ("tokenizer", "generator", "superres")  # in the order of training


def translate(path: Path, package: str) -> str:
    """→ Kineograph's YAML, with a comment for every keyword"""
    script = _Script(path, package)
    {"phenaki": _translate_phenaki, "nuwa": _translate_nuwa, "muse": _translate_muse}[package](script)
    keys = script.keys
    stages = keys.get("stages")
    if not stages:
        raise InputError(f"{path} holds no model: add the call of one of {', '.join(CLASSES[package])}")
    if "tokenizer" not in stages:
        task, name = CODECS[package]
        stages["tokenizer"] = {"task": task}
        keys.remark(
            f"the tokenizer is not in the file: give the call of {name} too, or set stages.generator.codec=RUN/tokenizer"
        )
    keys.ours["stages"] = {name: stages[name] for name in STAGES if name in stages}
    for name, call in script.calls.items():
        for key, part in call.parts.items():  # objects that are given: the parts that the stages name
            keys.moved[f"{name}.{key}"] = f"the stage of {part}"
    keys.put("name", path.stem)
    return keys.render(path.name)


class _Script:
    """The calls of a file by name: that of the class, with a number from its second call on."""

    def __init__(self, path: Path, package: str) -> None:
        self.calls: dict[str, Call] = {}
        for call in read_calls(path, CLASSES[package]):
            earlier = sum(other.name == call.name for other in self.calls.values())
            self.calls[f"{call.name}#{earlier + 1}" if earlier else call.name] = call
        self.keys = KeyTranslation(
            {name: DEFAULTS.get((package, call.name), {}) | call.keywords for name, call in self.calls.items()}
        )

    def part(self, name: str, stage: str, **put: Any) -> Part | None:
        """The call of that name, which configures a stage; its keys in `put` are set. None if there is no such call."""
        if name not in self.calls:
            return None
        part = Part(self.keys, name, f"stages.{stage}")
        part.put("", put)
        return part


# Parts of several packages -----------------------------------------------------------------------------------------


def _translate_trainer(part: Part, rows: list[Row]) -> None:
    """The trainer of one stage. Its batch is a micro-batch of one process; ours is global, and divided by accumulate."""
    size, parts = part.take("batch_size", count), part.take("grad_accum_every", count) or 1
    if size is not None:
        part.put(".train", {"batch_size": size * parts, "accumulate": parts})
        part.record_move("batch_size", ".train.batch_size")
        part.record_move("grad_accum_every", ".train.accumulate")
        if parts > 1:
            key = part.find(".train.batch_size")
            part.keys.remark(
                f"{key}={size * parts} is {size} × {parts}; it is global: multiply it by the number of GPUs"
            )
    part.move_all(rows)
    part.put(".train.sample_first", True)  # they draw at step 0 too
    if part.take("use_ema", flag) is False:
        part.put(".train.ema.decay", 0.0)
        part.take("ema_beta")
    part.move("ema_beta", ".train.ema.decay", number)
    if f"{part.theirs}.dataset" in part.keys.left:
        part.keys.remark(
            f"the items of {part.theirs}.dataset: put them into a folder and set {part.find('.data.folder')}, or train from "
            "Python, kg.train(FILE, dataset=…)"
        )
    folder = part.take("results_folder")
    if folder is not None:
        part.keys.remark(f"results_folder={folder}: kineo train … --run {str(folder).removeprefix('./')}")
    precision = choose({"fp16": "fp16", "bf16": "bf16", "no": "fp32"})
    part.move("accelerate_kwargs.mixed_precision", ".train.precision", precision)
    part.take("accelerate_kwargs", only({}))
    if part.take("train_on_images", flag):
        part.take("num_frames")
        part.put("data.frames", 1)
        part.record_move("train_on_images", "data.frames")
    else:
        part.move("num_frames", "data.frames", count)
    if part.get("data.folder") is not None:
        part.put("data.source", "folder")


def _translate_codec_trainer(script: _Script, task: str) -> None:
    trainer = next((name for name in ("CViViTTrainer", "VQGanVAETrainer") if name in script.calls), "")
    part = script.part(trainer, "tokenizer", task=task)
    if part is not None:
        _translate_trainer(part, CODEC_TRAINER)


def _translate_gan(part: Part, *rows: Row) -> None:
    """Perceptual and adversarial loss of a codec; `rows` are keys of its discriminator."""
    has_gan, hinge = part.take("use_vgg_and_gan", flag), part.take("use_hinge_loss", flag)
    if has_gan is False:
        part.put(".perceptual", {"weight": 0})
        part.record_move("use_vgg_and_gan", ".perceptual.weight")
        return
    part.put(".adversarial", {"loss": "bce" if hinge is False else "hinge"})
    part.put(".perceptual", {"weights": "lpips-vgg16"})
    part.record_move("use_vgg_and_gan", f".adversarial, {part.find('.perceptual')}")
    part.record_move("use_hinge_loss", ".adversarial.loss")
    part.move_all(rows)


def _translate_quantizer(part: Part, size: str, rows: list[Row]) -> None:
    lookup_free = part.take("lookup_free_quantization", flag) is not False and size == "codebook_size"
    codes = part.take(size, count)
    if codes is not None:
        part.put(".quantizer", {"kind": "lfq" if lookup_free else "vq", "codes": codes})
        part.record_move(size, ".quantizer.codes")
    part.move_all(rows)


def _translate_heads(part: Part, prefix: str = "") -> None:
    """Heads are width / heads wide here; a dim_head that differs stays untranslated."""
    width, heads = part.get(".width"), part.get(".heads")
    if width and heads:
        part.take(f"{prefix}dim_head", equal(width / heads))


def _translate_dropout(part: Part) -> None:
    """One dropout here for attention and MLP."""
    value = part.move("attn_dropout", ".dropout", number)
    part.take("ff_dropout", equal(value if value is not None else 0))


def _translate_encoder(part: Part) -> None:
    if name := part.take("t5_name", text):
        part.put(".text.name", name)
        part.record_move("t5_name", ".text.name")


def _translate_levels(part: Part, layers: str, blocks: str) -> None:
    """`layers` halvings. Here each level after the first halves, so there is one more level, of the width of the first.

    One number of residual blocks counts for the coarsest level there.
    """
    halvings = part.take(layers, up_to(16)) or 4
    multipliers = part.take("layer_mults", lambda value: [count(part) for part in value])
    multipliers = multipliers or [2**level for level in range(halvings)]
    part.put("", {"patch": 1, "multipliers": [1, *multipliers]})
    part.record_move(layers, ".multipliers")

    def each(value: Any) -> list[int]:
        return [0, *counts(value)] if isinstance(value, list) else [*[0] * halvings, count(value)]

    if not part.move(blocks, ".blocks", each):
        part.put(".blocks", each(1))


def _translate_self_critic(part: Part) -> None:
    part.move_all(SELF_CRITIC)
    if part.get(".critic"):
        part.move("critic_loss_weight", ".critic_weight", number)


# Packages ----------------------------------------------------------------------------------------------------------


def _translate_phenaki(script: _Script) -> None:
    if part := script.part("CViViT", "tokenizer", task="cvivit", loss="l2"):
        part.move_all(CVIVIT)
        _translate_quantizer(part, "codebook_size", [])
        _translate_gan(part, ("discr_base_dim", ".adversarial.width", count))
        _translate_heads(part)
        _translate_dropout(part)
    _translate_codec_trainer(script, "cvivit")
    generator: dict[str, Any] = {"task": "phenaki", "codec": "tokenizer"}
    if part := script.part("MaskGit", "generator", **generator):
        part.move_all(MASKGIT)
        _translate_heads(part)
        _translate_dropout(part)
        part.take("num_tokens", equal(part.get("stages.tokenizer.quantizer.codes")))
        part.take("max_seq_len", count)  # positions are those of the token grid
        part.put(".text", {"kind": "none"} if part.take("unconditional", flag) else {"kind": "t5", "name": T5})
    if part := script.part("Phenaki", "generator", **generator):
        _translate_sampler(script, part)
    if part := script.part("PhenakiTrainer", "generator", **generator):
        for key in ("sample_texts_file_path", "sample_texts"):
            part.move(key, "prompts")
        _translate_trainer(part, PHENAKI_TRAINER)
        part.move("fp16", ".train.precision", choose({True: "fp16", False: None}))


def _translate_sampler(script: _Script, part: Part) -> None:
    """The Phenaki object: text, sampling and the critic."""
    part.move_all(PHENAKI)
    if part.get(".text.kind") == "none":
        part.take("max_text_len")
    else:
        part.move("max_text_len", ".text.length", count)
    if part.get(".text.kind") == "t5":
        _translate_encoder(part)
    _translate_self_critic(part)
    if not part.get(".critic") and (critic := script.part("TokenCritic", "generator", critic="network")):
        critic.move_all(TOKEN_CRITIC)
    if part.get(".critic"):
        schedules = {"decay": "falling", "fixed": "constant", "increase": "rising"}
        part.move("critic_noise_anneal_schedule", ".sample.critic_noise_schedule", choose(schedules))
    else:
        part.take("critic_noise_anneal_schedule")
        part.take("critic_loss_weight", equal(1))


def _translate_nuwa(script: _Script) -> None:
    if part := script.part("VQGanVAE", "tokenizer", task="vqgan"):
        part.move_all(NUWA_VAE)
        _translate_levels(part, "num_layers", "num_resnet_blocks")
        _translate_quantizer(part, "vq_codebook_size", NUWA_QUANTIZER)
        _translate_gan(part)
    _translate_codec_trainer(script, "vqgan")
    if part := script.part("VQGanVAETrainer", "tokenizer"):
        part.put(".data.frames", 1)  # theirs trains on pictures
    if part := script.part("NUWA", "generator", task="nuwa", codec="tokenizer"):
        part.move_all(NUWA)
        if part.take("enc_reversible", flag):
            part.put(".train.checkpointing", True)
            part.record_move("enc_reversible", ".train.checkpointing")
        _translate_heads(part, "dec_")
        _translate_dropout(part)
        _translate_window(part)
        heads, width = part.take("text_enc_heads", count) or 8, part.get(".width")
        encoder = {"kind": "learned", "width": width, "heads": heads, "depth": part.take("text_enc_depth", count)}
        encoder["positions"] = "rotary" if part.take("text_rotary_pos_emb", flag) is not False else "learned"
        encoder["length"] = part.take("text_max_seq_len", count) or 256
        encoder["vocabulary"] = part.take("text_num_tokens", count) or 49408
        part.put(".text", {key: value for key, value in encoder.items() if value is not None})
        part.record_move("text_…", ".text.*")
    if part := script.part("NUWATrainer", "generator", task="nuwa", codec="tokenizer"):
        _translate_trainer(part, NUWA_TRAINER)
        part.put(".train.ema.decay", 0.0)  # theirs has none


def _translate_window(part: Part) -> None:
    """A kernel of k frames, its own included. Dilations 1 … n cycle over the blocks."""

    def triple(value: Any) -> list[int]:
        sides = [count(side) for side in value] if isinstance(value, list) else [count(value)] * 3
        part.keys.remark(
            "the window is centred in rows and columns; nuwa-pytorch's lies above and to the left, in every frame"
        )
        return sides

    def dilations(value: Any) -> list[int]:
        return [count(part) for part in value] if isinstance(value, list) else list(range(1, up_to(64)(value) + 1))

    part.move("sparse_3dna_kernel_size", ".window", triple)
    part.move("sparse_3dna_dilation", ".dilations", dilations)


def _translate_muse(script: _Script) -> None:
    if part := script.part("VQGanVAE", "tokenizer", task="vqgan"):
        part.move_all(MUSE_VAE)
        _translate_levels(part, "layers", "encdec_num_resnet_blocks")
        _translate_quantizer(part, "codebook_size", MUSE_QUANTIZER)
        _translate_gan(part, ("discr_layers", ".adversarial.levels", count))
    _translate_codec_trainer(script, "vqgan")
    models = [name for name, call in script.calls.items() if call.name == "MaskGit"]
    models.sort(key=lambda name: f"{name}.cond_image_size" in script.keys.left)  # the base before super-resolution
    variables = {call.variable: name for name, call in script.calls.items()}
    for name in models:
        is_large = f"{name}.cond_image_size" in script.keys.left
        stage = "superres" if is_large else "generator"
        part = script.part(name, stage, task="muse", codec="tokenizer", text={"kind": "t5", "name": T5})
        assert part is not None
        given = script.calls[name].parts
        network = variables.get(given.get("transformer", given.get("1", "")), "MaskGitTransformer")
        if inner := script.part(network, stage):
            inner.move_all(MUSE_TRANSFORMER)
            _translate_encoder(inner)
            _translate_heads(inner)
            inner.take("num_tokens", equal(inner.get("stages.tokenizer.quantizer.codes")))
        part.move_all(MUSE_MASKGIT)
        _translate_self_critic(part)
        if is_large and part.get("stages.generator"):
            part.put(".low_res", "generator")
            part.move("cond_image_size", ".low_res_size", count)
    if models:
        script.keys.remark("the package has no trainer of MaskGit: set stages.generator.train.steps, batch_size and lr")
