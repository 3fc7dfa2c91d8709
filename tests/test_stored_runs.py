"""Runs made by an earlier version still load: they sample the same pixels, and training resumes.

tests/fixtures/runs holds a two-step run of every family, shrunk to a few thousand parameters, and the clip that the version
which trained them sampled from each with seed 5.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import kineograph as kg
from kineograph.core.errors import InputError

STORED = Path(__file__).parent / "fixtures" / "runs"
PROMPTS = {
    "phenaki": "a 3 moves left",
    "cogvideox": "a 3 moves left",
    "nuwa": "a 3 moves left",
    "muse": "a red 3 at the top left",
    "dalle2": "a red 3 at the top left",
}


@pytest.fixture(params=PROMPTS)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    with tarfile.open(STORED / f"{request.param}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / request.param


def test_a_stored_run_samples_the_same_pixels(run: Path) -> None:
    expected = load_file(STORED / "samples.safetensors")[run.name]
    stage = "decoder" if run.name == "dalle2" else None
    samples = kg.load(run, device="cpu", stage=stage).sample([PROMPTS[run.name]], seed=5)
    torch.testing.assert_close(samples.pixels.float(), expected, rtol=0, atol=1e-4)


def test_a_config_larger_than_its_weights_is_refused_before_its_model_takes_memory(run: Path) -> None:
    """A run from elsewhere: a matrix of this width takes 16 GiB."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    name = list(config["stages"])[-1] if run.name != "dalle2" else "decoder"
    stage = config["stages"][name]
    stage["head_width" if run.name == "cogvideox" else "width"] = 2**16
    (run / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    reason = rf"{run}/{name}: the saved weights do not fit .* needs .*load them with the config they were trained with"
    with pytest.raises(InputError, match=reason):
        kg.load(run, device="cpu", stage=name)
    with pytest.raises(InputError, match=reason):
        kg.train(run / "config.yaml", run=run, resume="must", quiet=True, **{"train.steps": 3})


def test_a_stored_run_resumes(run: Path) -> None:
    kg.train(run / "config.yaml", run=run, resume="must", quiet=True, **{"train.steps": 3})
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    stages = {record["stage"] for record in records}
    for stage in stages:
        steps = [r["step"] for r in records if r["stage"] == stage and r["split"] == "train"]
        assert steps == [1, 2, 3]
