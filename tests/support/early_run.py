"""`jobs.generate` onto a store that shows objects while they are written: `-o early:///folder`.

Each change of the store is the fault point "store step" of the process that makes it.
"""

import sys
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs

from jobs import generate
from pipeline.store.run_folder import RunFolder
from tests.support.early_store import FaultyStore

SCHEME = "early://"


def opened(opens: Any) -> Any:
    """`RunFolder.open` that knows the scheme, too."""

    def open_folder(path: str) -> RunFolder:
        if not path.startswith(SCHEME):
            return opens(path)
        place = Path(path.removeprefix(SCHEME))
        return RunFolder(pafs.PyFileSystem(FaultyStore(place.parent)), place.name, path)

    return open_folder


if __name__ == "__main__":
    RunFolder.open = opened(RunFolder.open)  # type: ignore[method-assign]
    sys.exit(generate.main())
