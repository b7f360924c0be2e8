"""Chats over real HTTP of one replica, by the real `openai` client: answers as offline, and streams.

The model is a tiny one with a chat template; the reference is the same decoder with the rendered tokens.
"""

import asyncio
import json
from datetime import datetime

import httpx2 as httpx
import openai
import pytest

from actors.generator import Generator
from tests.support.chat_service import USER, ask, client, client_of, generator, offline, refused, rendered, url

__all__ = ["client", "generator", "url"]  # fixtures


# Answers


def test_an_answer_is_that_of_offline(client: openai.OpenAI, generator: Generator) -> None:
    messages = [{"role": "system", "content": "x"}, *USER, {"role": "assistant", "content": "c"}, *USER]
    answer, wanted = ask(client, messages, return_token_ids=True), offline(generator, messages, 12)
    (choice,) = answer.choices
    assert choice.token_ids == wanted.tokens
    assert choice.prompt_token_ids == rendered(generator, messages)
    assert (choice.message.role, choice.message.content) == ("assistant", generator.tokenizer.decode(wanted.tokens))
    assert choice.message.refusal is choice.message.tool_calls is choice.logprobs is None
    assert choice.finish_reason == wanted.finish_reason
    assert (answer.object, answer.model, answer.id[:9]) == ("chat.completion", "tiny", "chatcmpl-")
    prompt = len(choice.prompt_token_ids)
    made = len(wanted.tokens)
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made
    }  # fmt: skip


def test_sampled_answers_have_ids_of_their_own(client: openai.OpenAI, generator: Generator) -> None:
    keys = {"temperature": 0.9, "seed": 7, "top_p": 0.95}
    answer = ask(client, n=3, row_id="row", return_token_ids=True, **keys)
    for number, choice in enumerate(answer.choices):
        assert choice.index == number
        assert choice.token_ids == offline(generator, USER, 12, f"row-{number}", **keys).tokens
    assert len({tuple(choice.token_ids) for choice in answer.choices}) == 3
    prompt = len(rendered(generator, USER))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, 36)
    (alone,) = ask(client, row_id="row-1", return_token_ids=True, **keys).choices
    assert alone.token_ids == answer.choices[1].token_ids
    assert ask(client, **keys).choices[0].message == ask(client, **keys).choices[0].message
    assert len({ask(client, temperature=1).choices[0].message.content for _ in range(5)}) > 1


def test_a_developer_and_parts_of_text(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    first = ask(
        client, [{"role": "developer", "content": "x"}, {"role": "user", "content": parts}], return_token_ids=True
    )
    second = ask(
        client, [{"role": "system", "content": "x"}, {"role": "user", "content": "a\nb"}], return_token_ids=True
    )
    assert first.choices[0].prompt_token_ids == second.choices[0].prompt_token_ids
    assert first.choices[0].token_ids == second.choices[0].token_ids


def test_an_answer_goes_into_the_next_question(client: openai.OpenAI) -> None:
    message = ask(client).choices[0].message
    assert ask(client, [*USER, message, *USER]).choices[0].message.content
    assert ask(client, [*USER, message.model_dump(), *USER]).choices[0].message.content


def test_the_limit_of_an_answer(client: openai.OpenAI, generator: Generator) -> None:
    assert ask(client, max_tokens=3).usage.completion_tokens == 3
    assert ask(client, max_tokens=9, max_completion_tokens=4).usage.completion_tokens == 4
    room = generator.model.config.max_position_embeddings - len(rendered(generator, USER))
    assert ask(client, max_tokens=openai.omit).usage.completion_tokens == room  # 256 would not fit


def test_the_last_message_is_continued(
    client: openai.OpenAI, generator: Generator, caplog: pytest.LogCaptureFixture
) -> None:
    begun = [*USER, {"role": "assistant", "content": "c"}]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    choice = ask(client, begun, return_token_ids=True, **more).choices[0]
    assert choice.prompt_token_ids == generator.tokenizer.encode_rendered(["</s>u:ab\na:c"])[0]
    assert not caplog.records
    for _ in range(2):
        assert ask(client, begun, return_token_ids=True).choices[0].prompt_token_ids == rendered(generator, begun)
    (record,) = caplog.records
    assert "continue_final_message=true continues it" in record.message
    param, code, message = refused(client, USER, extra=more)
    assert (param, code) == ("messages[0].role", "invalid_value")
    assert "must be 'assistant'" in message


def test_stop(client: openai.OpenAI, generator: Generator) -> None:
    text = generator.tokenizer.decode(offline(generator, USER, 12).tokens)
    choice = ask(client, stop=[text[4:6], "never"]).choices[0]
    assert (choice.message.content, choice.finish_reason) == (text[: text.index(text[4:6])], "stop")


def test_the_time_is_that_of_the_request(client: openai.OpenAI, generator: Generator) -> None:
    choice = ask(client, [{"role": "user", "content": "date"}], return_token_ids=True).choices[0]
    wanted = f"</s>{datetime.now().year}u:date\na:"
    assert choice.prompt_token_ids == generator.tokenizer.encode_rendered([wanted])[0]


def test_logprobs(client: openai.OpenAI, generator: Generator) -> None:
    """Beside those of a completion of the same tokens."""
    choice = ask(client, logprobs=True, top_logprobs=3).choices[0]
    plain = (
        client.completions.create(
            model="tiny", prompt=rendered(generator, USER), max_tokens=12, temperature=0, logprobs=3
        )
        .choices[0]
        .logprobs
    )
    assert plain is not None
    assert [one.token for one in choice.logprobs.content] == plain.tokens
    assert [one.logprob for one in choice.logprobs.content] == plain.token_logprobs
    for one, top in zip(choice.logprobs.content, plain.top_logprobs or [], strict=True):
        assert len(one.top_logprobs) == 3
        assert one.logprob == max(other.logprob for other in one.top_logprobs)
        assert {other.token: other.logprob for other in one.top_logprobs}.items() <= top.items()
        assert one.bytes == (None if one.token.startswith("token_id:") else list(one.token.encode()))
    assert ask(client, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    assert ask(client, logprobs=False).choices[0].logprobs is None
    stream = ask(client, logprobs=True, top_logprobs=3, stream=True)
    streamed = [one for chunk in stream for c in chunk.choices if c.logprobs for one in c.logprobs.content]
    assert streamed == choice.logprobs.content


# Streams


def test_a_stream_is_the_answer(client: openai.OpenAI) -> None:
    whole = ask(client, temperature=0.8, seed=3, n=2)
    chunks = list(ask(client, temperature=0.8, seed=3, n=2, stream=True, stream_options={"include_usage": True}))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)
    for wanted in whole.choices:
        mine = [c for chunk in chunks for c in chunk.choices if c.index == wanted.index]
        assert [c.delta.role for c in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert not mine[0].delta.content
        assert "".join(c.delta.content or "" for c in mine) == wanted.message.content
        assert [c.finish_reason for c in mine] == [None] * (len(mine) - 1) + [wanted.finish_reason]


def test_the_wire_format_of_a_stream(url: str) -> None:
    asked = {"messages": USER, "max_tokens": 5, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=asked, timeout=30) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    first, *_, last = [json.loads(line.removeprefix("data: "))["choices"] for line in lines[:-1]]
    role = {"role": "assistant", "content": "", "refusal": None}
    assert first == [{"index": 0, "delta": role, "logprobs": None, "finish_reason": None}]
    assert last[0]["finish_reason"] == "length"


def test_the_async_client(url: str) -> None:
    async def text() -> str:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "ab"}], max_tokens=12, temperature=0, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(text()) == ask(client_of(url)).choices[0].message.content
