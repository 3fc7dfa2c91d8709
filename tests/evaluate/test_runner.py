from __future__ import annotations

import io
import json
import math
import re
import sys
from typing import ClassVar

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from kineograph.core.errors import ConfigError, InputError
from kineograph.core.noise import Noise, key_of
from kineograph.core.registry import find_metric
from kineograph.core.run_folder import RunFolder
from kineograph.data.loader import Loader
from kineograph.data.moving_digits import MovingDigits
from kineograph.evaluate import stage_evaluator
from kineograph.evaluate.console import ProgressBar
from kineograph.evaluate.digit_reader import ReaderNet
from kineograph.evaluate.extractor.registry import Extractors
from kineograph.evaluate.metric import caption_accuracy
from kineograph.evaluate.metric.caption_accuracy import CaptionAccuracy
from kineograph.evaluate.metric_api import EvalBatch, EvalContext, MetricSkipped, Result
from kineograph.evaluate.runner import evaluate
from kineograph.evaluate.stage_evaluator import StageEvaluator
from kineograph.sample.inference import draw
from kineograph.sample.prompt_file import read_prompts
from kineograph.sample.sampler import Sampler
from kineograph.stage.load import StageLoader
from kineograph.stage.spec import read_stage
from tests.evaluate.test_extractors import Colours, scripted
from tests.sample.tiny_task import TinyCodec, make_run, save_stage


class Brightness:
    """A metric that knows nothing of the runner, named by its dotted path."""

    name: ClassVar[str] = "brightness"
    needs: ClassVar[frozenset] = frozenset({"generated", "captions"})

    def __init__(self) -> None:
        self.batches: list[EvalBatch] = []

    @classmethod
    def open(cls, context: EvalContext) -> Brightness:
        return cls()

    def update(self, batch: EvalBatch) -> list[str]:
        assert batch.generated is not None
        self.batches.append(batch)
        return [f"{row.mean():.2f}" for row in batch.generated]

    def compute(self) -> Result:
        drawn = torch.cat([batch.generated for batch in self.batches])  # type: ignore[misc]
        captions = [text for batch in self.batches for text in batch.captions or []]
        return Result({"brightness": float(drawn.mean()), "captions": float(len(set(captions)))}, {"count": len(drawn)})


class Picky(Brightness):
    @classmethod
    def open(cls, context: EvalContext) -> Picky:
        raise MetricSkipped("it wants colour television")


MINE = f"{__name__ if __name__.startswith('tests') else 'tests.evaluate.test_runner'}.Brightness"


@pytest.fixture(scope="module", autouse=True)
def _reader(tmp_path_factory):
    """Any reader will do here, and an untrained one is at hand."""
    path = tmp_path_factory.mktemp("reader") / "reader.safetensors"
    save_file(ReaderNet().state_dict(), path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(caption_accuracy, "WEIGHTS", path)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunFolder:
    return make_run(tmp_path_factory.mktemp("runs") / "run", coloured=False)


def test_all_that_applies_is_judged(run):
    found = evaluate(run.path, samples=20, batch=8, device="cpu")
    assert [(stage.stage, stage.step) for stage in found.stages] == [("tokenizer", 20), ("generator", 20)]
    tokenizer, generator = (stage.results for stage in found.stages)
    assert set(tokenizer) == {"reconstruction", "reconstructed_captions", "codebook", "loss"}
    assert set(generator) == {"caption_accuracy", "loss"}
    assert generator["caption_accuracy"].labels["count"] == 20
    assert found["psnr"] == tokenizer["reconstruction"].values["psnr"]
    saved = json.loads((run.path / "evaluation.json").read_text())["results"]["validation"]
    assert saved["tokenizer/step-00000020"]["reconstruction"]["values"]["psnr"] == found["psnr"]
    assert saved["generator/step-00000020"]["caption_accuracy"]["samples"] == 20
    sheets = [path for path in found.files if path.suffix == ".png"]
    assert all(Image.open(path).width > 100 for path in sheets)
    assert {path.name for path in sheets} == {
        "validation-generator-step-00000020.png",
        "validation-tokenizer-step-00000020-reconstructions.png",
    }


def test_numbers_do_not_depend_on_the_batch(run):
    one = evaluate(run.path, samples=11, batch=11, device="cpu")
    many = evaluate(run.path, samples=11, batch=4, device="cpu")
    for before, after in zip(one.stages, many.stages, strict=True):
        for name, result in before.results.items():
            assert result.values == pytest.approx(after.results[name].values, abs=1e-5), name


def test_psnr_codebook_and_loss_are_those_of_the_whole_set(run):
    found = evaluate(
        run.path, ["reconstruction", "codebook", "loss"], samples=12, batch=5, stage="tokenizer", device="cpu"
    )
    spec = read_stage(run.config(), "tokenizer")
    task = StageLoader(run).load("tokenizer")
    loader = Loader(MovingDigits.open(spec.data, "validation"), seed=key_of(3, "validation") >> 1, batch_size=12)
    batch = next(iter(loader.fixed_batches(12, 12)))
    error = (task.reconstruct(batch) - batch.video).square().flatten(1).mean(1)
    assert found["psnr"] == pytest.approx(float((-10 * error.log10()).mean()), abs=1e-4)
    counts = torch.bincount(task.encode(batch.video).flatten(), minlength=4).double()
    share = counts[counts > 0] / counts.sum()
    assert found["codebook_use"] == float((counts > 0).double().mean())
    assert found["codebook_perplexity"] == pytest.approx(math.exp(-(share * share.log()).sum()))
    assert found["loss"] == pytest.approx(float((error * task.gain).mean()), rel=1e-5)


def test_padded_frames_are_no_tokens(run, monkeypatch):
    """Clips that end after their first frame, and others as they are."""
    inner = Loader.fixed_batches

    def cut(loader, *args):
        for batch in inner(loader, *args):
            batch.frame_mask = torch.ones(batch.pixels.shape[:2], dtype=torch.bool)
            batch.frame_mask[:, 1:] = (batch.slots % 2 == 0)[:, None]
            batch.pixels[batch.frame_mask.logical_not()] = 255
            yield batch

    monkeypatch.setattr(Loader, "fixed_batches", cut)
    found = evaluate(run.path, ["codebook"], samples=12, batch=5, stage="tokenizer", device="cpu")
    spec = read_stage(run.config(), "tokenizer")
    task = StageLoader(run).load("tokenizer")
    batch = next(
        iter(
            Loader(
                MovingDigits.open(spec.data, "validation"), seed=key_of(3, "validation") >> 1, batch_size=12
            ).fixed_batches(12, 12)
        )
    )
    counts = torch.bincount(task.encode(batch.video)[batch.frame_mask].flatten(), minlength=4)
    assert found.stages[0].results["codebook"].labels["tokens"] == int(counts.sum())
    assert counts[3] == 0  # no block of a real frame is white
    assert found["codebook_use"] == float((counts > 0).double().mean())


def test_a_loss_within_a_batch_is_that_of_the_trainers_batches(run, monkeypatch):
    """Whatever the batch of the evaluation and the number of processes."""
    sizes, inner = [], Loader.fixed_batches
    monkeypatch.setattr(Loader, "fixed_batches", lambda loader, *args: (sizes.append(args), inner(loader, *args))[1])
    evaluate(run.path, ["loss"], samples=40, batch=5, stage="tokenizer", device="cpu")
    monkeypatch.setattr(TinyCodec, "compares_samples", lambda self: True, raising=False)
    evaluate(run.path, ["loss"], samples=40, batch=5, stage="tokenizer", device="cpu")
    assert sizes == [(40, 5), (40, 32)]  # 32 is the default of train.batch_size


def test_the_loss_is_the_trainers_own(run):
    """The same items and the same noise as Trainer._validate."""
    found = evaluate(run.path, ["loss"], samples=6, stage="generator", device="cpu")
    spec = read_stage(run.config(), "generator")
    loader = Loader(MovingDigits.open(spec.data, "validation"), seed=key_of(3, "validation") >> 1, batch_size=6)
    batch = next(iter(loader.fixed_batches(6, 6)))
    task = StageLoader(run).load("generator")
    noise = Noise(key_of(key_of(3, "generator") >> 1, "validation"), 0, batch.slots)
    assert found["loss"] == pytest.approx(float(task.validate(batch, noise)["loss"].value()), rel=1e-6)


def test_a_metric_by_dotted_path_sees_held_out_prompts(run):
    found = evaluate(run.path, [MINE], samples=10, batch=4, device="cpu")
    assert found.stages[0].results["brightness"].labels == {"count": 10}
    assert found["captions"] > 5
    with pytest.raises(InputError, match="colour television"):
        evaluate(run.path, [MINE.replace("Brightness", "Picky")], samples=2, device="cpu")
    with pytest.raises(ConfigError, match=r"metrics=caption_acuracy.*did you mean caption_accuracy"):
        evaluate(run.path, ["caption-acuracy"], samples=2, device="cpu")


@pytest.mark.parametrize(
    ("changes", "words"), [({"checkpoint": 7}, "no checkpoint of step 7"), ({"reference": "nowhere"}, "does not exist")]
)
def test_what_is_not_there_is_refused_before_any_stage_is_evaluated(tmp_path, changes, words):
    run = make_run(tmp_path / "run")
    with pytest.raises(InputError, match=words):
        evaluate(run.path, samples=4, device="cpu", **changes)
    assert not (run.path / "evaluation.json").exists()


def test_results_of_other_splits_checkpoints_and_metrics_stay(tmp_path):
    run = make_run(tmp_path / "run", "tokenizer", step=10)
    evaluate(run.path, ["loss"], samples=4, device="cpu")
    evaluate(run.path, ["codebook"], samples=4, device="cpu")
    evaluate(run.path, ["loss"], samples=4, split="test", device="cpu")
    save_stage(run, "tokenizer", 20)
    evaluate(run.path, ["loss"], samples=4, device="cpu")
    results = json.loads((run.path / "evaluation.json").read_text())["results"]
    assert set(results["validation"]["tokenizer/step-00000010"]) == {"loss", "codebook"}
    assert set(results["validation"]["tokenizer/step-00000020"]) == {"loss"}
    assert set(results["test"]) == {"tokenizer/step-00000010"}
    (run.path / "evaluation.json").write_text('{"results": {"valid')
    evaluate(run.path, ["loss"], samples=4, device="cpu")
    assert (run.path / "evaluation.damaged.json").read_text().startswith('{"results"')
    results = json.loads((run.path / "evaluation.json").read_text())
    assert results["results"]["validation"]
    results["results"]["notes"] = "by hand"
    (run.path / "evaluation.json").write_text(json.dumps(results))
    evaluate(run.path, ["codebook"], samples=4, device="cpu")
    kept = json.loads((run.path / "evaluation.json").read_text())["results"]["validation"]
    assert {name for records in kept.values() for name in records} == {"loss", "codebook"}


def test_what_is_left_out_says_why(tmp_path):
    from kineograph.media.clips import write_clip

    photos = tmp_path / "photos"
    for number in range(8):
        write_clip(photos / f"{number}.png", torch.rand(1, 3, 32, 32), 8)
        (photos / f"{number}.txt").write_text(f"a photo of cat {number}")
    lines: list[str] = []
    run = make_run(tmp_path / "run", source="folder", folder=str(photos), validation=0.4)
    found = evaluate(run.path, samples=50, device="cpu", note=lines.append)
    assert any("skipped caption_accuracy" in line and "a photo of cat" in line for line in found.skipped)
    assert any("not 50" in line for line in lines)
    assert "generated" not in found.skipped[0]
    found.show()
    with pytest.raises(InputError, match="--metrics caption_accuracy does not apply"):
        evaluate(run.path, ["caption_accuracy"], samples=4, device="cpu")
    with pytest.raises(InputError, match="test split"):
        evaluate(run.path, samples=4, split="test", device="cpu")


def test_changed_sampling_options_are_judged_beside_those_of_the_run(run):
    usual = evaluate(run.path, [MINE], samples=6, device="cpu")
    found = evaluate(
        run.path, [MINE], samples=6, device="cpu", sampling={"guidance": 3.0, "sample.palette": [0.2, 0.3]}
    )
    assert found["brightness"] != usual["brightness"] and found.split == "validation-guidance=3-palette=_0.2_0.3_"
    prompts = ["a red 3", "a 5"]
    drawn = Sampler.open(run.path, device="cpu").sample(prompts, guidance=3.0).pixels
    asked = evaluate(run.path, [MINE], prompts=prompts, device="cpu", sampling={"guidance": 3.0})
    assert asked["brightness"] == pytest.approx(float(drawn.mean()), abs=1e-6)
    results = json.loads((run.path / "evaluation.json").read_text())["results"]
    assert {"validation", found.split, asked.split} <= set(results)
    kept = results["validation"]["generator/step-00000020"]["brightness"]["values"]
    assert kept["brightness"] == usual["brightness"]
    with pytest.raises(ConfigError, match=r"unknown key sample\.guidence"):
        evaluate(run.path, [MINE], samples=2, device="cpu", sampling={"guidence": 3.0})
    same = evaluate(run.path, [MINE], samples=6, device="cpu", sampling={"guidance": 1.0})  # as the run has it
    assert same.split == "validation" and same["brightness"] == usual["brightness"]


def test_guidance_without_captions_is_refused(tmp_path):
    run = make_run(tmp_path / "run", generator="UncaptionedGenerator")
    with pytest.raises(
        InputError, match=r"guidance has no effect: .*UncaptionedGenerator was trained without captions"
    ):
        evaluate(run.path, [MINE], samples=2, device="cpu", sampling={"guidance": 3.0})


def test_prompts_of_a_file_are_judged_instead_of_held_out_items(tmp_path, run):
    path = tmp_path / "My prompts.jsonl"
    rows = [{"prompt": "a red 3"}, {"prompt": "a blue 7 moves up", "seed": 4}, {"prompt": "a 5"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = evaluate(run.path, [MINE, "caption_accuracy"], prompts=path, batch=2, device="cpu")
    assert found["captions"] == 3 and [stage.stage for stage in found.stages] == ["generator"]
    drawn = Sampler.open(run.path, device="cpu").sample(read_prompts(path)).pixels
    assert found["brightness"] == pytest.approx(float(drawn.mean()), abs=1e-6)
    split = found.split
    assert re.fullmatch("prompts-my-prompts-[0-9a-f]{6}", split)
    records = json.loads((run.path / "evaluation.json").read_text())["results"][split]
    assert records["generator/step-00000020"]["caption_accuracy"]["samples"] == 3
    assert "ceiling" not in records["generator/step-00000020"]["caption_accuracy"]["labels"]
    assert any(path.name == f"{split}-generator-step-00000020.png" for path in found.files)
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / path.name
    other.write_text('{"prompt": "a green 1"}\n')
    assert (
        evaluate(run.path, [MINE], prompts=other, device="cpu").split != split
    )  # of the same name, with other prompts
    other.write_text(path.read_text())
    assert evaluate(run.path, [MINE], prompts=other, device="cpu").split == split
    everything = evaluate(run.path, prompts=path, device="cpu")
    assert any("fid" in line and "nothing real to compare with" in line for line in everything.skipped)
    for call, why in (
        ({"metrics": ["fid"]}, "--metrics fid does not apply .*nothing real to compare with; add --reference"),
        ({"samples": 3}, "--samples has no effect with --prompts"),
        ({"split": "test"}, "--split has no effect with --prompts"),
        ({"moved": ["data.folder=x"]}, "data.folder=NEW has no effect with --prompts"),
        ({"batch": 0}, "--batch 0 is too small: use at least 1"),
    ):
        with pytest.raises(InputError, match=why):
            evaluate(run.path, prompts=path, device="cpu", **call)
    path.write_text('{"prompt": "a 3", "scene": 1}\n')
    with pytest.raises(InputError, match="line 1: scene=1 has an effect in a story only: remove it"):
        evaluate(run.path, prompts=path, device="cpu")


def test_mistakes_are_told(tmp_path, run):
    with pytest.raises(InputError, match="--split nowhere"):
        evaluate(run.path, split="nowhere")
    with pytest.raises(InputError, match="not a run folder"):
        evaluate(tmp_path)
    codec = make_run(tmp_path / "codec", "tokenizer")
    with pytest.raises(
        InputError, match=r"caption_accuracy.*needs captions, drawn samples, .*rfid and codebook judge a tokenizer"
    ):
        evaluate(codec.path, ["caption_accuracy"], samples=2, device="cpu")
    empty = make_run(tmp_path / "empty", "tokenizer")
    (empty.checkpoints("tokenizer") / "step-00000020").rename(tmp_path / "gone")
    with pytest.raises(InputError, match="no checkpoint"):
        evaluate(empty.path)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_will_be_computed_is_said_before_anything_is_drawn(tmp_path, monkeypatch):
    """256 clips through Inception on a CPU take many minutes: a person hears of it first."""
    run = make_run(tmp_path / "run", frames=3)
    chosen = scripted(Colours(), tmp_path / "colours.pt")
    events: list[str] = []
    monkeypatch.setattr(stage_evaluator, "draw", lambda *a, **k: [events.append("drawn"), draw(*a, **k)][1])
    evaluate(
        run.path,
        ["fid", "kid", "is", "loss"],
        samples=6,
        batch=4,
        device="cpu",
        extractors=[chosen],
        note=events.append,
    )
    first, *rest = events
    assert first.startswith("evaluating tokenizer on cpu: 6 samples for loss")
    (line,) = [event for event in rest if event.startswith("evaluating generator on cpu")]
    assert (
        "6 samples for fid, kid, is, loss; colours.pt processes 36 images (slow on a CPU: select fewer --metrics"
        in line
    )
    assert events.index(line) < events.index("drawn")


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_on_a_terminal_and_not_in_pipes(tmp_path, monkeypatch, terminal):
    """Batches, and within one how many pictures the extractor has seen: its network is the slow part."""
    run = make_run(tmp_path / "run", frames=3)
    chosen = scripted(Colours(), tmp_path / "colours.pt")
    told: list[str] = []
    monkeypatch.setattr(ProgressBar, "set_activity", lambda self, what: told.append(what))
    monkeypatch.setattr(sys, "stderr", stderr := _Terminal() if terminal else io.StringIO())
    evaluate(run.path, ["fid"], samples=24, batch=12, device="cpu", extractors=[chosen])
    assert (
        "evaluating generator" in stderr.getvalue().split("\n", 1)[1]
    ) == terminal  # after the line that is said beforehand
    assert told[:5] == ["drawing", "fid", "colours.pt 32 of 36", "colours.pt 36 of 36", "colours.pt 32 of 36"]


def test_training_judges_without_a_word(run, capsys):
    spec, stages = read_stage(run.config(), "generator"), StageLoader(run)
    source = MovingDigits.open(spec.data, "validation")
    judge = StageEvaluator(
        spec, stages.load("generator"), source, torch.device("cpu"), 4, 3, Extractors(torch.device("cpu")), stages
    )
    judge.run({"loss": find_metric("loss")}, {"loss": []})
    assert capsys.readouterr() == ("", "")


def test_compiled_stages_give_the_same_numbers_and_say_that_they_wait(run, monkeypatch):
    how: list[dict] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: how.append(options))
    lines: list[str] = []
    plain = evaluate(run.path, ["loss"], samples=4, device="cpu", note=lines.append)
    assert not how and "compiler" not in lines[0]
    found = evaluate(run.path, ["loss"], samples=4, device="cpu", compile=True, note=lines.append)
    assert how and all(options["mode"] == "default" for options in how)
    assert "the first batches wait for the compiler" in lines[-1]
    assert found["loss"] == plain["loss"]


class _Scripted:
    """Stands in for the reader: tells what it is told."""

    def __init__(self, *answers: list) -> None:
        self.answers = list(answers)

    def read(self, pixels: torch.Tensor) -> list:
        return self.answers.pop(0)


def test_caption_accuracy_counts_generated_and_real_apart():
    from kineograph.data.digit_captions import Figure

    three, seven = (Figure(3, "red", place="top"),), (Figure(7, "blue", place="left"),)
    wrong = (Figure(3, "green", place="top"),)
    metric = CaptionAccuracy(_Scripted([wrong, seven], [three, seven]))  # type: ignore[arg-type]
    captions = ["a red 3 at the top", "a blue 7 at the left"]
    remarks = metric.update(EvalBatch(captions=captions, generated=torch.zeros(2), real=torch.zeros(2)))
    assert remarks == ["✗ green 3 top", "✓"]
    result = metric.compute()
    assert result.values == {"caption_accuracy": 0.5, "number": 1.0, "digit": 1.0, "colour": 0.5, "place": 1.0}
    assert result.labels["ceiling"] == 1.0
