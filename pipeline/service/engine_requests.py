"""HTTP requests to engine requests: prompts and messages to tokens, and a check of what the model cannot take.

Called from any thread. No Ray.
"""

import logging
import secrets
from collections.abc import Sequence
from datetime import datetime

from actors.generator import Generator
from actors.templates.chat_template import ChatTemplate
from actors.templates.chat_template_files import load_chat_template
from actors.templates.sandbox import TemplateError, TemplateRaised
from actors.text.tool_calls import ToolForm, tool_form, tool_grammar
from pipeline.openai_format.parameters import BadParameter, cut
from pipeline.service.api_error import ApiError
from pipeline.service.config import ServeConfig
from pipeline.service.requests import ChatRequest, CompletionRequest, HttpParameters, Prompt
from skipdecode.config.sampling import Sampling
from skipdecode.engine.request import Request

REQUEST_NAMES = {"min_new_tokens": "min_tokens"}
"""Sampling parameters that have another name in requests."""
CHAT_TOKENS = 256  # default limit of an answer to a chat; the 16 of a completion are too few


class Prompts:
    """Makes engine requests for one model and configuration; BadParameter or ApiError for what it cannot do."""

    def __init__(self, generator: Generator, config: ServeConfig) -> None:
        self.generator, self.config = generator, config
        self.chat_template: ChatTemplate | None = None
        self._no_template = ""
        self._has_remarked = False
        source = generator.config.tokenizer or generator.config.source
        try:
            self.chat_template = load_chat_template(source, generator.model.config.tokenizer_rules)
        except ValueError as error:  # completions still work
            self._no_template = f" that could be used: {error}"
        self.tool_form: ToolForm | None = None
        self._no_form = ""
        if self.chat_template is not None:
            try:
                self.tool_form = tool_form(self.chat_template.source)
            except ValueError as error:
                self._no_form = str(error)

    def of_completion(self, asked: CompletionRequest) -> list[Request]:
        """One request per answer; the answers to a prompt follow each other."""
        self._check_model(asked)
        limit = self.config.limits.max_prompts
        if len(asked.prompt) > limit:
            raise BadParameter("prompt", f"holds {len(asked.prompt)} prompts, at most {limit} may come in one request")
        prompts = [self._tokens("prompt", prompt) for prompt in asked.prompt]
        sampling = self._sampling(asked, self.config.sampling.max_new_tokens)
        self._check_n(asked, sampling, 1 if asked.max_new_tokens == 0 else limit // len(prompts))
        for tokens in prompts:  # one that is scored alone may fill the model
            self._check_fit("prompt", tokens, 0 if asked.max_new_tokens == 0 else sampling.max_new_tokens)
        scores_prompt = bool(asked.echo) and asked.logprobs is not None
        return [
            Request(row_id, tokens, sampling, asked.logprobs, scores_prompt)
            for prompt_id, tokens in zip(_row_ids(asked.row_id, len(prompts)), prompts, strict=True)
            for row_id in _row_ids(prompt_id, asked.n or 1)
        ]

    def of_chat(self, asked: ChatRequest) -> list[Request]:
        """One request per answer."""
        self._check_model(asked)
        tokens = self._tokens("messages", self._rendered(asked), is_rendered=True)
        room = self.generator.model.config.max_position_embeddings - len(tokens)
        structure = self._forced_calls(asked)
        sampling = self._sampling(asked, max(self.config.sampling.max_new_tokens, min(CHAT_TOKENS, room)), structure)
        self._check_n(asked, sampling, self.config.limits.max_prompts)
        self._check_fit("messages", tokens, sampling.max_new_tokens)
        num_top = (asked.top_logprobs or 0) if asked.logprobs else None
        return [Request(row_id, tokens, sampling, num_top) for row_id in _row_ids(asked.row_id, asked.n or 1)]

    def _check_model(self, asked: HttpParameters) -> None:
        if asked.model is not None and asked.model not in (self.config.served_name, self.config.model.source):
            raise ApiError(
                404,
                f"the model {cut(repr(asked.model))} does not exist here; there is {self.config.served_name!r}",
                param="model",
                code="model_not_found",
            )

    def _rendered(self, asked: ChatRequest) -> str:
        if self.chat_template is None:
            message = f"the model {self.config.served_name!r} has no chat template{self._no_template}"
            raise ApiError(400, f"{message}; send a prompt to /v1/completions", code="no_chat_template")
        continues = bool(asked.continue_final_message)
        if not continues and asked.messages[-1]["role"] == "assistant" and not self._has_remarked:
            self._has_remarked = True
            logging.getLogger("ray.serve").warning(
                "a conversation ends with a message of the assistant and gets another one after it; "
                "continue_final_message=true continues it instead (said once)"
            )
        self._check_tools(self.chat_template, asked)
        try:
            return self.chat_template.render(
                asked.messages,
                now=datetime.now(),
                continues=continues,
                kwargs=asked.chat_template_kwargs or {},
                tools=asked.shown_tools,
            )
        except TemplateRaised as error:
            message = f"messages: the chat template refuses them: {error}"
        except TemplateError as error:
            message = f"messages: the chat template cannot render them: {error}"
        raise ApiError(400, message, param="messages", code="invalid_value")

    def _check_tools(self, template: ChatTemplate, asked: ChatRequest) -> None:
        """BadParameter where the model cannot be told of the request's tools, or its calls not be read."""
        if asked.shown_tools is None:
            return
        if not template.reads_tools:
            raise BadParameter("tools", f"cannot be used: the chat template of {self.config.served_name} has no tools")
        if self.tool_form is None:
            raise BadParameter("tools", f"cannot be used with the chat template of this model: {self._no_form}")

    def _forced_calls(self, asked: ChatRequest) -> dict[str, str] | None:
        """The structure of an answer that must be calls."""
        calls = asked.calls()
        if calls is None or calls["schemas"] is None or self.tool_form is None:
            return None
        try:
            return {"grammar": tool_grammar(self.tool_form, calls["schemas"], is_single=calls["is_single"])}
        except RecursionError as error:
            raise BadParameter("tools", "are nested too deeply") from error

    def _tokens(self, name: str, prompt: Prompt, *, is_rendered: bool = False) -> list[int]:
        """The tokens of a prompt, which errors call `name`."""
        if isinstance(prompt, str):
            tokenizer = self.generator.tokenizer
            limit = 2 * tokenizer.max_token_chars * self.generator.model.config.max_position_embeddings
            if len(prompt) > limit:  # too long whatever it says
                raise BadParameter(name, f"has {len(prompt)} characters, more than could fit the model's context")
            (tokens,) = (tokenizer.encode_rendered if is_rendered else tokenizer.encode)([prompt])
            if not tokens:
                raise BadParameter(name, "is empty, and this model has no token that begins a text")
            return tokens
        vocabulary = self.generator.model.config.vocab_size
        if max(prompt) >= vocabulary:
            raise BadParameter(name, f"holds token {max(prompt)}, the vocabulary has {vocabulary} tokens")
        return prompt

    def _sampling(self, asked: HttpParameters, usual_tokens: int, calls: dict[str, str] | None = None) -> Sampling:
        """`calls`: the structure of an answer that must be calls of tools."""
        default, own = self.config.sampling, asked.sampling()
        own |= {} if calls is None else {"structured_outputs": calls}
        own["max_new_tokens"] = max(own.get("max_new_tokens", usual_tokens), 1)
        seed = secrets.randbits(63)  # without a seed answers differ, as in OpenAI's API
        base = Sampling(temperature=default.temperature, top_p=default.top_p, top_k=default.top_k, seed=seed)
        try:
            sampling = base.with_parameters(own)
            sampling.check_vocabulary(self.generator.model.config.vocab_size)
            if (structure := sampling.structured_outputs) is not None:
                self.generator.tokenizer.grammars.compile(structure)
        except ValueError as error:
            name, _, reason = str(error).partition(": ")
            if name.startswith("structured_outputs"):
                name = "structured_outputs" if asked.structured_outputs else "response_format"
                name = name if calls is None else "tools"
            raise BadParameter(REQUEST_NAMES.get(name, name), reason) from error
        return sampling

    def _check_n(self, asked: HttpParameters, sampling: Sampling, most: int) -> None:
        if (n := asked.n or 1) > most:
            raise BadParameter("n", f"must be an integer from 1 to {most}, got {n}")
        if n > 1 and sampling.temperature == 0:
            raise BadParameter("n", f"is {n}, and at temperature 0 all answers are the same")

    def _check_fit(self, name: str, tokens: Sequence[int], max_new_tokens: int) -> None:
        limit = self.generator.model.config.max_position_embeddings
        if len(tokens) + max_new_tokens > limit:
            raise BadParameter(
                "max_tokens" if len(tokens) < limit else name,
                f"does not fit: the model has {limit} positions, the prompt has {len(tokens)} tokens and max_tokens is "
                f"{max_new_tokens}; shorten either",
            )


def _row_ids(row_id: str, count: int) -> list[str]:
    return [row_id] if count == 1 else [f"{row_id}-{n}" for n in range(count)]
