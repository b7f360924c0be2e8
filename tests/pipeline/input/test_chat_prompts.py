"""Prompts made of conversations by a chat template: columns of messages, batch files, what fails a row."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actors.templates.chat_template import ChatTemplate
from actors.templates.sandbox import Template
from pipeline.input.sample_prompts import remark_on_last_messages
from pipeline.json_size import MAX_MARKS
from tests.support.input_helpers import make_config, make_plan, refuse, write, write_jsonl
from tests.support.prompt_helpers import read, texts

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chatml(*messages: tuple[str, str]) -> str:
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages) + "<|im_start|>assistant\n"


@pytest.fixture
def chat() -> ChatTemplate:
    return through(CHATML)


def through(source: str) -> ChatTemplate:
    return ChatTemplate(Template(source, strict=False), {})


def test_a_prompt_becomes_a_message(tmp_path: Path, chat: ChatTemplate) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "Hi"}, {"prompt": None}])
    rows = read(path, chat, chat=True)
    assert texts(rows[:1]) == [chatml(("user", "Hi"))]
    assert rows[1]["error_code"] == "prompt_missing"
    rows = read(path, chat, chat=True, system="Be brief.")
    assert texts(rows[:1]) == [chatml(("system", "Be brief."), ("user", "Hi"))]
    rows = read(path, chat, chat=True, templates={"a": "A: {{ prompt }}", "b": "{{ prompt }}!"})
    assert texts(rows[:2]) == [chatml(("user", "A: Hi")), chatml(("user", "Hi!"))]
    rows = read(path, through("{{ strftime_now('%d %B %Y') }}"), chat=True)
    assert texts(rows[:1]) == ["04 July 2026"]


def test_the_last_message_is_continued(tmp_path: Path, chat: ChatTemplate) -> None:
    begun = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes, and"}]
    path = write_jsonl(tmp_path / "a.jsonl", [{"m": begun}, {"m": json.dumps(begun)}, {"m": begun[:1]}])
    wanted = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes, and"
    rows = read(path, chat, messages_column="m", continue_final_message=True)
    assert texts(rows[:2]) == [wanted, wanted]
    assert rows[2]["error_code"] == "bad_messages"
    assert "messages[0].role must be 'assistant' for continue_final_message" in rows[2]["error_message"]
    said = [("user", "Hi"), ("assistant", "Yes, and")]
    assert texts(read(path, chat, messages_column="m")[:1]) == [chatml(*said)]
    head = {"method": "POST", "url": "/chat/completions"}  # as in Azure's batches
    bodies: list[dict[str, Any]] = [{"continue_final_message": True}, {"add_generation_prompt": True}, {}]
    bodies[0] |= {"add_generation_prompt": False}
    lines = [{"custom_id": f"{n}", **head, "body": {"messages": begun} | body} for n, body in enumerate(bodies)]
    rows = read(write_jsonl(tmp_path / "b.jsonl", lines), chat)
    assert texts(rows) == [wanted, chatml(*said), chatml(*said)]


def test_kwargs_are_the_runs_and_those_of_a_line_go_over_them(tmp_path: Path) -> None:
    chat = through("{{ messages[0].content }}{% if enable_thinking is false %} no{% endif %}{{ mood }}")
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "Hi", "chat_template_kwargs": {"mood": "?"}}])
    given = {"enable_thinking": False, "mood": "!"}
    assert texts(read(path, chat, chat=True, chat_template_kwargs=given)) == ["Hi no!"]
    assert texts(read(path, chat, chat=True)) == ["Hi"]
    refuse(path, r"input.chat_template_kwargs: has no effect without input.chat", chat_template_kwargs=given)
    user = [{"role": "user", "content": "Hi"}]
    bodies: list[dict[str, Any]] = [{}, {"chat_template_kwargs": {"mood": "."}}, {"chat_template_kwargs": {"tools": 1}}]
    lines = [
        {"custom_id": f"{n}", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": user} | body}
        for n, body in enumerate(bodies)
    ]
    rows = read(write_jsonl(tmp_path / "b.jsonl", lines), chat, chat_template_kwargs=given)
    assert texts(rows[:2]) == ["Hi no!", "Hi no."]
    assert rows[2]["error_code"] == "bad_parameters"
    assert "body.chat_template_kwargs is not valid: 'tools' is set by other parameters" in rows[2]["error_message"]


def test_a_run_remarks_on_conversations_that_end_with_an_answer(tmp_path: Path) -> None:
    ended = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    path = write_jsonl(tmp_path / "a.jsonl", [{"m": ended}, {"m": json.dumps(ended)}, {"m": ended[:1]}, {"m": "[7]"}])

    def remark(path: Path, **keys: Any) -> str | None:
        config = make_config(path, **keys)
        return remark_on_last_messages(make_plan(config), config)

    found = remark(path, messages_column="m")
    assert found is not None
    assert found.startswith("2 of the first 4 rows end with a message of the assistant")
    assert "input.continue_final_message=true continues it" in found
    assert remark(path, messages_column="m", continue_final_message=True) is None
    assert remark(write_jsonl(tmp_path / "c.jsonl", [{"m": ended[:1]}]), messages_column="m") is None
    assert remark(write_jsonl(tmp_path / "d.jsonl", [{"prompt": "x"}])) is None
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": ended}}
    found = remark(write_jsonl(tmp_path / "e.jsonl", [line]))
    assert found is not None
    assert "continue_final_message in a line" in found
    line["body"] = {"messages": ended, "continue_final_message": True}
    assert remark(write_jsonl(tmp_path / "f.jsonl", [line])) is None


def test_conversations(tmp_path: Path, chat: ChatTemplate) -> None:
    talk = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "{{ 1 }}"},
    ]
    ruled = [{"role": "system", "content": "S"}, *talk]
    said = [(message["role"], message["content"]) for message in talk]
    path = write_jsonl(tmp_path / "a.jsonl", [{"m": talk}, {"m": ruled}, {"m": json.dumps(talk)}])
    rows = read(path, chat, messages_column="m", system="T")
    assert texts(rows) == [
        chatml(("system", "T"), *said), chatml(("system", "S"), *said), chatml(("system", "T"), *said),
    ]  # fmt: skip
    with_nulls = [{**message, "name": None} for message in talk]
    pq.write_table(
        pa.table({"m": [with_nulls, [{"role": "user", "content": "x", "name": None}], None]}), tmp_path / "a.parquet"
    )
    rows = read(tmp_path / "a.parquet", chat, messages_column="m")
    assert texts(rows[:2]) == [chatml(*said), chatml(("user", "x"))]
    assert rows[2]["error_code"] == "prompt_missing"
    assert rows[0]["m"] == with_nulls, "the column stays"
    csv = "m\n" + '"' + json.dumps(talk).replace('"', '""') + '"\n'
    assert texts(read(write(tmp_path / "a.csv", csv), chat, messages_column="m")) == [chatml(*said)]


@pytest.mark.parametrize(
    "messages",
    ["text", 5, {}, [], [5], [{}], [{"content": "x"}], [{"role": "user"}], [{"role": "robot", "content": "x"}],
     [{"role": "user", "content": 5}], [{"role": ["user"], "content": "x"}], "[1", '{"role": "user"}'],
)  # fmt: skip
def test_messages_of_a_wrong_shape_fail_their_row(tmp_path: Path, chat: ChatTemplate, messages: Any) -> None:
    good = [{"role": "user", "content": "x"}]
    rows = read(write_jsonl(tmp_path / "a.jsonl", [{"m": good}, {"m": messages}]), chat, messages_column="m")
    assert [row["error_code"] for row in rows] == ["", "bad_messages"]
    assert rows[1]["error_message"].startswith("a.jsonl line 2: ")
    assert rows[1]["prompt"] is None


def test_a_conversation_in_text_that_is_much_in_memory_fails_its_row(tmp_path: Path, chat: ChatTemplate) -> None:
    """As a line does: what is in its texts is not counted there."""
    bomb = "[" + "[]," * (MAX_MARKS // 2 + 1) + "[]]"
    good = json.dumps([{"role": "user", "content": bomb}])
    path = write_jsonl(tmp_path / "a.jsonl", [{"m": bomb}, {"m": good}])
    rows = read(path, chat, messages_column="m")
    assert [row["error_code"] for row in rows] == ["bad_messages", ""]
    assert f"commas and brackets, more than the {MAX_MARKS}" in rows[0]["error_message"]


def test_a_chat_template_that_raises_fails_the_row(tmp_path: Path) -> None:
    chat = through("{{ raise_exception('roles must alternate') if messages|length > 1 else 'ok' }}")
    message = {"role": "user", "content": "x"}
    rows = read(write_jsonl(tmp_path / "a.jsonl", [{"m": [message]}, {"m": [message] * 2}]), chat, messages_column="m")
    assert [(row["prompt"], row["error_code"]) for row in rows] == [("ok", ""), (None, "bad_template")]
    assert "roles must alternate" in rows[1]["error_message"]


def test_chats_and_completions_in_one_batch_file(tmp_path: Path, chat: ChatTemplate) -> None:
    head = {"method": "POST", "url": "/v1/chat/completions"}
    user = {"role": "user", "content": "Hi"}
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    bodies: list[tuple[dict[str, Any], str]] = [
        ({"messages": [user], "max_completion_tokens": 3, "max_tokens": 9}, ""),
        ({"messages": [{"role": "developer", "content": "D"}, user], "n": 2, "temperature": 1}, ""),
        ({"messages": [parts], "response_format": {"type": "text"}, "tools": [], "store": False}, ""),
        ({"messages": [user], "tools": [{"type": "function"}]}, "body.tools are wrong: tools[0] must be"),
        ({"messages": [user], "response_format": {"type": "json"}}, "body.response_format must have"),
        ({"messages": [user], "max_completion_tokens": 0}, "body.max_completion_tokens must be"),
        ({"messages": [user], "functions": [{}]}, "body.functions must be [] or null"),
        ({"messages": [user], "chat_template": "{{ 1 }}"}, "body.chat_template must be null"),
    ]
    lines = [{"custom_id": f"c{n}", **head, "body": body} for n, (body, _) in enumerate(bodies)]
    lines.append({"custom_id": "p", **head, "url": "/v1/completions", "body": {"prompt": "plain"}})
    rows = {row["id"]: row for row in read(write_jsonl(tmp_path / "a.jsonl", lines), chat)}
    assert rows["p"]["prompt"] == "plain"
    assert rows["c0"]["prompt"] == chatml(("user", "Hi"))
    assert json.loads(rows["c0"]["_sampling"]) == {"max_new_tokens": 3}
    assert rows["c1-0"]["prompt"] == rows["c1-1"]["prompt"] == chatml(("system", "D"), ("user", "Hi"))
    assert rows["c2"]["prompt"] == chatml(("user", "a\nb"))
    for number, (_, reason) in enumerate(bodies):
        row = rows.get(f"c{number}") or rows[f"c{number}-0"]
        assert row["error_code"] == ("bad_parameters" if reason else ""), row
        assert reason in row["error_message"]
    rows = {row["id"]: row for row in read(tmp_path / "a.jsonl")}
    assert (rows["c0"]["error_code"], rows["p"]["error_code"]) == ("bad_parameters", "")
    assert "set input.chat_template" in rows["c0"]["error_message"]
    bad = [{"custom_id": "x", **head, "body": {"messages": value}} for value in (None, "x", [], [{"role": "user"}])]
    codes = [row["error_code"] for row in read(write_jsonl(tmp_path / "b.jsonl", bad), chat)]
    assert (
        codes == ["prompt_missing", "bad_messages", "bad_messages", "bad_messages"] or codes[1:] == ["duplicate_id"] * 3
    )
