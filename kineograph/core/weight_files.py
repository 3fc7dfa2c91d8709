"""Weights in one or several safetensors files: opened, checked and read by name, and written a shard at a time."""

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
from kineograph.core.text_file import parse_json, read_regular

DIFFUSERS_STEM, TRANSFORMERS_STEM = "diffusion_pytorch_model", "model"  # what these libraries call their files
SHARD_BYTES = 5 * 10**9
_PIECE, _PIECES = 4096, 2048  # bytes of a piece, and pieces of a file, that tell it apart
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


class WeightFiles(Mapping[str, Tensor]):
    """Tensors of one or several files by name. Opening reads the headers, which detects truncated files; a tensor is memory-mapped when
    it is looked up."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._open: dict[Path, Any] = {}
        self._file: dict[str, Path] = {}
        for path in files:
            self._open[path] = reader = _open_file(path)
            for name in reader.keys():  # noqa: SIM118  not a dict
                if name in self._file:
                    raise InputError(
                        f"{path}: {name} is also in {self._file[name].name}: the folder is damaged; download it again"
                    )
                self._file[name] = path

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._open[self._file[name]].get_tensor(name)
        check_weight(name, tensor, self._file[name])
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._file  # Mapping's own would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file)

    def __len__(self) -> int:
        return len(self._file)

    def file(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._file[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, from the header."""
        return tuple(self._open[self._file[name]].get_slice(name).get_shape())

    def metadata(self) -> dict[str, str]:
        """The metadata of all headers."""
        return {key: value for reader in self._open.values() for key, value in (reader.metadata() or {}).items()}


def check_weight(name: str, tensor: Tensor, where: Path) -> None:
    """Refuse a weight that is no floating-point number, such as a quantized one, or not finite."""
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise InputError(
            f"{where}: {name} is {str(tensor.dtype).removeprefix('torch.')}: give weights in fp32, bf16 or fp16; quantized ones are not read"
        )
    if tensor.numel() and not all(bound.isfinite() for bound in tensor.aminmax()):  # NaN passes through
        raise InputError(f"{where}: {name} holds numbers that are not finite: the file is damaged; download it again")


def _open_file(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise InputError(f"{path} does not exist: check its name, or copy or download it again") from None
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"{path} is not a complete safetensors file ({str(error).strip()}): copy or download it again"
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
    names = _read_index(index)
    weights = WeightFiles([folder / file for file in sorted(set(names.values()))])
    for name, file in names.items():
        if name not in weights:
            raise InputError(f"{folder / file} lacks {name}, which {index.name} lists")
        if weights.file(name).name != file:
            raise InputError(f"{index} lists {name} in {file}, and it is in {weights.file(name).name}")
    unexpected = sorted(weights.keys() - names.keys())
    if unexpected:
        raise InputError(f"{weights.file(unexpected[0])} holds {unexpected[0]}, which {index.name} does not list")
    return weights


def digest_folder(folder: Path) -> str | None:
    """A digest of a folder of weights: of each file its size and 2,048 pieces of 4 KB, so that 10 GB take a moment. None: there is no folder."""
    if not folder.is_dir():
        return None
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for start in range(0, size, max(_PIECE, size // _PIECES)):
                file.seek(start)
                digest.update(file.read(_PIECE))
    return digest.hexdigest()


def _read_index(path: Path) -> dict[str, str]:
    """The `weight_map` of an index: name → file."""
    try:
        names = parse_json(read_regular(path))["weight_map"]
        plain = all(isinstance(file, str) and Path(file).name == file for file in names.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise InputError(f"{path} is not an index of shards: it has no readable weight_map") from None
    if not names or not plain:
        raise InputError(f"{path}: weight_map must name files that lie beside it")
    return names


def check_shapes(weights: WeightFiles, expected: Mapping[str, Sequence[int]], where: Path) -> None:
    """Refuse weights with missing or unexpected names or other shapes."""
    for name, shape in expected.items():
        if name in weights and weights.shape(name) != tuple(shape):
            raise InputError(
                f"{weights.file(name)}: {name} is {_format_shape(weights.shape(name))}, but its config says {_format_shape(shape)}"
            )
    missing, unexpected = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    if missing:
        raise InputError(f"{where} lacks {_format_names(missing)}")
    if unexpected:
        raise InputError(
            f"{weights.file(unexpected[0])} holds {_format_names(unexpected)}, which its config does not have"
        )


def _format_shape(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape)) or "a single number"


def _format_names(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def write_weights(
    folder: Path, stem: str, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int = SHARD_BYTES
) -> list[Path]:
    """Write one file, or shards of at most `shard_bytes` with their index. One shard at a time is in memory."""
    written: list[Path] = []
    weight_map: dict[str, int] = {}
    total, buffered, shard = 0, 0, dict[str, Tensor]()
    storages: set[int] = set()

    def flush() -> None:
        nonlocal buffered, shard
        path = folder / f".{stem}-{len(written):05d}.safetensors"
        save_file(shard, path, metadata={"format": "pt"})  # transformers and diffusers require it
        written.append(path)
        buffered, shard = 0, {}
        storages.clear()

    for name, tensor in tensors:
        value = tensor.detach().cpu().contiguous()
        size = value.numel() * value.element_size()
        if shard and buffered + size > shard_bytes:
            flush()
        if value.untyped_storage().nbytes() != size or value.untyped_storage().data_ptr() in storages:
            value = value.clone()  # safetensors refuses tensors that share memory
        storages.add(value.untyped_storage().data_ptr())
        shard[name], weight_map[name] = value, len(written)
        buffered, total = buffered + size, total + size
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
