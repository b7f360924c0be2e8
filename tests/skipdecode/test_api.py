"""The Python API: texts as Hugging Face makes them, tokens as a worker makes them, errors that name."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import OPTForCausalLM

import skipdecode
from actors.generator import Generator
from actors.generator_config import GeneratorConfig
from skipdecode import TextModel, generate, load
from skipdecode.config.sampling import Sampling
from skipdecode.engine.request import Request
from skipdecode.engine.results import Completion
from skipdecode.schedules.schedule import Unified

PROMPTS = ["The Golden Otter", "is", "a restaurant near the river, and it is", ""]


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path) -> TextModel:
    return load(tiny_checkpoint, dtype="float32", device="cpu")


def test_full_depth_is_hugging_face(
    model: TextModel, tiny_checkpoint: Path, hf: Callable[[Path], OPTForCausalLM]
) -> None:
    made = generate(model, PROMPTS, max_new_tokens=12, method="full", ignore_eos=True, batch_size=2, logprobs=3)
    for prompt, answer in zip(PROMPTS, made, strict=True):
        ids = torch.tensor(model.tokenizer.encode([prompt]))
        theirs = hf(tiny_checkpoint).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=-7,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        assert answer.tokens == theirs.sequences[0, ids.shape[1] :].tolist()
        assert answer.num_input_tokens == ids.shape[1]
        logprobs = torch.stack(theirs.logits)[:, 0].log_softmax(-1)
        own = logprobs.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor([one.logprob for one in answer.logprobs]), own, atol=1e-4, rtol=0)
        tops = torch.tensor([[value for _, value in one.top] for one in answer.logprobs])
        torch.testing.assert_close(tops, logprobs.topk(3).values, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("keys", "decode"),
    [
        ({}, {"speedup": 2.0}),
        ({"temperature": 1.0, "top_k": 40, "seed": 7}, {"method": "early_exit", "max_layers": 4, "min_layers": 2}),
        ({"stop": ["a", "e"]}, {"method": "unified", "layers": 3}),
        ({"ignore_eos": True}, {"method": "full", "ffn_skip": {"mode": "row", "threshold": 0.5, "cold_start": 1}}),
    ],
)
def test_tokens_are_those_of_a_worker(
    model: TextModel, tiny_checkpoint: Path, keys: dict[str, Any], decode: dict[str, Any]
) -> None:
    made = generate(model, PROMPTS, ids=[*"abcd"], max_new_tokens=10, **keys, **decode)
    config = {"method": "skipdecode"} | decode
    worker = Generator(GeneratorConfig(str(tiny_checkpoint), config, dtype="float32", device="cpu"))
    stop = tuple(keys.get("stop", ()))
    sampling = Sampling(max_new_tokens=10, **(keys | {"stop": stop}))
    requests = [Request(i, tokens, sampling) for i, tokens in zip("abcd", model.tokenizer.encode(PROMPTS), strict=True)]
    for ours, theirs in zip(made, worker(requests).answers, strict=True):
        assert isinstance(theirs, Completion)
        assert (ours.tokens, ours.finish_reason) == (theirs.tokens, theirs.finish_reason)
        assert (ours.layers_run, ours.ffns_run) == (theirs.layers_run, theirs.ffns_run)
        assert not any(word in ours.text for word in stop)


def test_one_text_is_a_list_of_one(model: TextModel) -> None:
    assert generate(model, "is", max_new_tokens=3) == generate(model, ["is"], max_new_tokens=3)
    assert generate(model, []) == []


def test_full_depth_is_the_default_of_a_checkpoint_without_a_schedule(model: TextModel) -> None:
    made, whole = (
        generate(model, PROMPTS, max_new_tokens=6, ignore_eos=True, **keys) for keys in ({}, {"method": "full"})
    )
    assert made == whole
    assert {answer.layers_run for answer in made} == {5 * model.model.config.num_hidden_layers}
    carried = {"method": "unified", "layers": 2}
    config = replace(model.model.config, skip_decode=carried)
    own = SimpleNamespace(config=config)
    assert TextModel(own, model.tokenizer).schedule(6, "full", {}) == Unified(config.num_hidden_layers, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: must be a whole number of at least 1, got 0"),
        ({"temperature": float("nan")}, "temperature: must be"),
        ({"top_p": 0}, "top_p: must be"),
        ({"stop": [""]}, "stop: must be"),
        ({"logprobs": -1}, "logprobs: must be"),
        ({"logprobs": 10**6}, "logprobs: must be 0 to 20"),
        ({"logprobs": 1.5}, "logprobs: must be"),
        ({"max_new_tokens": 2.5}, "max_new_tokens: must be"),
        ({"max_new_tokens": True}, "max_new_tokens: must be a whole number of at least 1, got True"),
        ({"top_p": None}, "top_p: must be"),
        ({"top_k": 1.5}, "top_k: must be"),
        ({"top_k": 2**70}, "top_k: must be"),
        ({"temperature": "0.8"}, "temperature: must be"),
        ({"seed": "x"}, "seed: must be"),
        ({"seed": 2**70}, "seed: must be"),
        ({"stop": None}, "stop: must be"),
        ({"stop": ["\ud800"]}, "stop: number 0 must be a text"),
        ({"ignore_eos": "no"}, "ignore_eos: must be"),
        ({"ids": "abcd"}, "ids: must be 4 texts"),
        ({"batch_size": 0}, "batch_size: must be a whole number of at least 1"),
        ({"ids": ["a"]}, "ids: must be 4 texts"),
        ({"max_new_tokens": 127}, "do not fit the model's 128 positions"),
        ({"method": "ful"}, "decode.method: 'ful'"),
        ({"speedup": 9}, "decode.speedup"),
        ({"speedup": True}, "decode.speedup"),
        ({"max_layers": True, "min_layers": 1}, "decode.max_layers"),
        ({"temperature": 10**400}, "temperature: must be"),
        ({"prefill": "swiftkv"}, "prefill: swiftkv needs a model"),
    ],
)
def test_what_cannot_be_done_is_named(model: TextModel, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        generate(model, PROMPTS, **keys)


def test_other_mistakes(model: TextModel) -> None:
    with pytest.raises(TypeError, match="'temprature'"):
        generate(model, PROMPTS, temprature=1)
    with pytest.raises(ValueError, match="prompts: number 1 must be a text, got 5"):
        generate(model, ["a", 5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="prompts: number 0 must be a text"):
        generate(model, "half a pair: \ud83d")
    with pytest.raises(ValueError, match="prompts: must be a text or a list of texts"):
        generate(model, {"a": "b"})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="'lossless': it is a key of jobs"):
        generate(model, "a", lossless=True)
    with pytest.raises(ValueError, match=r"model.source"):
        load("no/such/folder/here")
    with pytest.raises(ValueError, match=r"source: must be a folder"):
        load("")


@pytest.mark.parametrize("keys", [{"device": "tpu"}, {"dtype": "float64"}, {"quantization": "int3"}])
def test_what_cannot_be_loaded_is_named(tiny_checkpoint: Path, keys: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{min(keys)}: must be"):
        load(tiny_checkpoint, **keys)
    with pytest.raises(ValueError, match=r"tokenizer: .*not a folder"):
        load(tiny_checkpoint, tokenizer="/no/such/folder")


def test_a_device_that_is_not_there_is_refused(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match=r"^device: torch sees no CUDA device; use cpu$"):
        load(tiny_checkpoint, device="cuda")
    with pytest.raises(ValueError, match=r"^device: torch sees no cuda:1; use cpu$"):
        load(tiny_checkpoint, device="cuda:1")


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'generat'"):
        skipdecode.generat  # noqa: B018


def test_the_package_alone_is_light() -> None:
    code = (
        "import sys, skipdecode, skipdecode.schedules.from_config; assert 'torch' not in sys.modules and 'numpy' not "
        "in sys.modules;"
        "from skipdecode import load, generate; assert not {'ray', 'pydantic'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
