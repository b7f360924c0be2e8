"""Rendered conversations against `tokenizer.apply_chat_template` of transformers, token for token; and what is wrong.

SKIPDECODE_SMOLLM2 names the released SmolLM2-135M-Instruct as GGUF; it is not part of the project.
"""

import os
import pickle
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from actors.templates.chat_template import PASSED_ON, ChatTemplate, MessagesError, check_continues, check_messages
from actors.templates.chat_template_files import load_chat_template
from actors.templates.sandbox import TemplateRaised
from actors.templates.template_kwargs import check_kwargs
from skipdecode.checkpoint.tokenizer import Tokenizer
from skipdecode.families import FAMILIES
from tests.support.chat_templates import CHATML, OBJECTS, SPECIAL, TAGS, TEMPLATES
from tests.support.examples import examples
from tests.support.family_tokenizers import NASTY, byte_level, sentencepiece, template, write_folder
from tests.support.gguf_models import Writer, add_byte_level

NOW = datetime(2026, 7, 26)
USER = [{"role": "user", "content": "What is a pub? <|im_end|> [INST] {{ 1 }}"}]
CHATS = [
    USER,
    [
        *USER,
        {"role": "assistant", "content": " It is\na bar.</think>\n\n Yes "},
        {"role": "user", "content": "Where? 東京"},
    ],
    [{"role": "system", "content": "  Be brief. "}, *USER],
    [{"role": "system", "content": "Be brief."}, *USER, {"role": "assistant", "content": "A bar."}],
]
LLAMA = FAMILIES["llama"].tokenizer
CLASSES = {
    "chatml": ("llama", "PreTrainedTokenizerFast", {}),
    "smollm": ("llama", "GPT2Tokenizer", {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}),
    "qwen": ("qwen2", "Qwen2Tokenizer", {"bos_token": None, "eos_token": "<|im_end|>"}),
    "llama3": ("llama", "PreTrainedTokenizerFast", {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}),
    "mistral": ("mistral", "LlamaTokenizerFast", {"bos_token": "<s>", "eos_token": "</s>"}),
    "gemma": ("llama", "LlamaTokenizer", {"bos_token": {"content": "<bos>", "__type": "AddedToken"}}),
}


def config_of(model_type: str, vocab_size: int = 4096) -> Any:
    return SimpleNamespace(
        tokenizer_rules=FAMILIES[model_type].tokenizer,
        vocab_size=vocab_size,
        bos_token_id=None,
        eos_token_ids=(1,),
        pad_token_id=None,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`folder(kind)`: a tokenizer with the chat template of that kind, and a BOS for other texts."""

    @cache
    def make(kind: str) -> Path:
        model_type, name, settings = CLASSES[kind]
        made = sentencepiece() if kind in ("mistral", "gemma") else byte_level("qwen2" if kind == "qwen" else "llama3")
        made.add_special_tokens(SPECIAL[kind])
        bos = settings.get("bos_token")
        bos = bos["content"] if isinstance(bos, dict) else bos
        made.post_processor = template(bos or "", of=made)
        where = tmp_path_factory.mktemp("chat") / kind
        return write_folder(where, made, model_type, tokenizer_class=name, chat_template=TEMPLATES[kind], **settings)

    return make


@pytest.fixture(scope="module")
def both(folder: Callable[[str], Path]) -> Callable[[str], tuple[PreTrainedTokenizerBase, ChatTemplate]]:
    """`both(kind)`: the tokenizer of transformers, and our template."""
    return cache(lambda kind: (AutoTokenizer.from_pretrained(folder(kind)), loaded(folder(kind), CLASSES[kind][0])))


def loaded(folder: Path, model_type: str, file: Path | None = None) -> ChatTemplate:
    found = load_chat_template(folder, FAMILIES[model_type].tokenizer, file)
    assert found is not None
    return found


def reference(tokenizer: PreTrainedTokenizerBase, chat: list[dict[str, Any]]) -> list[int]:
    return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])


def outcome(make: Callable[[], Any]) -> Any:
    """What it gives, or the words of the error."""
    try:
        return make()
    except Exception as error:
        return str(error)


@pytest.mark.parametrize("kind", TEMPLATES)
def test_prompts_are_those_of_transformers(folder: Callable[[str], Path], kind: str) -> None:
    model_type, *_ = CLASSES[kind]
    theirs, chat_template = AutoTokenizer.from_pretrained(folder(kind)), loaded(folder(kind), model_type)
    tokenizer = Tokenizer(folder(kind), config_of(model_type))
    assert chat_template.special_tokens == theirs.special_tokens_map
    num_refused = 0
    for chat in CHATS:
        expected = outcome(lambda chat=chat: reference(theirs, chat))  # type: ignore[misc]
        ours = outcome(
            lambda chat=chat: tokenizer.encode_rendered(
                [chat_template.render(check_messages(chat), now=datetime.now())]
            )[0]  # type: ignore[misc]
        )
        assert ours == expected
        num_refused += isinstance(ours, str)
    assert num_refused == {"gemma": 2}.get(kind, 0)


@settings(max_examples=examples(60))
@given(data=st.data())
def test_any_conversation_is_that_of_transformers(both: Callable[[str], Any], data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(TEMPLATES)))
    texts = st.one_of(st.sampled_from(NASTY), st.text(max_size=20), st.sampled_from(SPECIAL[kind]))
    message = st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": texts})
    chat = data.draw(st.lists(message, min_size=1, max_size=5))
    theirs, chat_template = both(kind)
    expected = outcome(lambda: theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
    assert outcome(lambda: chat_template.render(check_messages(chat), now=datetime.now())) == expected


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_continued_message_is_that_of_transformers(both: Callable[[str], Any], kind: str) -> None:
    theirs, chat_template = both(kind)
    for last in ("It is", " It is  ", "", "It\n\n", "</think>\n\nIt is", "is </s> <|im_end|> [/INST]", "東京 🙂"):
        chat = [*USER, {"role": "assistant", "content": last}]
        expected = outcome(partial(theirs.apply_chat_template, chat, continue_final_message=True, tokenize=False))
        if expected.startswith("continue_final_message is set but the final message does not appear"):
            expected = "the template changes the last message, so that it cannot be continued"
        assert (
            outcome(partial(chat_template.render, check_messages(chat), now=datetime.now(), continues=True)) == expected
        )
        plain, continued = chat_template.render_rows([USER, chat], now=datetime.now(), continues={1})
        assert (plain, str(continued)) == (chat_template.render(USER, now=datetime.now()), expected)
    with pytest.raises(MessagesError, match=r"messages\[0\]\.role must be 'assistant' for .*, got 'user'"):
        check_continues(USER)


def test_reasoning_is_read_as_transformers_has_it(folder: Callable[[str], Path], tmp_path: Path) -> None:
    source = "{% for m in messages %}<{{ m.thinking }}|{{ m.reasoning_content }}>{{ m.content }}{% endfor %}"
    (tmp_path / "mine.jinja").write_text(source)
    own = loaded(folder("chatml"), "llama", tmp_path / "mine.jinja")
    theirs = AutoTokenizer.from_pretrained(folder("chatml"))
    for more in (
        {},
        {"reasoning_content": "a"},
        {"thinking": "a"},
        {"reasoning": "a"},
        {"thinking": "a", "reasoning": "b"},
    ):
        chat = [{"role": "assistant", "content": "x", **more}]
        expected = theirs.apply_chat_template(chat, chat_template=source, tokenize=False)
        assert own.render(check_messages(chat), now=NOW) == expected


def test_kwargs_are_variables_as_in_transformers(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Those of a row go to that row alone; the checkpoint's special tokens may be set, too."""
    source = (
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{{ mood }}"
    )
    (tmp_path / "mine.jinja").write_text(source)
    own = loaded(folder("chatml"), "llama", tmp_path / "mine.jinja")
    theirs = AutoTokenizer.from_pretrained(folder("chatml"))
    given: list[dict[str, Any]] = [{}, {"enable_thinking": False}, {"mood": ["a", 5]}, {"bos_token": "X"}]
    wanted = [theirs.apply_chat_template(USER, chat_template=source, tokenize=False, **own) for own in given]
    assert len(set(wanted)) == 4
    assert own.render_rows([USER] * 4, now=NOW, kwargs=given) == wanted
    assert [own.render(USER, now=NOW, kwargs=kwargs) for kwargs in given] == wanted
    assert own.unread({"enable_thinking": False, "thinking": True}) == ["thinking"]
    for name in ("messages", "tools", "add_generation_prompt"):
        with pytest.raises(ValueError, match=f"'{name}' is set by other parameters"):
            check_kwargs({name: 1})


def test_keys_that_say_nothing_change_no_prompt() -> None:
    plain = [{"role": "user", "content": "a"}]
    for more in (
        {"type": "text"}, {"weight": 0}, {"metadata": {"a": 1}}, {"id": "m1"}, {"annotations": [1]}, {"refusal": None},
        {"tool_calls": []}, {"audio": {}}, {"prefix": False}, {"cache_control": {"type": "ephemeral"}}, {"refusal": ""},
    ):  # fmt: skip
        assert check_messages([plain[0] | more]) == plain, more
    for more in ({"cache_control": {"type": "x"}}, {"annotations": []}, {"index": 0, "id": "p"}, {"x": None}):
        (message,) = check_messages([{"role": "user", "content": [{"type": "text", "text": "a", **more}]}])
        assert message == {"role": "user", "content": [{"type": "text", "text": "a"}]}, more


def test_many_conversations_at_once(folder: Callable[[str], Path]) -> None:
    chat_template = pickle.loads(pickle.dumps(loaded(folder("mistral"), "mistral")))
    bad = [{"role": "assistant", "content": "I begin"}]
    texts = chat_template.render_rows([CHATS[0], bad, CHATS[1]], now=NOW)
    assert texts[0] == f"<s>[INST] {USER[0]['content']}[/INST]"
    assert isinstance(texts[1], TemplateRaised)
    assert texts[2] == chat_template.render(CHATS[1], now=NOW)


def test_the_time_is_the_one_that_is_given(folder: Callable[[str], Path]) -> None:
    assert "Today is 26 Jul 2026" in loaded(folder("llama3"), "llama").render(USER, now=NOW)


NAMED = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "tools: {{ messages }}"}]


@pytest.mark.parametrize(
    ("settings", "files"),
    [
        ({"chat_template": CHATML}, {}),
        ({"chat_template": NAMED}, {}),
        ({}, {"chat_template.jinja": CHATML}),
        ({"chat_template": "old: {{ messages }}"}, {"chat_template.jinja": CHATML}),
        ({}, {"chat_template.jinja": CHATML, "additional_chat_templates/tool_use.jinja": "tools: {{ messages }}"}),
        ({"bos_token": "<|begin|>", "added_tokens_decoder": {}}, {"chat_template.jinja": "{{ bos_token }}" + CHATML}),
    ],
)
def test_the_template_is_found_where_transformers_finds_it(
    tmp_path: Path, settings: dict[str, Any], files: Mapping[str, str]
) -> None:
    folder = write_folder(
        tmp_path, byte_level("llama3"), "llama", tokenizer_class="PreTrainedTokenizerFast", **settings
    )
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    theirs = AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(USER, add_generation_prompt=True, tokenize=False)
    assert loaded(folder, "llama").render(USER, now=NOW) == expected


@pytest.mark.parametrize("name", [None, "PreTrainedTokenizerFast", "LlamaTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_special_tokens_are_those_of_transformers(tmp_path: Path, model_type: str, name: str | None) -> None:
    settings = {"chat_template": CHATML, "pad_token": {"content": "<pad>", "__type": "AddedToken"}, "unk_token": None}
    settings |= {} if name is None else {"tokenizer_class": name}
    for tokenizer in (byte_level("llama3"), sentencepiece()):
        folder = write_folder(tmp_path / str(id(tokenizer)), tokenizer, model_type, **settings)
        assert loaded(folder, model_type).special_tokens == AutoTokenizer.from_pretrained(folder).special_tokens_map


def gguf_file(path: Path, **texts: str) -> Path:
    writer = Writer(path, "llama")
    add_byte_level(writer, byte_level("llama3"), "llama-bpe", ["<|begin|>", "<|im_end|>", "<|end|>"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, text in texts.items():
        writer.add_string("tokenizer.chat_template" + name, text)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_template_of_a_gguf_file(tmp_path: Path) -> None:
    path = gguf_file(
        tmp_path / "model.gguf", **{"": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", ".tools": ""}
    )
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    expected = theirs.apply_chat_template(USER, add_generation_prompt=True, tokenize=False)
    assert loaded(path, "llama").render(USER, now=NOW) == expected == f"<|begin|>{USER[0]['content']}<|im_end|>"
    assert load_chat_template(gguf_file(tmp_path / "none.gguf"), LLAMA) is None


def test_a_file_of_the_users_with_the_tokens_of_the_checkpoint(folder: Callable[[str], Path], tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    assert loaded(folder("mistral"), "mistral", file).render(USER, now=NOW) == "<s>" + USER[0]["content"]


def test_what_is_wrong_with_the_files_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level("llama3"), "llama", chat_template=None)
    assert load_chat_template(folder, LLAMA) is None
    for text, said in (("{% for %}", "line 1"), ("{{ message }}", "does not read `messages`"), ("{{" + "-" * 9999, "")):
        (tmp_path / "mine.jinja").write_text(text)
        with pytest.raises(ValueError, match=rf"mine\.jinja cannot be used: .*{said}"):
            load_chat_template(folder, LLAMA, tmp_path / "mine.jinja")
    with pytest.raises(ValueError, match=r"nothing\.jinja: cannot be read"):
        load_chat_template(folder, LLAMA, tmp_path / "nothing.jinja")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text(CHATML)
    with pytest.raises(ValueError, match="has the chat templates rag, and none is 'default'"):
        load_chat_template(folder, LLAMA)
    for wrong in (7, [7], [{"name": "default"}], {"default": None}):
        other = write_folder(tmp_path / "other", byte_level("llama3"), "llama", chat_template=wrong)
        with pytest.raises(ValueError, match=r"tokenizer_config\.json: chat_template is neither"):
            load_chat_template(other, LLAMA)


def test_parts_are_lines_and_a_developer_speaks_for_the_system(folder: Callable[[str], Path], tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "image": None}]
    messages = check_messages([{"role": "developer", "content": "Be brief.", "tool_calls": None, "audio": []},
                               {"role": "user", "content": parts, "name": "Ann", "refusal": None}])  # fmt: skip
    plain = [{"type": "text", "text": text} for text in "ab"]
    assert messages[1] == {"role": "user", "content": plain, "name": "Ann"}
    assert loaded(folder("mistral"), "mistral").render(messages, now=NOW) == "<s>[INST] Be brief.\n\na\nb[/INST]"
    for more, role in (("{# no developer #}", "system"), ("{% if 'developer' == 1 %}{% endif %}", "developer")):
        (tmp_path / "mine.jinja").write_text(CHATML + more)
        own = loaded(folder("chatml"), "llama", tmp_path / "mine.jinja")
        assert own.render(messages, now=NOW).startswith(f"<|im_start|>{role}\nBe brief.<|im_end|>\n")


def test_a_template_of_parts_loses_no_text(folder: Callable[[str], Path], tmp_path: Path) -> None:
    texts = "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    both = "{% for m in messages %}{{ m.content if m.content is string else 'parts' }}{% endfor %}"
    for source, made in ((texts, "<user>Hi"), (both, "Hi"), ("{{ messages | length }}", "1")):
        (tmp_path / "mine.jinja").write_text(source)
        own = loaded(folder("chatml"), "llama", tmp_path / "mine.jinja")
        assert own.render([{"role": "user", "content": "Hi"}], now=NOW) == made


READS_BOTH = """\
{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}\
{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}</{{ m.role }}>{% endfor %}"""
READS_PARTS = "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p['text'] }}|{% endfor %}{% endfor %}"


@pytest.mark.parametrize(("source", "has_separator"), [(READS_BOTH, False), (READS_PARTS, False), (CHATML, True)])
def test_parts_are_those_of_transformers_where_the_template_reads_them(
    folder: Callable[[str], Path], tmp_path: Path, source: str, has_separator: bool
) -> None:
    """transformers gives a template what it was given, and one that adds texts up fails on a list: then parts become
    lines, as in vLLM."""
    (tmp_path / "mine.jinja").write_text(source)
    own = loaded(folder("chatml"), "llama", tmp_path / "mine.jinja")
    theirs = AutoTokenizer.from_pretrained(folder("chatml"))
    parts = [{"type": "text", "text": text} for text in ("Hi", " there. ", "東京")]
    joined = {"role": "user", "content": "\n".join(part["text"] for part in parts)}
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    if source == READS_PARTS:
        chat[0]["content"] = [{"type": "text", "text": "Be brief."}]
    given = [chat[0], joined] if has_separator else chat
    expected = theirs.apply_chat_template(given, chat_template=source, tokenize=False, add_generation_prompt=True)
    assert own.render(check_messages(chat), now=NOW) == expected
    ends = [*chat, {"role": "assistant", "content": [{"type": "text", "text": "It"}, {"type": "text", "text": "is"}]}]
    text = own.render(check_messages(ends), now=NOW, continues=True)
    assert text.endswith({READS_BOTH: "Itis", READS_PARTS: "It|is", CHATML: "It\nis"}[source])


def called(function: dict[str, Any]) -> dict[str, Any]:
    """A message with a call."""
    return {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": function}]}


WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather <now> & then",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}


@pytest.mark.parametrize(("kind", "source"), [("qwen", TAGS), ("llama3", OBJECTS)])
def test_tools_and_calls_are_those_of_transformers(
    folder: Callable[[str], Path], tmp_path: Path, kind: str, source: str
) -> None:
    """transformers takes arguments as objects; OpenAI's clients send them as text, and null as the content."""
    (tmp_path / "mine.jinja").write_text(source)
    own = loaded(folder(kind), CLASSES[kind][0], tmp_path / "mine.jinja")
    theirs = AutoTokenizer.from_pretrained(folder(kind))
    assert own.reads_tools
    asked = {"role": "user", "content": "Is it warm?"}
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    answered = {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": '{"celsius": 21}'}
    for chat in ([asked], [asked, called, answered], [asked, called, answered, asked]):
        for tools in (None, [WEATHER], [WEATHER, WEATHER]):
            expected = theirs.apply_chat_template(
                chat, tools=tools, chat_template=source, tokenize=False, add_generation_prompt=True
            )
            function = {"name": "weather", "arguments": '{"city": "Köln"}'}
            sent = {"content": None, "refusal": None, "tool_calls": [CALL | {"function": function}]}
            for messages in (chat, [message | sent if message is called else message for message in chat]):
                assert own.render(check_messages(messages), now=NOW, tools=tools) == expected
                (row,) = own.render_rows([check_messages(messages)], now=NOW, tools=[tools])
                assert row == expected


@pytest.mark.parametrize(
    ("messages", "field", "reason"),
    [
        (None, "messages", "must be a list"),
        ("hello", "messages", "must be a list of {role, content}, got str"),
        ({"role": "user"}, "messages", "must be a list"),
        ([], "messages", "is empty"),
        (["hello"], "messages[0]", "must be a mapping with role and content, got str"),
        ([None], "messages[0]", "got null"),
        ([*USER, {"content": "hello"}], "messages[1].role", "is missing"),
        ([{"role": "tool"}], "messages[0].content", "is missing"),
        ([{"role": "USER", "content": "x"}], "messages[0].role", "got 'USER'"),
        ([{"role": 7, "content": "x"}], "messages[0].role", "got int"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role", "got list"),
        ([{"role": "user"}], "messages[0].content", "is missing"),
        ([{"role": "user", "content": None}], "messages[0].content", "is missing"),
        ([{"role": "user", "content": 7}], "messages[0].content", "must be a text or a list of text parts, got int"),
        ([{"role": "user", "content": []}], "messages[0].content", "is empty"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]", "must be a mapping"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0].type", "must be 'text', got null"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content[0].type", "got 'image_url'",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", "must be a text, got null"),
        ([{"role": "user", "content": [{"type": "text", "text": "", "x": 1}]}], "messages[0].content[0].x", "not supp"),
        ([{"role": "user", "content": "x", "tool_calls": [1]}], "messages[0].tool_calls", "belong to messages of the"),
        ([{"role": "assistant", "tool_calls": 7}], "messages[0].tool_calls", "must be a list, got int"),
        ([{"role": "assistant", "tool_calls": [1]}], "messages[0].tool_calls[0]", "must be a mapping with id"),
        (
            [{"role": "assistant", "tool_calls": [{"type": "custom", "function": {}}]}],
            "messages[0].tool_calls[0].type", "must be 'function', got 'custom'",
        ),
        ([called({"name": 7})], "messages[0].tool_calls[0].function.name", "must be a text, got int"),
        ([called({"name": "f", "arguments": "{"})], "messages[0].tool_calls[0].function.arguments", "object: Ex"),
        ([called({"name": "f", "arguments": "[1]"})], "messages[0].tool_calls[0].function.arguments", "got list"),
        ([{"role": "tool", "content": "x", "tool_call_id": 7}], "messages[0].tool_call_id", "must be a text, got int"),
        ([{"role": "user", "content": "x", "name": 7}], "messages[0].name", "must be a text, got int"),
    ],
)  # fmt: skip
def test_a_message_of_a_wrong_shape_is_named(messages: Any, field: str, reason: str) -> None:
    with pytest.raises(MessagesError) as caught:
        check_messages(messages)
    error = pickle.loads(pickle.dumps(caught.value))
    assert error.field == field
    assert reason in error.reason
    assert str(error) == f"{field} {error.reason}"


@settings(max_examples=examples(200))
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["role", "content", "type", "text", "x"]) | st.integers(), inner, max_size=3
            )
        ),
        max_leaves=8,
    )
)
def test_whatever_is_given_is_messages_or_one_error(value: Any) -> None:
    try:
        messages = check_messages(value)
    except MessagesError:
        return
    assert all(m.keys() <= set(PASSED_ON) and set(map(type, m.values())) <= {str, list} for m in messages)


@pytest.mark.slow
@pytest.mark.skipif("SKIPDECODE_SMOLLM2" not in os.environ, reason="SKIPDECODE_SMOLLM2 names no .gguf file")
def test_smollm2() -> None:
    """With digits cut apart as this model's own tokenizer.json does."""
    path = Path(os.environ["SKIPDECODE_SMOLLM2"])
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    backend = theirs.backend_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    chat_template, tokenizer = loaded(path, "llama"), Tokenizer(path, config_of("llama", 49152))
    assert chat_template.special_tokens == theirs.special_tokens_map
    page = Path(__file__).parents[3] / "docs" / "quickstart.md"
    chats = [[{"role": "user", "content": line}] for line in [*NASTY, *page.read_text().splitlines()] if line.strip()]
    for chat in [*CHATS, *chats]:
        text = chat_template.render(check_messages(chat), now=NOW)
        assert tokenizer.encode_rendered([text])[0] == reference(theirs, chat)
