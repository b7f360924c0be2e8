"""What a training shows of itself: the plot of its losses and the progress line."""

from pathlib import Path
from typing import Any

import pytest

from pipeline.training.finetune import describe
from pipeline.training.folder import TrainingFolder
from pipeline.training.loss_plot import draw, plot_losses, smooth


def write_log(folder: TrainingFolder, records: list[dict[str, Any]]) -> None:
    folder.rewind_log(0)
    for record in records:
        folder.append_log({"steps": 100} | record)


def trained(step: int, elapsed_s: float) -> dict[str, Any]:
    return {"step": step, "train_loss": 5 / step, "pairs_per_s": 64.0, "elapsed_s": elapsed_s}


def validated(step: int) -> dict[str, Any]:
    return {"step": step, "validation_loss": {"full": 2.0, "skipdecode 2": 3.0}, "mean": 2.5, "elapsed_s": 0.0}


def test_the_progress_line(tmp_path: Path) -> None:
    folder = TrainingFolder(tmp_path)
    assert describe(folder) == "starting workers"
    write_log(folder, [{"step": 0, "start": {}}])
    assert describe(folder) == "first steps"
    folder.append_log({"step": 0, "fitted": 16, "fit_pairs": 40})
    assert describe(folder) == "fitting SwiftKV's keys and values   16/40 pairs"
    folder.append_log({"step": 0, "fitted": 40, "fit_pairs": 40})
    assert describe(folder) == "first steps"
    folder.append_log({"steps": 100} | trained(10, 20.0))
    assert describe(folder) == "step 10/100 (10 %)   loss 0.5000   64.0 pairs/s   20 s   ETA ?"
    folder.append_log(trained(20, 40.0) | {"steps": 100})
    folder.append_log(validated(20))
    line = describe(folder)
    assert line == "step 20/100 (20 %)   loss 0.2500   validation 2.5000   64.0 pairs/s   40 s   ETA 160 s"
    # on another machine, ten times as fast
    for record in ({"step": 20, "start": {}}, trained(30, 41.0), trained(40, 43.0)):
        folder.append_log({"steps": 100} | record)
    assert str(describe(folder)).endswith("43 s   ETA 12 s")


def test_the_plot_has_a_line_per_schedule(tmp_path: Path) -> None:
    folder = TrainingFolder(tmp_path)
    plot_losses(folder)
    assert not (folder.training / "loss.svg").exists()
    records = [trained(10, 1.0), trained(20, 2.0), validated(20), trained(30, 3.0), validated(30)]
    write_log(folder, records)
    plot_losses(folder)
    assert "<svg" in (folder.training / "loss.svg").read_text()
    assert (folder.training / "loss.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = draw(records).axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["training, all schedules, smoothed", "validation, full", "validation, skipdecode 2"]
    assert list(axes.lines[-1].get_xydata()[:, 1]) == [3.0, 3.0]


def test_smoothing_has_no_start_up_error() -> None:
    assert smooth((3.0, 3.0, 3.0)) == pytest.approx([3.0, 3.0, 3.0])
    assert smooth((1.0, 2.0)) == pytest.approx([1.0, (0.9 * 0.1 + 0.1 * 2) / 0.19])
