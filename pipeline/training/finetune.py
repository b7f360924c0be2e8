"""Fine-tuning from a configuration to a model folder: check everything, train on Ray Train, report.

This process does not train. Ray Train starts the workers (`worker`) and restarts them when one dies, and this process
follows the log that they write.
"""

import contextlib
import os
import shutil
import signal
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ray
import ray.train
from ray.train.torch import TorchConfig, TorchTrainer

from pipeline.cluster.pool import start_ray
from pipeline.cluster.progress import LiveLine
from pipeline.config.job import ConfigError
from pipeline.formatting import Log, count
from pipeline.resolve_model import worker_path
from pipeline.store.digest import refuse_differences
from pipeline.store.lease import Lease
from pipeline.store.run_folder import RunFolder
from pipeline.training.config import FinetuneConfig
from pipeline.training.folder import TrainingFolder
from pipeline.training.loss_plot import plot_losses
from pipeline.training.pool import TrainPool, plan_workers
from pipeline.training.training_plan import PlannedTraining, plan_training, stored_dtype
from pipeline.training.training_records import (
    Fingerprint,
    LogLine,
    TrainingRecord,
    TrainingState,
    ValidationLine,
    fitting,
    losses_in,
)
from pipeline.training.worker import Failed, Trained, TrainingJob, run_worker
from skipdecode import __version__

DEFAULTS: Fingerprint = {}
"""What an entry means in the fingerprint of an older version (1.0 or newer) that did not have it yet."""


@dataclass(frozen=True)
class FinetuneResult:
    record: TrainingRecord
    """`training.json`"""
    folder: TrainingFolder
    was_finished: bool = False


def finetune(config: FinetuneConfig, log: Log) -> FinetuneResult:
    """Trains what `config` asks for. ConfigError: nothing was started. Anything else raised: it broke."""
    planned = plan_training(config, log)
    folder, earlier = planned.folder, planned.earlier
    if earlier is not None:
        refuse_differences(DEFAULTS | earlier["fingerprint"], planned.fingerprint)
        if earlier["state"] == "finished":
            log(f"{folder.root}: finished before, nothing to do")
            return FinetuneResult(earlier["record"], folder, was_finished=True)
    try:
        with Lease(RunFolder.open(str(folder.root)), uuid.uuid4().hex[:12], log):
            if folder.read_state() != earlier and config.output.if_exists != "overwrite":
                raise ConfigError("output.path", f"another run has worked in {folder.root} meanwhile; start again")
            return FinetuneResult(_train(planned, log), folder)
    except ConfigError:
        with contextlib.suppress(OSError):  # it holds more than the lease that is gone
            Path(folder.root).rmdir()
        raise


def _train(planned: PlannedTraining, log: Log) -> TrainingRecord:
    """Trains in a folder whose lease is held, and returns `training.json`."""
    config, folder = planned.config, planned.folder
    cluster = start_ray(log)
    if ray.get_runtime_context().runtime_env.get("working_dir") and not Path(config.output.path).is_absolute():
        raise ConfigError(
            "output.path",
            f"{config.output.path} would lie in the package of the Ray job, which Ray deletes; "
            "give an absolute path that every worker sees",
        )
    pool = plan_workers(config.workers, cluster, ray.available_resources())
    if config.output.if_exists == "overwrite":
        folder.clear()
    folder.remove_temporary()
    device = "a GPU" if pool.use_gpu else f"{pool.threads} threads"
    found = folder.checkpoints()
    log(
        f"train: {count(pool.num_workers, 'worker')} with {device} each, schedules {list(planned.train.schedules)}"
        + (f"; from the checkpoint of step {found[0][0]}" if found else "")
    )
    return _execute(planned, pool)


def _execute(planned: PlannedTraining, pool: TrainPool) -> TrainingRecord:
    folder = planned.folder
    state: TrainingState = {
        "version": __version__,
        "state": "running",
        "fingerprint": planned.fingerprint,
        "warmup_steps": planned.train.warmup_steps,
        "config": planned.config.model_dump(mode="json"),
    }
    folder.write_state(state)  # first: it says that what follows is ours
    if not folder.has_model:
        folder.publish(lambda staging: _write_files(staging, planned.tokenizer))
    try:
        with LiveLine(lambda: describe(folder)):
            best = _fit(planned, pool)
    except BaseException:
        folder.write_state({**state, "state": "interrupted"})
        raise
    finally:
        shutil.rmtree(folder.training / "ray", ignore_errors=True)
        plot_losses(folder)
    record = make_record(planned, best)
    folder.write_json("training.json", record)
    folder.write_state({**state, "state": "finished", "record": record})  # last: a finished run has everything
    return record


def _write_files(staging: Path, files: dict[str, bytes]) -> None:
    for name, contents in files.items():
        (staging / name).write_bytes(contents)


def _fit(planned: PlannedTraining, pool: TrainPool) -> ValidationLine:
    """Runs the workers to their end; the record of the best validation."""
    config = planned.config
    source = None if planned.source is None else worker_path(str(config.model.source), planned.source)
    pairs = ray.put((planned.pairs.tokens, planned.validation.tokens))
    named = str(config.model.teacher or config.model.source)
    teacher = None if planned.teacher is None else worker_path(named, planned.teacher)
    adapter = None if planned.adapter is None else worker_path(str(config.model.adapter), planned.adapter)
    job = TrainingJob(
        planned.folder.root,
        source,
        planned.model_config,
        teacher,
        adapter if config.model.teacher is None else None,
        planned.train,
        stored_dtype(config, planned.model_config),
        pool.threads,
        pairs,
        planned.lora,
        adapter,
        str(config.model.source),
    )
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"  # paths are relative to where the job was started
    # Ray Train gives up on a start after 60 s and tries again, for ever; the room for it was checked
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "600")
    trainer = TorchTrainer(
        run_worker,
        train_loop_config={"job": job},
        torch_config=TorchConfig(backend="nccl" if pool.use_gpu else "gloo"),
        scaling_config=ray.train.ScalingConfig(
            num_workers=pool.num_workers,
            use_gpu=pool.use_gpu,
            resources_per_worker={"CPU": pool.num_cpus} | ({"GPU": 1} if pool.use_gpu else {}),
        ),
        run_config=ray.train.RunConfig(
            name=uuid.uuid4().hex[:12],
            storage_path=str(planned.folder.training / "ray"),  # holds nothing: our checkpoints are our own
            failure_config=ray.train.FailureConfig(max_failures=config.workers.max_failures),
            logging_config=ray.train.LoggingConfig(log_level="ERROR"),
        ),
    )
    outcome = _with_own_interrupt(trainer)
    if isinstance(outcome, Failed):
        raise RuntimeError(outcome.message)
    return outcome.best


def _with_own_interrupt(trainer: TorchTrainer) -> Trained | Failed:
    """Ray Train takes SIGINT for itself, and leaves the process with exit code 0; here it is a KeyboardInterrupt."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    try:
        outcome: Trained | Failed = trainer.fit().return_value
        return outcome
    except SystemExit as error:
        raise KeyboardInterrupt from error
    finally:
        if is_main:
            signal.signal(signal.SIGINT, before)


def describe(folder: TrainingFolder) -> str | None:
    """The progress line: step, loss, speed, time to go."""
    records = folder.records()
    lines = losses_in(records)
    if not lines:
        return _before_the_first_loss(records)
    last = lines[-1]
    validations = [record for record in records if "mean" in record]
    # since the last start alone: a resumed run may be on another machine
    started = max((i for i, record in enumerate(records) if "start" in record), default=0)
    recent = losses_in(records[started:])[-10:]
    steps = recent[-1]["step"] - recent[0]["step"] if recent else 0
    eta = "0 s" if last["step"] >= last["steps"] else "?"
    if steps:
        per_step = (recent[-1]["elapsed_s"] - recent[0]["elapsed_s"]) / steps
        eta = f"{per_step * (last['steps'] - last['step']):.0f} s"
    return (
        f"step {last['step']}/{last['steps']} ({100 * last['step'] / last['steps']:.0f} %)   "
        f"loss {last['train_loss']:.4f}   "
        + (f"validation {validations[-1]['mean']:.4f}   " if validations else "")
        + f"{last['pairs_per_s']:.1f} pairs/s   {last['elapsed_s']:.0f} s   ETA {eta}"
    )


def _before_the_first_loss(records: Sequence[LogLine]) -> str:
    last = records[-1] if records else None
    if last is None:
        return "starting workers"
    if "fitted" in last and last["fitted"] < last["fit_pairs"]:
        return fitting(last["fitted"], last["fit_pairs"])
    return "first steps"


def make_record(planned: PlannedTraining, best: ValidationLine) -> TrainingRecord:
    """`training.json`: what was made, how, from what, on what."""
    records = planned.folder.records()
    starts = [record["start"] | {"from_step": record["step"]} for record in records if "start" in record]
    return {
        "best": best,
        "steps": planned.num_steps,
        "warmup_steps": planned.train.warmup_steps,
        "duration_s": losses_in(records)[-1]["elapsed_s"],
        "pairs": len(planned.pairs.tokens),
        "validation_pairs": len(planned.validation.tokens),
        "skipped_rows": len(planned.pairs.problems) + len(planned.validation.problems),
        "response_tokens": sum(len(response) for _, response in planned.pairs.tokens),
        "skip_decode": planned.model_config.skip_decode,
        "sessions": starts,
        "finished_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "config": planned.config.model_dump(mode="json"),
    }
