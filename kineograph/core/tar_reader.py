"""Reads untrusted tar archives: regular files only, in one pass, in time linear in their size.

Python's tarfile loops for ever on a negative size and on a cut-off sparse map, its patterns take quadratic time, it reads
a long name of any size into memory, and each extra header nests its calls. A guard around it would replace five of its
private methods, whose names and faults differ between Python's versions, and would save few of the lines below.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

BLOCK = 512
_MAX_EXTRA = 1 << 20  # bytes of a long name or of pax records
_CHUNK = 1 << 20
_FILE_TYPES = (b"0", b"\0", b"7")
_SPARSE, _LONG_NAME, _LONG_LINK, _PAX = b"S", b"L", b"K", (b"x", b"X")
DAMAGED = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)  # by a decompressor


class TarDamaged(Exception):
    """The archive is damaged or cut off here."""


class TarMember(NamedTuple):
    name: str
    offset: int  # of its content
    size: int
    sparse: bool = False  # its content is not stored as it is


class Readable(Protocol):
    def read(self, count: int, /) -> bytes:
        """Exactly `count` bytes; fewer only at the end."""


class TarReader:
    """Iterates over the regular files. `read` gives the content of the member that was yielded last.

    `seek` moves `file` to a byte offset; without it members are skipped by reading them.
    """

    def __init__(self, file: Readable, seek: Callable[[int], Any] | None = None) -> None:
        self._file, self._seek = file, seek
        self._at = 0

    def read(self, member: TarMember) -> bytes:
        return b"".join(self.read_parts(member))

    def read_parts(self, member: TarMember) -> Iterator[bytes]:
        """The content in parts, so that a size that lies takes no memory."""
        end = member.offset + member.size
        while self._at < end:
            part = self._file.read(min(_CHUNK, end - self._at))
            if not part:
                raise TarDamaged(f"ends inside {member.name}")
            self._at += len(part)
            yield part

    def __iter__(self) -> Iterator[TarMember]:
        long_name: str | None = None
        pax: dict[bytes, bytes] = {}
        while True:
            start = self._at
            header = self._read_block()
            if not header[0] and not header.strip(b"\0"):
                return
            kind, size = header[156:157], _parse_number(header[124:136], start)
            if header[257:262] != b"ustar" and not _has_checksum(header):
                raise TarDamaged(f"no tar header at byte {start}")
            if kind == _LONG_NAME:
                long_name = self._read_extra(size).split(b"\0", 1)[0].decode("utf-8", "surrogateescape")
                continue
            if kind in _PAX:
                pax = _parse_pax(self._read_extra(size), start)
                continue
            if kind == _SPARSE and header[482]:  # more of its map follows
                while self._read_block()[504]:
                    pass
            if b"size" in pax:
                size = _parse_decimal(pax[b"size"], start)
            name = long_name if long_name is not None else _parse_name(header)
            if b"path" in pax:
                name = pax[b"path"].split(b"\0", 1)[0].decode("utf-8", "surrogateescape")
            content = self._at
            if kind != _LONG_LINK:
                sparse = kind == _SPARSE or any(key.startswith(b"GNU.sparse.") for key in pax)
                long_name, pax = None, {}
                if sparse or (kind in _FILE_TYPES and not name.endswith("/")):
                    yield TarMember(name, content, size, sparse)
            # Links and devices have no content, whatever their size says.
            self._skip_to(content + (-(-size // BLOCK) * BLOCK if kind not in b"123456" else 0))

    def _read_block(self) -> bytes:
        block = self._file.read(BLOCK)
        self._at += len(block)
        if len(block) < BLOCK:
            raise TarDamaged("ends inside a header" if block else "ends without an end mark")
        return block

    def _read_extra(self, size: int) -> bytes:
        if size > _MAX_EXTRA:
            raise TarDamaged(f"a header of {size:,} bytes at byte {self._at}")
        padded = -(-size // BLOCK) * BLOCK
        data = self._file.read(padded)
        self._at += len(data)
        if len(data) < padded:
            raise TarDamaged("ends inside a header")
        return data[:size]

    def _skip_to(self, offset: int) -> None:
        if self._seek is not None:
            self._seek(offset)
            self._at = offset
        while self._at < offset:
            data = self._file.read(min(_CHUNK, offset - self._at))
            if not data:
                raise TarDamaged("ends inside a member")
            self._at += len(data)


def _parse_name(header: bytes) -> str:
    name = header[:100].split(b"\0", 1)[0]
    if header[345] and header[257:265] == b"ustar\x0000":  # GNU's own format keeps times there
        name = header[345:500].split(b"\0", 1)[0] + b"/" + name
    return name.decode("utf-8", "surrogateescape")


def _parse_number(field: bytes, at: int) -> int:
    if field[0] & 0x80:  # base 256; a negative number begins with 0xff
        number = int.from_bytes(field[1:], "big")
        if field[0] != 0x80 or number >= 2**62:
            raise TarDamaged(f"an impossible size in the header at byte {at}")
        return number
    digits = field.split(b"\0", 1)[0].strip() or b"0"
    try:
        if not digits.isdigit():
            raise ValueError
        return int(digits, 8)
    except ValueError:
        raise TarDamaged(f"no tar header at byte {at}") from None


def _parse_decimal(digits: bytes, at: int) -> int:
    if not digits.isdigit() or len(digits) > 18:
        raise TarDamaged(f"an impossible size in the header at byte {at}")
    return int(digits)


def _has_checksum(header: bytes) -> bool:
    digits = header[148:156].split(b"\0", 1)[0].strip()
    try:
        return int(digits or b"0", 8) == sum(header) - sum(header[148:156]) + 8 * 32
    except ValueError:
        return False


def _parse_pax(data: bytes, at: int) -> dict[bytes, bytes]:
    """Records `LENGTH KEY=VALUE\\n`, where LENGTH counts the whole record."""
    records: dict[bytes, bytes] = {}
    start = 0
    while start < len(data) and data[start]:
        space = data.find(b" ", start, start + 20)
        digits = data[start:space] if space > 0 else b""
        end = start + int(digits) if digits.isdigit() else start
        if end <= space or end > len(data) or data[end - 1 : end] != b"\n":
            raise TarDamaged(f"a damaged pax header at byte {at}")
        key, _, value = data[space + 1 : end - 1].partition(b"=")
        records[key] = value
        start = end
    return records


# Compression ------------------------------------------------------------------------------------------------------


class _Prepended:
    """A stream with its first bytes put back."""

    def __init__(self, head: bytes, stream: Readable) -> None:
        self._head, self._stream = head, stream

    def read(self, count: int = -1) -> bytes:
        head, self._head = self._head[:count], self._head[count:]
        return head + self._stream.read(count - len(head)) if len(head) < count else head


_DECOMPRESSORS: dict[bytes, Callable[[Any], Readable]] = {
    b"\x1f\x8b": lambda stream: gzip.GzipFile(fileobj=stream),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\0": lzma.LZMAFile,
}


def is_compressed(head: bytes) -> bool:
    """Whether a file begins like a gzip, bzip2 or xz file."""
    return head.startswith(tuple(_DECOMPRESSORS))


def decompress(stream: Readable) -> Readable:
    """The stream itself, or what it decompresses to: gzip, bzip2 or xz, by its first bytes."""
    head = stream.read(6)
    whole = _Prepended(head, stream)
    for magic, opener in _DECOMPRESSORS.items():
        if head.startswith(magic):
            return opener(whole)
    return whole
