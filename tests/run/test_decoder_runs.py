"""Decoders on data that hold embeddings: what pictures and metrics are drawn from, and what their labels say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.utils.data import Dataset

import kineograph as kg
from kineograph.core import trust
from kineograph.core.config import merge
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.metric_options import MetricOptions
from kineograph.evaluate.metric_api import EvalBatch, EvalContext, Result
from kineograph.evaluate.runner import evaluate
from kineograph.family.dalle2.conditioning import Conditioner
from kineograph.sample.sampler import Sampler
from tests.evaluate.test_extractors import Colours, scripted

TRAIN = {
    "steps": 2, "batch_size": 4, "save_every": 2, "validate_every": 0, "sample_every": 2, "samples": 2, "evaluate_every": 2,
    "evaluation_samples": 4, "workers": 0, "warmup": 1, "trackers": [], "device": "cpu",
}  # fmt: skip
GIVEN = {"kind": "given", "width": 8}
UNET = {"task": "dalle2", "width": 8, "multipliers": [1, 2], "blocks": 1, "sample": {"steps": 2}}
TEXT = {"text": {"kind": "learned", "width": 16, "depth": 0, "positions": "none", "heads": 2, "length": 16}}
PRIOR = {
    "task": "dalle2.prior", "clip": GIVEN, "text_encodings": False, "width": 16, "depth": 1, "heads": 2, "sample": {"steps": 2},
}  # fmt: skip


class Embedded(Dataset):
    """Pictures of 32 pixels with captions, and what a CLIP made of both."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Any]:
        draw = torch.Generator().manual_seed(index)
        return {
            "pixels": torch.rand(3, 32, 32, generator=draw),
            "caption": f"picture {index}",
            "image_embed": torch.randn(8, generator=draw),
            "text_embed": torch.randn(8, generator=draw),
        }


EMBEDDED = Embedded()


class Sizes:
    """A metric that says how large what it is shown is."""

    name = "sizes"
    needs = frozenset({"real", "generated"})

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    @classmethod
    def open(cls, subject: EvalContext) -> Sizes:
        found = cls()
        found.values["told"] = float(subject.shape.width)
        return found

    def update(self, evidence: EvalBatch) -> None:
        assert evidence.real is not None and evidence.generated is not None
        self.values |= {"real": float(evidence.real.shape[-1]), "generated": float(evidence.generated.shape[-1])}

    def compute(self) -> Result:
        return Result(self.values, {"count": 4})


MINE = "tests.run.test_decoder_runs.Sizes"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kineograph.run.previews.draw_curves", lambda *files: None)


def run(folder: Path, stages: dict[str, Any], dataset: Dataset | None = EMBEDDED, **changes: Any) -> Path:
    tree = merge({"seed": 1, "data": {"size": 32}, "train": TRAIN, "stages": stages}, changes)
    (folder / "run.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    return kg.train(str(folder / "run.yaml"), dataset=dataset, run=folder / "run", quiet=True)


def labels(run: Path, stage: str) -> dict[str, Any]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return next(line["labels"]["sizes"] for line in lines if line["stage"] == stage and "labels" in line)


def test_metrics_go_through_the_prior_where_there_is_one_and_say_so(tmp_path: Path) -> None:
    decoder = {
        **UNET,
        "clip": GIVEN,
        "prior": "prior",
        "size": 16,
        "train": {"metrics": [MINE], "grids": ["validation"]},
    }
    made = run(tmp_path, {"prior": PRIOR, "decoder": decoder})
    assert labels(made, "decoder")["drawn from"] == "captions, through prior=prior"
    found = evaluate(made, [MINE], samples=4, device="cpu", dataset=Embedded())
    assert found.stages[-1].results["sizes"].labels["drawn from"] == "captions, through prior=prior"
    alone = evaluate(made, [MINE], samples=4, device="cpu", dataset=Embedded(), options=MetricOptions(from_items=True))
    assert alone.stages[-1].results["sizes"].labels["drawn from"] == "image_embed of the data"
    # What is drawn is held against real pictures of its own size, and shown beside them.
    assert found.stages[-1].results["sizes"].values == {"told": 16, "real": 16, "generated": 16}
    assert (made / "decoder" / "samples" / "step-00000002" / "validation-grid.png").is_file()
    assert Sampler.open(made, device="cpu").shape.height == 16


def test_metrics_of_given_embeddings_say_so(tmp_path: Path) -> None:
    made = run(tmp_path, {"decoder": {**UNET, "clip": GIVEN, "train": {"metrics": [MINE]}}})
    assert labels(made, "decoder")["drawn from"] == "image_embed of the data"
    evaluate(made, [MINE], samples=4, device="cpu", dataset=Embedded())
    told = json.loads((made / "evaluation.json").read_text())["results"]["validation"]["decoder/step-00000002"]["sizes"]
    assert told["labels"]["drawn from"] == "image_embed of the data"
    listed = json.loads((made / "decoder" / "samples" / "step-00000002" / "prompts.json").read_text())
    assert all(row["prompt"].startswith("picture") for row in listed)  # whose embeddings they are drawn from


def test_a_decoder_is_judged_beside_the_pictures_of_its_embeddings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it trains, with an extractor of the user's own, and afterwards without being asked."""
    monkeypatch.setattr(trust, "_all_trusted", True)
    own = scripted(Colours(), tmp_path / "colours.pt")
    train = {"metrics": ["paired", "fid"], "metric_options": {"extractors": {"fid": own}}}
    made = run(tmp_path, {"decoder": {**UNET, "clip": GIVEN, "train": train}}, data={"validation": 0.5})
    lines = list(map(json.loads, (made / "metrics.jsonl").read_text().splitlines()))
    line = next(line for line in lines if "labels" in line)
    assert {"metric/paired/psnr", "metric/paired/ssim", "metric/fid"} <= line.keys()
    assert line["labels"]["fid"]["extractor"].startswith("colours.pt ")
    saved = yaml.safe_load((made / "config.yaml").read_text())["stages"]["decoder"]["train"]["metric_options"]
    assert saved["extractors"] == {"fid": own}
    found = evaluate(made, samples=4, device="cpu", dataset=Embedded()).stages[-1].results["paired"]
    assert found.labels["drawn from"] == "image_embed of the data"
    train["metric_options"] = {"extractors": {"fid": "nowhere/x.pt"}}
    with pytest.raises(
        InputError, match=r"train.metric_options.extractors names nowhere/x.pt for fid, which does not exist"
    ):
        (tmp_path / "other").mkdir()
        run(tmp_path / "other", {"decoder": {**UNET, "clip": GIVEN, "train": train}})


def test_a_decoder_trains_beside_a_prior_that_is_left_out(tmp_path: Path) -> None:
    decoder = {**UNET, "clip": GIVEN, "prior": "prior", "train": {"metrics": [MINE], "grids": ["train"]}}
    made = run(tmp_path, {"prior": {**PRIOR, "skip": True}, "decoder": decoder}, prompts=["a dog", "a cat"])
    assert labels(made, "decoder")["drawn from"] == "image_embed of the data (prior=prior is not trained)"
    listed = json.loads((made / "decoder" / "samples" / "step-00000002" / "prompts.json").read_text())
    assert all(row["prompt"].startswith("picture") for row in listed)


def test_latents_of_smaller_pictures_are_cached_as_such(tmp_path: Path) -> None:
    codec = {
        "task": "vqgan", "data": {"size": 16}, "width": 8, "multipliers": [1, 2], "quantizer": {"kind": "fsq", "levels": [4, 4]},
        "perceptual": {"weight": 0}, "adversarial": {"weight": 0},
    }  # fmt: skip
    decoder = {**UNET, **TEXT, "image_embeds": "none", "codec": "codec", "size": 16, "cache": True, "multipliers": [1]}
    digits = {"source": "moving_digits", "glyphs": 2, "count": 12}
    made = run(tmp_path, {"codec": codec, "decoder": decoder}, dataset=None, data=digits)
    (folder,) = (made / "decoder" / "cache").glob("pack-*")
    assert json.loads((folder / "cache.json").read_text())["shape"][-2:] == [4, 4]  # and not those of 32 pixels
    assert Sampler.open(made, device="cpu").sample("a dog").pixels.shape[-2:] == (16, 16)


def heard(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every call of what reads prompts."""
    calls: list[Any] = []
    read = Conditioner.encode_prompts

    def watched(self: Conditioner, prompts: Any, prior: Any) -> Any:
        calls.append(prompts)
        return read(self, prompts, prior)

    monkeypatch.setattr(Conditioner, "encode_prompts", watched)
    return calls


def test_prompts_of_ones_own_are_not_paired_with_other_items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = heard(monkeypatch)
    made = run(tmp_path, {"decoder": {**UNET, **TEXT, "clip": GIVEN}}, prompts=["a dog", "a cat"])
    assert calls and all(call.captions == ["a dog", "a cat"] for call in calls)
    for call in calls:
        assert call.batch.pixels is None and call.batch.text_embeds is None and call.batch.extra == {}
    listed = json.loads((made / "decoder" / "samples" / "step-00000002" / "prompts.json").read_text())
    assert [row["prompt"] for row in listed] == ["a dog", "a cat"]


def test_captions_of_items_keep_what_belongs_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = heard(monkeypatch)
    run(tmp_path, {"decoder": {**UNET, **TEXT, "clip": GIVEN}})
    for call in calls:
        for caption, embed in zip(call.captions, call.batch.extra["image_embed"], strict=True):
            torch.testing.assert_close(embed, Embedded()[int(caption.split()[1])]["image_embed"])


def test_what_cannot_draw_prompts_alone_draws_captions_of_items(tmp_path: Path) -> None:
    """An upsampler that reads text, whose lower stage is not trained: enlarged real pictures are called by their own names."""
    large = {**UNET, **TEXT, "image_embeds": "none", "low_res": "small", "low_res_size": 16}
    stages = {"small": {**UNET, "image_embeds": "none", "size": 16, "skip": True}, "large": large}
    made = run(tmp_path, stages, prompts=["a dog"])
    listed = json.loads((made / "large" / "samples" / "step-00000002" / "prompts.json").read_text())
    assert len(listed) == 2 and all(row["prompt"].startswith("picture") for row in listed)


def test_what_training_never_showed_cannot_be_asked_for(tmp_path: Path) -> None:
    decoder = {**UNET, **TEXT, "image_embeds": "none", "text_dropout": 0.0, "sample": {"steps": 2, "guidance": 1.0}}
    sampler = Sampler.open(run(tmp_path, {"decoder": decoder}), device="cpu")
    sampler.sample("a dog")
    with pytest.raises(
        ConfigError, match=r"sample\.guidance=3 needs a model trained with dropped conditions, and text_dropout=0"
    ):
        sampler.sample("a dog", guidance=3.0)
    with pytest.raises(ConfigError, match=r"sample\.steps=2000 is above diffusion\.steps=1000"):
        sampler.sample("a dog", steps=2000)
