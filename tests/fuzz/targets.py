"""What is fuzzed: one function a kind of input. A KineoError or Unreadable is the right answer; any other exception is a finding."""

from __future__ import annotations

import functools
import gzip
import importlib.util
import io
import json
import lzma
import pkgutil
import tarfile
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any

import click
import numpy as np
import torch
import typer
import yaml
from safetensors.torch import save

import kineograph
from kineograph.cache.pack import Pack, PackWriter
from kineograph.cache.store import PackIndex
from kineograph.cli import app, main
from kineograph.core.config import flatten
from kineograph.core.config_file import load_file
from kineograph.core.errors import Unreadable
from kineograph.core.run_folder import RunFolder
from kineograph.core.weight_files import open_weights
from kineograph.data.captions import find_captions
from kineograph.data.check import check_folder
from kineograph.data.decode import decode_media, probe_media
from kineograph.data.media_config import DecodeOptions
from kineograph.data.open_source import open_source, parse_data_config
from kineograph.data.transforms import ResizeCrop
from kineograph.evaluate.compare import compare
from kineograph.run.layers import PRESETS, preset_names, read_config
from kineograph.run.listing import print_runs
from kineograph.run.plan import make_plan, resolve_run
from kineograph.run.resume_from import fetch_checkpoints
from kineograph.stage.load import StageLoader, choose_sampling_stage
from kineograph.train import checkpoint
from tests.data.tar_shards import item, write
from tests.fuzz import datasets, projects
from tests.fuzz.corpora import make_media, make_sounds
from tests.fuzz.mutations import NUMBERS, STRINGS, damage_bytes, damage_tree, value

STORED = Path(__file__).parents[1] / "fixtures" / "runs"
STORED_RUNS = sorted(path.name.partition(".")[0] for path in STORED.glob("*.tar.xz"))

# Configs --------------------------------------------------------------------------------------------------------------


def configs(rng: Random, folder: Path) -> None:
    """Presets with hostile overrides."""
    name = rng.choice(_names())
    keys = list(flatten(_preset(name)))
    overrides = [
        f"{rng.choice(keys)}={yaml.safe_dump(value(rng), default_flow_style=True).strip()}"
        for _ in range(rng.randrange(1, 4))
    ]
    resolve_run([name, *(text.removesuffix("\n...").replace("\n", " ") for text in overrides)])


def _names() -> list[str]:
    """Presets that need no data of one's own."""
    return [name for name in preset_names() if name.endswith("-tiny") and not name.startswith(("photos", "clips"))]


@functools.cache
def _preset(name: str) -> dict[str, Any]:
    return make_plan(read_config([name])).tree()


def texts(rng: Random, folder: Path) -> None:
    """YAML and JSON files: a preset's bytes, or its tree, damaged."""
    source = PRESETS / f"{rng.choice(_names())}.yaml"
    suffix = rng.choice([".yaml", ".json"])
    path = folder / f"a{suffix}"
    tree = _preset(source.stem)
    if rng.random() < 0.5:
        tree = damage_tree(rng, tree)
    text = json.dumps(tree) if suffix == ".json" else yaml.safe_dump(tree, allow_unicode=True, sort_keys=False)
    path.write_bytes(
        damage_bytes(rng, text.encode("utf-8", "surrogatepass"))
        if rng.random() < 0.7
        else text.encode("utf-8", "surrogatepass")
    )
    make_plan(read_config([str(path)]))


# What each command takes in the order of its help; "run" is a stored run, "pictures" a folder.
GOOD_WORDS: dict[str, list[str]] = {
    "train": ["vqgan-tiny", "--dry-run"],
    "sample": ["run", "a 3 moves left"],
    "story": ["run", "scenes.txt"],
    "evaluate": ["run", "--samples", "2"],
    "compare": ["run"],
    "cache": ["run"],
    "export": ["run", "out", "--to", "safetensors"],
    "import": ["run", "--from", "diffusers"],
    "runs": ["."],
    "presets": ["vqgan-tiny"],
    "doctor": ["vqgan-tiny"],
    "metrics": ["pictures", "pictures"],
    "report": ["run"],
    "data check": ["pictures"],
    "data show": ["pictures", "size=8"],
    "data make": ["moving-digits", "--out", "made", "--count", "2"],
}
ENDLESS = ("--count", "--samples")  # a million samples are allowed, and take their time


@functools.cache
def _commands() -> dict[str, list[tuple[str, bool]]]:
    """Every command of the command line, with its options and whether they are flags."""
    found = {}

    def walk(words: str, command: click.Command) -> None:
        if isinstance(command, click.Group):
            for name, part in command.commands.items():
                walk(f"{words} {name}".strip(), part)
        else:
            options = [option for option in command.params if isinstance(option, click.Option)]
            found[words] = [(option.opts[0], option.is_flag) for option in options]

    walk("", typer.main.get_command(app))
    return {words: options for words, options in found.items() if words != "studio"}  # it serves until it is stopped


@functools.cache
def _stored_run(name: str) -> bytes:
    return lzma.decompress((STORED / f"{name}.tar.xz").read_bytes())


def _unpack_run(rng: Random, folder: Path) -> Path:
    """A small trained run of some family."""
    name = rng.choice(STORED_RUNS)
    with tarfile.open(fileobj=io.BytesIO(_stored_run(name))) as archive:
        archive.extractall(folder, filter="data")
    return (folder / name).rename(folder / "run")


def arguments(rng: Random, folder: Path) -> None:
    """Every command, with words that nobody types."""
    (folder / "scenes.txt").write_text("a 3 moves left\na 3 moves up\n")
    (folder / "pictures").mkdir()
    (folder / "pictures" / "a.png").write_bytes(make_media()["still.png"])
    command = rng.choice(list(_commands()))
    words = [*STRINGS, *map(str, NUMBERS), "scenes.txt", ".", "train.steps=x", "a=b", "no-such-preset", "last", "8x8"]
    words = [word for word in words if word not in ("/", "~")]
    given = [rng.choice(words) for _ in range(rng.randrange(3))]
    if command in GOOD_WORDS and rng.random() < 0.7:
        given = [*GOOD_WORDS[command], *given[1:]]
        if "run" in given:
            _unpack_run(rng, folder)
    for option, is_flag in rng.sample(_commands()[command], rng.randrange(min(4, len(_commands()[command]) + 1))):
        word = rng.choice(words)
        if is_flag:
            given.append(option)
        elif option not in ENDLESS or not word.isdigit() or int(word) < 9:
            given += [option, word]
    main([*command.split(), *given])


# Data -----------------------------------------------------------------------------------------------------------------


def media(rng: Random, folder: Path) -> None:
    name, data = rng.choice(sorted(make_media().items()))
    path = folder / name
    path.write_bytes(damage_bytes(rng, data))
    suffix = (
        rng.choice([path.suffix, *{Path(other).suffix for other in make_media()}])
        if rng.random() < 0.2
        else path.suffix
    )
    options = DecodeOptions(
        ResizeCrop((8, 8)),
        frames=rng.choice([1, 3, 9]),
        fps=rng.choice([None, 4.0, 100.0]),
        truncated=rng.random() < 0.3,
    )
    source = path if rng.random() < 0.5 else path.read_bytes()
    for read in (
        lambda: decode_media(source, suffix, "x", options, np.random.default_rng(0)),
        lambda: probe_media(source, suffix, "x", decode_all=rng.random() < 0.5),
    ):
        _allow_unreadable(read)


def tars(rng: Random, folder: Path) -> None:
    path = write(folder / "a.tar", [pair for number in range(4) for pair in item(number, json=b'{"text": "a"}')])
    data = damage_bytes(rng, path.read_bytes())
    if rng.random() < 0.4:
        path.unlink()
        path = folder / "a.tar.gz"
        data = gzip.compress(data)
        data = damage_bytes(rng, data) if rng.random() < 0.5 else data
    path.write_bytes(data)
    config = parse_data_config(
        {"source": "webdataset", "shards": str(path), "size": 8, "validation": 0, "max_unreadable": 1.0}
    )
    source = open_source(config, "train", 0)
    for index in range(min(4, len(source))) if hasattr(source, "read") and path.suffix == ".tar" else ():
        _allow_unreadable(lambda index=index: source.read(index, np.random.default_rng(0)))


def folders(rng: Random, folder: Path) -> None:
    """Captions and metadata beside pictures."""
    for number in range(3):
        (folder / f"{number}.png").write_bytes(make_media()["still.png"])
    rows = [{"file_name": f"{n}.png", "text": "a b", "start": 0, "end": 1} for n in range(3)]
    lines = "\n".join(json.dumps(damage_tree(rng, row)) for row in rows)
    (folder / rng.choice(["metadata.jsonl", "metadata.csv", "0.txt", "videos.txt"])).write_bytes(
        damage_bytes(rng, lines.encode("utf-8", "surrogatepass"))
    )
    (folder / "prompts.txt").write_bytes(damage_bytes(rng, b"a\nb\nc"))
    check_folder(folder)
    find_captions(
        folder, [f"{n}.png" for n in range(3)], [path.name for path in folder.iterdir() if path.suffix != ".png"]
    )


def _allow_unreadable(read: Callable[[], object]) -> None:
    with suppress(Unreadable):
        read()


# Runs -----------------------------------------------------------------------------------------------------------------


@functools.cache
def _tiny_plan() -> dict[str, Any]:
    tree = read_config(["vqgan-tiny"])
    return make_plan(tree).tree()


def _make_run(folder: Path) -> RunFolder:
    run = RunFolder(folder / "run")
    tree = _tiny_plan()
    run.write_config(tree)
    state = {
        "stage": next(iter(tree["stages"])),
        "best": 1.0,
        "best_step": 1,
        "elapsed": 1.0,
        "phase": "train",
        "config": tree,
    }
    for step in (1, 2):
        checkpoint.save(run.checkpoints(state["stage"]), step, {"model": {"w": torch.zeros(3)}}, state)
    checkpoint.update_state(
        run.checkpoints(state["stage"]),
        2,
        {"phase": "sample", "samples": 1, "best": 1.0, "best_step": 1, "elapsed": 1.0},
    )
    checkpoint.write_best(run.checkpoints(state["stage"]), 1, 1.0)
    run.metrics_file.write_text(json.dumps({"stage": state["stage"], "split": "train", "step": 1, "loss": 1.0}) + "\n")
    (run.path / "evaluation.json").write_text(
        json.dumps({"results": {"validation": {"a/step-00000001": {"fid": {"values": {"fid": 1.0}, "date": "x"}}}}})
    )
    return run


def _damage_file(rng: Random, path: Path) -> None:
    data = path.read_bytes()
    if path.suffix in (".json", ".jsonl", ".yaml") and rng.random() < 0.6:
        tree = (
            yaml.safe_load(data)
            if path.suffix == ".yaml"
            else json.loads(data.splitlines()[0] if path.suffix == ".jsonl" else data)
        )
        tree = damage_tree(rng, tree)
        text = yaml.safe_dump(tree, sort_keys=False) if path.suffix == ".yaml" else json.dumps(tree)
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
    else:
        path.write_bytes(damage_bytes(rng, data))


def runs(rng: Random, folder: Path) -> None:
    """Run folders: listed, compared, opened."""
    run = _make_run(folder)
    for path in rng.sample([run.config_file, run.metrics_file, run.path / "evaluation.json"], rng.randrange(1, 3)):
        _damage_file(rng, path)
    print_runs(folder)
    rng.choice([
        lambda: compare([run.path]),
        lambda: choose_sampling_stage(run),
        lambda: main(["sample", str(run.path), "a"]),
        lambda: main(["evaluate", str(run.path), "--samples", "1"]),
        lambda: main(["export", str(run.path), str(folder / "out"), "--to", "safetensors"]),
        lambda: resolve_run([], run.path),
    ])()  # fmt: skip


def stored(rng: Random, folder: Path) -> None:
    """Trained runs of every family, damaged: drawn from, evaluated, exported, resumed."""
    run = _unpack_run(rng, folder)
    files = [path for path in sorted(run.rglob("*")) if path.is_file() and path.stat().st_size]
    for path in rng.sample(files, rng.randrange(1, 3)):
        _damage_file(rng, path)
        manifest = path.parent / "manifest.json"
        if path != manifest and manifest.exists() and rng.random() < 0.7:  # with a checksum that fits
            with suppress(ValueError, TypeError, KeyError):  # damaged itself
                _rewrite_manifest(manifest, path)
    main(rng.choice([
        ["sample", "run", "a 3 moves left"],
        ["sample", "run", "a 3 moves left", "--checkpoint", "best", "--no-ema"],
        ["story", "run", str(run / "config.yaml")],
        ["evaluate", "run", "--samples", "1"],
        ["export", "run", "out", "--to", rng.choice(["safetensors", "diffusers"])],
        ["cache", "run"],
        ["compare", "run", "--out", "out"],
        ["doctor", "run/config.yaml"],
        ["train", "--run", "run", "--resume", "must", "train.steps=3"],
        ["train", "vqgan-tiny", "--run", "new", "--resume-from", "run", "--dry-run"],
        ["train", "vqgan-tiny", "--dry-run", f"stages.vqgan.init={run}"],
    ]))  # fmt: skip


def _rewrite_manifest(manifest: Path, path: Path) -> None:
    tree = json.loads(manifest.read_text())
    tree["files"][path.name] = checkpoint.flush_and_hash(path)
    manifest.write_text(json.dumps(tree))


def checkpoints(rng: Random, folder: Path) -> None:
    run = _make_run(folder)
    stage = next(iter(_tiny_plan()["stages"]))
    path = run.checkpoints(stage) / "step-00000002"
    damaged = path / rng.choice(["manifest.json", "state.json", "phase.json", "model.safetensors"])
    _damage_file(rng, damaged)
    if damaged.name in ("state.json", "model.safetensors") and rng.random() < 0.7:  # with a checksum that fits
        _rewrite_manifest(path / "manifest.json", damaged)
    if rng.random() < 0.3:
        _damage_file(rng, run.checkpoints(stage) / "best.json")
    saved = checkpoint.select(run.checkpoints(stage), rng.choice(["last", "best", 2]))
    saved.state()
    saved.weights()
    saved.digest()
    StageLoader(run).load(stage)


def caches(rng: Random, folder: Path) -> None:
    fields = {"tokens": torch.zeros(4, 1, 2, 2, dtype=torch.int64), "fps": torch.ones(4)}
    pack = PackWriter.create_folder(folder)
    writer = PackWriter(pack, 4, fields, vocabulary=8, key="k")
    writer.append(fields, [bytes([i]) * 16 for i in range(4)], list("abcd"), list("wxyz"))
    writer.close()
    for path in rng.sample(sorted(pack.iterdir()), rng.randrange(1, 3)):
        _damage_file(rng, path)
    index = PackIndex(folder, "k")
    index.refresh()
    opened = Pack.open(pack)
    opened.keys()
    opened.captions()
    for row in range(min(opened.header.done, 4)):
        _allow_unreadable(lambda row=row: opened.read(row, "x"))


# Imports and downloads ------------------------------------------------------------------------------------------------


def imports(rng: Random, folder: Path) -> None:
    """Safetensors files, their index, and the configs of other projects."""
    weights = save({"a": torch.zeros(2, 2), "b": torch.ones(3, dtype=torch.bfloat16)})
    (folder / "model.safetensors").write_bytes(damage_bytes(rng, weights) if rng.random() < 0.7 else weights)
    if rng.random() < 0.5:
        (folder / "model.safetensors").rename(folder / "part.safetensors")
        index = {"weight_map": {"a": "part.safetensors", "b": "part.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(damage_tree(rng, index)))
    (folder / "model_index.json").write_text(
        json.dumps(damage_tree(rng, {"_class_name": "CogVideoXPipeline", "vae": ["diffusers", "x"]}))
    )
    (folder / "sat.yaml").write_bytes(
        damage_bytes(rng, yaml.safe_dump({"model": {"params": {"a": 1}}, "args": {"lr": 1}}).encode())
    )
    rng.choice([
        lambda: list(open_weights(folder, "model").values()),
        lambda: main(["import", str(folder), "--from", rng.choice(["diffusers", "sat"]), "--run", str(folder / "out")]),
        lambda: main(["import", str(folder / "sat.yaml"), "--from", "sat-config"]),
        lambda: load_file(folder / "model_index.json"),
    ])()  # fmt: skip


def answers(rng: Random, folder: Path) -> None:
    """HTTP servers that lie: --resume-from."""
    run = _make_run(folder / "server")
    stage = next(iter(_tiny_plan()["stages"]))
    path = run.checkpoints(stage) / "step-00000002"
    for file in rng.sample(sorted(path.iterdir()), rng.randrange(2)):
        _damage_file(rng, file)

    class Lies(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.rpartition("/")[2]
            content = (path / name).read_bytes() if (path / name).is_file() else b""
            lie = rng.randrange(12)
            status = rng.choice([200, 204, 206, 302, 404, 500]) if lie == 0 else 200 if content else 404
            self.send_response(status)
            self.send_header("Content-Length", str(rng.choice([0, 1, 10**12]) if lie == 1 else len(content)))
            if lie == 2:
                self.send_header("Content-Encoding", "gzip")
            if status == 302:
                self.send_header("Location", rng.choice(["/", self.path, "file:///etc/passwd"]))
            self.end_headers()
            self.wfile.write(content[: rng.randrange(len(content) + 1)] if lie == 3 else content)

        do_HEAD = do_GET

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Lies)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    fetch_checkpoints(
        [f"http://127.0.0.1:{server.server_address[1]}/step-00000002"], folder / "new" / "run", lambda line: None
    )


TARGETS = {
    target.__name__: target
    for target in (
        *(configs, texts, arguments, media, tars, folders, runs, stored, checkpoints, caches, imports, answers),
        *(datasets.arrays, datasets.embeddings, datasets.layouts, datasets.prompts, datasets.statistics, datasets.sets),
        *(datasets.archives, datasets.listings, projects.trainers, projects.races),
        projects.make_pages_target(_make_run, _damage_file),
    )
}


def warm_up() -> None:
    """Make what the cases share, and import what they use, before they are forked."""
    for module in pkgutil.walk_packages(kineograph.__path__, "kineograph."):
        needs_extra = module.name.startswith("kineograph.studio.") and not importlib.util.find_spec("starlette")
        if not module.name.endswith("__main__") and not needs_extra:
            importlib.import_module(module.name)
    importlib.import_module("matplotlib.pyplot")  # starts fc-list
    make_media()
    make_sounds()
    _tiny_plan()
    for name in _names():
        _preset(name)
    for name in STORED_RUNS:
        _stored_run(name)
