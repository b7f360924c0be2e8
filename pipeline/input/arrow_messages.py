"""The frames of an Arrow IPC stream, looked at before anything in them is read: how many bytes each batch stands for.

Arrow decompresses a batch as a whole, and takes a stream that ends between two batches for a whole one. So this reads
the head of each message, and nothing else (FlatBuffers, laid out as Message.fbs of Arrow says). A head that says what
it should not is for Arrow's own reader to refuse. Left out: columns and values (`arrow_files`).
"""

import struct
from dataclasses import dataclass
from typing import Final, Protocol

import pyarrow as pa

CONTINUATION: Final = 0xFFFFFFFF
MAX_HEAD_BYTES: Final = 64 << 20  # of one message: a schema of very many columns
DICTIONARY_BATCH, RECORD_BATCH = 2, 3  # MessageHeader
# Places of fields in their tables.
HEADER_TYPE, HEADER, BODY_LENGTH = 1, 2, 3  # Message
DATA: Final = 1  # DictionaryBatch
BUFFERS, COMPRESSION = 2, 3  # RecordBatch
BUFFER_BYTES: Final = 16  # offset, length
NOT_COMPRESSED: Final = -1


class Source(Protocol):
    """A file that can be read anywhere."""

    def read(self, nbytes: int, /) -> bytes: ...

    def seek(self, position: int, /) -> int: ...

    def tell(self) -> int: ...


@dataclass(frozen=True)
class Table:
    """A FlatBuffers table in `data`."""

    data: bytes
    at: int

    def place(self, field: int) -> int | None:
        """Where the value of a field is; None: it has its default."""
        vtable = self.at - self._unpack("<i", self.at)
        slot = 4 + 2 * field
        offset = self._unpack("<H", vtable + slot) if slot < self._unpack("<H", vtable) else 0
        return self.at + offset if offset else None

    def number(self, field: int, kind: str) -> int:
        place = self.place(field)
        return 0 if place is None else self._unpack(kind, place)

    def table(self, field: int) -> "Table | None":
        place = self.place(field)
        return None if place is None else Table(self.data, place + self._unpack("<I", place))

    def structs(self, field: int, size: int) -> bytes:
        """The bytes of a vector of structs."""
        place = self.place(field)
        if place is None:
            return b""
        start = place + self._unpack("<I", place)
        return self.data[start + 4 : start + 4 + size * self._unpack("<I", start)]

    def _unpack(self, kind: str, at: int) -> int:
        if at < 0:
            raise struct.error("a place before the beginning")
        value: int = struct.unpack_from(kind, self.data, at)[0]
        return value


def check_messages(source: Source, size: int, most_bytes: int | None, most_unpacked: int) -> None:
    """ArrowInvalid where a batch has more than `most_bytes`, or decompresses to more than `most_unpacked`; and where
    the stream, of `size` bytes with what lies before it, has no end mark."""
    try:
        while (head := _read_head(source)) is not None:
            body, body_bytes = source.tell(), head.number(BODY_LENGTH, "<q")
            if not 0 <= body_bytes <= size - body:
                raise pa.ArrowInvalid(f"cut off: {body_bytes} bytes should follow, {size - body} do")
            if most_bytes is not None and body_bytes > most_bytes:
                raise _too_large(body_bytes, most_bytes, "bytes")
            unpacked = _unpacked_bytes(source, head, body, body_bytes)
            if unpacked > most_unpacked:
                raise _too_large(unpacked, most_unpacked, "bytes when decompressed")
            source.seek(body + body_bytes)
    except struct.error as error:
        raise pa.ArrowInvalid(f"not an Arrow IPC stream: {error}") from error


def _too_large(found: int, most: int, what: str) -> pa.ArrowInvalid:
    return pa.ArrowInvalid(f"a record batch of {found} {what}, more than {most}; save it in smaller batches")


def _read_head(source: Source) -> Table | None:
    """The Message of the next frame; None at the end mark."""
    mark, length = struct.unpack("<II", _read(source, 8))
    if mark != CONTINUATION:
        raise pa.ArrowInvalid("not an Arrow IPC stream, or one of before Arrow 0.15; write it anew")
    if length == 0:
        return None
    if length > MAX_HEAD_BYTES:
        raise pa.ArrowInvalid(f"a message with a head of {length} bytes")
    data = _read(source, length)
    return Table(data, struct.unpack_from("<I", data)[0])


def _read(source: Source, count: int) -> bytes:
    data = source.read(count)
    if len(data) < count:
        raise pa.ArrowInvalid("cut off: its end mark is missing; copy or write it again")
    return data


def _unpacked_bytes(source: Source, head: Table, body: int, body_bytes: int) -> int:
    """What the buffers of a batch say that they decompress to; 0 where it is not compressed, or no batch."""
    batch = head.table(HEADER)
    kind = head.number(HEADER_TYPE, "<B")
    if batch is not None and kind == DICTIONARY_BATCH:
        batch = batch.table(DATA)
    if batch is None or kind not in (DICTIONARY_BATCH, RECORD_BATCH) or batch.table(COMPRESSION) is None:
        return 0
    total = 0
    for offset, length in struct.iter_unpack("<qq", batch.structs(BUFFERS, BUFFER_BYTES)):
        if length < 8 or not 0 <= offset <= body_bytes - length:
            continue  # empty, or for Arrow to refuse
        source.seek(body + offset)
        (said,) = struct.unpack("<q", _read(source, 8))
        total += length if said == NOT_COMPRESSED else max(said, 0)
    return total
