"""Writes a calibrated checkpoint: the model's files, with the calibration in its `config.json`."""

import json
import os
import shutil
from pathlib import Path

from pipeline.evaluation.documents import CalibrationDocument, DraftsDocument
from pipeline.formatting import Json
from pipeline.resolve_model import ResolvedModel
from pipeline.store.model_folder import own_files, tokenizer_files
from skipdecode.checkpoint.hub import HUB_FALLBACK, HUB_FILES
from skipdecode.checkpoint.weight_files import SHARD_SUFFIXES
from skipdecode.checkpoint.weights import load_model, save_model

COPIED = (*(name for name in HUB_FILES if name != "config.json"), *HUB_FALLBACK, "README.md", "LICENSE*", "NOTICE*")


def write_checkpoint(
    staging: Path, model: ResolvedModel, carried: dict[str, Json], document: CalibrationDocument | DraftsDocument
) -> None:
    """Writes the model's files, `config.json` with `carried`, and `calibration/calibration.json`; an adapter is
    merged."""
    (staging / "calibration").mkdir()
    is_made = model.folder.is_file() or model.adapter is not None  # GGUF files cannot carry a calibration
    if is_made:
        save_model(load_model(model.folder, adapter=model.adapter), staging)
        for name, content in tokenizer_files(model.folder).items():
            (staging / name).write_bytes(content)
    for path in () if is_made else own_files(model.folder, COPIED):
        copy = _link if path.suffix in SHARD_SUFFIXES else shutil.copy2
        copy(path.resolve(), staging / path.name)
    source = staging if is_made else model.folder
    raw = json.loads((source / "config.json").read_text(encoding="utf-8")) | carried
    (staging / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    (staging / "calibration" / "calibration.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another filesystem, or one without links
        shutil.copy2(source, target)
