"""Tars by any tool are read as tarfile reads them; hostile ones end with a reason, and soon."""

from __future__ import annotations

import io
import tarfile

import pytest

from kineograph.core.tar_reader import TarDamaged, TarReader, decompress

NAMES = ["a.png", "folder/b.txt", "l" * 120 + "/" + "n" * 150 + ".png", "ünïcode/ß.png", "empty.txt"]


def build(tar_format: int, mode: str = "w", names=NAMES) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode, format=tar_format) as tar:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        link = tarfile.TarInfo("link.png")
        link.type, link.linkname = tarfile.SYMTYPE, "l" * 200 if tar_format != tarfile.USTAR_FORMAT else "a.png"
        tar.addfile(link)
        for name in names:
            info = tarfile.TarInfo(name)
            content = name.encode() * (0 if name.startswith("empty") else 7)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def read_all(data: bytes, seek: bool = False) -> dict[str, bytes]:
    file = io.BytesIO(data)
    reader = TarReader(file, file.seek) if seek else TarReader(decompress(file))
    return {member.name: reader.read(member) for member in reader if not member.sparse}


@pytest.mark.parametrize("tar_format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_reads_what_tarfile_wrote(tar_format, mode):
    names = NAMES if tar_format != tarfile.USTAR_FORMAT else NAMES[:2]
    data = build(tar_format, mode, names)
    expected = {name: name.encode() * (0 if name.startswith("empty") else 7) for name in names}
    assert read_all(data) == expected
    if mode == "w":
        assert read_all(data, seek=True) == expected


def header(name=b"a.png", size=b"00000000000", kind=b"0", content=b"") -> bytes:
    block = bytearray(512)
    block[:100], block[124:136], block[156:157] = name.ljust(100, b"\0"), size.ljust(12, b"\0"), kind
    block[257:265] = b"ustar\x0000"
    return bytes(block) + content + b"\0" * (-len(content) % 512)


def pax(records: bytes) -> bytes:
    return header(b"pax", b"%011o" % len(records), b"x", records)


SPARSE_1 = b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n"
HOSTILE = {
    "negative size": header(size=b"\xff" * 12),
    "huge size": header(size=b"\x80" + b"\xff" * 11),
    "signed size": header(size=b"-0000000777"),
    "no number": header(size=b"1_0"),
    "negative pax size": pax(b"12 size=-512\n") + header(),
    "pax record of length 0": pax(b"0 size=1\n" * 3) + header(),
    "pax record beyond the end": pax(b"999999 path=a\n") + header(),
    "pax digits": pax(b"9" * 100_000),
    "pax without records": header(b"pax", b"77777777777", b"x"),
    "pax for ever": pax(b"10 path=a\n") * 2_000,
    "long names for ever": header(b"@", b"%011o" % 5, b"L", b"hello") * 2_000,
    "cut sparse map": pax(SPARSE_1) + header(content=b"9" * 100, size=b"%011o" % 100),
    "sparse headers for ever": header(kind=b"S")[:482] + b"\1" + bytes(29) + (bytes(504) + b"\1" + bytes(7)) * 2_000,
    "no header": b"x" * 512,
    "half a header": b"x" * 100,
    "nothing": b"",
    "cut content": header(size=b"00000001000") + b"abc",
}


@pytest.mark.timeout(10)
@pytest.mark.parametrize("seek", [False, True])
@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_tar_ends_with_a_reason(data, seek):
    with pytest.raises(TarDamaged):
        read_all(data, seek)


def test_a_sparse_member_is_marked_and_the_others_are_read():
    data = pax(SPARSE_1) + header(b"sparse.png", b"%011o" % 600, content=bytes(600))
    data += header(b"old.png", b"%011o" % 512, b"S", bytes(512)) + header(b"b.txt", b"%011o" % 2, content=b"hi")
    members = {member.name: member.sparse for member in TarReader(io.BytesIO(data + bytes(1024)))}
    assert members == {"sparse.png": True, "old.png": True, "b.txt": False}
