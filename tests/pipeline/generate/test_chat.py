"""Conversations of a corpus down to their tokens, as transformers has them; and which chat template a run takes."""

import json
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from actors.templates.chat_template import ChatTemplate
from pipeline.config.job import ConfigError, InputConfig, JobConfig, ModelConfig, SamplingConfig
from pipeline.generate.plan import UNUSED, find_chat_template, unused_chat_template, used_chat_template
from pipeline.input.expansion import Expansion
from pipeline.input.openai_rows import CHAT_URL, CHAT_URLS
from pipeline.input.prompt_templates import Prompter
from pipeline.input.read import read_file
from pipeline.resolve_model import ResolvedModel
from pipeline.stages.tokenize import TokenizeConfig, tokenize
from skipdecode.config.sampling import Sampling
from skipdecode.families import config_of
from tests.support.chat_templates import CHATML, SPECIAL, TEMPLATES
from tests.support.family_tokenizers import NASTY, byte_level, sentencepiece, template, write_folder
from tests.support.input_helpers import make_plan, write_jsonl

CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": text}] for text in (*NASTY, "What is <|im_end|> [INST] {{ 1 }}?")
] + [
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": " b\n"}, {"role": "user", "content": "c"}],
    [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "東京"}],
    [{"role": "assistant", "content": "I begin"}, {"role": "assistant", "content": "and go on"}],
]
SHAPE = {"vocab_size": 450, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4,
         "max_position_embeddings": 512, "eos_token_id": 1}  # fmt: skip
NAMES = {"llama3": "<|begin_of_text|>", "mistral": "<s>", "gemma": "<bos>"}


def make_model(folder: Path, kind: str) -> ResolvedModel:
    """A tokenizer with the chat template of that kind, which puts a BOS before plain texts where it has one."""
    tokenizer = sentencepiece() if kind in ("mistral", "gemma") else byte_level("qwen2" if kind == "qwen" else "llama3")
    tokenizer.add_special_tokens(SPECIAL[kind])
    bos = NAMES.get(kind)
    tokenizer.post_processor = template(bos or "", of=tokenizer)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATES[kind], "eos_token": "</s>"}
    write_folder(folder, tokenizer, "llama", **settings | ({"bos_token": bos} if bos else {}))
    return ResolvedModel(folder, str(folder), config_of(SHAPE | {"model_type": "llama"}), {"method": "full"})


def tokenized(model: ResolvedModel, path: Path, **keys: Any) -> list[dict[str, Any]]:
    """The rows of a corpus as workers get them."""
    job = JobConfig(model=ModelConfig(source=str(model.folder)), input=InputConfig(path=(str(path),), **keys))
    plan = make_plan(job.input, Expansion.of(job.input, SamplingConfig()))
    prompter = Prompter.of(job.input, plan.listing.format, find_chat_template(job, model), datetime.now(UTC))
    urls = CHAT_URLS if plan.listing.format == "openai_batch" else None
    config = TokenizeConfig(str(model.folder), model.config, Sampling(8), "fail_row", job.input.is_chat, urls)
    (block,) = read_file(plan, 0, job.input, prompter=prompter)
    rows: list[dict[str, Any]] = tokenize(block, config=config).to_pylist()
    return rows


@pytest.mark.parametrize("kind", TEMPLATES)
def test_tokens_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    model = make_model(tmp_path / "model", kind)
    theirs = AutoTokenizer.from_pretrained(model.folder)
    rows = tokenized(model, write_jsonl(tmp_path / "a.jsonl", [{"m": chat} for chat in CHATS]), messages_column="m")
    num_failed = 0
    for row, chat in zip(rows, CHATS, strict=True):
        try:
            wanted = theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=True)
        except Exception as error:
            reason = str(error)
        else:
            assert row["error_code"] == ""
            assert row["_prompt_tokens"] == list(wanted["input_ids"])
            assert row["num_input_tokens"] == len(row["_prompt_tokens"])
            continue
        assert row["error_code"] == "bad_template"
        assert reason in row["error_message"]
        num_failed += 1
    assert num_failed == {"mistral": 1, "gemma": 2}.get(kind, 0)


def test_chats_of_a_batch_file_bring_their_special_tokens_and_completions_get_them(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama3")
    theirs = AutoTokenizer.from_pretrained(model.folder)
    chat = [{"role": "user", "content": "Hi"}]
    lines = [
        {"custom_id": "a", "method": "POST", "url": CHAT_URL, "body": {"messages": chat}},
        {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi"}},
    ]
    asked, plain = tokenized(model, write_jsonl(tmp_path / "a.jsonl", lines))
    wanted = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert asked["_prompt_tokens"] == list(wanted)
    assert plain["_prompt_tokens"] == theirs("Hi")["input_ids"]
    assert asked["_prompt_tokens"][0] == plain["_prompt_tokens"][0] == theirs.bos_token_id
    assert asked["_prompt_tokens"][1] != theirs.bos_token_id


def find(model: ResolvedModel, **keys: Any) -> ChatTemplate | None:
    return find_chat_template(JobConfig(input=InputConfig(**keys)), model)


def test_which_template_a_run_takes(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "chatml")
    own = find(model, chat=True)
    assert own is not None
    assert own.source == CHATML
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}")
    mine = find(model, chat=True, chat_template=str(tmp_path / "mine.jinja"))
    assert mine is not None
    assert mine.source == "{{ messages[0].content }}"
    with pytest.raises(ConfigError, match=r"input\.chat_template: .*nowhere\.jinja"):
        find(model, chat=True, chat_template=str(tmp_path / "nowhere.jinja"))
    (tmp_path / "bad.jinja").write_text("{% for %}")
    with pytest.raises(ConfigError, match=r"input\.chat_template: .*bad\.jinja"):
        find(model, chat=True, chat_template=str(tmp_path / "bad.jinja"))
    settings = json.loads((model.folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template")
    (model.folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert find(model) is None
    for keys, name in (({"chat": True}, "chat"), ({"messages_column": "m"}, "messages_column")):
        reason = rf"input\.chat_template: input\.{name} needs a chat template, and the checkpoint has none; set "
        with pytest.raises(ConfigError, match=reason):
            find(model, **keys)
    (model.folder / "chat_template.jinja").write_text("{% for %}")
    assert find(model) is None, "a broken one harms nobody who does not ask for it"
    with pytest.raises(ConfigError, match=r"input\.chat_template: "):
        find(model, chat=True)


def test_batch_files_ask_for_it_by_their_lines(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "chatml")
    chat, notes = find(model), list[str]()

    def used(chats: int, documents: int, own: ChatTemplate | None = chat, **keys: Any) -> ChatTemplate | None:
        scans: Any = [SimpleNamespace(num_chats=chats, num_documents=documents)]
        return used_chat_template(own, JobConfig(input=InputConfig(**keys)), "openai_batch", scans, notes.append)

    assert used(0, 3) is None
    assert used(1, 3) is chat
    assert not notes
    assert used(1, 3, None) is None
    assert "1 chat will fail" in notes[0]
    with pytest.raises(ConfigError, match=r"input\.chat_template: every line is a chat"):
        used(3, 3, None)


def test_plain_prompts_to_a_chat_model_are_remarked_on_where_nobody_said_that_they_are_meant(tmp_path: Path) -> None:
    chat = find(make_model(tmp_path / "model", "chatml"))
    assert unused_chat_template(chat, JobConfig(), "jsonl") == UNUSED
    assert unused_chat_template(chat, JobConfig(), "openai_batch") is None
    assert unused_chat_template(None, JobConfig(), "jsonl") is None
    for keys in ({"chat": False}, {"chat": True}, {"messages_column": "m"}):
        assert unused_chat_template(chat, JobConfig(input=InputConfig(**keys)), "jsonl") is None
    assert unused_chat_template(chat, JobConfig(model=ModelConfig(adapter="tuned")), "jsonl") is None
