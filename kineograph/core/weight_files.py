"""Weights in safetensors files, one or many shards: read by name when asked for, checked before, written a shard at a time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kineograph.core.errors import InputError

DIFFUSERS_STEM, TRANSFORMERS_STEM = "diffusion_pytorch_model", "model"  # what these libraries call their files
SHARD_BYTES = 5 * 10**9
_PIECE, _PIECES = 4096, 2048  # bytes of a piece, and pieces of a file, that tell it apart
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


class WeightFiles(Mapping[str, Tensor]):
    """Tensors of one or several files by name. Opening reads the headers (a truncated file shows there); a tensor is read when it is
    asked for and is mapped from the file, so that memory holds what the caller keeps."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._open: dict[Path, Any] = {}
        self._file: dict[str, Path] = {}
        for path in files:
            self._open[path] = opened = _opened(path)
            for name in opened.keys():  # noqa: SIM118  not a dict
                if name in self._file:
                    raise InputError(f"{path}: {name} stands in {self._file[name].name} already; the folder is damaged")
                self._file[name] = path

    def __getitem__(self, name: str) -> Tensor:
        return self._open[self._file[name]].get_tensor(name)

    def __contains__(self, name: object) -> bool:
        return name in self._file  # a mapping's own would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file)

    def __len__(self) -> int:
        return len(self._file)

    def file(self, name: str) -> Path:
        """Where a tensor lies."""
        return self._file[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Without reading it."""
        return tuple(self._open[self._file[name]].get_slice(name).get_shape())

    def metadata(self) -> dict[str, str]:
        """What the files' headers say beside tensors."""
        return {key: value for opened in self._open.values() for key, value in (opened.metadata() or {}).items()}


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise InputError(f"{path} does not exist: look at its name, or copy or download it again") from None
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"{path} is not a whole safetensors file ({str(error).strip()}): it may be cut short; copy or download it again"
        ) from None


def open_weights(folder: Path, stem: str) -> WeightFiles:
    """`stem.safetensors` of a folder, or the shards that `stem.safetensors.index.json` names."""
    single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    if single.is_file():
        return WeightFiles([single])
    if not index.is_file():
        others = sorted(path.name for path in folder.glob("*") if path.suffix in (".safetensors", *_PICKLES))
        hint = f"; there is {', '.join(others[:3])}" if others else ""
        if any(name.endswith(_PICKLES) for name in others):
            hint += " (pickles are not read: save the weights as safetensors)"
        raise InputError(f"{folder} has neither {single.name} nor {index.name}{hint}")
    names = _index(index)
    found = WeightFiles([folder / file for file in sorted(set(names.values()))])
    for name, file in names.items():
        if name not in found:
            raise InputError(f"{folder / file} lacks {name}, which {index.name} says is there")
        if found.file(name).name != file:
            raise InputError(f"{index}: {name} is said to be in {file} and lies in {found.file(name).name}")
    strangers = sorted(found.keys() - names.keys())
    if strangers:
        raise InputError(f"{found.file(strangers[0])} holds {strangers[0]}, which {index.name} does not name")
    return found


def files_digest(folder: Path) -> str | None:
    """Tells folders of weights apart: configs and vocabularies as a whole, of weights their size and pieces spread over the file, so that a
    model of 10 GB takes a moment. None where there is no such folder."""
    if not folder.is_dir():
        return None
    found = hashlib.blake2b(digest_size=16)
    for path in sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")):
        size = path.stat().st_size
        found.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for start in range(0, size, max(_PIECE, size // _PIECES)):
                file.seek(start)
                found.update(file.read(_PIECE))
    return found.hexdigest()


def _index(path: Path) -> dict[str, str]:
    """name → file, from an index."""
    try:
        names = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        plain = all(isinstance(file, str) and Path(file).name == file for file in names.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise InputError(f"{path} is not an index of shards: it has no readable weight_map") from None
    if not names or not plain:
        raise InputError(f"{path}: weight_map must name files that lie beside it")
    return names


def check_shapes(found: WeightFiles, expected: Mapping[str, Sequence[int]], where: Path) -> None:
    """Refuse weights that lack a name, hold one too many or have another shape, by file and key."""
    for name, shape in expected.items():
        if name in found and found.shape(name) != tuple(shape):
            raise InputError(
                f"{found.file(name)}: {name} is {_size(found.shape(name))}, but its config says {_size(shape)}"
            )
    missing, strangers = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing:
        raise InputError(f"{where} lacks {_some(missing)}")
    if strangers:
        raise InputError(f"{found.file(strangers[0])} holds {_some(strangers)}, which its config has no place for")


def _size(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape)) or "a single number"


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def write_weights(
    folder: Path, stem: str, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int = SHARD_BYTES
) -> list[Path]:
    """One file, or shards of at most `shard_bytes` with their index. Tensors are taken one by one: a shard at a time is in memory."""
    written: list[Path] = []
    weight_map: dict[str, int] = {}
    total, held, shard = 0, 0, dict[str, Tensor]()
    places: set[int] = set()

    def flush() -> None:
        nonlocal held, shard
        path = folder / f".{stem}-{len(written):05d}.safetensors"
        save_file(shard, path, metadata={"format": "pt"})  # transformers and diffusers want to read that word
        written.append(path)
        held, shard = 0, {}
        places.clear()

    for name, tensor in tensors:
        value = tensor.detach().cpu().contiguous()
        size = value.numel() * value.element_size()
        if shard and held + size > shard_bytes:
            flush()
        if value.untyped_storage().nbytes() != size or value.untyped_storage().data_ptr() in places:
            value = value.clone()  # safetensors refuses tensors that share memory
        places.add(value.untyped_storage().data_ptr())
        shard[name], weight_map[name] = value, len(written)
        held, total = held + size, total + size
    flush()
    if len(written) == 1:
        return [written[0].rename(folder / f"{stem}.safetensors")]
    files = [
        path.rename(folder / f"{stem}-{number:05d}-of-{len(written):05d}.safetensors")
        for number, path in enumerate(written, start=1)
    ]
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: files[i].name for name, i in sorted(weight_map.items())},
    }
    target = folder / f"{stem}.safetensors.index.json"
    target.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return [*files, target]
