"""FlashAttention 3: found where it is installed, opened once, and never on other GPUs. The kernels themselves want an H100 or H200."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn import attention as doors

from kineograph.core import kernels
from kineograph.nn import attention
from kineograph.run import machine
from kineograph.run.doctor import environment

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test begins and ends with a closed door."""
    monkeypatch.setattr(kernels, "flash3", False)
    kernels._opened.cache_clear()
    yield
    kernels._opened.cache_clear()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is activated."""
    asked: list[str] = []
    monkeypatch.setattr(doors, "activate_flash_attention_impl", asked.append)
    monkeypatch.setattr(doors, "register_flash_attention_impl", lambda name, register_fn: None)
    return asked


def gpu(monkeypatch: pytest.MonkeyPatch, major: int) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))


def test_a_build_of_flash_attention_is_taken_on_hopper_and_asked_for_once(monkeypatch, opened, tmp_path):
    (tmp_path / "flash_attn_interface.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flash_attn_interface", raising=False)
    gpu(monkeypatch, 9)
    assert kernels.find_kernels(GPU) and kernels.find_kernels(GPU)
    assert opened == ["FA3"] and kernels.missing(GPU) is None


@pytest.mark.parametrize(("device", "major"), [("cuda", 8), ("cuda", 10), ("cpu", 9)])
def test_other_devices_are_left_alone(monkeypatch, opened, device, major):
    gpu(monkeypatch, major)
    assert not kernels.find_kernels(torch.device(device)) and kernels.missing(torch.device(device)) is None
    assert opened == []


def package(folder: Path, name: str) -> SimpleNamespace:
    (folder / name).mkdir(parents=True)
    return SimpleNamespace(origin=str(folder / name / "__init__.py"), submodule_search_locations=[str(folder / name)])


def test_the_library_inside_xformers_is_loaded_with_the_runtime_it_was_built_for(monkeypatch, opened, tmp_path):
    found = {name: package(tmp_path, name) for name in ("xformers", "nvidia")}
    library = tmp_path / "xformers" / "flash_attn_3" / "_C.so"
    runtime = tmp_path / "nvidia" / "cuda_runtime" / "lib" / "libcudart.so.12"
    for path in (library, runtime):
        path.parent.mkdir(parents=True)
        path.touch()
    loaded: list[str] = []
    monkeypatch.setattr(kernels, "find_spec", found.get)
    monkeypatch.setattr(kernels.ctypes, "CDLL", lambda path, mode: loaded.append(path))
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    gpu(monkeypatch, 9)
    assert kernels.find_kernels(GPU)
    assert loaded == [str(runtime), str(library)] and opened == ["FA3"]


def test_what_fails_is_said_and_nothing_is_changed(monkeypatch, opened, tmp_path):
    gpu(monkeypatch, 9)
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    assert not kernels.find_kernels(GPU)
    assert kernels.missing(GPU) == "neither xformers nor flash_attn_interface is installed"
    kernels._opened.cache_clear()
    library = tmp_path / "xformers" / "flash_attn_3" / "_C.so"
    found = {"xformers": package(tmp_path, "xformers")}
    library.parent.mkdir()
    library.write_text("no library")
    monkeypatch.setattr(kernels, "find_spec", found.get)
    assert not kernels.find_kernels(GPU)
    assert kernels.missing(GPU).startswith("OSError: Could not load this library")
    assert opened == []


def test_doctor_says_what_a_hopper_gpu_does_without(monkeypatch):
    gpu(monkeypatch, 9)
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    monkeypatch.setattr(machine, "gpus", lambda: [machine.Device("NVIDIA H200", 2**37, 2**36)])
    lines: list[str] = []
    environment(lines.append)
    assert any(
        "without FlashAttention 3" in line and "neither xformers nor" in line and "kineograph[hopper]" in line
        for line in lines
    )


# Which calls go there ----------------------------------------------------------------------------------------------


class OnGpu(torch.Tensor):
    """A tensor of the CPU that says otherwise."""

    @property
    def is_cuda(self) -> bool:
        return True


def given(tokens: int, keys: int | None = None, width: int = 16, dtype: torch.dtype = torch.bfloat16) -> list[OnGpu]:
    torch.manual_seed(0)
    lengths = (tokens, keys or tokens, keys or tokens)
    return [torch.randn(1, 1, length, width).to(dtype).as_subclass(OnGpu) for length in lengths]


@pytest.mark.parametrize(
    ("inputs", "call", "taken"),
    [
        (given(1024), {}, True),
        (given(1024), {"causal": True}, True),
        (given(1024, dtype=torch.float16), {}, True),
        (given(1023), {}, False),
        (given(1024, 64), {}, False),
        (given(1024, 2048), {"causal": True}, False),
        (given(1024, width=12), {}, False),
        (given(1024, dtype=torch.float32), {}, False),
        (given(1024), {"mask": torch.ones(1, 1, 1, 1024, dtype=torch.bool)}, False),
    ],
)
def test_long_sequences_in_half_precision_are_taken(monkeypatch, inputs, call, taken):
    asked: list[bool] = []

    def flash(q, k, v, dropout, causal):
        asked.append(causal)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal), None

    monkeypatch.setattr(attention, "_flash", flash)
    expected = attention.attend(*inputs, **call)
    assert asked == []  # the door is closed
    monkeypatch.setattr(kernels, "flash3", True)
    torch.testing.assert_close(attention.attend(*inputs, **call), expected)
    assert asked == ([call.get("causal", False)] if taken else [])


def test_dropout_goes_to_a_kernel_that_has_it(monkeypatch):
    monkeypatch.setattr(kernels, "flash3", True)
    monkeypatch.setattr(attention, "_flash", None)  # to be called never
    seen: list[bool] = []
    plain = torch.nn.functional.scaled_dot_product_attention

    def watched(*inputs, **named):
        seen.append(torch.backends.cuda.flash_sdp_enabled())
        return plain(*inputs, **named)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", watched)
    attention.attend(*given(1024), dropout=0.5)
    attention.attend(*given(32))
    assert seen == [False, True]
