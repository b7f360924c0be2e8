"""The character encoding of text files: UTF-8, or what a byte order mark names; anything else is refused."""

import codecs
import io
from typing import BinaryIO, Final

import pyarrow as pa

from pipeline.config.job import ConfigError

SEEN_BYTES: Final = 1 << 20
"""The encoding is judged by so many bytes at the beginning of a file."""
BYTE_ORDER_MARKS: Final = {  # the longer ones first: UTF-32-LE begins like UTF-16-LE
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
COMPRESSED: Final = {b"\x1f\x8b": "gzip (.gz)", b"\x28\xb5\x2f\xfd": "zstd (.zst)", b"BZh": "bzip2 (.bz2)"}
"""How a compressed file begins, and the end of its name by which it is known."""
MIN_BAD_LINES, MIN_BAD_SHARE = 10, 0.1
"""So many lines, and such a share of them, are another encoding; fewer are damage, and fail one by one."""
MIN_NULS: Final = 4
UTF16_LINE: Final = "UTF-16 in a file that does not begin with it; write the file again in one encoding"


def as_utf8(stream: pa.NativeFile, path: str) -> BinaryIO:
    """The bytes of a text file in UTF-8.

    ConfigError names the encoding of a file that is not UTF-8 and has no byte order mark.
    """
    buffered = io.BufferedReader(stream, SEEN_BYTES)
    start = buffered.peek()
    for mark, encoding in BYTE_ORDER_MARKS.items():
        if start.startswith(mark):
            decoded: BinaryIO = pa.transcoding_input_stream(pa.PythonFile(buffered, mode="r"), encoding, "utf-8")
            return decoded
    _refuse_foreign(start, path)
    return buffered


def is_utf16(line: bytes | str) -> bool:
    """Whether a line of a UTF-8 file was appended in UTF-16, as PowerShell's `>>` does. A stray NUL is text."""
    num_nuls = line.count(b"\0") if isinstance(line, bytes) else line.count("\0")
    return num_nuls >= MIN_NULS and 3 * num_nuls >= len(line)


def _refuse_foreign(start: bytes, path: str) -> None:
    for magic, kind in COMPRESSED.items():
        if start.startswith(magic) and not start[: 1 << 10].isascii():
            raise ConfigError("input.path", f"{path}: is compressed, by its first bytes with {kind}; name it so")
    first, _, rest = start.partition(b"\n")
    # in UTF-16 a Chinese line may have no NUL but that of its line end
    if b"\0" in first or (rest.startswith(b"\0") and _bad_byte(first) is not None):
        at = start.index(0)
        order = "LE" if at % 2 else "BE"  # ASCII's zero byte comes second in little-endian
        raise ConfigError(
            "input.path",
            f"{path}: NUL bytes (the first is byte {at}) and no byte order mark: it looks like UTF-16{order}, not "
            f"UTF-8; convert it (iconv -f UTF-16{order} -t UTF-8), or leave the file out if it is no text",
        )
    if start.isascii():
        return
    lines = start.split(b"\n")[:-1]  # the last may be cut off
    bad = [byte for line in lines if (byte := _bad_byte(line)) is not None]
    if len(bad) >= max(MIN_BAD_LINES, MIN_BAD_SHARE * len(lines)):
        raise ConfigError(
            "input.path",
            f"{path}: {len(bad)} of its first {len(lines)} lines are not UTF-8 (the first for byte 0x{bad[0]:02x}), as "
            "in Windows-1252, Latin-1 or a multi-byte code page; convert it (iconv -f WINDOWS-1252 -t UTF-8)",
        )


def _bad_byte(line: bytes) -> int | None:
    """The first byte that is not UTF-8; None if all are."""
    try:
        line.decode()
    except UnicodeDecodeError as error:
        return line[error.start]
    return None
