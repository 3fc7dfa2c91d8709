import json
import os
import pickle
import re
import zipfile

import numpy as np
import pytest

from kineograph.core.config import parse
from kineograph.core.errors import ConfigError, InputError, Unreadable
from kineograph.data.array_layout import infer_layout
from kineograph.data.arrays import Array, load_npy
from kineograph.data.check import check_folder
from kineograph.data.memmap import Memmap


def clips(count=6, frames=4, size=8):
    """Clip n, frame t is a flat gray of 10 n + t. N T H W."""
    values = (10 * np.arange(count)[:, None] + np.arange(frames)).astype(np.uint8)
    return np.broadcast_to(values[:, :, None, None], (count, frames, size, size)).copy()


def opened(path, split="train", **options):
    return Memmap.open(
        parse(Memmap.Config, {"folder": str(path), "size": 8, "frames": 4, "validation": 0} | options, "data"), split, 0
    )


def values(source, index, seed=0):
    return source.read(index, np.random.default_rng(seed)).pixels[:, 0, 0, 0].tolist()


LAYOUTS = {
    "NTHW": clips(),
    "TNHW": clips().swapaxes(0, 1),
    "NTCHW": np.repeat(clips()[:, :, None], 3, 2),
    "NTHWC": np.repeat(clips()[..., None], 3, 4),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("raw", [False, True])
def test_layouts(tmp_path, layout, raw):
    array = np.ascontiguousarray(LAYOUTS[layout])
    options = {"layout": layout}
    if raw:
        array.tofile(tmp_path / "mnist.raw")
        options |= {"array_shape": array.shape, "array_dtype": "uint8"}
    else:
        np.save(tmp_path / "mnist.npy", array)
    source = opened(tmp_path / ("mnist.raw" if raw else "mnist.npy"), **options)
    assert len(source) == 6
    assert [values(source, index) for index in range(6)] == [[10 * n + t for t in range(4)] for n in range(6)]
    assert source.read(0, np.random.default_rng(0)).pixels.shape == (4, 3, 8, 8)


def test_layout_is_inferred_where_clear():
    assert infer_layout((20, 10000, 64, 64), set()) == "TNHW"
    assert infer_layout((10000, 20, 64, 64), set()) == "NTHW"
    assert infer_layout((20, 30, 64, 64), {30}) == "TNHW"
    assert infer_layout((20, 30, 64, 64), {20}) == "NTHW"
    assert infer_layout((20, 30, 3, 64, 64), set()) == "NTCHW"
    with pytest.raises(InputError, match=r"data.layout=NTHW or data.layout=TNHW"):
        infer_layout((20, 30, 64, 64), set())
    assert infer_layout((20, 30, 64, 64, 3), set()) == "NTHWC"
    assert infer_layout((1000, 64, 64, 3), set()) == "NHWC"
    assert infer_layout((60000, 28, 28), set()) == "NHW"
    with pytest.raises(InputError, match=r"data.layout=NTCHW or data.layout=NTHWC"):
        infer_layout((20, 30, 3, 64, 4), set())
    with pytest.raises(InputError, match=r"no axis of 1 to 4 channels .* transpose it"):
        infer_layout((20, 30, 64, 64, 64), set())
    with pytest.raises(InputError, match="1000 pictures of 3 channels or 1000 gray clips of 3 frames"):
        infer_layout((1000, 3, 64, 64), set())
    with pytest.raises(InputError, match=r"data.layout=NHWC or data.layout=NCHW"):
        infer_layout((1000, 3, 64, 3), set())
    with pytest.raises(InputError, match="none of T N H W"):
        infer_layout((64, 64, 3), set())
    with pytest.raises(InputError, match="none of T N H W"):
        infer_layout((20, 64), set())


def test_folder_with_captions_beside(tmp_path):
    np.save(tmp_path / "videos.npy", clips())
    np.save(tmp_path / "labels.npy", np.arange(6))
    (tmp_path / "captions.txt").write_text("".join(f"clip {n}\n" for n in range(6)))
    source = opened(tmp_path)
    assert source.caption(2) == "clip 2"
    assert source.list_missing_captions() == []
    assert source.identity(2) == "videos.npy:2"


@pytest.mark.parametrize("name", ["captions.txt", "captions.jsonl"])
def test_captions_with_separators_inside_stay_one_line(tmp_path, name):
    np.save(tmp_path / "videos.npy", clips())
    texts = [f"clip\u2028{n}" for n in range(6)]
    lines = texts if name.endswith("txt") else [json.dumps({"caption": text}, ensure_ascii=False) for text in texts]
    (tmp_path / name).write_bytes("".join(f"{line}\r\n" for line in lines).encode())
    source = opened(tmp_path, layout="NTHW")
    assert [source.caption(n) for n in range(6)] == texts


def test_captions_are_part_of_the_content(tmp_path):
    np.save(tmp_path / "videos.npy", clips())
    (tmp_path / "captions.txt").write_text("".join(f"clip {n}\n" for n in range(6)))
    first = opened(tmp_path, layout="NTHW")
    print_, states = first.fingerprint(), first.item_states()
    (tmp_path / "captions.txt").write_text("".join(f"clip {n}\n" for n in (0, 1, 2, 3, 4, 9)))
    second = opened(tmp_path, layout="NTHW")
    assert second.fingerprint() != print_
    later = second.item_states()
    assert [old == new for old, new in zip(states, later, strict=True)] == [True] * 5 + [False]
    np.save(tmp_path / "videos.npy", np.concatenate([clips(), clips()[:, :1]], 1))
    assert not set(opened(tmp_path, layout="NTHW").item_states()) & set(later)


@pytest.mark.parametrize("raw", [False, True])
def test_captions_from_labels(tmp_path, raw):
    np.save(tmp_path / "videos.npy", clips())
    labels = np.stack([np.arange(6), np.arange(6) + 3], 1).astype(np.uint8)
    if raw:
        labels.tofile(tmp_path / "answers.bin")
    else:
        np.save(tmp_path / "answers.npy", labels)
    source = opened(
        tmp_path / "videos.npy",
        layout="NTHW",
        labels="answers.bin" if raw else "answers.npy",
        caption="the digits {label[0]} and {label[1]}",
    )
    assert source.caption(2) == "the digits 2 and 5"
    assert source.read(2, np.random.default_rng(0)).caption == "the digits 2 and 5"


def test_one_label_each(tmp_path):
    np.save(tmp_path / "videos.npy", clips())
    np.save(tmp_path / "labels.npy", np.arange(6))
    assert opened(tmp_path, caption="the digit {label}").caption(4) == "the digit 4"
    with pytest.raises(ConfigError, match=r"data.caption='\{label\[1\]\}' does not fit a label like 0"):
        opened(tmp_path, caption="{label[1]}")
    for template in ("{label.__class__}", "{label[0]:>999999999}", "{text!r}", "{label[-1]}"):
        with pytest.raises(ConfigError, match=re.escape(template)):
            opened(tmp_path, caption=template)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"caption": "the digit {label}"}, "data.labels"),
        ({"labels": "gone.npy"}, "gone.npy does not exist"),
        ({"layout": "NTCHW"}, "data.layout=NTCHW does not fit"),
    ],
)
def test_what_does_not_fit(tmp_path, options, message):
    np.save(tmp_path / "videos.npy", clips())
    with pytest.raises(InputError, match=message):
        opened(tmp_path, **({"layout": "NTHW"} | options))


def test_wrong_counts_and_sizes(tmp_path):
    np.save(tmp_path / "videos.npy", clips())
    (tmp_path / "captions.txt").write_text("one\ntwo\n")
    with pytest.raises(InputError, match=r"6 clips .* 2 labels or captions"):
        opened(tmp_path, layout="NTHW")
    clips().tofile(tmp_path / "a.raw")
    with pytest.raises(InputError, match=r"has 1536 bytes, .* needs 1280"):
        opened(tmp_path / "a.raw", array_shape=[5, 4, 8, 8])
    with pytest.raises(InputError, match=r"data.array_shape and data.array_dtype"):
        opened(tmp_path / "a.raw")
    with pytest.raises(ConfigError, match=r"data.array_dtype=nonsense"):
        opened(tmp_path / "a.raw", array_shape=[6, 4, 8, 8], array_dtype="nonsense")
    with pytest.raises(InputError, match="does not exist"):
        opened(tmp_path / "gone.npy")
    (tmp_path / "b.npy").write_bytes(b"no array")
    with pytest.raises(InputError, match=r"not a readable \.npy"):
        opened(tmp_path / "b.npy")
    np.save(tmp_path / "c.npy", np.zeros((6, 4, 8, 8), np.int64))
    with pytest.raises(InputError, match="holds int64"):
        opened(tmp_path / "c.npy", layout="NTHW")


def test_objects_are_never_unpickled(tmp_path):
    np.save(tmp_path / "videos.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(InputError, match=r"not a readable \.npy"):
        opened(tmp_path)


@pytest.mark.parametrize(("dtype", "scale"), [("bool", 255), ("float32", 255), ("float16", 255)])
def test_other_types(tmp_path, dtype, scale):
    np.save(tmp_path / "videos.npy", (clips() > 25).astype(dtype))
    assert values(opened(tmp_path, layout="NTHW"), 3) == [scale] * 4


def test_floats_out_of_range(tmp_path):
    np.save(tmp_path / "videos.npy", clips().astype(np.float32))
    with pytest.raises(Unreadable, match=r"0, 1"):
        values(opened(tmp_path, layout="NTHW"), 3)


def test_sizes_channels_lengths(tmp_path):
    np.save(tmp_path / "videos.npy", clips(size=16))
    sample = opened(tmp_path, layout="NTHW", channels=1, frames=6, fps=12).read(1, np.random.default_rng(0))
    assert sample.pixels.shape == (6, 1, 8, 8)
    assert sample.frame_mask.tolist() == [True] * 4 + [False] * 2
    assert sample.fps == 12
    starts = {values(opened(tmp_path, layout="NTHW", frames=2), 0, seed)[0] for seed in range(30)}
    assert starts == {0, 1, 2}


def test_workers_reopen_rather_than_copy(tmp_path):
    np.save(tmp_path / "videos.npy", np.zeros((64, 16, 32, 32), np.uint8))
    source = opened(tmp_path, layout="NTHW")
    values(source, 0)
    packed = pickle.dumps(source)
    assert len(packed) < 20_000
    assert values(pickle.loads(packed), 0) == [0] * 4


def test_quarter_turns_in_training_only(tmp_path):
    array = np.random.default_rng(0).integers(0, 256, (12, 4, 8, 8), dtype=np.uint8)
    np.save(tmp_path / "clips.npy", array)
    options = {"layout": "NTHW", "channels": 1, "rotate": True, "validation": 0.3}
    for split, turns in (("train", 4), ("validation", 1)):
        source = opened(tmp_path / "clips.npy", split, **options)
        number = int(source.identity(0).rsplit(":")[-1])
        expected = {np.rot90(array[number], k, axes=(1, 2)).tobytes() for k in range(turns)}
        found = {source.read(0, np.random.default_rng(seed)).pixels.numpy().tobytes() for seed in range(30)}
        assert found == expected


@pytest.mark.parametrize(
    "header",
    [b"{'a': (", b"\0" * 60, b"[1", b"1 +", b"{'descr': '<f4', 'fortran_order': 0, 'shape': ()}", b"\xff" * 30, b"{}"],
)
def test_a_damaged_npy_header_is_a_value_error(tmp_path, header):
    """numpy parses it as Python, and raises what Python's tokenizer raises."""
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    with pytest.raises(ValueError, match=r"not a \.npy array"):
        load_npy(tmp_path / "a.npy")
    with pytest.raises(InputError, match=r"not a readable \.npy array"):
        Array.npy(tmp_path / "a.npy")


def test_a_zip_is_not_an_npy(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros(1))
    (tmp_path / "a.npz").rename(tmp_path / "a.npy")
    with pytest.raises(ValueError, match="not a"):
        load_npy(tmp_path / "a.npy")


COLOURS = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("layout", "array"),
    [
        ("auto", COLOURS),
        ("NHWC", COLOURS),
        ("NCHW", np.moveaxis(COLOURS, 3, 1)),
        ("auto", COLOURS.astype(np.uint16) * 257),
    ],
)
def test_pictures(tmp_path, layout, array):
    np.save(tmp_path / "images.npy", array)
    source = opened(tmp_path, layout=layout, frames=1)
    for index in range(6):
        pixels = source.read(index, np.random.default_rng(0)).pixels[0]
        assert np.array_equal(np.moveaxis(pixels.numpy(), 0, 2), COLOURS[index])
    assert source.measure(0) == (8, 8, 1, 0.0)
    assert source.is_coloured(0)
    if layout == "auto":
        assert source.note.startswith(f"{tmp_path}/images.npy: 6 pictures, 8 × 8, 3 channels (data.layout=NHWC)")


def test_gray_pictures(tmp_path):
    np.save(tmp_path / "images.npy", COLOURS[..., 0])
    source = opened(tmp_path, frames=1, channels=1)
    assert np.array_equal(source.read(2, np.random.default_rng(0)).pixels[0, 0], COLOURS[2, ..., 0])
    assert not source.is_coloured(0)


@pytest.mark.parametrize("highest", [255, 4095])
def test_sixteen_bits_that_are_not_used(tmp_path, highest):
    """12 bits of a camera would be read as nearly black."""
    np.save(tmp_path / "images.npy", np.full((6, 8, 8, 3), highest, np.uint16))
    with pytest.raises(InputError, match=f"values up to {highest} in 6 items.* multiply it by {65535 // highest}"):
        opened(tmp_path)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz(tmp_path, save):
    labels = np.arange(6)
    save(tmp_path / "a.npz", videos=clips(), labels=labels)
    source = opened(tmp_path / "a.npz", caption="the digit {label}")
    assert [values(source, index) for index in range(6)] == [[10 * n + t for t in range(4)] for n in range(6)]
    assert source.caption(4) == "the digit 4"
    assert values(pickle.loads(pickle.dumps(source)), 2) == [20, 21, 22, 23]
    assert isinstance(source.array.values, np.memmap) == (save is np.savez)
    save(tmp_path / "b.npz", train=clips(), test=clips(2))
    with pytest.raises(InputError, match=r"holds the arrays train, test: set data.array_name"):
        opened(tmp_path / "b.npz")
    assert len(opened(tmp_path / "b.npz", array_name="test", layout="NTHW")) == 2
    with pytest.raises(InputError, match=r"data.array_name=gone is not in"):
        opened(tmp_path / "b.npz", array_name="gone")


def test_hostile_npz(tmp_path, monkeypatch):
    monkeypatch.setattr("kineograph.data.arrays._MAX_UNPACKED", 1000)
    np.savez_compressed(tmp_path / "a.npz", clips())
    with pytest.raises(InputError, match=r"compressed array of 1,536 bytes.*numpy.save"):
        opened(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", np.array([{"a": 1}], dtype=object))
    with pytest.raises(InputError, match="Python objects"):
        opened(tmp_path / "b.npz")
    data = bytearray((tmp_path / "a.npz").read_bytes())
    for cut in (10, 60, len(data) - 30):
        (tmp_path / "c.npz").write_bytes(data[:cut])
        with pytest.raises(InputError, match="not a readable"):
            opened(tmp_path / "c.npz")
    np.savez(tmp_path / "d.npz", clips())
    whole = (tmp_path / "d.npz").read_bytes()
    (tmp_path / "d.npz").write_bytes(whole.replace(b"(6, 4, 8, 8)", b"(9, 4, 8, 8)"))
    with pytest.raises(InputError, match="no readable array"):
        opened(tmp_path / "d.npz")
    with zipfile.ZipFile(tmp_path / "e.npz", "w", zipfile.ZIP_DEFLATED) as file:
        with zipfile.ZipFile(tmp_path / "a.npz") as good:
            array = good.read("arr_0.npy")
        file.writestr("arr_0.npy", array.replace(b"(6, 4, 8, 8)", b"(-6, 4, 8,8)"))
    with pytest.raises(InputError, match=r"not a readable|no readable array"):  # not unpacked without a limit
        opened(tmp_path / "e.npz")


def test_arrays_without_pixels_and_with_endless_items_are_refused(tmp_path, monkeypatch):
    np.save(tmp_path / "clips.npy", np.zeros((8, 0, 16, 16, 3), np.uint8))
    with pytest.raises(InputError, match=r"shape \(8, 0, 16, 16, 3\): there are no pixels in it"):
        opened(tmp_path)
    assert "no pixels" in str(check_folder(tmp_path).problems)
    np.save(tmp_path / "clips.npy", clips())
    monkeypatch.setattr("kineograph.data.array_layout._MAX_ITEMS", 5)
    with pytest.raises(InputError, match="6 items, and no more than 5 are read: use tar shards"):
        opened(tmp_path, layout="NTHW")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["labels.npy", "labels.npz", "labels.raw"])
def test_labels_that_are_a_pipe_do_not_block(tmp_path, name):
    np.save(tmp_path / "clips.npy", clips())
    os.mkfifo(tmp_path / name)
    with pytest.raises(InputError, match="not a regular file"):
        opened(tmp_path, labels=name)
