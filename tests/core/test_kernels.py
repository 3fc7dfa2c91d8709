"""FlashAttention 3: found where it is installed, opened once, and never on other GPUs. The kernels themselves want an H100 or H200."""

from __future__ import annotations

import hashlib
import itertools
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import attention as doors
from typer.testing import CliRunner

from kineograph.cli import app
from kineograph.core import kernels
from kineograph.core.errors import InputError
from kineograph.core.safe_unpickle import sha256_of
from kineograph.doctor import machine
from kineograph.doctor.report import report_environment
from kineograph.nn import attention

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test begins and ends with a closed door."""
    monkeypatch.setattr(kernels, "flash3", False)
    kernels._activate.cache_clear()
    yield
    kernels._activate.cache_clear()


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
    assert kernels.enable_flash_attention_3(GPU) and kernels.enable_flash_attention_3(GPU)
    assert opened == ["FA3"] and kernels.explain_missing(GPU) is None


@pytest.mark.parametrize(("device", "major"), [("cuda", 8), ("cuda", 10), ("cpu", 9)])
def test_other_devices_are_left_alone(monkeypatch, opened, device, major):
    gpu(monkeypatch, major)
    assert (
        not kernels.enable_flash_attention_3(torch.device(device))
        and kernels.explain_missing(torch.device(device)) is None
    )
    assert opened == []


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Wheels that hold something in the place of both libraries, to which they are pinned; and an empty cache."""
    monkeypatch.setenv("KINEO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    made = []
    for kind in ("LIBRARY", "RUNTIME"):
        known = getattr(kernels, kind)
        made.append(tmp_path / f"{known.package.replace('-', '_')}-{known.version}-py3-none-any.whl")
        with zipfile.ZipFile(made[-1], "w") as wheel:
            wheel.writestr(f"some/{known.member}", f"no {kind}")
        sha256 = hashlib.sha256(f"no {kind}".encode()).hexdigest()
        monkeypatch.setattr(kernels, kind, replace(known, sha256=sha256, archive=sha256_of(made[-1])))
    return made


@pytest.mark.parametrize(("cuda", "names"), [("13.0", ["libcudart.so.12", "_C.so"]), ("12.8", ["_C.so"])])
def test_a_fetched_library_is_loaded_with_the_runtime_it_was_built_for(monkeypatch, opened, wheels, cuda, names):
    loaded: list[str] = []
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(kernels.ctypes, "CDLL", lambda path, mode: loaded.append(Path(path).name))
    monkeypatch.setattr(torch.ops, "load_library", lambda path: loaded.append(Path(path).name))
    gpu(monkeypatch, 9)
    assert not kernels.enable_flash_attention_3(GPU) and kernels.explain_missing(GPU) == "not fetched"
    kernels._activate.cache_clear()
    kernels.fetch_libraries(wheels, print)
    assert kernels.enable_flash_attention_3(GPU)
    assert loaded == names and opened == ["FA3"]


def test_what_fails_is_said_and_nothing_is_changed(monkeypatch, opened, wheels):
    gpu(monkeypatch, 9)
    library, _ = kernels.fetch_libraries(wheels, print)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert not kernels.enable_flash_attention_3(GPU)
    assert kernels.explain_missing(GPU).startswith("OSError: Could not load this library")
    kernels._activate.cache_clear()
    library.write_text("damaged")
    assert not kernels.enable_flash_attention_3(GPU)
    assert "another file, or damaged" in kernels.explain_missing(GPU)
    assert opened == []


def test_both_libraries_come_from_pip_once_and_again_when_damaged(monkeypatch, wheels):
    asked: list[str] = []

    def pip(command, **options):
        words = dict(itertools.pairwise(command))
        wanted = Path(words["--requirement"]).read_text()
        asked.append(wanted.split("==")[0])
        (wheel,) = (path for path in wheels if sha256_of(path) in wanted)
        Path(words["--dest"]).mkdir()
        shutil.copy(wheel, words["--dest"])
        return subprocess.CompletedProcess([], 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    result = CliRunner().invoke(app, ["weights", "get", "flash-attention-3"])
    assert result.exit_code == 0 and kernels.LIBRARY.sha256 in result.stdout
    library, _ = kernels.fetch_libraries([], print)
    assert asked == ["xformers", "nvidia-cuda-runtime-cu12"]
    assert [path.name for path in sorted(library.parent.iterdir())] == ["_C.so", "libcudart.so.12"]
    library.with_name("libcudart.so.12").unlink()
    assert kernels.describe_state() == "damaged"
    kernels.fetch_libraries([], print)
    assert len(asked) == 4 and kernels.describe_state() == kernels.LIBRARY.sha256[:12]


def test_what_cannot_be_fetched_leaves_what_was_there(monkeypatch, wheels, tmp_path):
    monkeypatch.setattr(
        subprocess, "run", lambda *a, **k: subprocess.CompletedProcess([], 1, "", "ERROR: No matching distribution\n")
    )
    with pytest.raises(InputError, match=r"xformers==0\.0\.34: ERROR: No matching distribution.*--from WHEEL"):
        kernels.fetch_libraries([], print)
    with pytest.raises(InputError, match="--from names no wheel of nvidia-cuda-runtime-cu12"):
        kernels.fetch_libraries(wheels[:1], print)
    with pytest.raises(InputError, match="does not exist"):
        kernels.fetch_libraries([tmp_path / "xformers.whl"], print)
    assert kernels.describe_state() == "–"
    kernels.fetch_libraries(wheels, print)
    with zipfile.ZipFile(wheels[0], "w") as wheel:
        wheel.writestr(kernels.LIBRARY.member, "another")
    with pytest.raises(InputError, match="SHA-256"):
        kernels.fetch_libraries(wheels, print)
    assert kernels.describe_state() == kernels.LIBRARY.sha256[:12]


def test_doctor_says_what_a_hopper_gpu_does_without(monkeypatch, wheels):
    gpu(monkeypatch, 9)
    monkeypatch.setattr(machine, "list_gpus", lambda: [machine.Device("NVIDIA H200", 2**37, 2**36)])
    lines: list[str] = []
    report_environment(lines.append)
    assert any("no FlashAttention 3" in line and "kineo weights get flash-attention-3" in line for line in lines)


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
