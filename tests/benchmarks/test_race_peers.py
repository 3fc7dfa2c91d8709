"""The race of the public packages: refusals, resuming, crashes, the table; the packages themselves are not needed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks.race_peers import __main__ as command
from benchmarks.race_peers import judge, report
from benchmarks.race_peers.contestant import Contestant, count_trained, load_contestants
from benchmarks.race_peers.track import Bf16Failed, Stage, TextStandIn, Words, fit_size
from kineograph.core.errors import InputError, RunFailed
from kineograph.evaluate.metric_api import Result

JUDGE = {"samples": 2, "metrics": None, "extractors": []}
DATA = {"source": "moving_digits", "size": 32, "frames": 1, "glyphs": 3, "grid": 4, "count": 400}
CPU = torch.device("cpu")


def peer(family: str = "muse", module: str = "torch") -> Contestant:
    return Contestant(family, "torch", "1.0", module, lambda track: pytest.fail("trained here"), needs=())


def entry(seed: int = 0, accuracy: float = 0.25) -> dict:
    return {
        "peer": "torch 1.0", "family": "muse", "seed": seed, "rate": 1.0, "figures": {"caption accuracy": accuracy},
        "labels": {}, "bounds": {"codec": 0.5}, "skipped": {"clip_score": "no CLIP"}, "notes": ["a workaround"],
        "stages": {"codec": {"steps": 1200, "minutes": 0.5, "batch": 8, "precision": "fp32"}},
    }  # fmt: skip


@pytest.fixture
def race(tmp_path) -> Path:
    for family in ("muse", "dalle2"):
        (tmp_path / "runs" / f"{family}-0").mkdir(parents=True)
        (tmp_path / "plans").mkdir(exist_ok=True)
        (tmp_path / "plans" / f"{family}.yaml").write_text("")
    ours = {"family": "muse", "seed": 0, "figures": {"caption accuracy": 0.75}, "bounds": {"ceiling": 1.0}}
    record = {
        "name": "digits", "shape": "pictures of 32 px", "date": "2026-11-18", "command": "kineo race digits",
        "request": {"data": DATA, "minutes": 0.5, "seeds": 1, "judge": JUDGE}, "unable": {},
        "machine": {"device": "CPU", "torch": "2", "kineograph": "0.1"}, "entries": {"muse-0": ours},
    }  # fmt: skip
    (tmp_path / "race.json").write_text(json.dumps(record))
    return tmp_path


@pytest.fixture
def run(monkeypatch, race):
    """Run the command with fake peers. `result`: name → entry or an exception; → exit code and the names that ran."""
    monkeypatch.setattr(command, "write_peer_sheet", lambda *_: None)

    def call(result, *arguments: str, known=("muse", "dalle2")):
        ran: list[str] = []

        def run_peer(folder, contestant, name, seed, rate):
            ran.append(name)
            found = result(name, seed)
            if isinstance(found, Exception):
                raise found
            return found

        monkeypatch.setattr(command, "run_peer", run_peer)
        monkeypatch.setattr(command, "load_contestants", lambda: {name: peer(name) for name in known})
        return command.main([str(race), *arguments]), ran

    return call


def test_refuses_a_folder_without_a_race(tmp_path, capsys):
    assert command.main([str(tmp_path)]) == 2
    assert "kineo race DATA --run" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("names", "reason"), [("muze", "muse"), ("nuwa", "kineo race --families nuwa"), ("muse,nuwa", "no trained nuwa")]
)
def test_refuses_peers_that_it_does_not_know_or_that_have_no_family(race, names, reason):
    with pytest.raises(InputError, match=reason):
        command.choose_peers(names, race, {name: peer(name) for name in ("muse", "nuwa")})


def test_names_the_packages_to_install(race):
    with pytest.raises(InputError, match=r"pip install torch==1\.0"):
        command.choose_peers("muse", race, {"muse": peer(module="no_such_module")})


def test_without_names_all_race_whose_family_has_trained(race):
    chosen, unable = command.choose_peers(None, race, {name: peer(name) for name in ("muse", "nuwa", "dalle2")})
    assert [each.family for each in chosen] == ["muse", "dalle2"]
    assert "nuwa" in unable


@pytest.mark.parametrize("words", [["--seeds", "0"], ["--lr-factor", "0"], ["--seeds", "x"]])
def test_refuses_impossible_numbers(race, words):
    with pytest.raises(SystemExit) as refused:
        command.main([str(race), *words])
    assert refused.value.code == 2


def test_what_is_done_is_not_done_again_and_a_failure_is_tried_again(run, race):
    def first(name, seed):
        return entry() if name == "muse-0" else {"peer": "torch 1.0", "family": "dalle2", "seed": 0, "failure": "boom"}

    code, ran = run(first)
    assert (code, ran) == (1, ["muse-0", "dalle2-0"])
    saved = json.loads((race / "peers.json").read_text())
    assert saved["entries"]["dalle2-0"]["failure"] == "boom"
    assert "dalle2-0 (torch 1.0) failed: boom" in (race / "peers.md").read_text()
    code, ran = run(lambda name, seed: {**entry(), "family": "dalle2"})
    assert (code, ran) == (0, ["dalle2-0"])


def test_an_interruption_keeps_what_is_done(run):
    code, ran = run(lambda name, seed: entry() if name == "muse-0" else command.Stopped("stopped by SIGTERM"))
    assert (code, ran) == (75, ["muse-0", "dalle2-0"])
    assert run(lambda name, seed: entry())[1] == ["dalle2-0"]


def test_another_judge_or_another_learning_rate_is_another_entry(run, race):
    run(lambda name, seed: entry(), "--peers", "muse")
    assert run(lambda name, seed: entry(), "--peers", "muse", "--lr-factor", "3")[1] == ["muse-0-lr3"]
    record = json.loads((race / "race.json").read_text())
    record["request"]["judge"]["samples"] = 4
    (race / "race.json").write_text(json.dumps(record))
    assert run(lambda name, seed: entry(), "--peers", "muse")[1] == ["muse-0"]


def test_another_device_than_that_of_the_race_is_refused(run, race, capsys):
    record = json.loads((race / "race.json").read_text())
    record["machine"]["device"] = "a GPU"
    (race / "race.json").write_text(json.dumps(record))
    assert run(lambda name, seed: entry()) == (2, [])
    assert "was raced on a GPU, and this machine has CPU" in capsys.readouterr().err


def test_a_crash_is_a_failure_with_its_last_line(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "sys", SimpleNamespace(executable=sys.executable))
    found = command.run_peer(tmp_path, peer("no-such-family"), "no-such-family-0", 0, 1.0)
    assert found["failure"] == "ended with code 1: KeyError: 'no-such-family'"


def test_a_peer_that_fails_in_bf16_begins_again_in_fp32(tmp_path, monkeypatch):
    asked: list[str] = []

    def run_process(log: Path, words: list[str]) -> int:
        asked.append(words[4])
        if words[4] == "bf16":
            log.write_text("the loss is nan")
            return command.BF16_FAILED
        Path(words[5]).write_text(json.dumps(entry()))
        return 0

    monkeypatch.setattr(command, "run_process", run_process)
    found = command.run_peer(tmp_path, peer(), "muse-0", 0, 1.0)
    assert asked == ["bf16", "fp32"]
    assert found["notes"] == ["begun again in fp32: the loss is nan", "a workaround"]


def test_table_has_ours_beside_theirs_and_what_was_done(race):
    record = json.loads((race / "race.json").read_text())
    unguided = {"figures": {"caption accuracy": 0.5}}
    peers = {
        "entries": {"muse-0": {**entry(), report.UNGUIDED: unguided}},
        "request": {"seeds": 1},
        "unable": {},
        "command": "c",
    }
    table = report.make_table(record, peers)
    order = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")]
    assert order[:4] == ["family", "muse", "torch 1.0, unguided", "torch 1.0"]
    assert "| torch 1.0 | 0.250 |" in table
    assert "codec 1,200 steps of 8 in fp32" in table
    assert "- a workaround" in table
    assert "- clip_score skipped: no CLIP" in table


def test_sheet_has_ours_and_theirs(race, monkeypatch):
    from kineograph.core.run_folder import write_json
    from kineograph.data.open_source import parse_data_config
    from kineograph.media.clips import write_clip
    from kineograph.race.plan import choose_prompts

    prompts, _ = choose_prompts(parse_data_config(DATA))
    for folder in (race / "samples" / "muse-0", race / "peers" / "muse-0"):
        folder.mkdir(parents=True)
        for number, prompt in enumerate(prompts):
            write_clip(folder / f"{number}.png", torch.rand(1, 3, 32, 32), 8)
            write_json(folder / f"{number}.json", {"prompt": prompt, "file": f"{number}.png"})
    record = json.loads((race / "race.json").read_text())
    assert report.write_peer_sheet(race, record, {"entries": {"muse-0": entry()}}) == race / "peers.png"


def test_words_pad_and_know_unknown_ones():
    words = Words.learn(iter(["a red 3", "a blue 7"]), length=4)
    ids = words.encode(["a red zebra", ""], CPU)
    assert ids.shape == (2, 4)
    assert ids[0, 0] == 2
    assert ids[0, 2:].tolist() == [1, 0]
    assert ids[1].tolist() == [0, 0, 0, 0]


def test_text_stand_in_is_zero_where_there_is_no_word_and_depends_on_the_order():
    words = Words.learn(iter(["red moves left"]), length=5)
    text = TextStandIn(words, SimpleNamespace(width=16, heads=2, depth=1, dropout=0.0)).eval()
    first, second, null = text(["red left", "left red", ""])
    assert not first[2:].any() and not null.any()
    assert torch.isfinite(first).all()
    assert not torch.allclose(first[0], second[1])


@pytest.mark.parametrize("target", [700, 4_000, 30_000])
def test_fit_size_finds_the_nearest_width(target):
    sizes = {width: width * width for width in range(8, 512, 8)}
    best = min(sizes, key=lambda width: abs(torch.tensor(sizes[width] / target).log()))
    assert fit_size(lambda width: nn.Linear(width, width, bias=False), target, 8) == best


def test_fit_size_passes_over_sizes_that_a_constructor_refuses():
    def build(width: int) -> nn.Module:
        assert width >= 32
        return nn.Linear(width, width, bias=False)

    assert fit_size(build, 32 * 32, 8) == 32


def make_stage(precision: str) -> tuple[Stage, list[str]]:
    notes: list[str] = []
    stage = Stage.__new__(Stage)
    stage.track = SimpleNamespace(note=notes.append)
    stage.title, stage.precision, stage.trained_in, stage.steps = "codec", precision, precision, 0
    return stage, notes


def test_a_peer_that_crashes_in_bf16_goes_on_in_fp32():
    stage, notes = make_stage("bf16")

    def step(item):
        if stage.precision == "bf16":
            raise RuntimeError("value cannot be converted to type c10::BFloat16")
        return torch.tensor(1.0)

    stage._step(step, None)
    assert (stage.precision, stage.steps) == ("fp32", 1)
    assert "fp32, since it crashes in bf16" in notes[0]
    with pytest.raises(RuntimeError):
        stage._step(lambda item: (_ for _ in ()).throw(RuntimeError("later")), None)


def test_a_sampler_that_crashes_in_bf16_goes_on_in_fp32():
    stage, notes = make_stage("bf16")

    def draw(count):
        if stage.precision == "bf16":
            raise RuntimeError("expected Float")
        return torch.zeros(count)

    assert len(stage.draw_with(draw)(2)) == 2
    assert (stage.precision, stage.trained_in) == ("fp32", "bf16")
    assert "crashes in bf16" in notes[0]


@pytest.mark.parametrize(("precision", "error"), [("bf16", Bf16Failed), ("fp32", RunFailed)])
def test_a_loss_that_is_not_finite_ends_the_peer(precision, error):
    stage, _ = make_stage(precision)
    with pytest.raises(error, match="nan at step 0"):
        stage._step(lambda item: torch.tensor(float("nan")), None)


def test_drawn_pixels_must_have_the_shape_and_be_finite():
    shape = torch.Size((1, 1, 3, 4, 4))
    assert judge.check_drawn(torch.full(shape, 2.0), shape).max() == 1
    with pytest.raises(RuntimeError, match="not finite"):
        judge.check_drawn(torch.full(shape, float("nan")), shape)
    with pytest.raises(RuntimeError, match="drew"):
        judge.check_drawn(torch.zeros(1, 1, 3, 4, 5), shape)


def test_metrics_are_those_of_the_race_and_the_bound_of_captions():
    record = {"entries": {"a": {"figures": {"caption accuracy": 1.0, "steps": 3}}, "b": {"failure": "x"}}}
    assert judge.find_metrics(record) == ["caption_accuracy", "reconstructed_captions"]


def test_a_peer_is_told_from_chance_as_ours_are():
    result = Result({"caption_accuracy": 0.02}, {"ceiling": 1.0, "chance": 0.02, "count": 256})
    found = judge._collect({"caption_accuracy": SimpleNamespace(compute=lambda: result)}, {}, [(1, 1.0)])
    assert found["bounds"] == {"ceiling": 1.0, "chance": 0.02}


def test_shared_parameters_are_counted_once():
    layer = nn.Linear(2, 2)
    assert count_trained([layer, nn.Sequential(layer)]) == 6


def test_every_family_of_a_race_has_a_peer():
    assert list(load_contestants()) == ["muse", "phenaki", "nuwa", "dalle2", "cogvideox"]
