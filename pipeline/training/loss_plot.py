"""The loss over the steps as `training/loss.svg` and `loss.png`: training smoothed, validation per schedule."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.plots import new_figure, save_figure
from pipeline.training.folder import TrainingFolder
from pipeline.training.training_records import LogLine, losses_in

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMOOTHING = 0.9  # weight of the past in the running mean of the training loss


def plot_losses(folder: TrainingFolder) -> None:
    """Draws what the log holds so far; nothing is written when it holds no loss."""
    records = folder.records()
    if losses_in(records):
        save_figure(draw(records), folder.whole, "training/loss")


def draw(records: Sequence[LogLine]) -> "Figure":
    figure, (axes,) = new_figure(8, 4.5)
    steps, losses = zip(*((line["step"], line["train_loss"]) for line in losses_in(records)), strict=True)
    axes.plot(steps, losses, color="0.85", linewidth=1)
    axes.plot(steps, smooth(losses), color="0.4", linewidth=1.5, label="training, all schedules, smoothed")
    validations = [line for line in records if "validation_loss" in line]
    for name in validations[-1]["validation_loss"] if validations else ():
        points = [(line["step"], line["validation_loss"][name]) for line in validations]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=1, label=f"validation, {name}")
    axes.set(xlabel="step", ylabel="loss in nats per response token")
    axes.legend(frameon=False, fontsize="small")
    return figure


def smooth(values: tuple[float, ...]) -> list[float]:
    """Running mean, without the pull of a first value (as Adam corrects its moments)."""
    mean, weight, smoothed = 0.0, 0.0, []
    for value in values:
        mean = SMOOTHING * mean + (1 - SMOOTHING) * value
        weight = SMOOTHING * weight + (1 - SMOOTHING)
        smoothed.append(mean / weight)
    return smoothed
