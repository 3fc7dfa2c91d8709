import pytest
import torch
from safetensors import safe_open

from kineograph.core.errors import InputError
from kineograph.core.noise import Noise
from kineograph.data.moving_digits import MovingDigits, MovingDigitsConfig
from kineograph.evaluate.digit_reader import FRAMES, SIDE, WEIGHTS, Reader, ReaderNet, preprocess
from tools import train_digit_reader as train_reader
from tools.train_digit_reader import measure_ceiling


@pytest.fixture(scope="module")
def reader():
    return Reader.load()


def pixels_of(count, **keys):
    source = MovingDigits.open(MovingDigitsConfig(**keys), "validation")
    return torch.stack([source.read(index).pixels for index in range(count)]).float() / 255


@pytest.mark.parametrize(
    "keys",
    [
        {"frames": 1, "size": (32, 32)},
        {"frames": 1, "size": (64, 64), "channels": 1},
        {"frames": 8, "size": (32, 32)},
        {"frames": 8, "size": (64, 64), "coloured": False},
        {"frames": 17, "size": (48, 64)},
        {"frames": 8, "size": (32, 32), "channels": 1, "grid": 4, "directions": 4, "speed": 1},
    ],
)
def test_reads_one_digit_that_it_never_saw(reader, keys):
    source = MovingDigits.open(MovingDigitsConfig(**keys), "validation")
    found = measure_ceiling(source, reader, 200)
    # pictures are told apart by places that lie close together
    assert found.accuracy > (0.97 if source.config.frames > 1 else 0.95), found


def test_reads_two_digits(reader):
    for frames in (1, 8):
        source = MovingDigits.open(MovingDigitsConfig(frames=frames, digits=2, size=(64, 64)), "validation")
        assert measure_ceiling(source, reader, 150).accuracy > 0.95


def test_reads_damaged_images(reader):
    """What a tokenizer does: blur, noise, weaker contrast."""
    pixels = pixels_of(100, frames=4, size=(32, 32))
    clean = reader.read(pixels)
    blurred = torch.nn.functional.avg_pool3d(pixels.flatten(1, 2), (1, 3, 3), 1, (0, 1, 1)).view_as(pixels)
    noisy = blurred * 0.85 + 0.04 * torch.randn(pixels.shape, generator=torch.Generator().manual_seed(0))
    agree = sum(a == b for a, b in zip(clean, reader.read(noisy.clamp(0, 1)), strict=True))
    assert agree >= 93


def test_a_clip_that_stands_still_has_no_direction(reader):
    stills = pixels_of(50, frames=8)[:, :1].expand(-1, 8, -1, -1, -1)
    assert sum(facts[0].direction is None for facts in reader.read(stills)) >= 47


def test_direction_turns_with_the_clip(reader):
    """Mirror, and the digit goes the other way: what is read comes from pixels."""
    pixels = pixels_of(40, frames=8)
    mirrored = reader.read(pixels.flip(-1))
    turned = 0
    for facts, other in zip(reader.read(pixels), mirrored, strict=True):
        swapped = facts[0].direction.replace("left", "L").replace("right", "left").replace("L", "right")
        turned += other[0].direction == swapped
    assert turned >= 36


def test_chunks_change_nothing(reader):
    pixels = pixels_of(20, frames=8, digits=2)
    assert reader.read(pixels, chunk=3) == reader.read(pixels)


def test_preprocess_takes_any_shape():
    for frames, channels, height, width in ((1, 1, 32, 32), (2, 2, 20, 70), (8, 3, 32, 32), (49, 4, 128, 64)):
        ready = preprocess(torch.rand(2, frames, channels, height, width))
        assert ready.shape == (2, FRAMES if frames > 1 else 1, 3, SIDE, SIDE)
    clip = torch.arange(10.0)[None, :, None, None, None].expand(1, 10, 3, SIDE, SIDE)
    assert preprocess(clip)[0, :, 0, 0, 0].tolist() == [0, 3, 6, 9]


def test_weights_are_small_and_say_how_they_were_made():
    assert WEIGHTS.stat().st_size <= 1_000_000
    with safe_open(str(WEIGHTS), framework="pt") as file:
        assert file.metadata()["command"].startswith("python -m kineograph.evaluate.train_reader")


def test_bad_weights_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"none\.safetensors"):
        Reader.load(tmp_path / "none.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"not weights")
    with pytest.raises(InputError, match=r"broken\.safetensors"):
        Reader.load(tmp_path / "broken.safetensors")


def test_weights_survive_saving(tmp_path):
    torch.manual_seed(0)
    net = ReaderNet()
    train_reader.save(net, tmp_path / "r.safetensors", "python -m x")
    again = Reader.load(tmp_path / "r.safetensors")
    assert torch.allclose(again.net.seen.weight, net.seen.weight, atol=1e-3)


def test_training_batches_are_repeatable_and_fit_one_group():
    batches = train_reader.Batches(seed=3, steps=4, batch=32)
    first, again = batches[1], batches[1]
    assert all(
        torch.equal(a, b) for one, other in zip(first, again, strict=True) for a, b in zip(one, other, strict=True)
    )
    assert not torch.equal(batches[2][0][1], first[0][1])
    assert [frames.shape for frames, _ in first] == [(16, FRAMES, 3, SIDE, SIDE), (16, 1, 3, SIDE, SIDE)]
    clips, pictures = (targets for _, targets in first)
    assert (clips[:, 0, 2] >= 0).all()
    assert (pictures[:, 0, 3] >= 0).all()


def test_the_reader_trains_on_training_glyphs_in_every_combination():
    from kineograph.data import digit_glyphs
    from kineograph.data.moving_digits import is_kept_out

    source = MovingDigits(MovingDigitsConfig(frames=8, kept_out=0), "train")
    items = [source.item(index) for index in range(300)]
    train = {int(glyph) for glyphs in digit_glyphs.list_glyphs(False) for glyph in glyphs}
    assert {glyph for item in items for glyph in item.glyphs} <= train
    assert 10 < sum(is_kept_out(item.facts) for item in items) < 60


def test_augmentation_keeps_labels_and_marks_still_clips():
    pixels = preprocess(pixels_of(200, frames=8))
    targets = torch.tensor([[[3, 1, 2, -1], [-1, -1, -1, -1]]]).repeat(200, 1, 1)
    frames, marked = train_reader.augment(pixels, targets, Noise.for_rows(0, 0, 200))
    still = marked[:, 0, 2] == train_reader.STILL
    assert 2 < still.sum() < 40
    assert (marked[~still] == targets[~still]).all()
    assert (marked[:, 1] == -1).all()
    assert frames.shape == pixels.shape
    assert frames.min() >= 0
    assert frames.max() <= 1
    assert 0.005 < (frames - pixels).abs().mean() < 0.2


def test_the_reader_learns_one_batch():
    torch.manual_seed(0)
    net = ReaderNet(width=32)
    groups = train_reader.Batches(seed=0, steps=1, batch=32)[0]
    frames, targets = groups[1][0].float() / 255, groups[1][1]
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
    history = []
    for _ in range(30):
        losses = train_reader.reading_loss(net(frames), targets)
        total = torch.stack(list(losses.values())).sum()
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        history.append(total.item())
    assert history[-1] < 0.5 * history[0]
