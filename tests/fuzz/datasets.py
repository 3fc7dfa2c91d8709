"""Fuzz targets: datasets of every form, prompts, reference statistics, and downloads that make a dataset."""

from __future__ import annotations

import io
import json
import tarfile
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import unquote

import numpy as np
from PIL import Image

from kineograph.cli import main
from kineograph.core.errors import Unreadable
from kineograph.data.check import check_folder
from kineograph.data.open_source import open_source, parse_data_config
from kineograph.data.remote_arrays import RemoteFolder
from kineograph.evaluate.saved_statistics import read_statistics
from kineograph.sample.prompt_file import read_prompts
from tests.fuzz.corpora import make_media, make_npy, make_npz, make_parquet, make_sounds
from tests.fuzz.mutations import damage_bytes, damage_tree


def _open_and_read(tree: dict[str, Any]) -> None:
    """Open a source as training does, and read some items."""
    source = open_source(parse_data_config({"validation": 0, "max_unreadable": 1.0, **tree}), "train", 0)
    for index in range(min(3, len(source))):
        source.caption(index)
        with suppress(Unreadable):
            source.read(index, np.random.default_rng(0))


def arrays(rng: Random, folder: Path) -> None:
    """Clips in one array, with labels, captions and a template."""
    clips = rng.choice(
        [np.zeros((4, 3, 8, 8), np.uint8), np.zeros((4, 8, 8, 3), np.float32), np.zeros((4, 8, 8), "u2")]
    )
    name = rng.choice(["videos.npy", "videos.npz", "packed.npz", "objects.npy"])
    data = {
        "videos.npy": lambda: make_npy(clips),
        "videos.npz": lambda: make_npz(videos=clips, labels=np.arange(4)),
        "packed.npz": lambda: make_npz(True, videos=clips),
        "objects.npy": lambda: make_npy(np.array([{}], object)),
    }[name]()
    (folder / name).write_bytes(damage_bytes(rng, data) if rng.random() < 0.7 else data)
    labels = rng.choice([np.arange(4), np.arange(8).reshape(4, 2), np.zeros(4), np.array(["a"] * 4)])
    (folder / "labels.npy").write_bytes(damage_bytes(rng, make_npy(labels)) if rng.random() < 0.3 else make_npy(labels))
    if rng.random() < 0.5:
        lines = "\n".join(json.dumps(damage_tree(rng, {"caption": "a b"})) for _ in range(4))
        (folder / "captions.jsonl").write_bytes(damage_bytes(rng, lines.encode()))
    templates = [
        None,
        "{label}",
        "a {label[0]} {text}",
        "{label[9]}",
        "{label.__class__}",
        "{text:>999999999}",
        "{0}",
        "{",
    ]
    keys = {
        "source": "memmap",
        "folder": str(folder / name),
        "size": 8,
        "caption": rng.choice([*templates, "{label:999999999}"]),
    }
    _open_and_read(damage_tree(rng, keys) if rng.random() < 0.3 else keys)


def embeddings(rng: Random, folder: Path) -> None:
    """clip-retrieval's folders: .npy files and Parquet."""
    files = {
        "img/img_emb_0.npy": make_npy(np.ones((3, 4), np.float16)),
        "text/text_emb_0.npy": make_npy(np.ones((3, 4))),
    }
    files["meta/metadata_0.parquet"] = make_parquet(("url", "caption"), 3)
    for name, data in files.items():
        (folder / name).parent.mkdir()
        (folder / name).write_bytes(damage_bytes(rng, data) if rng.random() < 0.5 else data)
    keys = {"image_embeddings": folder / "img", "text_embeddings": folder / "text", "metadata": folder / "meta"}
    _open_and_read({"source": "clip_retrieval", **{key: str(path) for key, path in keys.items()}})


def layouts(rng: Random, folder: Path) -> None:
    """Captions of a folder in all their forms, masks, sketches, sound, and mixes of such folders."""
    pictures, sounds = make_media(), make_sounds()
    for number in range(3):
        (folder / f"{number}.png").write_bytes(pictures["still.png"])
        (folder / f"{number}-mask.png").write_bytes(
            damage_bytes(rng, pictures["still.png"]) if rng.random() < 0.5 else pictures[rng.choice(sorted(pictures))]
        )
        (folder / f"{number}{rng.choice(['.txt', '.caption'])}").write_bytes(damage_bytes(rng, b"a cat\nb"))
    clip = damage_bytes(rng, sounds["clip.mp4"]) if rng.random() < 0.5 else sounds["clip.mp4"]
    (folder / "videos").mkdir()
    (folder / "videos" / "c.mp4").write_bytes(clip)
    if rng.random() < 0.7:
        sound = sounds[rng.choice(["mono.wav", "stereo.wav", "wide.wav"])]
        (folder / "videos" / "c.wav").write_bytes(damage_bytes(rng, sound))
    row: dict[str, Any] = {
        "file_name": "videos/c.mp4",
        "clips": [{"start": 0, "end": 0.5, "text": "a"}, {"start": 0.5}],
    }
    form = rng.choice(["metadata.jsonl", "more.jsonl", "metadata.csv", "metadata.parquet"])
    if form == "metadata.parquet":
        (folder / form).write_bytes(damage_bytes(rng, make_parquet(("file_name", "text"), 3)))
    elif form == "metadata.csv":
        (folder / form).write_bytes(damage_bytes(rng, b"file_name,text,start,end\n0.png,a b,,\n1.png,c,0,1\n"))
    else:
        (folder / form).write_text("\n".join(json.dumps(damage_tree(rng, row)) for _ in range(2)))
    (folder / "list").mkdir()
    (folder / "list" / "videos.txt").write_bytes(damage_bytes(rng, b"../0.png\n../1.png"))
    (folder / "list" / "prompts.txt").write_bytes(damage_bytes(rng, b"a\nb"))
    tree: dict[str, Any] = {"source": "folder", "folder": str(folder), "size": 8, "fps": 8.0, "uncaptioned": "empty"}
    kind = rng.randrange(4)
    if kind == 0:
        tree |= {"masks": True}
    elif kind == 1:
        tree |= {"frames": 4, "sample_rate": rng.choice([8, 8000, 48_000])}
    elif kind == 2:
        parts = {"a": {"folder": str(folder), "repeats": 2}, "b": {"folder": str(folder), "caption": "x {text}"}}
        tree = {"source": "mix", "size": 8, "uncaptioned": "empty", "mix": damage_tree(rng, parts)}
    else:
        check_folder(folder)
    _open_and_read(tree)


def prompts(rng: Random, folder: Path) -> None:
    """Files of prompts, and the pictures that they name."""
    name, data = rng.choice(sorted(make_media().items()))
    (folder / name).write_bytes(damage_bytes(rng, data) if rng.random() < 0.5 else data)
    rows = [{"prompt": "a", "image": name, "seed": 3, "scene": number + 1} for number in range(3)]
    lines = "\n".join(json.dumps(damage_tree(rng, row)) for row in rows)
    path = folder / rng.choice(["prompts.txt", "prompts.jsonl"])
    text = lines if path.suffix == ".jsonl" else f"# a\na@@{name}\n\nb"
    path.write_bytes(damage_bytes(rng, text.encode()) if rng.random() < 0.6 else text.encode())
    read_prompts(path)


def statistics(rng: Random, folder: Path) -> None:
    """Saved statistics: .npz files, also with pickles and odd shapes."""
    square = np.eye(4)
    arrays: dict[str, Any] = {
        "mu": np.zeros(4), "sigma": square, "feats": np.zeros((3, 4), np.float32), "fvd_mu": np.zeros(4), "fvd_sigma": square,
        "protocol": np.array(json.dumps(damage_tree(rng, {"fid": {"count": 3, "extractor": "x"}}))),
    }  # fmt: skip
    odd = [
        np.array([{}], object),
        np.array("x"),
        np.zeros((0, 4)),
        np.full(4, np.nan),
        np.zeros((4, 4), complex),
        np.zeros((2,) * 9),
    ]
    if rng.random() < 0.5:
        arrays[rng.choice(sorted(arrays))] = rng.choice(odd)
    data = make_npz(rng.random() < 0.5, **arrays)
    path = folder / "photos.npz"
    path.write_bytes(damage_bytes(rng, data) if rng.random() < 0.7 else data)
    read_statistics(path)


def sets(rng: Random, folder: Path) -> None:
    """`kineo metrics` on folders."""
    for name in ("a", "b"):
        (folder / name).mkdir()
        for number in range(3):
            form, data = rng.choice(sorted(make_media().items()))
            file = folder / name / f"{number}{Path(form).suffix}"
            file.write_bytes(damage_bytes(rng, data) if rng.random() < 0.4 else data)
    (folder / "a" / "again").symlink_to(folder / rng.choice(["a", "b"]), target_is_directory=True)
    size = ["--size", rng.choice(["8", "8x9", "16"])] if rng.random() < 0.5 else []
    main(["metrics", "a", "b", "--metrics", "paired", *size])


def archives(rng: Random, folder: Path) -> None:
    """`kineo data make emoji --from`: an archive that is not the published one."""
    small = io.BytesIO()
    Image.new("RGBA", (4, 4)).save(small, "PNG")
    names = json.dumps(
        [{"name": "A", "short_name": "a", "subcategory": "../../x", "image": "1.png", "has_img_google": True}]
    )
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        files = {"package/emoji.json": names.encode(), "package/LICENSE": b"x", "../../PWNED": b"x", "/PWNED": b"x"}
        for name, data in (files | {"package/img/google/64/1.png": small.getvalue()}).items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            info.type = rng.choice([tarfile.REGTYPE] * 6 + [tarfile.SYMTYPE, tarfile.FIFOTYPE, tarfile.GNUTYPE_SPARSE])
            info.linkname = "/etc/passwd"
            tar.addfile(info, io.BytesIO(data))
    path = folder / "package.tgz"
    path.write_bytes(damage_bytes(rng, buffer.getvalue()) if rng.random() < 0.7 else buffer.getvalue())
    main(["data", "make", "emoji", "--from", str(path), "--out", "emoji"])


def listings(rng: Random, folder: Path) -> None:
    """Servers of embeddings that lie."""
    array = make_npy(np.ones((3, 4), np.float32))
    names = [
        "img_emb_0000.npy",
        rng.choice(["../../PWNED.npy", "img_emb_0001.npy", "x/../y.npy", "a%2f..%2fb_0003.npy"]),
    ]

    class Lies(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_listing = unquote(self.path).endswith("/")
            page = "".join(f'<a href="{name}">{name}</a>' for name in names).encode()
            content = page if is_listing else damage_bytes(rng, array) if rng.random() < 0.3 else array
            lie = rng.randrange(30)
            self.send_response(rng.choice([204, 206, 302, 404, 500]) if lie == 0 else 200)
            self.send_header("Content-Length", str(rng.choice([0, 1, 10**12]) if lie == 1 else len(content)))
            if lie == 2:
                self.send_header("Content-Encoding", "gzip")
            if lie == 0:
                self.send_header("Location", rng.choice(["/", self.path, "file:///etc/passwd"]))
            self.end_headers()
            if self.command == "GET":
                with suppress(OSError):
                    self.wfile.write(content[: rng.randrange(len(content) + 1)] if lie == 3 else content)

        do_HEAD = do_GET

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Lies)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    remote = RemoteFolder(f"http://127.0.0.1:{server.server_address[1]}/e/", "data.image_embeddings")
    for each in remote.open_arrays(list(remote.files)):
        _ = each.values
