"""What `sampling.repetition_detection` ends: texts that are no loops, which it should not, and answers that are.

`texts`: solutions of GSM8K, as they are and as lists, and their numbers as tables of 2 to 12 columns: how many of each
kind the detection would end, by `min_pattern_size` and `min_count`. `answers`: rows per second of a model that goes on
with the questions, with the detection and without, in turns, and how many answers it ends. The last line on stdout is
one JSON document.

    python -m benchmarks.loop_stop --source MODEL --questions gsm8k/test.jsonl --output benchmarks/results/x.json
    python -m benchmarks.loop_stop --source MODEL --questions gsm8k/test.jsonl --rows 0    # only the texts
"""

import argparse
import datetime
import itertools
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from actors.memory import freeze_gc
from pipeline.cluster.machine import provenance
from pipeline.cluster.pool import num_cores
from skipdecode.checkpoint.model_config import read_config
from skipdecode.checkpoint.tokenizer import Tokenizer
from skipdecode.checkpoint.weights import load_model
from skipdecode.config.sampling import RepetitionDetection, Sampling
from skipdecode.engine.generate import generate_continuous
from skipdecode.engine.request import REPETITION, RepetitionSearch, Request
from skipdecode.engine.results import BatchResult
from skipdecode.model.devices import choose_dtype, dtype_name
from skipdecode.schedules.schedule import FullDepth

LONGEST = 20
"""Tokens of the longest pattern that is searched for, as in docs/corpus.md."""
SETTINGS = [(1, 2), (1, 4), (1, 8), (1, 12), (1, 16), (4, 4), (8, 3), (8, 4), (10, 4)]
"""`min_pattern_size` and `min_count`."""
COLUMNS, LINES = range(2, 13), 4
"""Of tables; the head is a line of its own."""


def texts(solutions: Sequence[str]) -> dict[str, list[str]]:
    """Texts that are no loops, by their kind; one of each solution."""
    lines = [solution.splitlines() for solution in solutions]
    numbers = itertools.cycle(re.findall(r"\d+(?:\.\d+)?", "\n".join(solutions)))
    tables = []
    for number in range(len(solutions)):
        columns = COLUMNS[number % len(COLUMNS)]
        head = [f"step {column + 1}" for column in range(columns)]
        tables.append([head, *(list(itertools.islice(numbers, columns)) for _ in range(LINES))])
    return {
        "solutions": list(solutions),
        "numbered lists": ["\n".join(f"{at}. {line}" for at, line in enumerate(own, 1)) for own in lines],
        "bullet lists": ["\n".join(f"- {line}" for line in own) for own in lines],
        "Markdown tables": [markdown(table) for table in tables],
        "Markdown tables in columns": [markdown(in_columns(table)) for table in tables],
        "CSV": ["\n".join(",".join(row) for row in table) for table in tables],
        "HTML tables": ["\n".join(f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in table) for table in tables],
    }


def markdown(table: Sequence[Sequence[str]]) -> str:
    head, *rows = table
    rule = ["-" * max(3, len(cell)) for cell in head]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))


def in_columns(table: Sequence[Sequence[str]]) -> list[list[str]]:
    """The cells with blanks behind them, so that columns are straight."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in table]


def is_ended(tokens: Sequence[int], detection: RepetitionDetection) -> bool:
    """Whether the detection ends an answer of these tokens early."""
    search = RepetitionSearch(detection)
    return any(search.push(tokens[: end + 1]) for end in range(len(tokens) - 1))


def false_stops(kinds: dict[str, list[str]], tokenizer: Tokenizer) -> dict[str, dict[str, int]]:
    """By kind and setting, how many texts the detection would end, and how many there are."""
    found: dict[str, dict[str, int]] = {}
    for kind, own in kinds.items():
        tokens = tokenizer.encode_rendered(own)
        detections = {
            f"{least} tokens, {count} times": RepetitionDetection(LONGEST, least, count) for least, count in SETTINGS
        }
        found[kind] = {name: sum(is_ended(one, each) for one in tokens) for name, each in detections.items()}
        found[kind]["texts"] = len(own)
        print(kind, found[kind], file=sys.stderr, flush=True)
    return found


def answers(arguments: argparse.Namespace, prompts: list[list[int]]) -> dict[str, Any]:
    """Rows per second with the detection and without, in turns."""
    device = torch.device("cpu")
    dtype = choose_dtype(arguments.dtype, device)
    model = load_model(arguments.source, device="cpu", dtype=dtype).pack()
    freeze_gc()  # as a worker does
    schedule = FullDepth(model.config.num_hidden_layers)
    detection = RepetitionDetection(LONGEST, arguments.min_pattern_size, arguments.min_count)
    plain = Sampling(arguments.new_tokens)
    samplings = {"with": Sampling(arguments.new_tokens, repetition_detection=detection), "without": plain}

    def decode(name: str) -> tuple[BatchResult, float, float]:
        requests = [Request(str(at), tokens, samplings[name]) for at, tokens in enumerate(prompts)]
        used, begun = time.process_time(), time.perf_counter()
        result = generate_continuous(model, requests, schedule, max_rows=arguments.batch)
        return result, time.perf_counter() - begun, time.process_time() - used

    rates: dict[str, list[float]] = {name: [] for name in samplings}
    cpu_rates: dict[str, list[float]] = {name: [] for name in samplings}
    made: dict[str, BatchResult] = {}
    for repeat in range(arguments.repeats):
        for name in list(samplings)[:: 1 if repeat % 2 else -1]:
            made[name], seconds, cpu_seconds = decode(name)
            rates[name].append(len(prompts) / seconds)
            cpu_rates[name].append(len(prompts) / cpu_seconds)
    pairs = zip(made["with"].completions, made["without"].completions, strict=True)
    assert all(one.tokens == other.tokens[: len(one.tokens)] for one, other in pairs), "ended, and the same before"
    line = {
        "rows": len(prompts),
        "min_pattern_size": arguments.min_pattern_size,
        "min_count": arguments.min_count,
        "ended_as_loops": sum(row.finish_reason == REPETITION for row in made["with"].completions),
        "tokens": {name: result.stats.output_tokens for name, result in made.items()},
        "rows_per_s": rates,
        "rows_per_cpu_s": cpu_rates,
        "gain": median(a / b for a, b in zip(rates["with"], rates["without"], strict=True)),
        "gain_cpu": median(a / b for a, b in zip(cpu_rates["with"], cpu_rates["without"], strict=True)),
    }
    print(json.dumps(line), file=sys.stderr, flush=True)
    return line | {"dtype": dtype_name(dtype), "new_tokens": arguments.new_tokens, "batch": arguments.batch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True, help="a checkpoint; its tokenizer makes the tokens of the texts")
    parser.add_argument("--questions", type=Path, required=True, help="JSONL with `question` and `answer` (GSM8K)")
    parser.add_argument("--texts", type=int, default=1000, help="of each kind")
    parser.add_argument("--rows", type=int, default=128, help="that the model answers; 0: none")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=512, help="of a row at most")
    parser.add_argument("--min-pattern-size", type=int, default=1)
    parser.add_argument("--min-count", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=num_cores())
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tokenizer = Tokenizer(arguments.source, read_config(arguments.source))
    lines = [json.loads(line) for line in arguments.questions.read_text(encoding="utf-8").splitlines()]
    document = provenance(torch.device("cpu")) | {
        "date": datetime.date.today().isoformat(),
        "source": str(arguments.source),
        "longest_pattern": LONGEST,
        "texts": false_stops(texts([line["answer"] for line in lines[: arguments.texts]]), tokenizer),
    }
    if arguments.rows:
        prompts = tokenizer.encode([line["question"] for line in lines[: arguments.rows]])
        document["answers"] = answers(arguments, prompts)
    if arguments.output:
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
