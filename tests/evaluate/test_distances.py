"""FID, KID, IS, FVD, LPIPS, rFID and CLIP score through `evaluate`, on the tiny run, with extractors that fit a test."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import save_file
from scipy.linalg import sqrtm
from torch import nn

import kineograph as kg
from kineograph.codec.perceptual import Lpips
from kineograph.core.batch import Batch, Shape
from kineograph.core.config import merge
from kineograph.core.errors import InputError
from kineograph.core.metric_options import MetricOptions
from kineograph.core.noise import key_of
from kineograph.core.registry import find_metric, metric_names
from kineograph.core.run_folder import RunFolder
from kineograph.data.loader import Loader
from kineograph.data.moving_digits import MovingDigits
from kineograph.evaluate.compare import compare
from kineograph.evaluate.extractor.clip import open_clip
from kineograph.evaluate.extractor.registry import Extractors
from kineograph.evaluate.metric_api import EvalBatch, EvalContext, MetricSkipped
from kineograph.evaluate.runner import evaluate
from kineograph.sample.sampler import Sampler
from kineograph.stage.load import StageLoader
from kineograph.stage.spec import read_stage
from tests.evaluate.test_extractors import Colours, scripted
from tests.run.test_prior_runs import BASE
from tests.sample.tiny_task import make_run
from tests.text.test_clip_pretrained import folder as clip_folder  # noqa: F401 (a fixture)

CPU = torch.device("cpu")


class Motion(nn.Module):
    """Of clips: how bright, and how much changes from frame to frame."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        change = (x[:, 1:] - x[:, :-1]).abs().flatten(1).mean(1)
        return torch.stack([x.flatten(1).mean(1), change, x.flatten(1).std(1)], 1)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("extractors")
    torch.manual_seed(0)
    lpips = {name: torch.randn_like(value).abs() * 0.05 for name, value in Lpips("alexnet").state_dict().items()}
    save_file(lpips, folder / "lpips.safetensors")
    return SimpleNamespace(
        colours=scripted(Colours(), folder / "colours.pt"),
        motion=scripted(Motion(), folder / "motion.pt"),
        lpips=str(folder / "lpips.safetensors"),
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunFolder:
    return make_run(tmp_path_factory.mktemp("runs") / "run", coloured=False)


def held_out(run: RunFolder, count: int) -> Batch:
    """What evaluation shows."""
    source = MovingDigits.open(read_stage(run.config(), "generator").data, "validation")
    return next(iter(Loader(source, seed=key_of(3, "validation") >> 1, batch_size=count).fixed_batches(count, count)))


def test_all_of_them_are_found_by_name():
    assert {"fid", "rfid", "kid", "is", "fvd", "lpips", "clip_score"} <= set(metric_names())
    assert find_metric("is").name == "is"


def test_numbers_rest_on_real_and_drawn_pictures_and_say_so(run, files):
    found = evaluate(run.path, ["fid", "kid", "is"], samples=24, batch=9, device="cpu", extractors=[files.colours])
    real = held_out(run, 24)
    drawn = Sampler.open(run, device="cpu").sample(real.captions, seed=0, batch=24).pixels
    x, y = (Colours()((t.flatten(0, 1) * 255).round() / 255).double().numpy() for t in (real.video, drawn))
    a, b = np.cov(x, rowvar=False), np.cov(y, rowvar=False)
    expected = ((x.mean(0) - y.mean(0)) ** 2).sum() + np.trace(a + b - 2 * sqrtm(a @ b).real)
    assert found["fid"] == pytest.approx(expected, rel=1e-3)
    logits = torch.from_numpy(y)  # of what is drawn: real pictures play no part
    p = logits.softmax(1)
    assert found["is"] == pytest.approx(float((p * (p.log() - p.mean(0).log())).sum(1).mean().exp()), rel=1e-4)

    saved = json.loads((run.path / "evaluation.json").read_text())["results"]["validation"]["generator/step-00000020"]
    for name in ("fid", "kid", "is"):
        labels = saved[name]["labels"]
        assert labels["count"] == 24
        assert labels["extractor"].startswith("colours.pt ")
    assert "caution" not in saved["fid"]["labels"]
    assert "not Inception's classes" in saved["is"]["labels"]["caution"]
    shown = [cell for column in found.table().columns for cell in column._cells]
    assert any("extractor colours.pt" in cell and "count 24" in cell for cell in shown)


def test_numbers_do_not_depend_on_the_batch(run, files):
    values = [
        evaluate(run.path, ["fid", "kid", "is"], samples=12, batch=batch, device="cpu", extractors=[files.colours])
        for batch in (12, 5)
    ]
    for name in ("fid", "kid", "is"):
        assert values[0][name] == pytest.approx(values[1][name], rel=1e-4, abs=1e-9), name


def test_few_samples_are_told(run, files):
    found = evaluate(run.path, ["fid"], samples=5, device="cpu", extractors=[files.colours])
    assert "no more samples than features (6)" in found.stages[-1].results["fid"].labels["caution"]
    with pytest.raises(InputError, match="1 real and 1 generated"):
        evaluate(run.path, ["fid"], samples=1, device="cpu", extractors=[files.colours])


def test_without_weights_the_others_still_run_and_a_line_says_what_to_do(run):
    found = evaluate(run.path, ["loss", "fid", "kid"], samples=4, device="cpu")
    assert found["loss"] > 0
    assert found.skipped == [
        "skipped fid, kid: the weights inception-v3 are not on this machine: run kineo weights get inception-v3"
    ]
    with pytest.raises(InputError, match=r"--metrics fid does not apply.*kineo weights get inception-v3"):
        evaluate(run.path, ["fid"], samples=4, device="cpu")
    with pytest.raises(InputError, match="lpips-vgg16"):
        evaluate(run.path, ["lpips"], samples=4, device="cpu")
    everything = evaluate(run.path, samples=4, device="cpu")
    assert any("kineo weights get efficientnet-lite0" in line for line in everything.skipped)
    assert not any("fvd" in line for line in everything.skipped)  # pictures: nothing to say about motion


def test_codecs_have_lpips_and_rfid(run, files):
    found = evaluate(
        run.path,
        ["lpips", "rfid"],
        samples=9,
        batch=4,
        device="cpu",
        extractors=[files.colours, f"lpips={files.lpips}"],
    )
    assert [stage.stage for stage in found.stages] == ["tokenizer"]
    assert found["lpips"] > 0
    assert found["rfid"] > 0
    assert found.stages[0].results["lpips"].labels["count"] == 9
    assert found.stages[0].results["lpips"].labels["extractor"].startswith("lpips.safetensors ")


def test_fvd_sees_clips_and_refuses_short_ones(tmp_path, files):
    short = make_run(tmp_path / "short", frames=8)
    with pytest.raises(InputError, match=r"8 frames, and FVD is defined for 10 or more"):
        evaluate(short.path, ["fvd"], samples=4, device="cpu", extractors=[f"fvd={files.motion}"])
    run = make_run(tmp_path / "long", frames=11)
    chosen = [files.colours, f"fvd={files.motion}"]
    found = evaluate(run.path, ["fvd", "fid"], samples=6, batch=4, device="cpu", extractors=chosen)
    labels = {name: result.labels for name, result in found.stages[-1].results.items()}
    assert labels["fvd"]["count"] == 6
    assert labels["fvd"]["of"] == "clips of 11 frames"
    assert labels["fid"]["count"] == 66
    assert labels["fid"]["of"] == "frames"


def subject(files, frames: int = 12, **chosen: str) -> EvalContext:
    shape = Shape(frames=frames, height=16, width=16, channels=3, fps=8)
    return EvalContext("generator", None, None, shape, CPU, None, Extractors(CPU, MetricOptions(extractors=chosen)))  # type: ignore[arg-type]


def test_fvd_never_sees_padding(files):
    real, made = torch.rand(6, 12, 3, 16, 16), torch.rand(6, 12, 3, 16, 16)
    mask = torch.arange(12) < torch.tensor([12, 12, 11, 11, 10, 4])[:, None]
    scores = []
    for filled in (0.0, 1.0):
        clips = torch.where(mask[..., None, None, None], real, filled)
        metric = find_metric("fvd").open(subject(files, fvd=files.motion))
        metric.update(EvalBatch(real=clips, generated=made, frame_mask=mask))
        result = metric.compute()
        assert (result.labels["real"], result.labels["count"]) == (5, 6)  # the one of four frames is not counted
        scores.append(result.values["fvd"])
    assert scores[0] == pytest.approx(scores[1], abs=1e-12)


class StandIn:
    """Words and colours in one space."""

    COLOURS = ("red", "green", "blue")

    def embed_images(self, pixels):
        return F.normalize(pixels.mean((2, 3)), dim=-1)

    def embed_texts(self, captions):
        rows = torch.tensor([[float(colour in text) for colour in self.COLOURS] for text in captions])
        return F.normalize(rows, dim=-1), None, None


def test_clip_score_is_the_mean_cosine(files, monkeypatch):
    monkeypatch.setattr("kineograph.evaluate.metric.clip_score.open_clip", lambda subject: (StandIn(), "stand-in"))
    metric = find_metric("clip_score").open(subject(files, frames=2))
    red, blue = (
        torch.tensor([1.0, 0, 0])[:, None, None].expand(3, 8, 8),
        torch.tensor([0.0, 0, 1])[:, None, None].expand(3, 8, 8),
    )
    made = torch.stack([torch.stack([red, red]), torch.stack([red, blue])])
    mask = torch.tensor([[True, True], [True, False]])
    remarks = metric.update(EvalBatch(captions=["a red 3", "a red 4"], generated=made, real=made, frame_mask=mask))
    result = metric.compute()
    assert result.values["clip_score"] == pytest.approx(3 / 4)  # frames: right, right, right, wrong
    assert result.labels == {
        "extractor": "stand-in", "count": 4, "real pictures": 1.0, "unit": "cosine", "of": "frames",
    }  # fmt: skip
    assert remarks == ["1.00", "0.50"]


def test_without_a_clip_it_is_left_out_with_the_remedy(run, files):
    found = evaluate(run.path, samples=4, device="cpu")
    assert any("skipped clip_score: the run has no trained clip stage" in line for line in found.skipped)
    assert evaluate(run.path, ["loss", "clip_score"], samples=4, device="cpu")["loss"] > 0
    with pytest.raises(InputError, match="neither a folder of transformers nor RUN/STAGE"):
        evaluate(run.path, ["clip_score"], samples=4, device="cpu", extractors=["clip_score=nowhere"])
    with pytest.raises(InputError, match="gives no embeddings"):
        evaluate(run.path, ["clip_score"], samples=4, device="cpu", extractors=[f"clip_score={run.path}/tokenizer"])
    with pytest.raises(MetricSkipped):
        find_metric("clip_score").open(subject(files))


def test_compare_shows_what_the_numbers_rest_on(tmp_path, files):
    one, two = make_run(tmp_path / "one"), make_run(tmp_path / "two")
    evaluate(one.path, ["caption_accuracy", "loss"], samples=2, device="cpu")
    assert "FID" not in compare([one.path]).rows()  # nobody asked
    evaluate(one.path, ["fid"], samples=8, device="cpu", extractors=[files.colours])
    found = compare([one.path, two.path])
    cells = found.rows()["FID"]
    assert "colours.pt" in cells[0].text
    assert cells[0].text.endswith(", 8)")
    assert cells[1].value is None
    assert any(line.startswith(f"kineo evaluate {two.path} --metrics fid") for line in found.missing())


@pytest.fixture(scope="module")
def clip_run(tmp_path_factory):
    """A run whose one stage is a small CLIP, barely trained."""
    place = tmp_path_factory.mktemp("clip")
    tree = merge(BASE, {"train": {"steps": 1}}) | {"stages": {"clip": BASE["stages"]["clip"]}}
    (place / "run.yaml").write_text(yaml.safe_dump(tree))
    return kg.train(str(place / "run.yaml"), run=place / "run", quiet=True)


def test_a_clip_stage_of_another_run_judges(run, clip_run, tmp_path):
    found = evaluate(
        run.path, ["clip_score"], samples=6, batch=4, device="cpu", extractors=[f"clip_score={clip_run}/clip"]
    )
    task = StageLoader(RunFolder(clip_run)).load("clip")
    drawn = Sampler.open(run, device="cpu").sample(held_out(run, 6).captions, seed=0, batch=4)
    with torch.no_grad():
        images = task.embed_images((drawn.pixels[:, 0] * 255).round() / 255)
        cosines = (images * task.embed_texts(held_out(run, 6).captions)[0]).sum(-1)
    assert found["clip_score"] == pytest.approx(float(cosines.mean()), abs=1e-4)
    assert found.stages[-1].results["clip_score"].labels["extractor"].startswith(f"clip stage {clip_run}/clip ")


def test_the_runs_own_clip_stage_judges_unless_another_is_named(clip_run):
    shape = Shape(frames=1, height=16, width=16, channels=3, fps=8)
    stages = StageLoader(RunFolder(clip_run))
    found, label = open_clip(EvalContext("x", None, None, shape, CPU, None, Extractors(CPU), stages))  # type: ignore[arg-type]
    assert found is stages.load("clip")
    assert label == f"clip stage clip {stages.digest('clip')[:12]}"


def test_a_clip_of_transformers_judges(run, clip_folder):  # noqa: F811
    found = evaluate(run.path, ["clip_score"], samples=3, device="cpu", extractors=[f"clip_score={clip_folder}"])
    assert -1 <= found["clip_score"] <= 1
    assert found.stages[-1].results["clip_score"].labels["extractor"].startswith(f"{clip_folder.name} ")
