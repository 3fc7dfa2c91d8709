import json

import numpy as np
import pytest
import torch

from kineograph.core.config import parse
from kineograph.core.errors import InputError, Unreadable
from kineograph.data.cache import Block, Cache, read_header, smallest_integer
from kineograph.data.cache_shards import hold
from kineograph.data.cache_writer import CacheWriter, StoredRow
from kineograph.data.loader import Loader

IDS = torch.arange(10 * 2 * 4 * 4).view(10, 2, 4, 4) % 500
NAMES = [f"a/{index}.png" for index in range(10)]
TEXTS = [f"text {index}" for index in range(10)]


def writer(folder, **options):
    return CacheWriter(
        folder, **({"kind": "tokens", "count": 10, "shape": (2, 4, 4), "vocabulary": 500, "key": "k"} | options)
    )


def filled(folder, **options):
    with writer(folder, **options) as cache:
        for start in (0, 4, 8):
            cache.append(IDS[start : start + 4], NAMES[start : start + 4], TEXTS[start : start + 4])
    return folder


def opened(folder, split="train", **options):
    return Cache.open(parse(Cache.Config, {"folder": str(folder), "validation": 0} | options, "data"), split, 0)


def test_round_trip(tmp_path):
    source = opened(filled(tmp_path))
    assert len(source) == 10
    for index in range(10):
        sample = source.read(index, np.random.default_rng(0))
        assert sample.tokens.dtype == torch.int64
        assert torch.equal(sample.tokens, IDS[index])
        assert sample.caption == TEXTS[index]
        assert source.identity(index) == NAMES[index]


@pytest.mark.parametrize(
    ("vocabulary", "kind"), [(2, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")]
)
def test_smallest_type(vocabulary, kind):
    assert smallest_integer(vocabulary) == kind


def test_rows_of_another_cache_stand_among_those_that_are_given(tmp_path):
    block, _ = Block.open(filled(tmp_path / "old"))
    lines = (tmp_path / "old" / "captions.jsonl").read_bytes().splitlines(keepends=True)
    old = [StoredRow(block, row, lines[row]) for row in range(10)]
    with CacheWriter.like(tmp_path / "new", block, 10, "k", "") as cache:
        cache.take(old[:2])
        cache.append(IDS[[2, 4]], [NAMES[2], NAMES[4]], [TEXTS[2], TEXTS[4]], among=[None, old[3], None, old[5]])
        cache.append(IDS[6:8], NAMES[6:8], TEXTS[6:8])
        cache.take(old[8:])
        with pytest.raises(InputError, match="made for 10 items"):
            cache.take(old[:1])
    for name in ("cache.json", "captions.jsonl", "tokens.npy", "fps.npy"):
        assert (tmp_path / "new" / name).read_bytes() == (tmp_path / "old" / name).read_bytes()
    with writer(tmp_path / "other", vocabulary=200) as cache, pytest.raises(InputError, match="another type or shape"):
        cache.take(old[:1])


def test_a_cache_is_held_while_it_is_read(tmp_path):
    (tmp_path / "shards.json").write_text("{}")
    reader = hold(tmp_path)
    assert reader is not None and hold(tmp_path, alone=True) is None
    with reader:
        pass
    alone = hold(tmp_path, alone=True)
    assert alone is not None and hold(tmp_path) is None
    alone.close()


def test_stored_small(tmp_path):
    filled(tmp_path)
    assert (tmp_path / "tokens.npy").stat().st_size == 128 + IDS.numel() * 2


def test_batches(tmp_path):
    ((batch,),) = Loader(opened(filled(tmp_path)), 0, 4).steps(0, 1)
    assert batch.tokens.shape == (4, 2, 4, 4)
    assert batch.pixels is None
    assert len(batch.captions) == 4


def test_latents_text_and_masks(tmp_path):
    latents, embeds = torch.randn(10, 2, 3, 4, 4), torch.randn(10, 5, 6)
    text_mask, frame_mask = torch.rand(10, 5) > 0.5, torch.rand(10, 9) > 0.5
    with writer(
        tmp_path, kind="latents", shape=(2, 3, 4, 4), vocabulary=None, text=(5, 6), frames=9, latents_dtype="float32"
    ) as cache:
        cache.append(
            latents.to(torch.bfloat16).float(),
            NAMES,
            None,
            embeds.to(torch.bfloat16),
            text_mask,
            frame_mask,
            fps=torch.arange(10.0) + 1,
        )
    source = opened(tmp_path)
    ((batch,),) = Loader(source, 0, 10).steps(0, 1)
    order = [int(NAMES.index(source.identity(index))) for index in range(10)]
    assert order == list(range(10))
    sample = source.read(7, np.random.default_rng(0))
    assert torch.equal(sample.latents, latents[7].to(torch.bfloat16).float())
    assert torch.allclose(sample.text_embeds, embeds[7], atol=0.02)
    assert torch.equal(sample.text_mask, text_mask[7])
    assert torch.equal(sample.frame_mask, frame_mask[7])
    assert sample.fps == 8.0
    assert source.missing_captions() == []  # embeddings stand in for them
    assert batch.frame_mask.shape == (10, 9)
    assert batch.text_embeds.shape == (10, 5, 6)


def test_interrupted_writing_goes_on(tmp_path):
    first = writer(tmp_path)
    first.append(IDS[:4], NAMES[:4], TEXTS[:4])
    header = (tmp_path / "cache.json").read_text()
    first.append(IDS[4:8], NAMES[4:8], TEXTS[4:8])
    first.close()
    (tmp_path / "cache.json").write_text(header)  # killed inside the second block, after its captions were written
    with pytest.raises(InputError, match=r"unfinished \(4 of 10"):
        opened(tmp_path)
    with writer(tmp_path) as second:
        assert second.done == 4
        assert not second.complete
        second.append(IDS[4:], NAMES[4:], TEXTS[4:])
        assert second.complete
    source = opened(tmp_path)
    assert [source.caption(index) for index in range(10)] == TEXTS
    assert all(torch.equal(source.read(index, np.random.default_rng(0)).tokens, IDS[index]) for index in range(10))
    assert json.loads((tmp_path / "cache.json").read_text())["complete"] is True
    with writer(tmp_path) as third:
        assert third.complete
    assert opened(tmp_path).read(9, np.random.default_rng(0)).tokens.equal(IDS[9])


def test_another_cache_is_not_overwritten(tmp_path):
    filled(tmp_path)
    with pytest.raises(InputError, match=r"another cache \(key differ"):
        writer(tmp_path, key="other")
    assert read_header(tmp_path).complete


def test_writer_refuses_what_does_not_fit(tmp_path):
    with writer(tmp_path) as cache:
        with pytest.raises(InputError, match="ids from 0 to 500"):
            cache.append(torch.full((1, 2, 4, 4), 500).index_fill_(3, torch.tensor(0), 0), NAMES[:1])
        with pytest.raises(InputError, match=r"shape \(1, 4, 4\)"):
            cache.append(IDS[0, :1], NAMES[:1])
        with pytest.raises(InputError, match="made for 10 items"):
            cache.append(torch.cat([IDS, IDS]), NAMES * 2)
        assert cache.done == 0
    with pytest.raises(InputError, match="vocabulary"):
        writer(tmp_path / "x", vocabulary=None)


def test_reader_refuses_what_does_not_fit(tmp_path):
    source = opened(filled(tmp_path))
    source.expect(500, (2, 4, 4), "k")
    with pytest.raises(InputError, match=r"500 codes, and the codec has 1024"):
        source.expect(vocabulary=1024)
    with pytest.raises(InputError, match=r"\(2, 4, 4\), and \(1, 4, 4\)"):
        source.expect(shape=(1, 4, 4))
    with pytest.raises(InputError, match="other data, preprocessing or codec"):
        source.expect(key="other")


def test_codec_weights_are_told_apart_by_their_hash(tmp_path):
    source = opened(filled(tmp_path / "told", codec="a" * 64))
    source.expect(codec=("runs/x/tokenizer", "a" * 64))
    with pytest.raises(InputError, match=r"other weights \(a{12}\) than the codec runs/x/tokenizer has \(b{12}\)"):
        source.expect(codec=("runs/x/tokenizer", "b" * 64))
    opened(filled(tmp_path / "untold")).expect(codec=("runs/x/tokenizer", "b" * 64))  # made elsewhere: nobody knows


def test_a_cache_begun_without_the_codecs_hash_goes_on(tmp_path):
    with writer(tmp_path) as cache:
        cache.append(IDS[:4], NAMES[:4])
    with writer(tmp_path, codec="a" * 64) as cache:
        assert cache.done == 4


def test_damaged_caches(tmp_path):
    filled(tmp_path)
    (tmp_path / "captions.jsonl").write_text('{"identity": "a"}\n')
    with pytest.raises(InputError, match="1 lines"):
        opened(tmp_path)
    (tmp_path / "tokens.npy").unlink()
    with pytest.raises(InputError, match=r"tokens\.npy does not exist"):
        opened(tmp_path)
    (tmp_path / "cache.json").write_text("{}")
    with pytest.raises(InputError, match="not a cache header"):
        opened(tmp_path)


def test_split_by_identity_as_the_source_would(tmp_path):
    from kineograph.data.split import assign

    filled(tmp_path)
    expected = {NAMES[index] for index in assign(NAMES, 0.3, 0)["validation"]}
    found = opened(tmp_path, "validation", validation=0.3)
    assert {found.identity(index) for index in range(len(found))} == expected


def test_a_folder_for_each_split(tmp_path):
    filled(tmp_path / "train", split="train")
    note = opened(tmp_path, "validation").note
    assert "training data" in note
    with writer(tmp_path / "validation", split="validation", count=2) as cache:
        cache.append(IDS[:2], NAMES[:2])
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
    source.expect(500, (2, 4, 4), "any")


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
