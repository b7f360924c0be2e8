"""The kinds of NumPy arrays that rows are counted with, by name. Data only."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Digests: TypeAlias = NDArray[np.bytes_]
"""'S16' [rows]: what stands for ids (`ids.digest_id`)."""
Entries: TypeAlias = NDArray[np.void]
"""[rows] of `ids.INPUT_ENTRY` or `ids.OUTPUT_ENTRY`."""
Places: TypeAlias = NDArray[np.uint64]
"""[rows]: file << 32 | row."""
Rows: TypeAlias = NDArray[np.int64]
"""Numbers of rows of one file, from 0; blank lines are not counted."""
Mask: TypeAlias = NDArray[np.bool_]
"""[rows]"""
