"""T5 and CLIP text encoders through transformers: frozen, loaded when the first caption must be encoded."""

from __future__ import annotations

import json
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
from kineograph.core.protocols import TextEncoder
from kineograph.core.task import freeze, is_fake_or_meta
from kineograph.core.weight_files import TRANSFORMERS_STEM, open_weights
from kineograph.text.encoder import NullText

if TYPE_CHECKING:
    from kineograph.text.config import TextConfig

KEY = "text.name"
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def _t5(width: int, layers: int, heads: int, inner: int) -> int:
    """Parameters of an encoder of T5 v1.1: 32,128 words; in each layer attention with heads of 64, a gated MLP and two norms."""
    return 32128 * width + layers * (4 * width * 64 * heads + 3 * width * inner + 2 * width) + 32 * heads + width


_T5 = {size[0]: _t5(*size) for size in ((512, 8, 6, 1024), (768, 12, 12, 2048), (1024, 24, 16, 2816), (2048, 24, 32, 5120), (4096, 24, 64, 10240))}  # fmt: skip
"""By width: small, base, large, xl, xxl."""


class PretrainedText(TextEncoder):
    """The encoder itself is no submodule: it is neither trained, saved nor averaged, and with embeddings from a cache it is never loaded."""

    trained = False
    reads_captions = True

    def __init__(self, config: TextConfig, note: Callable[[str], None]) -> None:
        super().__init__()
        assert config.name is not None
        self.kind, self.length, self.note = config.kind, config.length, note
        self.reads_padding = config.padding == "read"
        self.name, self.local = resolve_name(config.name)
        if self.local and not is_fake_or_meta():  # where sizes matter it may be yet to come
            check_folder(Path(self.name), KEY)
        self.width = config.width or _width_of(_described(self.name, self.local, self.kind), self.name)
        self.ids = lru_cache(maxsize=65536)(self._ids)
        self.null = NullText(self.width)
        self._parts: dict[str, Any] = {}  # a plain dict, so that modules in it do not become submodules
        self._said = False

    def count(self) -> int:
        """Parameters of the encoder: by the headers of its files; where they are not here, as the T5 of that width has them (0: not known)."""
        try:
            files = open_weights(Path(self.name).expanduser(), TRANSFORMERS_STEM)
        except InputError:
            return _T5.get(self.width, 0) if self.kind == "t5" else 0
        read = ("shared.", "encoder.") if self.kind == "t5" else ("text_model.",)  # other halves stay on the disk
        named = [name for name in files if name.startswith(read) and name != "encoder.embed_tokens.weight"]
        return sum(math.prod(files.shape(name)) for name in named)

    def _load(self, device: torch.device) -> None:
        from transformers import CLIPTextModel, T5EncoderModel

        family = T5EncoderModel if self.kind == "t5" else CLIPTextModel
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # T5 overflows in float16
        options: dict[str, Any] = {"local_files_only": True} if self.local else {}
        self._parts["tokenizer"] = _load_tokenizer(self.name, self.local, self.kind)
        with _without_bars():
            model = load_pretrained(
                lambda: family.from_pretrained(self.name, use_safetensors=True, dtype=dtype, **options),
                KEY,
                self.name,
                self.kind,
            )
        _check_fits(self.width, self.length, model.config.to_dict(), self.name)
        self._parts["model"] = freeze(model)

    def _ids(self, caption: str) -> tuple[tuple[int, ...], int]:
        """Token ids padded to the length, and how many are real."""
        ids, whole = token_ids(self._parts["tokenizer"], caption, self.length)
        if whole > self.length and not self._said:
            self._said = True
            self.note(f"captions are cut to text.length={self.length} tokens: {caption[:60]!r} has {whole} (said once)")
        return ids, min(whole, self.length)

    @torch.no_grad()
    def encode(self, captions: list[str]) -> tuple[Tensor, Tensor]:
        device = self.null.token.device
        if not self._parts:
            self._load(device)
        model = self._parts["model"].to(device)
        ids, mask = batch_token_ids([self.ids(caption) for caption in captions], self.length, device)
        if self.reads_padding:
            mask = torch.ones_like(mask)
        seen = None if self.reads_padding else build_attention_mask(model, mask, causal=self.kind == "clip")
        embeddings = model(input_ids=ids, attention_mask=seen).last_hidden_state.float()
        return embeddings * mask[..., None], mask

    def release(self) -> None:
        """Give the encoder's memory back; the next caption loads it again."""
        self._parts.clear()

    def drop(self, embeddings: Tensor, mask: Tensor, dropped: Tensor) -> tuple[Tensor, Tensor]:
        return self.null(embeddings, mask, dropped)


def check_encoder(config: TextConfig, hub: bool) -> None:
    """Refuse what could not be loaded or read later: a folder that is not there or lacks something, another width. `hub`: or a name there."""
    assert config.name is not None
    name, local = resolve_name(config.name)
    if not (local or hub):
        return
    _check_fits(config.width, config.length, _described(name, local, config.kind), name)
    if local:
        open_weights(Path(name), TRANSFORMERS_STEM)  # whether its files can be read at all: by their headers
    _load_tokenizer(name, local, config.kind)


def _check_fits(width: int | None, length: int, described: dict[str, Any], name: str) -> None:
    """`described` is the encoder's own config."""
    channels, positions = _width_of(described, name), described.get("max_position_embeddings")
    if width not in (None, channels):
        raise InputError(f"text.width={width} does not fit {name}: its embeddings have {channels} channels")
    if positions is not None and length > positions:
        raise InputError(f"text.length={length} is more than {name} reads: at most {positions}")


def _described(name: str, local: bool, kind: str) -> dict[str, Any]:
    """What an encoder's config.json says of it."""
    if local:
        check_folder(Path(name), KEY)
        found = json.loads((Path(name) / "config.json").read_text(encoding="utf-8"))
    else:
        from transformers import AutoConfig

        found = load_pretrained(lambda: AutoConfig.from_pretrained(name), KEY, name, kind).to_dict()
    return found.get("text_config") or found  # a whole CLIP keeps its text tower's config inside


def _width_of(described: dict[str, Any], name: str) -> int:
    width = described.get("d_model") or described.get("hidden_size")
    if not width:
        raise InputError(f"{KEY}={name}: config.json has neither d_model nor hidden_size; set text.width")
    return int(width)


def _load_tokenizer(name: str, local: bool, kind: str) -> Any:
    from transformers import AutoTokenizer

    options: dict[str, Any] = {"local_files_only": True} if local else {}
    return load_pretrained(lambda: AutoTokenizer.from_pretrained(find_tokenizer(name), **options), KEY, name, kind)


def resolve_name(name: str) -> tuple[str, bool]:
    """A folder, whether it is there or not, or a hub name as it is; and whether it is a folder."""
    folder = Path(name).expanduser()
    if not (folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1):
        return name, False
    return str(folder), True


def load_pretrained(load: Callable[[], Any], key: str, name: str, kind: str) -> Any:
    """What transformers loads, or an InputError with the first line of its reason."""
    try:
        return load()
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(
            f"{key}={name} cannot be loaded as {kind}: {line}; give a local folder, or check the name"
        ) from None


def token_ids(tokenizer: Any, caption: str, length: int) -> tuple[tuple[int, ...], int]:
    """A caption's ids, cut or padded to the length, and how many it has uncut."""
    ids: list[int] = tokenizer(caption, truncation=False, verbose=False)["input_ids"]
    whole = len(ids)
    if whole > length:
        ids = tokenizer(caption, truncation=True, max_length=length)["input_ids"]  # keeps the end token
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    return tuple(ids) + (pad,) * (length - len(ids)), whole


def batch_token_ids(
    rows: list[tuple[tuple[int, ...], int]], length: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """What `token_ids` found of each caption → ids B L, and which of them are real, B L."""
    ids = copy_to_device(torch.tensor([ids for ids, _ in rows]), device)
    lengths = copy_to_device(torch.tensor([count for _, count in rows]), device)
    return ids, torch.arange(length, device=device) < lengths[:, None]


def build_attention_mask(model: Any, mask: Tensor, causal: bool) -> Tensor:
    """Which tokens each one sees, B 1 L L, in the form that attention takes it in. Given the real tokens alone (B L), transformers would ask at every
    call whether that is all of them, and wait for the device's answer."""
    from transformers import __version__

    if int(__version__.split(".")[0]) < 5:  # which knows no other form
        return mask.long()
    length = mask.shape[1]
    seen = mask[:, None, None].expand(-1, 1, length, -1)
    if causal:
        seen = seen & torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
    if model.config._attn_implementation != "eager":
        return seen.contiguous()
    dtype = next(model.parameters()).dtype
    return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


_TOKENIZERS = ("tokenizer.json", "spiece.model", "vocab.json")


def find_tokenizer(name: str) -> str:
    """Where an encoder's tokenizer lies: beside its weights, or in the folder `tokenizer` beside that, as diffusers' pipelines have it."""
    folder = Path(name)
    beside = folder.parent / "tokenizer"
    if folder.is_dir() and not _has_tokenizer(folder) and _has_tokenizer(beside):
        return str(beside)
    return name


@contextmanager
def _without_bars() -> Iterator[None]:
    """No bars of transformers between our own lines."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _TOKENIZERS)


def check_folder(folder: Path, key: str) -> None:
    """A folder that transformers can load without network, or an InputError that says what is missing."""
    if not folder.is_dir():
        raise InputError(
            f"{key}={folder} does not exist: give a folder with config.json, model.safetensors and a tokenizer, or a hub name"
        )
    missing = []
    if not (folder / "config.json").is_file():
        missing.append("config.json")
    if not any((folder / name).is_file() for name in _WEIGHTS):
        missing.append("model.safetensors (weights in .bin files are pickles and are not read)")
    if not _has_tokenizer(Path(find_tokenizer(str(folder)))):
        missing.append("a tokenizer (tokenizer.json, spiece.model or vocab.json)")
    if missing:
        raise InputError(f"{key}={folder} lacks {', '.join(missing)}")
