import json

import numpy as np
import pytest

from kineograph.core.errors import InputError, Unreadable
from kineograph.core.protocols import Source
from kineograph.data import startup_scan as scan_module
from kineograph.data.folder import Folder
from kineograph.data.startup_scan import Skipped, scan, write_skipped
from tests.train.ranks import run_ranks


@pytest.fixture
def source(pictures):
    (pictures / "broken.png").write_bytes(b"nothing")
    (pictures / "empty.jpg").write_bytes(b"")
    return Folder.open(Folder.Config(folder=str(pictures), size=8, validation=0), "train", 0)


EXPECTED = [
    Skipped("broken.png", "not a PNG, JPEG, WebP, AVIF, JPEG 2000, BMP, TIFF or GIF image"),
    Skipped("empty.jpg", "empty file (0 bytes)"),
]


def test_lists_what_cannot_be_read(source):
    notes = []
    assert scan(source, 0.2, notes.append) == EXPECTED
    assert "2 of 14" in notes[0]


def test_too_many_is_an_error_that_names_key_and_value(source):
    with pytest.raises(
        InputError,
        match=r"(?s)2 of 14 items .*14%.*data.max_unreadable=0.1 .*broken.png: not a PNG.*set data.max_unreadable=0.15",
    ) as caught:
        scan(source, 0.1)
    assert scan(source, float(str(caught.value).rsplit("=", 1)[1])) == EXPECTED


def test_unchanged_folder_is_not_decoded_again(source, tmp_path, monkeypatch):
    memory = tmp_path / "run" / "scan.json"
    scan(source, 0.2, result_file=memory)
    reads = []
    read = Folder.read
    monkeypatch.setattr(Folder, "read", lambda self, index, rng: reads.append(index) or read(self, index, rng))
    assert scan(source, 0.2, result_file=memory) == EXPECTED
    assert reads == []
    with pytest.raises(InputError):  # the limit still holds
        scan(source, 0.1, result_file=memory)
    (source.root / "p01.png").write_bytes(b"spoilt")
    assert len(scan(source, 0.3, result_file=memory)) == 3
    assert len(reads) == 14
    memory.write_text("{torn")
    assert len(scan(source, 0.3, result_file=memory)) == 3


def test_a_sample_of_a_large_set_is_checked(monkeypatch, source):
    """The first of 14 items is broken.png: every third item, from the first on, is five, of which one is broken."""
    monkeypatch.setattr(scan_module, "LIMIT", 13)
    monkeypatch.setattr(scan_module, "SAMPLE", 5)
    reads, read = [], Folder.read
    monkeypatch.setattr(Folder, "read", lambda self, index, rng: reads.append(index) or read(self, index, rng))
    notes = []
    assert scan(source, 0.2, notes.append) == EXPECTED[:1]
    assert sorted(reads) == [0, 3, 6, 9, 12]
    assert notes == [
        f"1 of 5 checked of 14 items cannot be read and are replaced by others, the first is broken.png: {EXPECTED[0].reason}"
    ]
    with pytest.raises(InputError, match="1 of 5 items"):
        scan(source, 0.1)


def test_processes_divide_the_items_and_agree(source, tmp_path):
    def work(rank):
        reads, read = [], Folder.read
        Folder.read = lambda self, index, rng: reads.append(index) or read(self, index, rng)
        found = scan(source, 0.2, result_file=tmp_path / f"scan-{rank}.json")
        return found, sorted(reads)

    (first, one), (second, two) = run_ranks(2, work)
    assert first == second == [list(row) for row in EXPECTED]
    assert (one, two) == (list(range(0, 14, 2)), list(range(1, 14, 2)))
    assert [path.name for path in tmp_path.glob("scan-*")] == ["scan-0.json"]


def test_progress_is_told(monkeypatch, source):
    monkeypatch.setattr(scan_module, "PROGRESS_EVERY", 0.0)
    notes = []
    scan(source, 0.2, notes.append)
    assert notes[:2] == ["checking items: 1 of 14", "checking items: 2 of 14"]


def test_what_has_no_files_is_checked_as_it_is_met(tmp_path):
    class Plain(Source):
        def __len__(self):
            return 3

        def read(self, index, rng: np.random.Generator):
            raise Unreadable("one", "because")

        def caption(self, index):
            return None

        def identity(self, index):
            return "one"

    assert scan(Plain(), 0.0, result_file=tmp_path / "scan.json") == []
    assert not (tmp_path / "scan.json").exists()


def test_a_changed_caption_is_changed_content(monkeypatch, source):
    """A cache keeps captions beside tokens, so it must not outlive them."""
    before = source.fingerprint()
    assert source.fingerprint() == before
    monkeypatch.setattr(Folder, "captions", lambda self, index: ("another",))
    assert source.fingerprint() != before


def test_skipped_jsonl_grows_without_repeating(tmp_path):
    path = tmp_path / "skipped.jsonl"
    assert write_skipped(path, []) == 0
    assert not path.exists()
    assert write_skipped(path, EXPECTED) == 2
    assert write_skipped(path, {"empty.jpg": "empty file (0 bytes)", "ü\udcff.png": "gone"}) == 3
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["path"] for row in rows] == ["broken.png", "empty.jpg", "ü\udcff.png"]
    assert all(set(row) == {"path", "reason"} for row in rows)
    assert [item.name for item in tmp_path.iterdir()] == ["skipped.jsonl"]
