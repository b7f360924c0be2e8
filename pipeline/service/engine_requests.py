"""What was asked, as requests of the engine: texts and messages to tokens, sampling, and what the model cannot take.

From any thread. No Ray.
"""

import secrets
from collections.abc import Sequence
from datetime import datetime

from actors.generator import Generator
from actors.templates.chat_template import ChatTemplate
from actors.templates.chat_template_files import load_chat_template
from actors.templates.sandbox import TemplateError, TemplateRaised
from pipeline.openai.parameters import BadParameter, cut
from pipeline.service import errors
from pipeline.service.config import ServeConfig
from pipeline.service.errors import ApiError
from pipeline.service.parse import AskedRequest, ChatRequest, CompletionRequest
from skipdecode.config.sampling import Sampling
from skipdecode.engine.request import Request

CHAT_TOKENS = 256  # of an answer to a chat that names no limit, where there is room; the 16 of a completion are few


class Prompts:
    def __init__(self, generator: Generator, config: ServeConfig) -> None:
        self.generator, self.config = generator, config
        self.chat_template, self._chat_trouble = _chat_template(generator)

    def of_completion(self, asked: CompletionRequest) -> list[Request]:
        """What the engine is to decode, one per answer, those to a prompt side by side. From any thread.

        ApiError for what this model cannot.
        """
        self._check_model(asked)
        try:
            prompts = [self._tokens(prompt) for prompt in asked.prompts]
            sampling = self._sampling(asked, self.config.sampling.max_new_tokens)
            _check_answers(asked, sampling)
            for tokens in prompts:
                self._check_fit(tokens, sampling.max_new_tokens)
        except BadParameter as error:
            raise errors.bad_parameter(error) from error
        scores = asked.echo and asked.logprobs is not None
        return [
            Request(row_id, tokens, sampling, asked.logprobs, scores)
            for prompt_id, tokens in zip(_row_ids(asked.row_id, len(prompts)), prompts, strict=True)
            for row_id in _row_ids(prompt_id, asked.num_answers)
        ]

    def of_chat(self, asked: ChatRequest) -> list[Request]:
        """The same of a chat, one per answer."""
        self._check_model(asked)
        text = self._rendered(asked)
        positions = self.generator.model.config.max_position_embeddings
        try:
            tokens = self._tokens(text, is_rendered=True)
            usual = max(self.config.sampling.max_new_tokens, min(CHAT_TOKENS, positions - len(tokens)))
            sampling = self._sampling(asked, usual)
            _check_answers(asked, sampling)
            self._check_fit(tokens, sampling.max_new_tokens)
        except BadParameter as error:
            named = BadParameter("messages", error.reason) if error.name == "prompt" else error
            raise errors.bad_parameter(named) from error
        return [Request(i, tokens, sampling, asked.logprobs) for i in _row_ids(asked.row_id, asked.num_answers)]

    def _check_model(self, asked: AskedRequest) -> None:
        if asked.model is not None and asked.model not in (self.config.served_name, self.config.model.source):
            raise ApiError(
                404,
                f"the model {cut(repr(asked.model))} does not exist here; there is {self.config.served_name!r}",
                param="model",
                code="model_not_found",
            )

    def _rendered(self, asked: ChatRequest) -> str:
        if self.chat_template is None:
            message = f"the model {self.config.served_name!r} has no chat template{self._chat_trouble}"
            raise ApiError(400, f"{message}; send a prompt to /v1/completions", code="no_chat_template")
        try:
            return self.chat_template.render(asked.messages, now=datetime.now())
        except TemplateRaised as error:
            message = f"messages: the chat template refuses them: {error}"
        except TemplateError as error:
            message = f"messages: the chat template cannot render them: {error}"
        raise ApiError(400, message, param="messages", code="invalid_value")

    def _tokens(self, prompt: str | list[int], *, is_rendered: bool = False) -> list[int]:
        if isinstance(prompt, str):
            tokenizer = self.generator.tokenizer
            limit = 2 * tokenizer.max_token_chars * self.generator.model.config.max_position_embeddings
            if len(prompt) > limit:  # more than could fit, whatever it says
                raise BadParameter("prompt", f"has {len(prompt)} characters, more than could fit the model's context")
            (tokens,) = (tokenizer.encode_rendered if is_rendered else tokenizer.encode)([prompt])
            if not tokens:
                raise BadParameter("prompt", "is empty, and this model has no token that begins a text")
            return tokens
        vocabulary = self.generator.model.config.vocab_size
        if max(prompt) >= vocabulary:
            raise BadParameter("prompt", f"holds token {max(prompt)}, the vocabulary has {vocabulary} tokens")
        return prompt

    def _sampling(self, asked: AskedRequest, usual_tokens: int) -> Sampling:
        default, own = self.config.sampling, asked.sampling
        return Sampling(
            max_new_tokens=usual_tokens if asked.max_tokens is None else max(asked.max_tokens, 1),
            temperature=own.get("temperature", default.temperature),
            top_p=own.get("top_p", default.top_p),
            top_k=own.get("top_k", default.top_k),
            seed=own.get("seed", secrets.randbits(63)),  # without one every answer is another, as in the API
            stop=tuple(own.get("stop", ())),
            ignore_eos=own.get("ignore_eos", False),
        )

    def _check_fit(self, tokens: Sequence[int], max_new_tokens: int) -> None:
        limit = self.generator.model.config.max_position_embeddings
        if len(tokens) + max_new_tokens > limit:
            raise BadParameter(
                "max_tokens" if len(tokens) < limit else "prompt",
                f"does not fit: the model has {limit} positions, the prompt has {len(tokens)} tokens and max_tokens is "
                f"{max_new_tokens}; shorten either",
            )


def _chat_template(generator: Generator) -> tuple[ChatTemplate | None, str]:
    """That of the checkpoint; and where it has one that is of no use, why. Completions go on without."""
    source = generator.config.tokenizer or generator.config.source
    try:
        return load_chat_template(source, generator.model.config.model_type), ""
    except ValueError as error:
        return None, f" that could be used: {error}"


def _check_answers(asked: AskedRequest, sampling: Sampling) -> None:
    if asked.num_answers > 1 and sampling.temperature == 0:
        raise BadParameter("n", f"is {asked.num_answers}, and at temperature 0 all answers are the same")


def _row_ids(row_id: str, count: int) -> list[str]:
    return [row_id] if count == 1 else [f"{row_id}-{n}" for n in range(count)]
