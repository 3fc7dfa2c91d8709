"""Sampling clips: captions, guidance, primes, other sizes, clips longer than trained."""

import pytest
import torch

from kineograph.core.batch import Batch, Prompts, Shape
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.noise import Noise
from kineograph.family.phenaki import PhenakiSample
from kineograph.family.phenaki.sampling import choose_overlap, count_new_frames

from .conftest import CAPTIONS, ClipCodec, batch_of, train


def prompts(rows: int = 4, seed: int = 0, first: int = 0, **keys) -> Prompts:
    noise = Noise(seed, 0, first + torch.arange(rows))
    return Prompts(noise, **{"captions": CAPTIONS[first : first + rows], **keys})


@pytest.fixture
def sharp(make):
    """A generator with confident predictions."""

    def sharp(**keys):
        task = make(**keys).eval()
        with torch.no_grad():
            task.head.weight.mul_(3)
        return task

    return sharp


@pytest.fixture(scope="module")
def two() -> Batch:
    return batch_of(2)


def learned(task, batch: Batch):
    """Trained on so many copies of a batch that each step sees it under several masks."""
    many = batch.rows([*range(len(batch))] * 4)
    many.slots = torch.arange(len(many))
    train(task, many, 140, lr=5e-3)
    return task


def test_overfitted_clips_follow_their_captions(make, codec, two):
    task = learned(make(width=64, heads=4, depth=1), two)
    options = PhenakiSample(steps=6, guidance=2.0, temperature=0.5, noise=1.0)
    wanted = codec.encode(two.video)
    for captions, right in (
        (CAPTIONS[:2], wanted),
        (CAPTIONS[1::-1], wanted.flip(0)),
    ):  # the caption decides, not the row
        found = (codec.encode(task.sample(prompts(2, captions=captions), options)) == right).float().flatten(1).mean(1)
        assert found.min() > 0.85, found


def test_pixels_are_in_range_and_the_clip_is_complete(make):
    drawn = make().eval().sample(prompts(3), PhenakiSample(steps=4))
    assert drawn.shape == (3, 5, 3, 8, 8)
    assert 0 <= float(drawn.min()) <= float(drawn.max()) <= 1


@pytest.mark.parametrize("keys", [{}, {"frames": 11}])
def test_reproducible_and_independent_of_how_it_is_batched(sharp, keys):
    task, options = sharp(), PhenakiSample(steps=4)
    whole = task.sample(prompts(4, **keys), options)
    parts = [task.sample(prompts(1, **keys), options), task.sample(prompts(3, first=1, **keys), options)]
    assert torch.equal(whole, torch.cat(parts))
    assert torch.equal(whole, task.sample(prompts(4, **keys), options))
    assert not torch.equal(whole, task.sample(prompts(4, seed=1, **keys), options))


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 3},
        {"guidance": 9.0},
        {"guidance_schedule": "linear", "guidance": 20.0},
        {"temperature": 0.1},
        {"top_k": 1},
        {"noise": 0.0},
    ],
)
def test_every_option_of_sampling_does_something(sharp, change):
    task = sharp()
    base = PhenakiSample(steps=6, guidance=change.get("guidance", 3.0) if "guidance_schedule" in change else 3.0)
    assert not torch.equal(task.sample(prompts(), base), task.sample(prompts(), base.model_copy(update=change)))


def test_guidance_runs_one_forward_per_step_and_encodes_the_text_once(make):
    task = make().eval()
    calls = []
    inner, read = task.network.forward, task.network.project_text

    def spy(tokens, grid, text, mask, keep, memory):
        calls.append((tokens.shape[0], text, keep, memory[0][0].shape[0]))
        return inner(tokens, grid, text, mask, keep, memory)

    texts = []
    task.network.forward = spy
    task.network.project_text = lambda text: texts.append(text) or read(text)
    task.sample(prompts(3, frames=11), PhenakiSample(steps=4))
    assert calls == [(6, None, None, 6)] * 12  # three windows of four steps
    assert len(texts) == 1
    calls.clear()
    task.sample(prompts(3), PhenakiSample(steps=4, guidance=1.0))
    assert calls == [(3, None, None, 3)] * 4


def test_guidance_uses_the_null_text_or_a_negative_prompt(sharp):
    task, options = sharp(), PhenakiSample(steps=4, guidance=4.0)
    plain = task.sample(prompts(), options)
    assert not torch.equal(plain, task.sample(prompts(negative=["a blue one"] * 4), options))
    assert torch.equal(plain, task.sample(prompts(negative=[""] * 4), options))  # an empty negative is the null text
    same = task.sample(prompts(negative=CAPTIONS[:4]), options)  # equal prompts cancel: no guidance
    assert torch.equal(same, task.sample(prompts(), options.model_copy(update={"guidance": 1.0})))


def test_unconditional_and_given_embeddings(sharp):
    task = sharp(text={"kind": "none"})
    assert task.sample(prompts(captions=None), PhenakiSample(steps=3)).shape == (4, 5, 3, 8, 8)
    task = sharp(text={"kind": "given", "width": 24, "length": 7})
    drawn = []
    for seed in (0, 1):
        embeds = torch.randn(4, 5, 24, generator=torch.Generator().manual_seed(seed)) * 5
        real = Batch(slots=torch.arange(4), text_embeds=embeds)
        drawn.append(task.sample(prompts(captions=None, batch=real), PhenakiSample(steps=3)))
    assert not torch.equal(*drawn)


# primes


@pytest.mark.parametrize("given", [1, 3])
def test_prime_frames_are_kept_exactly_and_condition_the_rest(sharp, codec, given):
    task, options = sharp(text={"kind": "none"}), PhenakiSample(steps=4, noise=0.0)
    clip = batch_of(4).video
    drawn = task.sample(prompts(captions=None, prime=clip[:, :given]), options)
    assert drawn.shape == (4, 5, 3, 8, 8)
    kept = codec.encode(clip[:, :given])
    assert torch.equal(codec.encode(drawn)[:, : kept.shape[1]], kept)
    torch.testing.assert_close(drawn[:, :given], codec.decode(kept))
    other = task.sample(prompts(captions=None, prime=1 - clip[:, :given]), options)
    assert not torch.equal(drawn[:, given:], other[:, given:])


def test_an_overfitted_model_continues_the_primed_clip(make, codec, two):
    """Without captions: only the prime tells the clips apart."""
    task = learned(make(width=64, heads=4, depth=1, text={"kind": "none"}), two)
    options = PhenakiSample(steps=4, temperature=0.3, noise=0.0)
    drawn = task.sample(prompts(2, captions=None, prime=two.video[:, :1]), options)
    assert (codec.encode(drawn) == codec.encode(two.video)).float().mean() > 0.85


def test_a_prime_that_does_not_fit_is_refused(make):
    task, clip = make().eval(), batch_of(4, times=4).video
    for prime, message in (
        (clip[:, :2], "use 1 \\+ 2k frames"),
        (clip[:, :5], "prime has 5 frames and a window has 5: give fewer"),
        (clip[:2, :3], "4 clips of 8 × 8"),
        (clip[:, :3, :, :4], "8 × 8 pixels"),
    ):
        with pytest.raises(InputError, match=message):
            task.sample(prompts(prime=prime), PhenakiSample(steps=2))
    with pytest.raises(InputError, match="prime has 3 frames and a window has 3"):
        task.sample(prompts(prime=clip[:, :3], frames=3), PhenakiSample(steps=2))


# other sizes


@pytest.mark.parametrize(("frames", "height", "width"), [(1, 8, 8), (3, 8, 8), (5, 16, 8), (1, 4, 12), (9, 12, 8)])
def test_other_sizes_than_trained(sharp, frames, height, width):
    drawn = sharp().sample(prompts(2, frames=frames, height=height, width=width), PhenakiSample(steps=3))
    assert drawn.shape == (2, frames, 3, height, width)


def test_sizes_that_the_codec_does_not_take_are_refused(make):
    task = make().eval()
    for keys in ({"frames": 4}, {"frames": 8}, {"height": 9}):
        with pytest.raises(ConfigError, match="do not fit"):
            task.sample(prompts(**keys), PhenakiSample(steps=2))
    image = make(frames=1).eval()
    assert image.sample(prompts(), PhenakiSample(steps=2)).shape == (4, 1, 3, 8, 8)
    with pytest.raises(InputError, match=r"clips of 1 frame and cannot continue them: .*data\.frames"):
        image.sample(prompts(frames=5), PhenakiSample(steps=2))


# longer than trained


@pytest.mark.parametrize(("frames", "overlap"), [(7, 1), (9, 1), (9, 3), (11, 3), (13, 1), (7, None), (15, None)])
def test_a_long_clip_has_its_length_and_begins_as_the_short_one(sharp, frames, overlap):
    task, options = sharp(), PhenakiSample(steps=3, overlap=overlap)
    long = task.sample(prompts(frames=frames), options)
    assert long.shape == (4, frames, 3, 8, 8)
    assert torch.equal(long[:, :5], task.sample(prompts(), options))
    if frames > 9:
        assert torch.equal(long[:, :9], task.sample(prompts(frames=frames - 2), options)[:, :9])


@pytest.mark.parametrize("overlap", [1, 3])
def test_each_window_begins_with_the_last_frames_of_the_clip(sharp, codec, overlap):
    task = sharp()
    codec.encoded.clear()
    frames = 5 + 2 * (5 - overlap) + 2  # two whole windows more, and two frames
    long = task.sample(prompts(frames=frames), PhenakiSample(steps=3, overlap=overlap))
    assert [prime.shape[1] for prime in codec.encoded] == [overlap, overlap, 3]  # the last one sees more
    ends = [5, 10 - overlap, 15 - 2 * overlap]
    for prime, end in zip(codec.encoded, ends, strict=True):
        assert torch.equal(prime, long[:, end - prime.shape[1] : end])


def test_every_window_has_its_own_noise(make):
    """With a head of zeros only the noise decides: with equal noise all windows would be equal."""
    task = make(text={"kind": "none"}).eval()
    with torch.no_grad():
        task.head.weight.zero_()
    long = task.sample(prompts(captions=None, frames=13), PhenakiSample(steps=3, overlap=1))
    assert not torch.equal(long[:, 1:5], long[:, 5:9])
    assert not torch.equal(long[:, 5:9], long[:, 9:13])


def test_a_prime_and_more_frames_than_trained(sharp, codec):
    task, clip = sharp(), batch_of(4).video
    long = task.sample(prompts(frames=11, prime=clip[:, :3]), PhenakiSample(steps=3))
    assert long.shape[1] == 11
    assert torch.equal(codec.encode(long[:, :3]), codec.encode(clip[:, :3]))
    assert torch.equal(long[:, :5], task.sample(prompts(prime=clip[:, :3]), PhenakiSample(steps=3)))


def test_overlap_is_checked_and_has_a_default(make):
    shape, codec = Shape(17, 8, 8, 3, 8.0), ClipCodec()
    assert choose_overlap(codec, shape, PhenakiSample()) == 7
    assert choose_overlap(codec, shape, PhenakiSample(overlap=13)) == 13
    assert choose_overlap(ClipCodec(pair=16), shape, PhenakiSample()) == 1
    for wrong in (2, 17, 19):
        with pytest.raises(ConfigError, match=f"sample.overlap={wrong} does not fit windows of 17 frames"):
            choose_overlap(codec, shape, PhenakiSample(overlap=wrong))
    assert count_new_frames(17, 17, 5) == []
    assert count_new_frames(41, 17, 5) == [12, 12]
    assert count_new_frames(19, 17, 5) == [2]
    with pytest.raises(ConfigError, match=r"sample\.overlap=4"):
        make().sample(prompts(frames=9), PhenakiSample(steps=2, overlap=4))


def test_old_windows_leave_the_device(make, monkeypatch):
    """However long the clip, no more than a window's pixels and tokens are alive where it is drawn."""
    task = make(text={"kind": "none"}).eval()
    shapes = []
    inner = task.codec.decode
    monkeypatch.setattr(task.codec, "decode", lambda tokens: shapes.append(tokens.shape[1]) or inner(tokens))
    moved = []
    cpu = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: (x.ndim == 5 and moved.append(x.shape[1])) or cpu(x))
    task.sample(prompts(captions=None, frames=25), PhenakiSample(steps=1, overlap=1))
    assert shapes == [3] * 6
    assert moved == [5, 4, 4, 4, 4, 4]


def test_sampling_leaves_the_model_in_its_mode(make):
    task = make(dropout=0.3).train()
    drawn = task.sample(prompts(1), PhenakiSample(steps=2))
    assert task.training
    assert task.network.training
    assert not drawn.requires_grad
