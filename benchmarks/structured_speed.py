"""What structured outputs cost: the same rows with a JSON schema and without one, in turns, as a worker decodes them.

A batch is kept full until no row is left, and rows end by themselves, or at `--new-tokens`. A row without a schema gets
as many tokens as the same row has with it, so that both decode the same steps with the same rows in them; what differs
is how a token is chosen. The ratio of tokens per second, prompts included, is taken within each turn: of wall time, and
of CPU time, which other processes disturb less. The last line on stdout is one JSON document.

    python -m benchmarks.structured_speed --source MODEL --questions gsm8k/test.jsonl --output benchmarks/results/x.json
    python -m benchmarks.structured_speed --source MODEL --questions gsm8k/test.jsonl --schema FILE --temperature 1
"""

import argparse
import datetime
import json
import sys
import time
from pathlib import Path
from statistics import median

import torch

from actors.memory import freeze_gc
from pipeline.cluster.machine import provenance
from pipeline.cluster.pool import num_cores
from skipdecode.checkpoint.model_config import read_config
from skipdecode.checkpoint.tokenizer import Tokenizer
from skipdecode.checkpoint.weights import load_model
from skipdecode.config.sampling import Sampling
from skipdecode.engine.generate import generate_continuous
from skipdecode.engine.request import Request
from skipdecode.engine.results import BatchResult
from skipdecode.model.devices import choose_dtype, dtype_name
from skipdecode.schedules.schedule import FullDepth

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["arithmetic", "ratio", "time", "money"]},
        "steps": {"type": "array", "items": {"type": "string", "maxLength": 60}, "minItems": 1, "maxItems": 3},
        "answer": {"type": "integer"},
        "unit": {"type": "string", "maxLength": 12},
        "is_certain": {"type": "boolean"},
    },
    "required": ["kind", "steps", "answer", "unit", "is_certain"],
    "additionalProperties": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True, help="a checkpoint")
    parser.add_argument("--questions", type=Path, required=True, help="JSONL with `question` (GSM8K)")
    parser.add_argument("--schema", type=Path, help="a JSON schema, in place of one of five properties")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=160, help="of a row at most")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=num_cores())
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device("cpu")
    dtype = choose_dtype(arguments.dtype, device)
    model = load_model(arguments.source, device="cpu", dtype=dtype).pack()
    freeze_gc()  # as a worker does
    tokenizer = Tokenizer(arguments.source, read_config(arguments.source))
    lines = arguments.questions.read_text(encoding="utf-8").splitlines()[: arguments.rows]
    prompts = tokenizer.encode([f"{json.loads(line)['question']}\nJSON:" for line in lines])
    schema = json.loads(arguments.schema.read_text(encoding="utf-8")) if arguments.schema else SCHEMA
    plain = Sampling(arguments.new_tokens, arguments.temperature)
    asked = plain.with_parameters({"structured_outputs": {"json": schema}})
    assert asked.structured_outputs is not None
    grammar = tokenizer.grammars.compile(asked.structured_outputs)
    full = FullDepth(model.config.num_hidden_layers)
    with_schema = [Request(str(at), prompt, asked, grammar=grammar) for at, prompt in enumerate(prompts)]

    def decode(requests: list[Request]) -> tuple[BatchResult, float, float]:
        used, begun = time.process_time(), time.perf_counter()
        result = generate_continuous(model, requests, full, max_rows=arguments.batch)
        return result, time.perf_counter() - begun, time.process_time() - used

    first, _, _ = decode(with_schema)
    without = [
        Request(str(at), prompt, Sampling(len(made.tokens), arguments.temperature, ignore_eos=True))
        for at, (prompt, made) in enumerate(zip(prompts, first.completions, strict=True))
    ]
    decode(without)
    rounds: list[dict[str, float]] = []
    for number in range(arguments.rounds):
        made = {}
        for name in ("with", "without")[:: 1 if number % 2 else -1]:
            made[name] = decode(with_schema if name == "with" else without)
        (ours, wall_s, cpu_s), (theirs, plain_wall_s, plain_cpu_s) = made["with"], made["without"]
        assert ours.stats.output_tokens == theirs.stats.output_tokens, "the same lengths"
        assert ours.stats.decode_steps == theirs.stats.decode_steps, "and steps"
        rounds.append(
            {
                "tokens_per_s": ours.stats.output_tokens / wall_s,
                "plain_tokens_per_s": theirs.stats.output_tokens / plain_wall_s,
                "ratio": plain_wall_s / wall_s,
                "ratio_cpu": plain_cpu_s / cpu_s,
                "ms_of_a_step": 1e3 * plain_cpu_s / theirs.stats.decode_steps,
                "more_ms_of_a_step": 1e3 * (cpu_s - plain_cpu_s) / ours.stats.decode_steps,
            }
        )
        print(json.dumps(rounds[-1]), file=sys.stderr, flush=True)
    completions = first.completions
    document = provenance(device) | {
        "date": datetime.date.today().isoformat(),
        "source": str(arguments.source),
        "dtype": dtype_name(dtype),
        "threads": arguments.threads,
        "batch": arguments.batch,
        "temperature": arguments.temperature,
        "rows": len(completions),
        "ended": sum(row.finish_reason == "stop" for row in completions),
        "valid": sum(bool(row.is_valid) for row in completions),
        "tokens": first.stats.output_tokens,
        "rows_in_a_step": first.stats.row_steps / first.stats.decode_steps,
        "ratio": median(one["ratio"] for one in rounds),
        "ratio_cpu": median(one["ratio_cpu"] for one in rounds),
        "rounds": rounds,
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
