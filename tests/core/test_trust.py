"""A config from elsewhere runs nothing: pipes, dotted paths and TorchScript need to be typed here, or --trust."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import yaml
from safetensors.torch import save_file

from kineograph.cli import main
from kineograph.core import trust
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.registry import find_source, find_task
from kineograph.core.run_folder import RunFolder
from kineograph.evaluate.extractor.registry import open_extractor
from kineograph.run.layers import read_config
from kineograph.run.plan import resolve_run
from kineograph.train import checkpoint
from tests.train.toy_tasks import Toy

TOY = "tests.train.toy_tasks.Toy"
COMMANDS = (["train", "--run"], ["sample"], ["evaluate"], ["export", "--to", "safetensors"], ["cache"], ["compare"])


@pytest.fixture(autouse=True)
def _nothing_typed(monkeypatch, tmp_path):
    """A machine on which nobody typed anything yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(trust, "_accepted", set())
    monkeypatch.setattr(trust, "_all_trusted", False)


def hand_over(folder, **keys):
    """A run folder as a stranger gives it away, with a trained stage."""
    stage = {"task": "vqgan", **keys}
    folder.mkdir()
    config = {"name": "gift", "resolved": True, "stages": {"only": stage}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    state = {"stage": "only", "config": config}
    checkpoint.save(folder / "only" / "checkpoints", 1, {"model": {"x": torch.zeros(1)}}, state)
    return folder


@pytest.mark.parametrize("shards", ["{pi,x}pe:touch MARK", "{pipe,x}:touch MARK", ["a.tar", "p{ip,x}e:touch MARK"]])
def test_braces_do_not_spell_a_command(tmp_path, shards):
    """Nothing that does not begin with pipe: is a command, since it is completed to an absolute path first."""
    mark = tmp_path / "ran"
    shards = json.loads(json.dumps(shards).replace("MARK", str(mark)))
    folder = hand_over(tmp_path / "gift", data={"source": "webdataset", "shards": shards, "validation": 0})
    assert run_command(["train", "--run"], folder, tmp_path / "out") == 2
    assert not mark.exists()


def run_command(command, folder, out):
    words = [command[0], *command[1:], str(folder)] if command[0] == "train" else [command[0], str(folder)]
    if command[0] == "export":
        words = [*words, str(out), *command[1:]]
    with pytest.raises(SystemExit) as stop:
        main(words)
    return stop.value.code


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize(
    "keys",
    [
        {"data": {"source": "webdataset", "shards": "pipe:touch MARK"}},
        {"data": {"source": "webdataset", "shards": ["a.tar", "{pipe:touch MARK,b.tar}"]}},
        {"data": {"source": "subprocess.Popen", "arguments": {"args": ["touch", "MARK"]}}},
        {"task": "planted"},
        {"task": "planted.Task"},
        {"train": {"metrics": ["planted.Metric"]}},
    ],
    ids=["pipe", "hidden-pipe", "source", "module", "class", "metric"],
)
def test_a_run_from_elsewhere_runs_nothing(tmp_path, monkeypatch, capsys, command, keys):
    mark = tmp_path / "ran"
    (tmp_path / "planted.py").write_text(f"open({str(mark)!r}, 'w')\nclass Task: pass\nTASK = Task\n")
    monkeypatch.syspath_prepend(tmp_path)
    keys = json.loads(json.dumps(keys).replace("MARK", str(mark)))
    folder = hand_over(tmp_path / "gift", **keys)
    assert run_command(command, folder, tmp_path / "out") == 2
    message = capsys.readouterr().err
    assert "never typed on this machine" in message
    assert "--trust" in message
    assert next(text for text in ("pipe:touch", "subprocess.Popen", "planted") if text in json.dumps(keys)) in message
    assert not mark.exists()


def test_a_checkpoint_from_elsewhere_runs_nothing(tmp_path):
    gift = hand_over(tmp_path / "gift", data={"source": "webdataset", "shards": f"pipe:touch {tmp_path}/ran"})
    source = str(gift / "only" / "checkpoints" / "step-00000001")
    with pytest.raises(SystemExit) as stop:
        main(["train", "--resume-from", source, "--run", str(tmp_path / "mine")])
    assert stop.value.code == 2
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "mine").exists()


def test_a_resolved_file_from_elsewhere_runs_nothing(tmp_path):
    gift = hand_over(tmp_path / "gift", task=TOY)
    with pytest.raises(InputError, match=TOY):
        read_config([str(gift / "config.yaml")])


def test_a_run_that_names_no_code_needs_no_trust(tmp_path):
    gift = hand_over(tmp_path / "gift", data={"source": "moving-digits"}, train={"metrics": ["fid", "loss"]})
    assert RunFolder(gift).config()["stages"]["only"]["task"] == "vqgan"


def test_trust_accepts_the_code(tmp_path):
    gift = hand_over(tmp_path / "gift", task=TOY)
    with pytest.raises(InputError, match=f"stages.only.task: {TOY}"):
        RunFolder(gift).config()
    trust.trust_all()
    assert RunFolder(gift).config()


def typed(tmp_path, **keys):
    file = tmp_path / "typed.yaml"
    file.write_text(yaml.safe_dump({"stages": {"only": {"task": TOY, **keys}}}))
    return str(file)


def test_what_was_typed_here_runs_again_without_being_typed(tmp_path, monkeypatch):
    plan, folder = resolve_run([typed(tmp_path)], tmp_path / "run")
    folder.write_config(plan.tree())
    monkeypatch.setattr(trust, "_accepted", set())  # another process
    assert RunFolder(tmp_path / "run").config()
    shutil.move(tmp_path / "run", tmp_path / "moved")
    assert RunFolder(tmp_path / "moved").config()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another machine"))
    with pytest.raises(InputError, match="never typed on this machine"):
        RunFolder(tmp_path / "moved").config()


def test_the_same_command_resumes_a_run_that_nothing_remembers(tmp_path):
    """A run of an older version, or a home that cannot be written."""
    gift = hand_over(tmp_path / "run", task=TOY)
    with pytest.raises(InputError, match="never typed"):
        resolve_run([], gift)
    assert resolve_run([typed(tmp_path)], gift)


def test_secrets_of_a_command_are_not_kept(tmp_path):
    trust.remember({"data": {"shards": "pipe:curl -u me:hunter2 x"}})
    kept = (tmp_path / "state" / "kineograph" / "typed_code").read_text()
    assert kept
    assert "hunter2" not in kept


@pytest.mark.parametrize(
    "name", ["os.system", "subprocess.Popen", "collections.OrderedDict", "tests.train.toy_tasks.torch"]
)
def test_only_classes_of_their_kind_are_called(name):
    with pytest.raises(ConfigError, match=r"Task"):
        find_task(name)
    with pytest.raises(ConfigError, match=r"Dataset"):
        find_source(name)
    assert find_task(TOY) is Toy


def test_a_module_of_ours_does_not_vouch_for_another_of_its_name(tmp_path, monkeypatch):
    """kineograph.data.probe is no source, so `source: probe` would import a file probe.py that came with the run."""
    (tmp_path / "probe.py").write_text("SOURCE = 1/0\n")
    monkeypatch.syspath_prepend(tmp_path)
    gift = hand_over(tmp_path / "gift", data={"source": "probe"})
    with pytest.raises(InputError, match="never typed"):
        RunFolder(gift).config()


def test_torchscript_needs_trust(tmp_path):
    path = tmp_path / "net.pt"
    torch.jit.script(torch.nn.Identity()).save(str(path))
    with pytest.raises(InputError, match="--trust"):
        open_extractor(str(path), torch.device("cpu"))
    save_file({"x": torch.zeros(1)}, tmp_path / "net.safetensors")
    with pytest.raises(InputError, match="does not hold the weights"):
        open_extractor(str(tmp_path / "net.safetensors"), torch.device("cpu"))
    trust.trust_all()
    assert open_extractor(str(path), torch.device("cpu"))


@pytest.mark.parametrize("text", ["stages: [1]", "stages: {a: 1}", "stages: {a: {task: 1}}", "name: x"])
def test_a_damaged_config_is_named(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(InputError, match=r"config\.yaml is damaged"):
        RunFolder(tmp_path).config()
