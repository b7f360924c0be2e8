"""Standard tasks under any schedule: an adapter for EleutherAI's LM Evaluation Harness (the extra `eval`).

The harness brings tasks, prompts and metrics; this module answers its three kinds of request with the decoder, so that
the scores are those of the model as a run decodes it. A context is a prompt, which runs as `prefill` says, and a
continuation is what the schedule decodes: its token k runs the layers of decode step k. Nothing is downloaded here.

    import lm_eval
    from skipdecode.lm_eval import SkipDecodeLM

    lm = SkipDecodeLM("models/opt-e2e", speedup=2)
    print(lm_eval.simple_evaluate(lm, tasks=["gsm8k"])["results"])
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from skipdecode.api import TextModel, generate_requests, load
from skipdecode.checkpoint.hub import resolve_source
from skipdecode.config.sampling import Sampling
from skipdecode.engine.request import Request
from skipdecode.model.teacher_forcing import teacher_batch, teacher_forced_states

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
T = TypeVar("T")
HEAD_ROWS = 1024
"""Positions whose logits are held at a time."""


@register_model("skipdecode")
class SkipDecodeLM(TemplateLM):  # type: ignore[misc]
    """A model under one schedule, as the harness asks it.

    Log-likelihoods equal the log-probabilities that `skipdecode.generate` gives for the same tokens, up to the order of
    sums; at full depth they are those of the harness's own `hf` model.
    """

    def __init__(
        self,
        pretrained: str | TextModel,
        *,
        tokenizer: str | None = None,
        batch_size: int = 32,
        max_gen_toks: int = 256,
        max_length: int | None = None,
        prefill: str | None = None,
        seed: int = 0,
        adapter: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        quantization: Any = None,
        kv_cache_dtype: Any = "auto",
        implementation: Any = "auto",
        **decode: Any,
    ) -> None:
        """`pretrained`: a folder, a hub id or a `.gguf` file (`skipdecode.load`), or a loaded model. `decode` takes the
        keys of `decode:` (method, speedup, ...); without any the checkpoint's own schedule is used, or full depth.

        `max_gen_toks`: the longest answer where a task does not say, and what the schedule is made for in
        log-likelihoods. `max_length`: the longest context with its answer, in tokens; None: what the model can take.
        ValueError names an argument that does not fit.
        """
        super().__init__()
        if isinstance(pretrained, str):
            loaded = load(
                pretrained, tokenizer=tokenizer, adapter=adapter, dtype=dtype, device=device,
                quantization=quantization, kv_cache_dtype=kv_cache_dtype, implementation=implementation,
            )  # fmt: skip
            self._files = tokenizer or pretrained
        else:
            loaded, self._files = pretrained, tokenizer or ""
        self.batch_size, self.max_gen_toks = int(batch_size), int(max_gen_toks)
        self._loaded, self._prefill, self._decode, self._seed = loaded, prefill, decode, seed
        self._schedule = loaded.schedule(self.max_gen_toks, prefill, decode)
        limit = loaded.model.config.max_position_embeddings
        if not self.max_gen_toks < (max_length or limit) <= limit:
            raise ValueError(f"max_length: must be from {self.max_gen_toks + 1} (max_gen_toks + 1) to {limit}, "
                             f"got {max_length}")  # fmt: skip
        self.max_length = max_length or limit
        self._device = loaded.model.device

    @property
    def eot_token_id(self) -> int:
        return self._named(self._loaded.tokenizer.end)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context."""
        bos = self._loaded.model.config.bos_token_id
        return self._named(self._loaded.tokenizer.end if bos is None else bos)

    @staticmethod
    def _named(token: int | None) -> int:
        if token is None:
            raise ValueError("a text without context needs a token that begins or ends texts, and this model has none")
        return token

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The tokens of a text, with the special tokens of the model unless it has them already."""
        tokenizer = self._loaded.tokenizer
        bare = tokenizer.encode_rendered([string])[0]
        bos_tokens = list(tokenizer.bos_tokens)
        if add_special_tokens is False or (bos_tokens and bare[: len(bos_tokens)] == bos_tokens):
            return bare
        return [*bos_tokens, *bare]

    @cached_property
    def _chat_tokenizer(self) -> "PreTrainedTokenizerBase":
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(resolve_source(self._files))

    @property
    def tokenizer_name(self) -> str:
        return self._files.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return None if chat_template is False else self._chat_tokenizer.get_chat_template()

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as the checkpoint's chat template renders it."""
        return str(
            self._chat_tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        """For each (texts, context tokens, continuation tokens): the log-likelihood of the continuation in nats, and
        whether it is what greedy decoding writes. Contexts lose tokens on the left where both do not fit."""
        pairs = [self._cut(context, continuation) for _, context, continuation in requests]
        order = sorted(range(len(pairs)), key=lambda row: -sum(map(len, pairs[row])))
        found: dict[int, tuple[float, bool]] = {}
        for rows in tqdm(batches(order, self.batch_size), desc="log-likelihoods", disable=disable_tqdm):
            for row, result in zip(rows, self._score([pairs[row] for row in rows]), strict=True):
                found[row] = result
                if requests[row][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[row][0], result)
        return [found[row] for row in range(len(pairs))]

    def _cut(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        left = self.max_length + 1 - len(continuation)  # the last token is not fed
        if left < 1 or not context or not continuation:
            raise ValueError(f"a context of {len(context)} tokens with a continuation of {len(continuation)} cannot be "
                             f"scored by a model that takes {self.max_length}")  # fmt: skip
        return context[-left:], continuation

    @torch.inference_mode()
    def _score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        model = self._loaded.model
        batch = teacher_batch(pairs, model.config.pad_token_id or 0, model.device)
        states = teacher_forced_states(model, batch, self._schedule)  # [B, T, D]
        is_scored = batch.targets >= 0
        logprobs, is_best = [], []
        for h, targets in zip(
            torch.split(states[is_scored], HEAD_ROWS), torch.split(batch.targets[is_scored], HEAD_ROWS), strict=True
        ):
            logits = model.head(h).float()  # [n, V]
            logprobs.append(logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0])
            is_best.append(logits.argmax(-1) == targets)
        lengths = [len(continuation) for _, continuation in pairs]
        return [
            (float(scores.sum()), bool(best.all()))
            for scores, best in zip(
                torch.split(torch.cat(logprobs), lengths), torch.split(torch.cat(is_best), lengths), strict=True
            )
        ]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each whole text, in windows of `max_length` tokens, each of which is a continuation of
        the one before."""
        windows: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for number, (text,) in enumerate(request.args for request in requests):
            cut = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, continuation in map(make_disjoint_window, cut):
                windows.append((None, context, continuation))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (score, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[owner] += score
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answers to contexts, each cut before its first stop string. Contexts lose tokens on the left where they do
        not fit with the answer. ValueError names an argument of generation that has no counterpart here."""
        wanted = [(row, self._sampling(request.args[1])) for row, request in enumerate(requests)]
        texts: dict[int, str] = {}
        with tqdm(total=len(requests), desc="answers", disable=disable_tqdm) as bar:
            for _, group in groupby(sorted(wanted, key=lambda one: repr(one[1])), key=lambda one: one[1]):
                rows = list(group)
                sampling = rows[0][1]
                most = self.max_length - sampling.max_new_tokens
                schedule = self._loaded.schedule(sampling.max_new_tokens, self._prefill, self._decode)
                asked = [Request(str(row), self.tok_encode(requests[row].args[0])[-most:], sampling) for row, _ in rows]
                for done in batches(list(zip(rows, asked, strict=True)), self.batch_size):
                    answers = generate_requests(self._loaded, [one for _, one in done], schedule, self.batch_size)
                    for ((row, _), _), answer in zip(done, answers, strict=True):
                        texts[row] = answer.text
                        self.cache_hook.add_partial("generate_until", requests[row].args, answer.text)
                    bar.update(len(done))
        return [texts[row] for row in range(len(requests))]

    def _sampling(self, arguments: Mapping[str, Any]) -> Sampling:
        given = normalize_gen_kwargs(dict(arguments), self.max_gen_toks)
        max_new_tokens, stop = int(given.pop("max_gen_toks")), tuple(given.pop("until"))
        given.pop("do_sample", None)
        chosen = {name: given.pop(name) for name in SAMPLING if given.get(name) is not None}
        if left := {name: value for name, value in given.items() if value is not None}:
            name, value = next(iter(left.items()))
            raise ValueError(f"{name}: {value!r} has no counterpart here; a task's `generation_kwargs` may have until, "
                             f"do_sample, max_gen_toks, {', '.join(SAMPLING)}")  # fmt: skip
        if not 0 < max_new_tokens < self.max_length:
            raise ValueError(f"max_gen_toks: must be from 1 to {self.max_length - 1}, got {max_new_tokens}")
        return Sampling(max_new_tokens, seed=self._seed, stop=stop, **chosen)


def batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """The items, `size` at a time."""
    return (items[at : at + size] for at in range(0, len(items), size))
