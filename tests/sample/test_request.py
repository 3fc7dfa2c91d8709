"""A request is declared once: the command line, the sidecar and the repeated command follow its fields."""

from __future__ import annotations

import inspect
import shlex
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from kineograph import cli
from kineograph.cli import sampling
from kineograph.core.errors import InputError
from kineograph.sample import command
from kineograph.sample.request import SampleRequest
from kineograph.sample.sampler import Sampler
from tests.sample.tiny_task import make_run

NAMES = {item.name for item in fields(SampleRequest)}


def test_every_field_is_an_option_of_the_commands():
    sample, story = (set(inspect.signature(function).parameters) for function in (sampling.sample, sampling.story))
    assert sample - {"out", "format", "trust", "prompts_file"} == NAMES - {"overlap"}
    assert story - {"out", "format", "scenes", "trust"} == NAMES - {"prompts", "count", "size", "mask", "batch"}


@pytest.mark.parametrize("prompts", [["a 3", "-x 'y'"], ["a 3"], None])
def test_the_command_of_a_request_gives_the_same_request(prompts, monkeypatch, tmp_path):
    request = SampleRequest(
        "runs/x", "generator", 20, ema=False, seed=7, prompts=prompts, count=2, negative="dull" if prompts else None, frames=3,
        size=(16, 24), fps=12.5, prime="a b.gif", sketch="s.png", mask="m.png", options={"sample.palette": [0.5, 0.25]}, compile=True, batch=3,
    )  # fmt: skip
    repeated = []

    def keep(run, prompts, out, format, note, **flags):
        repeated.append((SampleRequest.from_flags(run, prompts, **flags), out, format))
        return []

    monkeypatch.setattr(command, "write_samples", keep)
    plain = replace(request, options={"palette": [0.5, 0.25]})  # as the sampler resolves it
    words = shlex.split(plain.to_command("sample", prompts or [], tmp_path, "png"))
    with pytest.raises(SystemExit) as end:
        cli.main(words[1:])
    assert end.value.code == 0
    (again, out, format) = repeated[0]
    files = {name: str(getattr(again, name)) for name in ("prime", "sketch", "mask")}
    assert (replace(again, checkpoint=int(again.checkpoint), **files), out, format) == (request, tmp_path, "png")


def test_a_tensor_has_no_file_name():
    request = SampleRequest("runs/x", prime=torch.zeros(1, 3, 8, 8))
    assert "--prime FILE" in request.to_command("sample", [], Path("out"), None)


def test_what_has_no_effect_is_refused(tmp_path):
    sampler = Sampler.open(make_run(tmp_path / "run", frames=4).path, device="cpu")
    with pytest.raises(InputError, match="overlap=2 has an effect in a story only"):
        sampler.sample("a 3", overlap=2)
    with pytest.raises(InputError, match="no effect in a story"):
        sampler.story(["a 3"], count=2)
    with pytest.raises(InputError, match="--negative has no effect without a prompt"):
        sampler.sample(None, negative="dull")
    with pytest.raises(TypeError, match="stage"):  # chosen when the run is opened
        sampler.sample("a 3", stage="generator")
