import io
import json
import tarfile

import numpy as np
import pytest
from PIL import Image

from kineograph.core.errors import InputError
from kineograph.data.captions import names_side
from kineograph.data.check import check_folder
from kineograph.data.folder import FolderConfig
from tests.data.tar_shards import item, picture, write


def problems(report):
    return dict(report.problems)


def test_sound_folder(pictures, make_video, counting):
    make_video(pictures / "clip.mp4", counting(15), fps=30)
    (pictures / "clip.txt").write_text("gray 3")
    (pictures / "README.txt").write_text("about this folder")
    report = check_folder(pictures)
    assert report.problems == []
    assert report.kinds == {"images (png)": 12, "clips (mp4)": 1}
    text = "\n".join(report.lines())
    for line in (
        "12 images (png), 1 clip (mp4)",
        "width: 8 to 48, median 8",
        "aspect: 1.00 to 1.50",
        "clip frames: 15",
        "clip seconds: 0.50",
        "clip fps: 30.00",
    ):
        assert line in text
    assert "captions: 13 of 13 (0 missing), 1 repeated, words 2 to 2 (median 2)" in text
    assert text.endswith("0 problems")


def test_a_single_array_or_tar_is_checked(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((5, 8, 8, 3), np.uint8))
    write(tmp_path / "b.tar", item(0))
    assert check_folder(tmp_path / "a.npy").lines()[:2] == [
        f"{tmp_path / 'a.npy'}: 1 array (npy)",
        "a.npy: uint8 5 × 8 × 8 × 3",
    ]
    assert check_folder(tmp_path / "b.tar").lines()[1] == "b.tar: 1 sample, 1 with text"
    (tmp_path / "c.png").write_bytes(b"")
    with pytest.raises(InputError, match=r"c.png is a file: give the folder"):
        check_folder(tmp_path / "c.png")


@pytest.mark.parametrize(
    ("caption", "sided"),
    [
        ("a cat on the left", True),
        ("Right-handed catcher", True),
        ("moving leftwards, then rightward", True),
        ("the leftmost tree", True),
        ("it turns counter-clockwise", True),
        ("copyright, a brightly lit cleft", False),
        ("a cat", False),
    ],
)
def test_captions_that_name_a_side(pictures, caption, sided):
    assert names_side(caption) == sided
    (pictures / "p01.txt").write_text(caption)
    report = check_folder(pictures)
    assert report.problems == []
    assert any("1 captions say left or right; leave data.flip at 0" in line for line in report.lines()) == sided
    assert dict(check_folder(pictures, FolderConfig(folder=str(pictures), flip=0.5)).problems).keys() == (
        {"captions"} if sided else set()
    )


def test_captions_of_shards_that_name_a_side(tmp_path):
    write(
        tmp_path / "0.tar", [*item(0), *item(1, caption=False, txt=b"to the left"), *item(2, caption=False, txt=b"x")]
    )
    assert check_folder(tmp_path).sided == 1


def test_every_problem_is_named(pictures):
    (pictures / "broken.png").write_bytes(b"nothing")
    (pictures / "zero.mp4").write_bytes(b"")
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(pictures / "cut.png")
    (pictures / "cut.png").write_bytes((pictures / "cut.png").read_bytes()[:1000])
    (pictures / "p01.txt").unlink()
    (pictures / "p02.txt").write_text(" ")
    (pictures / "p03.txt").write_bytes(b"\xff\xff")
    (pictures / "lonely.txt").write_text("where is my picture?")
    (pictures / "metadata.jsonl").write_text(
        json.dumps({"file_name": "gone.png", "text": "x"}) + "\n{\n" + json.dumps({"text": "no name"})
    )
    for name in ("broken", "zero", "cut"):
        (pictures / f"{name}.txt").write_text("x")
    report = check_folder(pictures)
    found = problems(report)
    assert "not a PNG" in found["broken.png"]
    assert "0 bytes" in found["zero.mp4"]
    assert "cut.png" in found
    assert found["p01.png"] == "no caption"
    assert found["p02.txt"] == "an empty caption"
    assert found["p03.txt"] == "not UTF-8 text"
    assert found["lonely.txt"] == "a caption without image or clip"
    metadata = [reason for path, reason in report.problems if path == "metadata.jsonl"]
    assert "line 3 has no file_name" in metadata
    assert len(metadata) == 3
    assert any("gone.png" in reason for reason in metadata)
    assert len(report.problems) == 10
    assert "10 problems" in report.lines()


def test_many_problems_of_one_kind_are_shortened(pictures):
    for text in sorted(pictures.glob("*.txt"))[:8]:
        text.unlink()
    (pictures / "lonely.txt").write_text("where is my picture?")
    report = check_folder(pictures)
    lines = report.lines()
    assert len(report.problems) == 9 and "9 problems" in lines
    assert [line for line in lines if "no caption" in line] == [
        *(f"  p{number:02d}.png: no caption" for number in range(4)),
        "  … and 4 more: no caption (--all lists them)",
    ]
    assert "  lonely.txt: a caption without image or clip" in lines
    assert sum("no caption" in line for line in report.lines(everything=True)) == 8


def test_files_with_the_same_content_are_named(pictures):
    assert not any("repeats" in line for line in check_folder(pictures).lines())
    (pictures / "p00-copy.png").write_bytes((pictures / "p00.png").read_bytes())
    (pictures / "p00-copy.txt").write_text("a copy")
    lines = check_folder(pictures).lines()
    assert any("repeats: 1 files have the content of another, such as p00-copy.png = p00.png" in line for line in lines)


def test_endings_of_one_kind_are_counted_together(pictures, make_video, counting):
    for name in ("a.mp4", "b.mp4", "c.mkv"):
        make_video(pictures / name, counting(5), fps=5)
    assert "12 images (png), 3 clips (2 mp4, 1 mkv)" in check_folder(pictures).lines()[0]


def test_a_picture_is_read_once(pictures, monkeypatch):
    read = []
    monkeypatch.setattr("kineograph.data.check.read_media", lambda path, limits: read.append(path) or path.read_bytes())
    monkeypatch.setattr(
        "kineograph.data.decode.read_media", lambda path, limits: read.append(path) or path.read_bytes()
    )
    check_folder(pictures)
    assert len(read) == len(set(read)) == 12


def test_no_captions_at_all_is_fine(pictures):
    for text in pictures.glob("*.txt"):
        text.unlink()
    report = check_folder(pictures)
    assert report.problems == []
    assert any("captions: none" in line for line in report.lines())


def test_parts_of_a_clip_are_items_of_their_own(tmp_path, make_video, counting):
    make_video(tmp_path / "clip.mp4", counting(15), fps=5)
    make_video(tmp_path / "whole.mp4", counting(5), fps=5)
    (tmp_path / "whole.txt").write_text("one two three four")
    parts = [
        {"start": 0, "end": 1, "text": "a red ball"},
        {"start": 1, "end": 2, "text": ""},
        {"start": 2, "end": 3, "text": "falls down"},
    ]
    (tmp_path / "metadata.jsonl").write_text(json.dumps({"file_name": "clip.mp4", "clips": parts}))
    report = check_folder(tmp_path)
    assert problems(report) == {"clip.mp4@1-2": "no caption"}
    assert "captions: 3 of 4 (1 missing), 0 repeated, words 2 to 4 (median 3)" in report.lines()
    assert "3 captioned parts of 1 clips" in report.lines()


def test_parts_that_begin_after_the_end_of_their_clip(tmp_path, make_video, counting):
    make_video(tmp_path / "m0.mp4", counting(10), fps=5)
    parts = [{"start": 0, "end": 1}, {"start": 1.5, "end": 60}, {"start": 2, "end": 3}, {"start": 50, "end": 60}]
    texts = [{**part, "text": f"part {number}"} for number, part in enumerate(parts)]
    (tmp_path / "metadata.jsonl").write_text(json.dumps({"file_name": "m0.mp4", "clips": texts}))
    beyond = {
        f"m0.mp4@{name}": f"its clip begins at {name.split('-')[0]} s, but it lasts 2 s" for name in ("2-3", "50-60")
    }
    report = check_folder(tmp_path)
    assert problems(report) == beyond
    assert [item.info and item.info.seconds for item in report.items] == [
        pytest.approx(1),
        pytest.approx(0.5),
        None,
        None,
    ]
    assert problems(check_folder(tmp_path, FolderConfig(folder=str(tmp_path), start=0.8))) == beyond
    shorter = problems(check_folder(tmp_path, FolderConfig(folder=str(tmp_path), end=1.5)))
    assert shorter == beyond | {"m0.mp4@1.5-60": "nothing is left of its 2 s with data.end=1.5"}
    cut = FolderConfig(folder=str(tmp_path), cut={"seconds": 0.5})
    assert problems(check_folder(tmp_path, cut)) == beyond


def test_gif_lengths(tmp_path):
    frames = [Image.new("L", (8, 8), 40 * index) for index in range(4)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:], duration=[100, 500, 100, 300])
    (media,) = check_folder(tmp_path).media
    assert (media.frames, media.seconds) == (4, pytest.approx(1.0))


def test_empty_and_missing(tmp_path):
    assert "no files at all" in check_folder(tmp_path).problems[0].reason
    with pytest.raises(InputError, match="does not exist"):
        check_folder(tmp_path / "gone")


def test_arrays(tmp_path):
    np.save(tmp_path / "videos.npy", np.zeros((6, 4, 8, 8), np.uint8))
    np.save(tmp_path / "labels.npy", np.zeros(6))
    (tmp_path / "captions.txt").write_text("a\n" * 6)
    report = check_folder(tmp_path)
    assert report.problems == []
    assert "videos.npy: uint8 6 × 4 × 8 × 8" in report.lines()
    np.save(tmp_path / "labels.npy", np.zeros(5))
    (tmp_path / "other.npy").write_bytes(b"no array")
    found = problems(check_folder(tmp_path))
    assert "5 labels" in found["videos.npy"]
    assert "not a readable" in found["other.npy"]


def test_tar_shards(tmp_path):
    def add(shard, name, data):
        info = tarfile.TarInfo(name)
        info.size = len(data)
        shard.addfile(info, io.BytesIO(data))

    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "PNG")
    with tarfile.open(tmp_path / "0000.tar", "w") as shard:
        add(shard, "a.png", buffer.getvalue())
        add(shard, "a.txt", b"hello")
        add(shard, "b.png", buffer.getvalue())
        add(shard, "c.png", b"nothing")
        add(shard, "c.txt", b"hello")
    whole = (tmp_path / "0000.tar").read_bytes()
    (tmp_path / "0001.tar").write_bytes(whole[:700])
    report = check_folder(tmp_path)
    found = problems(report)
    assert "0000.tar: 3 samples, 2 with text" in report.lines()
    assert found["0000.tar:b"] == "no caption"
    assert "not a PNG" in found["0000.tar:c.png"]
    assert any(path.startswith("0001.tar") for path in found)


def test_captions_in_shards_are_counted_as_training_reads_them(tmp_path):
    files = [
        ("0.png", picture(0)),
        ("0.json", b'{"text": ["a", "b"]}'),
        ("1.png", picture(9)),
        ("1.json", b'{"width": 12}'),
    ]
    files += [
        ("2.png", picture(19)),
        ("2.json", b"[]"),
        ("3.png", picture(29)),
        ("3.txt", b"one\ntwo\nthree"),
        ("4.png", picture(39)),
        ("4.txt", b" "),
    ]
    write(tmp_path / "0.tar", files)
    report = check_folder(tmp_path)
    assert "0.tar: 5 samples, 2 with text, 1 with several captions, up to 2" in report.lines()
    assert problems(report) == {
        "0.tar:1": "no caption",
        "0.tar:2.json": "its .json is not a JSON object",
        "0.tar:4.txt": "an empty caption",
    }
    lines = check_folder(tmp_path, FolderConfig(folder=str(tmp_path), caption_lines="several")).lines()
    assert "0.tar: 5 samples, 2 with text, 2 with several captions, up to 3" in lines


def test_pictures_of_too_many_pixels_are_named_with_their_size_and_the_limit(tmp_path, monkeypatch):
    Image.new("L", (60, 50)).save(tmp_path / "poster.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    found = problems(check_folder(tmp_path))
    assert found == {"poster.png": "too large: 3,000 pixels, and no more than 2,000 are decoded; scale it down first"}


def test_arrays_of_pictures(tmp_path):
    """What training reads of each, or why it does not."""
    np.save(tmp_path / "a.npy", np.zeros((20, 8, 8, 3), np.uint8))
    np.save(tmp_path / "b.npy", np.zeros((20, 3, 8, 8), np.uint8))
    np.save(tmp_path / "c.npy", np.full((20, 8, 8, 3), 4095, np.uint16))
    np.savez_compressed(tmp_path / "d.npz", images=np.zeros((20, 8, 8), np.uint8), labels=np.zeros(20))
    (tmp_path / "e.npz").write_bytes(b"no array")
    report = check_folder(tmp_path)
    lines = report.lines()
    assert lines[0].endswith(": 4 arrays (3 npy, 1 npz)")
    assert "a.npy: read as 20 pictures, 8 × 8, 3 channels (data.layout=NHWC)" in lines
    assert any(line.startswith("b.npy: ") and "data.layout=NCHW or data.layout=NTHW" in line for line in lines)
    assert "d.npz:images: uint8 20 × 8 × 8" in lines
    assert "d.npz:images: 20 labels beside it" in lines
    assert "d.npz:images: read as 20 pictures, 8 × 8, 1 channel (data.layout=NHW)" in lines
    assert {problem.path for problem in report.problems} == {"c.npy", "e.npz"}


def test_compressed_shards(tmp_path):
    """The samples inside, and a shard that is cut off."""
    picture = io.BytesIO()
    Image.new("RGB", (8, 8)).save(picture, "PNG")
    members = [("0.png", picture.getvalue()), ("0.txt", b"a cat"), ("1.png", b"broken"), ("1.txt", b"a dog")]
    for name, mode in (("a.tar", "w"), ("b.tar.gz", "w:gz"), ("c.tgz", "w:gz")):
        with tarfile.open(tmp_path / name, mode) as tar:
            for member, data in members:
                entry = tarfile.TarInfo(member)
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
    cut = (tmp_path / "c.tgz").read_bytes()
    (tmp_path / "c.tgz").write_bytes(cut[: len(cut) // 2])
    report = check_folder(tmp_path)
    assert report.kinds == {"shards (tar)": 1, "shards (tar.gz)": 1, "shards (tgz)": 1}
    found = [f"{path}: {reason}" for path, reason in report.problems]
    assert [text for text in found if text.startswith("a.tar:1.png")] and [
        text for text in found if text.startswith("b.tar.gz:1.png")
    ]
    assert [text for text in found if text.startswith("c.tgz: the shard is not whole: cut off")]
    assert any(line.startswith("b.tar.gz: 2 samples, 2 with text; compressed") for line in report.lines())


def test_samples_of_tars_and_items_of_arrays_are_listed_with_their_place(tmp_path):
    """What the source takes of each sample, and where it lies."""
    pictures = {}
    for suffix, width in (("png", 8), ("jpg", 16)):
        buffer = io.BytesIO()
        Image.new("RGB", (width, 8)).save(buffer, "JPEG" if suffix == "jpg" else "PNG")
        pictures[suffix] = buffer.getvalue()
    members = {
        "a.jpg": pictures["jpg"],
        "a.png": pictures["png"],  # preferred
        "a.json": b'{"caption": ["red", "blue"]}',
        "b.png": b"nothing",
        "b.txt": b"torn",
        "c.npy": b"no array",
    }
    for name, mode in (("0000.tar", "w"), ("0001.tar.gz", "w:gz")):
        with tarfile.open(tmp_path / name, mode) as shard:
            for member, data in members.items():
                info = tarfile.TarInfo(member)
                info.size = len(data)
                shard.addfile(info, io.BytesIO(data))
    report = check_folder(tmp_path)
    assert [(item.name, item.captions) for item in report.packed[:2]] == [
        ("0000.tar:a", ("red", "blue")),
        ("0000.tar:b", ("torn",)),
    ]
    assert [item.info and item.info.width for item in report.packed] == [8, None, 8, None]
    first, place = report.packed[0], report.packed[0].place
    assert place.member == "a.png" and report.items == []
    data = (tmp_path / place.file).read_bytes()[place.offset : place.offset + place.size]
    assert data == pictures["png"] and first.info.height == 8
    assert report.packed[2].place.offset is None and report.packed[2].place.size == len(data)
    (tmp_path / "arrays").mkdir()
    np.save(tmp_path / "arrays" / "videos.npy", np.zeros((3, 2, 8, 16), np.uint8))
    (tmp_path / "arrays" / "captions.txt").write_text("one\ntwo\n")
    items = check_folder(tmp_path / "arrays").packed
    assert [(item.name, item.captions) for item in items] == [("videos.npy:0", ("one",)), ("videos.npy:1", ("two",))]
    assert items[1].info == (16, 8, 3, 0.375) and items[1].place == ("videos.npy", None, "TNHW", 1)
