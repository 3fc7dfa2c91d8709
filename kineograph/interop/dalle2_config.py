"""The JSON of DALLE2-pytorch's train_decoder or train_diffusion_prior → Kineograph's YAML, key by key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kineograph.core.config import Tree, merge
from kineograph.core.config_file import load_file
from kineograph.core.errors import InputError
from kineograph.core.remote_files import is_url
from kineograph.interop.dalle2_keys import (
    CLIP_FOLDER,
    CLIPS,
    DECODER_DEFAULTS,
    DECODER_ROWS,
    DYNAMIC_QUANTILE,
    EVALUATION_SAMPLES,
    METRICS,
    PER_UNET,
    PRIOR_DATA,
    PRIOR_DEFAULTS,
    PRIOR_EPS,
    PRIOR_ROWS,
    SCHEDULES,
    UNET,
    UNET_DEFAULTS,
)
from kineograph.interop.key_translation import (
    Convert,
    KeyTranslation,
    Part,
    choose,
    count,
    counts,
    equal,
    flag,
    number,
    numbers,
    only,
    text,
)

_MAX_UNETS = 16


def translate(path: Path) -> str:
    """→ Kineograph's YAML, with a comment for every key of the JSON"""
    tree = load_file(path)
    kinds = [kind for kind in ("decoder", "prior") if isinstance(tree.get(kind), dict)]
    if len(kinds) != 1 or not isinstance(tree.get("data"), dict):
        raise InputError(
            f"{path} is no config of DALLE2-pytorch: it needs the sections data, train and decoder (train_decoder) or prior "
            "(train_diffusion_prior)"
        )
    keys = _translate_decoder(tree, path) if kinds[0] == "decoder" else _translate_prior(tree)
    if keys.take("train.use_ema", flag) is False:
        keys.put("train.ema.decay", 0.0)
    keys.left = {key: value for key, value in keys.left.items() if value is not None}  # null is their default
    keys.put("name", path.stem)
    return keys.render(path.name)


# Decoder -----------------------------------------------------------------------------------------------------------


def _translate_decoder(tree: Tree, path: Path) -> KeyTranslation:
    unets = tree["decoder"].get("unets")
    if not isinstance(unets, list) or not unets or not all(isinstance(unet, dict) for unet in unets):
        raise InputError(f"{path}: decoder.unets must list the U-Nets, smallest first")
    if len(unets) > _MAX_UNETS:
        raise InputError(f"{path}: decoder.unets lists {len(unets)} U-Nets: a cascade has at most {_MAX_UNETS}")
    filled = [merge(UNET_DEFAULTS, unet) for unet in unets]
    keys = KeyTranslation(merge(DECODER_DEFAULTS, merge(tree, {"decoder": {"unets": filled}})))
    sizes = _read_image_sizes(keys, len(unets), path)
    names = ["decoder"] if len(sizes) == 1 else [f"decoder_{size}" for size in sizes]
    if len(set(names)) < len(names):
        raise InputError(f"{path}: decoder.image_sizes={sizes} repeats a size: give each U-Net its own")
    keys.put("data", {"source": "webdataset"})
    keys.put("data.size", max(sizes))
    _translate_metrics(keys)
    _remark_end_shard(keys)
    keys.move_all(DECODER_ROWS)
    if keys.get("data.resample"):
        keys.take("data.shuffle_train")
        keys.ours["data"].pop("shuffle", None)  # theirs draws at random with shuffle_train false only
    if keys.get("train.samples"):
        keys.put("train.grids", ["train", "test"] if keys.get("data.test") else ["train"])
    _translate_batch(keys)
    _translate_epochs(keys)
    _translate_crops(keys)
    _translate_tracker(keys)
    clip = _translate_clip(keys, "decoder.clip")
    for index, (name, size) in enumerate(zip(names, sizes)):
        unet = Part(keys, f"decoder.unets.{index}", f"stages.{name}")
        unet.put("", {"task": "dalle2", "size": size})
        if index:
            unet.put("", {"low_res": names[index - 1], "low_res_size": sizes[index - 1]})
        unet.move_all(UNET)
        _translate_conditions(unet, clip)
        _set_cross_attention(unet)
    for key, ours, convert in PER_UNET:
        _move_each(keys, key, ours, convert, names)
    _translate_thresholds(keys, names)
    _translate_schedules(keys, names)
    _translate_blur(keys, names)
    return keys


def _read_image_sizes(keys: KeyTranslation, unets: int, path: Path) -> list[int]:
    one, several = keys.take("decoder.image_size", count), keys.take("decoder.image_sizes", counts)
    sizes = several if several else [one] if one is not None else []
    if len(sizes) != unets:
        raise InputError(f"{path}: decoder.image_sizes names {len(sizes)} sizes for {unets} U-Nets: give one each")
    return sizes


def _move_each(keys: KeyTranslation, key: str, ours: str, convert: Convert, names: list[str]) -> None:
    """One value for all U-Nets, or a list of one each; a shorter list leaves the rest at our default."""

    def each(value: Any) -> list[Any]:
        values = value if isinstance(value, list) else [value] * len(names)
        if len(values) > len(names):
            raise ValueError
        return [None if entry is None else convert(entry) for entry in values]

    values = keys.take(key, each)
    if values is None:
        return
    for name, value in zip(names, values):
        if value is not None:
            keys.put(f"stages.{name}.{ours}", value)
    keys.moved[key] = f"stages.*.{ours}"


def _translate_clip(keys: KeyTranslation, section: str) -> Tree | None:
    """The CLIP that embeds pictures and captions; None: the config names none."""
    keys.take(section, only(None))
    if not any(key.startswith(f"{section}.") for key in keys.left):
        return None
    keys.take(f"{section}.base_model_kwargs", only(None))
    if keys.left.get(f"{section}.make", "openai") == "openai":
        keys.take(f"{section}.make")
        name = keys.take(f"{section}.model", choose(CLIPS))
        if name is not None:
            keys.moved[f"{section}.model"] = "stages.*.clip.name"
            return {"kind": "transformers", "name": name}
    keys.remark(f"this CLIP is not one of OpenAI's: put it, in transformers' format, into the folder {CLIP_FOLDER}")
    return {"kind": "transformers", "name": CLIP_FOLDER}


def _translate_conditions(unet: Part, clip: Tree | None) -> None:
    """How image embeddings and text enter a U-Net."""
    width, text_width = unet.take("image_embed_dim", count), unet.take("text_embed_dim", count)
    tokens, time = unet.take("cond_on_image_embeds", flag), unet.take("add_image_embeds_to_time", flag)
    length = unet.take("max_text_len", count)
    reads_text = unet.take("cond_on_text_encodings", flag)
    is_blind = unet.keys.left.get("decoder.unconditional") is True or (width is None and clip is None)
    kinds = {(True, True): "both", (True, False): "tokens", (False, True): "time"}
    image = "none" if is_blind else kinds.get((bool(tokens), bool(time)), "none")
    unet.put(".image_embeds", image)
    reads_text = bool(reads_text) and not is_blind
    if reads_text:
        unet.put(".clip_text", True)
    if image == "none" and not reads_text:
        return
    if clip is not None:
        unet.put(".clip", clip)
        return
    own: Tree = {"kind": "given", "width": width}
    if reads_text:
        own |= {"text_width": text_width or width, "length": length or 256}
    unet.put(".clip", own)
    unet.record_move("image_embed_dim", ".clip.width")


def _set_cross_attention(unet: Part) -> None:
    """Cross-attention is at every level but the finest there; here it follows self-attention unless it is set."""
    levels = len(unet.get(".multipliers") or [])
    reads_tokens = unet.get(".image_embeds") in ("tokens", "both") or unet.get(".clip_text")
    if levels and reads_tokens:
        unet.put(".cross_attention", [level > 0 for level in range(levels)])


def _translate_thresholds(keys: KeyTranslation, names: list[str]) -> None:
    """The quantile of dynamic thresholding; without that it has no effect there, and is refused here."""
    key = "decoder.dynamic_thres_percentile"
    for name in names:
        sample = keys.get(f"stages.{name}.sample") or {}
        if sample.get("clip") == "dynamic":
            sample.setdefault("clip_quantile", DYNAMIC_QUANTILE)
        elif "clip_quantile" in sample:
            keys.left[key] = sample.pop("clip_quantile")
            keys.moved.pop(key, None)


def _translate_schedules(keys: KeyTranslation, names: list[str]) -> None:
    """Their defaults: cosine, and linear for the largest U-Net of a cascade. Fewer steps than trained are DDIM's."""
    default = ["cosine"] * max(len(names) - 1, 1) + ["linear"] * (len(names) > 1)
    if keys.left.get("decoder.beta_schedule") is None:
        keys.take("decoder.beta_schedule")
        for name, schedule in zip(names, default):
            keys.put(f"stages.{name}.diffusion.schedule", schedule)
    else:
        _move_each(keys, "decoder.beta_schedule", "diffusion.schedule", SCHEDULES, names)
    _move_each(keys, "decoder.sample_timesteps", "sample.steps", count, names)
    eta = keys.take("decoder.ddim_sampling_eta", number)
    for name in names:
        steps = keys.get(f"stages.{name}.sample.steps")
        trained = keys.get(f"stages.{name}.diffusion.steps") or 1000
        if steps is None or steps >= trained:
            keys.put(f"stages.{name}.sample", {"steps": trained, "solver": "ddpm"})
        else:
            keys.put(f"stages.{name}.sample", {"solver": "ddim", "eta": eta or 0.0})
        gamma = keys.get(f"stages.{name}.diffusion.p2_gamma")
        if gamma:
            keys.put(f"stages.{name}.diffusion.weighting", "p2")
    for key, objective in {"predict_x_start": "x0", "predict_v": "v"}.items():
        _move_each(keys, f"decoder.{key}", "diffusion.objective", choose({True: objective, False: None}), names)
    for name in names:
        diffusion = keys.get(f"stages.{name}.diffusion") or {}
        if diffusion.get("weighting") == "p2" and diffusion.get("objective", "eps") != "eps":
            keys.remark(
                f"stages.{name}.diffusion.weighting=p2 weights the error of ε; theirs weights that of {diffusion['objective']} alike"
            )


def _translate_blur(keys: KeyTranslation, names: list[str]) -> None:
    blur, probability = keys.take("decoder.use_blur_for_lowres_cond", flag), keys.take("decoder.blur_prob", number)
    sigma = keys.take("decoder.blur_sigma", number)
    for name in names[1:]:
        keys.put(f"stages.{name}.augment.blur", 0.0 if blur is False else 0.5 if probability is None else probability)
        if sigma is not None:
            keys.put(f"stages.{name}.augment.blur_sigma", sigma)
    keys.take("decoder.use_noise_for_lowres_cond", only(False, [False] * max(len(names) - 1, 0)))


def _remark_end_shard(keys: KeyTranslation) -> None:
    if keys.take("data.end_shard", equal(9999999)) is not None:
        keys.remark("data.end_shard=9999999 stands for all shards there: set data.end_shard to the last number")


# Both --------------------------------------------------------------------------------------------------------------


def _translate_batch(keys: KeyTranslation) -> None:
    size = keys.move("data.batch_size", "train.batch_size", count)
    if size is not None:
        keys.remark(
            f"train.batch_size={size} is that of one GPU there; it is global here: multiply it by the number of GPUs"
        )


def _translate_epochs(keys: KeyTranslation) -> None:
    """Their epochs have epoch_samples samples; without that, all of them."""
    samples, epochs = keys.get("train.epoch_samples"), keys.take("train.epochs", count)
    if epochs is None:
        return
    if samples:
        steps = max(1, round(epochs * samples / (keys.get("train.batch_size") or 1)))
        keys.put("train.steps", steps)
        keys.moved["train.epochs"] = "train.steps"
        keys.remark(f"train.steps={steps} is {epochs} epochs of {samples} samples")
    else:
        keys.put("train.epochs", epochs)
        keys.moved["train.epochs"] = "train.epochs"
        shards = str(keys.get("data.shards"))
        if shards.startswith("pipe:") or is_url(shards):
            keys.remark("streams have no epochs: replace train.epochs by train.steps, or set train.epoch_samples there")


def _translate_crops(keys: KeyTranslation) -> None:
    """torchvision's transforms."""
    start = "data.preprocessing"
    crop = f"{start}.RandomResizedCrop"
    if any(key == crop or key.startswith(f"{crop}.") for key in keys.left):
        keys.take(crop, only(True, {}))
        keys.put("data.crop", "resized")
        if not keys.move(f"{crop}.scale", "data.crop_area", numbers):
            keys.put("data.crop_area", [0.08, 1.0])  # torchvision's
        if not keys.move(f"{crop}.ratio", "data.crop_aspect", numbers):
            keys.put("data.crop_aspect", [0.75, 4 / 3])
        size = keys.take(
            f"{crop}.size", lambda value: value[0] if isinstance(value, list) and len({*value}) == 1 else count(value)
        )
        if size is not None:
            keys.put("data.size", max(size, keys.get("data.size")))
            keys.moved[f"{crop}.size"] = "data.size"
    if keys.take(f"{start}.RandomHorizontalFlip", choose({True: True})):
        keys.put("data.flip", 0.5)
        keys.moved[f"{start}.RandomHorizontalFlip"] = "data.flip"
    keys.take(f"{start}.ToTensor", only(True, {}))


def _translate_metrics(keys: KeyTranslation) -> None:
    wanted = []
    for theirs, ours in METRICS.items():
        if any(key == f"evaluate.{theirs}" or key.startswith(f"evaluate.{theirs}.") for key in keys.left):
            if keys.left.get(f"evaluate.{theirs}", {}) is None:
                keys.take(f"evaluate.{theirs}")
                continue
            keys.take(f"evaluate.{theirs}", only({}))
            wanted.append(ours)
            keys.moved[f"evaluate.{theirs}"] = "train.metrics"
    if wanted:
        keys.put("train.metrics", wanted)
        # Theirs draws from the items' own embeddings.
        keys.put("train.metric_options.from_items", True)
        keys.left.setdefault("evaluate.n_evaluation_samples", EVALUATION_SAMPLES)


def _translate_tracker(keys: KeyTranslation) -> None:
    """Logs, and where checkpoints go. Ours are always in the run folder, the newest and the best."""
    log = keys.take("tracker.log.log_type", choose({"console": [], "wandb": ["wandb"]}))
    if log is not None:
        keys.put("train.trackers", ["tensorboard", *log])
        keys.moved["tracker.log.log_type"] = "train.trackers"
    for key in ("resume", "auto_resume"):
        keys.take(f"tracker.log.{key}", only(True, False))  # the same command resumes
    for place in sorted({key.rpartition(".")[0] for key in keys.left if key.startswith("tracker.save")}):
        target = keys.left.get(f"{place}.save_to")
        if target == "wandb":
            _log_checkpoints(keys, "wandb")
        if target == "huggingface":
            _log_checkpoints(keys, "hub")
            keys.move(f"{place}.huggingface_repo", "train.hub.repo", text)
        if target in ("wandb", "huggingface", "local"):
            keys.moved[f"{place}.save_to"] = "RUN/<stage>/checkpoints" if target == "local" else "train.log_checkpoints"
            keys.take(f"{place}.save_to")
            for flagged in ("save_latest", "save_best"):
                keys.take(f"{place}.{flagged}", only(True))
            keys.take(f"{place}.save_all", only(False))
    if keys.left.get("tracker.load.load_from") is not None:
        keys.remark(
            "to continue from a checkpoint of ours elsewhere: kineo train … --resume-from SOURCE; theirs hold another network"
        )


def _log_checkpoints(keys: KeyTranslation, tracker: str) -> None:
    trackers = keys.get("train.trackers") or ["tensorboard"]
    keys.put("train", {"log_checkpoints": True, "trackers": list(dict.fromkeys([*trackers, tracker]))})


# Prior -------------------------------------------------------------------------------------------------------------


def _translate_prior(tree: Tree) -> KeyTranslation:
    keys = KeyTranslation(merge(PRIOR_DEFAULTS, tree))
    prior = Part(keys, "prior", "stages.prior")
    prior.put("", {"task": "dalle2.prior"})
    prior.put("data.source", "clip_retrieval")
    clip = _translate_clip(keys, "prior.clip")
    reads_text = prior.take("condition_on_text_encodings", flag)
    width = prior.take("image_embed_dim", count) or keys.left.get("prior.net.dim")
    prior.put(".text_encodings", bool(reads_text))
    prior.record_move("condition_on_text_encodings", ".text_encodings")
    if clip is None:
        prior.record_move("image_embed_dim", ".clip.width")
    prior.put(".clip", clip or {"kind": "given", "width": width})
    prior.move_all(PRIOR_ROWS)
    width, heads = prior.get(".width"), prior.get(".heads")
    if width and heads:
        prior.take("net.dim_head", equal(width / heads))
    if clip is not None:
        prior.take("net.max_text_len", count)  # that of the CLIP
    keys.put("train.eps", PRIOR_EPS)
    keys.move_all(PRIOR_DATA)
    objective = prior.take("predict_x_start", flag)
    predicts_v = prior.take("predict_v", flag)
    prior.put(".diffusion.objective", "v" if predicts_v else "eps" if objective is False else "x0")
    if prior.get(".sample.steps") is None:
        prior.put(".sample", {"steps": prior.get(".diffusion.steps") or 1000, "solver": "ddpm"})
    else:
        prior.put(".sample.eta", 1.0)  # of theirs
    _translate_batch(keys)
    _translate_tracker(keys)
    points, epochs = keys.take("data.num_data_points", count), keys.take("train.epochs", count)
    if points is not None:
        steps = max(1, round(points * (epochs or 1) / (keys.get("train.batch_size") or 1)))
        keys.put("train.steps", steps)
        keys.remark(f"train.steps={steps} is {epochs or 1} × {points} samples: lower it if there are fewer")
    return keys
