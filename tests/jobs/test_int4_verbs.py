"""`model.quantization: int4` through the verbs that decode: a folder, whose weights are quantised as they load, and a
GGUF file, whose blocks are kept. Tokens are those of the generator alone, whose products `test_cpu_blocks` compares."""

import json
from collections.abc import Callable
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.generator import Generator
from actors.generator_config import GeneratorConfig
from jobs import doctor, evaluate, generate, verify
from skipdecode.backends import choice
from skipdecode.checkpoint import gguf_file
from skipdecode.checkpoint.weights import load_model
from skipdecode.config.sampling import Sampling
from skipdecode.engine.request import Request
from skipdecode.engine.results import Completion
from tests.support.family_tokenizers import SENTENCEPIECE_SPECIAL, sentencepiece
from tests.support.gguf_models import Writer, add_sentencepiece, random_model, write_model
from tests.support.lora_adapters import merge_by_hand, write_adapter
from tests.support.pipeline_runs import read, write_jsonl
from tests.support.service_helpers import local, make_endpoint
from tests.support.verbs import Call

pytestmark = pytest.mark.skipif(choice.choose().no_int4 is not None, reason="needs a back end with int4 weights")

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 400, "num_hidden_layers": 4}
SHAPE |= {"max_position_embeddings": 128}
PROMPTS = [f"The Golden Otter serves {n} dishes near Willow Station" for n in range(6)]
PLAIN = ["model.quantization=int4", "model.dtype=float32", "decode.method=full", "sampling.max_new_tokens=8"]
FULL: dict[str, object] = {"method": "full"}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def extra(writer: Writer) -> None:
        add_sentencepiece(writer, sentencepiece("metaspace"), SENTENCEPIECE_SPECIAL)

    return write_model(tmp_path_factory.mktemp("gguf") / "m.gguf", random_model("llama", **SHAPE), "Q4_1", extra=extra)


@pytest.fixture
def folder(checkpoint_factory: Callable[..., Path]) -> Path:
    return checkpoint_factory("1.3b")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [{"id": f"r{n}", "prompt": text} for n, text in enumerate(PROMPTS)]
    return write_jsonl(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", rows)


def offline(source: Path, decode: dict[str, object] = FULL, **keys: object) -> dict[str, list[int]]:
    generator = Generator(GeneratorConfig(str(source), decode, dtype="float32", quantization="int4", **keys))  # type: ignore[arg-type]
    requests = [Request(f"r{n}", ids, Sampling(8)) for n, ids in enumerate(generator.tokenizer.encode(PROMPTS))]
    answers = zip(requests, generator(requests).answers, strict=True)
    return {request.id: one.tokens for request, one in answers if isinstance(one, Completion)}


def tokens_in(run: Path) -> dict[str, list[int]]:
    return {id: row["generated_tokens"] for id, row in read(run).items()}


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_generate_resume_and_evaluate(
    kind: str, prompts: Path, tmp_path: Path, call: Call, request: pytest.FixtureRequest
) -> None:
    source: Path = request.getfixturevalue(kind)
    run = tmp_path / "run"
    arguments = ["-i", prompts, "-o", run, f"model.source={source}", *PLAIN, "actors.batch_size=2"]
    arguments += ["actors.window_batches=1"]
    code, document, err = call(generate, *arguments)
    assert code == 0, err
    assert document["completed"] == len(PROMPTS)
    made = tokens_in(run)
    assert made == offline(source)

    for path in sorted((run / "data/status=ok").glob("*.parquet"))[::2]:
        path.unlink()
    state = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(state | {"state": "interrupted"}))  # as a killed driver leaves it
    assert 0 < len(tokens_in(run)) < len(made)
    code, _, err = call(generate, *arguments, "--resume")
    assert code == 0, err
    assert tokens_in(run) == made
    assert call(verify, run)[0] == 0
    code, document, _ = call(generate, *arguments, "--resume", "model.quantization=null")
    assert (code, document["error"].partition(":")[0]) == (2, "model.quantization")

    references = write_jsonl(tmp_path / "references.jsonl", [{"prompt": text, "reference": "fish"} for text in PROMPTS])
    scoring = [run, "--references", references, "--prompt-column", "prompt", "--reference-column", "reference"]
    code, document, err = call(evaluate, *scoring)
    assert code == 0, err
    assert 0 < document["loss"] < 20


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_lossless_decoding_has_the_tokens_of_full_depth(kind: str, request: pytest.FixtureRequest) -> None:
    source: Path = request.getfixturevalue(kind)
    half = {"method": "skipdecode", "max_layers": 3, "min_layers": 2, "lossless": True}
    assert offline(source, half, deterministic=True) == offline(source)


@pytest.mark.parametrize("scheduler", ["cohort", "continuous"])
def test_serve(scheduler: str, file: Path) -> None:
    decode: dict[str, object] = {"method": "skipdecode", "max_layers": 3, "min_layers": 2, "horizon": 7}
    generator = Generator(GeneratorConfig(str(file), decode, dtype="float32", quantization="int4"))
    endpoint = make_endpoint(generator, engine={"scheduler": scheduler})
    asked = {"prompt": PROMPTS, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    try:
        with local(endpoint) as url:
            answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=60)
    finally:
        endpoint.close()
    assert answer.status_code == 200, answer.text
    made = {f"r{n}": one["token_ids"] for n, one in enumerate(answer.json()["choices"])}
    assert made == offline(file, decode)


def test_doctor(file: Path, tmp_path: Path, call: Call) -> None:
    code, document, err = call(doctor, f"model.source={file}", *PLAIN, "-o", tmp_path / "run")
    assert (code, document["problems"]) == (0, []), err


def test_an_adapter_is_merged_before_weights_are_quantised(folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    modules = [f"model.decoder.layers.{i}.fc1" for i in range(6)]
    adapter = write_adapter(tmp_path / "adapter", model, dict.fromkeys(modules, 4), target_modules=["fc1"])
    merged = tmp_path / "merged"
    merge_by_hand(model, adapter, dict.fromkeys(modules, 2.0)).save_pretrained(merged)
    (merged / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    assert offline(folder, adapter=str(adapter)) == offline(merged) != offline(folder)


def test_an_adapter_for_kept_blocks_ends_the_verb(file: Path, prompts: Path, tmp_path: Path, call: Call) -> None:
    modules = [f"model.layers.{i}.self_attn.q_proj" for i in range(4)]
    adapter = write_adapter(tmp_path / "adapter", random_model("llama", **SHAPE), dict.fromkeys(modules, 4))
    arguments = ["-i", prompts, "-o", tmp_path / "run", f"model.source={file}", f"model.adapter={adapter}", *PLAIN]
    code, document, _ = call(generate, *arguments)
    assert (code, document["error"].partition(":")[0]) == (2, "model.adapter")
    assert "take the original checkpoint, or model.quantization=null or int8" in document["error"]
    with pytest.raises(ValueError, match=r"^adapter: the file has its weights in blocks"):
        load_model(file, adapter=adapter, quantization="int4")


@pytest.mark.parametrize(
    ("damage", "problem"),
    [("a block", "broken.gguf: "), ("its end", "broken.gguf: no GGUF file that can be read: it is truncated: ")],
)
def test_a_damaged_file_ends_the_verb_before_it_begins(
    damage: str, problem: str, file: Path, prompts: Path, tmp_path: Path, call: Call
) -> None:
    broken, name = tmp_path / "broken.gguf", "blk.1.ffn_down.weight"
    broken.write_bytes(file.read_bytes())
    info = next(info for _, info in gguf_file.weights(broken) if info.name == name)
    with broken.open("r+b") as opened:
        if damage == "a block":
            opened.seek(info.start + 20 * 37)
            opened.write(np.float16(np.nan).tobytes())
        else:
            opened.truncate(info.start + 20 * 37)
    code, document, _ = call(generate, "-i", prompts, "-o", tmp_path / "run", f"model.source={broken}", *PLAIN)
    assert code == 2
    assert f"{problem}tensor {name!r}" in document["error"]
