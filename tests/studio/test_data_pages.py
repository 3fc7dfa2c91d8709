"""Data: what `kineo data check` finds, shown item by item; nothing outside the given folders is read."""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from kineograph.core.errors import InputError, Unreadable
from kineograph.studio import dataset as dataset_module
from kineograph.studio import item_frames, workers
from kineograph.studio.dataset import Check, CheckForm, DatasetItem, find_codecs, open_datasets, select_items
from kineograph.studio.dataset_worker import describe_folder
from kineograph.studio.runs import describe_run, make_id
from kineograph.studio.server import serve
from tests.studio.conftest import TOKEN, open_client
from tests.studio.run_folders import write_dataset, write_gif, write_packed, write_run
from tests.studio.test_drawing import STORED, Ear


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "photos")


@pytest.fixture
def visitor(runs: Path, photos: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A browser that has opened a page over a folder of data, which this process checks."""

    return open_checked(runs, photos, monkeypatch)


def open_checked(runs: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def run_here(folder: Path, settings: Any, begun: Check) -> Check:
        tree = json.loads(json.dumps(describe_folder(folder, list(settings))))
        items = tuple(dataset_module._make_item(item) for item in tree["items"])
        found = {key: tuple(tree[key]) for key in ("lines", "buckets", "problems")}
        return Check(begun.began, 0.0, items=items, **found)

    monkeypatch.setattr(dataset_module, "run_check", run_here)
    client = open_client(runs, data=[folder])
    client.get("/", params={"token": TOKEN})
    return client


def read_items(client: Any, photos: Path, **query: str) -> str:
    """The part with the items, once they are read."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        answer = client.get(f"/data/{make_id(photos)}/items", params=query)
        if answer.status_code == 200:
            return answer.text
        assert answer.status_code == 202 and "Every file is read" in answer.text
        time.sleep(0.02)
    raise AssertionError("the check has not ended")


def test_items_show_with_captions_sizes_and_what_is_wrong(visitor: Any, photos: Path) -> None:
    assert f"kineo data check {photos}" in visitor.get("/data").text
    page = read_items(visitor, photos)
    assert "64 × 32" in page and "32 × 32 · 5 frames · 0.6" in page
    assert "a red wide one" in page and "it moves" in page
    assert "&lt;b&gt;bold&lt;/b&gt; digit" in page and "<b>bold" not in page
    assert page.count('class="unreadable"') == 1 and "cannot be read" in page
    assert "a link to a file outside this folder" in page
    assert "3 images (png), 1 clip (gif), 2 problems" in page


def test_a_search_reads_captions_and_a_filter_keeps_the_bad_ones(visitor: Any, photos: Path) -> None:
    found = read_items(visitor, photos, q="RED wide")
    assert "wide.png" in found and "square.png" not in found and "1 of 4 items" in found
    assert "No item matches" in read_items(visitor, photos, q="nothing like it")
    bad = read_items(visitor, photos, show="problems")
    assert "torn.png" in bad and "wide.png" not in bad


def test_buckets_are_those_of_the_command(visitor: Any, photos: Path) -> None:
    page = visitor.get(f"/data/{make_id(photos)}", params={"buckets": "1", "size": "32", "frames": "1"}).text
    assert "size=32 frames=1 &#39;buckets={}&#39;" in page
    items = read_items(visitor, photos, buckets="1", size="32", frames="1")
    assert "bucket 1 × 32 × 32" in items and 'data-show="1 × 32 × 32"' in items
    (shape,) = {
        item["bucket"]
        for item in describe_folder(photos, CheckForm(buckets=True, size="32").settings())["items"]
        if item["name"] == "wide.png"
    }
    assert f"bucket {shape}" in items
    assert "wide.png" in read_items(visitor, photos, buckets="1", size="32", frames="1", show=shape)
    assert visitor.get(f"/data/{make_id(photos)}", params={"buckets": "1", "size": "1e9"}).status_code == 422


def test_names_that_are_not_text_are_listed_without_a_picture(visitor: Any, photos: Path) -> None:
    odd = photos / os.fsdecode(b"caf\xe9.png")
    Image.new("RGB", (16, 16)).save(odd)
    try:
        page = read_items(visitor, photos, q="caf")
    finally:
        odd.unlink()
    assert "caf\ufffd.png" in page and "its name is not plain text" in page and "Reconstruct" not in page


def test_only_listed_items_inside_the_folder_are_sent(visitor: Any, photos: Path) -> None:
    base = f"/data/{make_id(photos)}"
    assert visitor.get(f"{base}/sheet/wide.png").status_code == 404  # nothing has been listed yet
    read_items(visitor, photos)
    answer = visitor.get(f"{base}/sheet/wide.png")
    assert answer.status_code == 200 and answer.headers["x-width"] == "64"
    assert visitor.get(f"{base}/file/clip.gif").headers["content-type"] == "image/gif"
    for name in ("link.png", "../secret.png", "%2e%2e/secret.png", "..%2fsecret.png", "wide.txt", "/etc/passwd", "%00"):
        for kind in ("sheet", "file"):
            assert visitor.get(f"{base}/{kind}/{name}").status_code == 404, name
    assert visitor.get("/data/nothing").status_code == 404
    visitor.cookies.clear()
    assert visitor.get("/data").status_code == 401


def test_without_folders_the_page_says_what_to_type_and_names_those_of_runs(client: Any, runs: Path) -> None:
    config = runs / "demo" / "config.yaml"
    config.write_text(config.read_text() + "data: {source: folder, folder: /somewhere/else}\n")
    page = client.get("/data").text
    assert "kineo studio --data" in page and "/somewhere/else" in page
    with pytest.raises(InputError, match=r"--data .* is not a folder"):
        serve([runs], "127.0.0.1", None, print, data=[runs / "nothing"])


def test_a_check_runs_in_a_process_of_its_own_and_its_failure_is_told(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (dataset,) = open_datasets([photos]).values()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    dataset.check(CheckForm())
    end = time.monotonic() + 20
    while not dataset.check(CheckForm()).is_done and time.monotonic() < end:
        time.sleep(0.02)
    assert "has failed" in dataset.check(CheckForm()).error


def test_a_check_ends_with_the_page() -> None:
    with workers.run_worker(["sleep", "600"]) as process:
        workers.stop_workers()
        assert process.wait(10) == -9
    assert not workers._running


def test_items_of_tars_and_arrays_show_their_pictures(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_packed(tmp_path / "packed")
    for path in (folder, folder / "arrays"):
        client = open_checked(runs, path, monkeypatch)
        read_items(client, path)
        page = read_items(client, path)
        base = f"/data/{make_id(path)}"
        if path == folder:
            assert "a red one" in page and "16 × 8" in page and "0000.tar:b" in page and "cannot be read" in page
            expected, size = {"0000.tar:a": 200, "0001.tar.gz:a": 200}, ("16", "8")
            assert client.get(f"{base}/file/0000.tar:a").headers["content-type"] == "image/png"
            assert "a red one" in read_items(client, path, q="RED") and "0000.tar:b" not in read_items(
                client, path, q="RED"
            )
        else:
            assert "the second" in page and "24 × 16 · 6 frames · 0.75 s" in page
            expected, size = (
                {"videos.npy:0": 0, "videos.npy:1": 90, "small.npz:images:1": 90, "packed.npz:images:1": 90},
                ("24", "16"),
            )
            assert client.get(f"{base}/file/videos.npy:0").status_code == 404
        for name, red in expected.items():
            answer = client.get(f"{base}/sheet/{name}")
            assert answer.status_code == 200, (name, answer.text)
            with Image.open(io.BytesIO(answer.content)) as sheet:
                assert abs(sheet.convert("RGB").getpixel((4, 4))[0] - red) < 6, name
            assert (answer.headers["x-width"], answer.headers["x-height"]) == size
        for name in ("0000.tar", "0000.tar:z", "videos.npy", "videos.npy:9", "../packed/0000.tar:a"):
            assert client.get(f"{base}/sheet/{name}").status_code == 404, name
    (folder / "arrays" / "videos.npy").write_bytes(b"now something else")
    answer = client.get(f"{base}/sheet/videos.npy:1")
    assert answer.status_code == 422 and "cannot be read" in answer.text
    monkeypatch.setattr(item_frames, "UNPACKED", 100)
    assert "compressed array" in client.get(f"{base}/sheet/packed.npz:images:1").text


def test_behind_a_limit_a_compressed_shard_says_why_nothing_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_packed(tmp_path / "packed")
    item = DatasetItem("0001.tar.gz:a", place={"file": "0001.tar.gz", "member": "a.png", "offset": None, "size": 9})
    assert item_frames.make_item_sheet(folder, item).width == 16
    monkeypatch.setattr(item_frames, "UNPACKED", 100)
    with pytest.raises(Unreadable, match="unpack it to see it"):
        item_frames.make_item_sheet(folder, item)


def test_a_part_of_a_clip_shows_that_part_only(tmp_path: Path) -> None:
    write_gif(tmp_path / "long.gif", frames=6, fps=10)
    part = DatasetItem("long.gif", width=32, height=32, frames=2, seconds=0.2, start=0.3, end=0.5)
    sheet = item_frames.make_item_sheet(tmp_path, part)
    with Image.open(io.BytesIO(sheet.data)) as picture:
        reds = [picture.convert("RGB").getpixel((32 * number + 4, 4))[0] for number in range(sheet.frames)]
    assert reds == [130, 170]


def test_many_items_come_in_pages() -> None:
    check = Check(0.0, 1.0, items=tuple(DatasetItem(f"{n}.png", (f"item {n}",)) for n in range(100)))
    last = select_items(check, page=99)
    assert (last.page, last.pages, last.total, len(last.items)) == (3, 3, 100, 4)
    assert select_items(check, search="item 42").items[0].name == "42.png"


# Reconstructions --------------------------------------------------------------------------------------------------


def test_a_codec_rebuilds_an_item_beside_it(photos: Path, tmp_path: Path) -> None:
    with tarfile.open(STORED / "phenaki.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    run = tmp_path / "phenaki"
    assert [codec.stage for codec in find_codecs([describe_run(run, "phenaki")])] == ["tokenizer"]
    (run / "studio").mkdir()
    worker = Ear()
    job = {"do": "reconstruct", "run": str(run), "out": str(run / "studio" / "reconstructions"), "folder": str(photos)}
    worker.run({**job, "stage": "tokenizer", "item": {"name": "clip.gif"}})
    name, done = worker.heard[-1]
    assert name == "done", done
    assert done["text"].startswith("PSNR ") and done["model"].startswith("tokenizer, step ")
    with Image.open(run / "studio" / done["files"][0]) as picture:
        assert picture.width == 2 * picture.height and picture.n_frames > 1  # both halves are the stage's size
    worker.run({**job, "stage": "generator", "item": {"name": "clip.gif"}})
    assert worker.heard[-1][0] == "failed" and "does not rebuild pictures" in worker.heard[-1][1]["error"]
    worker.run({**job, "stage": "tokenizer", "item": {"name": "torn.png"}})
    assert worker.heard[-1][0] == "failed"
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("task: cvivit", "task: os.system"))
    stranger = Ear()
    stranger.run({**job, "stage": "tokenizer", "item": {"name": "clip.gif"}})
    assert stranger.heard[-1][0] == "failed" and "never typed on this machine" in stranger.heard[-1][1]["error"]


def test_a_codec_rebuilds_items_of_tars_and_arrays_and_parts_of_clips(tmp_path: Path) -> None:
    with tarfile.open(STORED / "phenaki.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    run, folder = tmp_path / "phenaki", write_packed(tmp_path / "packed")
    (run / "studio").mkdir()
    worker = Ear()
    job = {"do": "reconstruct", "run": str(run), "out": str(run / "studio" / "reconstructions"), "stage": "tokenizer"}
    write_gif(tmp_path / "long.gif", frames=6, fps=10)
    part = {"name": "long.gif", "frames": 2, "seconds": 0.2, "start": 0.3, "end": 0.5}
    found = [item for item in describe_folder(folder, [])["items"] if not item["problems"]]
    arrays = describe_folder(folder / "arrays", [])["items"]
    for item, where in [(found[0], folder), (found[1], folder), (arrays[-1], folder / "arrays"), (part, tmp_path)]:
        worker.run({**job, "folder": str(where), "item": item})
        name, done = worker.heard[-1]
        assert name == "done", (item, done)
        with Image.open(run / "studio" / done["files"][0]) as picture:
            gray = picture.convert("L").getpixel((4, 4))  # of the item; its reconstruction is on the right
        expected = {"0000.tar:a": 74, "0001.tar.gz:a": 74, "videos.npy:1": 90, "long.gif": 39}[item["name"]]
        assert abs(gray - expected) < 6, (item, gray)


def test_a_reconstruction_is_asked_for_by_id_item_and_codec(visitor: Any, photos: Path, runs: Path) -> None:
    base = f"/data/{make_id(photos)}"
    read_items(visitor, photos)
    run_id = make_id((runs / "demo").resolve())
    wanted = {"item": "wide.png", "run": run_id, "stage": "tokenizer"}
    for change, code in (
        ({"item": "link.png"}, 404),
        ({"item": "../secret.png"}, 404),
        ({"run": "x"}, 404),
        ({"stage": "generator"}, 404),
        ({"more": 1}, 422),
    ):
        visitor.get("/")
        assert visitor.post(f"{base}/reconstruct", json=wanted | change).status_code == code, change
    answer = visitor.post(f"{base}/reconstruct", json=wanted, headers={"origin": "http://evil.example"})
    assert answer.status_code == 403 and not (runs / "demo" / "studio").exists()


def test_a_run_without_checkpoints_has_no_codec(tmp_path: Path) -> None:
    path = write_run(tmp_path / "demo")
    assert [codec.stage for codec in find_codecs([describe_run(path, "demo")])] == ["tokenizer"]
    (path / "tokenizer" / "checkpoints").rename(path / "elsewhere")
    assert find_codecs([describe_run(path, "demo")]) == []


def test_pictures_look_as_training_reads_them(tmp_path: Path) -> None:
    """Transparency over white, upright, 16 bits as 8."""
    clear = Image.new("RGBA", (16, 8), (0, 0, 0, 0))
    clear.save(tmp_path / "clear.png")
    turned = Image.new("RGB", (16, 8), (250, 0, 0))
    exif = Image.Exif()
    exif[0x0112] = 6
    turned.save(tmp_path / "turned.jpg", exif=exif)
    Image.new("I;16", (16, 8), 32_768).save(tmp_path / "deep.png")
    for name, size, colour in (
        ("clear.png", (16, 8), (255, 255, 255)),
        ("turned.jpg", (8, 16), (250, 0, 0)),
        ("deep.png", (16, 8), (128, 128, 128)),
    ):
        sheet = item_frames.make_item_sheet(tmp_path, DatasetItem(name, width=16, height=8))
        assert (sheet.width, sheet.height) == size, name
        with Image.open(io.BytesIO(sheet.data)) as picture:
            assert max(abs(a - b) for a, b in zip(picture.convert("RGB").getpixel((4, 4)), colour, strict=True)) < 4, (
                name
            )
