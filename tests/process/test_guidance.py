import importlib.util
import math
import re
from pathlib import Path

import pytest
import torch

from kineograph.process.guidance import apply_guidance, guidance_scales, make_guided_denoiser, scale_table
from kineograph.process.solvers import timesteps


def test_guidance_leaves_the_variance_alone():
    wanted, other = torch.randn(2, 6, 3, 3), torch.randn(2, 6, 3, 3)
    found = apply_guidance(wanted, other, 5.0, channels=3)
    torch.testing.assert_close(found[:, :3], other[:, :3] + 5 * (wanted[:, :3] - other[:, :3]))
    assert torch.equal(found[:, 3:], wanted[:, 3:])


@pytest.mark.parametrize("outputs", [3, 6])
def test_the_closure_sees_by_its_channels_what_is_variance(outputs):
    x, t = torch.randn(2, 3, 4, 4), torch.tensor([7, 2])
    answers = torch.randn(4, outputs, 4, 4)
    calls = []

    def denoise(rows, times):
        calls.append((rows, times))
        return answers.bfloat16()

    found = make_guided_denoiser(denoise, 2.5)(x, t)
    assert len(calls) == 1
    assert torch.equal(calls[0][0], torch.cat([x, x])) and calls[0][1].tolist() == [7, 2, 7, 2]
    wanted, other = answers.bfloat16().float().chunk(2)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found[:, :3], other[:, :3] + 2.5 * (wanted - other)[:, :3])
    assert torch.equal(found[:, 3:], wanted[:, 3:])


def test_a_table_gives_each_level_its_scale():
    times = timesteps(100, 4)
    table = scale_table(4.0, times, "linear")
    assert [float(table[t]) for t in times] == [1.0, 2.0, 3.0, 4.0]
    rows = torch.cat([torch.ones(2, 3), torch.zeros(2, 3)])
    found = make_guided_denoiser(lambda x, t: rows, table)(torch.zeros(2, 3), torch.tensor([times[3], times[1]]))
    assert found.tolist() == [[4.0] * 3, [2.0] * 3]


def test_the_cosine_rises_late_from_no_guidance():
    found = guidance_scales(6.0, timesteps(1000, 51), "cosine")
    assert found[0] == 1 and found[-1] == pytest.approx(7) and found == sorted(found)
    assert found[25] == pytest.approx(1 + 6 * (1 - math.cos(math.pi / 32)) / 2)
    assert guidance_scales(6.0, [999], "constant") == [6.0]


def test_the_oscillating_one_is_that_of_the_released_pipeline():
    """Its formula, taken from the source of diffusers and evaluated."""
    package = importlib.util.find_spec("diffusers")
    assert package is not None and package.origin is not None
    source = (Path(package.origin).parent / "pipelines/cogvideo/pipeline_cogvideox.py").read_text(encoding="utf-8")
    found = re.search(r"self\._guidance_scale = (1 \+ guidance_scale \* \(.*?\n\s+\))\n", source, re.DOTALL)
    assert found is not None
    formula = found.group(1).replace("t.item()", "t")
    times = timesteps(1000, 50)
    wanted = [eval(formula, {"math": math, "guidance_scale": 6.0, "num_inference_steps": 50, "t": t}) for t in times]
    assert guidance_scales(6.0, times, "oscillating") == pytest.approx(wanted)
    turns = sum((b - a) * (c - b) < 0 for a, b, c in zip(wanted, wanted[1:], wanted[2:], strict=False))
    assert turns > 10
