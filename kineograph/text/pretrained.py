"""T5 and CLIP text encoders of transformers: frozen, loaded when the first caption is encoded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from kineograph.core.device_copy import copy_to_device
from kineograph.core.errors import InputError
from kineograph.core.notes import Note
from kineograph.core.protocols import TextEncoder
from kineograph.core.task import freeze, is_fake_or_meta
from kineograph.core.text_file import parse_json
from kineograph.core.weight_files import TRANSFORMERS_STEM, open_weights
from kineograph.text.encoder import NullText

if TYPE_CHECKING:
    from kineograph.text.config import TextConfig

KEY = "text.name"
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_TOKENIZERS = ("tokenizer.json", "spiece.model", "vocab.json")


def _count_t5(width: int, layers: int, heads: int, inner: int) -> int:
    """Parameters of a T5 v1.1 encoder: 32,128 tokens; attention with heads of 64, a gated MLP and two norms in each layer."""
    return 32128 * width + layers * (4 * width * 64 * heads + 3 * width * inner + 2 * width) + 32 * heads + width


_T5_SIZES = ((512, 8, 6, 1024), (768, 12, 12, 2048), (1024, 24, 16, 2816), (2048, 24, 32, 5120), (4096, 24, 64, 10240))
_T5_PARAMETERS = {size[0]: _count_t5(*size) for size in _T5_SIZES}
"""By width: small, base, large, xl, xxl."""


class PretrainedText(TextEncoder):
    """The transformers model is not a submodule: it is not trained, saved or averaged, and never loaded if embeddings are cached."""

    trained = False
    reads_captions = True

    def __init__(self, config: TextConfig, note: Note) -> None:
        super().__init__()
        assert config.name is not None
        self.kind, self.length, self.note = config.kind, config.length, note
        self.reads_padding = config.padding == "read"
        self.name, self.local = resolve_name(config.name)
        if self.local and not is_fake_or_meta():  # doctor estimates sizes before the folder exists
            check_folder(Path(self.name), KEY)
        self.width = config.width or _read_width(_read_config(self.name, self.local, self.kind), self.name)
        self.null = NullText(self.width)
        self._parts: dict[str, Any] = {}  # a plain dict, so that modules in it are not submodules

    def count(self) -> int:
        """Parameters of the encoder, from the headers of its files; without them, those of the T5 of that width (0: unknown)."""
        try:
            files = open_weights(Path(self.name).expanduser(), TRANSFORMERS_STEM)
        except InputError:
            return _T5_PARAMETERS.get(self.width, 0) if self.kind == "t5" else 0
        prefixes = ("shared.", "encoder.") if self.kind == "t5" else ("text_model.",)  # not the decoder or vision tower
        names = [name for name in files if name.startswith(prefixes) and name != "encoder.embed_tokens.weight"]
        return sum(math.prod(files.shape(name)) for name in names)

    def _load(self, device: torch.device) -> None:
        from transformers import CLIPTextModel, T5EncoderModel

        family = T5EncoderModel if self.kind == "t5" else CLIPTextModel
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # T5 overflows in float16
        tokenizer = _load_tokenizer(self.name, self.local, self.kind)
        self._parts["tokenizer"] = CaptionTokenizer(tokenizer, self.length, "text.length", self.note)
        with _hide_progress_bars():
            model = load_pretrained(
                lambda: family.from_pretrained(
                    self.name, use_safetensors=True, dtype=dtype, **download_options(self.local)
                ),
                KEY,
                self.name,
                self.kind,
            )
        _check_fits(self.width, self.length, model.config.to_dict(), self.name)
        self._parts["model"] = freeze(model)

    @torch.no_grad()
    def encode(self, captions: list[str]) -> tuple[Tensor, Tensor]:
        device = self.null.token.device
        if not self._parts:
            self._load(device)
        model = self._parts["model"].to(device)
        ids, mask = self._parts["tokenizer"](captions, device)
        if self.reads_padding:
            mask = torch.ones_like(mask)
        attention = None if self.reads_padding else build_attention_mask(model, mask, causal=self.kind == "clip")
        with torch.autocast(device.type, enabled=False):  # with train.precision=fp16, T5 would overflow after all
            embeddings = model(input_ids=ids, attention_mask=attention).last_hidden_state.float()
        return embeddings * mask[..., None], mask

    def count_cut(self, captions: list[str]) -> int | None:
        try:
            tokenizer = _load_tokenizer(self.name, self.local, self.kind)
        except InputError:  # with cached embeddings it is not needed
            return None
        return sum(
            len(tokenizer(text, truncation=False, verbose=False)["input_ids"]) > self.length for text in captions
        )

    def release(self) -> None:
        """Free the encoder's memory; the next caption loads it again."""
        self._parts.clear()

    def drop(self, embeddings: Tensor, mask: Tensor, dropped: Tensor) -> tuple[Tensor, Tensor]:
        return self.null(embeddings, mask, dropped)


class CaptionTokenizer:
    """Captions → token ids, cut or padded to a length, and cached."""

    def __init__(self, tokenizer: Any, length: int, key: str, note: Note) -> None:
        self.tokenizer, self.length, self.key, self.note = tokenizer, length, key, note
        self._encode = lru_cache(maxsize=65536)(self._encode_caption)
        self._noted = False

    def __call__(self, captions: list[str], device: torch.device) -> tuple[Tensor, Tensor]:
        """→ ids B L, mask B L (True = a real token)"""
        rows = [self._encode(caption) for caption in captions]
        ids = copy_to_device(torch.tensor([ids for ids, _ in rows]), device)
        lengths = copy_to_device(torch.tensor([count for _, count in rows]), device)
        return ids, torch.arange(self.length, device=device) < lengths[:, None]

    def _encode_caption(self, caption: str) -> tuple[tuple[int, ...], int]:
        """→ padded ids, number of real ones"""
        ids: list[int] = self.tokenizer(caption, truncation=False, verbose=False)["input_ids"]
        total = len(ids)
        if total > self.length:
            ids = self.tokenizer(caption, truncation=True, max_length=self.length)["input_ids"]  # keeps the end token
            if not self._noted:
                self._noted = True
                self.note(
                    f"captions are cut to {self.key}={self.length} tokens: {caption[:60]!r} has {total} (noted once)"
                )
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else 0
        return tuple(ids) + (pad,) * (self.length - len(ids)), min(total, self.length)


def build_attention_mask(model: Any, mask: Tensor, causal: bool) -> Tensor:
    """B L → B 1 L L, in the form that attention takes. With B L, transformers would wait for the device at every call."""
    from transformers import __version__

    if int(__version__.split(".")[0]) < 5:  # which accepts B L only
        return mask.long()
    length = mask.shape[1]
    visible = mask[:, None, None].expand(-1, 1, length, -1)
    if causal:
        visible = visible & torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
    if model.config._attn_implementation != "eager":
        return visible.contiguous()
    dtype = next(model.parameters()).dtype
    return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)


# Loading ---------------------------------------------------------------------------------------------------------------


def resolve_name(name: str) -> tuple[str, bool]:
    """→ the folder, which may not exist, or the hub name; and whether it is a folder"""
    folder = Path(name).expanduser()
    if not (folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1):
        return name, False
    return str(folder), True


def download_options(local: bool) -> dict[str, Any]:
    return {"local_files_only": True} if local else {}


def load_pretrained(load: Callable[[], Any], key: str, name: str, kind: str) -> Any:
    """Call `load`; turn transformers' errors into an InputError."""
    try:
        return load()
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(
            f"{key}={name} cannot be loaded as {kind}: {line}; give a local folder, or check the name"
        ) from None


def _load_tokenizer(name: str, local: bool, kind: str) -> Any:
    from transformers import AutoTokenizer

    options = download_options(local)
    return load_pretrained(lambda: AutoTokenizer.from_pretrained(find_tokenizer(name), **options), KEY, name, kind)


@contextmanager
def _hide_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


# Checks ----------------------------------------------------------------------------------------------------------------


def check_encoder(config: TextConfig, hub: bool) -> None:
    """Check that an encoder can be loaded and fits the config. `hub`: also if it must be downloaded."""
    assert config.name is not None
    name, local = resolve_name(config.name)
    if not (local or hub):
        return
    _check_fits(config.width, config.length, _read_config(name, local, config.kind), name)
    if local:
        open_weights(Path(name), TRANSFORMERS_STEM)  # reads the headers
    _load_tokenizer(name, local, config.kind)


def _check_fits(width: int | None, length: int, encoder: dict[str, Any], name: str) -> None:
    channels, positions = _read_width(encoder, name), encoder.get("max_position_embeddings")
    if width not in (None, channels):
        raise InputError(f"text.width={width} does not fit {name}: its embeddings have {channels} channels")
    if positions is not None and length > positions:
        raise InputError(f"text.length={length} is too long for {name}: use at most {positions}")


def _read_config(name: str, local: bool, kind: str) -> dict[str, Any]:
    """An encoder's config.json; of a whole CLIP, its text tower's."""
    if local:
        check_folder(Path(name), KEY)
        config = parse_json((Path(name) / "config.json").read_text(encoding="utf-8"))
    else:
        from transformers import AutoConfig

        config = load_pretrained(lambda: AutoConfig.from_pretrained(name), KEY, name, kind).to_dict()
    return config.get("text_config") or config


def _read_width(encoder: dict[str, Any], name: str) -> int:
    width = encoder.get("d_model") or encoder.get("hidden_size")
    if not width:
        raise InputError(f"{KEY}={name}: config.json has neither d_model nor hidden_size; set text.width")
    return int(width)


def find_tokenizer(name: str) -> str:
    """The folder of an encoder's tokenizer: its own, or `tokenizer` beside it, as in diffusers' pipelines."""
    folder = Path(name)
    sibling = folder.parent / "tokenizer"
    if folder.is_dir() and not _has_tokenizer(folder) and _has_tokenizer(sibling):
        return str(sibling)
    return name


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _TOKENIZERS)


def check_folder(folder: Path, key: str) -> None:
    """Check that transformers can load a folder without network."""
    if not folder.is_dir():
        raise InputError(
            f"{key}={folder} does not exist: give a folder with config.json, model.safetensors and a tokenizer, or a hub name"
        )
    missing = []
    if not (folder / "config.json").is_file():
        missing.append("config.json")
    if not any((folder / name).is_file() for name in _WEIGHTS):
        missing.append("model.safetensors (weights in .bin files are pickles and are refused)")
    if not _has_tokenizer(Path(find_tokenizer(str(folder)))):
        missing.append("a tokenizer (tokenizer.json, spiece.model or vocab.json)")
    if missing:
        raise InputError(f"{key}={folder} lacks {', '.join(missing)}")
