"""Samples side by side: padding, masks, and tensors that move together."""

from __future__ import annotations

import pytest
import torch

from kineograph.core.batch import Batch, Prompts, Sample
from kineograph.core.noise import Noise


def clip(frames: int, value: int = 0) -> torch.Tensor:
    return (
        torch.full((frames, 3, 4, 4), value, dtype=torch.uint8)
        + torch.arange(frames, dtype=torch.uint8)[:, None, None, None]
    )


def test_shorter_clips_are_padded_and_masked() -> None:
    batch = Batch.collate(
        [Sample(pixels=clip(1, 50), fps=8, caption="a"), Sample(pixels=clip(3), fps=12, caption="b")], [4, 9]
    )
    assert batch.pixels.shape == (2, 3, 3, 4, 4)
    assert batch.frame_mask.tolist() == [[True, False, False], [True, True, True]]
    assert batch.pixels[0, :, 0, 0, 0].tolist() == [50, 50, 50]  # the last frame repeated
    assert batch.slots.tolist() == [4, 9]
    assert batch.fps.tolist() == [8, 12]
    assert batch.captions == ["a", "b"]
    assert len(batch) == 2


def test_a_given_mask_is_kept_and_padded_with_false() -> None:
    given = Sample(pixels=clip(2), frame_mask=torch.tensor([True, False]))
    batch = Batch.collate([given, Sample(pixels=clip(3))], [0, 1])
    assert batch.frame_mask.tolist() == [[True, False, False], [True, True, True]]


def test_without_padding_there_is_no_mask() -> None:
    whole = Sample(pixels=clip(3), frame_mask=torch.ones(3, dtype=torch.bool))
    assert Batch.collate([whole, Sample(pixels=clip(3))], [0, 1]).frame_mask is None
    tokens = [Sample(tokens=torch.zeros(2, 1, 1), frame_mask=torch.tensor([True, last])) for last in (True, False)]
    assert Batch.collate(tokens[:1], [0]).frame_mask is None
    assert Batch.collate(tokens, [0, 1]).frame_mask.tolist() == [[True, True], [True, False]]


def test_what_not_every_sample_has_is_left_out() -> None:
    batch = Batch.collate([Sample(pixels=clip(1), caption="a"), Sample(pixels=clip(1), fps=8)], [0, 1])
    assert batch.fps is None


def test_a_sample_without_a_caption_leaves_the_others_theirs() -> None:
    """An empty caption is the null text."""
    with_caption, without = Sample(pixels=clip(1), caption="a"), Sample(pixels=clip(1))
    assert Batch.collate([with_caption, without], [0, 1]).captions == ["a", ""]
    assert Batch.collate([without, without], [0, 1]).captions is None


def test_tokens_and_extras_are_stacked() -> None:
    text = {"text_embeds": torch.ones(3, 5), "text_mask": torch.ones(3).bool()}
    samples = [Sample(tokens=torch.full((1, 2, 2), i), **text, extra={"z": torch.ones(2)}) for i in range(3)]
    batch = Batch.collate(samples, [0, 1, 2])
    assert batch.pixels is None
    assert batch.tokens[:, 0, 0, 0].tolist() == [0, 1, 2]
    assert batch.text_embeds.shape == (3, 3, 5)
    assert batch.extra["z"].shape == (3, 2)
    with pytest.raises(ValueError, match="cache"):
        _ = batch.video


def test_video_is_float_in_unit_range_and_the_bytes_stay() -> None:
    batch = Batch.collate([Sample(pixels=torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 3, 1, 1))], [0])
    assert torch.allclose(batch.video.flatten(), torch.tensor([0.0, 0.2, 1.0]))
    assert batch.pixels.flatten().tolist() == [0, 51, 255]
    assert batch.pixels.dtype == torch.uint8


def test_video_leaves_float_pixels_as_they_are() -> None:
    given = torch.tensor([0.0, 0.5, 1.0]).view(1, 1, 3, 1, 1)
    batch = Batch(slots=torch.zeros(1, dtype=torch.int64), pixels=given.clone())
    assert torch.equal(batch.video, given) and torch.equal(batch.video, given)  # the second call sees the same pixels


def test_map_reaches_every_tensor_and_nothing_else() -> None:
    samples = [Sample(pixels=clip(n), fps=8, caption="a", extra={"z": torch.ones(2)}) for n in (1, 2)]
    batch = Batch.collate(samples, [0, 1])
    moved = batch.to(torch.device("meta"))
    assert {
        moved.slots.device.type,
        moved.pixels.device.type,
        moved.frame_mask.device.type,
        moved.fps.device.type,
        moved.extra["z"].device.type,
    } == {"meta"}
    assert moved.captions == ["a", "a"]
    assert batch.pixels.device.type == "cpu"


def test_prompts_are_as_many_as_their_noise() -> None:
    assert len(Prompts(noise=Noise.for_rows(0, 0, 5))) == 5


def test_extras_of_different_lengths_are_padded_and_missing_ones_refused() -> None:
    samples = [
        Sample(pixels=torch.zeros(t, 3, 2, 2, dtype=torch.uint8), extra={"sketch": torch.full((t, 1, 2, 2), float(t))})
        for t in (1, 3)
    ]
    batch = Batch.collate(samples, [0, 1])
    assert batch.extra["sketch"].shape == (2, 3, 1, 2, 2)
    assert batch.extra["sketch"][0].unique().tolist() == [1.0]
    for given in ([samples[0], Sample(pixels=samples[1].pixels)], [Sample(pixels=samples[1].pixels), samples[0]]):
        with pytest.raises(KeyError, match="sketch"):
            Batch.collate(given, [0, 1])
