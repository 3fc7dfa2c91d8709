"""The audio codec: causal both ways, the same tokens per frame, and it learns the sound of digits."""

from __future__ import annotations

import pytest
import torch

from kineograph.codec.audio_codec import AudioCodec, AudioCodecConfig, spectral_distance
from kineograph.core.batch import Batch, Shape
from kineograph.core.errors import ConfigError
from kineograph.core.noise import Noise
from kineograph.data.digit_sound import make_sound
from kineograph.evaluate.sound_reader import find_clicks, read_pitch

from .playing import train

SHAPE = Shape(frames=4, height=16, width=16, channels=1, fps=8, sample_rate=4000)  # 500 samples a frame
FSQ = {"kind": "fsq", "levels": [8, 5, 5]}


def make(shape: Shape = SHAPE, **keys) -> AudioCodec:
    torch.manual_seed(0)
    return AudioCodec(AudioCodecConfig(**{"width": 24, "patch": 25, "strides": (5,), "quantizer": FSQ, **keys}), shape)


def sounds(**keys) -> torch.Tensor:
    """Three digits; the last one bounces in its third frame. B T S"""
    made = [make_sound(digit, times, 4, 500, 4000) for digit, times in ((1, ()), (8, ()), (4, (2.5,)))]
    return torch.stack([torch.from_numpy(sound) for sound in made])


def batch_of(audio: torch.Tensor, mask: torch.Tensor | None = None) -> Batch:
    return Batch(slots=torch.arange(len(audio)), frame_mask=mask, extra={"audio": audio})


@pytest.mark.parametrize("keys", [{}, {"patch": 5, "strides": (5, 5), "blocks": 2}, {"patch": 125, "strides": ()}])
def test_tokens_hold_no_later_sound_and_sounds_no_later_token(keys):
    codec = make(**keys).eval()
    audio = sounds()[:1]
    hop = codec.config.hop
    assert codec.tokens_per_frame * hop == 500
    with torch.no_grad():
        before = codec._encode(audio)[0, :, 0]  # C N
        for sample in (0, 624, 625, 1999):
            other = audio.clone()
            other.view(-1)[sample] += 0.5
            changed = (codec._encode(other)[0, :, 0] != before).any(0)
            assert not changed[: sample // hop].any() and changed[sample // hop]
    tokens = codec.encode(audio)
    assert tokens.shape == (1, 4, codec.tokens_per_frame)
    heard = codec.decode(tokens).flatten()
    other = tokens.clone()
    other.view(-1)[5] = (other.view(-1)[5] + 7) % codec.vocabulary
    changed = (codec.decode(other).flatten() != heard).nonzero()[:, 0]
    assert changed.min() >= 5 * hop and changed.min() < 6 * hop


def test_it_learns_tones_and_a_click():
    codec, audio = make(loss="l2", spectral=0.001), sounds()
    train(codec, batch_of(audio), 250, lr=5e-3)
    codec.eval()
    heard = codec.decode(codec.encode(audio))
    for sound, real in zip(heard, audio, strict=True):
        assert read_pitch(sound, 4000) == pytest.approx(read_pitch(real, 4000), rel=0.02)
        assert find_clicks(sound, 4000) == pytest.approx(find_clicks(real, 4000), abs=0.02)
    metrics = codec.validate(batch_of(audio), Noise(0, 0, torch.arange(3)))
    assert metrics["snr"].value() > 8 and metrics["codes/perplexity"].value() > 2


@pytest.mark.parametrize("kind", ["vq", "lfq", "fsq"])
def test_every_quantizer_decodes_what_training_hears(kind):
    quantizer = {
        "vq": {"kind": "vq", "codes": 16, "dim": 4, "kmeans": 0},
        "lfq": {"kind": "lfq", "codes": 16},
        "fsq": FSQ,
    }[kind]
    codec = make(quantizer=quantizer).eval()
    with torch.no_grad():
        shared = codec(batch_of(sounds()), Noise(0, 0, torch.arange(3)))
        assert torch.allclose(codec.decode(codec.encode(sounds())), shared.fake.clamp(-1, 1), atol=1e-5)


def test_padding_is_neither_heard_nor_counted():
    codec, audio = make(), sounds()
    mask = torch.tensor([[True] * 4, [True] * 2 + [False] * 2, [True] * 4])
    noise = Noise(0, 0, torch.arange(3))
    loss = codec.loss("model", codec(batch_of(audio, mask), noise)).total
    audio[1, 2:] = torch.randn(2, 500)
    again = codec.loss("model", codec(batch_of(audio, mask), noise)).total
    assert float(loss.count) == 10 and torch.equal(loss.sum, again.sum)
    audio[0] = 0
    assert not torch.equal(loss.sum, codec.loss("model", codec(batch_of(audio, mask), noise)).total.sum)


def test_terms_follow_the_config():
    codec, audio = make(), sounds()
    shared = codec(batch_of(audio), Noise(0, 0, torch.arange(3)))
    plain = make(spectral=0, emphasis=0)
    assert "spectral" in codec.loss("model", shared).terms and "spectral" not in plain.loss("model", shared).terms
    error = (shared.fake - shared.real).abs().mean()
    assert torch.allclose(plain.loss("model", shared).terms["reconstruction"].value(), error)
    assert not torch.allclose(codec.loss("model", shared).terms["reconstruction"].value(), error)


def test_the_spectral_distance_hears_pitch_and_no_phase():
    time = torch.arange(4000) / 4000
    tone, shifted, other = (
        (0.2 * torch.sin(2 * torch.pi * pitch * time + phase)).view(1, 8, 500)
        for pitch, phase in ((440, 0.0), (440, 1.0), (523, 0.0))
    )
    assert spectral_distance(tone, tone) == 0
    assert spectral_distance(tone, shifted) < 0.3 * spectral_distance(tone, other)
    assert spectral_distance(tone[:, :1, :60], tone[:, :1, :60]) == 0  # shorter than every window


def test_frames_that_hold_no_whole_tokens_are_refused():
    with pytest.raises(ConfigError, match=r"30 × 5 = 150 samples, and a frame has 500 .*use patch=10 or 20 or 25"):
        make(patch=30)
    with pytest.raises(ConfigError, match="use other strides"):
        make(strides=(7,))
    with pytest.raises(ConfigError, match=r"set data\.sample_rate"):
        make(shape=Shape(4, 16, 16, 1, 8))
