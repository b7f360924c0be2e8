"""Tokenizers of GGUF files against those they were made from, and against transformers' reading of the file.

transformers leaves out what `skipdecode.checkpoint.gguf_tokenizer` says; there the original alone is the reference.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers
from packaging.version import Version
from tokenizers import Tokenizer as Original
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from skipdecode.checkpoint.gguf_tokenizer import CUTS, merges_of, tokenizer
from tests.support.family_tokenizers import (
    BYTE_LEVEL_SPECIAL,
    NASTY,
    SENTENCEPIECE_SPECIAL,
    byte_level,
    sentencepiece,
    template,
)
from tests.support.gguf_models import Writer, add_byte_level, add_sentencepiece, random_model, write_model

SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 400}


def write(path: Path, extra: Callable[[Writer], None], arch: str = "llama", **ids: int) -> Path:
    return write_model(path, random_model(arch, **SMALL | ids), extra=extra)


def byte_level_file(path: Path, made: Original, pre: str | None, **flags: bool) -> Path:
    def extra(writer: Writer) -> None:
        add_byte_level(writer, made, pre, BYTE_LEVEL_SPECIAL, **flags)

    return write(path, extra, bos_token_id=0, eos_token_id=1)


def theirs(path: Path) -> PreTrainedTokenizerBase:
    if Version(transformers.__version__) < Version("5.23"):
        pytest.skip("older transformers do not add the first token that these files ask for")
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def assert_same(ours: Original, original: Original, texts: Sequence[str] = NASTY) -> None:
    for text in texts:
        for add in (False, True):
            tokens = original.encode(text, add_special_tokens=add).ids
            assert ours.encode(text, add_special_tokens=add).ids == tokens, text
            assert ours.decode(tokens) == original.decode(tokens), text


@pytest.mark.parametrize("has_bos", [False, True])
@pytest.mark.parametrize(("pre", "split"), [("llama-bpe", "llama3"), ("qwen2", "qwen2"), ("smollm", "smollm")])
def test_byte_level_is_what_it_was_made_from(tmp_path: Path, pre: str, split: str, has_bos: bool) -> None:
    original = byte_level(split)
    original.normalizer = None  # a file has no word for it
    original.post_processor = template("<|begin|>" if has_bos else "", of=original)
    path = byte_level_file(tmp_path / "model.gguf", original, pre, add_bos_token=has_bos)
    ours = tokenizer(path)
    assert_same(ours, original)
    reference = theirs(path)
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend = reference.backend_tokenizer
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    for text in NASTY:
        assert ours.encode(text).ids == reference(text)["input_ids"], text
        tokens = ours.encode(text).ids
        assert ours.decode(tokens) == reference.decode(tokens, skip_special_tokens=True), text


@pytest.mark.parametrize("pre", sorted(CUTS.keys() - {"smollm"}))
def test_text_is_cut_as_transformers_cuts_it(tmp_path: Path, pre: str) -> None:
    path = byte_level_file(tmp_path / "model.gguf", byte_level("llama3"), pre, add_bos_token=False)
    ours, reference = tokenizer(path), theirs(path)
    for text in NASTY:
        words = [word for word, _ in ours.pre_tokenizer.pre_tokenize_str(text)]
        assert words == [word for word, _ in reference.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "has_bos"), [("llama-bpe", True), ("tekken", True), ("qwen2", False), ("gpt-2", False)]
)
def test_bos_where_the_file_does_not_say(tmp_path: Path, pre: str, has_bos: bool) -> None:
    path = byte_level_file(tmp_path / "model.gguf", byte_level("llama3"), pre)
    assert (tokenizer(path).encode("").ids == [0]) == has_bos
    said = byte_level_file(
        tmp_path / "said.gguf", byte_level("llama3"), pre, add_bos_token=not has_bos, add_eos_token=True
    )
    assert tokenizer(said).encode("").ids == ([1] if has_bos else [0, 1])


def test_special_tokens_that_no_byte_spells(tmp_path: Path) -> None:
    """As DeepSeek writes its own; `<think>` is a word, not special."""
    original = byte_level("qwen2")
    original.normalizer = None
    original.add_special_tokens(["<｜begin▁of▁sentence｜>"])
    original.post_processor = template("<｜begin▁of▁sentence｜>", of=original)
    number = original.token_to_id("<｜begin▁of▁sentence｜>")
    special = [*BYTE_LEVEL_SPECIAL, "<｜begin▁of▁sentence｜>"]

    def extra(writer: Writer) -> None:
        add_byte_level(writer, original, "deepseek-r1-qwen", special, add_bos_token=True)

    ours = tokenizer(write(tmp_path / "model.gguf", extra, bos_token_id=number, eos_token_id=1))
    text = "a<think>b<｜begin▁of▁sentence｜><|im_end|>c"
    assert_same(ours, original, [*NASTY, text])
    assert ours.encode(text).ids.count(number) == 2
    assert ours.decode(ours.encode(text).ids) == "a<think>bc"


@pytest.mark.parametrize("flags", [{}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}])
def test_sentencepiece_is_that_of_transformers(tmp_path: Path, flags: dict[str, bool]) -> None:
    def extra(writer: Writer) -> None:
        add_sentencepiece(writer, sentencepiece("metaspace"), SENTENCEPIECE_SPECIAL, **flags)
        writer.add_unk_token_id(0)

    path = write(tmp_path / "model.gguf", extra)
    ours, reference = tokenizer(path), theirs(path)
    for text in NASTY:
        for add in (False, True):
            tokens = ours.encode(text, add_special_tokens=add).ids
            assert tokens == reference(text, add_special_tokens=add)["input_ids"], text
        assert ours.decode(tokens) == reference.decode(tokens, skip_special_tokens=True), text
    whole = ours.encode(NASTY[0], add_special_tokens=False).ids
    assert len(whole) < len(NASTY[0]), "no merge was ever applied"


def test_sentencepiece_without_a_space_in_front(tmp_path: Path) -> None:
    def extra(writer: Writer) -> None:
        add_sentencepiece(writer, sentencepiece("metaspace"), SENTENCEPIECE_SPECIAL, add_space_prefix=False)

    ours = tokenizer(write(tmp_path / "model.gguf", extra))
    for text in NASTY:
        tokens = ours.encode(text, add_special_tokens=False).ids
        assert ours.decode(tokens, skip_special_tokens=False) == text.replace("▁", " ")


def test_merges_follow_from_scores() -> None:
    vocab = {token: n for n, token in enumerate(["a", "b", "c", "ab", "bc", "abc"])}
    scores = dict(zip(vocab, [0.0, 0.0, 0.0, -1.0, -2.0, -0.5], strict=True))
    assert merges_of(vocab, scores) == [("ab", "c"), ("a", "bc"), ("a", "b"), ("b", "c")]


def drop(key: str) -> Callable[[bytes], bytes]:
    return lambda content: content.replace(key.encode(), key[:-1].encode() + b"?")


@pytest.mark.parametrize(
    ("pre", "change", "named"),
    [
        ("mystery", None, r"tokenizer\.ggml\.pre is 'mystery'; supported are llama3.*model\.tokenizer"),
        (None, None, r"tokenizer\.ggml\.pre is None"),
        ("qwen2", drop("tokenizer.ggml.model"), r"tokenizer\.ggml\.model is None; .*model\.tokenizer"),
        ("qwen2", drop("tokenizer.ggml.tokens"), r"tokenizer\.ggml\.tokens is missing"),
        ("qwen2", drop("tokenizer.ggml.merges"), r"tokenizer\.ggml\.merges is missing"),
        ("qwen2", lambda content: content.replace("Ġ a".encode(), b"zz q"), "cannot be"),
    ],
)
def test_what_we_lack_is_named(tmp_path: Path, pre: str | None, change: Any, named: str) -> None:
    path = byte_level_file(tmp_path / "model.gguf", byte_level("qwen2"), pre)
    if change is not None:
        content = change(path.read_bytes())
        assert content != path.read_bytes()
        path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"model\.gguf: .*{named}"):
        tokenizer(path)


SMOLLM2_TEXTS = (
    *NASTY,
    "# Changes\n\n## 1.10.3 (2026-11-25)\n\n- fix: rows of 4096 tokens, 12.5 % faster; see #1234 and `a_b[0:17]`.",
    "def f(x: int) -> int:\n    return 2 * x + 40  # 3 spaces\n\n\nclass A:\n\tb = 0x1F\n",
    "| layers | tokens/s |\n|---|---|\n| 24 | 1,234.5 |\n| 12 | 2,468.0 |",
    '{"prompt": "2 + 2 =", "max_new_tokens": 64, "ids": [1, 22, 333, 4444]}',
    "https://example.org/a/b?page=2&n=100#3 costs $5.99 (5,99 €), or 11¢.",
    "A farmer has 17 sheep; all but 9 run away.\r\nHow many are left?\r\n",
)
# Digits behind two spaces (½ behind one): its tokenizer.json cuts them apart, and transformers from the file does not.
SMOLLM2_DIGITS = (
    "x  3",
    "  7\n",
    "12  345.6",
    "| 1 |  22 |",
    "steps:\n  1. read\n  2. write",
    "in   2024, or  1999",
    "it is ½",
)


@pytest.mark.slow
@pytest.mark.skipif("SKIPDECODE_SMOLLM2" not in os.environ, reason="SKIPDECODE_SMOLLM2 names no .gguf file")
def test_smollm2() -> None:
    """As transformers has it, with digits cut apart as this model's own tokenizer.json does."""
    path = Path(os.environ["SKIPDECODE_SMOLLM2"])
    ours, reference = tokenizer(path), theirs(path)
    plain = theirs(path)
    backend = reference.backend_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    for text in (*SMOLLM2_TEXTS, *SMOLLM2_DIGITS):
        tokens = ours.encode(text).ids
        assert tokens == reference(text)["input_ids"], text
        assert ours.decode(tokens) == reference.decode(tokens, skip_special_tokens=True), text
        assert (tokens != plain(text)["input_ids"]) == (text in SMOLLM2_DIGITS), text
