"""The example family of CONTRIBUTING.md is code that works, and needs the places that it says, no others."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

from kineograph.core.batch import Batch, Prompts, Shape
from kineograph.core.config import parse
from kineograph.core.config_file import load_file, read_yaml
from kineograph.core.noise import Noise
from kineograph.core.registry import find_task
from kineograph.core.task import BuildContext, player_parameters

TEXT = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
MODULE = "kineograph.family.flow"
CAPTIONS = ["a 3 moves left", "a 7 moves up"]


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)
    return found


@pytest.fixture(scope="module")
def flow(tmp_path_factory):
    """The module as if it lay under kineograph/family."""
    import kineograph.family

    folder = tmp_path_factory.mktemp("family")
    (folder / "flow.py").write_text(block("python"), encoding="utf-8")
    kineograph.family.__path__.append(str(folder))
    yield importlib.import_module(MODULE)
    kineograph.family.__path__.remove(str(folder))
    del sys.modules[MODULE], kineograph.family.flow


@pytest.fixture
def task(flow):
    torch.manual_seed(0)
    stage = read_yaml(block("yaml"), "preset")["stages"]["generator"]
    config = parse(flow.TASK.Config, stage)
    context = BuildContext(shape=Shape(4, 8, 8, 1, 8.0), captions=lambda: CAPTIONS, note=lambda line: None)
    return flow.TASK.build(config, context)


def batch() -> Batch:
    pixels = torch.zeros(2, 4, 1, 8, 8, dtype=torch.uint8)
    pixels[0, :, :, 1:4, 1:4] = 255
    pixels[1, :, :, 4:7, 4:7] = 255
    return Batch(slots=torch.arange(2), pixels=pixels, captions=CAPTIONS)


def test_it_learns_one_batch(task):
    parameters = list(player_parameters(task, "model").values())
    assert len(parameters) == len(list(task.parameters()))
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    losses = []
    for _ in range(40):
        loss = task.loss("model", task(batch(), Noise.for_rows(0, 0, 2))).total.value()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_it_samples(task):
    options = task.config.sample.model_copy(update={"steps": 3})

    def draw(seed: int = 0, captions: list[str] | None = CAPTIONS, **more) -> torch.Tensor:
        return task.sample(Prompts(Noise.for_rows(seed, 0, 2), captions, **more), options)

    drawn = draw()
    assert drawn.shape == (2, 4, 1, 8, 8)
    assert 0 <= drawn.min() < drawn.max() <= 1
    assert torch.equal(drawn, draw())
    for other in (draw(seed=1), draw(captions=CAPTIONS[::-1]), draw(captions=None), draw(negative=["", "a 3"])):
        assert not torch.equal(drawn, other)
    assert draw(frames=2).shape[1] == 2


def test_padding_frames_do_not_count(task):
    padded = batch()
    padded.frame_mask = torch.tensor([[True, True, False, False], [True, True, True, True]])
    errors, mask = task(padded, Noise.for_rows(0, 0, 2))
    total = task.loss("model", (errors, mask)).total
    assert total.value().item() == pytest.approx(torch.cat([errors[0, :2], errors[1]]).mean().item())


def test_the_preset_is_one(flow, tmp_path):
    from kineograph.run.plan import make_plan
    from kineograph.run.presets import read_header

    path = tmp_path / "flow-tiny.yaml"
    path.write_text(block("yaml"), encoding="utf-8")
    assert set(read_header(path)) == {"Summary", "Command", "Hardware", "Time", "Expect"}
    plan = make_plan(load_file(path))
    assert [stage.name for stage in plan.stages] == ["generator"]
    assert plan.stages[0].spec.task is flow.TASK


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """The same module in a package of the user's own, with a preset in a folder of theirs."""
    package, presets = tmp_path / "my_package", tmp_path / "presets"
    for folder in (package, presets):
        folder.mkdir()
    (package / "__init__.py").write_text("")
    (package / "flow.py").write_text(block("python"), encoding="utf-8")
    (presets / "__init__.py").write_text("")
    preset = block("yaml").replace("task: flow", "task: my_package.flow")
    (presets / "flow-outside.yaml").write_text(preset, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield presets
    for name in ("my_package", "my_package.flow", "presets"):
        sys.modules.pop(name, None)


def test_a_family_of_another_package_trains_from_its_own_preset(outside, tmp_path, monkeypatch):
    from kineograph.run.train import train

    monkeypatch.setenv("KINEO_PRESETS", str(outside))
    quick = [
        "train.steps=2", "train.batch_size=4", "train.validation_samples=2", "train.samples=2", "train.workers=0", "train.trackers=[]",
        "train.sample_every=2", "data.count=20", "train.device=cpu", "stages.generator.sample.steps=2", "train.warmup=1",
    ]  # fmt: skip
    folder = train(["flow-outside", *quick], run=tmp_path / "run", quiet=True)
    assert list((folder / "generator" / "samples" / "step-00000002").glob("*.gif"))


def test_entry_points_name_tasks_and_presets(outside):
    from kineograph.run import layers

    metadata = outside.parent / "my_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[kineograph.tasks]\nmy_flow = my_package.flow\n[kineograph.presets]\nmine = presets\n"
    )
    assert find_task("my_flow").__module__ == "my_package.flow"
    assert find_task("my_package.flow") is find_task("my_package.flow.Flow") is find_task("my_flow")
    assert layers.find_preset("flow-outside").parent == outside


def test_the_commands_that_are_named_exist():
    makefile = (Path(__file__).parents[1] / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"(?:^|`)make ([a-z-]+)", TEXT, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
