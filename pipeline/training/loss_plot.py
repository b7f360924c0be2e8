"""The loss over the steps as `training/loss.svg` and `loss.png`: training smoothed, validation per schedule."""

from typing import Any

from matplotlib.figure import Figure  # without pyplot: no global state, no display

from pipeline.training.folder import TrainingFolder

SMOOTHING = 0.9  # weight of the past in the running mean of the training loss


def plot_losses(folder: TrainingFolder) -> None:
    """Draws what the log holds so far; nothing is written when it holds no loss."""
    records = folder.records()
    if not any("train_loss" in record for record in records):
        return
    figure = draw(records)
    for suffix in ("svg", "png"):
        with folder.whole(f"training/loss.{suffix}") as path:
            figure.savefig(path, format=suffix, dpi=120)


def draw(records: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    training = [(record["step"], record["train_loss"]) for record in records if "train_loss" in record]
    steps, losses = zip(*training, strict=True)
    axes.plot(steps, losses, color="0.85", linewidth=1)
    axes.plot(steps, smooth(losses), color="0.4", linewidth=1.5, label="training, all schedules, smoothed")
    validations = [record for record in records if "validation_loss" in record]
    for name in validations[-1]["validation_loss"] if validations else ():
        points = [(record["step"], record["validation_loss"][name]) for record in validations]
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
