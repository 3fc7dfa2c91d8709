import sys

import pytest
from PIL import Image

from kineograph.core.errors import InputError
from kineograph.data.captions import find_captions, read_parquet_column
from kineograph.data.check import check_folder


def test_without_pyarrow_the_pip_line_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "metadata.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match=r"needs pyarrow: pip install 'kineograph\[parquet\]'"):
        find_captions(tmp_path, ["a.png"], ["metadata.parquet"])


def test_captions_and_spans(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    for name in "ab":
        Image.new("RGB", (8, 8)).save(tmp_path / f"{name}.png")
    rows = {"file_name": ["a.png", "b.png", "c.png"], "text": ["a cat", None, "a dog"], "score": [1, 2, 3]}
    write_table(pyarrow.table(rows), tmp_path / "metadata.parquet")
    found = find_captions(tmp_path, ["a.png", "b.png"], ["metadata.parquet"])
    assert found.listed == {"a.png": ("a cat",)}
    assert [problem.reason for problem in found.problems] == ["names 'c.png', which does not exist"]
    assert {problem.path for problem in check_folder(tmp_path).problems} == {"metadata.parquet", "b.png"}
    rows = {"file_name": ["a.mp4"] * 2, "text": ["one", "two"], "start": [0.0, 1.0], "end": [1.0, None]}
    write_table(pyarrow.table(rows), tmp_path / "metadata.parquet")
    assert [span.texts[0] for span in find_captions(tmp_path, ["a.mp4"], ["metadata.parquet"]).spans["a.mp4"]] == [
        "one",
        "two",
    ]


def test_captions_in_other_parquet_files_are_named(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    Image.new("RGB", (16, 16)).save(tmp_path / "a.png")
    write_table(pyarrow.table({"file_name": ["a.png"], "description": ["a cat"]}), tmp_path / "metadata.parquet")
    (problem,) = check_folder(tmp_path).problems
    assert "no column text, caption or prompt, but description, file_name: rename" in problem.reason
    (tmp_path / "metadata.parquet").rename(tmp_path / "train.parquet")
    (problem,) = check_folder(tmp_path).problems
    assert "with the columns description, file_name: if these are captions, name it metadata.parquet" in problem.reason


def test_hostile_parquet(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    path = tmp_path / "metadata.parquet"
    write_table(pyarrow.table({"image": ["a.png"]}), path)
    with pytest.raises(InputError, match="has the columns image: file_name and text are needed"):
        find_captions(tmp_path, [], [path.name])
    write_table(pyarrow.table({"file_name": ["a.png"] * 1000, "text": ["x" * 1000] * 1000}), path)
    whole = path.read_bytes()
    for data in (whole[:100], b"PAR1", b"", whole[:-100] + bytes(100)):
        path.write_bytes(data)
        with pytest.raises(InputError, match="not a readable Parquet file"):
            find_captions(tmp_path, ["a.png"], [path.name])
    path.write_bytes(whole)
    monkeypatch.setattr("kineograph.data.parquet.MAX_BYTES", 1000)
    with pytest.raises(InputError, match=r"unpacks to more than 1,000 bytes of file_name, text"):
        find_captions(tmp_path, ["a.png"], [path.name])


def test_a_small_file_with_much_text_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    def repeat(value, count):
        return pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * count, "int32"), [value])

    monkeypatch.setattr("kineograph.data.parquet.MAX_BYTES", 10**7)
    path, count = tmp_path / "metadata.parquet", 1000
    names, texts = repeat("a.png", count), repeat("x" * 20_000, count)
    nested = pyarrow.ListArray.from_arrays(range(count + 1), texts)
    for column in (texts, nested):
        write_table(pyarrow.table({"file_name": names, "text": column}), path, compression="zstd")
        assert path.stat().st_size < 10_000
        with pytest.raises(InputError, match="unpacks to more than 10,000,000 bytes"):
            find_captions(tmp_path, ["a.png"], [path.name])
        with pytest.raises(InputError, match="unpacks to more than 10,000,000 bytes"):
            read_parquet_column(path, ["text"], "data.caption_column")
