"""What holds of the project as a whole: import contracts, cheap imports, pins, the two commands."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.subprocesses import python_path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
HEAVY = (
    "torch",
    "transformers",
    "av",
    "vector_quantize_pytorch",
    "wandb",
    "matplotlib",
    "sklearn",
    "tensorboard",
    "webdataset",
)


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-c",
        "import sys; from importlinter.cli import lint_imports_command as f; f()",
        "--no-logo",
        "--no-cache",
    ]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), python_path()])}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=env)


def copy_of_package(folder: Path) -> Path:
    shutil.copy(ROOT / "pyproject.toml", folder)
    for source in (ROOT / "kineograph").rglob("*.py"):
        target = folder / source.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
    return folder / "kineograph"


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("core/extra.py", "import kineograph.nn", "Models"),
        ("nn/extra.py", "import kineograph.codec", "Models"),
        ("train/extra.py", "from kineograph.data import open_source", "Services"),
        ("media/extra.py", "def late():\n    from kineograph import text", "never learn what a model is"),
        ("family/first.py", "from kineograph.train import config", "never learn how they are trained"),
        ("family/first.py", "from kineograph.family import second", "Families"),
    ],
)
def test_contracts_catch_a_wrong_import(tmp_path, module, line, contract):
    package = copy_of_package(tmp_path)
    (package / "family" / "second.py").write_text("")
    (package / module).write_text(line + "\n")
    result = lint_imports(tmp_path)
    assert result.returncode == 1
    joined = " ".join(result.stdout.split())
    assert re.search(rf"{contract}[^:]*(: [^:]*)?BROKEN", joined), joined


def test_contracts_hold():
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout


def loaded_by(code: str) -> set[str]:
    output = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(output.stdout.split())


@pytest.mark.parametrize("code", ["import kineograph", "import kineograph.cli"])
def test_importing_is_cheap(code):
    assert loaded_by(code).isdisjoint(HEAVY)


def test_heavy_imports_of_media_and_trackers_are_late():
    loaded = loaded_by("import kineograph.media.clips, kineograph.media.curves, kineograph.train.trackers")
    assert loaded.isdisjoint(set(HEAVY) - {"torch"})


def test_version_is_said_once():
    import kineograph

    assert kineograph.__version__ == PROJECT["project"]["version"]
    assert f"## {kineograph.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def _names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=!~ \[;]", line)[0].lower().replace("_", "-") for line in requirements}


def test_constraints_pin_everything_that_make_installs():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in pins), (
        "a plain version each: no local suffix, no address"
    )
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = _names([*PROJECT["project"]["dependencies"], *extras["dev"], *extras["wandb"], *extras["metrics"]])
    assert wanted <= _names(pins)


def test_what_is_imported_is_declared_and_what_is_declared_is_imported():
    imported: set[str] = set()
    for path in (ROOT / "kineograph").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.partition(".")[0])
    # aiohttp comes with fsspec[http].
    names = {"PIL": "pillow", "yaml": "pyyaml", "aiohttp": "fsspec", "annotated_types": "annotated-types"}
    third_party = imported - set(sys.stdlib_module_names) - {"kineograph"}
    extras = PROJECT["project"]["optional-dependencies"]
    shipped = [line for name, lines in extras.items() if name != "dev" for line in lines]
    declared = _names([*PROJECT["project"]["dependencies"], *shipped])
    # Imported by name (wandb), or read as files without an import (the digits of scikit-learn).
    assert {names.get(name, name) for name in third_party} == declared - {"wandb", "scikit-learn"}


def test_package_data_is_declared():
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["kineograph"]
    package = ROOT / "kineograph"
    known = {path for pattern in patterns for path in package.glob(pattern)}
    strays = {path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")} - known
    assert not strays, "declare these in [tool.setuptools.package-data]"


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_make_refuses_an_old_python_with_a_remedy(tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    old = tmp_path / "python3.8"
    old.write_text('#!/bin/sh\n[ "$1" = "--version" ] && { echo "Python 3.8.1"; exit 0; }\nexit 1\n')
    old.chmod(0o755)
    result = subprocess.run(["make", "demo", f"PYTHON={old}"], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 2
    assert "needs Python 3.11 or newer" in result.stderr
    assert "Python 3.8.1" in result.stderr
    assert "make demo PYTHON=" in result.stderr
    assert not (tmp_path / ".venv").exists()


def test_ci_runs_what_people_run():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text(encoding="utf-8").rstrip().endswith("make test")


def test_nothing_is_asked_at_a_keyboard():
    """Runs have none: of many processes each would wait for an answer of its own."""
    asking = {"input", "confirm", "prompt", "getpass"}
    for path in sorted((ROOT / "kineograph").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called = node.func
                name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", None)
                assert name not in asking, f"{path}:{node.lineno} asks"


@pytest.mark.parametrize(
    ("chosen", "spins"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_openmp_threads_spin_briefly_unless_the_user_chose(chosen, spins):
    env = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    code = "import kineograph, os, sys; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**env, "PYTHONPATH": python_path(), **chosen},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [spins, "False"]
