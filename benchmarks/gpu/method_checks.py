"""Checks of what else a corpus uses beside greedy steps of a model like OPT: heads that share keys and values, sampled
tokens, SwiftKV, and prompts that begin alike."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from actors.measuring.bench import random_model
from actors.memory import DeviceMemory
from benchmarks.gpu.check_context import CheckContext, CheckFailed, Found, not_run
from benchmarks.gpu.decoding_checks import ITEMSIZE, SMALL, captured_and_timed, equal_tokens, small_model
from skipdecode.backends.cuda_kernels import PREFIX_ROWS
from skipdecode.config.model import DecoderConfig
from skipdecode.cost.gpu_specs import MEMORY_SHARE
from skipdecode.cost.roofline import BatchShape, Ceilings, predict_s
from skipdecode.engine.cuda_graphs import CudaGraphs
from skipdecode.engine.generate import generate
from skipdecode.engine.prefix_sharing import share_prefixes
from skipdecode.engine.request import Request
from skipdecode.engine.results import BatchStats, Completion
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.schedule import FullDepth, Schedule, SwiftKVPrefill

SMALL_GROUPED: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 4, "max_position_embeddings": 512, "eos_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
DRAWN = {"drawn": {"temperature": 0.8}, "drawn, top_p": {"temperature": 0.8, "top_p": 0.95}}
MAX_DRAW_MS = 5.0
"""Milliseconds of a step that drawing may take; more is a kernel that does not do what it should."""
MAX_OF_PROMPTS = 0.8
"""The share of the time of prompts that SwiftKV with half of the layers may take."""
HEAD = 0.8
"""The share of a prompt that all rows have in common."""
MAX_OF_SHARED = 0.7
"""The share of the time of prompts, and of that of steps, that may be left when four fifths of each are shared."""
REPEATS = 3


def check_grouped(context: CheckContext) -> Found:
    """Where query heads share keys and values: tokens of a small float32 model are a CPU's; captures and times of a
    large one."""
    context.release()
    torch.backends.cuda.matmul.allow_tf32 = False
    small = equal_tokens(context, small_model(SMALL_GROUPED))
    if context.grouped is None:
        return not_run("no such shape is asked for") | {"tokens": small}
    found: Found = {"tokens": small}
    context.note(found)
    return found | captured_and_timed(context, context.grouped)


def check_sampled(context: CheckContext) -> Found:
    """Drawn tokens repeat with their seed, are tokens of the vocabulary, and cost little beside greedy ones."""
    rows, found = max(context.rows), dict[str, object]()
    requests = context.requests([context.prompt_tokens] * rows, context.new_tokens)
    full = FullDepth(context.layers)

    def decoded(keys: dict[str, float]) -> tuple[float, list[list[int]]]:
        drawn = [replace(one, sampling=replace(one.sampling, **keys)) for one in requests]  # type: ignore[arg-type]
        runs = [generate(context.model, drawn, full, graphs=context.graphs) for _ in range(REPEATS)]
        tokens = [[one.tokens for one in run.completions] for run in runs]
        if any(other != tokens[0] for other in tokens):
            raise CheckFailed("the same batch with the same seeds has other tokens the second time", found)
        return median(1e3 * run.stats.decode_s / run.stats.decode_steps for run in runs), tokens[0]

    greedy_ms, greedy = decoded({})
    found |= {"rows": rows, "vocabulary": context.config.vocab_size, "greedy_ms": greedy_ms}
    for name, keys in DRAWN.items():
        ms, tokens = decoded(keys)
        found[name] = {"ms": ms, "more_ms": ms - greedy_ms, "different": len({tuple(row) for row in tokens})}
        context.note(found)
        if not all(0 <= token < context.config.vocab_size for row in tokens for token in row):
            raise CheckFailed(f"{name}: a token is outside the vocabulary", found)
        if tokens == greedy:
            raise CheckFailed(f"{name}: every token is the most likely one", found)
        if context.device.type == "cuda" and ms - greedy_ms > MAX_DRAW_MS:
            raise CheckFailed(f"{name}: a step takes {ms - greedy_ms:.1f} ms more than a greedy one", found)
    return found


def check_swiftkv(context: CheckContext) -> Found:
    """SwiftKV: tokens of a small float32 model are a CPU's; prompts of a large one take what their layers cost."""
    context.release()
    torch.backends.cuda.matmul.allow_tf32 = False
    small = small_model(SMALL_GROUPED).with_swiftkv(2)
    found: Found = {"tokens": equal_tokens(context, small, swiftkv_from=2)}
    context.note(found)
    if context.grouped is None:
        return not_run("no shape of grouped heads is asked for") | found
    ceilings = context.ceilings  # before the model takes the memory
    layers, rows, columns = context.grouped.num_hidden_layers, min(context.rows), context.context_tokens // 2
    kept = -(-layers // 2)
    model = random_model(context.grouped, device=str(context.device), dtype=torch.bfloat16).with_swiftkv(kept).pack()
    full = FullDepth(layers)
    schedules: dict[str, Schedule] = {"full": full, "swiftkv": SwiftKVPrefill(full, kept)}
    shape = BatchShape(columns, [rows])
    predicted = {
        name: predict_s(model.config, schedule, ceilings, shape, itemsize=ITEMSIZE)[0]
        for name, schedule in schedules.items()
    }
    found |= {"rows": rows, "prompt_tokens": columns, "predicted_s": predicted, "prompts_s": {}}
    found["predicted_of_full"] = predicted["swiftkv"] / predicted["full"]
    context.note(found)
    requests = context.requests([columns] * rows, 2, context.grouped.vocab_size)
    seconds: dict[str, float] = found["prompts_s"]  # type: ignore[assignment]
    for name, schedule in schedules.items():
        generate(model, requests, schedule)  # compiles what is not compiled yet
        seconds[name] = median(generate(model, requests, schedule).stats.prefill_s for _ in range(REPEATS))
        context.note(found)
    found["of_full"] = share = seconds["swiftkv"] / seconds["full"]
    if context.device.type == "cuda" and share > MAX_OF_PROMPTS:
        raise CheckFailed(f"with half of the layers prompts take {share:.0%} of the time", found)
    return found


def check_prefixes(context: CheckContext) -> Found:
    """Prompts that begin alike: a small float32 model has the same tokens whether their head is run once or by each;
    in a large one it saves time, of prompts and of steps."""
    context.release()
    torch.backends.cuda.matmul.allow_tf32 = False
    small = small_model(SMALL).to(context.device).pack()
    alike = beginning_alike(context, 8, 60, small.config.vocab_size)
    apart, together = (_with_head(small, alike, 48, shares=shares)[0] for shares in (False, True))
    wrong = sum(ours.tokens != theirs.tokens for ours, theirs in zip(together, apart, strict=True))
    found: Found = {"rows": len(alike), "wrong_rows": wrong}
    if wrong:
        raise CheckFailed(f"{wrong} of {len(alike)} rows have other tokens when their head is run once", found)
    ceilings = context.ceilings  # before the model takes the memory
    columns, rows = context.context_tokens // 2, min(context.rows)
    requests, head = beginning_alike(context, rows, columns, context.config.vocab_size), int(HEAD * columns) // 2 * 2
    found["predicted"] = predicted = steps_behind(context.config, ceilings, requests, head)
    context.note(found)
    model = random_model(context.config, device=str(context.device), dtype=torch.bfloat16).pack()
    room = context.cache_bytes or DeviceMemory.of(context.device).for_caches(MEMORY_SHARE)
    graphs = CudaGraphs(model, room, max_rows=rows)
    for shares in (False, True):
        runs = [_with_head(model, requests, head, shares=shares, graphs=graphs)[1] for _ in range(REPEATS + 1)]
        times = {"prompts_s": median(run.prefill_s for run in runs), "decode_s": median(run.decode_s for run in runs)}
        found["run once" if shares else "run by each"] = times | {"tokens_saved": runs[0].prefix_tokens_saved}
        context.note(found)
    for kind in ("prompts", "decode"):
        ratio = found["run once"][f"{kind}_s"] / found["run by each"][f"{kind}_s"]  # type: ignore[index]
        found[f"{kind}_of_apart"] = ratio
        if context.device.type == "cuda" and ratio > MAX_OF_SHARED:
            raise CheckFailed(
                f"with four fifths of each prompt shared, {kind} takes {ratio:.0%} of the time; predicted: {predicted}",
                found,
            )
    return found


def steps_behind(config: DecoderConfig, ceilings: Ceilings, requests: Sequence[Request], head: int) -> Found:
    """Bytes that a decode step reads and milliseconds that it takes, by the cost model at the device's rates, where
    each row reads its own copy of the head and where groups of rows read it together."""
    prompts = [request.prompt_tokens for request in requests]
    sharing, full = share_prefixes(prompts, [[head]] * len(prompts)), FullDepth(config.num_hidden_layers)
    assert sharing is not None
    once = sharing.shape(prompts, copies=False, group_rows=PREFIX_ROWS)
    of_column, rows = 2 * ITEMSIZE * config.kv_dim * config.num_hidden_layers, len(prompts)
    found: Found = {}
    for name, shape in (("run by each", None), ("run once", once)):
        batch = BatchShape(len(prompts[0]), [rows], shared_prefixes=shape)
        _, step_s = predict_s(config, full, ceilings, batch, itemsize=ITEMSIZE, in_graphs=True)
        columns = rows * (len(prompts[0]) + 1) - (shape.columns_read_once if shape else 0)
        found[name] = {"kv_bytes": columns * of_column, "ms_per_step": 1e3 * step_s}
    return found


def beginning_alike(context: CheckContext, rows: int, columns: int, vocab: int) -> list[Request]:
    """Rows whose prompts have HEAD of their tokens in common."""
    requests = context.requests([columns] * rows, min(8, context.new_tokens), vocab)
    head = requests[0].prompt_tokens[: int(HEAD * columns)]
    return [replace(one, prompt_tokens=[*head, *one.prompt_tokens[len(head) :]]) for one in requests]


def _with_head(
    model: Decoder, requests: Sequence[Request], head: int, *, shares: bool, graphs: CudaGraphs | None = None
) -> tuple[list[Completion], BatchStats]:
    prompts = [request.prompt_tokens for request in requests]
    sharing = share_prefixes(prompts, [[head]] * len(prompts)) if shares else None
    result = generate(model, requests, FullDepth(model.config.num_hidden_layers), graphs=graphs, sharing=sharing)
    return result.completions, result.stats
