import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset

from kineograph.core.config import parse
from kineograph.core.errors import ConfigError, InputError, Unreadable
from kineograph.core.task import Codec
from kineograph.data.captions import require_captions
from kineograph.data.dataset import DatasetConfig, DatasetSource
from kineograph.data.loader import Loader
from kineograph.data.open_source import open_source, parse_data_config
from kineograph.data.token_check import TokenGrid


class Items(Dataset):
    def __init__(self, *items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        item = self.items[index]
        if isinstance(item, Exception):
            raise item
        return item


class Importable(Items):
    """Found by its dotted path."""

    def __init__(self, count=4):
        super().__init__(*[(torch.full((2, 3, 8, 8), 0.5), f"item {index}") for index in range(count)])


def source(*items, **options):
    config = parse(DatasetConfig, {"size": 8, "frames": 2, "validation": 0} | options, "data")
    return DatasetSource(Items(*items), config, "train")


def first(*items, **options):
    return source(*items, **options).read(0, np.random.default_rng(0))


CLIP = torch.rand(2, 3, 8, 8)


def test_named_fields_as_phenaki_users_write_them():
    sample = first(
        {
            "videos": CLIP,
            "texts": "a ball",
            "video_frame_mask": torch.tensor([True, False]),
            "text_embeds": torch.rand(5, 16),
        }
    )
    assert sample.pixels.dtype == torch.uint8
    assert sample.caption == "a ball"
    assert sample.frame_mask.tolist() == [True, False]
    assert sample.text_embeds.shape == (5, 16)


def test_inferred_by_type():
    sample = first(
        (CLIP, "a ball", torch.zeros(2, 4, 4, dtype=torch.int64), torch.tensor([True, True]), torch.rand(5, 16))
    )
    assert torch.equal(sample.pixels, (CLIP * 255).round().to(torch.uint8))
    assert sample.caption == "a ball"
    assert sample.tokens.shape == (2, 4, 4)
    assert sample.frame_mask.all()
    assert sample.text_embeds.shape == (5, 16)


def test_tokens_of_an_image_get_a_time_axis():
    assert first((torch.zeros(4, 4, dtype=torch.int64), "a")).tokens.shape == (1, 4, 4)


def test_ids_without_pixels():
    opened = source(("a ball", torch.zeros(2, 4, 4, dtype=torch.int64)))
    sample = opened.read(0, np.random.default_rng(0))
    assert sample.pixels is None
    assert sample.fps == 8
    assert opened.fields == {"caption", "tokens"}
    assert source((CLIP, "a")).fields == {"caption", "pixels"}


class Tubes(Codec):
    """The first frame alone, then pairs of frames, in blocks of 2 × 2."""

    vocabulary = 10

    def shape_for(self, frames, height, width):
        if frames % 2 == 0:
            raise ConfigError("use 1 + 2 k")
        return 1 + frames // 2, height // 2, width // 2


def test_ids_of_pictures_and_short_clips_are_padded_to_a_whole_clip():
    grid = TokenGrid.of(Tubes(), 5, (8, 8))
    assert grid.shape == (3, 4, 4)
    assert grid.lengths == {1: 1, 2: 3, 3: 5}
    whole, picture, short, masked = (
        torch.randint(10, (3, 4, 4)),
        torch.randint(10, (4, 4)),
        torch.randint(10, (2, 4, 4)),
        torch.randint(10, (3, 4, 4)),
    )
    opened = source(
        {"tokens": whole},
        {"tokens": picture},
        {"tokens": short, "frame_mask": torch.tensor([True, True, False])},
        {"tokens": masked, "frame_mask": torch.arange(5) < 2},
        frames=5,
    )
    opened.expect(grid)
    ((batch,),) = Loader(opened, 0, 4).steps(0, 1)
    rows = {int(mask.sum()): (tokens, mask) for tokens, mask in zip(batch.tokens, batch.frame_mask, strict=True)}
    assert batch.tokens.shape == (4, 3, 4, 4)
    assert torch.equal(rows[5][0], whole)
    assert torch.equal(rows[1][0], picture.expand(3, 4, 4))
    found = [tokens for tokens, mask in zip(batch.tokens, batch.frame_mask, strict=True) if mask.sum() == 2]
    assert any(torch.equal(tokens, torch.cat([short, short[-1:]])) for tokens in found)
    assert any(torch.equal(tokens, masked) for tokens in found)
    full = source({"tokens": whole}, {"tokens": masked}, frames=5)
    full.expect(grid)
    ((batch,),) = Loader(full, 0, 2).steps(0, 1)
    assert batch.frame_mask is None


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"tokens": torch.full((3, 4, 4), 10)}, "ids from 10 to 10, and the codec has 10 codes"),
        ({"tokens": torch.full((3, 4, 4), -1)}, "ids from -1 to -1"),
        ({"tokens": torch.zeros(4, 4, 4).long()}, r"makes \(3, 4, 4\).*t of 1, 2, 3"),
        ({"tokens": torch.zeros(3, 4, 5).long()}, "do not fit the codec"),
        ({"tokens": torch.zeros(3, 4, 4).long(), "frame_mask": torch.ones(3).bool()}, "not token times"),
        (
            {"tokens": torch.zeros(1, 4, 4).long(), "frame_mask": torch.arange(5) < 2},
            "2 real frames beside .* 1 frames",
        ),
    ],
)
def test_ids_that_do_not_fit_the_codec_are_refused(item, message):
    opened = source(item, frames=5)
    with pytest.raises(InputError, match=message):
        opened.expect(TokenGrid.of(Tubes(), 5, (8, 8)))


def test_beside_ids_the_first_frames_are_taken():
    clip = torch.arange(6, dtype=torch.uint8)[:, None, None, None].expand(6, 3, 8, 8)
    opened = source({"videos": clip, "tokens": torch.zeros(2, 4, 4).long()})
    for seed in range(10):
        assert opened.read(0, np.random.default_rng(seed)).pixels[:, 0, 0, 0].tolist() == [0, 1]


def test_pictures_beside_clips():
    opened = source((CLIP, "clip"), (torch.rand(3, 8, 8), "picture"), (Image.new("RGB", (8, 8)), "photo"))
    ((batch,),) = Loader(opened, 0, 3).steps(0, 1)
    assert batch.pixels.shape == (3, 2, 3, 8, 8)
    real = dict(zip(batch.captions, batch.frame_mask.sum(1).tolist(), strict=True))
    assert real == {"clip": 2, "picture": 1, "photo": 1}


def test_channels_first_or_frames_first():
    clip = torch.rand(5, 3, 8, 8)
    expected = first(clip, frames=5).pixels
    assert torch.equal(first(clip.transpose(0, 1), frames=5).pixels, expected)
    square = torch.rand(3, 3, 8, 8)  # both fit: frames come first
    assert torch.equal(first(square, frames=3).pixels, (square * 255).round().to(torch.uint8))


def test_rank_three_is_an_image():
    sample = first(torch.rand(3, 8, 8), frames=1)
    assert sample.pixels.shape == (1, 3, 8, 8)


def test_numpy_and_pillow():
    assert first((np.zeros((2, 3, 8, 8), np.uint8), "a")).pixels.shape == (2, 3, 8, 8)
    sample = first((Image.new("RGBA", (20, 30), (255, 0, 0, 255)), "a"), frames=1)
    assert sample.pixels[0, :, 0, 0].tolist() == [255, 0, 0]


def test_other_sizes_colours_and_lengths_are_fitted():
    assert first(torch.rand(2, 1, 20, 30)).pixels.shape == (2, 3, 8, 8)
    short = first(torch.rand(1, 3, 8, 8))
    assert short.frame_mask.tolist() == [True, False]
    long = source(torch.arange(6, dtype=torch.uint8)[:, None, None, None].expand(6, 3, 8, 8))
    starts = {int(long.read(0, np.random.default_rng(seed)).pixels[0, 0, 0, 0]) for seed in range(40)}
    assert starts == {0, 1, 2, 3, 4}


def test_masked_frames_are_never_chosen():
    clip = torch.arange(6, dtype=torch.uint8)[:, None, None, None].expand(6, 3, 8, 8)
    masked = source({"videos": clip, "video_frame_mask": torch.arange(6) < 3})
    found = {
        int(value) for seed in range(30) for value in masked.read(0, np.random.default_rng(seed)).pixels[:, 0, 0, 0]
    }
    assert found == {0, 1, 2}


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (CLIP * 255, r"\[0, 1\].*divide by 255"),
        (CLIP * 2 - 1, r"add 1 and halve"),
        (CLIP * float("nan"), r"\[0, 1\]"),
        ((CLIP, CLIP), "two values for pixels"),
        (("a", "b"), "two values for caption"),
        ((CLIP, 7), "class label"),
        ((CLIP, torch.rand(5)), "which is ambiguous"),
        ({"videos": CLIP, "speed": 3}, "the unknown field 'speed'"),
        ({"videos": "a ball"}, "pixels is a str"),
        ({"texts": CLIP}, "caption is of type Tensor"),
        ({"videos": torch.zeros(2, 3, 8, 8, dtype=torch.int64)}, "uint8 or float"),
        ({"videos": torch.rand(8, 8)}, "T C H W"),
        ({"video_codebook_ids": torch.rand(2, 4, 4)}, "int64 of rank 2 or 3"),
        ({"videos": CLIP, "video_frame_mask": torch.ones(2)}, "bool of rank 1"),
        ({"videos": CLIP, "video_frame_mask": torch.ones(7, dtype=torch.bool)}, "beside 2 frames"),
        ({"text_embeds": torch.rand(2, 3, 4)}, "float of rank 2"),
        ({"text_embeds": torch.rand(5, 4), "text_mask": torch.ones(6, dtype=torch.bool)}, "text mask of 6 beside 5"),
        ({"text_embeds": torch.zeros(5, 4, dtype=torch.int64)}, "float of rank 2"),
        ({"videos": CLIP, "video_frame_mask": torch.tensor([False, True])}, "padding only at the end"),
        ({"videos": CLIP, "video_frame_mask": torch.tensor([False, False])}, "at least one"),
        ({"video_codebook_ids": torch.zeros(2, 0, 4, dtype=torch.int64)}, "is empty"),
        ({"video_codebook_ids": torch.zeros(8, dtype=torch.int64)}, "int64 of rank 2 or 3"),
        ({"videos": CLIP, "video": CLIP}, "two values for pixels"),
        ({"videos": CLIP, "texts": "a", "caption": "b"}, "two values for caption"),
        ((torch.zeros(2, 4, 4).long(), torch.zeros(4, 4).long()), "two values for tokens"),
        ((CLIP[None], "a"), "a whole batch"),
        ((torch.zeros(1, 2, 4, 4).long(), "a"), "a whole batch"),
        ({"videos": CLIP, "fps": "fast"}, "fps is a str"),
        ({"videos": CLIP, "fps": 0}, "fps=0 is not a frame rate"),
        (torch.rand(2, 8, 8, 3), "channels-last"),
        (torch.rand(8, 8, 3), "channels-last"),
        (torch.rand(7, 9, 8, 8), "no axis of 1 to 4 channels"),
        ((), "no known field"),
        (ValueError("my bug"), "first item of Items cannot be read: ValueError: my bug"),
    ],
)
def test_wrong_items_are_refused_at_the_start(item, message):
    with pytest.raises(InputError, match=message):
        source(item)


def test_explicit_names_win():
    two = (CLIP, CLIP * 0, "a")
    sample = first(two, fields=["_", "videos", "texts"])
    assert sample.pixels.max() == 0
    assert first({"mine": CLIP, "label": 3}, fields={"mine": "videos", "label": "_"}).pixels.shape == (2, 3, 8, 8)
    with pytest.raises(ConfigError, match="names 2 parts"):
        source(two, fields=["videos", "texts"])
    with pytest.raises(ConfigError, match=r"data\.fields names 'nonsense', which is no field; known: caption"):
        source(two, fields=["videos", "nonsense", "texts"])
    with pytest.raises(ConfigError, match="did you mean texts"):
        source(two, fields=["videos", "_", "txts"])
    with pytest.raises(ConfigError, match="did you mean videos"):
        source({"mine": CLIP}, fields={"mine": "vidoes"})


def test_missing_captions_are_told_of_as_a_dataset_gives_them():
    with pytest.raises(InputError, match=r"1 of 1 items have none.*a str in each item.*texts"):
        require_captions(source(CLIP), "stage generator")


def test_text_embeddings_of_different_lengths_are_told_what_to_do():
    loader = Loader(source((CLIP, torch.rand(5, 4)), (CLIP, torch.rand(3, 4))), 0, 2)
    with pytest.raises(InputError, match=r"text_embeds are of shape .*\(5, 4\).*pad them with zeros to one length"):
        next(loader.steps(0, 1))


def test_later_failures_are_skipped_and_counted():
    one = source(CLIP, OSError("disk"), CLIP)
    with pytest.raises(Unreadable, match="OSError: disk"):
        one.read(1, np.random.default_rng(0))
    loader = Loader(one, 0, 3)
    assert len(list(loader.steps(0, 2))) == 2
    assert loader.skipped == {"item-1": "OSError: disk"}


def test_captions():
    assert source((CLIP, "a"), (CLIP, "b")).caption(1) == "b"
    assert source((CLIP, "a")).list_missing_captions() == []
    assert source(CLIP, CLIP).list_missing_captions() == ["item-0", "item-1"]


def test_streams_and_empty_sets_are_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(())

    with pytest.raises(InputError, match="map-style"):
        DatasetSource(Stream(), DatasetConfig(), "train")
    with pytest.raises(InputError, match="empty"):
        source()


def test_splits_share_no_item():
    config = parse(DatasetConfig, {"size": 8, "frames": 2, "validation": 0.3}, "data")
    parts = [DatasetSource(Importable(20), config, split) for split in ("train", "validation")]
    names = [{part.identity(index) for index in range(len(part))} for part in parts]
    assert not names[0] & names[1]
    assert len(names[0] | names[1]) == 20


def test_in_worker_processes_even_if_it_cannot_be_pickled():
    class Local(Items):
        def __getitem__(self, index):
            return (lambda: CLIP)(), f"text {index}"

    config = parse(DatasetConfig, {"size": 8, "frames": 2, "validation": 0}, "data")
    loader = Loader(DatasetSource(Local(*range(6)), config, "train"), 0, 6, workers=1)
    ((batch,),) = loader.steps(0, 1)
    assert sorted(batch.captions) == [f"text {index}" for index in range(6)]


def test_dotted_path(monkeypatch):
    import sys
    import types

    module = types.ModuleType("my_videos")
    module.Mine = Importable  # type: ignore[attr-defined]
    module.__spec__ = __import__("importlib.machinery").machinery.ModuleSpec("my_videos", None)
    monkeypatch.setitem(sys.modules, "my_videos", module)
    config = parse_data_config(
        {"source": "my_videos.Mine", "arguments": {"count": 6}, "size": 8, "frames": 2, "validation": 0}
    )
    assert len(open_source(config, "train", 0)) == 6
    bad = parse_data_config({"source": "my_videos.Mine", "arguments": {"nonsense": 6}})
    with pytest.raises(ConfigError, match=r"data\.arguments"):
        open_source(bad, "train", 0)


def test_object_in_place_of_what_the_config_names():
    config = parse_data_config({"source": "dataset", "size": 8, "frames": 2, "validation": 0})
    assert len(open_source(config, "train", 0, dataset=Importable(3))) == 3


def test_our_sources_by_name(pictures):
    config = parse_data_config({"source": "folder", "folder": str(pictures), "size": 8, "validation": 0})
    assert len(open_source(config, "train", 0)) == 12
    with pytest.raises(ConfigError, match=r"data.foldr: did you mean data.folder"):
        parse_data_config({"source": "folder", "foldr": "x", "folder": "y"})


def test_sketches_come_with_their_frames():
    """The same frames of both, whichever are chosen; channels as they are."""
    clip = (torch.arange(6)[:, None, None, None] * 20).expand(6, 3, 8, 8).to(torch.uint8)
    opened = source({"video": clip, "caption": "a ball", "sketch": clip[:, :1]})
    assert "sketch" in opened.fields
    starts = set()
    for seed in range(12):
        sample = opened.read(0, np.random.default_rng(seed))
        assert sample.extra["sketch"].shape == (2, 1, 8, 8)
        assert torch.equal(sample.extra["sketch"], sample.pixels[:, :1])
        starts.add(int(sample.pixels[0, 0, 0, 0]))
    assert len(starts) > 2
    with pytest.raises(InputError, match="a sketch of 5 frames beside a clip of 6"):
        first({"video": clip, "sketch": clip[:5, :1]})
