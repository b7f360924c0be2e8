"""Every verb on a small Llama (two heads of keys for four of queries, llama3 scaling) and on a GGUF file.

What a model of another family could break between the decoder and the user: keys of OPT's configuration, tokenizers,
folders that are written. How well a verb does its work, its own tests say.
"""

import json
from pathlib import Path

import httpx2 as httpx
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from actors.generator import Generator
from actors.generator_config import GeneratorConfig
from jobs import calibrate, distill, doctor, evaluate, finetune, generate, retry
from skipdecode.checkpoint.weights import load_model
from skipdecode.config.sampling import Sampling
from skipdecode.engine.request import Request
from skipdecode.engine.results import Completion
from skipdecode.model.decoder import Decoder
from skipdecode.model.teacher_forcing import teacher_batch, teacher_forced_logits
from skipdecode.schedules.schedule import FullDepth
from tests.support.family_tokenizers import SENTENCEPIECE_SPECIAL, sentencepiece
from tests.support.finetune_helpers import curve
from tests.support.gguf_models import Writer, add_sentencepiece, random_model, write_model
from tests.support.service_helpers import local, make_endpoint
from tests.support.verbs import Call

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 400, "num_hidden_layers": 4}
SHAPE |= {"max_position_embeddings": 128}
SCALING = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALING |= {"original_max_position_embeddings": 32}
PROMPTS = [f"The Golden Otter serves {n} dishes near Willow Station" for n in range(6)]
PLAIN = ["model.dtype=float32", "decode.method=full", "sampling.max_new_tokens=8"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return sentencepiece("metaspace")


@pytest.fixture(scope="module")
def llama(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    random_model("llama", rope_parameters=SCALING, **SHAPE).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def file(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its weights are in blocks of 8 bits."""

    def extra(writer: Writer) -> None:
        add_sentencepiece(writer, tokenizer, SENTENCEPIECE_SPECIAL)

    return write_model(tmp_path_factory.mktemp("gguf") / "m.gguf", random_model("llama", **SHAPE), "Q8_0", extra=extra)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """PROMPTS, and one that is too long."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"id": f"r{n}", "prompt": text} for n, text in enumerate(PROMPTS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"id": "long", "prompt": "word " * 300}]))
    return path


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = [{"prompt": f"say {word}", "response": word * 2} for word in ("ab", "cd", "ef", "gh")] * 16
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def reference_of(source: Path) -> PreTrainedModel:
    """transformers' model of a folder or file."""
    own = {"gguf_file": source.name} if source.is_file() else {}
    folder = source.parent if source.is_file() else source
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **own).eval()


def rows_of(run: Path) -> dict[str, list[int]]:
    files = sorted((run / "data/status=ok").glob("*.parquet"))
    return {row["id"]: row["generated_tokens"] for path in files for row in pq.ParquetFile(path).read().to_pylist()}


def offline(source: Path, decode: dict[str, object], **keys: object) -> dict[str, list[int]]:
    generator = Generator(GeneratorConfig(str(source), decode, dtype="float32", num_threads=1, **keys))  # type: ignore[arg-type]
    tokens = generator.tokenizer.encode(PROMPTS)
    answers = generator([Request(f"r{n}", ids, Sampling(8)) for n, ids in enumerate(tokens)]).answers
    return {f"r{n}": one.tokens for n, one in enumerate(answers) if isinstance(one, Completion)}


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "file"])
def test_generate_and_retry(
    kind: str, prompts: Path, tmp_path: Path, call: Call, request: pytest.FixtureRequest
) -> None:
    """Tokens are those of transformers; the row that was too long is generated when it may be cut."""
    source: Path = request.getfixturevalue(kind)
    run = tmp_path / "run"
    settings = [*PLAIN, "actors.batch_size=4", "limits.max_failed_rows=1"]
    code, document, err = call(generate, "-i", prompts, "-o", run, f"model.source={source}", *settings)
    assert code == 0, err
    assert (document["completed"], document["failed"]) == (6, 1)
    reference, made = reference_of(source), rows_of(run)
    assert len({token for tokens in made.values() for token in tokens}) > 8, "a constant proves little"
    ids = Generator(GeneratorConfig(str(source), {"method": "full"}, dtype="float32")).tokenizer.encode(PROMPTS)
    for n, prompt in enumerate(ids):
        whole = reference.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
        assert made[f"r{n}"] == whole[0, len(prompt) :].tolist()
    code, document, err = call(retry, run, "input.too_long=truncate_left")
    assert code == 0, err
    assert (document["tried"], document["recovered"], document["completed"]) == (1, 1, 7)


def recipe(source: Path, pairs: Path, output: Path, *more: str) -> list[str]:
    data = f"data={{path: {pairs}, validation: {pairs}}}"
    train = "train={epochs: 4, batch_size: 32, learning_rate: 0.003, warmup_steps: 2, log_every: 1, validate_every: 8, "
    train += "checkpoint_every: 8, horizon: 3, precision: float32}"
    keys = ["workers.threads=1", "output.dtype=float32", "-o", str(output)]
    return [f"model.source={source}", data, train, *keys, *more]


def logits_of(model: Decoder | PreTrainedModel) -> torch.Tensor:
    """After BOS and a few tokens, at full depth."""
    tokens = torch.tensor([[1, 60, 70, 80, 90]])
    if isinstance(model, Decoder):
        batch = teacher_batch([([1], [60, 70, 80, 90, 2])], 2)
        return teacher_forced_logits(model, batch, FullDepth(SHAPE["num_hidden_layers"]))[0]
    with torch.inference_mode():
        logits: torch.Tensor = model(tokens).logits[0]
    return logits


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "file"])
def test_finetune(kind: str, pairs: Path, tmp_path: Path, call: Call, request: pytest.FixtureRequest) -> None:
    """It learns, and what it writes is a folder that transformers opens to the same model."""
    output = tmp_path / "model"
    source: Path = request.getfixturevalue(kind)
    code, _, err = call(finetune, *recipe(source, pairs, output))
    assert code == 0, err
    losses = curve(output)
    assert losses[max(losses)] < 0.8 * losses[1]
    raw = json.loads((output / "config.json").read_text())
    assert raw["model_type"] == "llama"
    assert ((raw.get("rope_scaling") or {}).get("rope_type") == "llama3") == (kind == "llama")
    theirs, ours = (logits_of(model) for model in (reference_of(output), load_model(output)))
    assert (theirs - ours).abs().max() < 1e-3 * theirs.abs().max()


@pytest.mark.ray
@pytest.mark.slow
def test_distill(llama: Path, pairs: Path, tmp_path: Path, call: Call) -> None:
    """The model stays as it was, and its prompts stop at layer 2."""
    output = tmp_path / "model"
    more = ["model.swiftkv={kv_layers: 2, group_size: 2}"]
    code, _, err = call(distill, *recipe(llama, pairs, output, *more))
    assert code == 0, err
    losses = curve(output)
    assert losses[max(losses)] < losses[1]
    before, after = load_model(llama).state_dict(), load_model(output).state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert offline(output, {"method": "full"}) == offline(llama, {"method": "full"})
    swiftkv = offline(output, {"method": "skipdecode", "max_layers": 3, "min_layers": 2}, prefill="swiftkv")
    assert len(swiftkv) == len(PROMPTS)


@pytest.mark.slow
def test_calibrate(llama: Path, prompts: Path, tmp_path: Path, call: Call) -> None:
    output = tmp_path / "model"
    settings = ["skip_share=0.3", "warmup_tokens=1", "max_new_tokens=8", "model.dtype=float32", "threads=1"]
    code, document, err = call(calibrate, "-i", prompts, "-o", output, f"model.source={llama}", *settings)
    assert code == 0, err
    found = document["calibrated"]["ffn_skip"]
    assert (found["mode"], len(found["layers"])) == ("fixed", 1)
    assert json.loads((output / "config.json").read_text())["ffn_skip"]["layers"] == found["layers"]
    band = {"method": "full", "ffn_skip": {"mode": "fixed", "layers": found["layers"], "warmup_tokens": 1}}
    assert len(offline(output, band)) == len(PROMPTS)


@pytest.mark.parametrize("kind", ["file", pytest.param("llama", marks=pytest.mark.slow)])
def test_sweep(kind: str, prompts: Path, tmp_path: Path, call: Call, request: pytest.FixtureRequest) -> None:
    source = request.getfixturevalue(kind)
    decode = "[{method: full}, {method: skipdecode, max_layers: 3, min_layers: 2, horizon: 7}]"
    runs = f"runs=[{{label: one, model: {source}, decode: {decode}}}]"
    data = f"data={{path: {prompts}, prompt_column: prompt, has_references: false, limit: 6}}"
    fixed = ["max_new_tokens=8", "batch_size=3", f"output={tmp_path / 'quality'}", "threads=1"]
    code, document, err = call(evaluate, "--sweep", data, runs, *fixed)
    assert code == 0, err
    full, skip = document["rows"]
    assert (full["layers_per_token"], full["agreement"]["token_match"]) == (4, 1.0)
    assert 2 <= skip["layers_per_token"] < 3.1


@pytest.mark.parametrize("scheduler", ["cohort", "continuous"])
def test_serve(scheduler: str, llama: Path) -> None:
    """Over HTTP, token for token what the offline generator makes."""
    decode = {"method": "skipdecode", "max_layers": 3, "min_layers": 2, "horizon": 7}
    generator = Generator(GeneratorConfig(str(llama), decode, dtype="float32", num_threads=1))
    endpoint = make_endpoint(generator, engine={"scheduler": scheduler})
    asked = {"prompt": PROMPTS, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    try:
        with local(endpoint) as url:
            answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=60)
    finally:
        endpoint.close()
    assert answer.status_code == 200, answer.text
    made = {f"r{n}": choice["token_ids"] for n, choice in enumerate(answer.json()["choices"])}
    assert made == offline(llama, decode)


@pytest.mark.parametrize("kind", ["file", pytest.param("llama", marks=pytest.mark.slow)])
def test_doctor(kind: str, tmp_path: Path, call: Call, request: pytest.FixtureRequest) -> None:
    source = request.getfixturevalue(kind)
    code, document, err = call(doctor, f"model.source={source}", *PLAIN, "-o", tmp_path / "run")
    assert (code, document["problems"]) == (0, []), err
    assert document["choice"]["layers"] == 4
