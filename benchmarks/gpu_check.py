"""The first minutes on a GPU: `python -m benchmarks.gpu_check`, or `make gpu`. Needs no Ray and no pydantic.

Checks one thing after the other, from what must hold (the device counts, tokens are those of a CPU, steps can be
captured) to what should (memory stays flat, speed is near its prediction). It stops at the first that is wrong, with a
sentence that says what. All that was found until then goes into one JSON under benchmarks/results/. Exit codes: 0 all
is well; 1 something is wrong; 2 there is no GPU.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import torch

from actors.bench import random_model
from actors.devices import DeviceMemory
from skipdecode.backends.device import backend_on
from skipdecode.config import DecoderConfig
from skipdecode.cost import measure_ceilings, predict_s
from skipdecode.decoder import Decoder
from skipdecode.families import config_of, released
from skipdecode.generate import Request, generate
from skipdecode.gpus import MEMORY_SHARE
from skipdecode.plan import FullDepth, Schedule
from skipdecode.sampling import Sampling
from skipdecode.schedule import make_schedule
from skipdecode.step_graphs import StepGraphs, plans_of

RESULTS = Path(__file__).parent / "results"
MIN_FRACTION = 0.5  # of the roofline, below which a kernel does not do what it should
MAX_GROWTH = 256 << 20  # bytes that torch may reserve more over batches of mixed lengths
SMALL = {
    "model_type": "opt", "vocab_size": 512, "hidden_size": 256, "ffn_dim": 1024, "num_attention_heads": 4,
    "num_hidden_layers": 4, "max_position_embeddings": 512, "eos_token_id": 2,
}  # fmt: skip

Found = dict[str, object]


class Wrong(Exception):
    """What is wrong, as a sentence."""


@dataclass
class Bench:
    """What checks share: the device, the shape that is timed, and the model once it is made."""

    device: torch.device
    config: DecoderConfig
    rows: tuple[int, ...] = (64, 256)
    prompt_tokens: int = 128
    new_tokens: int = 128
    cache_bytes: int | None = None
    """For graphs; None: the share of the device that a worker takes."""
    seed: int = 0
    model: Decoder = field(init=False)
    graphs: StepGraphs = field(init=False)

    @property
    def layers(self) -> int:
        return self.config.num_hidden_layers

    def schedules(self) -> dict[str, Schedule]:
        fast = {"method": "skipdecode", "max_layers": -(-2 * self.layers // 3), "min_layers": -(-self.layers // 3)}
        made = make_schedule(fast, num_layers=self.layers, max_new_tokens=self.new_tokens)
        return {"full": FullDepth(self.layers), "skipdecode 2x": made}

    def requests(self, lengths: Sequence[int], num_new: int, vocab: int | None = None) -> list[Request]:
        rng = random.Random(self.seed + len(lengths))
        vocab = vocab or self.config.vocab_size
        sampling = Sampling(max_new_tokens=num_new, ignore_eos=True)
        return [Request(str(i), [rng.randrange(4, vocab) for _ in range(n)], sampling) for i, n in enumerate(lengths)]


def check_device(bench: Bench) -> Found:
    """The device counts, and there is room on it."""
    if torch.ones(1 << 20, device=bench.device).sum().item() != 1 << 20:
        raise Wrong("the device adds up a million ones to another number; it or its driver is broken")
    found: Found = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "backend": type(backend_on(bench.device)).__name__,
    }
    if bench.device.type == "cuda":
        memory, (major, minor) = DeviceMemory.of(bench.device), torch.cuda.get_device_capability(bench.device)
        found |= {"name": torch.cuda.get_device_name(bench.device), "capability": f"{major}.{minor}"}
        found |= {"memory_bytes": memory.total, "free_bytes": memory.free}
        if memory.free < memory.total // 2:
            raise Wrong(
                f"others hold {memory.total - memory.free} of {memory.total} bytes of the device; free it first"
            )
    return found


def check_kernels(bench: Bench) -> Found:
    """Steps can be captured at all: kernels read their bounds on the device."""
    if not backend_on(bench.device).reads_tables:
        raise Wrong(
            "the kernels here read no bounds on the device, so steps cannot be CUDA graphs; install triton and unset "
            "SKIPDECODE_KERNELS"
        )
    if torch.backends.cuda.cudnn_sdp_enabled():
        raise Wrong("cuDNN's attention is on: it builds a plan for nearly every step; skipdecode.backends turns it off")
    return {"reads_tables": True}


def check_tokens(bench: Bench) -> Found:
    """float32 tokens of a small model are those of a CPU, with graphs and without."""
    config = config_of(SMALL)
    torch.backends.cuda.matmul.allow_tf32 = False
    here = random_model(config, device="cpu", dtype=torch.float32)
    requests = bench.requests([1, 9, 40, 200, 130], 24, config.vocab_size)
    schedule = make_schedule(
        {"method": "skipdecode", "max_layers": 3, "min_layers": 2}, num_layers=4, max_new_tokens=24
    )
    wanted = generate(here, requests, schedule).completions
    there = here.to(bench.device).pack()
    graphs = StepGraphs(there, 64 << 20, max_rows=8)
    made = {
        "without graphs": generate(there, requests, schedule).completions,
        "captured": generate(there, requests, schedule, graphs=graphs).completions,
        "replayed": generate(there, requests, schedule, graphs=graphs).completions,
    }
    _refuse_failed(graphs)
    for how, completions in made.items():
        pairs = enumerate(zip(completions, wanted, strict=True))
        wrong = [str(row) for row, (made_one, wanted_one) in pairs if made_one.tokens != wanted_one.tokens]
        if wrong:
            raise Wrong(f"{how}: tokens of rows {', '.join(wrong)} of a small float32 model are not those of a CPU")
    return {"rows": len(requests), "tokens": sum(len(c.tokens) for c in wanted)}


def check_captures(bench: Bench) -> Found:
    """Every graph of the shape is captured ahead of the first batch."""
    start = time.perf_counter()
    bench.model = random_model(bench.config, device=str(bench.device), dtype=torch.bfloat16).pack()
    made_s = time.perf_counter() - start
    room = bench.cache_bytes or DeviceMemory.of(bench.device).for_caches(MEMORY_SHARE)
    start = time.perf_counter()
    bench.graphs = StepGraphs(bench.model, room, max_rows=max(bench.rows))
    bench.graphs.capture_all(plans_of(bench.schedules().values(), bench.new_tokens))
    _refuse_failed(bench.graphs)
    return {
        "model_s": made_s,
        "capture_s": time.perf_counter() - start,
        "graphs": bench.graphs.num_graphs,
        "graph_bytes": bench.graphs.graph_bytes,
        "cache_bytes": bench.graphs.nbytes,
    }


def check_batches(bench: Bench) -> Found:
    """Ten batches of mixed lengths: nothing more is captured, memory stays, steps by graphs equal those without."""
    rng, times, reserved = random.Random(1), [], []
    captured, most = bench.graphs.num_captured, bench.prompt_tokens
    for number in range(10):
        lengths = [rng.randint(1, most) for _ in range(rng.randint(1, max(bench.rows)))]
        lengths[0] = most if number == 0 else lengths[0]
        start = time.perf_counter()
        for schedule in bench.schedules().values():
            generate(
                bench.model, bench.requests(lengths, rng.randint(2, bench.new_tokens)), schedule, graphs=bench.graphs
            )
        times.append(time.perf_counter() - start)
        reserved.append(torch.cuda.memory_reserved(bench.device) if bench.device.type == "cuda" else 0)
    late = bench.graphs.num_captured - captured
    if late:
        raise Wrong(f"{late} graphs were captured within ten batches; all of them belong to loading")
    if max(reserved) - reserved[1] > MAX_GROWTH:
        raise Wrong(f"torch reserved {max(reserved) - reserved[1]} bytes more over ten batches; something is kept")
    if bench.graphs.pool.free_bytes != bench.graphs.nbytes:
        raise Wrong("caches of batches that have ended are still held")
    return {"seconds": times, "reserved_bytes": reserved}


def check_speed(bench: Bench) -> Found:
    """Milliseconds of a step beside the roofline of this very device, and the speedup beside its prediction."""
    ceilings = measure_ceilings(str(bench.device), "bfloat16")
    rows: list[Found] = []
    slow = []
    for size in bench.rows:
        requests, full_s = bench.requests([bench.prompt_tokens] * size, bench.new_tokens), [0.0, 0.0]
        for name, schedule in bench.schedules().items():
            runs = [generate(bench.model, requests, schedule, graphs=bench.graphs).stats for _ in range(3)]
            measured = median(stats.decode_s for stats in runs)
            predicted = predict_s(
                bench.config, schedule, ceilings, prompt_columns=bench.prompt_tokens, batch_rows=runs[0].batch_rows,
                itemsize=2, in_graphs=True,
            )[1]  # fmt: skip
            full_s = [measured, predicted] if name == "full" else full_s
            row: Found = {"rows": size, "schedule": name, "ms_per_step": 1e3 * measured / runs[0].decode_steps}
            row |= {"fraction_of_roofline": predicted / measured, "speedup": full_s[0] / measured}
            rows.append(
                row | {"predicted_speedup": full_s[1] / predicted, "prefill_s": median(s.prefill_s for s in runs)}
            )
            if predicted / measured < MIN_FRACTION and bench.device.type == "cuda":
                slow.append(f"{name} at {size} rows reaches {predicted / measured:.0%} of the roofline")
    found: Found = {"bytes_per_s": ceilings.bytes_per_s, "flops_per_s": ceilings.flops_per_s, "rows": rows}
    if slow:
        raise Wrong(
            "; ".join(slow) + f"; less than {MIN_FRACTION:.0%} is a kernel that does not do what it should", found
        )
    return found


def _refuse_failed(graphs: StepGraphs) -> None:
    if graphs.failure is not None:
        raise Wrong(f"a decode step cannot be captured: {graphs.failure}")


Check = Callable[[Bench], Found]
CHECKS: dict[str, Check] = {
    "device": check_device,
    "kernels": check_kernels,
    "tokens": check_tokens,
    "captures": check_captures,
    "batches": check_batches,
    "speed": check_speed,
}


def run_checks(bench: Bench, checks: dict[str, Check], note: Callable[[str], None]) -> dict[str, object]:
    """What each found, in order, until the first that is wrong: `wrong` names it, and None says that all is well."""
    document: dict[str, object] = {"wrong": None}
    for name, check in checks.items():
        start = time.perf_counter()
        try:
            document[name] = check(bench)
        except Exception as error:  # whatever it is, it is what is wrong
            sentence = str(error.args[0]) if isinstance(error, Wrong) else f"{type(error).__name__}: {error}"
            document["wrong"] = f"{name}: {sentence}"
            document[name] = error.args[1] if isinstance(error, Wrong) and len(error.args) > 1 else None
            note(f"WRONG: {document['wrong']}")
            break
        note(f"{name}: well ({time.perf_counter() - start:.1f} s)")
    return document


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="opt-1.3b", help="of the model that is timed, random weights")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="FOLDER")
    arguments = parser.parse_args(argv)

    def note(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    if not torch.cuda.is_available():
        note(f"no GPU: torch {torch.__version__} sees none; run this where there is one")
        return 2
    device = torch.device("cuda")
    document = run_checks(Bench(device, released(arguments.shape)), CHECKS, note)
    today = datetime.now(UTC).date().isoformat()
    name = torch.cuda.get_device_name(device)
    document = {"date": today, "device": name, "shape": arguments.shape, "wrong": document.pop("wrong")} | {
        "checks": document
    }
    file = arguments.output / f"{today}-gpu-check-{name.lower().replace(' ', '-').replace('/', '-')}.json"
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    note(f"written: {file}")
    print(json.dumps(document))
    return 0 if document["wrong"] is None else 1


if __name__ == "__main__":
    sys.exit(main())
