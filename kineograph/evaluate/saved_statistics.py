"""Statistics of a set of pictures or clips in an .npz file, as pytorch-fid and clean-fid write them, so that a reference is computed once.

`mu` and `sigma` are mean and covariance of the features of `fid`, `feats` the features themselves, for `kid`; `fvd_mu` and `fvd_sigma`
are those of `fvd`; `protocol` says, as JSON, how they were computed. Files of other programs have the first two or three.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kineograph.core.errors import InputError
from kineograph.core.run_folder import write_atomic
from kineograph.core.text_file import parse_json
from kineograph.evaluate.metric_api import MetricSkipped
from kineograph.evaluate.statistics import Gaussian

SUFFIX = ".npz"
MAX_BYTES = {"feats.npy": 2**32}  # of an array, as unpacked
MAX_OTHER = 2**29
_PREFIXES = {"fid": "", "fvd": "fvd_"}


@dataclass
class SavedStatistics:
    """Metric (fid, fvd) → mean and covariance, and the features of `fid`; `protocol`: metric → how they were computed."""

    name: str
    gaussians: dict[str, Gaussian] = field(default_factory=dict)
    features: Tensor | None = None  # N D
    protocol: dict[str, dict[str, Any]] = field(default_factory=dict)

    def gaussian(self, metric: str, width: int, protocol: dict[str, Any]) -> Gaussian:
        """Mean and covariance for a metric; refuses those of other features."""
        found = self.gaussians.get(metric)
        if found is None:
            have = ", ".join(self.gaussians) or "features"
            raise MetricSkipped(
                f"{self.name} has no statistics for {metric}, only for {have}: make them with --save-stats"
            )
        self._check(metric, len(found.mean), width, protocol)
        return found

    def rows(self, metric: str, width: int, protocol: dict[str, Any]) -> Tensor:
        """The features for kid."""
        if self.features is None:
            raise MetricSkipped(
                f"{self.name} holds mean and covariance, and {metric} needs the features: save them with "
                f"--save-stats and --metrics fid,kid, or give a folder"
            )
        self._check("fid", self.features.shape[1], width, protocol)
        return self.features

    def label(self, metric: str) -> str:
        """For the label `reference`."""
        return self.name if metric in self.protocol else f"{self.name} (how it was computed is not stated)"

    def _check(self, metric: str, saved: int, width: int, protocol: dict[str, Any]) -> None:
        if saved != width:
            raise MetricSkipped(
                f"{self.name} holds {saved} features, and {protocol['extractor'].split()[0]} gives {width} here: use the "
                "statistics of the same network and layer"
            )
        stated = self.protocol.get(metric, {})
        for key in ("extractor", "mode", "frames"):
            before, now = stated.get(key), protocol.get(key)
            if key == "extractor":
                before, now = (_describe_network(value) for value in (before, now))
            if stated and before != now:
                raise MetricSkipped(
                    f"{self.name} was computed with {key} {before}, not {now}: use the same options, or save new statistics"
                )


def _describe_network(label: Any) -> str | None:
    """Known networks are compared by name, since their files may differ in parts that features do not use; others by their hash too."""
    from kineograph.evaluate.extractor.registry import NETWORKS

    words = str(label).split() if label is not None else []
    return (words[0] if words[0] in NETWORKS else " ".join(words)) if words else None


def read_statistics(path: Path) -> SavedStatistics:
    """Read an .npz file. Nothing is unpickled."""
    saved = SavedStatistics(path.name)
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                most = MAX_BYTES.get(member.filename, MAX_OTHER)
                if member.file_size > most:
                    raise InputError(f"{path}: {member.filename} has more than {most:,} bytes: these are no statistics")
        with np.load(path, allow_pickle=False) as arrays:
            names = set(arrays.files)
            if "protocol" in names:
                saved.protocol = _parse_protocol(arrays["protocol"])
            for metric, prefix in _PREFIXES.items():
                if {f"{prefix}mu", f"{prefix}sigma"} <= names:
                    gaussian = _gaussian(path, arrays[f"{prefix}mu"], arrays[f"{prefix}sigma"])
                    count = saved.protocol.get(metric, {}).get("count")
                    count = count if isinstance(count, int) and count > 0 else None
                    saved.gaussians[metric] = Gaussian(gaussian.mean, gaussian.covariance, count)
            if "feats" in names:
                saved.features = _tensor(path, "feats", arrays["feats"], 2).float()
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except Exception as error:  # damaged archives and headers raise almost anything
        raise InputError(f"{path} is not an .npz file of arrays ({error})") from None
    if not saved.gaussians and saved.features is None:
        found = ", ".join(sorted(names)[:6]) or "nothing"
        raise InputError(
            f"{path} holds no statistics: it needs mu and sigma, as pytorch-fid and clean-fid write them, and holds {found}"
        )
    if "fvd" not in saved.gaussians and "fid" not in saved.protocol and "fid" in saved.gaussians:
        saved.gaussians["fvd"] = saved.gaussians["fid"]  # another program's: the width tells what it is
    return saved


def _parse_protocol(array: np.ndarray) -> dict[str, dict[str, Any]]:
    try:
        tree = parse_json(str(array))
    except ValueError:
        return {}
    return {key: value for key, value in tree.items() if isinstance(value, dict)} if isinstance(tree, dict) else {}


def _gaussian(path: Path, mean: np.ndarray, covariance: np.ndarray) -> Gaussian:
    mu, sigma = _tensor(path, "mu", mean, 1), _tensor(path, "sigma", covariance, 2)
    if sigma.shape != (len(mu), len(mu)):
        raise InputError(f"{path}: mu has {len(mu)} entries, and sigma is {sigma.shape[0]} × {sigma.shape[1]}")
    return Gaussian(mu.double(), sigma.double())


def _tensor(path: Path, name: str, array: np.ndarray, dimensions: int) -> Tensor:
    if array.ndim != dimensions or array.dtype.kind != "f" or not array.size:
        raise InputError(f"{path}: {name} is {array.dtype} of shape {array.shape}, not {dimensions}-dimensional floats")
    if not np.isfinite(array).all():
        raise InputError(f"{path}: {name} holds values that are not finite")
    return torch.from_numpy(np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="))))


def check_new_file(path: Path) -> None:
    """Refuse a place for statistics before hours of computing them."""
    if path.suffix != SUFFIX:
        raise InputError(f"--save-stats {path}: give a name that ends with {SUFFIX}")
    if path.exists():
        raise InputError(f"--save-stats {path} exists: give a new name, or remove it")
    if not path.absolute().parent.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise InputError(f"--save-stats {path}: its folder does not exist or cannot be written to")


def write_statistics(path: Path, saved: SavedStatistics) -> None:
    arrays: dict[str, np.ndarray] = {"protocol": np.array(json.dumps(saved.protocol))}
    for metric, gaussian in saved.gaussians.items():
        arrays[f"{_PREFIXES[metric]}mu"] = gaussian.mean.numpy()
        arrays[f"{_PREFIXES[metric]}sigma"] = gaussian.covariance.numpy()
    if saved.features is not None:
        arrays["feats"] = saved.features.numpy()
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    write_atomic(path, buffer.getvalue())
