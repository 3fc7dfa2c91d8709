"""The run folder: its paths, its lock between processes, and files that are never half written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kineograph.core import run_folder
from kineograph.core.errors import InputError, RunInUse
from kineograph.core.run_folder import RunFolder, write_atomic, write_json

LOOK = """
import fcntl, sys, time
with open(sys.argv[1], "r+") as file:
    fcntl.lockf(file, fcntl.LOCK_EX)
    print("held", flush=True)
    time.sleep(0.05)
"""
HOLD = """
import sys, time
from kineograph.core.run_folder import RunFolder
with RunFolder(sys.argv[1]).lock():
    print("held", flush=True)
    time.sleep(60)
"""
TRY = """
import sys
from kineograph.core.errors import KineoError
from kineograph.core.run_folder import RunFolder
try:
    with RunFolder(sys.argv[1]).lock():
        print("free")
except KineoError as error:
    print(error)
    sys.exit(error.exit_code)
"""


@pytest.fixture
def holder(tmp_path: Path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def other_process(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", TRY, str(path)], capture_output=True, text=True, check=False)


def test_a_live_process_keeps_others_out(tmp_path: Path, holder: subprocess.Popen) -> None:
    folder = RunFolder(tmp_path)
    assert folder.in_use()
    with pytest.raises(RunInUse, match=f"process {holder.pid} on ") as error, folder.lock():
        pass
    assert error.value.exit_code == 3
    refused = other_process(tmp_path)
    assert refused.returncode == 3
    assert f"process {holder.pid}" in refused.stdout


def test_the_lock_of_a_killed_process_is_not_stale(tmp_path: Path, holder: subprocess.Popen) -> None:
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert (tmp_path / ".lock").read_text().startswith(f"process {holder.pid}")  # the file is still there
    assert not RunFolder(tmp_path).in_use()
    with RunFolder(tmp_path).lock():
        pass


def test_another_process_that_looks_whether_the_run_is_in_use_keeps_nobody_out(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    command = [sys.executable, "-c", LOOK, str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as looking:
        assert looking.stdout is not None and looking.stdout.readline() == "held\n"
        with RunFolder(tmp_path).lock():
            pass


def test_asking_does_not_let_go(tmp_path: Path) -> None:
    """A record lock is lost when its process closes the file anywhere: neither a question nor a second try may do that."""
    folder = RunFolder(tmp_path)
    with folder.lock():
        assert RunFolder(tmp_path).in_use()
        with pytest.raises(RunInUse, match="in use by this process"), RunFolder(tmp_path).lock():
            pass
        assert other_process(tmp_path).returncode == 3
    assert other_process(tmp_path).returncode == 0
    assert not folder.in_use()
    with folder.lock():
        pass


def test_an_error_inside_gives_the_lock_back(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with pytest.raises(ZeroDivisionError), folder.lock():
        raise ZeroDivisionError
    with folder.lock():
        pass


def test_only_a_folder_with_a_config_is_a_run(tmp_path: Path) -> None:
    assert not RunFolder(tmp_path).exists()
    with pytest.raises(InputError, match="not a run folder"):
        RunFolder.existing(tmp_path)
    (tmp_path / "config.yaml").write_text("stages: {a: {task: muse}}")
    assert RunFolder.existing(tmp_path).config() == {"stages": {"a": {"task": "muse"}}}


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "config.yaml"
    write_atomic(path, "old")
    monkeypatch.setattr(run_folder.os, "replace", lambda *names: (_ for _ in ()).throw(OSError("no")))
    with pytest.raises(OSError, match="no"):
        write_atomic(path, "new")
    assert path.read_text() == "old"


def test_what_is_written_is_whole(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"ü": [1]})
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == '{\n  "ü": [\n    1\n  ]\n}\n'
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.timeout(10)
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_planted_lock_is_refused_and_its_target_stays(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "precious"
    target.write_text("keep me")
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    lock = run.path / ".lock"
    {"link": lambda: lock.symlink_to(target), "pipe": lambda: os.mkfifo(lock), "folder": lock.mkdir}[kind]()
    assert not run.in_use()
    with pytest.raises(InputError, match="cannot be written to"), run.lock():
        pass
    assert target.read_text() == "keep me"
