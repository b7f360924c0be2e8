"""A replica over real HTTP without Ray: bodies of requests that are odd."""

from typing import Any

import httpx2 as httpx
import pytest

from pipeline.json_size import MAX_MARKS
from pipeline.openai_format.parameters import BadParameter
from pipeline.service.api_error import ApiError
from pipeline.service.requests import CompletionRequest, parse_body
from tests.support.measured_memory import most_bytes
from tests.support.service_helpers import error_of, post


@pytest.mark.parametrize("key", ["temperature", "top_p", "presence_penalty"])
def test_numbers_that_no_float_can_hold(url: str, key: str) -> None:
    answer = httpx.post(f"{url}/v1/completions", content=b'{"prompt": "x", "%s": 1%s}' % (key.encode(), b"0" * 400))
    assert error_of(answer) == (400, "invalid_value")
    assert answer.json()["error"]["param"] == key


def test_a_number_that_no_tensor_of_integers_can_hold(url: str) -> None:
    assert post(url, temperature=10**300).status_code == 200


def test_a_prompt_nested_to_any_depth() -> None:
    for depth in range(2, 1100):
        with pytest.raises((BadParameter, ApiError), match=r"prompt must be|not valid JSON"):
            CompletionRequest.parse(parse_body(b'{"prompt": ' + b"[" * depth + b"]" * depth + b"}"))


def test_a_body_of_more_values_than_any_request_has_is_refused_unread() -> None:
    body = b'{"prompt": [' + b"[]," * MAX_MARKS + b"[]]}"
    with most_bytes(12 << 20), pytest.raises(ApiError, match="commas and brackets, more than the allowed") as caught:
        parse_body(body)
    assert caught.value.status == 400


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16", "utf-32-be"])
def test_a_body_in_another_encoding_is_not_guessed(encoding: str) -> None:
    with pytest.raises(ApiError) as caught:  # its brackets were not counted
        parse_body('{"prompt": "a"}'.encode(encoding))
    assert caught.value.status == 400


def test_a_body_may_begin_with_a_byte_order_mark() -> None:
    assert parse_body('{"prompt": "a"}'.encode("utf-8-sig")) == {"prompt": "a"}


@pytest.mark.parametrize("body", [{"k" * 100_000: 1}, {"model": "m" * 100_000}, {"temperature": "t" * 100_000}])
def test_errors_do_not_repeat_what_was_sent(url: str, body: dict[str, Any]) -> None:
    answer = post(url, **body)
    assert answer.status_code in (400, 404)
    assert len(answer.content) < 500


def test_no_new_tokens_go_with_an_echo_only() -> None:
    assert CompletionRequest.parse({"prompt": "a", "max_tokens": 0, "echo": True}).sampling() == {"max_new_tokens": 0}
    with pytest.raises(BadParameter, match="max_tokens must be at least 1; 0 goes with echo=true only"):
        CompletionRequest.parse({"prompt": "a", "max_tokens": 0})
