"""Checks beside transformers: equal tokens in float32, also of models that transformers' own layers run, and the speed
of its `generate`."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from actors.measuring.bench import random_model
from benchmarks.gpu.check_context import CheckContext, CheckFailed, Found, not_run
from benchmarks.gpu.subprocess_checks import ROOT, absent, missing
from benchmarks.peer_engines import Prompts, Spec
from benchmarks.peer_worker import Contestant, PeerError
from skipdecode.checkpoint.weights import load_model, save_model
from skipdecode.config.sampling import Sampling
from skipdecode.engine.generate import generate
from skipdecode.engine.request import Request
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.from_config import make_schedule
from skipdecode.schedules.schedule import FullDepth, Schedule

DEMO = "models/opt-e2e"
CHAT = "outputs/demo-chat/SmolLM2-135M-Instruct.Q4_1.gguf"
"""Where `skipdecode demo --chat` keeps SmolLM2."""
ROWS, PROMPTS, NEW = 64, (4, 96), 64
DRY_ROWS, DRY_NEW = 4, 6
NEAR_TIE = 2e-3
"""Logits nearer to each other than this are a tie in float32, whose sums differ in their order."""
OURS = "full"
PEERS, DRY_PEERS = ("hf-static-compiled",), ("hf-dynamic",)
"""Engines of `benchmarks.peer_engines`; a dry run does not wait for torch's compiler."""
PAGED = "hf-generate-batch"
ENGINE_S, DRY_BYTES = 50.0, 4 << 30
"""What an engine may take beside `generate_batch`, which once took 9 GB of a host and gave no answer."""
THREADS = 8
WRAPPED = {"n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": 512, "vocab_size": 512, "initializer_range": 0.2}
"""A GPT-2, which no family of ours takes."""


def check_exact(context: CheckContext) -> Found:
    """Greedy float32 tokens of real weights at full depth are those of transformers on the same device, but where two
    logits tie. Of the demo model, and of SmolLM2 or the checkpoint asked for, if it is there."""
    context.release()
    if why := missing(("transformers",)):
        return not_run(why)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    chosen = context.checkpoint or (CHAT if absent((CHAT,)) is None else None)
    found: Found = {"models": {}}
    for source in dict.fromkeys([DEMO, chosen] if chosen else [DEMO]):
        with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
            path = Path(source) if Path(source).is_absolute() else ROOT / source
            if not path.exists():
                return not_run(f"there is no {path}")
            loaded = load_model(path, device=context.device, dtype=torch.float32)
            save_model(loaded, folder)  # transformers reads folders alone
            found["models"][source] = equal_to_transformers(context, loaded.pack(), Path(folder))  # type: ignore[index]
        context.note(found)
    wrong = {name: one["wrong_rows"] for name, one in found["models"].items() if one["wrong_rows"]}  # type: ignore[attr-defined]
    if wrong:
        raise CheckFailed(f"rows with other tokens than transformers: {wrong}", found)
    return found


def check_wrapped(context: CheckContext) -> Found:
    """A model that no family takes, with its layers from transformers: greedy float32 tokens are transformers' own, and
    fewer layers run too."""
    context.release()
    if why := missing(("transformers",)):
        return not_run(why)
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(context.seed)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        GPT2LMHeadModel(GPT2Config(**WRAPPED, bos_token_id=1, eos_token_id=2)).save_pretrained(folder)
        model = load_model(folder, device=context.device, dtype=torch.float32).pack()
        found = equal_to_transformers(context, model, Path(folder))
        fast = make_schedule({"method": "skipdecode", "speedup": 2}, num_layers=4, max_new_tokens=DRY_NEW)
        found["tokens_at_2x"] = sum(len(row) for row in decoded(model, prompts(context, model)[:4], DRY_NEW, fast))
    if found["wrong_rows"]:
        raise CheckFailed(f"{found['wrong_rows']} rows have other tokens than transformers", found)
    return found


def prompts(context: CheckContext, model: Decoder) -> Prompts:
    """Random ones of several lengths."""
    count, (least, most) = (DRY_ROWS if context.is_dry else ROWS), PROMPTS
    lengths = [least + (most - least) * row // count for row in range(count)]
    return [one.prompt_tokens for one in context.requests(lengths, 1, model.config.vocab_size)]


def decoded(model: Decoder, chosen: Prompts, num_new: int, schedule: Schedule) -> list[list[int]]:
    sampling = Sampling(max_new_tokens=num_new, ignore_eos=True)
    requests = [Request(str(row), prompt, sampling) for row, prompt in enumerate(chosen)]
    return [one.tokens for one in generate(model, requests, schedule).completions]


@torch.inference_mode()
def equal_to_transformers(context: CheckContext, model: Decoder, folder: Path) -> dict[str, Any]:
    """How many rows have the tokens of transformers for `folder`, where they part only by a tie, and where they do not.

    transformers scores each of our rows in one pass: each token must be the most likely one behind those before it.
    """
    from transformers import AutoModelForCausalLM

    num_new = DRY_NEW if context.is_dry else NEW
    chosen = prompts(context, model)
    made = decoded(model, chosen, num_new, FullDepth(model.config.num_hidden_layers))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(context.device).eval()
    ties = wrong = 0
    for prompt, tokens in zip(chosen, made, strict=True):
        ids = torch.tensor([[*prompt, *tokens]], device=context.device)
        logits = theirs(ids).logits[0, len(prompt) - 1 : -1]
        behind = logits.max(dim=-1).values - logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        most = float(behind.max())
        ties += 0 < most <= NEAR_TIE
        wrong += most > NEAR_TIE
    return {"rows": len(made), "new_tokens": num_new, "ties": int(ties), "wrong_rows": int(wrong)}


def check_peers(context: CheckContext) -> Found:
    """Times transformers' `generate`, compiled with a static cache, on the same device, prompts and number of tokens as
    our full depth; each in a process of its own."""
    context.release()
    if why := missing(("transformers",)):
        return not_run(why)
    rows = min(context.rows) if context.is_dry else max(context.rows)
    chosen = [one.prompt_tokens for one in context.requests([context.prompt_tokens] * rows, 1)]
    dtype, threads = ("float32", 1) if context.is_dry else ("bfloat16", THREADS)
    found: Found = {"rows": rows, "prompt_tokens": context.prompt_tokens, "new_tokens": context.new_tokens}
    speeds: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        save_model(random_model(context.config, device=str(context.device), dtype=getattr(torch, dtype)), folder)
        context.release()
        for name in (OURS, *(DRY_PEERS if context.is_dry else PEERS)):
            spec = Spec(name, folder, folder, dtype, context.device.type, threads, rows)
            found[name] = one = timed_engine(spec, chosen, context.new_tokens)
            if "tokens_per_s" in one:
                speeds[name] = float(str(one["tokens_per_s"]))
            context.note(found)
    if OURS not in speeds:
        raise CheckFailed("our own engine did not run", found)
    best = max((name for name in speeds if name != OURS), key=lambda name: speeds[name], default=None)
    if best is None:
        raise CheckFailed("none of transformers' engines ran", found)
    found["speedup_over_best"] = speeds[OURS] / speeds[best]
    if context.device.type == "cuda" and speeds[OURS] < speeds[best]:
        raise CheckFailed(f"{best} makes {speeds[best]:.0f} tokens/s, and we {speeds[OURS]:.0f}", found)
    return found


def check_generate_batch(context: CheckContext) -> Found:
    """Times transformers' continuous batching on the same device, prompts of many lengths and number of tokens as our
    full depth; each in a process of its own, which ends in time and takes no more of the host's memory than it may. Of
    the model with grouped heads, since OPT's code in transformers does not take a cache in pages."""
    context.release()
    if why := missing(("transformers",)):
        return not_run(why)
    least, most = context.corpus_prompts
    rows = DRY_ROWS if context.is_dry else 2 * max(context.rows)
    lengths = [least + (most - least) * row // rows for row in range(rows)]
    config = context.grouped or context.config
    chosen = [one.prompt_tokens for one in context.requests(lengths, 1, config.vocab_size)]
    dtype, threads = ("float32", 1) if context.is_dry else ("bfloat16", THREADS)
    found: Found = {"rows": rows, "prompt_tokens": [least, most], "new_tokens": context.new_tokens}
    speeds = []
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        save_model(random_model(config, device=str(context.device), dtype=getattr(torch, dtype)), folder)
        context.release()
        for name in (OURS, PAGED):
            spec = Spec(name, folder, folder, dtype, context.device.type, threads, max(context.rows))
            limits = {"limit_s": context.patience * ENGINE_S, "memory_bytes": DRY_BYTES if context.is_dry else None}
            found[name] = one = timed_engine(spec, chosen, context.new_tokens, **limits)
            context.note(found)
            if "refused" in one and name == OURS:
                raise CheckFailed(f"our own engine did not run: {one['refused']}", found)
            if "refused" in one:
                return found | not_run(f"transformers' generate_batch: {one['refused']}")
            speeds.append(float(str(one["tokens_per_s"])))
    found["speedup_over_generate_batch"] = speeds[0] / speeds[1]
    if context.device.type == "cuda" and speeds[0] < speeds[1]:
        raise CheckFailed(f"generate_batch makes {speeds[1]:.0f} tokens/s, and we {speeds[0]:.0f}", found)
    return found


def timed_engine(spec: Spec, chosen: Sequence[list[int]], num_new: int, **limits: Any) -> Found:
    """Tokens per second of the second of two runs, and the seconds of the first; `refused` says why an engine fails.
    `limits` as in `Contestant`."""
    try:
        with Contestant(spec, **limits) as engine:
            first_s, _ = engine.run(list(chosen), num_new)
            seconds, tokens = engine.run(list(chosen), num_new)
    except PeerError as error:
        return {"refused": str(error)}
    return {"first_s": first_s, "seconds": seconds, "tokens_per_s": sum(map(len, tokens)) / seconds}
