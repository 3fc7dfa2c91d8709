import pytest
import torch

from kineograph.core.errors import InputError
from kineograph.data.digit_captions import Figure
from kineograph.data.moving_digits import MovingDigits, MovingDigitsConfig
from kineograph.evaluate.digit_reader import Reader
from kineograph.evaluate.metric.caption_accuracy import Tally, parse_prompt
from tools.train_digit_reader import measure_ceiling


@pytest.fixture(scope="module")
def reader():
    return Reader.load()


def items(count, split="validation", **keys):
    source = MovingDigits.open(MovingDigitsConfig(**keys), split)
    samples = [source.read(index) for index in range(count)]
    return torch.stack([sample.pixels for sample in samples]).float() / 255, [sample.caption for sample in samples]


def one(caption, *figures):
    """The tally of one clip in which these figures are read."""
    tally = Tally()
    tally.add([parse_prompt(caption)], [figures])
    return tally


def score(reader, pixels, captions):
    tally = Tally()
    tally.add([parse_prompt(caption) for caption in captions], reader.read(pixels))
    return tally


def test_every_attribute_of_the_prompt_must_be_right():
    assert one("a red 3 moves left", Figure(3, "red", "left")).accuracy == 1
    for wrong in (
        Figure(4, "red", "left"),
        Figure(3, "blue", "left"),
        Figure(3, "red", "right"),
        Figure(3, "red", None),
    ):
        assert one("a red 3 moves left", wrong).accuracy == 0
    found = one("a red 3 moves left", Figure(3, "blue", "left"))
    assert found.rates == {"digit": 1, "colour": 0, "direction": 1}
    assert found.count == 1
    assert found.accuracy == 0


def test_what_the_prompt_leaves_open_is_not_judged():
    found = one("a 3 moves left", Figure(3, "blue", "left"))
    assert found.accuracy == 1
    assert "colour" not in found.rates
    assert "place" not in found.rates


def test_place_of_pictures_counts():
    assert one("a red 3 at the top left", Figure(3, "red", None, "top left")).accuracy == 1
    assert one("a red 3 at the top left", Figure(3, "red", None, "top")).rates["place"] == 0


def test_order_of_two_digits_does_not_matter_but_attributes_stay_with_their_digit():
    prompt = "a red 3 moves left and a blue 7 moves up"
    three, seven = Figure(3, "red", "left"), Figure(7, "blue", "up")
    assert one(prompt, three, seven).accuracy == one(prompt, seven, three).accuracy == 1
    swapped = one(prompt, Figure(3, "blue", "left"), Figure(7, "red", "up"))
    assert swapped.accuracy == 0
    assert swapped.rates == {"digit": 1, "colour": 0, "direction": 1}


def test_missing_and_surplus_digits_are_wrong():
    prompt = "a red 3 moves left and a blue 7 moves up"
    missing = one(prompt, Figure(7, "blue", "up"))
    assert missing.accuracy == 0
    assert missing.number == 0
    assert missing.rates["digit"] == 0.5
    surplus = one("a red 3 moves left", Figure(7, "blue", "up"), Figure(3, "red", "left"))
    assert surplus.accuracy == 0
    assert surplus.number == 0
    assert surplus.rates == {"digit": 1, "colour": 1, "direction": 1}


def test_rates_are_means_over_clips():
    expected = [
        (Figure(3, None, "left"),),
        (Figure(4, None, "up"),),
        (Figure(5, None, "down"),),
        (Figure(6, None, "right"),),
    ]
    found = [
        (Figure(3, None, "left"),),
        (Figure(9, None, "up"),),
        (Figure(5, None, "up"),),
        (Figure(6, None, "right"),),
    ]
    result = Tally()
    correct = result.add(expected, found)
    assert result.accuracy == 0.5
    assert result.rates == {"digit": 0.75, "direction": 0.75}
    assert correct == [True, False, False, True]


def test_captions_that_cannot_be_scored_are_named():
    with pytest.raises(InputError, match="'a dog runs'"):
        one("a dog runs", Figure(3))
    with pytest.raises(InputError, match="same digit twice"):
        one("a red 3 moves left and a blue 3 moves up", Figure(3))


def test_real_clips_score_high_and_shuffled_prompts_at_chance(reader):
    pixels, captions = items(200, frames=8, size=(32, 32))
    assert score(reader, pixels, captions).accuracy > 0.95
    shuffled = score(reader, pixels, captions[1:] + captions[:1])
    assert shuffled.accuracy < 0.03  # 1 in 480 by chance
    assert shuffled.rates["digit"] < 0.2
    assert shuffled.rates["colour"] < 0.3
    assert shuffled.rates["direction"] < 0.25


def test_noise_scores_at_chance(reader):
    _, captions = items(100, frames=8)
    pixels = torch.rand(100, 8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert score(reader, pixels, captions).accuracy < 0.05


def test_the_ceiling_is_the_score_of_real_items(reader):
    config = MovingDigitsConfig(frames=1)
    pixels, captions = items(70, frames=1)
    source = MovingDigits.open(config, "validation")
    assert measure_ceiling(source, reader, 70, chunk=32).counts == score(reader, pixels, captions).counts
