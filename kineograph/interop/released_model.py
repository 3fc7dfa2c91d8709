"""Released CogVideoX weights, from a diffusers folder or SAT's files: configs in diffusers' form, tensors by its names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from kineograph.codec.causal_vae import CausalVAEConfig
from kineograph.codec.causal_vae_weights import CLASS as VAE
from kineograph.codec.causal_vae_weights import SCALES, config_from_diffusers
from kineograph.core.errors import InputError
from kineograph.family.cogvideox.diffusers_weights import CLASS as TRANSFORMER
from kineograph.interop import sat_weights
from kineograph.interop.diffusers_folder import DiffusersFolder, read_folder
from kineograph.interop.lora_file import merge_lora
from kineograph.process.diffusers_scheduler import read_scheduler, unsupported_scheduler_options
from kineograph.process.diffusion import DiffusionConfig

PIPELINES = ("CogVideoXPipeline", "CogVideoXImageToVideoPipeline", "CogVideoXVideoToVideoPipeline")


@dataclass(frozen=True)
class Part:
    """A network: its config in diffusers' form and its tensors by diffusers' names."""

    config: dict[str, Any]
    state: Mapping[str, Tensor]
    path: Path


@dataclass(frozen=True)
class ReleasedModel:
    path: Path
    transformer: Part
    vae: Part
    codec: CausalVAEConfig
    diffusion: DiffusionConfig
    solver: str
    text: Path | None
    """Folder of the T5 encoder, if any."""
    notes: list[str] = field(default_factory=list)

    @property
    def size(self) -> tuple[int, int]:
        """The default height and width of its pipeline, in pixels."""
        config, factor = self.transformer.config, self.codec.spatial
        height, width = config.get("sample_height", 60), config.get("sample_width", 90)
        if (height, width) == (300, 300):  # 1.5 states the largest side of either; its authors sample this size
            return 768, 1360
        return height * factor, width * factor

    @property
    def channels(self) -> int:
        return int(self.vae.config.get("in_channels", 3))

    @property
    def frames(self) -> int:
        return int(self.transformer.config.get("sample_frames", 49))

    @property
    def fps(self) -> float:
        """The training frame rate, which no config has: 16 in 1.5, whose tokens cover two latent frames, 8 before."""
        return 16.0 if self.transformer.config.get("patch_size_t") else 8.0


def read_diffusers(path: Path) -> ReleasedModel:
    folder = read_folder(path)
    if folder.pipeline not in PIPELINES:
        raise InputError(f"{folder.path} is a {folder.pipeline}: only {', '.join(PIPELINES)} can be imported")
    transformer, vae, scheduler = (folder.component(name) for name in ("transformer", "vae", "scheduler"))
    diffusion, solver = read_scheduler(scheduler.config, scheduler.kind, scheduler.config_file)
    return ReleasedModel(
        path=folder.path,
        transformer=Part(folder.config("transformer", TRANSFORMER), transformer.weights(), transformer.path),
        vae=Part(folder.config("vae", VAE), vae.weights(), vae.path),
        codec=config_from_diffusers(vae.config, str(vae.config_file)),
        diffusion=diffusion,
        solver=solver,
        text=_find_text_encoder(folder),
        notes=unsupported_scheduler_options(scheduler.config, scheduler.config_file),
    )


def _find_text_encoder(folder: DiffusersFolder) -> Path | None:
    if "text_encoder" not in folder.components:
        return None
    encoder = folder.component("text_encoder")
    if encoder.kind != "T5EncoderModel":
        raise InputError(f"{encoder.path}: the text encoder is a {encoder.kind}; CogVideoX needs a T5EncoderModel")
    encoder.weights()  # read the headers: a truncated shard shows now, not at the first caption
    return encoder.path


def read_sat(path: Path) -> ReleasedModel:
    """SAT's files hold tensors only: other settings are those of the releases, and notes say which."""
    folder = path.expanduser()
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder: give the folder with transformer/ and vae/")
    files = sat_weights.locate_sat(folder)
    for name in ("transformer", "vae"):
        if name not in files:
            raise InputError(f"{folder} has no {name}: {'transformer/latest' if name == 'transformer' else 'vae/*.pt'} is missing")  # fmt: skip
    saved = sat_weights.read_sat_file(files["transformer"])
    transformer = sat_weights.convert_transformer(saved, files["transformer"])
    lora = sat_weights.extract_adapters(saved, files["transformer"])
    if lora:
        transformer = dict(merge_lora(transformer, lora))
    codec = sat_weights.convert_vae(sat_weights.read_sat_file(files["vae"]), files["vae"])
    config = sat_weights.infer_transformer_config(transformer, files["transformer"])
    small = not config["use_rotary_positional_embeddings"]  # 2B
    scale, shift = (SCALES["2b"], 3.0) if small else (SCALES["5b"], 1.0)
    if config["patch_size_t"]:
        config |= {"sample_height": 300, "sample_width": 300, "sample_frames": 81}
    vae = sat_weights.infer_vae_config(codec, files["vae"])
    vae |= {"scaling_factor": scale, "invert_scale_latents": bool(config.get("ofs_embed_dim"))}
    notes = [
        f"{folder}: SAT's files have no latent scale and no shift; using those of {'2B' if small else '5B'}: {scale} and {shift}"
    ]
    if lora:
        notes.append(f"{files['transformer']}: merged {len(lora)} adapters into their matrices, with SAT's alpha of 1")
    text = next((folder / name for name in ("t5-v1_1-xxl", "text_encoder") if (folder / name).is_dir()), None)
    return ReleasedModel(
        path=folder,
        transformer=Part(config, transformer, files["transformer"]),
        vae=Part(vae, codec, files["vae"]),
        codec=config_from_diffusers(vae, str(files["vae"])),
        diffusion=DiffusionConfig(schedule="scaled_linear", shift=shift, zero_terminal=True, objective="v"),
        solver="dpm_solver_sde",
        text=text,
        notes=notes,
    )  # fmt: skip
