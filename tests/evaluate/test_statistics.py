"""Scores from features, against plain numpy and scipy, and over several processes."""

from __future__ import annotations

import json
import math
import zipfile

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from scipy.linalg import sqrtm

from kineograph.core import distributed
from kineograph.core.errors import InputError
from kineograph.evaluate.metric_api import MetricSkipped
from kineograph.evaluate.saved_statistics import read_statistics
from kineograph.evaluate.statistics import FeatureRows, Moments, frechet_distance, inception_score, kernel_distance

CPU = torch.device("cpu")


def features(count: int, width: int = 12, seed: int = 0, shift: float = 0.0) -> torch.Tensor:
    mix = torch.randn(width, width, generator=torch.Generator().manual_seed(7))
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) @ mix + shift


def frechet(real: torch.Tensor, made: torch.Tensor, parts: int = 1) -> float:
    sums = [Moments(real.shape[1], CPU), Moments(real.shape[1], CPU)]
    for side, rows in zip(sums, (real, made), strict=True):
        for part in rows.chunk(parts):
            side.add(part)
    return frechet_distance(*(side.compute() for side in sums))


def test_frechet_is_the_formula():
    real, made = features(50), features(70, seed=1, shift=0.5)
    x, y = real.double().numpy(), made.double().numpy()
    a, b = np.cov(x, rowvar=False), np.cov(y, rowvar=False)
    expected = ((x.mean(0) - y.mean(0)) ** 2).sum() + np.trace(a + b - 2 * sqrtm(a @ b).real)
    assert frechet(real, made) == pytest.approx(expected, rel=1e-6)


def test_frechet_of_fewer_samples_than_features():
    """Singular covariances: tr √(AB) is the nuclear norm of the product of the centred samples."""
    real, made = features(10, 30), features(14, 30, seed=1)
    x, y = ((t - t.mean(0)).double().numpy() / np.sqrt(len(t) - 1) for t in (real, made))
    mean = float((real.double().mean(0) - made.double().mean(0)).square().sum())
    expected = mean + (x**2).sum() + (y**2).sum() - 2 * np.linalg.norm(x @ y.T, "nuc")
    assert frechet(real, made) == pytest.approx(expected, rel=1e-4)


def test_a_set_is_no_distance_from_itself_and_order_and_parts_do_not_matter():
    real, made = features(64), features(48, seed=1, shift=1)
    whole = frechet(real, made)
    assert whole > 1
    assert frechet(real, real) == pytest.approx(0, abs=1e-6)
    assert frechet(real, made, parts=5) == pytest.approx(whole, rel=1e-9)
    assert frechet(real.flip(0), made[torch.randperm(48)]) == pytest.approx(whole, rel=1e-9)


def test_frechet_takes_two_of_each():
    with pytest.raises(MetricSkipped, match="1 real and 3 generated"):
        frechet(features(1), features(3))


def mmd(x: np.ndarray, y: np.ndarray) -> float:
    """The unbiased estimate, pair by pair."""

    def kernel(a, b):
        return (a @ b / len(a) + 1) ** 3

    m, n = len(x), len(y)
    within_x = sum(kernel(x[i], x[j]) for i in range(m) for j in range(m) if i != j) / (m * (m - 1))
    within_y = sum(kernel(y[i], y[j]) for i in range(n) for j in range(n) if i != j) / (n * (n - 1))
    return within_x + within_y - 2 * sum(kernel(a, b) for a in x for b in y) / (m * n)


def test_kid_is_the_unbiased_distance():
    real, made = features(20), features(20, seed=1, shift=0.3)
    values, told = kernel_distance(real, made)
    assert values == {"kid": pytest.approx(mmd(real.double().numpy(), made.double().numpy()), rel=1e-6)}
    assert told == {"subsets": "1 × 20"}


def test_kid_of_many_is_a_mean_over_subsets(monkeypatch):
    monkeypatch.setattr("kineograph.evaluate.statistics.SUBSET_SIZE", 30)
    real, made = features(90), features(60, seed=1, shift=0.3)
    values, told = kernel_distance(real, made)
    assert told == {"subsets": "100 × 30"}
    exact = mmd(real.double().numpy(), made.double().numpy())
    assert abs(values["kid"] - exact) < 3 * values["kid_deviation"] / 10
    torch.manual_seed(99)  # whatever the global generator's state: the same number, and the state stays
    state = torch.get_rng_state()
    assert kernel_distance(real, made)[0] == values
    assert torch.equal(torch.get_rng_state(), state)


def test_rows_have_an_order_of_their_own():
    rows = features(40)
    one, other = FeatureRows(12, CPU), FeatureRows(12, CPU)
    one.add(rows)
    for part in rows[torch.randperm(40)].split(7):
        other.add(part)
    assert torch.equal(one.gather(), other.gather())
    assert torch.equal(one.gather().sum(0).round(decimals=3), rows.sum(0).round(decimals=3))
    assert FeatureRows(12, CPU).gather().shape == (0, 12)


def test_the_inception_score_is_the_formula(monkeypatch):
    logits = features(64, 10)
    p = torch.softmax(logits.double(), 1).numpy()
    expected = np.exp((p * (np.log(p) - np.log(p.mean(0)))).sum(1).mean())
    values, told = inception_score(logits)
    assert values == {"is": pytest.approx(expected, rel=1e-6)}
    assert told == {"splits": 1}
    monkeypatch.setattr("kineograph.evaluate.statistics.SPLIT_FROM", 64)
    split, told = inception_score(logits)
    assert set(split) == {"is", "is_deviation"}
    assert 1 < split["is"] < expected  # a small split has fewer kinds
    assert told == {"splits": 10}
    assert inception_score(torch.eye(8) * 1000)[0]["is"] == pytest.approx(8)
    assert inception_score(torch.ones(8, 8))[0]["is"] == pytest.approx(1)


# Several processes ---------------------------------------------------------------------------------------------------


def _on_rank(rank: int, world: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=world)
    shares = [slice(0, 5), slice(5, 5), slice(5, 40)]  # one has nothing to see
    found = _score(shares[rank])
    gathered = distributed.all_gather_rows(torch.full((rank, 2), float(rank))).tolist()
    if rank == 1:
        with open(f"{path}/result.json", "w") as file:
            json.dump({"found": found, "gathered": gathered}, file)
    dist.destroy_process_group()


def _score(share: slice) -> list[float]:
    real, made = features(40)[share], features(40, seed=1, shift=0.4)[share]
    sums, made_sums, rows, other = Moments(12, CPU), Moments(12, CPU), FeatureRows(12, CPU), FeatureRows(12, CPU)
    if len(real):
        sums.add(real)
        made_sums.add(made)
        rows.add(real)
        other.add(made)
    gaussians = sums.compute(), made_sums.compute()
    distance, counts = frechet_distance(*gaussians), [gaussian.count for gaussian in gaussians]
    kid, _ = kernel_distance(rows.gather(), other.gather())
    score, _ = inception_score(other.gather())
    return [distance, *counts, kid["kid"], score["is"]]


def test_what_several_processes_saw_is_joined_before_it_is_scored(tmp_path):
    mp.start_processes(_on_rank, (3, str(tmp_path)), nprocs=3, start_method="fork")  # type: ignore[attr-defined]
    told = json.loads((tmp_path / "result.json").read_text())
    assert told["found"] == pytest.approx(_score(slice(None)), rel=1e-6)
    assert told["gathered"] == [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]


def write_zip(path, **arrays):
    """Compressed arrays of zeros, given by their shapes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, shape in arrays.items():
            with archive.open(f"{name}.npy", "w") as file:
                header = {"descr": "<f8", "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(file, header)
                for _ in range(8 * math.prod(shape) // 2**22 + 1):
                    file.write(bytes(2**22))


def test_damaged_and_hostile_statistics_are_refused(tmp_path):
    path = tmp_path / "photos.npz"
    np.savez_compressed(path, mu=np.linspace(0, 1, 64), sigma=np.random.default_rng(0).random((64, 64)))
    data = path.read_bytes()
    middle = len(data) // 2
    path.write_bytes(data[:middle] + bytes(40) + data[middle + 40 :])  # zlib's own error
    with pytest.raises(InputError, match=r"not an \.npz file"):
        read_statistics(path)
    np.savez(path, mu=np.array([{}], object), sigma=np.eye(1))
    with pytest.raises(InputError, match="Object arrays cannot be loaded"):
        read_statistics(path)
    write_zip(path, mu=(2**26,), sigma=(4, 4))
    assert path.stat().st_size < 2**22
    with pytest.raises(InputError, match=r"mu\.npy has more than 536,870,912 bytes"):
        read_statistics(path)
