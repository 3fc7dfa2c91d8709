"""Fuzz targets: configs and scripts of other projects, races, reports and the studio's pages of damaged runs."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import yaml

from kineograph.cli import main
from tests.fuzz.corpora import make_media
from tests.fuzz.mutations import damage_bytes, damage_tree
from tests.interop.test_their_configs import DECODER, PHENAKI

PRIOR: dict[str, Any] = {
    "prior": {"image_embed_dim": 64, "net": {"dim": 64, "depth": 2, "heads": 2}, "timesteps": 100, "clip": {"make": "openai", "model": "ViT-L/14"}},
    "data": {"image_url": "img", "text_url": "text", "meta_url": "meta", "splits": {"train": 0.8, "val": 0.1, "test": 0.1}, "batch_size": 4},
    "train": {"epochs": 2, "lr": 1e-3, "wd": 0.1, "max_grad_norm": 0.5, "use_ema": True},
}  # fmt: skip
SCRIPTS = {
    "phenaki": PHENAKI,
    "muse": "vae = VQGanVAE(dim = 32, codebook_size = 64)\nbase = MaskGit(vae = vae, transformer = MaskGitTransformer(num_tokens = 64, "
    "seq_len = 16, dim = 32, depth = 2), image_size = 32)\nVQGanVAETrainer(vae = vae, folder = 'x', image_size = 32, batch_size = 2)\n",
    "nuwa": "vae = VQGanVAE(dim = 64, num_layers = 2, image_size = 32, vq_codebook_size = 64)\n"
    "nuwa = NUWA(vae = vae, dim = 64, text_num_tokens = 100, text_enc_depth = 2, max_video_frames = 4, dec_depth = 2)\n",
}


def trainers(rng: Random, folder: Path) -> None:
    """`kineo import FILE --from dalle2-config | phenaki | nuwa | muse`."""
    package = rng.choice(["dalle2-config", *SCRIPTS])
    if package == "dalle2-config":
        tree = rng.choice([DECODER, PRIOR])
        text = json.dumps(damage_tree(rng, tree) if rng.random() < 0.8 else tree)
    else:
        text = SCRIPTS[package]
    path = folder / ("config.json" if package == "dalle2-config" else "train.py")
    data = text.encode("utf-8", "surrogatepass")
    path.write_bytes(damage_bytes(rng, data) if rng.random() < 0.7 or package != "dalle2-config" else data)
    main(["import", str(path), "--from", package])


def races(rng: Random, folder: Path) -> None:
    """The folder of a race from elsewhere: its plans and its record."""
    from kineograph.race.plan import read_data
    from kineograph.race.recipe import fit_recipe

    race = folder / "race"
    (race / "plans").mkdir(parents=True)
    planned = read_data("digits", [], 1, 32, "cpu")
    plan = fit_recipe("muse", planned.data, planned.shape, "cpu", 1.0)
    text = yaml.safe_dump(damage_tree(rng, plan) if rng.random() < 0.7 else plan, sort_keys=False).encode()
    (race / "plans" / "muse.yaml").write_bytes(damage_bytes(rng, text) if rng.random() < 0.3 else text)
    judge = {"samples": 256, "metrics": None, "extractors": []}
    entry = {"family": "muse", "seed": 0, "run": "x", "judge": judge, "figures": {"steps": 3}}
    request = {"data": planned.data, "minutes": 1.0, "seeds": 1, "judge": judge}
    record = {"format": 1, "request": request, "unable": {"nuwa": "x"}, "entries": {"muse-0": entry}}
    record_text = json.dumps(damage_tree(rng, record) if rng.random() < 0.7 else record).encode(
        "utf-8", "surrogatepass"
    )
    (race / "race.json").write_bytes(damage_bytes(rng, record_text) if rng.random() < 0.2 else record_text)
    words = ["--families", "muse", "--minutes", "1", "--frames", "1", "--size", "32", "--plan"]
    main(["race", "digits", "--run", "race", *words])


def make_pages_target(
    make_run: Callable[[Path], Any], damage_file: Callable[[Random, Path], None]
) -> Callable[[Random, Path], None]:
    """Reports and the studio's pages of a run whose files are damaged; uploads."""

    def pages(rng: Random, folder: Path) -> None:
        run = make_run(folder).path
        config = run / "config.yaml"
        # Settings are compared with the run's preset, in a process of its own that takes seconds.
        config.write_text(config.read_text().replace("preset: vqgan-tiny", "preset: gift", 1))
        stage = next(iter(yaml.safe_load((run / "config.yaml").read_text())["stages"]))
        samples = run / stage / "samples" / "step-00000001"
        samples.mkdir(parents=True)
        (samples / "a.png").write_bytes(make_media()["still.png"])
        rows = [{"file": "a.png", "prompt": "a b"}, {"file": "../../../../secret.png", "prompt": "b"}]
        (samples / "prompts.json").write_text(json.dumps(rows))
        (run / "skipped.jsonl").write_text(json.dumps({"path": "x", "reason": "y"}) + "\n")
        (run / "stopped").write_text("x")
        files = [path for path in sorted(run.rglob("*")) if path.is_file() and path.stat().st_size]
        for path in rng.sample(files, rng.randrange(1, 4)):
            damage_file(rng, path)
        main(
            rng.choice(
                [["report", "run", "-o", "report.html"], ["runs", "."], ["compare", "run", "run", "--out", "sheet.png"]]
            )
        )
        if importlib.util.find_spec("starlette"):
            _visit(rng, folder)

    return pages


def _visit(rng: Random, folder: Path) -> None:
    from tests.studio.conftest import TOKEN, open_client

    client = open_client(folder)
    client.get("/", params={"token": TOKEN})
    from kineograph.studio.runs import make_id

    at = f"/run/{make_id(folder / 'run')}"
    for path in ("/", at, f"{at}/curves", f"{at}/drawings", f"{at}/compare", "/data"):
        answer = client.get(path)
        assert answer.status_code in (200, 404, 405, 422), f"{path}: {answer.status_code} {answer.text[-300:]}"
    form, data = rng.choice(sorted(make_media().items()))
    answer = client.post(f"{at}/upload", content=damage_bytes(rng, data))
    assert answer.status_code in (200, 400, 403, 404, 413, 422), f"{form}: {answer.status_code} {answer.text[-300:]}"
