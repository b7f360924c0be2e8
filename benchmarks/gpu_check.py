"""Checks a GPU step by step: `python -m benchmarks.gpu_check`, or `make gpu`. Needs no Ray and no pydantic.

It goes from what must hold (the device computes, tokens are those of a CPU, steps can be captured) to what should hold
(memory stays flat, speed is near its prediction), and stops at the first failure with a sentence that names it; with
--keep-going it runs the other checks too. It ends with a table. Results so far are written to one JSON file under
benchmarks/results/, beside what was expected (--list shows it). A check that cannot run here (no pytest, no Ray) is
listed as not run, and one that takes longer than its limit is wrong. --dry-run tries the checks themselves on a CPU,
with a tiny model and torch's operators. Exit codes: 0 everything is right; 1 something is wrong; 2 there is no GPU.
"""

import argparse
import json
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch

from actors.memory import keep_segments_whole
from benchmarks.gpu import attention
from benchmarks.gpu.attention import check_attention
from benchmarks.gpu.check_context import Check, CheckContext, CheckFailed, Found, LimitReached, not_run
from benchmarks.gpu.corpus import check_corpus
from benchmarks.gpu.decoding_checks import SMALL, check_batches, check_captures, check_larger, check_speed, check_tokens
from benchmarks.gpu.fp8_checks import check_fp8
from benchmarks.gpu.job_checks import check_resume, check_workers
from benchmarks.gpu.machine_checks import check_device, check_kernels, nvidia_smi
from benchmarks.gpu.method_checks import SMALL_GROUPED, check_grouped, check_prefixes, check_sampled, check_swiftkv
from benchmarks.gpu.overlap import check_overlap
from benchmarks.gpu.predictions import PLANNED
from benchmarks.gpu.replays import check_replays
from benchmarks.gpu.soak import check_soak
from benchmarks.gpu.subprocess_checks import check_job, check_lane, check_sanitizer
from benchmarks.gpu.transformers_checks import check_exact, check_generate_batch, check_peers, check_wrapped
from skipdecode.backends import device
from skipdecode.backends.cuda_backend import CudaBackend
from skipdecode.backends.torch_kernels import TorchKernels
from skipdecode.families import config_of, released

RESULTS = Path(__file__).parent / "results"
CHECKS: dict[str, Check] = {
    "device": check_device,
    "kernels": check_kernels,
    "tokens": check_tokens,
    "lane": check_lane,
    "attention": check_attention,
    "captures": check_captures,
    "batches": check_batches,
    "replays": check_replays,  # before the speed, because it shows where the time of a slow step goes
    "speed": check_speed,
    "sampled": check_sampled,
    "larger": check_larger,  # from here on each check builds what it needs
    "grouped": check_grouped,
    "fp8": check_fp8,
    "corpus": check_corpus,
    "swiftkv": check_swiftkv,
    "prefixes": check_prefixes,
    "soak": check_soak,
    "overlap": check_overlap,
    "exact": check_exact,
    "wrapped": check_wrapped,
    "peers": check_peers,
    "generate_batch": check_generate_batch,
    "sanitizer": check_sanitizer,
    "job": check_job,
    "resume": check_resume,
    "workers": check_workers,
}
NEEDS = dict.fromkeys(("batches", "replays", "speed", "sampled"), "captures")
"""Checks of the model that another one builds."""
TINY = SMALL | {"vocab_size": 1024, "hidden_size": 64, "ffn_dim": 64, "num_hidden_layers": 3}
TINY_GROUPED = SMALL_GROUPED | {"vocab_size": 1024, "hidden_size": 64, "num_hidden_layers": 3}
"""config.json of the models of a dry run."""

Document = dict[str, object]


def run_checks(
    context: CheckContext,
    checks: dict[str, Check],
    log: Callable[[str], None],
    save: Callable[[Document], None] = lambda _: None,
    *,
    keep_going: bool = False,
) -> Document:
    """The results of the checks up to the first failure, which `wrong` names (None if there is none). With
    `keep_going` of all of them that do not need one that has failed; `more_wrong` names further failures.

    `save` is called with the results so far after each check, since a machine may disappear at any moment.
    """
    seconds: dict[str, float] = {}
    more_wrong: list[str] = []
    failed: set[str] = set()
    document: Document = {"wrong": None, "more_wrong": more_wrong, "seconds": seconds}
    for name, check in checks.items():
        start = time.perf_counter()
        try:
            needs = NEEDS.get(name, "")
            context.note = partial(_keep, document, name, save)
            with limited(context.patience * PLANNED[name].limit_s if name in PLANNED else None):
                document[name] = found = not_run(f"{needs} is wrong") if needs in failed else check(context)
        except Exception as error:  # any error is a failed check
            sentence = str(error.args[0]) if isinstance(error, CheckFailed) else f"{type(error).__name__}: {error}"
            if isinstance(error, CheckFailed) and len(error.args) > 1:
                document[name] = error.args[1]
            document.setdefault(name, None)  # else what it had noted
            failed.add(name)
            if document["wrong"] is None:
                document["wrong"] = f"{name}: {sentence}"
            else:
                more_wrong.append(f"{name}: {sentence}")
            log(f"WRONG: {name}: {sentence}")
            if keep_going:
                continue
            break
        finally:
            seconds[name] = time.perf_counter() - start
            save(document)
        why = found.get("not_run")
        log(f"{name}: {'well' if why is None else f'not run, {why}'} ({seconds[name]:.1f} s)")
    return document


def _keep(document: Document, name: str, save: Callable[[Document], None], found: Found) -> None:
    document[name] = found
    save(document)


@contextmanager
def limited(seconds: float | None) -> Iterator[None]:
    """CheckFailed where the block takes longer than that, in the main thread of a process without another alarm. A
    call that never returns to Python goes on: give the whole command a limit, too."""
    is_main = threading.current_thread() is threading.main_thread()
    if seconds is None or not is_main or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return

    def end(*_: object) -> None:
        raise LimitReached

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except LimitReached:
        raise CheckFailed(f"it did not end within {seconds:g} s") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def chosen_checks(only: Sequence[str], skipped: Sequence[str]) -> dict[str, Check]:
    """The checks to run, in their order: all, or `only` some with those that they need; without the skipped ones."""
    names = {*only, *(NEEDS[name] for name in only if name in NEEDS)} or set(CHECKS)
    return {name: check for name, check in CHECKS.items() if name in names and name not in skipped}


def table(document: Document, wanted: Iterable[str]) -> list[str]:
    """A line for each check: how it went, how long it took, and what is wrong or why it did not run."""
    more: list[str] = document["more_wrong"]  # type: ignore[assignment]
    wrong = dict(str(one).split(": ", 1) for one in [document["wrong"], *more] if one is not None)
    seconds: dict[str, float] = document["seconds"]  # type: ignore[assignment]
    lines = []
    for name in wanted:
        found = document.get(name)
        why = found.get("not_run") if isinstance(found, dict) else None
        state = "WRONG" if name in wrong else "left" if name not in seconds else "well" if why is None else "not run"
        took = f"{seconds[name]:7.1f} s" if name in seconds else " " * 9
        lines.append(f"{name:14} {state:8} {took}  {wrong.get(name) or why or ''}".rstrip())
    return lines


def dry_context() -> CheckContext:
    """The context of a dry run: a tiny model on the CPU, as CUDA devices compute it but by torch's operators. What is
    timed is judged by nothing. For the rest of this process."""
    device.CPU = CudaBackend(TorchKernels())  # type: ignore[assignment]
    attention.MAX_NEW_SHAPE_S, attention.MIN_OF_BEST = math.inf, 0.0
    torch.set_num_threads(1)  # where others compute too, two threads wait for each other in every product so small
    config = config_of(TINY)
    sizes = {"rows": (2, 4), "prompt_tokens": 8, "new_tokens": 6, "context_tokens": 32, "cache_bytes": 1 << 20}
    sizes |= {"grouped": config_of(TINY_GROUPED), "corpus_prompts": (3, 12), "corpus_answers": (2, 20)}
    return CheckContext(torch.device("cpu"), config, config, is_dry=True, **sizes)  # type: ignore[arg-type]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="opt-1.3b", help="of the model that is timed, random weights")
    parser.add_argument("--larger", default="opt-6.7b", help="of the one that is timed after it; none: no other")
    parser.add_argument(
        "--grouped", default="llama-3.2-1b", help="of the one whose query heads share keys; none: no such"
    )
    parser.add_argument("--checkpoint", help="real weights to compare with transformers, beside the demo model")
    optional = [name for name in CHECKS if name != "captures"]  # it builds the model for later checks
    parser.add_argument(
        "--only", action="append", default=[], choices=[*CHECKS], help="a check to run, with what it needs"
    )
    parser.add_argument("--skip", action="append", default=[], choices=optional, help="a check to leave out")
    parser.add_argument("--list", action="store_true", help="the checks, with what they are expected to find")
    parser.add_argument("--keep-going", action="store_true", help="run the checks after one that is wrong, too")
    parser.add_argument("--dry-run", action="store_true", help="try the checks themselves, on a CPU; writes nothing")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="FOLDER")
    arguments = parser.parse_args(argv)

    def log(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    wanted = chosen_checks(arguments.only, arguments.skip)
    if arguments.list:
        print("\n".join(f"{name:14} {PLANNED[name].limit_s:4g} s  {PLANNED[name].prediction}" for name in wanted))
        return 0
    if arguments.dry_run:
        found = run_checks(dry_context(), wanted, log, keep_going=arguments.keep_going)
        log("\n".join(["dry run, no GPU was used:", *table(found, wanted)]))
        print(json.dumps({"wrong": found["wrong"], "dry_run": True}))
        return 0 if found["wrong"] is None else 1
    if not torch.cuda.is_available():
        log(f"no GPU: torch {torch.__version__} sees none{others_see()}; run this where there is one")
        return 2
    keep_segments_whole()  # as a worker does
    gpu, today = torch.device("cuda"), datetime.now(UTC).date().isoformat()
    name = torch.cuda.get_device_name(gpu)
    file = arguments.output / f"{today}-gpu-check-{name.lower().replace(' ', '-').replace('/', '-')}.json"
    shapes = {key: getattr(arguments, key) for key in ("shape", "larger", "grouped", "checkpoint", "only")}
    shapes["skipped"] = arguments.skip
    larger, grouped = (None if name == "none" else released(name) for name in (arguments.larger, arguments.grouped))

    def save(found: Document) -> None:
        checks = {check: what for check, what in found.items() if check in wanted}
        document = {"date": today, "device": name} | shapes
        document |= {
            "wrong": found["wrong"],
            "more_wrong": found["more_wrong"],
            "left": [check for check in wanted if check not in checks],
        }
        document |= {"predictions": {check: PLANNED[check].prediction for check in wanted if check in PLANNED}}
        document |= {"seconds": found["seconds"], "checks": checks}
        file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    keys = {"larger": larger, "grouped": grouped, "checkpoint": arguments.checkpoint}
    arguments.output.mkdir(parents=True, exist_ok=True)
    context = CheckContext(gpu, released(arguments.shape), **keys)
    found = run_checks(context, wanted, log, save, keep_going=arguments.keep_going)
    log("\n".join([*table(found, wanted), f"written: {file}"]))
    print(json.dumps({"wrong": found["wrong"], "written": str(file)}))
    return 0 if found["wrong"] is None else 1


def others_see() -> str:
    """Names the devices that nvidia-smi lists although torch sees none; empty if there are none."""
    smi = nvidia_smi()
    names = [str(device["name"]) for device in smi["devices"]]  # type: ignore[attr-defined]
    if not names:
        return ""
    build = torch.version.cuda or "no CUDA"
    return f", though nvidia-smi lists {', '.join(names)} (driver for CUDA {smi['cuda']}, torch built for {build})"


if __name__ == "__main__":
    sys.exit(main())
