"""Grammars for structured outputs: a constraint compiled for a model's vocabulary, and its matcher for one answer.

llguidance compiles and matches (docs/decisions/016-structured-outputs.md). It refuses what of JSON Schema it does not
have, where others ignore it. JSON has at most one space between its parts, so that no answer is an endless indentation.
No torch: masks are bits in numpy.

V vocabulary.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from skipdecode.checkpoint.grammar_trial import LARGE_CHARS, is_risky, try_compile
from skipdecode.config.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    import numpy as np

WHITESPACE = "[ ]?"
MAX_REASON_CHARS = 500
MAX_LINE_CHARS = 120
MAX_COMPILED, MAX_LARGE = 256, 8
"""Grammars that are kept compiled. A large one may take 100 MB."""


class GrammarTooComplex(RuntimeError):
    """An answer cannot go on: the library gives its grammar up, whose parser would need too much memory or time, or no
    token may follow."""

    def __init__(self, row: str, reason: str) -> None:
        """`row`: the id of the answer's row."""
        super().__init__(f"row {row!r}: structured_outputs: {reason}")
        self.row, self.reason = row, reason


class GrammarMatcher:
    """Where in its grammar one answer is. All but `rollback` raise GrammarTooComplex."""

    def __init__(self, matcher: Any, ends: Sequence[int], row: str) -> None:
        self._matcher, self._ends, self._row = matcher, ends, row

    def accept(self, tokens: Sequence[int]) -> int:
        """Moves on by as many of the tokens as the grammar allows; how many these are."""
        accepted = int(self._matcher.try_consume_tokens(list(tokens)))
        self._check()
        return accepted

    def rollback(self, count: int) -> None:
        """Takes the last tokens back."""
        if count:
            self._matcher.rollback(count)

    def num_allowed(self, tokens: Sequence[int]) -> int:
        """How many of the tokens the grammar would allow from here on."""
        allowed = int(self._matcher.validate_tokens(list(tokens)))
        self._check()
        return allowed

    @property
    def is_complete(self) -> bool:
        """Whether the text so far is all that the grammar asks for."""
        return bool(self._matcher.is_accepting())

    def fill(self, bits: "np.ndarray") -> None:
        """Writes which tokens may follow, a bit each, into contiguous int32 [ceil(V / 32)]."""
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        self._finish(bits)

    def _finish(self, bits: "np.ndarray") -> None:
        """Checks what the library has written, and takes out tokens that would end the answer too early."""
        self._check()
        if not self.is_complete:  # a token that ends answers may have a text, too
            for token in self._ends:
                bits.view("uint8")[token >> 3] &= ~(1 << (token & 7)) & 255
            if not bits.any():
                raise GrammarTooComplex(self._row, "no token of the model goes on as the grammar wants")

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarTooComplex(self._row, _reason(self._matcher.get_error()))


def fill_all(matchers: Mapping[int, GrammarMatcher], bits: "np.ndarray", num_threads: int) -> None:
    """`GrammarMatcher.fill` for rows of contiguous `bits` int32 [B, ceil(V / 32)], by so many threads."""
    if num_threads == 1 or len(matchers) == 1:
        for row, matcher in matchers.items():
            matcher.fill(bits[row])
        return
    rows = [(matcher._matcher, row) for row, matcher in matchers.items()]
    _executor(num_threads).unsafe_compute_mask_ptr(rows, bits.ctypes.data, bits.strides[0], len(bits))
    for row, matcher in matchers.items():
        matcher._finish(bits[row])


@lru_cache(maxsize=1)
def _executor(num_threads: int) -> Any:
    """Threads that compute masks, which sleep in between."""
    import llguidance

    return llguidance.LLExecutor(num_threads)


class Grammar:
    """A compiled constraint, which answers may share."""

    def __init__(self, matcher: Any, tokenizer: Any, ends: Sequence[int]) -> None:
        self._start, self._tokenizer, self._ends = matcher, tokenizer, ends

    def matcher(self, row: str = "") -> GrammarMatcher:
        """At the beginning of the answer of a row, of which errors tell the id."""
        return GrammarMatcher(self._start.deep_copy(), self._ends, row)

    def matches(self, tokens: Sequence[int]) -> bool:
        """Whether the tokens, up to one that ends an answer, are a whole text of the grammar."""
        text = tokens[:-1] if tokens and tokens[-1] in self._ends else tokens
        matcher = self.matcher()
        try:
            return matcher.accept(text) == len(text) and matcher.is_complete
        except GrammarTooComplex:
            return False

    def matches_text(self, text: str) -> bool:
        """Whether the text is one of the grammar, in whatever tokens."""
        return self.matches(self._tokenizer.greedy_tokenize(text))


class GrammarCompiler:
    """Compiles constraints for one vocabulary."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """`tokenizer_json`: as the library tokenizers writes it. ValueError where answers could not end."""
        ends = [token for token in eos_token_ids if 0 <= token < vocab_size]
        if not ends:
            raise ValueError("structured_outputs: this model has no end-of-text token, which ends them")
        try:
            import llguidance  # only answers with a structure need it
        except ModuleNotFoundError as error:
            raise ValueError("structured_outputs: need the package llguidance: pip install llguidance") from error

        self._llguidance, self._ends = llguidance, ends
        self._tokenizer = llguidance.LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=ends)
        self._num_words = -(-vocab_size // 32)
        self._small, self._large = (lru_cache(most)(self._compile) for most in (MAX_COMPILED, MAX_LARGE))

    def compile(self, asked: StructuredOutputs) -> Grammar:
        """ValueError with the library's reason for a constraint that cannot be kept."""
        made = (self._large if len(asked.text) > LARGE_CHARS else self._small)(asked)
        if isinstance(made, str):
            raise ValueError(f"structured_outputs.{asked.kind}: {made}")
        return made

    def _compile(self, asked: StructuredOutputs) -> Grammar | str:
        """The grammar, or why there is none: a bad one is compiled no more often than a good one."""
        import numpy as np

        try:
            source = self._source(asked)
            if is_risky(asked.text):
                try_compile(source)
            matcher = self._llguidance.LLMatcher(self._tokenizer, source, log_level=0)
        except ValueError as error:
            return _reason(str(error))
        if matcher.is_error():
            return _reason(matcher.get_error())
        grammar = Grammar(matcher, self._tokenizer, self._ends)
        try:  # expressions are built where they are needed
            GrammarMatcher(matcher, self._ends, "").fill(np.zeros(self._num_words, np.int32))
        except GrammarTooComplex as error:
            return error.reason
        return grammar

    def _source(self, asked: StructuredOutputs) -> str:
        """The grammar in the library's form."""
        matcher = self._llguidance.LLMatcher
        if asked.kind in ("json", "json_object"):
            schema = json.loads(asked.text) if asked.kind == "json" else {"type": "object"}
            if isinstance(schema, bool):
                schema = {} if schema else {"not": {}}
            options = {"whitespace_pattern": WHITESPACE}
            return str(matcher.grammar_from_json_schema(json.dumps(schema), overrides=options))
        if asked.kind == "regex":
            return str(matcher.grammar_from_regex(asked.text))
        if asked.kind == "choice":  # one expression: as rules of the parser more than 2,000 would be too many
            texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(asked.text))
            return str(matcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}"))
        return str(self._llguidance.grammar_from(asked.kind, asked.text))


def _reason(message: str) -> str:
    """The library's message without the state of the parser; long lines, which quote the constraint, are cut short."""
    lines = [" ".join(line.split()) for line in message.partition("<state>")[0].splitlines()]
    if "NoExtensionBias" in lines:
        return "no text matches it"
    short = (line if len(line) <= MAX_LINE_CHARS else line[:MAX_LINE_CHARS] + "..." for line in lines if line)
    return " ".join(short)[:MAX_REASON_CHARS]
