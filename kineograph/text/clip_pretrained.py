"""A CLIP of transformers, from a folder or the hub: frozen, loaded when the first picture or caption must be embedded."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from kineograph.core.errors import InputError
from kineograph.core.task import freeze
from kineograph.text.clip import mean, unit
from kineograph.text.pretrained import (
    batch_token_ids,
    build_attention_mask,
    check_folder,
    load_pretrained,
    resolve_name,
    token_ids,
)

KEY = "clip.name"
# What OpenAI's models were trained with, for folders that do not say.
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
RESAMPLE = {2: "bilinear", 3: "bicubic"}  # by Pillow's numbers


class Preprocessing:
    """Pictures in [0, 1] of any size → what the model looks at, as its own preprocessor_config.json says."""

    def __init__(self, found: dict[str, Any], size: int) -> None:
        """`size` is what the model takes."""
        self.crop = (size, size)
        target = found.get("size", size)
        self.shortest, self.exact = size, None
        if isinstance(target, int):
            self.shortest = target
        elif "shortest_edge" in target:
            self.shortest = int(target["shortest_edge"])
        else:
            self.exact = (int(target["height"]), int(target["width"]))
        self.cropped = bool(found.get("do_center_crop", True))
        self.normal = torch.tensor([found.get("image_mean", MEAN), found.get("image_std", STD)])[
            ..., None, None
        ]  # 2 C 1 1
        resample = found.get("resample", 3)
        if resample not in RESAMPLE:
            raise InputError(
                f"its preprocessor_config.json has resample={resample}: only 2 (bilinear) and 3 (bicubic) are known here"
            )
        self.mode = RESAMPLE[resample]

    def resized(self, height: int, width: int) -> tuple[int, int]:
        if self.exact is not None:
            return self.exact
        if not self.cropped:
            return self.crop
        short = min(height, width)
        return tuple(int(self.shortest * side / short) for side in (height, width))  # type: ignore[return-value]

    def __call__(self, pictures: Tensor) -> Tensor:
        """N C H W; a single channel is shown as grey."""
        x = pictures.float()
        x = x.expand(-1, 3, -1, -1) if x.shape[1] == 1 else x
        size = self.resized(*x.shape[2:])
        for step in (
            (x.shape[2], size[1]),
            size,
        ):  # first the width, then the height, each cut to its range, as Pillow does
            if step != tuple(x.shape[2:]):
                x = F.interpolate(x, step, mode=self.mode, antialias=True).clamp(0, 1)
        if self.cropped:
            top, left = (size[0] - self.crop[0]) // 2, (size[1] - self.crop[1]) // 2
            x = x[:, :, top : top + self.crop[0], left : left + self.crop[1]]
        if self.normal.device != x.device:
            self.normal = self.normal.to(x.device)  # once: a copy at every call would wait for the device
        mean, std = self.normal
        return (x - mean) / std


class PretrainedClip(nn.Module):
    """The model itself is no submodule: it is neither trained, saved nor averaged, and with embeddings in the data it is never loaded."""

    here: Tensor

    def __init__(self, name: str, length: int | None, note: Callable[[str], None]) -> None:
        super().__init__()
        from transformers import CLIPConfig

        self.name, self.local = resolve_name(name)
        if self.local:
            check_folder(Path(self.name), KEY)
        self.options: dict[str, Any] = {"local_files_only": True} if self.local else {}
        config = self._fetch(lambda: CLIPConfig.from_pretrained(self.name, **self.options))
        self.width, self.text_width = int(config.projection_dim), int(config.text_config.hidden_size)
        side = int(config.vision_config.image_size)
        self.picture_size = (side, side)
        most = int(config.text_config.max_position_embeddings)
        if length is not None and length > most:
            raise InputError(f"clip.length={length} is more than {self.name} reads: at most {most}")
        self.length, self.note = length or most, note
        self.ids = lru_cache(maxsize=65536)(self._ids)
        self.register_buffer("here", torch.zeros(0), persistent=False)  # goes where the stage goes
        self._parts: dict[str, Any] = {}  # a plain dict, so that modules in it do not become submodules
        self._said = False

    def _fetch(self, load: Callable[[], Any]) -> Any:
        return load_pretrained(load, KEY, self.name, "CLIP")

    @property
    def loaded(self) -> bool:
        return bool(self._parts)

    def _model(self) -> Any:
        if not self._parts:
            from transformers import AutoTokenizer, CLIPModel

            self._parts["tokenizer"] = self._fetch(lambda: AutoTokenizer.from_pretrained(self.name, **self.options))
            model = self._fetch(lambda: CLIPModel.from_pretrained(self.name, use_safetensors=True, **self.options))
            self._parts["preprocess"] = Preprocessing(self._preprocessing(), model.config.vision_config.image_size)
            self._parts["model"] = freeze(model)
        return self._parts["model"].to(self.here.device)

    def _preprocessing(self) -> dict[str, Any]:
        from transformers.image_processing_base import ImageProcessingMixin

        try:
            return ImageProcessingMixin.get_image_processor_dict(self.name, **self.options)[0]
        except OSError:
            self.note(f"{self.name} has no preprocessor_config.json: pictures are shown as OpenAI's models see them")
            return {}

    def _ids(self, caption: str) -> tuple[tuple[int, ...], int]:
        """Token ids padded to the length, and how many are real."""
        ids, whole = token_ids(self._parts["tokenizer"], caption, self.length)
        if whole > self.length and not self._said:
            self._said = True
            self.note(f"captions are cut to clip.length={self.length} tokens: {caption[:60]!r} has {whole} (said once)")
        return ids, min(whole, self.length)

    @torch.no_grad()
    def embed_images(self, pixels: Tensor, frame_mask: Tensor | None = None) -> Tensor:
        """B C H W or B T C H W in [0, 1] of any size → B D, of length 1. A clip's is of the mean over its real frames' embeddings."""
        model = self._model()
        clips = pixels[:, None] if pixels.ndim == 4 else pixels
        frames = self._parts["preprocess"](rearrange(clips, "b t c h w -> (b t) c h w"))
        pooled = model.vision_model(pixel_values=frames).pooler_output
        features = rearrange(model.visual_projection(pooled), "(b t) d -> b t d", b=len(clips))
        return unit(mean(unit(features) if features.shape[1] > 1 else features, frame_mask))

    @torch.no_grad()
    def embed_texts(self, captions: list[str]) -> tuple[Tensor, Tensor, Tensor]:
        """→ B D of length 1, encodings of the tokens B L E, mask B L."""
        model = self._model()
        ids, mask = batch_token_ids([self.ids(caption) for caption in captions], self.length, self.here.device)
        found = model.text_model(
            input_ids=ids, attention_mask=build_attention_mask(model.text_model, mask, causal=True)
        )
        encodings = found.last_hidden_state.float() * mask[..., None]
        return unit(model.text_projection(found.pooler_output)), encodings, mask
