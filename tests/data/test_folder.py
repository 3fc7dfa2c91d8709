import csv
import json
import os
import shutil
import subprocess
import unicodedata

import numpy as np
import pytest
import torch
from PIL import Image

from kineograph.core.errors import InputError
from kineograph.data.captions import require_captions
from kineograph.data.check import check_folder
from kineograph.data.folder import Folder, list_folder


def picture(path, gray=100, size=(8, 8)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (gray,) * 3).save(path)


def opened(root, split="train", **options):
    return Folder.open(Folder.Config(folder=str(root), **({"size": 8, "validation": 0} | options)), split, 0)


def captions(source):
    return {source.identity(index): source.caption(index) for index in range(len(source))}


def test_finds_pictures_and_clips_in_subfolders(tmp_path, make_video, counting, rng):
    for name in ("a.png", "b.JPG", "sub/c.webp", "sub/deeper/d.jpeg", ".hidden.png", ".cache/e.png"):
        picture(tmp_path / name)
    Image.new("L", (8, 8)).save(tmp_path / "f.gif", save_all=True, append_images=[Image.new("L", (8, 8), 9)])
    make_video(tmp_path / "sub/g.mp4", counting(4))
    (tmp_path / "notes.pdf").write_bytes(b"x")
    source = opened(tmp_path, frames=2)
    assert [source.identity(index) for index in range(len(source))] == [
        "a.png",
        "b.JPG",
        "f.gif",
        "sub/c.webp",
        "sub/deeper/d.jpeg",
        "sub/g.mp4",
    ]
    samples = [source.read(index, rng) for index in range(6)]
    assert {tuple(sample.pixels.shape) for sample in samples} == {(2, 3, 8, 8)}
    assert [sample.frame_mask.tolist() for sample in samples] == [[True, i in (2, 5)] for i in range(6)]


def test_sidecar_captions(tmp_path):
    picture(tmp_path / "a.png")
    picture(tmp_path / "sub/b.png")
    (tmp_path / "a.txt").write_text("\ufeffa  red\n ball \n", encoding="utf-8")
    (tmp_path / "sub/b.txt").write_text("naïve 猫")
    assert captions(opened(tmp_path)) == {"a.png": "a red ball", "sub/b.png": "naïve 猫"}


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_metadata(tmp_path, form):
    rows = [("a.png", 'one, "two"'), ("sub/b.png", "three\nfour"), ("gone.png", "x")]
    picture(tmp_path / "a.png")
    picture(tmp_path / "sub/b.png")
    if form == "jsonl":
        (tmp_path / "metadata.jsonl").write_text(
            "".join(json.dumps({"file_name": name, "text": text}) + "\n" for name, text in rows) + "{broken\n"
        )
    else:
        with open(tmp_path / "metadata.csv", "w", newline="") as file:
            csv.writer(file).writerows([("file_name", "text"), *rows])
    source = opened(tmp_path)
    assert captions(source) == {"a.png": 'one, "two"', "sub/b.png": "three four"}
    assert any("gone.png" in problem.reason for problem in source.problems)
    assert (form == "csv") or any("line 4 is not JSON" in problem.reason for problem in source.problems)


@pytest.mark.parametrize("delimiter", ["\t", ";"])
def test_metadata_with_another_delimiter(tmp_path, delimiter):
    picture(tmp_path / "a.png")
    picture(tmp_path / "b.png")
    with open(tmp_path / "metadata.csv", "w", newline="") as file:
        rows = [("file_name", "text"), ("a.png", "red, round"), ("b.png", f"one{delimiter} two")]
        csv.writer(file, delimiter=delimiter).writerows(rows)
    assert captions(opened(tmp_path)) == {"a.png": "red, round", "b.png": " ".join(f"one{delimiter} two".split())}
    assert not check_folder(tmp_path).problems


def test_commas_separate_where_they_name_a_column_of_files(tmp_path):
    picture(tmp_path / "a.png")
    (tmp_path / "metadata.csv").write_text("file_name,text,size;unit\na.png,red; round,3\n")
    assert captions(opened(tmp_path)) == {"a.png": "red; round"}
    (tmp_path / "metadata.csv").write_text("image;text\na.png;red\n")
    with pytest.raises(InputError, match=r"columns image, text: file_name and text are needed"):
        opened(tmp_path)


SEPARATORS = "\u2028\u2029\x85\x0b\x0c\x1c"  # that str.splitlines ends lines at


def test_a_caption_may_hold_what_other_tools_take_for_the_end_of_a_line(tmp_path):
    picture(tmp_path / "a.png")
    picture(tmp_path / "b.png")
    rows = [{"file_name": "a.png", "text": "one\u2028two\x85three"}, {"file_name": "b.png", "text": "four"}]
    (tmp_path / "metadata.jsonl").write_bytes("\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode())
    source = opened(tmp_path)
    assert source.problems == []
    assert captions(source) == {"a.png": "one two three", "b.png": "four"}


def test_a_prompt_may_hold_what_other_tools_take_for_the_end_of_a_line(tmp_path):
    picture(tmp_path / "1.png")
    (tmp_path / "videos.txt").write_bytes(b"1.png\r\n")
    (tmp_path / "prompts.txt").write_bytes(f"one{SEPARATORS}two\r\n".encode())
    assert captions(opened(tmp_path)) == {"1.png": f"one{SEPARATORS}two"}


def test_metadata_in_each_subfolder(tmp_path):
    for part in ("x", "y"):
        picture(tmp_path / part / "a.png")
        (tmp_path / part / "metadata.jsonl").write_text(json.dumps({"file_name": "a.png", "text": f"in {part}"}))
    assert captions(opened(tmp_path)) == {"x/a.png": "in x", "y/a.png": "in y"}


def test_metadata_without_the_column(tmp_path):
    picture(tmp_path / "a.png")
    (tmp_path / "metadata.csv").write_text("image,text\na.png,hello\n")
    with pytest.raises(InputError, match=r"image, text: file_name"):
        opened(tmp_path)


def test_videos_and_labels(tmp_path, make_video, counting):
    for name in ("videos", "labels/sub", "videos/sub"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
    make_video(tmp_path / "videos/1.mp4", counting(2))
    make_video(tmp_path / "videos/sub/2.mp4", counting(2))
    (tmp_path / "labels/1.txt").write_text("first")
    (tmp_path / "labels/sub/2.txt").write_text("second")
    assert captions(opened(tmp_path)) == {"videos/1.mp4": "first", "videos/sub/2.mp4": "second"}


def test_prompts_and_videos_lists(tmp_path):
    picture(tmp_path / "videos/1.png")
    picture(tmp_path / "videos/2.png")
    (tmp_path / "videos.txt").write_text("videos/2.png\nvideos/1.png\n")
    (tmp_path / "prompts.txt").write_text("two\none\n")
    assert captions(opened(tmp_path)) == {"videos/1.png": "one", "videos/2.png": "two"}
    (tmp_path / "prompts.txt").write_text("two\n")
    with pytest.raises(InputError, match=r"2 lines .* 1: each video"):
        opened(tmp_path)


def test_captions_are_required_only_on_request(tmp_path, rng):
    picture(tmp_path / "a.png")
    picture(tmp_path / "b.png")
    (tmp_path / "b.txt").write_text("a ball")
    (tmp_path / "c.txt").write_text("")
    source = opened(tmp_path)
    assert source.read(0, rng).caption is None
    assert source.list_missing_captions() == ["a.png"]
    with pytest.raises(InputError, match=r"stage generator reads captions, and 1 of 2 items have none \(a.png\)"):
        require_captions(source, "stage generator")
    (tmp_path / "a.txt").write_text("a cube")
    require_captions(opened(tmp_path), "stage generator")


@pytest.mark.parametrize("content", [b"", b"   \n", b"\xff\xfe\xfa bad"])
def test_empty_or_undecodable_text_is_no_caption(tmp_path, content):
    picture(tmp_path / "a.png")
    (tmp_path / "a.txt").write_bytes(content)
    assert opened(tmp_path).list_missing_captions() == ["a.png"]


def test_unicode_names_in_either_spelling(tmp_path, rng):
    name = "Café – 猫 🎈.png"
    picture(tmp_path / unicodedata.normalize("NFD", name), 50)
    (tmp_path / "metadata.jsonl").write_text(
        json.dumps({"file_name": unicodedata.normalize("NFC", name), "text": "un chat"})
    )
    source = opened(tmp_path)
    assert captions(source) == {unicodedata.normalize("NFC", name): "un chat"}
    assert source.read(0, rng).pixels.float().mean() == 50


def test_name_that_is_not_unicode(tmp_path, rng):
    shutil.copy(_made(tmp_path), os.fsencode(tmp_path) + b"/bad\xff.png")
    source = opened(tmp_path)
    assert len(source) == 2
    assert len(source.fingerprint()) == 32
    assert all(source.read(index, rng).pixels is not None for index in range(2))


def _made(root):
    picture(root / "a.png")
    return root / "a.png"


def test_empty_folder_says_what_was_looked_for_and_found(tmp_path):
    with pytest.raises(InputError, match=r"png, jpg.*gif, mp4.*found no files at all"):
        opened(tmp_path)
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.pdf").write_bytes(b"x")
    with pytest.raises(InputError, match=r"found 1 \.txt, 1 \.pdf|found 1 \.pdf, 1 \.txt"):
        opened(tmp_path)
    (tmp_path / "c.npy").write_bytes(b"x")
    with pytest.raises(InputError, match=r"data.source=memmap"):
        opened(tmp_path)


def test_missing_folder_file_and_permission(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="does not exist"):
        opened(tmp_path / "gone")
    with pytest.raises(InputError, match="is a file"):
        opened(_made(tmp_path))
    for name, remedy in (("a.npz", "data.source=memmap"), ("b.tar", "data.source=webdataset data.shards=.*b.tar$")):
        (tmp_path / name).touch()
        with pytest.raises(InputError, match=f"is a file: give the folder that holds it; for .* set {remedy}"):
            opened(tmp_path / name)
    scandir = os.scandir

    def refused(path):
        if str(path).rstrip("/").endswith(("locked", "sub")):
            raise PermissionError(13, "no")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    (tmp_path / "locked").mkdir()
    with pytest.raises(InputError, match="no permission"):
        opened(tmp_path / "locked")
    (tmp_path / "sub").mkdir()
    assert any(problem.path == "sub" for problem in opened(tmp_path).problems)


def test_links_that_lead_in_a_circle(tmp_path):
    picture(tmp_path / "sub/a.png")
    (tmp_path / "sub/up").symlink_to(tmp_path)
    assert len(opened(tmp_path)) == 1


def test_folders_nested_deeper_than_a_path_is_long(tmp_path):
    picture(tmp_path / "a.png")
    descriptor = os.open(tmp_path, os.O_RDONLY)
    for _ in range(2500):
        os.mkdir("d", dir_fd=descriptor)
        inner = os.open("d", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = inner
    os.close(descriptor)
    try:
        listing = list_folder(tmp_path)
    finally:
        subprocess.run(["rm", "-rf", str(tmp_path / "d")], check=True)  # too deep for shutil
    assert listing.media == ["a.png"]
    assert [problem.reason for problem in listing.problems] == ["File name too long to read this folder"]


def test_a_caption_of_megabytes_is_none(tmp_path):
    picture(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("a cat, " * 200_000)
    assert opened(tmp_path).list_missing_captions() == ["a.png"]
    problems = [problem for problem in check_folder(tmp_path).problems if problem.path == "a.txt"]
    assert [problem.reason for problem in problems] == ["cannot be read: more than 1,048,576 bytes are no caption"]


def test_split_does_not_depend_on_where_the_folder_lies(tmp_path, pictures):
    first = set(captions(opened(pictures, "validation", validation=0.3)))
    shutil.move(pictures, tmp_path / "elsewhere")
    second = opened(tmp_path / "elsewhere", "validation", validation=0.3)
    assert set(captions(second)) == first
    train = set(captions(opened(tmp_path / "elsewhere", validation=0.3)))
    assert not train & first
    assert len(train | first) == 12


def test_augmentation_in_training_only(tmp_path):
    y, x = np.mgrid[0:8, 0:32]
    Image.fromarray(np.stack([x * 8, y * 30, 0 * x], -1).astype(np.uint8)).save(tmp_path / "a.png")

    def variants(split, **options):
        source = opened(tmp_path, split, **options)
        return len({source.read(0, np.random.default_rng(seed)).pixels.numpy().tobytes() for seed in range(12)})

    for options in ({"crop": "random"}, {"crop": "resized", "crop_area": [0.05, 0.2]}, {"flip": 0.5}, {"rotate": True}):
        assert variants("train", **options) > 1
        assert variants("validation", **options) == 1
    assert variants("train") == 1


def test_short_clips_are_padded_and_masked(tmp_path, make_video, counting, numbers, rng):
    make_video(tmp_path / "a.mp4", counting(15), fps=30)
    sample = opened(tmp_path, size=(32, 48), frames=8, fps=8).read(0, rng)
    assert sample.frame_mask.tolist() == [True] * 4 + [False] * 4
    assert numbers(sample.pixels) == [0, 3, 7, 11, 11, 11, 11, 11]
    assert sample.fps == 8


def test_read_is_a_pure_function(tmp_path, make_video, counting):
    make_video(tmp_path / "a.mp4", counting(40), fps=30)
    source = opened(tmp_path, size=(16, 16), frames=4, fps=8, crop="random", flip=0.5)
    for seed in range(4):
        one, other = (source.read(0, np.random.default_rng(seed)).pixels for _ in range(2))
        assert torch.equal(one, other)


def test_options_reach_the_decoder(tmp_path, rng):
    Image.new("RGBA", (8, 8), (0, 0, 0, 0)).save(tmp_path / "a.png")
    assert opened(tmp_path).read(0, rng).pixels.min() == 255
    assert opened(tmp_path, background="black").read(0, rng).pixels.max() == 0
    assert opened(tmp_path, channels=4).read(0, rng).pixels.shape == (1, 4, 8, 8)


def test_resizing_reaches_the_decoder(tmp_path, rng):
    y, x = np.mgrid[0:8, 0:32]
    Image.fromarray(np.stack([x * 8, y * 30, 0 * x], -1).astype(np.uint8)).save(tmp_path / "a.png")

    def pixels(**options):
        return opened(tmp_path, **options).read(0, rng).pixels[0]  # C H W

    assert pixels(resize="stretch")[0].float().mean(0).diff().min() > 20  # from one end to the other in 8 pixels
    assert pixels()[0].float().mean(0).diff().max() < 12  # an eighth of that
    barred = pixels(resize="contain")
    assert (barred[:, :3] == 255).all() and (barred[2, 3:5] == 0).all()
    assert (pixels(resize="contain", background="black")[:, :3] == 0).all()
    wide, narrow = (
        np.ptp(pixels(crop="resized", crop_area=[0.25, 0.25], crop_aspect=[a, a])[0].numpy(), 1).mean()
        for a in (4, 0.25)
    )
    assert wide > 4 * narrow


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"crop_area": [0.5, 0.2]}, "give smallest, largest"),
        ({"crop_area": [0.5, 1.5]}, "at most 1"),
        ({"crop_aspect": [0, 1]}, "above 0"),
        ({"resize": "stretch", "crop": "random"}, "shows the whole image"),
    ],
)
def test_framing_that_means_nothing_is_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        opened(tmp_path, **options)


def test_a_small_part_of_a_jpeg_is_decoded_finely(tmp_path):
    """JPEGs are decoded at a fraction of their size where that is enough; of a small part more is needed."""
    lines = np.zeros((512, 512, 3), np.uint8)
    lines[:, ::4] = 255  # finer than an eighth of the size could show
    Image.fromarray(lines).save(tmp_path / "a.jpg", quality=95)
    source = opened(tmp_path, size=32, crop="resized", crop_area=[0.0039, 0.0039])  # 32 × 32 of its pixels
    pixels = source.read(0, np.random.default_rng(1)).pixels.float()
    assert pixels.std() > 60


def test_fingerprint_follows_files_and_config(pictures):
    first = opened(pictures).fingerprint()
    assert opened(pictures).fingerprint() == first
    assert opened(pictures, size=16).fingerprint() != first
    picture(pictures / "p00.png", 5)
    os.utime(pictures / "p00.png", ns=(1, 1))
    assert opened(pictures).fingerprint() != first


def test_states_tell_which_items_changed(pictures):
    before = opened(pictures).item_states()
    assert opened(pictures, size=16).item_states() == before  # how they are read is told elsewhere
    picture(pictures / "p00.png", 5)
    os.utime(pictures / "p00.png", ns=(1, 1))
    (pictures / "p02.txt").write_text("another caption")
    picture(pictures / "p01b.png", 7)
    after = opened(pictures).item_states()
    assert len(after) == len(before) + 1
    assert len(set(after) & set(before)) == len(before) - 2


def test_sketches_are_cropped_turned_and_timed_with_their_clips(tmp_path, make_video):
    """Frames of noise, whose sketch is the frame itself: whatever was drawn for one must have been drawn for the other."""
    frames = np.random.default_rng(0).integers(0, 255, (20, 6, 4), dtype=np.uint8).repeat(8, 1).repeat(8, 2)
    pictures = [Image.fromarray(frame) for frame in frames]
    for folder in ("clips", "sketches"):
        (tmp_path / folder / "a").mkdir(parents=True)
    pictures[0].save(tmp_path / "clips/a/x.gif", save_all=True, append_images=pictures[1:], duration=100)
    pictures[0].save(tmp_path / "sketches/a/x.png", save_all=True, append_images=pictures[1:], duration=100)
    options = {"size": 32, "frames": 4, "crop": "random", "flip": 0.5, "rotate": True, "channels": 1}
    source = opened(tmp_path / "clips", sketches=str(tmp_path / "sketches"), **options)
    assert source.fields == {"pixels", "sketch"}
    seen = set()
    for seed in range(8):
        sample = source.read(0, np.random.default_rng(seed))
        assert sample.extra["sketch"].shape == (4, 1, 32, 32)
        torch.testing.assert_close(sample.extra["sketch"].float(), sample.pixels.float(), atol=3, rtol=0)
        seen.add(sample.pixels.numpy().tobytes())
    assert len(seen) > 4
    with_colours = opened(tmp_path / "clips", sketches=str(tmp_path / "sketches"), sketch_channels=3, **options)
    assert with_colours.read(0, np.random.default_rng(0)).extra["sketch"].shape[1] == 3
    assert opened(tmp_path / "clips").read(0, np.random.default_rng(0)).extra == {}


def test_missing_sketches_are_named(tmp_path):
    picture(tmp_path / "photos" / "a.png")
    picture(tmp_path / "photos" / "b.jpg")
    picture(tmp_path / "outlines" / "a.png")
    with pytest.raises(InputError, match=r"no sketch for 1 of 2 items, for example b\.jpg"):
        opened(tmp_path / "photos", sketches=str(tmp_path / "outlines"))
    with pytest.raises(InputError, match=r"data\.sketches=.*does not exist"):
        opened(tmp_path / "photos", sketches=str(tmp_path / "nowhere"))
