"""Tokenizers of the Llama families against transformers' `AutoTokenizer` of the same folder.

Encoding, whole text, text as it comes, and stop strings; byte-level and SentencePiece type, with and without BOS.
"""

import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.integrations.mistral import convert_tekken_tokenizer

from actors.templates.chat_template_files import load_chat_template
from actors.text.text_stream import TextStream
from skipdecode.checkpoint.detokenizer import IncrementalDetokenizer, StopStringSearch, TextDecoder, cut_at_stop
from skipdecode.checkpoint.tokenizer import Tokenizer
from skipdecode.families import config_of
from tests.support.examples import examples
from tests.support.family_tokenizers import (
    NASTY,
    VOCAB,
    byte_level,
    sentencepiece,
    template,
    write_folder,
    write_sentencepiece,
    write_tekken,
)

LLAMA = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
FAST = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
KINDS = (
    "llama3", "qwen2", "qwen3", "smollm", "llama2", "llama2 legacy", "llama2 no prefix", "mistral", "metaspace",
    "no class", "bos and eos",
)  # fmt: skip


def make_folder(kind: str, folder: Path) -> tuple[Path, str]:
    """The folder, and the `model_type` of its model."""
    if kind == "llama3":
        tokenizer = byte_level("llama3")
        tokenizer.post_processor = template("<|begin|>", of=tokenizer)
        return write_folder(folder, tokenizer, "llama", **FAST, bos_token="<|begin|>"), "llama"
    if kind in ("qwen2", "qwen3"):
        own = {
            "tokenizer_class": "Qwen2Tokenizer",
            "eos_token": "<|im_end|>",
            "pad_token": "<|end|>",
            "bos_token": None,
        }
        return write_folder(folder, byte_level("qwen2"), kind, **own, add_bos_token=True), kind
    if kind == "smollm":  # a class that transformers takes from the file
        return write_folder(folder, byte_level("smollm"), "llama", **FAST), "llama"
    tokenizer = sentencepiece("metaspace" if kind == "metaspace" else "normalizer")
    tokenizer.post_processor = template("<s>", "</s>" if kind == "bos and eos" else "", of=tokenizer)
    own = dict(LLAMA) | {"add_bos_token": False, "add_eos_token": True, "legacy": kind == "llama2 legacy"}
    if kind == "llama2 no prefix":
        own |= {"add_prefix_space": False, "tokenizer_class": "LlamaTokenizerFast"}
    if kind == "metaspace":
        own["tokenizer_class"] = "PreTrainedTokenizerFast"
    if kind == "no class":
        own = {"added_tokens_decoder": {"2": {"content": "</s>", "special": True}, "399": {"content": "<think>"}}}
    model_type = "mistral" if kind == "mistral" else "llama"
    return write_folder(folder, tokenizer, model_type, **own), model_type


class Pair(NamedTuple):
    ours: Tokenizer
    theirs: PreTrainedTokenizerBase
    folder: Path


def config(model_type: str, **own: Any) -> Any:
    shape = {"model_type": model_type, "vocab_size": VOCAB, "hidden_size": 32, "num_attention_heads": 4}
    return config_of(
        shape | {"num_key_value_heads": 4, "eos_token_id": 2, "bos_token_id": 1, "sliding_window": None} | own
    )


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    made: dict[str, Pair] = {}

    def get(kind: str) -> Pair:
        if kind not in made:
            folder, model_type = make_folder(kind, tmp_path_factory.mktemp("tokenizer"))
            eos = {"eos_token_id": 1} if kind in ("llama3", "qwen2", "qwen3", "smollm") else {}
            ours = Tokenizer(folder, config(model_type, **eos))
            made[kind] = Pair(ours, AutoTokenizer.from_pretrained(folder), folder)
        return made[kind]

    return get


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_transformers(pairs: Callable[[str], Pair], kind: str) -> None:
    ours, theirs, _ = pairs(kind)
    for text in NASTY:
        assert ours.encode([text]) == [theirs(text)["input_ids"]], text
        assert ours.encode_rendered([text]) == [theirs(text, add_special_tokens=False)["input_ids"]], text
    assert ours.encode(list(NASTY)) == theirs(list(NASTY))["input_ids"]
    whole = theirs(NASTY[0], add_special_tokens=False)["input_ids"]
    assert len(whole) < len(NASTY[0]), "no merge was ever applied"
    has_bos = kind not in ("qwen2", "qwen3", "smollm")
    assert len(ours.bos_tokens) == has_bos
    assert bool(ours.encode([""])[0]) == has_bos
    assert ours.encode_rendered([""]) == [[]]


def test_the_kinds_differ_in_what_they_do_with_spaces(pairs: Callable[[str], Pair]) -> None:
    """Else the files and settings above would prove nothing."""
    kinds = ("llama2", "llama2 legacy", "llama2 no prefix", "mistral", "bos and eos")
    made = [pairs(kind).ours.encode(["x</s> hello", " two"]) for kind in kinds]
    assert len({json.dumps(tokens) for tokens in made}) == len(kinds)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(60))
@given(data=st.data())
def test_text_is_that_of_transformers_whole_and_as_it_comes(
    pairs: Callable[[str], Pair], kind: str, data: st.DataObject
) -> None:
    """Arbitrary tokens: parts of characters, bytes, leading spaces and special tokens among them."""
    ours, theirs, _ = pairs(kind)
    tokens = data.draw(any_tokens(ours))
    text = theirs.decode(tokens, skip_special_tokens=True)
    assert ours.decode(tokens) == text
    stop = data.draw(st.lists(st.text(st.sampled_from("aeno ▁é🙂\ufffd"), min_size=1, max_size=4), max_size=3))
    stream = TextStream(ours.decode, stop)
    assert "".join([*map(stream.push, tokens), stream.finish()]) == cut_at_stop(text, stop)
    if stop:
        scan = StopStringSearch(stop, ours.decode)
        holds = [
            any(s in theirs.decode(tokens[: n + 1], skip_special_tokens=True) for s in stop) for n in range(len(tokens))
        ]
        first = holds.index(True) + 1 if True in holds else len(holds)
        assert [scan.push(token) for token in tokens[:first]] == holds[:first]


def any_tokens(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Of any kind, but often bytes next to each other, spaces, and whole texts."""
    any_one = st.integers(0, VOCAB - 1).map(lambda token: [token])
    texts = st.sampled_from(NASTY).map(lambda text: tokenizer.encode_rendered([text])[0][:30])
    chars = st.sampled_from(["é", "🙂", "東", " ", "  ", "a", "\n"]).map(
        lambda text: tokenizer.encode_rendered([text])[0]
    )
    part = st.sampled_from(["🙂", "東", "é"]).map(lambda text: tokenizer.encode_rendered([text])[0][1:-1])
    return st.lists(st.one_of(any_one, chars, part, texts), max_size=14).map(
        lambda parts: [token for part in parts for token in part]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_streaming_costs_the_same_however_long_the_text_is(pairs: Callable[[str], Pair], kind: str) -> None:
    tokenizer = pairs(kind).ours
    decode, num_decoded = tokenizer.decode, 0

    def counted(function: Callable[[Sequence[int]], str]) -> Callable[[Sequence[int]], str]:
        def call(tokens: Sequence[int]) -> str:
            nonlocal num_decoded
            num_decoded += len(tokens)
            return function(tokens)

        return call

    draw = random.Random(0)
    (face,) = tokenizer.encode_rendered(["🙂"])
    runs = {
        "any": [draw.randrange(VOCAB) for _ in range(3000)],
        "whole characters": face[-4:] * 750,
        "no characters": face[-1:] * 3000,
        "special": [1] * 3000,
    }
    for name, tokens in runs.items():
        num_decoded = 0
        text = TextDecoder(counted(decode), counted(decode.piece), decode.byte_tokens)
        growing, scan = IncrementalDetokenizer(text), StopStringSearch(["no such text", "y" * 500], text)
        assert "".join(map(growing.push, tokens)) + growing.rest == decode(tokens), name
        assert not any(map(scan.push, tokens)), name
        assert num_decoded <= 25 * len(tokens), name


def test_text_of_sentencepiece_comes_at_once_where_it_can(pairs: Callable[[str], Pair]) -> None:
    tokenizer = pairs("llama2").ours
    (tokens,) = tokenizer.encode_rendered(["The pub 🙂 is cheap!"])
    stream = TextStream(tokenizer.decode, ["!!"])
    parts = [*map(stream.push, tokens), stream.finish()]
    assert len([part for part in parts if part]) >= 6
    assert "".join(parts[:4]).startswith("T")
    assert parts[-1] == "!", "the beginning of a stop string was given out"
    assert max(map(len, parts)) < 12
    assert "".join(parts) == "The pub 🙂 is cheap!"


def test_special_tokens_never_appear_in_text(tmp_path: Path) -> None:
    """Those of tokenizer.json, those that only tokenizer_config.json calls special, and what ends a text."""
    tokenizer = sentencepiece()
    listed = {"300": {"content": tokenizer.id_to_token(300), "special": True}}
    folder = write_folder(
        tmp_path, tokenizer, "llama", added_tokens_decoder=listed, pad_token=tokenizer.id_to_token(301)
    )
    ours, theirs = Tokenizer(folder, config("llama", eos_token_id=[2, 302])), AutoTokenizer.from_pretrained(folder)
    (body,) = ours.encode_rendered(["a pub"])
    for special in (0, 1, 2, 300, 301):
        assert (
            ours.decode([special, *body, special])
            == "a pub"
            == theirs.decode([*body, special], skip_special_tokens=True)
        )
    assert ours.decode([*body, 302]) == "a pub"


def test_settings_beside_tokenizer_json(tmp_path: Path) -> None:
    """special_tokens_map.json, as older folders have it; and a token that the model's table has no row for."""
    folder = write_folder(tmp_path, sentencepiece(), "llama", pad_token="[PAD]")
    (folder / "special_tokens_map.json").write_text(json.dumps({"additional_special_tokens": ["[X]", "[Y]"]}))
    ours, theirs = Tokenizer(folder, config("llama", vocab_size=VOCAB + 20)), AutoTokenizer.from_pretrained(folder)
    text = "a[PAD]b[X]c[Y]"
    assert ours.encode([text])[0] == theirs(text)["input_ids"]
    assert ours.decode(ours.encode([text])[0]) == theirs.decode(theirs(text)["input_ids"], skip_special_tokens=True)
    small = Tokenizer(folder, config("llama", vocab_size=ours.encode(["[PAD]"])[0][-1]))
    assert max(small.encode([text])[0]) < ours.encode(["[PAD]"])[0][-1]


def test_vocabularies_may_be_smaller_than_the_model(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level("qwen2"), "qwen2")
    last = max(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"].values()) + 1
    padded = Tokenizer(folder, config("qwen2", vocab_size=VOCAB + 100))
    (tokens,) = padded.encode(["a pub"])
    assert padded.decode([*tokens, VOCAB + 99]) == "a pub"
    with pytest.raises(ValueError, match=rf"{last}, the model only {last} tokens"):
        Tokenizer(folder, config("qwen2", vocab_size=last))


@pytest.mark.parametrize("name", ["tokenizer.model", ""])
def test_a_folder_without_tokenizer_json_names_what_to_do(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "sentencepiece", None)  # as if it were not installed
    if name:
        (tmp_path / name).write_bytes(b"no model")
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    wanted = "pip install sentencepiece" if name else "no tokenizer.json"
    with pytest.raises(ValueError, match=rf"{name}.*{wanted}.*model\.tokenizer") as caught:
        Tokenizer(tmp_path, config("llama"))
    assert str(tmp_path) in str(caught.value)


def write_sources(folder: Path, kind: str) -> str:
    """Files of which transformers makes a tokenizer, and no tokenizer.json. Returns the `model_type`."""
    folder.mkdir()
    model_type = {"vocab.json": "qwen2", "tekken.json": "mistral"}.get(kind, "llama")
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    if kind == "tekken.json":
        write_tekken(folder / kind)
        return model_type
    settings = LLAMA | {"legacy": False} if model_type == "llama" else {"tokenizer_class": "Qwen2Tokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if kind == "vocab.json":
        raw = json.loads(byte_level("qwen2").to_str())["model"]
        (folder / kind).write_text(json.dumps(raw["vocab"]))
        merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in raw["merges"]]
        (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    else:
        write_sentencepiece(folder / "tokenizer.model", kind)
    return model_type


@pytest.mark.parametrize("kind", ["bpe", "unigram", "vocab.json"])
def test_what_transformers_alone_reads_is_converted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    model_type = write_sources(folder, kind)
    ours, theirs = Tokenizer(folder, config(model_type, vocab_size=500)), AutoTokenizer.from_pretrained(folder)
    for text in NASTY:
        assert ours.encode([text])[0] == theirs(text)["input_ids"], text
        assert ours.decode(ours.encode([text])[0]) == theirs.decode(theirs(text)["input_ids"], skip_special_tokens=True)
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("converted twice"))
    assert Tokenizer(folder, config(model_type, vocab_size=500)).encode(["a pub"]) == ours.encode(["a pub"])


def test_tekken_is_that_of_transformers_behind_bos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With mistral-common installed or not; a chat template has the special tokens, too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    model = config(write_sources(folder, "tekken.json"), vocab_size=500)
    ours, theirs = Tokenizer(folder, model), convert_tekken_tokenizer(str(folder / "tekken.json"), chat_template="")
    assert ours.bos_tokens == (theirs.bos_token_id,) == (1,)
    for text in (*NASTY, "[INST] a pub [/INST]</s>"):
        ids = theirs(text)["input_ids"]
        assert ours.encode([text])[0] == [1, *ids], text
        assert ours.encode_rendered([text])[0] == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    template = load_chat_template(folder, model.tokenizer_rules)
    assert template is not None
    assert template.special_tokens == theirs.special_tokens_map


def test_tekken_is_that_of_mistral_common(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It alone takes special tokens that are written in a text for text."""
    pytest.importorskip("mistral_common.tokens.tokenizers.tekken", reason="the reference")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    model = config(write_sources(folder, "tekken.json"), vocab_size=500)
    ours, theirs = Tokenizer(folder, model), AutoTokenizer.from_pretrained(folder)
    for text in (text for text in NASTY if "<s>" not in text):
        ids = list(theirs(text)["input_ids"])
        assert ours.encode([text])[0] == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", '{"version": "1.0"}'),
        ("tokenizer_config.json", "["),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": 5}}'),
        ("special_tokens_map.json", "\xff"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, text: str) -> None:
    folder = write_folder(tmp_path, sentencepiece(), "llama")
    (folder / name).write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"tokenizer|special_tokens_map\.json"):
        Tokenizer(folder, config("llama"))
