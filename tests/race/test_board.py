"""The table of a race: order, bounds, medians, who is absent; and boards of several races."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kineograph.core.errors import InputError
from kineograph.core.run_folder import write_json
from kineograph.race.board import (
    check_board,
    explain_empty_race,
    find_families_without_progress,
    list_remarks,
    make_markdown,
    make_rows,
    show_board,
    update_board,
)
from kineograph.race.results import collect_figures, join_seeds, rank_families


def record(minutes: float = 5.0, **accuracies: list[float]) -> dict[str, Any]:
    entries: dict[str, Any] = {
        f"{family}-{seed}": {
            "family": family,
            "figures": {"caption accuracy": value, "FID": 100 * (1 - value), "steps": 1200, "M parameters": 3.5},
            "bounds": {"ceiling": 0.99, "chance": 0.02, "codec": 0.9},
        }
        for family, values in accuracies.items()
        for seed, value in enumerate(values)
    }
    return {
        "name": "digits",
        "shape": "17 frames of 64 px",
        "request": {"minutes": minutes, "seeds": 3, "judge": {"samples": 256}},
        "machine": {"device": "a GPU", "torch": "2", "kineograph": "0.1.0"},
        "command": "kineo race digits",
        "date": "2026-11-18",
        "unable": {},
        "entries": entries,
    }


def test_families_stand_by_their_median_with_bounds_below() -> None:
    head, rows = make_rows(record(nuwa=[0.5, 0.7, 0.6], phenaki=[0.9, 0.8, 0.1]))
    assert head == ["family", "caption accuracy", "FID", "M parameters", "steps"]
    assert rows[:2] == [
        ["phenaki", "0.800 (worst of 3: 0.100)", "20.00 (worst of 3: 90.00)", "3.50", "1,200"],
        ["nuwa", "0.600 (worst of 3: 0.500)", "40.00 (worst of 3: 50.00)", "3.50", "1,200"],
    ]
    assert [row[:2] for row in rows[2:]] == [
        ["real held-out items", "0.990"],
        ["reconstructions by the codec of nuwa", "0.900"],
        ["reconstructions by the codec of phenaki", "0.900"],
        ["chance", "0.020"],
    ]


def test_without_captions_that_can_be_read_a_distance_decides() -> None:
    figures = {"a": [{"FID": 30.0, "samples/s": 9.0}], "b": [{"FID": 20.0, "caption accuracy": 1.0, "samples/s": 1.0}]}
    assert rank_families({family: join_seeds(each) for family, each in figures.items()}) == ["b", "a"]


def test_speed_and_codecs_order_no_families() -> None:
    tree = record(nuwa=[0.5], phenaki=[0.6])
    for entry, psnr in zip(tree["entries"].values(), (20.0, 30.0), strict=True):
        entry["figures"] = {"codec PSNR": psnr, "samples/s": psnr, "steps": 1200}
    assert [row[0] for row in make_rows(tree)[1]] == ["nuwa", "phenaki"]
    assert "their order means nothing: kineo weights get" in list_remarks(tree)[0]


def test_figures_are_those_of_the_newest_judging(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("stages: {generator: {task: muse}}")
    (tmp_path / "metrics.jsonl").write_text("")

    def judged(metric: str, day: int, rate: float) -> dict[str, Any]:
        return {
            "values": {metric: 1.0},
            "labels": {},
            "drawn_per_second": rate,
            "samples": 200,
            "date": f"2026-11-{day:02d}",
        }

    records = {"kid": judged("kid", 19, 8.0), "fid": judged("fid", 18, 2.0)}
    write_json(tmp_path / "evaluation.json", {"results": {"validation": {"generator/step-00000100": records}}})
    assert collect_figures(tmp_path)[0].items() >= {"FID": 1.0, "KID": 1.0, "samples/s": 8.0}.items()
    assert collect_figures(tmp_path)[1]["samples"] == 200
    assert "FID" not in collect_figures(tmp_path, "kid, is")[0], "an earlier judge computed it"


def test_who_is_absent_is_named_with_the_reason(capsys: pytest.CaptureFixture) -> None:
    tree = record(phenaki=[0.9])
    tree["unable"] = {"muse": "data.frames=17 does not fit muse"}
    tree["entries"]["nuwa-0"] = {"family": "nuwa", "failure": "kineo train ended with code 1"}
    assert list_remarks(tree) == [
        "muse cannot race here: data.frames=17 does not fit muse",
        "nuwa-0 failed: kineo train ended with code 1",
    ]
    show_board(tree)
    said = capsys.readouterr().out
    assert "phenaki" in said and "muse cannot race here" in said
    assert "- nuwa-0 failed: kineo train ended with code 1" in make_markdown(tree)


def test_families_at_chance_are_named_and_a_race_of_these_alone_fails() -> None:
    tree = record(phenaki=[0.0, 0.03], nuwa=[0.0, 0.4])
    # 0.03 of 256 is within three deviations of 0.02; one seed of nuwa learned.
    assert find_families_without_progress(tree) == {"phenaki": "is no better than chance"}
    assert "phenaki is no better than chance: its place in the order means nothing" in list_remarks(tree)
    assert explain_empty_race(tree) is None
    assert "no family learned anything in --minutes 5" in str(explain_empty_race(record(phenaki=[0.0])))
    tree = record(phenaki=[0.0])
    tree["entries"]["phenaki-0"]["samples"] = 3  # held-out items: too few to tell
    assert explain_empty_race(tree) is None
    assert "; 3 held-out prompts." in make_markdown(tree)
    del tree["entries"]["phenaki-0"]["figures"]["caption accuracy"]  # data without a reader
    assert explain_empty_race(tree) is None
    tree["entries"]["phenaki-0"]["figures"] |= {"steps": 6, "minutes": 7.0}
    assert "fewer than 100 are a trial" in list_remarks(tree)[0] and explain_empty_race(tree)
    assert list_remarks(tree)[1].startswith("phenaki-0 took 7.00 minutes instead of 5")


def test_stages_that_are_not_healthy_stand_below_the_table() -> None:
    tree = record(muse=[0.5])
    tree["entries"]["muse-0"]["findings"] = ["tokenizer: codec_collapsed: explained_variance is -0.5"]
    assert "- muse-0: tokenizer: codec_collapsed: explained_variance is -0.5" in make_markdown(tree)


def test_a_race_in_which_all_failed_has_a_table_of_none() -> None:
    tree = record()
    tree["entries"] = {"nuwa-0": {"family": "nuwa", "failure": "no"}}
    assert make_rows(tree) == (["family"], [])
    show_board(tree)


def test_a_board_holds_many_races_and_the_newest_of_each(tmp_path: Path) -> None:
    board = tmp_path / "docs" / "board.md"
    update_board(board, record(2.0, phenaki=[0.5]))
    update_board(board, record(5.0, phenaki=[0.7]))
    update_board(board, record(2.0, phenaki=[0.6]))
    text = board.read_text()
    assert text.count("\n## digits") == 2
    assert "| phenaki | 0.600 |" in text and "| phenaki | 0.700 |" in text and "0.500" not in text
    assert text.index("2 minutes") < text.index("5 minutes")
    check_board(board)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file is a file; use another folder"):
        check_board(tmp_path / "file" / "board.md")
    (tmp_path / "README.md").write_bytes("# Größe\n".encode("latin-1"))
    with pytest.raises(InputError, match="is no board of a race"):
        check_board(tmp_path / "README.md")
