"""`kineo data make emoji`, from a package of three pictures: no test needs a network."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kineograph.core.errors import InputError, RunFailed
from kineograph.data.check import check_folder
from kineograph.data.folder import Folder, FolderConfig
from kineograph.run import emoji_writer
from kineograph.run.dataset_writer import write_dataset


def picture(red: int) -> bytes:
    image = Image.new("RGBA", (64, 64), (red, 0, 0, 255))
    image.paste((0, 0, 0, 0), (0, 0, 32, 64))  # the left half shows the background
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def entry(name: str, short: str, group: str, image: str, **keys: object) -> dict:
    return {
        "name": name, "short_name": short, "subcategory": group, "image": image, "has_img_google": True, **keys
    }  # fmt: skip


TONES = {
    "1F3FB-1F3FF": {"image": "b-2.png", "has_img_google": True},
    "1F3FC": {"image": "c.png", "has_img_google": False},
}
FILES = {
    "LICENSE": b"do as you like",
    "emoji.json": json.dumps(
        [
            entry("DOG FACE", "dog", "animal-mammal", "a.png"),
            entry("DANCERS", "dancers", "person-activity", "b.png", skin_variations=TONES),
        ]
    ).encode(),
    "img/google/64/a.png": picture(200),
    "img/google/64/b.png": picture(100),
    "img/google/64/b-2.png": picture(50),
}


def write_package(path: Path, files: dict[str, bytes] = FILES) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in {**files, "img/google/sheet.png": b"not used"}.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


@pytest.fixture(autouse=True)
def published(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emoji_writer, "SHA256", emoji_writer._hash_files(FILES))


def test_pictures_on_white_with_their_names(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = write_dataset("emoji", tmp_path / "emoji", sources=[write_package(tmp_path / "package.tgz")])
    assert "3 pictures of 2 emoji" in (said := capsys.readouterr().out)
    assert "MIT" in said and "Apache 2.0" in said
    assert (out / "LICENSE").read_text().endswith("do as you like")
    captions = {path.relative_to(out).as_posix(): path.read_text().strip() for path in out.rglob("*.txt")}
    assert captions == {
        "animal-mammal/dog/a.txt": "dog face",
        "person-activity/dancers/b.txt": "dancers",
        "person-activity/dancers/b-2.txt": "dancers, light and dark skin tone",
    }
    with Image.open(out / "animal-mammal/dog/a.png") as image:
        assert image.getpixel((0, 0)) == (255, 255, 255)
        assert image.getpixel((63, 0)) == (200, 0, 0)
    assert check_folder(out).problems == []
    source = Folder.open(FolderConfig(folder=str(out), size=64, validation=0), "train", 0)
    assert len(source) == 3
    assert source.read(0, np.random.default_rng(0)).caption in captions.values()


def test_an_unpacked_folder_is_the_same_package(tmp_path: Path) -> None:
    for name, content in FILES.items():
        (tmp_path / "package" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "package" / name).write_bytes(content)
    out = write_dataset("emoji", tmp_path / "emoji", sources=[tmp_path / "package"])
    assert len(list(out.rglob("*.png"))) == 3


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({**FILES, "img/google/64/a.png": picture(201)}, "is not emoji-datasource-google"),
        ({**FILES, "img/google/64/z.png": picture(1)}, "is not emoji-datasource-google"),
        ({"LICENSE": b""}, "holds no emoji.json"),
        ({**FILES, "emoji.json": b" " * (9 << 20)}, "larger than any file"),
    ],
)
def test_another_package_is_refused_and_nothing_is_written(tmp_path: Path, files: dict, words: str) -> None:
    with pytest.raises(InputError, match=words):
        write_dataset("emoji", tmp_path / "emoji", sources=[write_package(tmp_path / "package.tgz", files)])
    assert not (tmp_path / "emoji").exists()


def test_files_that_are_no_archive_are_refused(tmp_path: Path) -> None:
    (tmp_path / "cut.tgz").write_bytes(write_package(tmp_path / "whole.tgz").read_bytes()[:-200])
    (tmp_path / "text.tgz").write_text("hello")
    (tmp_path / "empty").mkdir()
    for name in ("cut.tgz", "text.tgz", "empty", "nowhere"):
        with pytest.raises(InputError, match="--from"):
            write_dataset("emoji", tmp_path / "emoji", sources=[tmp_path / name])
    assert not (tmp_path / "emoji").exists()


def install_npm(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    folder.mkdir()
    (folder / "npm").write_text(f"#!/bin/sh\n{script}\n")
    os.chmod(folder / "npm", 0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_npm_downloads_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = write_package(tmp_path / "package.tgz")
    install_npm(tmp_path / "bin", monkeypatch, f'echo "$@" > {tmp_path}/asked; cp {package} .')
    out = write_dataset("emoji", tmp_path / "emoji")
    assert len(list(out.rglob("*.png"))) == 3
    assert (tmp_path / "asked").read_text().split()[:3] == [
        "pack",
        "emoji-datasource-google@16.0.0",
        "--ignore-scripts",
    ]


def test_without_a_network_or_npm_the_message_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_npm(tmp_path / "bin", monkeypatch, "echo 'npm error network' >&2; exit 7")
    with pytest.raises(RunFailed, match=r"exit code 7: npm error network.*--from"):
        write_dataset("emoji", tmp_path / "emoji")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(InputError, match=r"npm.* is not installed.*--from"):
        write_dataset("emoji", tmp_path / "emoji")
    assert not (tmp_path / "emoji").exists()


def test_options_of_other_sets_are_refused(tmp_path: Path) -> None:
    package = [write_package(tmp_path / "package.tgz")]
    for arguments in ({"count": 3}, {"as_": "gif"}, {"settings": ["size=32"]}, {"split": "test"}):
        with pytest.raises(InputError, match="written all"):
            write_dataset("emoji", tmp_path / "emoji", sources=package, **arguments)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="--from once"):
        write_dataset("emoji", tmp_path / "emoji", sources=package * 2)
