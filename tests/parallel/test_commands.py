"""kineo sample, evaluate and cache over two processes: the same files and numbers as from one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from kineograph.cli import main
from kineograph.run.cache import cache_run
from tests.parallel import worlds
from tests.parallel.commands import cached_rows, commands

CONFIG = {
    "seed": 3,
    "data": {"source": "moving_digits", "size": 16, "frames": 1, "glyphs": 2, "count": 40, "validation": 0.3, "test": 0.1},
    "train": {
        "steps": 2, "batch_size": 8, "save_every": 2, "validate_every": 0, "sample_every": 0, "workers": 0, "trackers": [], "device": "cpu",
    },
    "stages": {
        "tokenizer": {"task": "vqgan", "width": 8, "multipliers": [1, 2], "patch": 2, "quantizer": {"kind": "fsq", "levels": [4, 4]},
                      "adversarial": {"weight": 0}, "perceptual": {"weight": 0}},
        "generator": {"task": "muse", "codec": "tokenizer", "width": 16, "depth": 1, "heads": 2, "text": {"kind": "learned", "width": 16, "depth": 1},
                      "sample": {"steps": 2}},
    },
}  # fmt: skip
PROMPTS = ["a red 3 at the top left", "a blue 5 at the centre", "a red 3 at the top left"]


def done(words: list[str]) -> None:
    """A command in this process."""
    assert commands(words) == [0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "small.yaml").write_text(yaml.safe_dump(CONFIG, sort_keys=False))
    done(["train", str(folder / "small.yaml"), "--run", str(folder / "run")])
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def told(out: Path) -> dict[str, dict]:
    """Sidecars by name, without what tells the two calls apart."""
    sidecars = {path.name: json.loads(path.read_text()) for path in sorted(out.glob("*.json"))}
    return {name: {key: value for key, value in tree.items() if key != "command"} for name, tree in sidecars.items()}


def judged(run: Path) -> dict[str, dict]:
    """Results of evaluation.json, by stage and metric."""
    (results,) = json.loads((run / "evaluation.json").read_text())["results"].values()
    return {f"{stage} {name}": found for stage, metrics in results.items() for name, found in metrics.items()}


def test_samples_and_scores_are_those_of_one_process(run: Path, tmp_path: Path) -> None:
    """One world for both, since starting one takes longest. Two rows of three captions and one: neither divides."""
    many = ["sample", str(run), *PROMPTS]
    single = ["sample", str(run), PROMPTS[0]]
    judge = ["evaluate", str(run), "--metrics", "loss,caption_accuracy,reconstruction,codebook"]
    alone = tmp_path / "alone"
    for out, words in ((alone, many), (alone, single)):
        done([*words, "--out", str(out)])
    done([*judge, "--samples", "9"])
    expected = judged(run)
    pictures = {path.name: path.read_bytes() for path in (run / "evaluation").iterdir()}
    shutil.rmtree(run / "evaluation")
    (run / "evaluation.json").unlink()

    both = str(tmp_path / "both")
    lines = [[*many, "--out", both], [*single, "--out", both], [*judge, "--samples", "9"]]
    lines += [["evaluate", str(run), "--metrics", "loss", "--samples", "1", "--split", "test"]]  # one has nothing to do
    lines += [["sample", str(run), "x", "--format", "jpeg"]]
    assert worlds.run(2, "tests.parallel.commands:commands", tmp_path / "world", *lines) == [[0, 0, 0, 0, 2]] * 2

    names = sorted(path.name for path in alone.iterdir())
    assert names == sorted(path.name for path in Path(both).iterdir())
    assert "a-red-3-at-the-top-left-0003.png" in names
    for name in names:
        if not name.endswith(".json"):
            assert (alone / name).read_bytes() == (Path(both) / name).read_bytes(), name
    assert told(alone) == told(Path(both))

    found = judged_split(run, "validation")
    assert found.keys() == expected.keys()
    for name, result in expected.items():
        assert found[name]["labels"] == result["labels"]
        assert found[name]["values"] == pytest.approx(result["values"], rel=1e-4), name
    assert {path.name for path in (run / "evaluation").iterdir()} >= pictures.keys()
    for name, picture in pictures.items():
        assert (run / "evaluation" / name).read_bytes() == picture, name
    one = judged_split(run, "test")["tokenizer/step-00000002 loss"]
    assert one["samples"] == 1

    first, second = (worlds.output_of(tmp_path / "world", rank) for rank in range(2))
    assert "evaluation.json" in first
    assert "a-red-3-at-the-top-left-0002.png" in first
    assert "error: rank 0: --format jpeg is not supported" in first
    lines = [line for line in second.splitlines() if not line.startswith("---")]
    assert all(line.startswith("error: rank 1: --format jpeg is not supported") for line in lines)


def judged_split(run: Path, split: str) -> dict[str, dict]:
    results = json.loads((run / "evaluation.json").read_text())["results"][split]
    return {f"{stage} {name}": found for stage, metrics in results.items() for name, found in metrics.items()}


def test_a_score_of_one_item_is_not_counted_twice(run: Path, tmp_path: Path) -> None:
    words = ["evaluate", str(run), "--metrics", "loss,codebook", "--samples", "1"]
    done(words)
    expected = judged(run)
    (run / "evaluation.json").unlink()
    assert worlds.run(2, "tests.parallel.commands:commands", tmp_path / "world", words) == [[0], [0]]
    found = judged(run)
    for name, result in expected.items():
        assert found[name]["values"] == pytest.approx(result["values"], rel=1e-4)
        assert found[name]["labels"] == result["labels"]


def test_a_cache_is_divided_and_goes_on_with_another_number_of_processes(
    run: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = Path(shutil.copytree(trained, tmp_path / "alone"))
    monkeypatch.setattr("kineograph.cache.fill.BATCH", 4)
    (path,) = cache_run([str(alone)], note=lambda line: None)
    expected = cached_rows(path)
    assert len(expected) == 40

    # Two processes, both stopped on the way; then three; one process finds all of it done.
    assert worlds.run(2, "tests.parallel.commands:cache", tmp_path / "two", str(run), 8) == [75, 75]
    headers = [json.loads(path.read_text()) for path in run.glob("generator/cache/pack-*/cache.json")]
    assert [header["done"] for header in headers] == [8, 8]
    assert worlds.run(3, "tests.parallel.commands:cache", tmp_path / "three", str(run)) == [0, 0, 0]
    lines: list[str] = []
    (path,) = cache_run([str(run)], note=lines.append)
    assert lines == ["generator: all 40 items were encoded before"]
    assert cached_rows(path) == expected
    assert len(list(path.parent.glob("pack-*"))) == 5
    said = [worlds.output_of(tmp_path / "three", rank) for rank in range(3)]
    assert f"24 items encoded into {path}, 16 were in the cache already" in said[0]
    assert said[1] == said[2] == ""


def test_pruning_waits_until_all_processes_release_the_run(run: Path, tmp_path: Path) -> None:
    (path,) = cache_run([str(run)], note=lambda line: None)
    old = Path(shutil.copytree(path, path.with_name("0123456789abcdef")))
    words = ["cache", str(run), "--prune"]
    assert worlds.run(2, "tests.parallel.commands:commands", tmp_path / "world", words) == [[0], [0]]
    assert path.exists() and not old.exists()
    assert worlds.output_of(tmp_path / "world", 0).count(f"{old} removed") == 1


def test_what_cannot_be_divided_is_done_once(trained: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`kineo export` under a launcher: the first process does it, the others end at once."""
    out = tmp_path / "out"
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    main(["export", str(trained), str(out), "--to", "safetensors"])
    assert not out.exists()
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit) as end:
        main(["export", str(trained), str(out), "--to", "safetensors"])
    assert end.value.code == 0
    assert out.exists()
