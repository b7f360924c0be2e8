"""The configuration of a small training."""

from actors.training.recipe import TrainConfig


def make_config(**changes: object) -> TrainConfig:
    base: dict[str, object] = {
        "schedules": ({"method": "full"}, {"method": "skipdecode", "speedup": 2}),
        "horizon": 8,
        "epochs": 14.0,
        "batch_size": 16,
        "accumulate": 1,
        "learning_rate": 4e-3,
        "final_learning_rate": 1e-4,
        "warmup_steps": 5,
        "betas": (0.9, 0.95),
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "distill": 0.0,
        "temperature": 1.0,
        "hidden": 0.0,
        "trainable": "all",
        "fit_pairs": 0,
        "draw": "one",
        "precision": "float32",
        "recompute": False,
        "parallel": "ddp",
        "log_every": 10,
        "validate_every": 30,
        "checkpoint_every": 1000,
        "validation_rows": 16,
        "seed": 0,
    }
    return TrainConfig(**(base | changes))  # type: ignore[arg-type]
