"""A CLIP and a prior through the public command: stages that name one another, the cache, and embeddings of one's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.utils.data import Dataset

import kineograph as kg
from kineograph.core.batch import Prompts
from kineograph.core.config import merge
from kineograph.core.errors import InputError
from kineograph.core.noise import Noise
from kineograph.core.run_folder import RunFolder
from kineograph.stage.load import StageLoader
from kineograph.text.clip import TrainedClip
from kineograph.train import checkpoint
from tests.run.calling import kineo

BASE: dict[str, Any] = {
    "seed": 1,
    "data": {"source": "moving_digits", "size": 16, "frames": 1, "glyphs": 2, "count": 24},
    "train": {
        "steps": 4, "batch_size": 4, "log_every": 1, "save_every": 4, "validate_every": 4, "validation_samples": 4, "sample_every": 4,
        "workers": 0, "warmup": 1, "trackers": [], "device": "cpu",
    },
    "stages": {
        "clip": {
            "task": "clip", "width": 16, "depth": 1, "heads": 2, "embed_width": 8, "patch": 8,
            "text": {"width": 16, "depth": 1, "heads": 2, "length": 16},
        },
        "prior": {"task": "dalle2.prior", "clip": "clip", "width": 16, "depth": 1, "heads": 2, "sample": {"steps": 2}},
    },
}  # fmt: skip


def write(folder: Path, **prior: Any) -> Path:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(merge(BASE, {"stages": {"prior": prior}}), sort_keys=False))
    return path


def metrics(run: Path, stage: str, split: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if (line["stage"], line["split"]) == (stage, split)]


def weights(run: Path, stage: str) -> dict[str, torch.Tensor]:
    return checkpoint.select(run / stage / "checkpoints").tensors("model")


def test_clip_then_prior_then_embeddings_for_captions(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert kineo("train", write(tmp_path), "--run", run) == 0
    (judged,) = metrics(run, "clip", "validation")
    assert {"retrieval/image_to_text", "retrieval/text_to_image", "temperature"} <= judged.keys()
    (judged,) = metrics(run, "prior", "validation")
    assert {"cosine/image", "cosine/text", "cosine/shuffled", "cosine/true_to_text"} <= judged.keys()
    assert all(name.startswith("network.") for name in weights(run, "prior"))
    prior = StageLoader(RunFolder(run)).load("prior")
    drawn = prior.embed(Prompts(Noise.for_rows(0, 0, 2), ["a red 3 moves left", "a blue 7"]))  # type: ignore[operator]
    torch.testing.assert_close(drawn.norm(dim=-1), torch.ones(2))
    assert kineo("sample", run, "a red 3") == 2  # neither of them draws pixels
    assert kineo("doctor", write(tmp_path)) == 0


@pytest.mark.slow
def test_cached_embeddings_train_the_same_prior_without_the_clip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, cached = tmp_path / "plain", tmp_path / "cached"
    assert kineo("train", write(tmp_path), "train.validate_every=0", "--run", plain) == 0
    assert kineo("train", write(tmp_path), "stages.prior.skip=true", "train.validate_every=0", "--run", cached) == 0
    # The same CLIP, whose embeddings are made once: after that nothing asks it again.
    asked: list[int] = []
    embed = TrainedClip.embed_images

    def counted(self: TrainedClip, pixels: torch.Tensor, frame_mask: torch.Tensor | None = None) -> torch.Tensor:
        asked.append(len(pixels))
        return embed(self, pixels, frame_mask)

    monkeypatch.setattr(TrainedClip, "embed_images", counted)
    again = tmp_path / "again"
    stage = {"clip": f"{cached}/clip", "cache": True}
    tree = merge(BASE, {"stages": {"prior": stage}, "train": {"validate_every": 0}})
    del tree["stages"]["clip"]
    path = tmp_path / "again.yaml"
    path.write_text(yaml.safe_dump(tree))
    assert kineo("train", path, "--run", again) == 0
    (folder,) = (again / "prior" / "cache").glob("pack-*")
    header = json.loads((folder / "cache.json").read_text())
    assert header["kind"] == "image_embed"
    assert {"image_embed", "text_embed", "text_embeds", "text_mask"} <= header["arrays"].keys()
    assert sum(asked) == header["count"]
    for name, value in weights(plain, "prior").items():
        torch.testing.assert_close(
            weights(again, "prior")[name], value, rtol=2e-2, atol=2e-3, msg=name
        )  # float16 on disk


class Embedded(Dataset):
    """Nothing but embeddings."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(index)
        return {"image_embed": torch.randn(8, generator=draw), "text_embed": torch.randn(8, generator=draw)}


def test_embeddings_of_ones_own_need_no_clip_no_pixels_and_no_captions(tmp_path: Path) -> None:
    stage = {
        "task": "dalle2.prior", "clip": {"kind": "given", "width": 8}, "text_encodings": False, "width": 16, "depth": 1, "heads": 2,
        "sample": {"steps": 2},
    }  # fmt: skip
    path = tmp_path / "given.yaml"
    path.write_text(yaml.safe_dump({**BASE, "data": {"size": 16}, "stages": {"prior": stage}}))
    run = kg.train(str(path), dataset=Embedded(), run=tmp_path / "run", quiet=True)
    assert metrics(run, "prior", "train")[-1]["loss"] > 0
    wrong = {**stage, "clip": {"kind": "given", "width": 9}}
    path.write_text(yaml.safe_dump({**BASE, "data": {"size": 16}, "stages": {"prior": wrong}}))
    with pytest.raises(InputError, match="clip has 9 channels"):
        kg.train(str(path), dataset=Embedded(), run=tmp_path / "other", quiet=True)
