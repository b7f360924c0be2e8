"""Checks a GPU step by step: `python -m benchmarks.gpu_check`, or `make gpu`. Needs no Ray and no pydantic.

It goes from what must hold (the device computes, tokens are those of a CPU, steps can be captured) to what should hold
(memory stays flat, speed is near its prediction), and stops at the first failure with a sentence that names it. Results
so far are written to one JSON file under benchmarks/results/. A check that cannot run here (no pytest, no Ray) is
listed as not run. Exit codes: 0 everything is right; 1 something is wrong; 2 there is no GPU.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks.gpu.attention import check_attention
from benchmarks.gpu.check_context import Check, CheckContext, CheckFailed
from benchmarks.gpu.decoding_checks import check_batches, check_captures, check_larger, check_speed, check_tokens
from benchmarks.gpu.machine_checks import check_device, check_kernels, nvidia_smi
from benchmarks.gpu.overlap import check_overlap
from benchmarks.gpu.replays import check_replays
from benchmarks.gpu.subprocess_checks import check_job, check_lane, check_sanitizer
from skipdecode.families import released

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
    "larger": check_larger,
    "overlap": check_overlap,
    "sanitizer": check_sanitizer,
    "job": check_job,
}


Document = dict[str, object]


def run_checks(
    context: CheckContext,
    checks: dict[str, Check],
    log: Callable[[str], None],
    save: Callable[[Document], None] = lambda _: None,
) -> Document:
    """The results of the checks up to the first failure, which `wrong` names (None if there is none).

    `save` is called with the results so far after each check, since a machine may disappear at any moment.
    """
    seconds: dict[str, float] = {}
    document: Document = {"wrong": None, "seconds": seconds}
    for name, check in checks.items():
        start = time.perf_counter()
        try:
            document[name] = found = check(context)
        except Exception as error:  # any error is a failed check
            sentence = str(error.args[0]) if isinstance(error, CheckFailed) else f"{type(error).__name__}: {error}"
            document["wrong"] = f"{name}: {sentence}"
            document[name] = error.args[1] if isinstance(error, CheckFailed) and len(error.args) > 1 else None
            log(f"WRONG: {document['wrong']}")
            break
        finally:
            seconds[name] = time.perf_counter() - start
            save(document)
        why = found.get("not_run")
        log(f"{name}: {'well' if why is None else f'not run, {why}'} ({seconds[name]:.1f} s)")
    return document


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="opt-1.3b", help="of the model that is timed, random weights")
    parser.add_argument("--larger", default="opt-6.7b", help="of the one that is timed after it; none: no other")
    optional = [name for name in CHECKS if name != "captures"]  # it builds the model for later checks
    parser.add_argument("--skip", action="append", default=[], choices=optional, help="a check to leave out")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="FOLDER")
    arguments = parser.parse_args(argv)

    def log(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    if not torch.cuda.is_available():
        log(f"no GPU: torch {torch.__version__} sees none{others_see()}; run this where there is one")
        return 2
    device, today = torch.device("cuda"), datetime.now(UTC).date().isoformat()
    name = torch.cuda.get_device_name(device)
    file = arguments.output / f"{today}-gpu-check-{name.lower().replace(' ', '-').replace('/', '-')}.json"
    shapes = {"shape": arguments.shape, "larger": arguments.larger, "skipped": arguments.skip}

    larger = None if arguments.larger == "none" else released(arguments.larger)
    wanted = {check: work for check, work in CHECKS.items() if check not in arguments.skip}

    def save(found: Document) -> None:
        checks = {check: what for check, what in found.items() if check in wanted}
        document = {"date": today, "device": name} | shapes
        document |= {"wrong": found["wrong"], "left": [check for check in wanted if check not in checks]}
        document |= {"seconds": found["seconds"], "checks": checks}
        file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    found = run_checks(CheckContext(device, released(arguments.shape), larger), wanted, log, save)
    log(f"written: {file}")
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
