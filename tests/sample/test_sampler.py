from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kineograph.cli import main
from kineograph.core.batch import Batch, Prompts, Sample
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.task import BuildContext
from kineograph.media.clips import write_clip
from kineograph.process.solvers import DiffusionSample
from kineograph.sample.inference import draw, draw_across_ranks, sampling_noise
from kineograph.sample.request import SampleRequest
from kineograph.sample.sampler import Sampler, check_guidance
from kineograph.train import checkpoint
from tests.sample.tiny_task import TinyConfig, TinyGenerator, make_run, save_stage

CAPTIONS = ["a 3", "a red 7 moves left", "an 8"]


@pytest.fixture(scope="module")
def sampler(tmp_path_factory) -> Sampler:
    return Sampler.open(make_run(tmp_path_factory.mktemp("runs") / "clips", frames=4).path, device="cpu")


def test_rows_are_captions_times_count(sampler):
    drawn = sampler.sample(CAPTIONS, count=2)
    assert drawn.pixels.shape == (6, 4, 3, 32, 32)
    assert drawn.captions == [text for text in CAPTIONS for _ in range(2)]
    assert drawn.pixels.min() >= 0
    assert drawn.pixels.max() <= 1
    assert not torch.equal(drawn.pixels[0], drawn.pixels[1])  # two samples of one caption differ


def test_the_repr_of_samples_leaves_out_pixels(sampler):
    shown = repr(sampler.sample("a 3"))
    assert "captions=['a 3']" in shown and "tensor" not in shown and len(shown) < 500


def test_same_seed_same_pictures_whatever_the_batch(sampler):
    whole = sampler.sample(CAPTIONS, count=2, seed=5, batch=6)
    parts = sampler.sample(CAPTIONS, count=2, seed=5, batch=4)
    torch.testing.assert_close(whole.pixels, parts.pixels, rtol=0, atol=1e-6)
    assert torch.equal(whole.pixels, sampler.sample(CAPTIONS, count=2, seed=5, batch=6).pixels)
    assert not torch.equal(whole.pixels, sampler.sample(CAPTIONS, count=2, seed=6, batch=6).pixels)


def test_options_reach_the_task_and_unknown_ones_name_the_right_key(sampler):
    plain = sampler.sample(CAPTIONS)
    assert sampler.sample(CAPTIONS, guidance=2.0).pixels.mean() != plain.pixels.mean()
    assert sampler.sample(CAPTIONS, options={"sample.guidance": 2.0}).options == sampler.resolve_options(guidance=2.0)
    assert sampler.resolve_options({"palette": [0.2, 0.3]}, steps=4).palette == (0.2, 0.3)
    with pytest.raises(ConfigError, match=r"sample\.guidence.*did you mean sample\.guidance"):
        sampler.sample(CAPTIONS, options={"sample.guidence": 2.0})
    with pytest.raises(ConfigError, match=r"sample\.steps"):
        sampler.sample(CAPTIONS, steps=0)


def test_guidance_without_effect_is_refused(sampler):
    with pytest.raises(InputError, match="raise --guidance"):
        sampler.sample(["a 3"], guidance=1.0, negative="blurred")
    with pytest.raises(InputError, match="--guidance 2 has no effect without a prompt"):
        sampler.sample(None, guidance=2.0)


def test_negative_prompt_and_count_without_captions(sampler):
    led = sampler.sample(["a 3"], guidance=2.0)
    assert not torch.equal(sampler.sample(["a 3"], guidance=2.0, negative="blurred").pixels, led.pixels)
    drawn = sampler.sample("", count=3)
    assert len(drawn) == 3
    assert drawn.captions == [""] * 3


def test_a_negative_prompt_without_guidance_is_refused(sampler):
    with pytest.raises(InputError, match="--negative has no effect at guidance=1: raise --guidance"):
        sampler.sample(["a 3"], guidance=1.0, negative="blurred")
    request = SampleRequest("run", prompts=["a 3"], negative="blurred")
    with pytest.raises(InputError, match="at guidance=0"):  # this schedule ends at 1 + guidance
        check_guidance(DiffusionSample(guidance=0.0, guidance_schedule="cosine"), request)
    check_guidance(DiffusionSample(guidance=1.0, guidance_schedule="cosine"), request)


def test_captions_are_left_out_on_purpose_only(sampler):
    with pytest.raises(InputError, match=r'there is no prompt, and .* draws captions: give one; "" draws uncond'):
        sampler.sample()
    assert sampler.sample("").captions == [""]
    assert sampler.sample(prime=torch.rand(1, 3, 32, 32)).captions == [None]


def test_captions_are_text(sampler):
    with pytest.raises(InputError, match="prompt 3 has type int: give a str"):
        sampler.sample(["a 3", 3])


def test_frames_and_size(sampler):
    assert sampler.sample("a 3", frames=6, size=(16, 40)).pixels.shape == (1, 6, 3, 16, 40)
    with pytest.raises(ConfigError, match="multiples of 8"):
        sampler.sample("a 3", size=30)
    with pytest.raises(InputError, match="--frames 0 is too small"):
        sampler.sample("a 3", frames=0)
    with pytest.raises(InputError, match="at least one caption"):
        sampler.sample([])


def test_prime_is_read_resized_and_recoloured(sampler, tmp_path):
    gray = torch.zeros(2, 1, 64, 96)
    gray[:, :, :, 48:] = 1.0
    path = write_clip(tmp_path / "start.gif", gray, fps=8)
    drawn = sampler.sample(["a 3", "a 4"], prime=path)
    assert drawn.pixels[:, :2, :, :, :14].max() < 0.02
    assert drawn.pixels[:, :2, :, :, 18:].min() > 0.98
    same_size = torch.rand(1, 3, 32, 32)
    torch.testing.assert_close(sampler.sample("a 3", prime=same_size).pixels[0, :1], same_size)
    with pytest.raises(InputError, match="does not exist"):
        sampler.sample("a 3", prime=tmp_path / "gone.gif")


def test_a_real_sample_beside_each_prompt_reaches_the_task(sampler):
    real = Batch.collate(
        [Sample(pixels=torch.full((4, 3, 32, 32), level, dtype=torch.uint8), caption="") for level in (0, 100, 200)],
        [0, 1, 2],
    )
    seen: list[Tensor] = []

    class Looking(TinyGenerator):
        def sample(self, prompts: Prompts, options: object) -> Tensor:
            assert prompts.batch is not None
            assert prompts.batch.pixels is not None
            assert len(prompts.batch.captions or []) == len(prompts)
            seen.append(prompts.batch.pixels)
            return super().sample(prompts, options)

    task = Looking(TinyConfig(task="x"), BuildContext(sampler.shape))
    prompts = Prompts(sampling_noise(0, torch.arange(3)), CAPTIONS, batch=real)
    draw(task, prompts, sampler.options, "cpu", batch=2)
    assert torch.equal(torch.cat(seen), real.pixels)


def test_training_samples_equal_later_inference(tmp_path):
    run = make_run(tmp_path / "run", frames=2)
    task = save_stage(run, "generator", 20)  # unfrozen, with the averaged weights, as the Trainer judges it
    later = Sampler.open(run.path, device="cpu")
    task.train()
    prompts = Prompts(sampling_noise(9, torch.arange(3)), CAPTIONS, frames=3)
    now = draw_across_ranks(task, prompts, later.options, "cpu")
    assert torch.equal(now.pixels, later.sample(CAPTIONS, seed=9, frames=3).pixels)
    assert all(module.training for module in task.modules())  # dropout is on again
    assert not now.pixels.is_inference()
    loss = task.dropout(task.mix(torch.ones(1, 4))).sum()
    loss.backward()


def test_checkpoints_and_ema(tmp_path):
    run = make_run(tmp_path / "run", step=10)
    save_stage(run, "generator", 20, tweak=0.3)
    checkpoint.write_best(run.checkpoints("generator"), 10, 0.5)
    last, best, tenth = (Sampler.open(run.path, which, device="cpu") for which in ("last", "best", 10))
    assert (last.step, best.step, tenth.step) == (20, 10, 10)
    assert torch.equal(best.sample("a 3").pixels, tenth.sample("a 3").pixels)
    assert not torch.equal(last.sample("a 3").pixels, best.sample("a 3").pixels)
    online = Sampler.open(run.path, 20, device="cpu", ema=False)
    assert not torch.equal(online.sample("a 3").pixels, last.sample("a 3").pixels)
    assert online.sample("a 3").sidecar["weights"] != last.sample("a 3").sidecar["weights"]
    with pytest.raises(InputError, match="no checkpoint of step 15"):
        Sampler.open(run.path, 15, device="cpu")


def test_compile_is_opt_in(tmp_path, monkeypatch):
    asked: list[torch.nn.Module] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **how: asked.append(self))
    run = make_run(tmp_path / "run")
    Sampler.open(run.path, device="cpu")
    assert asked == []
    sampler = Sampler.open(run.path, device="cpu", compile=True)
    assert asked == [sampler.task.mix]


def test_the_command_compiles_and_the_sidecar_records_it(tmp_path, monkeypatch, capsys):
    asked: list[torch.nn.Module] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **how: asked.append(self))
    run = make_run(tmp_path / "run")
    for words in (["--out", str(tmp_path / "plain")], ["--compile", "--out", str(tmp_path / "compiled")]):
        with pytest.raises(SystemExit) as ended:
            main(["sample", str(run.path), "a 3", "--device", "cpu", *words])
        assert ended.value.code == 0
        (sidecar,) = [json.loads(path.read_text()) for path in Path(words[-1]).glob("*.json")]
        assert sidecar["compiled"] == ("--compile" in words) == ("--compile" in sidecar["command"]) == bool(asked)


@pytest.mark.parametrize(("compiler", "named"), [("", "g++ or clang++"), ("no-such-cc", "no-such-cc")])
def test_without_a_compiler_the_cpu_cannot_compile(tmp_path, monkeypatch, compiler, named):
    run = make_run(tmp_path / "run")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(InputError, match=re.escape(f"needs a C++ compiler ({named}), and none was found: install g++")):
        Sampler.open(run.path, device="cpu", compile=True)


def test_stages_that_cannot_sample_are_refused(tmp_path):
    codec_only = make_run(tmp_path / "codec", generator=None)
    with pytest.raises(InputError, match="no trained stage that draws"):
        Sampler.open(codec_only.path, device="cpu")
    with pytest.raises(InputError, match="only encodes and decodes"):
        Sampler.open(codec_only.path, stage="tokenizer", device="cpu")
    untrained = make_run(tmp_path / "untrained", "tokenizer")
    with pytest.raises(InputError, match="generator is not trained yet"):
        Sampler.open(untrained.path, device="cpu")
    with pytest.raises(InputError, match="not a run folder"):
        Sampler.open(tmp_path / "nowhere", device="cpu")
    with pytest.raises(InputError, match="CUDA devices"):
        Sampler.open(codec_only.path, device="cuda:99")


def test_a_task_without_options(tmp_path):
    plain = Sampler.open(make_run(tmp_path / "run", generator="OptionlessGenerator", codec=False).path, device="cpu")
    assert plain.sample("a 3").sidecar["options"] == {}
    with pytest.raises(ConfigError, match=r"OptionlessGenerator has no sampling options: leave out guidance"):
        plain.sample("a 3", guidance=3.0)


@pytest.mark.gpu
def test_gpu_samples_match_the_cpu(tmp_path):
    run = make_run(tmp_path / "run", frames=2)
    here, there = Sampler.open(run.path, device="cpu"), Sampler.open(run.path, device="cuda")
    wanted = here.sample(CAPTIONS, count=2, seed=4).pixels
    drawn = there.sample(CAPTIONS, count=2, seed=4, batch=4)
    assert drawn.pixels.device.type == "cpu"
    torch.testing.assert_close(drawn.pixels, wanted, rtol=0, atol=0.02)  # bf16 there, fp32 here
