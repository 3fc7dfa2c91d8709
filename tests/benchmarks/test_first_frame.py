"""Clips drawn from first frames are compared with the real ones."""

from __future__ import annotations

import torch

from benchmarks.first_frame import measure_following, measure_psnr
from kineograph.sample.prompt_file import read_prompts
from tests.sample.tiny_task import make_run


def test_the_first_frame_itself_does_not_count():
    real = torch.zeros(2, 3, 1, 4, 4)
    drawn = real.clone()
    drawn[:, 0], drawn[:, 1:] = 1, 0.1
    assert round(measure_psnr(drawn, real), 3) == 20


def test_a_run_is_drawn_with_and_without_its_pictures(tmp_path):
    run = make_run(tmp_path / "run", frames=7, generator="Counting", codec_task="PairCodec")
    found = measure_following(run.path, tmp_path / "out", 3)
    assert list(found) == ["with its first frame", "from its caption alone", "the average clip"]
    assert found["the average clip"] > found["with its first frame"] != found["from its caption alone"]
    prompts = read_prompts(tmp_path / "out" / "prompts.jsonl")
    assert [prompt.image for prompt in prompts] == [str(tmp_path / "out" / f"{index:04d}.png") for index in range(3)]
