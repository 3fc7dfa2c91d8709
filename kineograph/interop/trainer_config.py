"""Keyword arguments of the trainers of phenaki-pytorch, nuwa-pytorch and muse-maskgit-pytorch → Kineograph's YAML, key by key."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kineograph.core.errors import InputError
from kineograph.interop.key_translation import (
    Convert,
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
    MUSE_LFQ,
    MUSE_MASKGIT,
    MUSE_TRANSFORMER,
    MUSE_VAE,
    MUSE_VQ,
    NUWA,
    NUWA_QUANTIZER,
    NUWA_SOUND,
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
STAGES = ("tokenizer", "sketch_tokenizer", "sound_tokenizer", "generator", "superres")  # in the order of training
TORCH_BETAS = [0.9, 0.999]  # of torch's Adam
CAPTION_DROPOUT, GUIDANCE = 0.2, 2.0  # what NUWA's forward and generate take by themselves
TOP_SHARE = 0.1  # of the codes, among which NUWA and Muse draw


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
            keys.moved[f"{name}.{key}"] = f"the stage of {part.variable}"
    keys.put("name", path.stem)
    return keys.render(path.name)


class _Script:
    """The calls of a file by name: that of the class, with a number from its second call on."""

    def __init__(self, path: Path, package: str) -> None:
        self.calls: dict[str, Call] = {}
        codecs = [name for name in CLASSES[package] if name == CODECS[package][1]]
        for call in read_calls(path, CLASSES[package]):
            others = [other for other in self.calls.values() if other.name == call.name]
            if call.name in codecs and any(other.keywords == call.keywords for other in others):
                continue  # the same codec, built again to load its weights
            self.calls[f"{call.name}#{len(others) + 1}" if others else call.name] = call
        self.keys = KeyTranslation(
            {name: DEFAULTS.get((package, call.name), {}) | call.keywords for name, call in self.calls.items()}
        )

    def find_name(self, call: Call | None) -> str:
        """The name of a call; "" if it is not among these."""
        return next((name for name, other in self.calls.items() if other is call), "")

    def part(self, name: str, stage: str, **put: Any) -> Part | None:
        """The call of that name, which configures a stage; its keys in `put` are set. None if there is no such call."""
        if name not in self.calls:
            return None
        part = Part(self.keys, name, f"stages.{stage}")
        part.put("", put)
        return part


# Parts of several packages -----------------------------------------------------------------------------------------


def _put_data(part: Part, key: str, value: Any, theirs: str = "") -> None:
    """Set `data.KEY`; in the stage's own data if another stage has another value there."""
    before = part.get(f"data.{key}")
    ours = f"data.{key}" if before is None or before == value else f".data.{key}"
    part.put(ours, value)
    if theirs:
        part.record_move(theirs, ours)


def _move_data(part: Part, theirs: str, key: str, convert: Convert) -> Any:
    value = part.take(theirs, convert)
    if value is not None:
        _put_data(part, key, value, theirs)
    return value


def _translate_batch(part: Part, is_global: bool) -> None:
    """Their batch is a micro-batch, as a rule of one GPU; ours is global, and divided by accumulate."""
    size, parts = part.take("batch_size", count), part.take("grad_accum_every", count) or 1
    if size is None:
        return
    part.put(".train", {"batch_size": size * parts, "accumulate": parts})
    part.record_move("batch_size", ".train.batch_size")
    part.record_move("grad_accum_every", ".train.accumulate")
    text = f"{part.find('.train.batch_size')}={size * parts} is {size} × {parts}"
    part.keys.remark(f"{text} of all GPUs" if is_global else f"{text}; it is global: multiply it by the number of GPUs")


def _translate_trainer(part: Part, rows: list[Row], *, flips: bool, is_global: bool = False) -> None:
    """The trainer of one stage; `flips`: its own dataset of pictures mirrors every other one."""
    _translate_batch(part, is_global)
    part.put(".train", {"warmup": 0, "clip": None})
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
    on_pictures = part.take("train_on_images", flag)
    if on_pictures:
        part.take("num_frames")
        _put_data(part, "frames", 1, "train_on_images")
    else:
        _move_data(part, "num_frames", "frames", count)
    if _move_data(part, "folder", "folder", text) is not None:
        _put_data(part, "source", "folder")
        if flips or on_pictures:
            _put_data(part, "flip", 0.5)
        elif part.get("data.flip"):
            _put_data(part, "flip", 0.0)


def _translate_codec_trainer(script: _Script, trainer: str, task: str, *, flips: bool, **train: Any) -> None:
    """`train`: what its optimizers do by themselves."""
    part = script.part(trainer, "tokenizer", task=task)
    if part is not None:
        _translate_trainer(part, CODEC_TRAINER, flips=flips)
        part.put(".train", train)


def _translate_gan(part: Part, *rows: Row) -> None:
    """Perceptual and adversarial loss of a codec; `rows` are keys of its discriminator."""
    has_gan, hinge = part.take("use_vgg_and_gan", flag), part.take("use_hinge_loss", flag)
    if has_gan is False:
        for key, *_ in rows:
            part.take(key)
        part.put(".perceptual", {"weight": 0})
        part.record_move("use_vgg_and_gan", ".perceptual.weight")
        return
    part.put(".adversarial", {"loss": "bce" if hinge is False else "hinge", "weight": 1.0})
    part.put(".perceptual", {"weights": "lpips-vgg16"})
    part.record_move("use_vgg_and_gan", f".adversarial, {part.find('.perceptual')}")
    part.record_move("use_hinge_loss", ".adversarial.loss")
    part.move_all(rows)


def _translate_quantizer(part: Part, size: str, rows: Sequence[Row] = (), lookup_free_rows: Sequence[Row] = ()) -> None:
    lookup_free = part.take("lookup_free_quantization", flag) is not False and size == "codebook_size"
    codes = part.take(size, count)
    if codes is not None:
        part.put(".quantizer", {"kind": "lfq" if lookup_free else "vq", "codes": codes})
        part.record_move(size, ".quantizer.codes")
    part.move_all(lookup_free_rows if lookup_free else rows)


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
        _translate_quantizer(part, "codebook_size")
        _translate_gan(part, ("discr_base_dim", ".adversarial.width", count))
        _translate_heads(part)
        _translate_dropout(part)
    _translate_codec_trainer(script, "CViViTTrainer", "cvivit", flips=False, betas=[0.9, 0.99])
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
        is_global = part.take("split_batches", flag) is not False
        _translate_trainer(part, PHENAKI_TRAINER, flips=False, is_global=is_global)
        part.put(".train.save_every", part.get(".train.sample_every"))
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
    models = ("NUWA", "NUWASketch", "NUWAVideoAudio")
    model = next((name for name in models if name in script.calls), "")
    sketch = script.find_name(script.calls[model].parts.get("sketch_vae")) if model else ""
    codec = next((name for name, call in script.calls.items() if call.name == "VQGanVAE" and name != sketch), "")
    for name, stage in {codec: "tokenizer", sketch: "sketch_tokenizer"}.items():
        if part := script.part(name, stage, task="vqgan"):
            part.move_all([row for row in NUWA_VAE if stage == "tokenizer" or row[0] != "channels"])
            _translate_levels(part, "num_layers", "num_resnet_blocks")
            _translate_quantizer(part, "vq_codebook_size", NUWA_QUANTIZER)
            _translate_gan(part)
            _put_discriminator(part, len(part.get(".multipliers")) - 1)
    _translate_codec_trainer(script, "VQGanVAETrainer", "vqgan", flips=True, betas=TORCH_BETAS)
    if part := script.part("VQGanVAETrainer", "tokenizer"):
        _translate_image_memmap(part)
        part.put(".data.frames", 1)  # theirs trains on pictures
    if part := script.part(model, "generator", task="nuwa", codec="tokenizer"):
        _translate_nuwa_model(part, model)
    if part := script.part("NUWATrainer", "generator", task="nuwa", codec="tokenizer"):
        _translate_trainer(part, NUWA_TRAINER, flips=False)
        part.put(".train", {"ema": {"decay": 0.0}, "betas": TORCH_BETAS})  # theirs has no average
        _translate_nuwa_data(script)


def _put_discriminator(part: Part, levels: int) -> None:
    """Theirs is as wide as the codec, and halves the image as often."""
    if part.get(".adversarial") and part.get(".width"):
        part.put(".adversarial", {"width": part.get(".width"), "levels": levels})


def _translate_image_memmap(part: Part) -> None:
    path = _move_data(part, "images_memmap_path", "folder", text)
    if path is not None:
        _put_data(part, "source", "memmap")
        _put_data(part, "rotate", True)  # as theirs always does
    _move_data(part, "images_memmap_shape", "array_shape", counts)


def _translate_nuwa_model(part: Part, model: str) -> None:
    part.move_all(NUWA)
    if part.take("enc_reversible", flag):
        part.put(".train.checkpointing", True)
        part.record_move("enc_reversible", ".train.checkpointing")
    _translate_heads(part, "dec_")
    _translate_dropout(part)
    _translate_window(part)
    part.put("", {"caption_dropout": CAPTION_DROPOUT, "sample": {"guidance": GUIDANCE}})
    codes = part.get("stages.tokenizer.quantizer.codes")
    if codes:
        part.put(".sample.top_k", max(int(TOP_SHARE * codes), 1))
    if model == "NUWASketch":
        part.put("", {"text": {"kind": "none"}, "sketch": "sketch_tokenizer", "caption_dropout": 0.0})
        part.put("", {"sketch_dropout": CAPTION_DROPOUT})
        part.keys.remark(
            "sketches: set stages.generator.data.sketches and stages.sketch_tokenizer.data.folder to the folder of them"
        )
        return
    heads, width = part.take("text_enc_heads", count) or 8, part.get(".width")
    encoder = {"kind": "learned", "width": width, "heads": heads, "depth": part.take("text_enc_depth", count)}
    encoder["positions"] = "rotary" if part.take("text_rotary_pos_emb", flag) is not False else "learned"
    encoder["length"] = part.take("text_max_seq_len", count) or 256
    encoder["vocabulary"] = part.take("text_num_tokens", count) or 49408
    part.put(".text", {key: value for key, value in encoder.items() if value is not None})
    part.record_move("text_…", ".text.*")
    if model == "NUWAVideoAudio":
        part.put("stages.sound_tokenizer", {"task": "audio_codec", "quantizer": {"kind": "vq"}})
        part.put(".sound", "sound_tokenizer")
        part.move_all(NUWA_SOUND)
        part.keys.remark(
            "their sound is encoded by hand; here stages.sound_tokenizer learns it from clips with sound: set "
            "data.sample_rate and data.fps"
        )


def _translate_nuwa_data(script: _Script) -> None:
    """The package's own datasets. Theirs take all of the clips for training."""
    if part := script.part("GifVideoDataset", "generator"):
        if _move_data(part, "folder", "folder", text) is not None:
            _put_data(part, "source", "folder")
            if part.get("data.flip"):
                _put_data(part, "flip", 0.0)
        part.move("channels", "data.channels", count)
    if part := script.part("MnistDataset", "generator"):
        if _move_data(part, "videos_memmap_path", "folder", text) is not None:
            _put_data(part, "source", "memmap")
        keys = ("num_videos", "num_frames", "channels", "image_size", "image_size")
        shape = [part.keys.left.get(f"{part.theirs}.{key}") for key in keys]
        if all(isinstance(side, int) for side in shape):
            for key in set(keys):
                part.take(key)
            _put_data(part, "array_shape", shape, "num_videos")
        _move_data(part, "text_memmap_path", "labels", text)
        if digits := part.take("num_digits", up_to(64)):
            _put_data(part, "caption", " ".join(f"{{label[{place}]}}" for place in range(digits)), "num_digits")
        _move_data(part, "random_rotate", "rotate", flag)


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
        _translate_quantizer(part, "codebook_size", MUSE_VQ, MUSE_LFQ)
        _translate_gan(part, ("discr_layers", ".adversarial.levels", count))
        if part.get(".adversarial.levels"):
            _put_discriminator(part, part.get(".adversarial.levels"))
    _translate_codec_trainer(script, "VQGanVAETrainer", "vqgan", flips=True, betas=TORCH_BETAS, weight_decay=0.0)
    models = [name for name, call in script.calls.items() if call.name == "MaskGit"]
    models.sort(key=lambda name: f"{name}.cond_image_size" in script.keys.left)  # the base before super-resolution
    for name in models:
        is_large = f"{name}.cond_image_size" in script.keys.left
        stage = "superres" if is_large else "generator"
        part = script.part(name, stage, task="muse", codec="tokenizer", text={"kind": "t5", "name": T5})
        assert part is not None
        given = script.calls[name].parts
        network = script.find_name(given.get("transformer", given.get("1"))) or "MaskGitTransformer"
        if inner := script.part(network, stage):
            inner.move_all(MUSE_TRANSFORMER)
            _translate_encoder(inner)
            _translate_heads(inner)
            inner.take("num_tokens", equal(inner.get("stages.tokenizer.quantizer.codes")))
        part.move_all(MUSE_MASKGIT)
        if codes := part.get("stages.tokenizer.quantizer.codes"):
            part.put(".sample.top_k", math.ceil(TOP_SHARE * codes))
        _translate_self_critic(part)
        if is_large and part.get("stages.generator"):
            part.put(".low_res", "generator")
            part.move("cond_image_size", ".low_res_size", count)
    if models:
        script.keys.remark("the package has no trainer of MaskGit: set stages.generator.train.steps, batch_size and lr")
