"""The parameters of OpenAI's and vLLM's completions and chats that this program does not have.

Clients send many of them at a value that asks for nothing, which is accepted; any other value is refused with the
reason. A parameter that gets supported moves from here to the models in `parameters`. docs/serving.md has this table.
"""

from dataclasses import dataclass
from typing import Final

from pipeline.formatting import Json


@dataclass(frozen=True)
class Unsupported:
    why: str
    """Why any other value is refused."""
    neutral: tuple[Json, ...] = ()
    """The values that ask for nothing, besides null."""

    def accepts(self, value: Json) -> bool:
        """Whether the value asks for nothing. In JSON, false and 0 are not the same."""
        return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in self.neutral)


WITHOUT_EFFECT: Final = frozenset(
    {
        "user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options",
        "request_id", "session_id", "truncation_side", "return_mm_kwargs",
    }
)  # fmt: skip
"""Parameters that cannot change an answer here, whatever their value."""

_SAMPLING = "this way of sampling is not supported"
_TOOLS = "use tools and tool_choice"
_FORMATS = "use response_format or structured_outputs"
_TEXT_ONLY = "the model reads and writes text alone"
_REASONING = "use chat_template_kwargs, if the chat template reads one that decides how the model thinks"
_TEMPLATE = "conversations are rendered by the chat template of the served model alone"
_ECHO = "use logprobs with echo on /v1/completions to score a prompt"
_IDS = "use return_token_ids"
_INTERNAL = "it belongs to another engine"

COMMON: Final[dict[str, Unsupported]] = {
    "allowed_token_ids": Unsupported(_SAMPLING),
    "bad_words": Unsupported(_SAMPLING, ([],)),
    "logits_processors": Unsupported(_SAMPLING, ([],)),
    "watermarking": Unsupported(_SAMPLING, (False,)),
    "best_of": Unsupported("every answer that is generated is returned; use n", (1,)),
    "use_beam_search": Unsupported("beam search is not supported", (False,)),
    "length_penalty": Unsupported("beam search is not supported", (1,)),
    "early_stopping": Unsupported("beam search is not supported", (False,)),
    "include_stop_str_in_output": Unsupported("a text ends before its stop string", (False,)),
    "skip_special_tokens": Unsupported("texts are without special tokens", (True,)),
    "spaces_between_special_tokens": Unsupported("texts are without special tokens", (True,)),
    "truncate_prompt_tokens": Unsupported("a prompt that does not fit is refused, never cut"),
    "prompt_logprobs": Unsupported(_ECHO),
    "logprob_token_ids": Unsupported("log-probabilities are those of the likeliest tokens"),
    "return_tokens_as_token_ids": Unsupported(_IDS, (False,)),
    "return_token_offsets": Unsupported("logprobs on /v1/completions has text_offset", (False,)),
    "guided_json": Unsupported(_FORMATS),
    "guided_regex": Unsupported(_FORMATS),
    "guided_choice": Unsupported(_FORMATS),
    "guided_grammar": Unsupported(_FORMATS),
    "guided_decoding_backend": Unsupported(_FORMATS),
    "guided_whitespace_pattern": Unsupported(_FORMATS),
    "structural_tag": Unsupported(_FORMATS),
    "thinking_token_budget": Unsupported(_REASONING, (-1,)),
    "service_tier": Unsupported("all requests are served alike", ("auto", "default")),
    "priority": Unsupported("all requests are served alike", (0,)),
    "store": Unsupported("answers are not stored", (False,)),
    "stream_interval": Unsupported("limits.stream_events_per_s decides how many tokens an event carries", (1,)),
    "cache_salt": Unsupported("prompts that start together share their prefix, and no salt keeps them apart"),
    "kv_transfer_params": Unsupported(_INTERNAL, ({},)),
    "ec_transfer_params": Unsupported(_INTERNAL, ({},)),
    "vllm_xargs": Unsupported(_INTERNAL, ({},)),
    "routed_experts_prompt_start": Unsupported(_INTERNAL, (0,)),
}
"""Of completions and chats alike."""

COMPLETIONS: Final[dict[str, Unsupported]] = COMMON | {
    "suffix": Unsupported("text is not inserted before a suffix", ("",)),
    "prompt_embeds": Unsupported("a prompt is text or token ids"),
    "add_special_tokens": Unsupported("to leave special tokens out, send token ids", (True,)),
}

CHATS: Final[dict[str, Unsupported]] = COMMON | {
    "echo": Unsupported("an answer is the new message alone", (False,)),
    "functions": Unsupported(_TOOLS, ([],)),
    "function_call": Unsupported(_TOOLS, ("none",)),
    "web_search_options": Unsupported("the server does not look anything up"),
    "modalities": Unsupported(_TEXT_ONLY, (["text"],)),
    "audio": Unsupported(_TEXT_ONLY),
    "media_io_kwargs": Unsupported(_TEXT_ONLY, ({},)),
    "mm_processor_kwargs": Unsupported(_TEXT_ONLY, ({},)),
    "reasoning_effort": Unsupported(_REASONING),
    "include_reasoning": Unsupported(_REASONING, (True,)),
    "verbosity": Unsupported("say in the messages how long an answer should be", ("medium",)),
    "prediction": Unsupported("answers are not predicted by the client"),
    "moderation": Unsupported("answers are not moderated"),
    "add_special_tokens": Unsupported("the chat template brings its own special tokens", (False,)),
    "chat_template": Unsupported(_TEMPLATE),
    "documents": Unsupported(_TEMPLATE, ([],)),
    "return_prompt_text": Unsupported(_IDS, (False,)),
}

_STREAMS = "a batch has no streams"
_HTTP = "the answers of a batch do not carry it"
BATCH: Final[dict[str, Unsupported]] = {
    "stream": Unsupported(_STREAMS, (False,)),
    "stream_options": Unsupported(_STREAMS, ({}, {"include_usage": False})),
    "return_token_ids": Unsupported(f"{_HTTP}; the data files have generated_tokens", (False,)),
    "return_layers": Unsupported(f"{_HTTP}; the data files have layers_run", (False,)),
    "row_id": Unsupported("custom_id is the id of a line", ("",)),
}
"""Of the lines of batch files, beside the above."""
