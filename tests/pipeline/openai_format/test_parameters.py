"""The parameters of OpenAI's and vLLM's APIs: at values that ask for nothing all pass, others are refused with why.

tests/support/recorded/vllm_defaults.json has the parameters of vLLM's completions and chats, each at its default.
"""

import json
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from pipeline.openai_format.parameters import BadParameter, ChatLine, CompletionLine, RequestParameters
from pipeline.openai_format.unsupported import BATCH, CHATS, COMPLETIONS, WITHOUT_EFFECT
from pipeline.service.requests import ChatRequest, CompletionRequest
from skipdecode.config.sampling import RepetitionDetection, Sampling
from skipdecode.config.structured_outputs import StructuredOutputs

ROOT = Path(__file__).parents[3]
DEFAULTS = json.loads((ROOT / "tests" / "support" / "recorded" / "vllm_defaults.json").read_text())
PROMPTS = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
OF_PROMPTS = frozenset({"prompt", "messages", "model", "n"})  # others check these in a batch line
KINDS: list[tuple[str, type[RequestParameters]]] = [
    ("completions", CompletionRequest),
    ("completions", CompletionLine),
    ("chat", ChatRequest),
    ("chat", ChatLine),
]


def parse(kind: type[RequestParameters], body: dict[str, Any]) -> RequestParameters:
    prompt = {name: value for name, value in PROMPTS.items() if name in kind.model_fields}
    return kind.parse(prompt | body, ignored=frozenset() if prompt else OF_PROMPTS)


@pytest.mark.parametrize(("api", "kind"), KINDS)
def test_every_parameter_of_vllm_passes_at_its_default(api: str, kind: type[RequestParameters]) -> None:
    for name, value in DEFAULTS[api].items():
        parse(kind, {name: value})
    own = parse(kind, DEFAULTS[api]).sampling()
    assert not Sampling(max_new_tokens=1).with_parameters(own).processes_logits


@pytest.mark.parametrize(("api", "kind"), KINDS)
def test_every_parameter_of_openai_is_known(api: str, kind: type[RequestParameters]) -> None:
    theirs = chat_create_params if api == "chat" else completion_create_params
    names = set(get_type_hints(theirs.CompletionCreateParamsStreaming))
    assert names - kind.model_fields.keys() - kind.UNSUPPORTED.keys() - WITHOUT_EFFECT - OF_PROMPTS == set()


@pytest.mark.parametrize("kind", [kind for _, kind in KINDS])
def test_every_neutral_value_passes_and_any_other_is_refused_with_the_reason(kind: type[RequestParameters]) -> None:
    for name, unsupported in kind.UNSUPPORTED.items():
        for neutral in (*unsupported.neutral, None):
            parse(kind, {name: neutral})
        for other in (7, True, "no such value", {"no": 1}, [7], 0.5):
            if not unsupported.accepts(other):
                with pytest.raises(BadParameter) as caught:
                    parse(kind, {name: other})
                assert caught.value.name == name
                assert str(caught.value).endswith(f": {unsupported.why}")


def test_null_and_labels_are_let_through() -> None:
    for name in WITHOUT_EFFECT:
        for value in ("x", {"a": "b"}, True, None):
            parse(ChatRequest, {name: value})
    assert parse(ChatRequest, {"no_such_parameter": None})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("repetition_penalty", 0, "repetition_penalty must be greater than 0, got 0"),
        ("presence_penalty", False, "presence_penalty must be a valid number, got false"),
        ("frequency_penalty", 2.5, "frequency_penalty must be less than or equal to 2, got 2.5"),
        ("min_p", 1.5, "min_p must be less than or equal to 1, got 1.5"),
        ("logit_bias", {"yes": 5}, 'logit_bias must have token ids as keys, got "yes"'),
        ("logit_bias", {"5": 101}, "logit_bias must be less than or equal to 100, got 101"),
        ("stop_token_ids", [-1], "stop_token_ids must be greater than or equal to 0, got -1"),
        ("repetition_detection", {"max_pattern_size": 3, "min_count": 1}, "repetition_detection is not valid"),
        ("repetition_detection", {"max_pattern_size": 3, "sizes": 1}, "repetition_detection is not valid"),
        ("response_format", {"type": "xml"}, "response_format must have the type text, json_object or json_schema"),
        ("response_format", {"type": "json_schema"}, 'response_format must have {"json_schema": {"name": ...'),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "a"}}, "response_format must have"),
        ("structured_outputs", {"regex": "a", "choice": ["b"]}, "structured_outputs is not valid: give one of"),
        ("structured_outputs", {"structural_tag": "a"}, "structured_outputs is not valid: 'structural_tag' is not"),
        ("guided_json", {}, "guided_json must be null, got {}: use response_format or structured_outputs"),
        ("skip_special_tokens", 1, "skip_special_tokens must be true or null, got 1: texts are without special tokens"),
        ("reasoning_effort", "low", 'reasoning_effort must be null, got "low": use chat_template_kwargs'),
        ("chat_template_kwargs", {"messages": []}, "chat_template_kwargs is not valid: 'messages' is set by other"),
        ("chat_template_kwargs", 5, "chat_template_kwargs must be a valid dictionary, got 5"),
        ("frequncy_penalty", 1, "frequncy_penalty is not known; remove it"),
        ("max_token", 1, "max_token is not known; remove it (or is it max_tokens?)"),
        ("add_generation_prompt", False, "add_generation_prompt may be false with continue_final_message=true only"),
    ],
)
def test_a_refusal_says_why(name: str, value: Any, message: str) -> None:
    with pytest.raises(BadParameter) as caught:
        parse(ChatRequest, {name: value})
    assert str(caught.value).startswith(message)


def test_a_whole_float_is_an_integer() -> None:
    asked = parse(ChatRequest, {"max_tokens": 6.0, "top_k": -1.0, "seed": 3.0, "n": 2.0, "top_logprobs": 0.0})
    assert asked.sampling() == {"max_new_tokens": 6, "top_k": 0, "seed": 3}
    assert [type(value) for value in asked.sampling().values()] == [int, int, int]
    assert parse(CompletionRequest, {"logprobs": 2.0, "max_completion_tokens": 4.0}).sampling() == {"max_new_tokens": 4}
    for value in (6.5, "6", True, 1e300, float("inf")):
        with pytest.raises(BadParameter, match="max_tokens"):
            parse(CompletionRequest, {"max_tokens": value})


def test_sampling_parameters_have_the_names_of_sampling() -> None:
    asked = {"min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -2.0, "repetition_penalty": 1.2,
             "logit_bias": {"7": -100, "08": 5.0}, "min_tokens": 3, "stop_token_ids": [9.0],
             "repetition_detection": {"max_pattern_size": 8, "min_pattern_size": 0, "min_count": 3}}  # fmt: skip
    sampling = Sampling().with_parameters(parse(ChatRequest, asked).sampling())
    assert sampling == Sampling(
        min_p=0.1, presence_penalty=1, frequency_penalty=-2.0, repetition_penalty=1.2,
        logit_bias=((7, -100.0), (8, 5.0)), min_new_tokens=3, stop_token_ids=(9,),
        repetition_detection=RepetitionDetection(8, 1, 3),
    )  # fmt: skip
    off = parse(ChatRequest, {"repetition_detection": {"max_pattern_size": 0, "min_pattern_size": 0, "min_count": 0}})
    assert off.sampling() == {}


@pytest.mark.parametrize(
    ("asked", "structure"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"structured_outputs": {"disable_any_whitespace": True}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutputs("json_object", "")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "null"}}}},
            StructuredOutputs("json", '{"type": "null"}'),
        ),
        ({"structured_outputs": {"json": '{"type": "null"}'}}, StructuredOutputs("json", '{"type": "null"}')),
        ({"structured_outputs": {"choice": ["a", "b"], "regex": None}}, StructuredOutputs("choice", '["a", "b"]')),
        (
            {"structured_outputs": {"regex": "a+"}, "response_format": {"type": "text"}},
            StructuredOutputs("regex", "a+"),
        ),
    ],
)
def test_structures_are_those_of_openai_and_vllm(asked: dict[str, Any], structure: StructuredOutputs | None) -> None:
    for kind in (ChatRequest, CompletionLine):
        assert Sampling().with_parameters(parse(kind, asked).sampling()).structured_outputs == structure
    with pytest.raises(BadParameter, match="structured_outputs excludes response_format"):
        parse(ChatRequest, {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}})


def test_a_stream_option_that_asks_for_nothing_needs_no_stream() -> None:
    for options in ({}, {"include_usage": False}, {"include_usage": None, "continuous_usage_stats": False}):
        assert not parse(ChatRequest, {"stream_options": options}).include_usage  # type: ignore[attr-defined]
    with pytest.raises(BadParameter, match="goes with stream=true only"):
        parse(ChatRequest, {"stream_options": {"include_usage": True}})


def test_the_page_lists_every_parameter() -> None:
    page = (ROOT / "docs" / "serving.md").read_text()
    known = {*CompletionRequest.model_fields, *ChatRequest.model_fields, *COMPLETIONS, *CHATS, *BATCH, *WITHOUT_EFFECT}
    assert [name for name in sorted(known) if f"`{name}`" not in page] == []
