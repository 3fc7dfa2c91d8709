"""What every test stands on: one thread, no network, nothing sent to trackers, GPU tests only where there is one."""

from __future__ import annotations

import ipaddress
import os
import socket

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault(
    "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
)  # before the first test that uses a GPU, for those of train.deterministic


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from tests that do not ask for one: they run as everywhere, and may fork, which autograd's GPU threads forbid."""
    chosen = config.option.markexpr
    if chosen and ("gpu" not in chosen or "not gpu" in chosen):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Test workers share the cores. A test that trains may ask for more, and is told apart by doing so."""
    import torch

    threads = int(os.environ["OMP_NUM_THREADS"])
    torch.set_num_threads(threads)
    # A forked process loses torch's pool, and two threads that renew it at once fail now and then ("Invalid thread pool!").
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(threads))


@pytest.fixture(scope="session", autouse=True)
def _no_fetched_weights(tmp_path_factory):
    """What metrics run must not depend on what the machine's owner has fetched, nor trust on what was typed here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KINEO_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def _own_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test types or trusts with --trust, later tests of the same process do not."""
    from kineograph.core import trust

    monkeypatch.setattr(trust, "_accepted", set(trust._accepted))
    monkeypatch.setattr(trust, "_all_trusted", trust._all_trusted)


@pytest.fixture(scope="session", autouse=True)
def _quick_runs():
    """Leave out what takes most of a tiny run's time: curves, a vocabulary of 20,000 captions, waiting for the disk. → the curves"""
    from kineograph.media import curves

    with pytest.MonkeyPatch.context() as patch:
        drawing = curves._draw
        patch.setattr(curves, "_draw", lambda panels, axis, marks, out: out.write_bytes(b""))
        patch.setattr("kineograph.stage.data.VOCABULARY_CAPTIONS", 500)
        patch.setattr(os, "fsync", lambda file: None)
        yield drawing


@pytest.fixture
def real_curves(_quick_runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw curves after all."""
    monkeypatch.setattr("kineograph.media.curves._draw", _quick_runs)


@pytest.fixture(scope="session", autouse=True)
def _no_network():
    """A test that reaches for another machine fails here, at once and by name, rather than by a timeout."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address):
        if self.family in (socket.AF_INET, socket.AF_INET6) and not _is_local(address[0]):
            raise OSError(f"tests do not use the network: connect to {address}")
        return connect(self, address)

    socket.socket.connect = guarded  # type: ignore[method-assign]
    yield
    socket.socket.connect = connect  # type: ignore[method-assign]


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in ("localhost", socket.gethostname())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
