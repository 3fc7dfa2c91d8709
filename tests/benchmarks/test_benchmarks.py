"""The harness on shrunk cases: timing, result files, messages."""

from __future__ import annotations

import json
import time
from datetime import date
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import case as cases
from benchmarks.case import Case, Peer, Workload, load_cases
from benchmarks.cases import muse, phenaki, vqgan
from benchmarks.machine import Machine
from benchmarks.measure import Timing, count_flops, time_calls
from benchmarks.report import ResultFile, Row, compare, to_json
from kineograph.core.task import player_parameters
from kineograph.train import checkpoint

CPU = torch.device("cpu")
MACHINE = Machine("a machine", 2, "3.12", "2.11", None, "abc", 0.1)

# The peers' trainable parameters at the full sizes, counted on muse-maskgit-pytorch 0.3.5
PEER_VQGAN = 93_681_556
PEER_MUSE = 103_325_181
PEER_CVIVIT, PEER_CVIVIT_DISCRIMINATOR = 51_350_000, 20_680_000
PEER_PHENAKI = 63_293_256


def toy(name: str = "toy", call=lambda: None, peer: Peer | None = None, parameters: int = 100) -> Case:
    return Case(name, "a toy", {"batch": 4}, {}, lambda sizes, device: Workload(call, sizes["batch"], parameters), peer)


def toy_peer(module: str = "torch", seconds: dict[str, float] | None = None, parameters: int = 100) -> Peer:
    def build(sizes, device):
        return Workload(lambda: time.sleep((seconds or {}).get(sizes["precision"], 0.0)), sizes["batch"], parameters)

    return Peer("torch", "1.0", module, build, needs=())


@pytest.fixture
def only(monkeypatch):
    def use(*chosen: Case) -> None:
        monkeypatch.setattr(cases, "load_cases", lambda: {case.name: case for case in chosen})

    return use


def run(tmp_path, *arguments: str) -> tuple[int, dict | None]:
    code = command.main([*arguments, "--device", "cpu", "--small", "--repeat", "1", "--out", str(tmp_path)])
    found = list(tmp_path.glob("*.json"))
    return code, json.loads(found[0].read_text())["runs"][-1] if found else None


# Cases -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(load_cases()))
def test_every_case_runs_shrunk_and_is_written(name, tmp_path):
    code, written = run(tmp_path, name)
    assert code == 0
    (row,) = written["rows"]
    assert row["case"] == name
    assert row["side"] == "ours"
    assert row["error"] is None
    assert row["timing"]["ms"] > 0
    assert row["samples_per_s"] == pytest.approx(row["samples"] / row["timing"]["ms"] * 1000)
    if not name.startswith("data"):
        assert row["parameters"] > 1000
        assert row["tflops"] > 0
        assert row["mfu"] == pytest.approx(row["tflops"] / written["machine"]["matmul_tflops"])


def test_full_sizes_match_the_peers():
    from kineograph.codec.vqgan import VQGAN, VQGANConfig
    from kineograph.core.batch import Shape
    from kineograph.core.config import parse

    with torch.device("meta"):
        tree = vqgan.match_peer_layout(128, 65536) | {"adversarial": {"width": 128, "levels": 4}}
        codec = VQGAN(parse(VQGANConfig, tree), Shape(1, 256, 256, 3, 8.0))
        generator = muse._build_our_model(muse.TRAIN)
    assert sum(p.numel() for p in codec.parameters()) == pytest.approx(PEER_VQGAN, rel=0.05)
    assert sum(p.numel() for p in generator.parameters()) == pytest.approx(PEER_MUSE, rel=0.05)
    assert generator.grid == (16, 16)


def test_phenaki_is_as_large_as_the_peer():
    with torch.device("meta"):
        judged = {"perceptual": {"weight": 0}, "adversarial": phenaki.match_peer_discriminator(phenaki.CODEC)}
        codec = phenaki._build_codec(phenaki.CODEC, judged)
        generator = phenaki._build_our_model(phenaki.TRAIN)
    parts = {player: sum(p.numel() for p in player_parameters(codec, player).values()) for player in codec.players}
    assert parts["generator"] == pytest.approx(PEER_CVIVIT, rel=0.05)
    assert parts["discriminator"] == pytest.approx(PEER_CVIVIT_DISCRIMINATOR, rel=0.05)
    assert sum(p.numel() for p in generator.parameters()) == pytest.approx(PEER_PHENAKI, rel=0.05)
    assert generator.grid == (9, 16, 16)


@pytest.mark.parametrize("case", ["vqgan-train", "cvivit-train"])
def test_codecs_compute_the_penalty_in_every_step(case, monkeypatch):
    """The peers do so too; with a lazy penalty the ratio would be wrong."""
    from kineograph.codec import codec_loss

    paid = []
    penalty = codec_loss.finite_difference_r1
    monkeypatch.setattr(codec_loss, "finite_difference_r1", lambda *scores: paid.append(1) or penalty(*scores))
    work = load_cases()[case].ours(load_cases()[case].resolve_sizes(small=True), CPU)
    paid.clear()
    for _ in range(2):
        work.call()
    assert len(paid) == 2


# Measuring -------------------------------------------------------------------------------------------------------


def test_timing_is_the_median_of_the_repeats_without_the_warm_up(monkeypatch):
    clock = [0.0]
    durations = iter([100.0, 100.0, 1.0, 5.0, 2.0, 3.0, 4.0, *[7.0] * 5])
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def call() -> None:
        clock[0] += next(durations)

    timing = time_calls(call, CPU, warmup=2, repeat=5)
    assert timing.ms == pytest.approx(3000)
    assert (timing.low, timing.high) == (pytest.approx(2000), pytest.approx(4000))
    assert timing.pipelined_ms == pytest.approx(7000)


def test_operations_are_those_of_forward_and_backward():
    rows, inner, out = 3, 5, 7
    x, w = torch.randn(rows, inner, requires_grad=True), torch.randn(inner, out, requires_grad=True)
    assert count_flops(lambda: x @ w) == 2 * rows * inner * out
    assert count_flops(lambda: (x @ w).sum().backward()) == 3 * 2 * rows * inner * out


def test_operations_are_counted_through_inner_gradients_and_in_inference_mode():
    layer = torch.nn.Linear(5, 7)
    x = torch.randn(3, 5, requires_grad=True)

    def penalised() -> None:
        (slope,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
        slope.square().sum().backward()

    assert count_flops(penalised) >= 2 * 2 * 3 * 5 * 7
    with torch.inference_mode():
        assert count_flops(lambda: layer(torch.randn(3, 5))) == 2 * 3 * 5 * 7


# Comparing -------------------------------------------------------------------------------------------------------


def row(side: str, ms: float | None, precision: str = "fp32", parameters: int = 100) -> Row:
    timing = Timing(ms, ms, ms, ms, 1, None) if ms is not None else None
    return Row("case", side, precision, 4, parameters, None, timing, error=None if timing else "crashed")


def test_the_peers_fastest_precision_counts_and_a_crashed_one_does_not():
    (pair,) = compare([row("ours", 10.0), row("peer 1", 40.0), row("peer 1", 30.0, "bf16")])
    assert pair.ratio == pytest.approx(3.0)
    (pair,) = compare([row("ours", 10.0), row("peer 1", 40.0), row("peer 1", None, "bf16")])
    assert pair.ratio == pytest.approx(4.0)
    assert compare([row("ours", 10.0), row("peer 1", None)]) == []


@pytest.mark.parametrize(("parameters", "matched"), [(104, True), (96, True), (106, False), (94, False)])
def test_sizes_more_than_five_percent_apart_are_flagged(parameters, matched):
    (pair,) = compare([row("ours", 1.0, parameters=parameters), row("peer 1", 1.0)])
    assert pair.matched is matched


def test_the_peer_runs_in_the_same_call(tmp_path, only, capsys):
    only(toy(peer=toy_peer(seconds={"fp32": 0.05}, parameters=200)))
    code, written = run(tmp_path, "--peer")
    assert code == 0
    assert [row["side"] for row in written["rows"]] == ["ours", f"torch {torch.__version__}"]
    assert written["comparisons"][0]["ratio"] > 1
    assert written["comparisons"][0]["parameters_apart"] == pytest.approx(-0.5)
    assert "MORE THAN 5% APART" in capsys.readouterr().out


# Errors ----------------------------------------------------------------------------------------------------------


def test_a_missing_peer_is_named_before_anything_is_timed(tmp_path, only, capsys):
    timed = []
    only(toy(call=lambda: timed.append(1), peer=toy_peer(module="a_peer_that_is_not_here")))
    code, written = run(tmp_path, "--peer")
    assert (code, written, timed) == (2, None, [])
    message = capsys.readouterr().err
    assert "a_peer_that_is_not_here" in message
    assert "pip install torch==1.0" in message


def test_a_missing_peer_does_not_matter_without_the_flag(tmp_path, only):
    only(toy(peer=toy_peer(module="a_peer_that_is_not_here")))
    assert run(tmp_path)[0] == 0


def test_an_unknown_case_names_the_closest(tmp_path, capsys):
    assert run(tmp_path, "muse-trian") == (2, None)
    assert "did you mean muse-train?" in capsys.readouterr().err


def test_a_case_that_fails_leaves_the_others_running(tmp_path, only):
    def broken() -> None:
        raise RuntimeError("no kernel for this")

    only(toy("broken", broken), toy("fine"))
    code, written = run(tmp_path)
    assert code == 1
    first, second = written["rows"]
    assert first["error"] == "RuntimeError: no kernel for this"
    assert first["timing"] is None
    assert second["timing"]["ms"] >= 0


def test_deterministic_steps(tmp_path, only):
    seen: list[bool] = []
    only(toy("toy", lambda: seen.append(torch.are_deterministic_algorithms_enabled())))
    assert run(tmp_path, "--deterministic")[0] == 0
    assert seen and all(seen) and not torch.are_deterministic_algorithms_enabled()
    assert [path.name[10:] for path in tmp_path.iterdir()] == ["-cpu-small-deterministic.json"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there(tmp_path, capsys):
    assert command.main(["data-digits", "--device", "cuda", "--out", str(tmp_path)]) == 2
    assert "--device cpu" in capsys.readouterr().err


# Writing ---------------------------------------------------------------------------------------------------------


def test_a_record_has_the_command_and_the_machine(tmp_path, only):
    only(toy())
    _, written = run(tmp_path, "toy")
    assert written["command"] == f"python -m benchmarks toy --device cpu --small --repeat 1 --out {tmp_path}"
    assert written["machine"]["torch"] == torch.__version__
    assert {"device", "cores", "python", "cuda", "commit", "matmul_tflops"} <= written["machine"].keys()
    assert (tmp_path / f"{date.today().isoformat()}-cpu-small.json").exists()


def test_runs_of_one_day_share_a_file(tmp_path):
    rows = [row("ours", 1.0), row("ours", 2.0)]
    for _ in range(2):
        file = ResultFile(tmp_path, "cpu")
        for known in (1, 2):  # an interrupted run keeps its rows
            path = file.write(to_json(rows[:known], MACHINE, "python -m benchmarks case"))
            assert len(json.loads(path.read_text())["runs"][-1]["rows"]) == known
    assert [len(run["rows"]) for run in json.loads(path.read_text())["runs"]] == [2, 2]


def test_the_cost_of_a_save_is_measured(tmp_path: Path) -> None:
    from benchmarks.saving import measure

    found = measure(torch.device("cpu"), 1.0, 2, tmp_path)
    assert found["checkpoint_mb"] == pytest.approx(16 * found["millions"], rel=0.05)  # weights, average, two moments
    assert found["copy_s"] > 0 and found["write_s"] > 0
    assert found["background_s"] >= found["copy_s"]
    assert len(checkpoint.saved_steps(tmp_path)) <= 2  # old checkpoints are deleted


@pytest.mark.parametrize("codec", ["h264", "hevc", "vp9"])
def test_clips_of_every_codec_are_read(tmp_path: Path, codec: str) -> None:
    from benchmarks.reading import measure_clips, write_clips

    write_clips(tmp_path, codec, 1, (48, 64), 30)
    found = measure_clips(tmp_path, 2, pixels=32, frames=4)
    assert 0 < found["cpu_seconds_per_clip"] < 5 and len(list(tmp_path.iterdir())) == 1


@pytest.mark.slow
def test_the_start_on_a_folder_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands are right: they run, here in this process."""
    from benchmarks import reading
    from kineograph.data.file_listing import list_folder
    from tests.run.calling import kineo

    codes = []
    monkeypatch.setattr(reading, "time_command", lambda *words: {"cpu_seconds": codes.append(kineo(*words)) or 1.0})
    reading.write_pictures(tmp_path / "pictures", 40)
    listing = list_folder(tmp_path / "pictures")
    assert len(listing.media) == len(listing.others) == 40
    (tmp_path / "runs").mkdir()
    assert len(reading.measure_start(tmp_path / "pictures", tmp_path / "runs")) == 4 and codes == [0] * 4


def test_saving_and_scaling_write_result_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a new folder, one file per day, with the command."""
    from benchmarks import saving, scaling

    monkeypatch.setattr("benchmarks.saving.measure", lambda *given: {"copy_s": 1.0})
    monkeypatch.setattr(
        "benchmarks.scaling._measure_world", lambda n, seconds: {"processes": n, "data": 1.0, "train": 1.0}
    )
    out = tmp_path / "new" / "folder"
    for main, words in ((saving.main, ["--device", "cpu"]), (scaling.main, ["--processes", "1"])):
        for _ in range(2):
            main([*words, "--out", str(out)])
    kept = {path.name.split("-")[3]: json.loads(path.read_text())["runs"] for path in out.iterdir()}
    assert {name: len(runs) for name, runs in kept.items()} == {"saving": 2, "scaling": 2}
    assert kept["saving"][0]["saving"] == {"copy_s": 1.0} and kept["scaling"][1]["rows"][0]["processes"] == 1
    for name, runs in kept.items():
        assert runs[0]["command"].startswith(f"python -m benchmarks.{name} --") and "torch" in runs[0]["machine"]
