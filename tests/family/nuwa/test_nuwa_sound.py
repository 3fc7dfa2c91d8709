"""NUWA with sound: two streams of tokens that attend to each other causally, drawn together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kineograph.codec.audio_codec import AudioCodec, AudioCodecConfig
from kineograph.core.batch import Prompts, Shape
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.noise import Noise
from kineograph.core.task import BuildContext, freeze
from kineograph.family.nuwa import Nuwa, NuwaConfig
from kineograph.family.nuwa.config import NuwaSample
from kineograph.family.nuwa.sound import UNKNOWN
from kineograph.nn.window import Window, nearby_mask
from kineograph.sample.inference import draw

from .conftest import CAPTIONS, CODES, FRAMES, SIDE, PatchCodec, batch_of, train

FPS, RATE = 8.0, 4008  # 501 samples a frame, three tokens of 167
SHAPE = Shape(FRAMES, 4 * SIDE, 4 * SIDE, 3, FPS, RATE)
PLAIN = NuwaSample(guidance=1, temperature=0)


@pytest.fixture
def ears() -> AudioCodec:
    torch.manual_seed(1)
    config = AudioCodecConfig(width=8, patch=167, strides=(), quantizer={"kind": "fsq", "levels": [5, 5]})
    return freeze(AudioCodec(config, SHAPE))


@pytest.fixture
def build(codec, ears):
    def build(shape: Shape = SHAPE, ears: AudioCodec = ears, codec: PatchCodec = codec, **keys) -> Nuwa:
        torch.manual_seed(0)
        keys = {
            "width": 32, "depth": 3, "heads": 2, "window": (2, 3, 3), "dilations": (1, 2),
            "text": {"width": 32, "heads": 2, "depth": 1, "length": 16}, "codec": "tokenizer", "sound": "ears", **keys,
        }  # fmt: skip
        stages = {"tokenizer": codec, "ears": ears}
        context = BuildContext(shape=shape, stage=stages.__getitem__, captions=lambda: CAPTIONS, note=lambda line: None)
        return Nuwa.build(NuwaConfig.model_validate(keys), context)

    return build


def sounding(rows: int = 4, frames: int = FRAMES):
    batch = batch_of(rows, frames)
    noise = torch.randn(rows, frames, 501, generator=torch.Generator().manual_seed(3))
    return replace(batch, extra={"audio": (0.3 * noise).clamp(-1, 1)})


def test_sound_follows_the_picture_of_its_frame_with_ids_of_its_own(build, ears):
    task, batch = build(), sounding()
    tokens = task.get_tokens(batch)
    assert tokens.shape == (4, FRAMES, SIDE + 1, SIDE) and task.vocabulary == CODES + 25
    assert tokens[:, :, :SIDE].max() < CODES <= tokens[:, :, SIDE:].min()
    assert len(tokens[:, :, SIDE:].unique()) > 3
    picture, sound = task.sound.split(tokens)
    assert torch.equal(sound, ears.encode(batch.extra["audio"])) and torch.equal(picture, tokens[:, :, :SIDE])
    given = replace(batch, pixels=None, tokens=picture)
    assert torch.equal(task.get_tokens(given), tokens) and not Nuwa.can_cache(task.config)


def test_the_window_joins_both_streams():
    """Sound sees everything before it in the frames of the window, pictures all sound of earlier frames and their own neighbours."""
    grid, window = (3, 4, 3), Window((2, 3, 3), 1, sound_rows=1)
    mask, plain = nearby_mask(grid, window), nearby_mask((3, 3, 3), Window((2, 3, 3)))
    area = 12
    for position in range(36):
        frame, place = divmod(position, area)
        seen = [index - 1 for index in mask[position].nonzero()[:, 0].tolist() if index]
        assert mask[position, 0] and all(token < position for token in seen)
        if place >= 9:
            expected = range(max(0, frame - 1) * area, position)
        else:
            near = [index - 1 for index in plain[frame * 9 + place].nonzero()[:, 0].tolist() if index]
            heard = range((frame - 1) * area + 9, frame * area) if frame else ()
            expected = sorted([k // 9 * area + k % 9 for k in near] + list(heard))
        assert seen == list(expected), position
    assert Window((3, 5, 5), 1, sound_rows=1).covers(grid) and not window.covers(grid)


def test_tokens_depend_on_earlier_ones_of_both_streams_and_on_no_later_one(build):
    task = build().eval()
    tokens = task.get_tokens(sounding(1)).flatten(1)
    text = torch.zeros(1, 4, 32)

    def hidden(tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return task.network(tokens, text, torch.ones(1, 4, dtype=torch.bool))[0]

    before, area = hidden(tokens), (SIDE + 1) * SIDE
    for position in (4, SIDE * SIDE + 1, area + 2, 2 * area - 1):
        other = tokens.clone()
        sound = position % area >= SIDE * SIDE
        other[0, position] = (other[0, position] - CODES * sound + 1) % (25 if sound else CODES) + CODES * sound
        changed = (hidden(other) != before).any(-1)
        assert not changed[: position + 1].any()
        later = changed[position + 1 :]
        is_sound = (torch.arange(position + 1, len(changed)) % area) >= SIDE * SIDE
        assert later[is_sound].any() and later[~is_sound].any()  # it reaches both streams


@pytest.mark.parametrize(
    "keys", [{}, {"window": None, "dilations": (1, 2, 4)}, {"positions": "rotary", "token_shift": False}]
)
def test_cached_sampling_is_uncached_sampling(build, keys):
    task, options = build(**keys).eval(), NuwaSample(guidance=2.0, temperature=0)
    prompts = Prompts(Noise.for_rows(seed=1, step=0, rows=2), captions=CAPTIONS[:2])
    pixels, sound = task.sample_with_sound(prompts, options)
    assert pixels.shape == (2, FRAMES, 3, 12, 12) and sound.shape == (2, FRAMES, 501) and sound.abs().max() <= 1
    assert torch.equal(task.sample(prompts, options), pixels)
    text, negative = task.text.encode(CAPTIONS[:2]), task.text.encode(["", ""])
    null = task.text.drop(*negative, torch.ones(2, dtype=torch.bool))
    allowed = task.sound.is_allowed(torch.device("cpu"))
    tokens = torch.zeros(2, FRAMES * (SIDE + 1) * SIDE, dtype=torch.int64)
    with torch.no_grad():
        for position in range(tokens.shape[1]):
            conditional, unconditional = (task.network(tokens, *part)[:, position] for part in (text, null))
            logits = task.head.logits(unconditional + 2.0 * (conditional - unconditional))
            tokens[:, position] = logits.masked_fill(~allowed[position % len(allowed)], -torch.inf).argmax(-1)
    expected, heard = task.decode(tokens.view(2, FRAMES, SIDE + 1, SIDE))
    assert torch.equal(pixels, expected) and torch.allclose(sound, task.sound.codec.decode(heard), atol=1e-5)


def test_it_overfits_one_clip_with_its_sound(build, ears):
    task, batch = build(depth=2, dilations=(1,), window=(4, 3, 3)), sounding(2)
    losses = train(task, batch, 120, lr=5e-3)
    assert losses[-1] < 0.05 < losses[0]
    prompts = Prompts(Noise.for_rows(seed=1, step=0, rows=2), captions=batch.captions)
    drawn = draw(task, prompts, PLAIN, "cpu")
    assert torch.equal(task.codec.encode(drawn.pixels), task.codec.encode(batch.video))
    assert torch.allclose(drawn.sound, ears.decode(ears.encode(batch.extra["audio"])), atol=1e-4)
    # Given frames come without sound: it is drawn for them.
    primed = draw(task, replace(prompts, prime=batch.video[:, :2]), PLAIN, "cpu")
    assert torch.allclose(primed.sound, drawn.sound, atol=1e-4) and torch.equal(primed.pixels, drawn.pixels)


def test_clips_longer_than_trained_keep_their_sound(build):
    task = build().eval()
    prompts = Prompts(Noise.for_rows(seed=1, step=0, rows=2), captions=CAPTIONS[:2], frames=FRAMES + 3)
    pixels, sound = task.sample_with_sound(prompts, NuwaSample())
    assert pixels.shape[:2] == sound.shape[:2] == (2, FRAMES + 3) and sound.isfinite().all()
    short, heard = task.sample_with_sound(replace(prompts, frames=None), NuwaSample())
    assert torch.equal(pixels[:, :FRAMES], short) and torch.allclose(sound[:, :FRAMES], heard, atol=1e-5)
    prime = torch.rand(2, FRAMES + 1, 3, 12, 12)
    with pytest.raises(InputError, match=f"at most {FRAMES} given frames"):
        task.sample(replace(prompts, prime=prime), NuwaSample())


def test_unknown_sound_is_marked(build):
    task = build()
    tokens = task.sound.leave_unknown(torch.zeros(1, 2, SIDE, SIDE, dtype=torch.int64))
    assert (tokens[:, :, SIDE:] == UNKNOWN).all() and (tokens[:, :, :SIDE] == 0).all()


def test_streams_that_do_not_fit_are_refused(build, ears, codec):
    with pytest.raises(ConfigError, match="not a codec of sound: name a stage of task: audio_codec"):
        build(sound="tokenizer")
    with pytest.raises(ConfigError, match="use task: vqgan"):
        build(shape=replace(SHAPE, frames=5), codec=freeze(PatchCodec(pair=2)))
    with pytest.raises(ConfigError, match="use the same"):
        build(shape=replace(SHAPE, sample_rate=8000))
    four = AudioCodecConfig(width=8, patch=125, strides=(), quantizer={"kind": "fsq", "levels": [5, 5]})
    wide = replace(SHAPE, sample_rate=4000)
    with pytest.raises(ConfigError, match="so that a frame has 3, 6"):
        build(shape=wide, ears=freeze(AudioCodec(four, wide)))
    with pytest.raises(ValueError, match="set one of them to null"):
        NuwaConfig(codec="a", sketch="b", sound="c")
    assert NuwaConfig(codec="a", sound="c").reads() >= {"audio"} and "audio" not in NuwaConfig(codec="a").reads()
