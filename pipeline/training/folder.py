"""The output folder of a fine-tuning: the model itself, and under `training/` what a resume and a reader need.

A file that is visible under its final name is complete, since every file is written under a temporary name and
renamed. A checkpoint is one file, so no manifest can disagree with it (Ray Train's own manifest of checkpoints is
rewritten in place, and a kill at that moment leaves a run that cannot be restored). Only rank 0 and the driver write,
never at the same time, and only one run at a time (`store.lease`). Local or shared filesystems; no object stores.
"""

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pipeline.config.job import ConfigError
from pipeline.formatting import Json
from pipeline.store.model_folder import TOKENIZER_FILES
from pipeline.store.run_folder import RunFolder
from pipeline.store.run_state import check_version
from pipeline.training.training_records import LogLine, TrainingRecord, TrainingState
from skipdecode.checkpoint import lora_adapter as adapter
from skipdecode.config.wrapped import SWIFTKV_FILE
from skipdecode.schedules import trained as tuning

KEEP = 2  # checkpoints
WEIGHTS = ("model.safetensors", adapter.WEIGHTS_FILE)  # of a model, or of an adapter
# the weights last: with them the folder is a model, and by then the rest is there
MODEL_FILES = (
    *TOKENIZER_FILES,
    "config.json",
    adapter.CONFIG_FILE,
    tuning.SCHEDULE_FILE,
    tuning.TRAINED_FILE,
    SWIFTKV_FILE,
    *WEIGHTS,
)
OURS = (*MODEL_FILES, "training.json", "training")  # the last holds run.json, which says that the rest is ours

LoadedT = TypeVar("LoadedT")
"""The type that a checkpoint file is read into."""


@dataclass(frozen=True)
class TrainingFolder:
    root: Path

    @classmethod
    def open(cls, path: str) -> "TrainingFolder":
        """Nothing is created."""
        if "://" in path:
            raise ConfigError(
                "output.path", f"{path}: a model is written to a folder that every worker sees, not a URI"
            )
        return cls(Path(path).expanduser().absolute())

    @property
    def training(self) -> Path:
        return self.root / "training"

    @property
    def log(self) -> Path:
        return self.training / "log.jsonl"

    @property
    def has_model(self) -> bool:
        return any((self.root / name).is_file() for name in WEIGHTS)

    def check(self, if_exists: str) -> TrainingState | None:
        """The state of the run to resume, or None for a new one; ConfigError if the folder is taken."""
        if self.root.exists() and not self.root.is_dir():
            raise ConfigError("output.path", f"{self.root} is a file")
        state = self.read_state()
        if if_exists == "resume" and state is not None:
            check_version(state, str(self.root))
            return state
        there = [name for name in OURS if (self.root / name).exists()]
        if if_exists == "overwrite" and there and state is None:
            raise ConfigError(
                "output.path",
                f"{self.root} holds {', '.join(there)} and no training/run.json: no run of ours wrote it, "
                "and --overwrite will not delete it; choose another output.path",
            )
        if if_exists == "overwrite" or not RunFolder.open(str(self.root)).exists():
            return None
        if if_exists == "resume":
            raise ConfigError("output.path", f"{self.root} holds no training/run.json to resume")
        raise ConfigError(
            "output.path",
            f"{self.root} exists already; use --resume to go on with it, --overwrite to start anew, "
            "or another output.path",
        )

    def clear(self) -> None:
        """Removes what a run writes, and nothing else that may lie there."""
        for name in OURS:
            path = self.root / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def remove_temporary(self) -> None:
        """Removes what a killed process left half written."""
        for path in [*self.root.glob("*.tmp"), *self.training.rglob("*.tmp")]:
            path.unlink(missing_ok=True)

    def read_state(self) -> TrainingState | None:
        """`training/run.json`, or None."""
        path = self.training / "run.json"
        try:
            state: TrainingState = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError as error:
            raise ConfigError("output.path", f"{path} is not JSON ({error}); use another output.path") from error
        return state

    def write_state(self, state: TrainingState) -> None:
        self.write_json("training/run.json", state)

    def write_json(self, name: str, document: TrainingState | TrainingRecord) -> None:
        with self.whole(name) as path:
            path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")

    @contextmanager
    def whole(self, name: str) -> Iterator[Path]:
        """A path to write to; what was written appears as `name` when the block ends well, or not at all."""
        target = self.root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        staged = target.with_name(f"{target.name}.{uuid.uuid4().hex[:8]}.tmp")  # two runs may overlap for a moment
        try:
            yield staged
            with staged.open("rb") as file:
                os.fsync(file.fileno())  # the name must not outlive the bytes when the machine goes down
            os.replace(staged, target)
        finally:
            staged.unlink(missing_ok=True)

    def publish(self, write: Callable[[Path], None]) -> None:
        """`write(folder)` makes some of MODEL_FILES; they replace those of the model, one by one, the weights last."""
        staging = self.training / "staging"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        write(staging)
        for name in MODEL_FILES:
            if (staging / name).is_file():
                with self.whole(name) as path:
                    os.replace(staging / name, path)
        shutil.rmtree(staging)

    def save_checkpoint(self, step: int, write: Callable[[Path], None]) -> None:
        """`write(path)` makes the file; the last KEEP stay."""
        with self.whole(f"training/checkpoints/step-{step:09d}.pt") as path:
            write(path)
        for _, old in self.checkpoints()[KEEP:]:
            old.unlink()

    def checkpoints(self) -> list[tuple[int, Path]]:
        """(step, file), newest first."""
        files = sorted((self.training / "checkpoints").glob("step-*.pt"), reverse=True)
        return [(int(path.stem.removeprefix("step-")), path) for path in files]

    def load_checkpoint(self, load: Callable[[Path], LoadedT]) -> tuple[int, LoadedT] | None:
        """Step and contents of the newest that `load` can read (ValueError: it is damaged).

        Damaged newer ones are moved aside.
        RuntimeError when all are damaged: starting from the beginning is for the user to decide.
        """
        damaged: list[Path] = []
        for step, path in self.checkpoints():
            try:
                loaded = load(path)
            except ValueError:
                damaged.append(path)
                continue
            for other in damaged:
                other.rename(other.with_suffix(".unreadable"))  # it was whole once: for a human to look at
            return step, loaded
        if damaged:
            raise RuntimeError(f"{', '.join(map(str, damaged))}: damaged, and no other; --overwrite starts anew")
        return None

    def records(self) -> list[LogLine]:
        """The log; a torn last line is left out."""
        return list(self._records())

    def _records(self) -> Iterator[LogLine]:
        if not self.log.is_file():
            return
        with self.log.open(encoding="utf-8") as lines:
            for line in lines:
                if line.endswith("\n"):
                    yield json.loads(line)

    def rewind_log(self, step: int) -> None:
        """Forgets what was logged after `step`: it will be logged again."""
        records = [record for record in self._records() if record["step"] <= step]
        with self.whole("training/log.jsonl") as path:
            path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")

    def append_log(self, record: dict[str, Json]) -> None:
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def check_no_overlap(folder: TrainingFolder, others: Iterable[tuple[str, str]]) -> None:
    """ConfigError when one of `others` (key, path) lies in the output, which --overwrite deletes, or is a folder of
    data around it, which would be read with everything in it."""
    root = folder.root.resolve()
    for key, path in others:
        own = Path(path).expanduser().resolve()
        if key.startswith("data.") and own != root and own.is_dir() and root.is_relative_to(own):
            raise ConfigError("output.path", f"{folder.root} lies in {key} ({path}); choose an output.path outside")
        if "://" not in path and own.is_relative_to(root):
            raise ConfigError(key, f"{path} lies in output.path ({folder.root}); choose an output.path of its own")
