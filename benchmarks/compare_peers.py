"""Decoding the same prompts with this project and with what people use today, side by side.

    python -m venv .venv-peers && .venv-peers/bin/pip install -r benchmarks/requirements-peers.txt
    python -m venv .venv-vllm  && .venv-vllm/bin/pip install -r benchmarks/requirements-vllm.txt   # read its header
    export HF_HUB_OFFLINE=1 PEERS_VLLM_PYTHON=.venv-vllm/bin/python
    .venv-peers/bin/python benchmarks/compare_peers.py --output-json benchmarks/results/...json
    .venv-peers/bin/python benchmarks/compare_peers.py --dtype float32     # all in float32
    .venv-peers/bin/python benchmarks/compare_peers.py --check             # float32: are the tokens equal?
    .venv-peers/bin/python benchmarks/compare_peers.py --model smollm2-135m --dtype float32 --batch-sizes 32 \
        --engines full transformers transformers-unpacked hf-dynamic      # layers of ours, and of transformers
    .venv-peers/bin/python benchmarks/compare_peers.py --model FOLDER --questions gsm8k.jsonl   # mixed lengths
    .venv-peers/bin/python benchmarks/compare_peers.py --model FOLDER --questions ... --natural --batch-sizes 128
    .venv-peers/bin/python benchmarks/compare_peers.py --model FOLDER --questions ... --natural --schema FILE  # JSON
    .venv-peers/bin/python benchmarks/compare_peers.py --model FOLDER --questions ... --speculative --batch-sizes 8

Neither environment is the project's. vLLM for CPUs needs one of its own; `--vllm-python` or PEERS_VLLM_PYTHON names its
interpreter. Each engine lives in a process of its own; all stay loaded, and one runs at a time while the others are
stopped, in turns (A B C, B C A, ...), so that a drift of the machine meets all alike. Same checkpoint, same token ids,
the same number of tokens out, greedy; with `--natural` answers end at EOS, the whole corpus goes in at once, and an
engine's own tokens count. Loading and one warm-up per batch size are not timed. Figures are medians, ratios
are taken within a round. A peer that is missing or fails is left out, with its reason in the result.

`--model` is a folder in Hugging Face layout, or a released shape (`opt-125m`) for random weights; speed needs no more.
Not here: quality, serving, ceilings of the machine (`jobs.bench`).
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.peer_engines import NATURAL, OURS, Prompts, Spec  # noqa: E402
from benchmarks.peer_inputs import checkpoint, make_prompts, read_questions  # noqa: E402
from benchmarks.peer_worker import Contestant, PeerError  # noqa: E402

HUGGING_FACE = ["hf-dynamic", "hf-static-compiled"]
CPU = {
    "bfloat16": [
        "full",
        "full-int8",
        "skipdecode-2x",
        "skipdecode-2x-int8",
        *HUGGING_FACE,
        "ctranslate2-int8",
        "ctranslate2-int8_bfloat16",
        "ctranslate2-bfloat16",
        "openvino",
        "vllm",
    ],
    "float32": ["full", "skipdecode-2x", *HUGGING_FACE, "ctranslate2-float32", "openvino", "vllm"],
}
SPECULATIVE = ["full", "full-lossless", "hf-dynamic", "hf-prompt-lookup", "hf-assisted", "vllm", "vllm-ngram"]
CUDA = ["full", "skipdecode-2x", *HUGGING_FACE, "vllm"]
KNOWN = sorted(
    {
        *CPU["bfloat16"],
        *CPU["float32"],
        *CUDA,
        *SPECULATIVE,
        *OURS,
        *(f"{name}-int8" for name in OURS if not name.endswith(("lossless", "unpacked"))),
    }
)
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")
CHECKED_ROWS = 32

Row = dict[str, Any]
Errors = dict[str, str]
"""Engine -> why it was left out."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="opt-125m", help="a folder, or a released shape with random weights")
    add("--engines", nargs="+", choices=KNOWN, metavar="NAME", help=f"default: all of device and dtype; {KNOWN}")
    add("--device", default="cpu", choices=["cpu", "cuda"])
    add("--dtype", default="bfloat16", choices=list(CPU))
    add("--batch-sizes", type=int, nargs="+", default=[32, 128])
    add("--questions", type=Path, help="JSONL; rows as messages of a user through --model's chat template")
    add("--column", default="question", help="of --questions")
    add("--limit", type=int, default=128, help="of --questions")
    add("--prompt-tokens", type=int, default=64)
    add("--new-tokens", type=int, default=64)
    add("--rounds", type=int, default=7)
    add("--threads", type=int, default=len(os.sched_getaffinity(0)))
    add("--vllm-python", default=os.environ.get("PEERS_VLLM_PYTHON", sys.executable), help="the interpreter of vLLM")
    add("--natural", action="store_true", help="answers end at EOS; --new-tokens are at most, and --questions needed")
    add("--schema", type=Path, help="with --natural: a JSON schema that answers keep; needs llguidance beside ours")
    add("--speculative", action="store_true", help="engines that draft, beside those they draft for")
    add("--check", action="store_true", help="tokens in float32 instead of speed")
    add("--work", type=Path, help="keeps converted checkpoints (default: a temporary folder)")
    add("--output-json", type=Path)
    args = parser.parse_args(argv)
    if os.sep in args.vllm_python:  # workers start in the root of the project; a link of a venv must stay one
        args.vllm_python = os.path.abspath(args.vllm_python)
    if args.check:
        args.dtype, args.batch_sizes = "float32", [CHECKED_ROWS]
    if args.engines is None:
        args.engines = CPU[args.dtype] if args.device == "cpu" else CUDA
        if args.speculative:
            args.engines = SPECULATIVE
        if args.natural:
            args.engines = [name for name in args.engines if name in NATURAL]
        if args.check:  # what skips layers makes other tokens
            args.engines = [name for name in args.engines if not name.startswith("skipdecode")]
    if args.natural and (args.questions is None or args.check or args.speculative):
        parser.error("--natural: answers to --questions, and without --check and --speculative")
    if args.schema and not args.natural:
        parser.error("--schema: needs --natural, since an answer ends where its JSON does")
    if args.natural and (other := [name for name in args.engines if name not in NATURAL]):
        parser.error(f"--natural: {other[0]} is not among the engines that end at EOS here: {', '.join(NATURAL)}")
    if "full" not in args.engines:
        parser.error("--engines: `full` is what the others are compared with")
    return args


def leave_out(name: str, error: PeerError, errors: Errors, at: str = "") -> None:
    """Without `full` there is nothing to compare with: SystemExit."""
    if name == "full":
        raise SystemExit(f"full: {at}{error}")
    errors[name] = f"{at}{error}"
    say(f"{name}: left out: {errors[name]}")


def start(
    args: argparse.Namespace, model: Path, work: Path, max_batch: int, stack: ExitStack, errors: Errors
) -> list[Contestant]:
    """Loads one engine after the other; `stack` ends them."""
    contestants = []
    for name in args.engines:
        schema = args.schema.read_text(encoding="utf-8") if args.schema else ""
        spec = Spec(name, str(model), str(work), args.dtype, args.device, args.threads, max_batch, args.natural, schema)
        try:
            contestant = Contestant(spec, args.vllm_python if name.startswith("vllm") else sys.executable)
        except PeerError as error:
            leave_out(name, error, errors)
            continue
        contestants.append(stack.enter_context(contestant))
        say(f"{name}: loaded")
    return contestants


def compare(
    args: argparse.Namespace,
    contestants: list[Contestant],
    works: dict[int, Prompts],
    errors: Errors,
    keep: Callable[[list[Row]], None],
) -> None:
    """Times every batch size (with its prompts in `works`) and hands its rows to `keep`.

    An engine that fails is left out from then on, with its reason in `errors`; the others go on. `full` has to last.
    """
    for batch, prompts in works.items():
        rows: list[Row] = []
        seconds, made = time_rounds(args, contestants, prompts, errors)
        for name, own in seconds.items():
            each = [took / made[name] for took in own], [took / made["full"] for took in seconds["full"]]
            ratios = [theirs / ours for theirs, ours in zip(*each, strict=True)]
            row = {
                "engine": name,
                "batch_size": batch,
                "prompts": len(prompts),
                "prompt_tokens": sum(map(len, prompts)) / len(prompts),
                "new_tokens": made[name] / len(prompts),
                "output_tokens_per_s": made[name] / median(own),
                "full_is_faster_by": median(ratios),
                "ratio_range": [min(ratios), max(ratios)],
                "seconds": own,
            }
            rows.append(row)
            say(
                f"batch {batch:4}  {name:26} {row['output_tokens_per_s']:9.0f} tokens/s   full depth is"
                f" {row['full_is_faster_by']:.2f}x as fast ({min(ratios):.2f} to {max(ratios):.2f})"
            )
        keep(rows)


def time_rounds(
    args: argparse.Namespace, contestants: list[Contestant], prompts: Prompts, errors: Errors
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds of every round, and the tokens of one, of the engines that came through all of them; the warm-up before
    is left out."""
    seconds: dict[str, list[float]] = {c.name: [] for c in contestants if c.name not in errors}
    made: dict[str, int] = {}
    for turn in range(-1, args.rounds):
        first = max(turn, 0) % len(contestants)
        for contestant in contestants[first:] + contestants[:first]:
            if contestant.name in errors:
                continue
            try:
                took, tokens = contestant.run(prompts, args.new_tokens)
            except PeerError as error:
                leave_out(contestant.name, error, errors, f"batch {len(prompts)}: ")
                continue
            made[contestant.name] = sum(map(len, tokens))
            if turn >= 0:
                seconds[contestant.name].append(took)
    return {name: own for name, own in seconds.items() if name not in errors}, made


def check(contestants: list[Contestant], prompts: Prompts, num_new: int, errors: Errors) -> list[Row]:
    """float32 at full depth: how many rows are equal, token for token."""
    made = {}
    for contestant in contestants:
        try:
            made[contestant.name] = contestant.run(prompts, num_new)[1]
        except PeerError as error:
            leave_out(contestant.name, error, errors)
    rows = []
    for name, tokens in made.items():
        equal = sum(a == b for a, b in zip(tokens, made["full"], strict=True))
        rows.append({"engine": name, "rows": len(prompts), "equal_rows": equal, "new_tokens": num_new})
        say(f"{name:26} {equal} of {len(prompts)} rows equal")
    return rows


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def describe(args: argparse.Namespace, contestants: list[Contestant], errors: Errors) -> dict[str, Any]:
    """The result without its rows: the machine, what was asked for, and how each engine ran."""
    from skipdecode.backends.choice import cpu_flags

    facts = {c.name: c.facts for c in contestants}
    return {
        "date": date.today().isoformat(),
        "device": args.device,
        "processor": processor(),
        "cpu_flags": [flag for flag in CPU_FLAGS if flag in cpu_flags()],
        "threads": args.threads,
        "backend": facts["full"]["backend"],
        "model": Path(args.model).name,
        "schema": args.schema.name if args.schema else None,
        "dtype": args.dtype,
        "rounds": args.rounds,
        "engines": facts,
        "left_out": errors,
    }


def run(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """The whole comparison; the result is also written to `args.output_json`, after every batch size."""
    model = checkpoint(args.model, work, args.dtype)
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    questions = None if args.questions is None else read_questions(args, model)
    works = {batch: questions or make_prompts(batch, args.prompt_tokens, vocabulary) for batch in args.batch_sizes}
    # how many prompts an engine takes at once is fixed when it is loaded; prompts made here are no more than that
    loads = [works] if questions is None else [{batch: prompts} for batch, prompts in works.items()]
    document: dict[str, Any] = {"rows": []}
    errors: Errors = {}

    def keep(rows: list[Row]) -> None:
        document["rows"] += rows
        if args.output_json:
            args.output_json.write_text(json.dumps(document, indent=1) + "\n")

    for part in loads:
        with ExitStack() as stack:
            contestants = start(args, model, work / f"{model.name}-converted", max(part), stack, errors)
            document |= describe(args, contestants, errors)
            say("our back end: {name} ({reason})".format(**document["backend"]))
            if args.check:
                keep(check(contestants, next(iter(part.values())), args.new_tokens, errors))
            else:
                compare(args, contestants, part, errors, keep)
    return document


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory() as temporary:
        work = (args.work or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        document = run(args, work)
    print(json.dumps(document))


if __name__ == "__main__":
    main()
