"""Checks of decoding: tokens, captures, batches of mixed lengths, and the time of a step against its roofline."""

import random
import time
from copy import copy
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from actors.measuring.bench import random_model
from actors.memory import DeviceMemory
from benchmarks.gpu.check_context import CheckContext, CheckFailed, Found, not_run
from skipdecode.config.model import DecoderConfig
from skipdecode.cost.gpu_specs import MEMORY_SHARE
from skipdecode.cost.predict import num_weights
from skipdecode.cost.roofline import BatchShape, cache_bytes_per_row, predict_s
from skipdecode.engine.cuda_graphs import MAX_GRAPHS, CudaGraphs, plans_of
from skipdecode.engine.generate import generate
from skipdecode.families import config_of
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.from_config import make_schedule
from skipdecode.schedules.schedule import FullDepth

MIN_FRACTION = 0.5  # of the roofline, below which a kernel does not do what it should
MAX_GROWTH = 256 << 20  # bytes that torch may reserve more over batches of mixed lengths
FIRST_BATCHES = 3  # of these, the largest among them; what they reserve stays
ITEMSIZE = 2  # bfloat16
SMALL: dict[str, Any] = {
    "model_type": "opt", "vocab_size": 512, "hidden_size": 256, "ffn_dim": 1024, "num_attention_heads": 4,
    "num_hidden_layers": 4, "max_position_embeddings": 512, "eos_token_id": 2,
}  # fmt: skip


def check_tokens(context: CheckContext) -> Found:
    """float32 tokens of a small model are those of a CPU, greedy and sampled, with graphs and without."""
    torch.backends.cuda.matmul.allow_tf32 = False
    return equal_tokens(context, small_model(SMALL))


@torch.no_grad()
def small_model(raw: dict[str, Any]) -> Decoder:
    """A float32 model on the CPU whose tokens depend on all of its layers, and on all columns of the prompt. Those of
    `random_model` depend on its embeddings alone: norms as small as its weights leave nothing of what layers add."""
    model = random_model(config_of(raw), device="cpu", dtype=torch.float32)
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            weight.fill_(1.0)
        elif weight.dim() == 2 and not name.startswith("embed"):
            weight.mul_(weight.shape[1] ** -0.5 / weight.std())  # products keep the size of their states
    return model


def equal_tokens(context: CheckContext, here: Decoder, swiftkv_from: int | None = None) -> Found:
    """Decodes with a float32 model of SMALL's size on the CPU, moves it to the device, and compares the tokens.
    `swiftkv_from` as in `make_schedule`."""
    lengths, num_new = ([1, 9, 40], 8) if context.is_dry else ([1, 9, 40, 200, 130], 24)
    requests = context.requests(lengths, num_new, here.config.vocab_size)
    drawn = [replace(one, sampling=replace(one.sampling, temperature=0.8, top_p=0.95)) for one in requests]
    decode = {"method": "skipdecode", "max_layers": 3, "min_layers": 2}
    schedule = make_schedule(decode, num_layers=4, max_new_tokens=num_new, swiftkv_from=swiftkv_from)
    kinds = {"greedy": requests, "sampled": drawn}
    wanted = {kind: generate(here, rows, schedule).completions for kind, rows in kinds.items()}
    there = here.to(context.device).pack()
    for kind, rows in kinds.items():
        graphs = CudaGraphs(there, 64 << 20, max_rows=8)
        made = {
            "without graphs": generate(there, rows, schedule).completions,
            "captured": generate(there, rows, schedule, graphs=graphs).completions,
            "replayed": generate(there, rows, schedule, graphs=graphs).completions,
        }
        refuse_failed(graphs)
        for how, completions in made.items():
            pairs = enumerate(zip(completions, wanted[kind], strict=True))
            wrong = [str(row) for row, (made_one, wanted_one) in pairs if made_one.tokens != wanted_one.tokens]
            if wrong:
                rows_named = ", ".join(wrong)
                raise CheckFailed(
                    f"{how}, {kind}: tokens of rows {rows_named} of a small float32 model are not a CPU's"
                )
    return {"rows": len(requests), "tokens": sum(len(c.tokens) for one in wanted.values() for c in one)}


def check_captures(context: CheckContext) -> Found:
    """Checks that every graph (plans x batch sizes) is captured before the first batch."""
    start = time.perf_counter()
    context.model = random_model(context.config, device=str(context.device), dtype=torch.bfloat16).pack()
    made_s = time.perf_counter() - start
    room = context.cache_bytes or DeviceMemory.of(context.device).for_caches(MEMORY_SHARE)
    start = time.perf_counter()
    context.graphs = graphs = CudaGraphs(context.model, room, max_rows=max(context.rows))
    plans, outside = plans_of(context.schedules().values(), context.new_tokens), _outside_torch(context.device)
    graphs.capture_all(plans)
    refuse_failed(graphs)
    expected = min(len(plans) * len(graphs.rungs), MAX_GRAPHS)
    found: Found = {
        "model_s": made_s,
        "capture_s": time.perf_counter() - start,
        "plans": len(plans),
        "rungs": len(graphs.rungs),
        "graphs": graphs.num_graphs,
        "graph_bytes": graphs.graph_bytes,
        "driver_bytes": _outside_torch(context.device)
        - outside,  # what the driver keeps of graphs, and other processes
        "cache_bytes": graphs.nbytes,
    }
    if graphs.num_graphs != expected:
        of = f"{len(plans)} plans at {len(graphs.rungs)} numbers of rows"
        raise CheckFailed(
            f"{graphs.num_graphs} graphs were captured, and {of} are {expected}: {graphs.describe()}", found
        )
    return found


def check_batches(context: CheckContext) -> Found:
    """Checks that ten batches of mixed lengths capture nothing more and that memory does not grow."""
    rng, times, reserved = random.Random(1), [], []
    captured, most = context.graphs.num_captured, context.prompt_tokens
    for number in range(10):
        lengths = [rng.randint(1, most) for _ in range(rng.randint(1, max(context.rows)))]
        if number == 0:  # the largest of all, whose memory serves the others; one row is padded, so there is a mask
            lengths = [1, *[most] * (max(context.rows) - 1)]
        start = time.perf_counter()
        for schedule in context.schedules().values():
            num_new = context.new_tokens if number == 0 else rng.randint(2, context.new_tokens)
            generate(context.model, context.requests(lengths, num_new), schedule, graphs=context.graphs)
        times.append(time.perf_counter() - start)
        reserved.append(reserved_bytes(context.device))
    late = context.graphs.num_captured - captured
    if late:
        raise CheckFailed(f"{late} graphs were captured within ten batches; all of them belong to loading")
    if (growth := max(reserved) - max(reserved[:FIRST_BATCHES])) > MAX_GROWTH:
        raise CheckFailed(f"torch reserved {growth} bytes more over ten batches; something is kept")
    if context.graphs.pool.free_bytes != context.graphs.nbytes:
        raise CheckFailed("caches of batches that have ended are still held")
    return {"seconds": times, "reserved_bytes": reserved}


def check_speed(context: CheckContext) -> Found:
    """Measures a step against the roofline of this device, and the speedup against its prediction."""
    rows = [row for size in context.rows for row in timed(context, size)]
    found: Found = {
        "bytes_per_s": context.ceilings.bytes_per_s,
        "flops_per_s": context.ceilings.flops_per_s,
        "rows": rows,
    }
    slow = [
        f"{row['schedule']} at {row['rows']} rows reaches {row['fraction_of_roofline']:.0%} of the roofline"
        for row in rows
        if context.device.type == "cuda" and row["fraction_of_roofline"] < MIN_FRACTION
    ]
    if slow:
        raise CheckFailed(
            "; ".join(slow) + f"; less than {MIN_FRACTION:.0%} is a kernel that does not do what it should", found
        )
    return found


def check_larger(context: CheckContext) -> Found:
    """Repeats captures and times with the larger model if it fits the device."""
    context.release()
    if context.larger is None:
        return not_run("no larger shape is asked for")
    return captured_and_timed(context, context.larger)


def captured_and_timed(context: CheckContext, config: DecoderConfig) -> Found:
    """The captures and times of another model than the context's, with the numbers of rows that fit beside it."""
    room = context.cache_bytes or DeviceMemory.of(context.device).for_caches(MEMORY_SHARE)
    rows = rows_that_fit(config, context, room)
    if not rows:
        return not_run(f"{room} bytes hold neither its weights nor {min(context.rows)} rows beside them")
    other = copy(context)
    other.config, other.rows = config, rows
    found: Found = {"rows_that_fit": rows, "captures": check_captures(other)}
    try:
        return found | check_speed(other)
    except CheckFailed as wrong:
        raise CheckFailed(wrong.args[0], found | wrong.args[1]) from wrong
    finally:
        other.release()


def rows_that_fit(config: DecoderConfig, context: CheckContext, room: int) -> tuple[int, ...]:
    """The batch sizes whose keys and values fit beside the weights at full depth."""
    full, left = FullDepth(config.num_hidden_layers), room - ITEMSIZE * num_weights(config)
    per_row = cache_bytes_per_row(
        config, full, prompt_columns=context.prompt_tokens, num_new=context.new_tokens, itemsize=ITEMSIZE
    )
    return tuple(rows for rows in context.rows if rows * per_row <= left)


def timed(context: CheckContext, size: int) -> list[dict[str, Any]]:
    """Times full depth and skipping with `size` rows; medians of three runs."""
    requests = context.requests([context.prompt_tokens] * size, context.new_tokens)
    rows: list[dict[str, Any]] = []
    full_s = (0.0, 0.0)
    for name, schedule in context.schedules().items():
        runs = [generate(context.model, requests, schedule, graphs=context.graphs).stats for _ in range(3)]
        measured, steps = median(stats.decode_s for stats in runs), runs[0].decode_steps
        predicted = predict_s(
            context.config,
            schedule,
            context.ceilings,
            BatchShape(context.prompt_tokens, runs[0].batch_rows),
            itemsize=ITEMSIZE,
            weight_itemsize=context.model.weight_itemsize,
            kv_itemsize=context.model.kv_itemsize,
            in_graphs=True,
        )[1]
        full_s = (measured, predicted) if name == "full" else full_s
        prefill = median(stats.prefill_s for stats in runs)
        row = {"rows": size, "schedule": name, "ms_per_step": 1e3 * measured / steps}
        row |= {"fraction_of_roofline": predicted / measured, "speedup": full_s[0] / measured}
        row |= {"predicted_speedup": full_s[1] / predicted, "prefill_s": prefill, "cache_bytes": runs[0].cache_bytes}
        rows.append(row | {"tokens_per_s": runs[0].output_tokens / (prefill + measured)})
    return rows


def reserved_bytes(device: torch.device) -> int:
    """Device memory that torch has reserved, in use or not."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def _outside_torch(device: torch.device) -> int:
    """Device memory in use by anything but torch in this process."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return int(total) - int(free) - reserved_bytes(device)


def refuse_failed(graphs: CudaGraphs) -> None:
    if graphs.failure is not None:
        raise CheckFailed(f"a decode step cannot be captured: {graphs.failure}")
