"""Decoding the same prompts with this project and with what people use today, side by side.

Needs an environment of its own (`requirements-peers.txt`); each engine lives in a process of its own, all stay loaded,
and one runs at a time, in turns (A B C, B C A, ...), so that a drift of the machine meets all alike. Same checkpoint,
same token ids in, the same number of tokens out. Figures are medians, ratios are taken within a round.

    .venv-peers/bin/python benchmarks/compare_peers.py --model FOLDER --output-json benchmarks/results/...json
    .venv-peers/bin/python benchmarks/compare_peers.py --check        # float32: are the tokens equal?

`--model` is a folder in Hugging Face layout, or a released shape (`opt-125m`) for random weights; speed needs no more.
"""

import argparse
import json
import multiprocessing as mp
import platform
import random
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

Prompts = list[list[int]]
Engine = Callable[[Prompts, int], list[list[int]]]
"""Prompts of equal length and the number of new tokens -> the new tokens of each."""

CPU = [
    "full",
    "full-int8",
    "skipdecode-2x",
    "skipdecode-2x-int8",
    "hf-dynamic",
    "hf-static-compiled",
    "ctranslate2-int8",
    "ctranslate2-int8_bfloat16",
    "ctranslate2-bfloat16",
    "openvino",
]
CUDA = ["full", "skipdecode-2x", "hf-dynamic", "hf-static-compiled", "vllm"]
OURS = {"full": {"method": "full"}} | {
    f"skipdecode-{s}x": {"method": "skipdecode", "speedup": float(s)} for s in (2, 3, 4, 5)
}
"""Each also with `-int8` behind its name."""


def make_engine(name: str, model: Path, work: Path, dtype: str, device: str, threads: int) -> Engine:
    import torch

    torch.set_num_threads(threads)
    if (plain := name.removesuffix("-int8")) in OURS:
        return ours(OURS[plain], model, getattr(torch, dtype), device, "int8" if plain != name else None)
    if name.startswith("hf-"):
        return hugging_face(model, getattr(torch, dtype), device, is_static=name == "hf-static-compiled")
    if name.startswith("ctranslate2-"):
        return ctranslate2(model, work, name.partition("-")[2] if dtype != "float32" else "float32", threads)
    if name == "openvino":
        return openvino(model, work, dtype, threads)
    if name == "vllm":
        return vllm(model, dtype)
    raise SystemExit(f"engine {name!r} is not one of {sorted({*CPU, *CUDA, *OURS})}")


def ours(decode: dict[str, Any], folder: Path, dtype: Any, device: str, quantization: Any) -> Engine:
    from skipdecode.generate import Request, generate
    from skipdecode.sampling import Sampling
    from skipdecode.schedule import make_schedule
    from skipdecode.step_graphs import step_graphs
    from skipdecode.weights import load_opt

    model = load_opt(folder, device=device, dtype=dtype).pack(quantization)
    graphs = step_graphs(model)
    layers = model.config.num_hidden_layers

    def run(prompts: Prompts, num_new: int) -> list[list[int]]:
        schedule = make_schedule(decode, num_layers=layers, max_new_tokens=num_new, kv_layers=None)
        sampling = Sampling(max_new_tokens=num_new, ignore_eos=True)
        requests = [Request(str(i), prompt, sampling) for i, prompt in enumerate(prompts)]
        return [c.tokens for c in generate(model, requests, schedule, graphs=graphs).completions]

    return run


def hugging_face(folder: Path, dtype: Any, device: str, *, is_static: bool) -> Engine:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    model.generation_config.eos_token_id = None  # as many tokens as asked for
    if is_static and device == "cpu":  # on CUDA transformers compiles by itself
        import torch._inductor.config

        torch._inductor.config.freezing = True  # weights packed, as ours are
        model.forward = torch.compile(model.forward, dynamic=False)

    def run(prompts: Prompts, num_new: int) -> list[list[int]]:
        tokens = torch.tensor(prompts, device=device)
        more = {"cache_implementation": "static"} if is_static else {}
        made = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=num_new,
            do_sample=False,
            pad_token_id=1,
            **more,
        )
        return made[:, tokens.shape[1] :].tolist()

    return run


def ctranslate2(folder: Path, work: Path, kind: str, threads: int) -> Engine:
    import ctranslate2 as ct2
    from transformers import AutoTokenizer

    target = work / f"ctranslate2-{kind}"
    if not target.is_dir():
        ct2.converters.TransformersConverter(str(folder)).convert(str(target), quantization=kind)
    words = AutoTokenizer.from_pretrained(folder).convert_ids_to_tokens
    generator = ct2.Generator(str(target), device="cpu", compute_type=kind, intra_threads=threads, inter_threads=1)

    def run(prompts: Prompts, num_new: int) -> list[list[int]]:
        start = [words(prompt) for prompt in prompts]
        results = generator.generate_batch(
            start,
            max_length=num_new,
            min_length=num_new,
            sampling_topk=1,
            include_prompt_in_result=False,
            max_batch_size=len(prompts),
        )
        return [r.sequences_ids[0] for r in results]

    return run


def openvino(folder: Path, work: Path, dtype: str, threads: int) -> Engine:
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    target = work / "openvino"
    if not target.is_dir():
        from openvino_tokenizers import convert_tokenizer
        from optimum.intel.openvino import OVModelForCausalLM
        from transformers import AutoTokenizer

        OVModelForCausalLM.from_pretrained(folder, export=True, compile=False, load_in_8bit=False).save_pretrained(
            target
        )
        pair = convert_tokenizer(AutoTokenizer.from_pretrained(folder), with_detokenizer=True)
        for part, name in zip(pair, ("openvino_tokenizer", "openvino_detokenizer"), strict=True):
            ov.save_model(part, target / f"{name}.xml")
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_batched_tokens, scheduler.max_num_seqs, scheduler.cache_size = 8192, 512, 4
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
    if dtype == "float32":
        properties |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    pipe = genai.ContinuousBatchingPipeline(str(target), scheduler, "CPU", properties)

    def run(prompts: Prompts, num_new: int) -> list[list[int]]:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = num_new, True, False
        tensors = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        return [list(r.m_generation_ids[0]) for r in pipe.generate(tensors, [config] * len(prompts))]

    return run


def vllm(folder: Path, dtype: str) -> Engine:
    from vllm import LLM, SamplingParams

    llm = LLM(str(folder), dtype=dtype, enable_prefix_caching=False)

    def run(prompts: Prompts, num_new: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
        made = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [list(r.outputs[0].token_ids) for r in made]

    return run


def serve(pipe: Any, name: str, *args: Any) -> None:
    """The process of one engine: makes it, then answers (prompts, new tokens) with (seconds, tokens)."""
    try:
        engine = make_engine(name, *args)
        pipe.send("ready")
        while (order := pipe.recv()) is not None:
            start = time.perf_counter()
            tokens = engine(*order)
            pipe.send((time.perf_counter() - start, tokens))
    except EOFError:
        return  # nobody asks any more
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}"[:500])


class Contestant:
    def __init__(self, name: str, *args: Any) -> None:
        self.name = name
        self._pipe, other = mp.get_context("spawn").Pipe()
        mp.get_context("spawn").Process(target=serve, args=(other, name, *args), daemon=True).start()
        other.close()  # so that a process that dies is the end of the pipe
        answer = self._receive()
        self.error = None if answer == "ready" else answer

    def _receive(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            return "its process died"

    def run(self, prompts: Prompts, num_new: int) -> tuple[float, list[list[int]]]:
        time.sleep(0.3)  # threads of the one before may still spin
        self._pipe.send((prompts, num_new))
        answer = self._receive()
        if isinstance(answer, str):
            raise RuntimeError(f"{self.name}: {answer}")
        if [len(row) for row in answer[1]] != [num_new] * len(prompts):
            raise RuntimeError(f"{self.name}: not {num_new} tokens each")
        return answer


def compare(
    args: argparse.Namespace,
    contestants: list[Contestant],
    vocabulary: int,
    errors: dict[str, str],
    keep: Callable[[list[dict[str, Any]]], None],
) -> None:
    """Times every batch size and hands the rows so far to `keep` after each.

    An engine that fails is left out from then on, with its reason in `errors`; the others go on. `full` has to last.
    """
    rows: list[dict[str, Any]] = []
    seconds: dict[str, list[float]] = {}

    def timed(contestant: Contestant, prompts: Prompts) -> None:
        if contestant.name in errors:
            return
        try:
            seconds[contestant.name].append(contestant.run(prompts, args.new_tokens)[0])
        except (RuntimeError, OSError) as error:
            if contestant.name == "full":
                raise
            errors[contestant.name] = f"batch {len(prompts)}: {error}"
            print(f"{contestant.name}: left out from here on: {error}", file=sys.stderr, flush=True)

    for batch in args.batch_sizes:
        rng = random.Random(batch)
        prompts = [[2, *(rng.randrange(4, vocabulary) for _ in range(args.prompt_tokens - 1))] for _ in range(batch)]
        seconds |= {c.name: [] for c in contestants}
        for contestant in contestants:
            timed(contestant, prompts)  # warms up, compiles
        seconds |= {c.name: [] for c in contestants}
        for turn in range(args.rounds):
            for contestant in contestants[turn % len(contestants) :] + contestants[: turn % len(contestants)]:
                timed(contestant, prompts)
        for contestant in contestants:
            if contestant.name in errors:
                continue
            own = seconds[contestant.name]
            ratios = [theirs / ours for theirs, ours in zip(own, seconds["full"], strict=True)]
            row = {
                "engine": contestant.name,
                "batch_size": batch,
                "prompt_tokens": args.prompt_tokens,
                "new_tokens": args.new_tokens,
                "output_tokens_per_s": batch * args.new_tokens / median(own),
                "full_is_faster_by": median(ratios),
                "ratio_range": [min(ratios), max(ratios)],
                "seconds": own,
            }
            rows.append(row)
            print(
                f"batch {batch:4}  {contestant.name:26} {row['output_tokens_per_s']:9.0f} tokens/s"
                f"   full depth is {row['full_is_faster_by']:.2f}x as fast ({min(ratios):.2f} to {max(ratios):.2f})",
                file=sys.stderr,
                flush=True,
            )
        keep(rows)


def check(contestants: list[Contestant], prompts: Prompts, num_new: int) -> list[dict[str, Any]]:
    """float32 at full depth: how many rows are equal, token for token."""
    made = {c.name: c.run(prompts, num_new)[1] for c in contestants}
    rows = []
    for name, tokens in made.items():
        equal = sum(a == b for a, b in zip(tokens, made["full"], strict=True))
        rows.append({"engine": name, "rows": len(prompts), "equal_rows": equal, "new_tokens": num_new})
        print(f"{name:26} {equal} of {len(prompts)} rows equal", file=sys.stderr)
    return rows


def checkpoint(source: str, work: Path, dtype: str) -> Path:
    """The folder itself; or random weights of a released shape, with the demo model's tokenizer padded to its size."""
    if Path(source).is_dir():
        return Path(source)
    import torch

    from actors.bench import random_model
    from skipdecode.config import OPTConfig
    from skipdecode.weights import save_opt

    target = work / source
    if not (target / "config.json").is_file():
        config = OPTConfig.released(source)
        save_opt(random_model(config, device="cpu", dtype=getattr(torch, dtype)), target)
        words = {f"w{i}": i for i in range(config.vocab_size)} | {"</s>": 2, "<pad>": 1}
        names = {i: w for w, i in words.items()}
        (target / "vocab.json").write_text(json.dumps({names[i]: i for i in sorted(names)}))
        (target / "merges.txt").write_text("#version: 0.2\n")
    return target


def packages() -> dict[str, str]:
    found = {}
    for name in ("torch", "transformers", "ctranslate2", "openvino-genai", "optimum-intel", "vllm"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="opt-125m", help="a folder, or a released shape with random weights")
    parser.add_argument("--engines", nargs="+", help="default: all of the device")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=len(__import__("os").sched_getaffinity(0)))
    parser.add_argument("--check", action="store_true", help="tokens in float32 instead of speed")
    parser.add_argument("--work", type=Path, help="keeps converted checkpoints (default: a temporary folder)")
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        model = checkpoint(args.model, work, args.dtype)
        names = args.engines or (CPU if args.device == "cpu" else CUDA)
        if args.check:
            args.dtype = "float32"
            names = [n for n in names if not n.startswith(("skipdecode", "full-int8", "ctranslate2"))]
            names.append("ctranslate2-float32")
        assert "full" in names, "`full` is what the others are compared with"
        converted = work / f"{Path(args.model).name}-converted"
        contestants, errors = [], {}
        for name in names:
            contestant = Contestant(name, model, converted, args.dtype, args.device, args.threads)
            if contestant.error is None:
                contestants.append(contestant)
            else:
                if name == "full":
                    raise SystemExit(f"full: {contestant.error}")
                errors[name] = contestant.error
                print(f"{name}: left out: {contestant.error}", file=sys.stderr)
        vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
        document = {
            "date": date.today().isoformat(),
            "device": args.device,
            "processor": processor(),
            "threads": args.threads,
            "packages": packages(),
            "model": Path(args.model).name,
            "dtype": args.dtype,
            "rounds": args.rounds,
            "left_out": errors,
        }

        def keep(rows: list[dict[str, Any]]) -> None:
            document["rows"] = rows
            if args.output_json:
                args.output_json.write_text(json.dumps(document, indent=1) + "\n")

        if args.check:
            rng = random.Random(0)
            prompts = [[2, *(rng.randrange(4, vocabulary) for _ in range(args.prompt_tokens - 1))] for _ in range(32)]
            keep(check(contestants, prompts, args.new_tokens))
        else:
            compare(args, contestants, vocabulary, errors, keep)
    print(json.dumps(document))


if __name__ == "__main__":
    main()
