"""Ids of rows: those made from file and row number, and the 16-byte digests that stand for ids in memory.

Left out: which ids occur twice (`plan`) and which rows are done (`pipeline.run_folder`).
"""

import hashlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.input.files import SourceFile
from pipeline.schema import DUPLICATE_ID, ID

DIGEST: Final = np.dtype("S16")


def digest_id(id: str) -> bytes:
    """16 bytes that stand for an id (blake2b): two of 10^12 ids collide with a probability of 10^-15."""
    return hashlib.blake2b(id.encode(), digest_size=16).digest()


def row_digests(table: pa.Table) -> NDArray[Any]:
    """'S16' [rows] of a block or of an output file (`id`, `error_code`, `error_message`): for resume.

    The digest of the id; but a `duplicate_id` row shares its id with the good row, so its digest is of id and
    message (which names its file and row): else a run killed between the two would take the second for done.
    """
    ids = table[ID].to_pylist()
    for index in pc.indices_nonzero(pc.equal(table["error_code"], DUPLICATE_ID)).to_pylist():
        ids[index] = f"{ids[index]}\0{table['error_message'][index].as_py()}"
    return digest_ids(ids)


def digest_ids(ids: Sequence[str]) -> NDArray[Any]:
    return np.frombuffer(b"".join(map(digest_id, ids)), dtype=DIGEST)


def made_id(file: SourceFile, number: int) -> str:
    return f"{file.name}:{number}"  # a number has no colon: no two files can make the same id
