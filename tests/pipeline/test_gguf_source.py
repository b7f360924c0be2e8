"""A `.gguf` file as `model.source`: what every verb reads of it, and the folders that are made from it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.text.text_stream import TextStream
from pipeline.config.job import ConfigError, JobConfig
from pipeline.resolve_model import check_model
from pipeline.store.digest import digest_files
from pipeline.training.config import FinetuneConfig
from pipeline.training.distill import init_swiftkv
from skipdecode.checkpoint.hub import resolve_source
from skipdecode.checkpoint.model_config import read_config
from skipdecode.checkpoint.tokenizer import Tokenizer
from skipdecode.checkpoint.weights import check_folder, load_model
from skipdecode.config.sampling import Sampling
from skipdecode.engine.generate import generate
from skipdecode.engine.request import Request
from skipdecode.schedules.schedule import FullDepth
from tests.support.family_tokenizers import NASTY, SENTENCEPIECE_SPECIAL, sentencepiece
from tests.support.gguf_models import Writer, add_sentencepiece, random_model, write_model

PROMPTS = [text for text in NASTY if text]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers in blocks of 8 bits, with a tokenizer and a chat template."""

    def extra(writer: Writer) -> None:
        add_sentencepiece(writer, sentencepiece("metaspace"), SENTENCEPIECE_SPECIAL)
        writer.add_chat_template("{{ messages }}")

    shape = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 400, "max_position_embeddings": 256}
    return write_model(tmp_path_factory.mktemp("gguf") / "m.gguf", random_model("llama", **shape), "Q8_0", extra=extra)


def test_it_decodes_what_transformers_decodes(path: Path) -> None:
    assert resolve_source(str(path)) == path
    check_folder(path)
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    reference = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = load_model(path)
    tokenizer = Tokenizer(path, model.config)
    tokens = tokenizer.encode(PROMPTS)
    assert tokens == reference(PROMPTS)["input_ids"]
    sampling = Sampling(max_new_tokens=8, ignore_eos=True)
    requests = [Request(str(n), ids, sampling) for n, ids in enumerate(tokens)]
    made = generate(model, requests, FullDepth(2)).completions
    for prompt, completion in zip(tokens, made, strict=True):
        whole = theirs.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=-7)
        assert completion.tokens == whole[0, len(prompt) :].tolist()
        text = reference.decode(completion.tokens, skip_special_tokens=True)
        stream = TextStream(tokenizer.decode)
        assert (
            "".join([*map(stream.push, completion.tokens), stream.finish()])
            == text
            == tokenizer.decode(completion.tokens)
        )


def test_a_job_takes_it(path: Path) -> None:
    config = JobConfig.model_validate({"model": {"source": str(path)}, "decode": {"method": "full"}})
    model = check_model(config, print)
    assert (model.folder, model.config) == (path, read_config(path))
    config = JobConfig.model_validate({"model": {"source": str(path.with_name("none.gguf"))}})
    with pytest.raises(ConfigError, match=r"model\.source: .*none\.gguf' is not a folder, nor a \.gguf file"):
        check_model(config, print)


@pytest.mark.parametrize("part", ["metadata", "weights", "name"])
def test_another_file_is_another_model(path: Path, tmp_path: Path, part: str) -> None:
    content = bytearray(path.read_bytes())
    other = tmp_path / ("other.gguf" if part == "name" else path.name)
    other.write_bytes(content)
    assert (digest_files(other) == digest_files(path)) == (part != "name")
    at = {"metadata": content.index(b"{{ messages"), "weights": len(content) - 100}.get(part, len(content) - 100)
    content[at] ^= 1
    other.write_bytes(content)
    assert digest_files(other) != digest_files(path)


def test_a_damaged_file_names_the_key(path: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.gguf"
    short.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(ConfigError, match=r"short\.gguf: no GGUF file that can be read: it is truncated"):
        check_model(JobConfig.model_validate({"model": {"source": str(short)}}), print)


def with_swiftkv(source: Path, target: Path, **output: Any) -> None:
    tree = {
        "model": {"source": str(source), "swiftkv": {"kv_layers": 1}},
        "data": {"path": "unused.jsonl"},
        "output": {"path": str(target), "dtype": "float32"} | output,
    }
    init_swiftkv(FinetuneConfig.model_validate(tree), print)


def test_swiftkv_is_written_in_snowflakes_layout(path: Path, tmp_path: Path) -> None:
    with_swiftkv(path, tmp_path / "model", model_type="llama_swiftkv")
    raw = json.loads((tmp_path / "model/config.json").read_text())
    assert (raw["model_type"], raw["architectures"]) == ("llama_swiftkv", ["LlamaSwiftKVForCausalLM"])
    assert (raw["swiftkv"], raw["num_key_value_layers"], raw["key_value_group_size"]) == (True, 1, 1)
    assert read_config(tmp_path / "model").swiftkv is not None
    own = write_model(tmp_path / "qwen.gguf", random_model("qwen2"))
    with pytest.raises(ConfigError, match=r"output\.model_type: .*layout of Llamas, and model_type is 'qwen2'"):
        with_swiftkv(own, tmp_path / "other", model_type="llama_swiftkv")
    assert not (tmp_path / "other").exists()


def test_a_folder_made_from_it_is_the_same_model(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "swiftkv"
    with_swiftkv(path, target)
    assert (target / "chat_template.jinja").read_text() == "{{ messages }}"
    assert json.loads((target / "config.json").read_text())["model_type"] == "llama"
    ours, made = (Tokenizer(source, read_config(source)) for source in (path, target))
    theirs = AutoTokenizer.from_pretrained(target)
    assert ours.encode(PROMPTS) == made.encode(PROMPTS) == theirs(PROMPTS)["input_ids"]
    before, after = load_model(path).state_dict(), load_model(target).state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
