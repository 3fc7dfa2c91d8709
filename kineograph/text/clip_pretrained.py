"""A CLIP of transformers: frozen, loaded when the first image or caption is embedded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from kineograph.core.errors import InputError
from kineograph.core.notes import Note
from kineograph.core.task import freeze
from kineograph.text.clip import masked_mean, unit
from kineograph.text.pretrained import (
    CaptionTokenizer,
    build_attention_mask,
    check_folder,
    download_options,
    load_pretrained,
    resolve_name,
)

KEY = "clip.name"
# OpenAI's, for folders without preprocessor_config.json
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
RESAMPLE = {2: "bilinear", 3: "bicubic"}  # by Pillow's numbers


class Preprocessing:
    """Resizes, crops and normalizes images as the model's preprocessor_config.json says."""

    def __init__(self, config: dict[str, Any], size: int) -> None:
        """`size`: side of the model's input"""
        self.crop = (size, size)
        target = config.get("size", size)
        self.shortest, self.exact = size, None
        if isinstance(target, int):
            self.shortest = target
        elif "shortest_edge" in target:
            self.shortest = int(target["shortest_edge"])
        else:
            self.exact = (int(target["height"]), int(target["width"]))
        self.cropped = bool(config.get("do_center_crop", True))
        self.normal = torch.tensor([config.get("image_mean", MEAN), config.get("image_std", STD)])[
            ..., None, None
        ]  # 2 C 1 1
        resample = config.get("resample", 3)
        if resample not in RESAMPLE:
            raise InputError(
                f"preprocessor_config.json has resample={resample}: only 2 (bilinear) and 3 (bicubic) are supported"
            )
        self.mode = RESAMPLE[resample]

    def target_size(self, height: int, width: int) -> tuple[int, int]:
        if self.exact is not None:
            return self.exact
        if not self.cropped:
            return self.crop
        short = min(height, width)
        return tuple(int(self.shortest * side / short) for side in (height, width))  # type: ignore[return-value]

    def __call__(self, images: Tensor) -> Tensor:
        """N C H W in [0, 1]; a single channel is repeated."""
        x = images.float()
        x = x.expand(-1, 3, -1, -1) if x.shape[1] == 1 else x
        size = self.target_size(*x.shape[2:])
        # first the width, then the height, each clamped, as Pillow does
        for step in ((x.shape[2], size[1]), size):
            if step != tuple(x.shape[2:]):
                x = F.interpolate(x, step, mode=self.mode, antialias=True).clamp(0, 1)
        if self.cropped:
            top, left = (size[0] - self.crop[0]) // 2, (size[1] - self.crop[1]) // 2
            x = x[:, :, top : top + self.crop[0], left : left + self.crop[1]]
        if self.normal.device != x.device:
            self.normal = self.normal.to(x.device)  # once: a copy would wait for the device
        mean, std = self.normal
        return (x - mean) / std


class PretrainedClip(nn.Module):
    """The transformers model is not a submodule: it is not trained, saved or averaged, and never loaded if embeddings are cached."""

    here: Tensor

    def __init__(self, name: str, length: int | None, note: Note) -> None:
        super().__init__()
        from transformers import CLIPConfig

        self.name, self.local = resolve_name(name)
        if self.local:
            check_folder(Path(self.name), KEY)
        self.options = download_options(self.local)
        config = self._load(lambda: CLIPConfig.from_pretrained(self.name, **self.options))
        self.width, self.text_width = int(config.projection_dim), int(config.text_config.hidden_size)
        side = int(config.vision_config.image_size)
        self.picture_size = (side, side)
        most = int(config.text_config.max_position_embeddings)
        if length is not None and length > most:
            raise InputError(f"clip.length={length} is too long for {self.name}: use at most {most}")
        self.length, self.note = length or most, note
        self.register_buffer("here", torch.zeros(0), persistent=False)  # moves with the stage
        self._parts: dict[str, Any] = {}  # a plain dict, so that modules in it are not submodules

    def _load(self, load: Callable[[], Any]) -> Any:
        return load_pretrained(load, KEY, self.name, "CLIP")

    @property
    def loaded(self) -> bool:
        return bool(self._parts)

    def _get_model(self) -> Any:
        if not self._parts:
            from transformers import AutoTokenizer, CLIPModel

            tokenizer = self._load(lambda: AutoTokenizer.from_pretrained(self.name, **self.options))
            self._parts["tokenizer"] = CaptionTokenizer(tokenizer, self.length, "clip.length", self.note)
            model = self._load(lambda: CLIPModel.from_pretrained(self.name, use_safetensors=True, **self.options))
            self._parts["preprocess"] = Preprocessing(self._read_preprocessing(), model.config.vision_config.image_size)
            self._parts["model"] = freeze(model)
        return self._parts["model"].to(self.here.device)

    def _read_preprocessing(self) -> dict[str, Any]:
        from transformers.image_processing_base import ImageProcessingMixin

        try:
            return ImageProcessingMixin.get_image_processor_dict(self.name, **self.options)[0]
        except OSError:
            self.note(f"{self.name} has no preprocessor_config.json: images are prepared as for OpenAI's models")
            return {}

    @torch.no_grad()
    def embed_images(self, pixels: Tensor, frame_mask: Tensor | None = None) -> Tensor:
        """B C H W or B T C H W in [0, 1] of any size → B D, of length 1; for a clip, of the mean over its real frames"""
        model = self._get_model()
        clips = pixels[:, None] if pixels.ndim == 4 else pixels
        frames = self._parts["preprocess"](rearrange(clips, "b t c h w -> (b t) c h w"))
        pooled = model.vision_model(pixel_values=frames).pooler_output
        features = rearrange(model.visual_projection(pooled), "(b t) d -> b t d", b=len(clips))
        return unit(masked_mean(unit(features) if features.shape[1] > 1 else features, frame_mask))

    @torch.no_grad()
    def embed_texts(self, captions: list[str]) -> tuple[Tensor, Tensor, Tensor]:
        """→ B D of length 1, encodings of the tokens B L E, mask B L."""
        model = self._get_model()
        ids, mask = self._parts["tokenizer"](captions, self.here.device)
        output = model.text_model(
            input_ids=ids, attention_mask=build_attention_mask(model.text_model, mask, causal=True)
        )
        encodings = output.last_hidden_state.float() * mask[..., None]
        return unit(model.text_projection(output.pooler_output)), encodings, mask
