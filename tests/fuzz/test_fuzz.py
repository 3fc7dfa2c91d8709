"""A slice of `make fuzz` with a fixed seed, and the cases that were found."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.fuzz import harness
from tests.fuzz.__main__ import fuzz
from tests.fuzz.harness import run_case
from tests.fuzz.targets import TARGETS, warm_up

FOUND = [
    ("configs", 1, 17),
    ("runs", 2, 27),
    ("statistics", 1, 23),
    ("caches", 45, 2),
    ("prompts", 6, 40),
    ("pages", 4, 45),
    ("stored", 5, 55),
]


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    warm_up()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_minute_of_the_fuzzer_finds_nothing(seed):
    count, findings = fuzz(list(TARGETS), [seed], seconds=60)
    assert not findings, "\n".join(map(str, findings))
    assert count > len(TARGETS)


@pytest.mark.parametrize(("name", "seed", "case"), FOUND)
def test_what_was_found_stays_repaired(name, seed, case):
    assert run_case(name, TARGETS[name], seed, case) is None


def _raise(rng, folder):
    raise KeyError("x")


def _hang(rng, folder):
    time.sleep(60)


def _write(rng, folder):
    (folder.parent / "stranger").write_text("x")


def _write_two_above(rng, folder):
    Path("../../stranger").write_text("x")


def _write_far_away(rng, folder):
    with suppress(OSError):
        Path("/no-such-folder/stranger").write_text("x")


def _spin(rng, folder):
    while True:
        pass


def _spawn(rng, folder):
    subprocess.run(["true"], check=True)


def _run(rng, folder):
    os.system("touch PWNED")


def _fill(rng, folder):
    bytearray(os.urandom(1 << 20)) * 400


def _die(rng, folder):
    os.kill(os.getpid(), signal.SIGKILL)


def _pass(rng, folder):
    Path("inside.txt").write_text("x")


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (_raise, "KeyError"),
        (_hang, "longer than 1 s"),
        (_spin, "longer than 1 s"),
        (_write, "outside"),
        (_write_two_above, "outside"),
        (_write_far_away, "outside"),
        (_spawn, "ran a command"),
        (_run, "ran a command"),
        (_fill, "GiB"),
        (_die, "SIGKILL"),
        (_pass, None),
    ],
)
def test_the_harness_sees_it(target, reason, monkeypatch):
    monkeypatch.setattr(harness, "MEMORY", 200 * 2**20)
    finding = run_case("self", target, 0, 0, seconds=1 if target in (_hang, _spin) else 30)
    assert finding is None if reason is None else finding is not None and reason in finding.reason
