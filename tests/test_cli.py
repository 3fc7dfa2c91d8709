"""The command line: fast help, exit codes, one plain message on stderr, and nothing written by a mistake."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import yaml

from kineograph import cli
from kineograph.core.errors import ConfigError, RunFailed, RunInUse, Stopped
from kineograph.core.run_folder import RunFolder

ROOT = Path(__file__).parent.parent
COMMANDS = (
    "presets",
    "train",
    "sample",
    "story",
    "evaluate",
    "compare",
    "cache",
    "data",
    "import",
    "export",
    "doctor",
    "runs",
)
TOY = {
    "data": {"size": 16, "glyphs": 2},
    "train": {
        "batch_size": 4,
        "steps": 2,
        "workers": 0,
        "trackers": [],
        "device": "cpu",
        "sample_every": 0,
        "validation_samples": 4,
    },
    "stages": {"only": {"task": "tests.train.toy_tasks.Toy"}},
}


class Done(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def kineo(here: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """Call the command line in the folder `here`."""
    monkeypatch.chdir(here)

    def call(*words: str) -> Done:
        capsys.readouterr()
        try:
            cli.main(list(words))
        except SystemExit as end:
            return Done(int(end.code or 0), *capsys.readouterr())
        raise AssertionError("the command line always ends by an exit code")

    return call


def process(*words: str, cwd: Path) -> Done:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from kineograph.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=cwd, capture_output=True, text=True, check=False)
    return Done(done.returncode, done.stdout, done.stderr)


def everything(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(TOY))
    return tmp_path


def test_help_answers_in_well_under_a_second(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = process("--help", cwd=tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Of a core's time: what else the machine does is not its fault.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1
    assert done.code == 0
    for command in COMMANDS:
        assert command in done.out


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from kineograph.cli import main\n"
        "try: main(['train', '--help'])\n"
        "except SystemExit: pass\n"
        "print([name for name in ('torch', 'numpy', 'transformers', 'matplotlib', 'sklearn', 'av') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "words", [[command, "--help"] for command in COMMANDS] + [["data", "make", "--help"], ["data", "check", "-h"]]
)
def test_every_command_explains_itself(words: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    assert end.value.code == 0
    assert "Usage" in capsys.readouterr().out


def test_defaults_that_are_words_are_told(tmp_path: Path) -> None:
    told = " ".join(process("sample", "--help", cwd=tmp_path).out.replace("│", " ").split())
    for default in ("RUN/drawn", "as trained", "the last that can"):
        assert f"[default: ({default})]" in told


def test_python_dash_m(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kineograph", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "kineo" in done.stdout


# Mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "no-such-preset"], "'no-such-preset' is neither a preset nor a file"),
        (["train", "toy.yaml", "train.stepps=3"], "unknown key train.stepps: did you mean train.steps?"),
        (["train", "toy.yaml", "stages.only.widht=3"], "did you mean stages.only.width?"),
        (["train", "toy.yaml", "train.lr=fast"], "train.lr='fast'"),
        (["train", "toy.yaml", "train.device=cuda:77"], "device cuda:77 is not there"),
        (["train", "toy.yaml", "train.precision=fp16"], "train.precision=fp16 needs a GPU"),
        (["train", "toy.yaml", "train.accumulate=3"], "does not divide"),
        (["train", "toy.yaml", "data.source=folder", "data.folder=gone"], "gone"),
        (["train", "toy.yaml", "train.prompts=x.txt"], "did you mean prompts? It stands beside train"),
        (
            ["train", "toy.yaml", "data={source: mix, mix: {dog: {source: moving_digits, folder: x}}}"],
            "data.mix.dog.source=moving_digits has no folder",
        ),
        (
            ["train", "toy.yaml", "data={source: mix, mix: {dog: {folder: x, shards: y}}}"],
            "data.mix.dog.source=folder has no shards",
        ),
        (["train", "gone.yaml"], "gone.yaml does not exist"),
        (["evaluate", "gone", "--metrics", ","], "',' names nothing: give names"),
        (["race", "digits", "--families", " , "], "names nothing: give names"),
        (["train", "toy.yaml", "--resume", "must"], "holds no run to resume"),
        (["train", "toy.yaml", "train.steps", "=", "3"], "`=` stands alone: write train.steps=3 without spaces"),
        (["train", "toy.yaml", "--dry-run", "train.stepps=3"], "did you mean train.steps?"),
        (["doctor", "toy.yaml", "train.stepps=3"], "did you mean train.steps?"),
        (["data", "make", "moving-digits", "--out", "digits", "frame=3"], "did you mean frames?"),
        (["data", "make", "moving-digits", "--out", "digits", "--as", "avi"], "use gif, mp4, png, memmap, webdataset"),
        (["sample", "runs/none", "a 3"], "runs/none is not a run folder"),
        (["story", "runs/none", "scenes.txt"], "runs/none is not a run folder"),
        (["story", "runs/none", "scenes.txt", "--format", "png"], "--format png is not supported here: use gif or mp4"),
        (["evaluate", "runs/none"], "runs/none is not a run folder"),
    ],
)
def test_a_mistake_is_one_plain_message_and_writes_nothing(here: Path, kineo, words: list[str], message: str) -> None:
    done = kineo(*words)
    assert done.code == 2, done.err
    assert message in done.err
    assert done.err.startswith("error: ")
    assert everything(here) == {"toy.yaml"}


def test_no_traceback_reaches_a_person(here: Path) -> None:
    done = process("train", "toy.yaml", "train.stepps=3", cwd=here)
    assert done == Done(2, "", "error: unknown key train.stepps: did you mean train.steps?\n")


def test_what_only_building_finds_out_is_found_before_anything_is_written(here: Path, kineo) -> None:
    (here / "toy.yaml").write_text(
        yaml.safe_dump({**TOY, "stages": {"tokenizer": {"task": "vqgan", "perceptual": {"weight": 0}}}})
    )
    done = kineo("train", "toy.yaml", "data.size=30")
    assert done.code == 2, done.err
    assert "30" in done.err
    assert everything(here) == {"toy.yaml"}


@pytest.mark.parametrize(
    "words",
    [
        ["trane"],
        ["train"],
        ["train", "x", "--resume", "maybe"],
        ["train", "x", "--nonsense"],
        ["sample"],
        ["story", "x"],
    ],
)
def test_wrong_arguments_exit_2(words: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    assert end.value.code == 2


def test_debug_shows_the_traceback(here: Path, kineo) -> None:
    with pytest.raises(ConfigError, match="stepps"):
        kineo("--debug", "train", "toy.yaml", "train.stepps=3")


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ConfigError("a\nb"), 2, "error: a\nb\n"),
        (RunFailed("diverged"), 1, "error: diverged\n"),
        (RunInUse("in use"), 3, "error: in use\n"),
        (Stopped("stopped"), 75, "stopped\n"),
        (ValueError("odd"), 1, "error: unexpected ValueError: odd (kineo --debug … shows where)\n"),
        (
            OSError(28, "No space left on device"),
            1,
            "error: No space left on device: free disk space, and run the same command again\n",
        ),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def fail(**arguments):
        raise error

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as end:
        cli.main(["train", "x"])
    assert end.value.code == code
    assert capsys.readouterr().err == text


def test_long_messages_are_not_wrapped(kineo) -> None:
    assert "x" * 300 in kineo("train", "toy.yaml", f"train.{'x' * 300}=3").err


# What works ------------------------------------------------------------------------------------------------------


def test_a_dry_run_exits_0_and_writes_nothing(here: Path, kineo) -> None:
    done = kineo("train", "toy.yaml", "--dry-run")
    assert done.code == 0, done.err
    assert "only: Toy" in done.out
    assert everything(here) == {"toy.yaml"}


def test_a_json_file_trains_too(here: Path, kineo) -> None:
    tree = {**TOY, "train": {**TOY["train"], "betas": [0.9, 0.95], "ema": {"decay": 0.5}}}
    (here / "toy.json").write_text(json.dumps(tree, indent="\t"))
    done = kineo("train", "toy.json")
    assert (done.code, done.out) == (0, "done: runs/toy\n"), done.err
    saved = yaml.safe_load((here / "runs/toy/config.yaml").read_text())
    assert saved["stages"]["only"]["train"]["betas"] == [0.9, 0.95]


def test_train_goes_on_from_a_checkpoint_elsewhere(here: Path, kineo) -> None:
    assert kineo("train", "toy.yaml").code == 0
    source = "runs/toy/only/checkpoints/step-00000002"
    done = kineo("train", "--run", "runs/more", "--resume-from", source, "train.steps=3")
    assert (done.code, done.out) == (0, "done: runs/more\n"), done.err
    assert (here / "runs/more/only/checkpoints/step-00000003").is_dir()
    for words in (["--resume-from", source], ["--run", "runs/x", "--resume-from", "nothing"], []):
        done = kineo("train", *words)
        assert done.code == 2 and len(done.err.splitlines()) <= 2, done.err
    assert kineo("train", "--run", "runs/x", "--resume-from", source, "--dry-run").code == 2
    assert not (here / "runs/x").exists()


def test_train_and_what_the_same_command_does_then(here: Path, kineo) -> None:
    done = kineo("train", "toy.yaml")
    assert done.code == 0, done.err
    assert done.out == "done: runs/toy\n"
    run = here / "runs/toy"
    assert (run / "only/checkpoints/step-00000002/manifest.json").is_file()
    before = (run / "metrics.jsonl").read_text()
    assert kineo("train", "toy.yaml").code == 0  # finished: nothing is trained again
    assert (run / "metrics.jsonl").read_text() == before
    for words, message in (
        (["train.lr=1"], "lr"),
        (["--resume", "never"], "holds a run already"),
        (["--dry-run", "train.lr=1"], "lr"),
    ):
        done = kineo("train", "toy.yaml", *words)
        assert (done.code, message in done.err) == (2, True), done.err
    with RunFolder(run).lock():
        done = process("train", "toy.yaml", cwd=here)
        assert done.code == 3, done.err
        assert "in use by process" in done.err
    listed = kineo("runs")
    assert listed.code == 0, listed.err
    assert "toy" in listed.out


def test_a_story_prints_its_files_and_tells_of_its_scenes(here: Path, kineo) -> None:
    from tests.sample.tiny_task import make_run

    make_run(here / "runs/clips", frames=7, generator="Counting", codec_task="PairCodec")
    (here / "scenes.txt").write_text("# one story\na 3 moves left\n\na 3 stops\n")
    done = kineo("story", "runs/clips", "scenes.txt", "--overlap", "3", "--device", "cpu")
    stem = "runs/clips/drawn/story-a-3-moves-left-0001"
    assert done == Done(
        0,
        f"{stem}.gif\n{stem}.png\n",
        "scene 1 of 2, frames 1 to 7: a 3 moves left\nscene 2 of 2, frames 8 to 11: a 3 stops\n",
    )
    before = everything(here)
    for words, message in (
        (["scenes.txt", "--overlap", "4"], "error: --overlap=4 does not fit scenes of 7 frames: use 1, 3, 5\n"),
        (
            ["gone.txt"],
            "error: gone.txt does not exist: give a text file with one scene per line, or a .jsonl file with an object per line\n",
        ),
    ):
        assert kineo("story", "runs/clips", *words, "--device", "cpu") == Done(2, "", message)
    longer = kineo("sample", "runs/clips", "a 3", "--prime", f"{stem}.gif", "--format", "png", "--device", "cpu")
    told = f"{stem}.gif: continuing the last 3 of 11 frames\ndrawing 1 sample on cpu\n"
    assert longer == Done(0, "runs/clips/drawn/a-3-0001.png\n", told)
    assert everything(here) - before == {"runs/clips/drawn/a-3-0001.png", "runs/clips/drawn/a-3-0001.json"}
    assert (
        kineo("sample", "runs/clips", "a 3", "--frames", "4").err
        == "error: frames=4 does not fit pairs: use 2k + 1 (1, 3, 5 …)\n"
    )


def test_data_make_prints_the_folder(here: Path, kineo) -> None:
    done = kineo("data", "make", "moving-digits", "--out", "digits", "--count", "2", "--as", "png", "size=24")
    assert (done.code, done.out) == (0, "digits\n"), done.err
    assert everything(here / "digits") == {"000000.png", "000000.txt", "000001.png", "000001.txt"}


def test_presets_are_listed(kineo) -> None:
    done = kineo("presets")
    assert done.code == 0, done.err
    assert "kineo train PRESET" in done.out


def test_the_function_train_survives_the_package_train(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import kineograph as kg
    import kineograph.train.ema
    from kineograph.train import checkpoint

    monkeypatch.chdir(here)
    assert kineograph.train.ema.Ema
    heard: list[dict] = []
    for _ in range(2):  # the second call finds the package where the function was
        run = kg.train("toy.yaml", on_log=heard.append, quiet=True, **{"train.steps": 1})
    assert checkpoint.saved_steps(run / "only/checkpoints") == [1]
    assert [record["step"] for record in heard if record["split"] == "train"] == [1]


def test_python_opens_and_judges_what_it_trained(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import kineograph as kg
    import kineograph.evaluate.runner  # hides the function

    monkeypatch.chdir(here)
    run = kg.train("toy.yaml", quiet=True, **{"train.steps": 1})
    assert kineograph.evaluate.runner.Evaluation
    evaluation = kg.evaluate(run, ["loss"], samples=4)
    assert evaluation["loss"] > 0
    stage = kg.load_stage(run / "only")
    assert not stage.training and not any(parameter.requires_grad for parameter in stage.parameters())
    for path, message in {
        run: f"is a run: name one of its stages ({run}/only)",
        run / "other": "has no stage 'other': the stages are only",
        run / "a" / "b": "is not a run folder",
    }.items():
        with pytest.raises(kg.KineoError, match=re.escape(message)):
            kg.load_stage(path)


@pytest.mark.parametrize(
    ("error", "where"),
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 80 bytes"), "machine"),
        (MemoryError(), "machine"),
        (torch.OutOfMemoryError("tried to allocate"), "GPU"),
    ],
)
def test_memory_that_ran_out_is_told_with_what_helps(
    error: Exception, where: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as end:
        cli._report(error)
    assert end.value.code == 1
    assert f"the {where} is out of memory: lower train.batch_size" in capsys.readouterr().err
