"""`make chaos TRIALS=100`: faults at random, one after the other, until so many trials are done.

    python -m tests.runs.chaos --trials 100 --seed 0
    python -m tests.runs.chaos --only "driver paused" --seed 23 --trials 1    # trial 23 of the above, again

Each trial starts a run, hurts it, mends it as its user would, and holds every row against those of an undisturbed run.
A trial that goes wrong stops no other. At the end a table, the same as JSON (`--output`), and exit code 1 if any trial
was bad. Left out: the faults (`support.faults`, `support.store_faults`).
"""

import argparse
import contextlib
import datetime
import json
import platform
import random
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skipdecode.backends.host_memory import num_cores
from tests.support.faults import DISK_FAULTS, Fault
from tests.support.store_faults import STORE_FAULTS
from tests.support.tiny_models import save_model, save_tokenizer
from tests.support.trials import Missed, Site, Trial, Verdict

FAULTS: dict[str, Fault] = DISK_FAULTS | STORE_FAULTS
ONCE = "driver paused, lease of 30 s"  # takes a minute, and waits for most of it
MOST_MISSES = 4
RESULTS = Path(__file__).parents[2] / "benchmarks/results"


@dataclass(frozen=True)
class Done:
    """One trial, and what it came to."""

    number: int
    fault: str
    verdict: Verdict
    seconds: float


def deck(names: Sequence[str], trials: int, seed: int) -> Iterator[str]:
    """Which fault each trial has: each one once, then at random, the slow one not again."""
    rng = random.Random(seed)
    first = rng.sample(names, len(names))
    again = [name for name in names if name != ONCE] or list(names)
    for number in range(trials):
        yield first[number] if number < len(first) else rng.choice(again)


def one_trial(site: Site, fault: Fault, name: str, seed: int) -> Verdict:
    """With a verdict whatever happens, but for Ctrl-C."""
    for miss in range(MOST_MISSES):
        folder = site.root / re.sub(r"\W+", "-", f"{name} {seed} {miss}")
        folder.mkdir()
        trial = Trial(site, random.Random(f"{name} {seed} {miss}"), folder)
        try:
            fault(trial)
            verdict = trial.verdict or trial.judge()
        except Missed:
            continue
        except Exception:
            verdict = Verdict(trouble=traceback.format_exc(limit=-4)[-3000:])
        finally:
            trial.clean_up()
        if verdict.is_good:
            shutil.rmtree(folder, ignore_errors=True)
        return verdict
    return Verdict(trouble=f"{MOST_MISSES} runs were over before the fault")


def run_trials(
    names: Sequence[str],
    trials: int,
    seed: int,
    try_one: Callable[[str, int], Verdict],
    log: Callable[[str], None],
) -> Iterator[Done]:
    """Trial n has the seed `seed + n`; one that goes wrong stops no other."""
    for number, name in enumerate(deck(names, trials, seed)):
        began = time.monotonic()
        verdict = try_one(name, seed + number)
        seconds = time.monotonic() - began
        word = "ok" if verdict.is_good else f"BAD {verdict}"
        log(f"{number + 1}/{trials} {name} (--seed {seed + number}): {word}, {seconds:.0f} s")
        yield Done(number, name, verdict, seconds)


def rows_of(done: Sequence[Done]) -> list[dict[str, Any]]:
    """One per fault, and one for all."""
    rows = []
    for fault in [*dict.fromkeys(one.fault for one in done), "all"]:
        own = [one.verdict for one in done if fault in (one.fault, "all")]
        row: dict[str, Any] = {"fault": fault, "trials": len(own), "good": sum(one.is_good for one in own)}
        row |= {name: sum(getattr(one, name) for one in own) for name in ("lost", "doubled", "changed")}
        rows.append(row | {"closed": sum(v.closed for v in own), "verified": sum(v.verified for v in own)})
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: what was tried, and what was lost."""
    lines = ["| fault | trials | lost | doubled | other tokens | `verify` |", "|---|---:|---:|---:|---:|---:|"]
    for row in rows:
        figures = (row["trials"], row["lost"], row["doubled"], row["changed"], f"{row['verified']} of {row['trials']}")
        lines.append(f"| {row['fault']} | {' | '.join(map(str, figures))} |")
    return "\n".join(lines)


def document(done: Sequence[Done], seed: int) -> dict[str, Any]:
    bad = [{"fault": one.fault, "seed": seed + one.number} | vars(one.verdict) for one in done]
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": f"{platform.machine()}, {num_cores()} cores",
        "seed": seed,
        "seconds": round(sum(one.seconds for one in done)),
        "rows": rows_of(done),
        "bad": [entry for entry, one in zip(bad, done, strict=True) if not one.verdict.is_good],
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", choices=sorted(FAULTS), help="this fault (repeatable)")
    parser.add_argument("--output", type=Path, help="of the JSON; without --only: benchmarks/results/DATE-chaos.json")
    return parser.parse_args(argv)


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    given = parse(argv)
    root = Path(tempfile.mkdtemp(prefix="chaos-"))
    for name in ("tokenizer", "model"):
        (root / name).mkdir()
    site = Site(root, save_model(root / "model", save_tokenizer(root / "tokenizer"), "125m"))

    def try_one(name: str, seed: int) -> Verdict:
        verdict = one_trial(site, FAULTS[name], name, seed)
        if not verdict.is_good:
            site.down()  # whatever it has left behind there
        return verdict

    done: list[Done] = []
    with site.up(), contextlib.suppress(KeyboardInterrupt):
        done.extend(run_trials(given.only or list(FAULTS), given.trials, given.seed, try_one, log))
    found = document(done, given.seed)
    print(table(found["rows"]))
    output = given.output or (None if given.only else RESULTS / f"{found['date']}-chaos.json")
    if output and done:
        output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if found["bad"]:
        log(f"{len(found['bad'])} trials were bad; their run folders: {root}")
        return 1
    shutil.rmtree(root, ignore_errors=True)
    return 0 if len(done) == given.trials else 1


if __name__ == "__main__":
    sys.exit(main())
