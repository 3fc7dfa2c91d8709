"""Files at URLs: waits have an end, and errors are one line with a remedy."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from kineograph.core.remote_files import await_answer, describe_failure, download


def test_a_server_that_never_answers_is_given_up() -> None:
    with pytest.raises(TimeoutError, match=r"no answer for 0\.05 s"):
        await_answer(lambda: time.sleep(5), seconds=0.05)


def test_a_slow_download_that_goes_on_is_not_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        def get_file(self, remote: str, path: str, callback: Any = None) -> None:
            for part in range(6):
                with open(path, "ab") as file:
                    file.write(b"x")
                time.sleep(0.05 if part < 5 else stall)

    def ask(action: Any, progress: Any) -> Any:
        return await_answer(action, progress, seconds=0.12)

    monkeypatch.setattr("kineograph.core.remote_files.await_answer", ask)
    stall = 0.0
    download(Slow(), "there", str(tmp_path / "whole"))
    assert (tmp_path / "whole").read_bytes() == b"x" * 6
    stall = 5.0
    with pytest.raises(TimeoutError, match="no answer"):
        download(Slow(), "there", str(tmp_path / "part"))


def test_errors_of_the_action_are_its_own() -> None:
    def fail() -> None:
        raise TimeoutError("theirs")

    with pytest.raises(TimeoutError, match="no answer"):
        await_answer(fail)
    with pytest.raises(ZeroDivisionError):
        await_answer(lambda: 1 / 0)
    assert await_answer(lambda: 3) == 3


def test_a_missing_file_is_told_from_refused_credentials() -> None:
    assert describe_failure("s3://b/x", FileNotFoundError("b/x")) == "s3://b/x was not found: check the address"
    refused = describe_failure("s3://b/x", PermissionError("Access\n Denied"))
    assert refused.startswith("s3://b/x cannot be read (Access Denied): check the address and your credentials")
    assert "not installed (Install s3fs)" in describe_failure("s3://b/x", ImportError("Install s3fs"))
