"""Packs and data.source=cache: rows come back as they were written, damage and misfits are refused."""

import json

import numpy as np
import pytest
import torch

from kineograph.cache.pack import Pack, PackWriter, smallest_integer
from kineograph.cache.source import Cache, CacheConfig
from kineograph.cache.store import CacheSet, PackIndex, SetHeader, is_complete, lock_cache
from kineograph.core.caption_format import CaptionFormat, Captioning
from kineograph.core.config import parse
from kineograph.core.errors import InputError, Unreadable
from kineograph.data.loader import Loader

IDS = torch.arange(10 * 2 * 4 * 4).view(10, 2, 4, 4) % 500
NAMES = [f"a/{index}.png" for index in range(10)]
TEXTS = [f"text {index}" for index in range(10)]
KEYS = [bytes([index]) * 16 for index in range(10)]


def writer(folder, count=10, ids=IDS, fields=None, split=None, **options):
    """Writes a pack of one's own, which may hold any split."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = fields or {"tokens": ids, "fps": torch.full((len(ids),), 8.0)}
    pack = PackWriter(folder, count, fields, **({"vocabulary": 500, "key": "k"} | options))
    pack.header = pack.header.model_copy(update={"split": split})
    return pack


def append(pack, start, stop, ids=IDS):
    fps = torch.full((stop - start,), 8.0)
    fields = {"tokens": ids[start:stop], "fps": fps}
    pack.append(fields, KEYS[start:stop], NAMES[start:stop], [(text,) for text in TEXTS[start:stop]])


def fill_pack(folder, **options):
    pack = writer(folder, **options)
    for start in (0, 4, 8):
        append(pack, start, min(start + 4, 10))
    pack.close()
    return folder


def opened(folder, split="train", **options):
    return Cache.open(parse(Cache.Config, {"folder": str(folder), "validation": 0} | options, "data"), split, 0)


def test_round_trip(tmp_path):
    source = opened(fill_pack(tmp_path))
    assert len(source) == 10
    for index in range(10):
        sample = source.read(index, np.random.default_rng(0))
        assert sample.tokens.dtype == torch.int64
        assert torch.equal(sample.tokens, IDS[index])
        assert sample.caption == TEXTS[index]
        assert source.identity(index) == NAMES[index]


def test_several_captions_come_back_and_one_is_drawn_each_time(tmp_path):
    pack = writer(tmp_path, count=2)
    pack.append({"tokens": IDS[:2], "fps": torch.full((2,), 8.0)}, KEYS[:2], NAMES[:2], [("a", "b"), ()])
    pack.close()
    source = opened(tmp_path)
    assert source.captions(0) == ("a", "b") and source.captions(1) == ()
    source.captioning = Captioning((CaptionFormat("{text}!", draws=True),))
    drawn = {text for (batch,) in Loader(source, seed=0, batch_size=2).steps(0, 20) for text in batch.captions}
    assert drawn == {"a!", "b!", ""}
    skipping = opened(tmp_path, uncaptioned="skip")
    assert len(skipping) == 1 and "1 of 2 items have no caption" in skipping.note


@pytest.mark.parametrize(
    ("vocabulary", "kind"), [(2, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")]
)
def test_smallest_type(vocabulary, kind):
    assert smallest_integer(vocabulary) == kind


def test_a_set_lists_rows_of_several_packs_in_the_order_of_the_data(tmp_path):
    fill_pack(tmp_path / "pack-00000")
    with_more = writer(tmp_path / "pack-00001", count=8)
    append(with_more, 2, 6, ids=(IDS + 1) % 500)
    with_more.close()
    index = PackIndex(tmp_path, "k")
    index.refresh()
    rows = index.find(np.array([KEYS[7], KEYS[3], b"x" * 16], "S16"))
    assert rows.tolist() == [[0, 7], [0, 3], [-1, -1]]
    order = np.array([[1, 0], [0, 9], [1, 3]])
    CacheSet(tmp_path / "set", SetHeader(packs=("pack-00000", "pack-00001")), order).write()
    source = opened(tmp_path / "set")
    assert [source.identity(index) for index in range(3)] == [NAMES[2], NAMES[9], NAMES[5]]
    assert torch.equal(source.read(2, np.random.default_rng(0)).tokens, (IDS[5] + 1) % 500)
    assert is_complete(tmp_path / "set")
    assert not is_complete(tmp_path / "pack-00000")
    CacheSet(tmp_path / "beyond", SetHeader(packs=("pack-00001",)), np.array([[0, 4]])).write()  # 4 rows are done
    assert not is_complete(tmp_path / "beyond")


def test_packs_of_another_recipe_and_damaged_packs_are_not_found(tmp_path):
    for number, key in enumerate(("k", "other", "k", "k")):
        fill_pack(tmp_path / f"pack-{number:05d}", key=key)
    (tmp_path / "pack-00002" / "tokens.npy").write_bytes(b"no array")
    (tmp_path / "pack-00003" / "cache.json").write_text("{")
    (tmp_path / "pack-00004").mkdir()  # created, and killed before the first row
    index = PackIndex(tmp_path, "k")
    index.refresh()
    assert [pack.folder.name for pack in index.packs] == ["pack-00000"]


def test_a_cache_is_locked_while_it_is_read(tmp_path):
    fill_pack(tmp_path)
    reader = lock_cache(tmp_path)
    assert reader is not None and lock_cache(tmp_path, exclusive=True) is None
    with reader:
        pass
    alone = lock_cache(tmp_path, exclusive=True)
    assert alone is not None and lock_cache(tmp_path) is None
    alone.close()


def test_stored_small(tmp_path):
    fill_pack(tmp_path)
    assert (tmp_path / "tokens.npy").stat().st_size == 128 + IDS.numel() * 2


def test_batches(tmp_path):
    ((batch,),) = Loader(opened(fill_pack(tmp_path)), 0, 4).steps(0, 1)
    assert batch.tokens.shape == (4, 2, 4, 4)
    assert batch.pixels is None
    assert len(batch.captions) == 4


def test_latents_text_and_masks(tmp_path):
    fields = {
        "latents": torch.randn(10, 2, 3, 4, 4).to(torch.bfloat16).float(),
        "text_embeds": torch.randn(10, 5, 6).to(torch.bfloat16),
        "text_mask": torch.rand(10, 5) > 0.5,
        "frame_mask": torch.rand(10, 9) > 0.5,
        "fps": torch.arange(10.0) + 1,
    }
    pack = writer(tmp_path, fields=fields, precision="fp32", vocabulary=None, key="")
    pack.append(fields, KEYS, NAMES)
    pack.close()
    source = opened(tmp_path)
    ((batch,),) = Loader(source, 0, 10).steps(0, 1)
    assert [source.identity(index) for index in range(10)] == NAMES
    sample = source.read(7, np.random.default_rng(0))
    for name in ("latents", "text_embeds", "text_mask", "frame_mask"):
        assert torch.equal(getattr(sample, name), fields[name][7].to(getattr(sample, name).dtype)), name
    assert sample.fps == 8.0
    assert source.list_missing_captions() == []  # embeddings stand in for them
    assert batch.frame_mask.shape == (10, 9)
    assert batch.text_embeds.shape == (10, 5, 6)


def test_a_killed_writer_leaves_a_valid_prefix(tmp_path):
    first = writer(tmp_path)
    append(first, 0, 4)
    header = (tmp_path / "cache.json").read_text()
    append(first, 4, 8)
    first.close()
    (tmp_path / "cache.json").write_text(header)  # killed inside the second batch, after its captions were written
    pack = Pack.open(tmp_path)
    assert pack.keys().tolist() == np.array(KEYS[:4], "S16").tolist()
    assert pack.captions() == [(name, (text,)) for name, text in zip(NAMES[:4], TEXTS[:4], strict=True)]
    with pytest.raises(InputError, match=r"unfinished \(4 of 10"):
        opened(tmp_path)


def test_every_pack_gets_a_folder_of_its_own(tmp_path):
    names = [PackWriter.create_folder(tmp_path / "cache").name for _ in range(3)]
    assert names == ["pack-00000", "pack-00001", "pack-00002"]


def test_writer_refuses_what_does_not_fit(tmp_path):
    pack = writer(tmp_path)
    with pytest.raises(InputError, match="ids from 0 to 500"):
        append(pack, 0, 1, torch.full((1, 2, 4, 4), 500).index_fill_(3, torch.tensor(0), 0))
    with pytest.raises(AssertionError):
        append(pack, 0, 1, IDS[0, :1])
    with pytest.raises(AssertionError):
        pack.append({"tokens": torch.cat([IDS, IDS])}, KEYS * 2, NAMES * 2)
    assert pack.header.done == 0
    pack.close()
    with pytest.raises(InputError, match="vocabulary"):
        writer(tmp_path / "x", vocabulary=None)


def test_reader_refuses_another_codec(tmp_path):
    source = opened(fill_pack(tmp_path / "known", codec="a" * 64))
    source.check_vocabulary(500)
    with pytest.raises(InputError, match=r"500 codes, and the codec has 1024"):
        source.check_vocabulary(1024)
    source.check_codec("runs/x/tokenizer", "a" * 64)
    with pytest.raises(InputError, match=r"other weights \(a{12}\) than the codec runs/x/tokenizer has \(b{12}\)"):
        source.check_codec("runs/x/tokenizer", "b" * 64)
    opened(fill_pack(tmp_path / "unknown")).check_codec("runs/x/tokenizer", "b" * 64)  # made elsewhere: nobody knows


def test_damaged_caches(tmp_path):
    fill_pack(tmp_path)
    (tmp_path / "captions.jsonl").write_text('{"identity": "a"}\n')
    with pytest.raises(InputError, match="1 lines"):
        opened(tmp_path)
    (tmp_path / "tokens.npy").unlink()
    with pytest.raises(InputError, match=r"tokens\.npy does not exist"):
        opened(tmp_path)
    (tmp_path / "cache.json").write_text("{}")
    with pytest.raises(InputError, match="not a cache header"):
        opened(tmp_path)


def test_a_header_that_does_not_describe_the_rows_is_refused(tmp_path):
    fill_pack(tmp_path)
    header = json.loads((tmp_path / "cache.json").read_text())
    for changes, words in (({"shape": [1, 2]}, "have the shape"), ({"kind": "latents"}, "there are no latents")):
        (tmp_path / "cache.json").write_text(json.dumps(header | changes))
        with pytest.raises(InputError, match=rf"{words}.*encode again"):
            Pack.open(tmp_path)


def test_split_by_identity_as_the_source_would(tmp_path):
    from kineograph.data.open_source import assign_splits

    fill_pack(tmp_path)
    expected = {NAMES[index] for index in assign_splits(NAMES, 0.3, 0)["validation"]}
    found = opened(tmp_path, "validation", validation=0.3)
    assert {found.identity(index) for index in range(len(found))} == expected


def test_a_folder_for_each_split(tmp_path):
    fill_pack(tmp_path / "train", split="train")
    note = opened(tmp_path, "validation").note
    assert "training data" in note
    pack = writer(tmp_path / "validation", split="validation", count=2)
    append(pack, 0, 2)
    pack.close()
    assert len(opened(tmp_path)) == 10
    assert len(opened(tmp_path, "validation")) == 2
    with pytest.raises(InputError, match="holds the train split"):
        opened(tmp_path / "train", "test", test=0.1)


# Foreign arrays -----------------------------------------------------------------------------------------------------

FOREIGN = {"vocabulary": 500, "tokens_shape": [2, 4, 4]}


@pytest.mark.parametrize("flat", [False, True])
def test_foreign_memmap(tmp_path, flat):
    ids = IDS.numpy().reshape(10, -1) if flat else IDS.numpy()
    ids.tofile(tmp_path / "ids.dat")
    (tmp_path / "captions.txt").write_text("\n".join(TEXTS))
    source = opened(tmp_path / "ids.dat", array_shape=list(ids.shape), **FOREIGN)
    assert torch.equal(source.read(3, np.random.default_rng(0)).tokens, IDS[3])
    assert source.caption(3) == "text 3"
    source.check_vocabulary(500)


def test_foreign_memmap_with_its_label_memmap(tmp_path):
    """As nuwa-pytorch's VideoIndicesDataset reads them: raw ids, and raw uint8 labels."""
    ids = np.arange(12, dtype=np.int64).reshape(3, 4)
    ids.tofile(tmp_path / "video.memmap")
    np.array([[1, 2], [3, 4], [5, 6]], np.uint8).tofile(tmp_path / "text.memmap")
    keys = {
        "folder": str(tmp_path / "video.memmap"),
        "array_shape": (3, 4),
        "vocabulary": 12,
        "tokens_shape": (1, 2, 2),
        "caption": "{label[0]} and {label[1]}",
        "validation": 0,
    }
    source = Cache.open(CacheConfig(**keys, labels="text.memmap"), "train", 0)
    assert [source.caption(index) for index in range(3)] == ["1 and 2", "3 and 4", "5 and 6"]
    assert source.read(1, np.random.default_rng(0)).tokens.flatten().tolist() == [4, 5, 6, 7]
    with pytest.raises(InputError, match=r"there are none beside .*: set data\.labels"):
        Cache.open(CacheConfig(**keys), "train", 0)
    np.arange(5, dtype=np.uint8).tofile(tmp_path / "text.memmap")
    with pytest.raises(InputError, match="3 items and there are 5 labels"):
        Cache.open(CacheConfig(**keys, labels="text.memmap"), "train", 0)


def test_foreign_npy_that_does_not_fit(tmp_path):
    np.save(tmp_path / "ids.npy", IDS.numpy())
    with pytest.raises(InputError, match=r"data.vocabulary and data.tokens_shape"):
        opened(tmp_path / "ids.npy")
    with pytest.raises(InputError, match=r"32 ids an item .* needs 16"):
        opened(tmp_path / "ids.npy", vocabulary=500, tokens_shape=[1, 4, 4])
    with pytest.raises(InputError, match=r"ids from 0 to 319, .*allows 0 to 99"):
        opened(tmp_path / "ids.npy", vocabulary=100, tokens_shape=[2, 4, 4])
    np.save(tmp_path / "floats.npy", IDS.numpy().astype(np.float32))
    with pytest.raises(InputError, match="integers"):
        opened(tmp_path / "floats.npy", **FOREIGN)
    (tmp_path / "captions.txt").write_text("one")
    with pytest.raises(InputError, match="1 captions"):
        opened(tmp_path / "ids.npy", **FOREIGN)


def test_a_bad_id_in_the_middle_is_found_when_read(tmp_path):
    ids = np.zeros((1000, 2, 4, 4), np.int64)
    ids[500] = 777
    np.save(tmp_path / "ids.npy", ids)
    with pytest.raises(Unreadable, match="777"):
        opened(tmp_path / "ids.npy", **FOREIGN).read(500, np.random.default_rng(0))
