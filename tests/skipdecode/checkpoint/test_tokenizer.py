"""The tokenizer against transformers' GPT-2 tokenizer (OPT's) on the same files, and round trips of any text."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, GPT2TokenizerFast

from skipdecode.checkpoint.model_config import read_config
from skipdecode.checkpoint.tokenizer import SPECIAL_TOKENS, Tokenizer, train_tokenizer
from skipdecode.families.opt import OPTConfig
from tests.support.examples import examples

CONFIG = OPTConfig(vocab_size=320, hidden_size=16, num_attention_heads=2)
TEXTS = [
    "The Golden Otter is a cheap pub.",
    "name[The Copper Kettle], eatType[coffee shop]",
    "Grüße aus Köln: 東京 costs 20 € 🙂",
    " leading, trailing and  double  spaces ",
    "tabs\tand\nnew\r\nlines\u2028",
    "don't can't I'll we've 12345 ...!!!",
    "\x00\x7f\u200b\ufeff\ufffd",
    "",
]


@pytest.fixture(scope="module")
def ours(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer(tokenizer_folder, CONFIG)


@pytest.fixture(scope="module")
def legacy_folder(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vocab.json and merges.txt alone, as in the released OPT repositories."""
    model = json.loads((tokenizer_folder / "tokenizer.json").read_text())["model"]
    folder = tmp_path_factory.mktemp("legacy")
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    return folder


@pytest.fixture(scope="module")
def legacy(legacy_folder: Path) -> Tokenizer:
    return Tokenizer(legacy_folder, CONFIG)


@pytest.fixture(scope="module")
def theirs(legacy_folder: Path) -> GPT2TokenizerFast:
    """As facebook/opt-*/tokenizer_config.json sets it up."""
    keys = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
    vocab, merges = str(legacy_folder / "vocab.json"), str(legacy_folder / "merges.txt")
    return GPT2TokenizerFast(vocab=vocab, merges=merges, **keys)


def test_special_tokens_have_opts_numbers(tokenizer_folder: Path, ours: Tokenizer) -> None:
    vocab = json.loads((tokenizer_folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert [vocab[token] for token in SPECIAL_TOKENS] == [0, 1, 2, 3]
    assert len(vocab) == 320


def test_ids_are_those_of_transformers(
    ours: Tokenizer, legacy: Tokenizer, theirs: GPT2TokenizerFast, tokenizer_folder: Path, tmp_path: Path
) -> None:
    shutil.copy(tokenizer_folder / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    auto = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        wanted = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode([text]) == [[2, *wanted]]
        assert legacy.encode([text]) == [[2, *wanted]]
        assert auto(text, add_special_tokens=False)["input_ids"] == wanted
        assert ours.decode(wanted) == theirs.decode(wanted, clean_up_tokenization_spaces=False) == text
        assert legacy.decode(wanted) == text
    assert len(theirs(TEXTS[0], add_special_tokens=False)["input_ids"]) < len(TEXTS[0]), "no merge was ever applied"


any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@settings(max_examples=examples(150))
@given(text=any_text)
def test_round_trip_of_any_text(ours: Tokenizer, legacy: Tokenizer, text: str) -> None:
    (tokens,) = ours.encode([text])
    assert tokens[0] == 2
    assert legacy.encode([text]) == [tokens]
    if not any(special in text for special in SPECIAL_TOKENS):
        assert ours.decode(tokens) == legacy.decode(tokens) == text


def test_empty_prompt_is_bos_alone(ours: Tokenizer, legacy: Tokenizer) -> None:
    assert ours.encode([""]) == legacy.encode([""]) == [[2]]
    assert ours.decode([2]) == ours.decode([]) == ""
    assert ours.encode([]) == []


def test_bos_comes_from_the_checkpoint(tokenizer_folder: Path) -> None:
    """Whatever a post-processor in tokenizer.json would add: the config decides, once."""
    tokenizer = Tokenizer(tokenizer_folder, OPTConfig(vocab_size=320, bos_token_id=0))
    assert tokenizer.encode(["a"])[0][0] == 0
    assert len(tokenizer.encode(["a"])[0]) == 2


def test_post_processor_padding_and_truncation_of_the_file_do_nothing(tokenizer_folder: Path, tmp_path: Path) -> None:
    raw = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    raw["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    raw["padding"] = {
        "strategy": {"Fixed": 30},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 1,
        "pad_type_id": 0,
        "pad_token": "<pad>",
    }
    raw["post_processor"] = {
        "type": "RobertaProcessing",
        "sep": ["</s>", 2],
        "cls": ["<s>", 0],
        "trim_offsets": True,
        "add_prefix_space": False,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    wanted = Tokenizer(tokenizer_folder, CONFIG).encode(TEXTS)
    assert Tokenizer(tmp_path, CONFIG).encode(TEXTS) == wanted


def test_special_tokens_never_appear_in_text(ours: Tokenizer, legacy: Tokenizer, tokenizer_folder: Path) -> None:
    for tokenizer in (ours, legacy):
        (tokens,) = tokenizer.encode(["pub"])
        body = tokens[1:]
        for at in range(len(body) + 1):
            for special in range(4):
                assert tokenizer.decode([*body[:at], special, special, *body[at:]]) == "pub"
    eos_elsewhere = Tokenizer(tokenizer_folder, OPTConfig(vocab_size=320, eos_token_id=100))
    assert eos_elsewhere.decode([100, *eos_elsewhere.encode(["pub"])[0], 100]) == "pub"


def test_a_literal_special_token_in_a_prompt(ours: Tokenizer, legacy: Tokenizer, theirs: GPT2TokenizerFast) -> None:
    """`</s>` and `<pad>` written in a prompt become the special token, as in transformers: text is not escaped.

    `<s>` and `<unk>` do so where tokenizer.json lists them as special; with vocab.json and merges.txt they are plain
    characters, as transformers' OPT tokenizer has it.
    """
    for tokenizer in (ours, legacy):
        (tokens,) = tokenizer.encode(["a</s>b<pad>"])
        assert tokens == [2, *theirs("a</s>b<pad>", add_special_tokens=False)["input_ids"]]
        assert tokens.count(2) == 2  # BOS and the literal
        assert tokens[-1] == 1
        assert tokenizer.decode(tokens) == "ab"
    assert 0 in ours.encode(["a<s>b"])[0]
    assert legacy.encode(["a<s>b"])[0] == [2, *theirs("a<s>b", add_special_tokens=False)["input_ids"]]
    assert legacy.decode(legacy.encode(["a<s>b"])[0]) == "a<s>b"


def test_bytes_that_are_no_character(ours: Tokenizer) -> None:
    (tokens,) = ours.encode(["🙂"])
    assert ours.decode(tokens[:-1]) == "\ufffd"
    assert ours.decode(tokens) == "🙂"


def test_ids_without_a_token_have_no_text(tokenizer_folder: Path) -> None:
    """The model's table may be larger than the vocabulary (50,272 against 50,265): such an id must not raise."""
    tokenizer = Tokenizer(tokenizer_folder, OPTConfig(vocab_size=400))
    (tokens,) = tokenizer.encode(["pub"])
    assert tokenizer.decode([*tokens, 350, 399]) == "pub"


def test_a_tokenizer_larger_than_the_model_is_refused(tokenizer_folder: Path, legacy_folder: Path) -> None:
    for folder in (tokenizer_folder, legacy_folder):
        with pytest.raises(ValueError, match=r"319.*the model only 319") as caught:
            Tokenizer(folder, OPTConfig(vocab_size=319))
        assert str(folder) in str(caught.value)
        Tokenizer(folder, OPTConfig(vocab_size=320))


def test_ids_beyond_the_model_are_refused_though_the_count_fits(tokenizer_folder: Path, tmp_path: Path) -> None:
    """An added token with a number behind a gap: the count fits the model's table, the id does not."""
    raw = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    keys = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    vocab = raw["model"]["vocab"]
    gone = next(token for token, number in vocab.items() if number == 319)
    vocab[gone] = 900
    raw["added_tokens"].append({"id": 900, "content": gone} | keys)
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="900"):
        Tokenizer(tmp_path, CONFIG)


def test_a_folder_without_tokenizer_names_what_to_do(legacy_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no tokenizer\.json.*model\.tokenizer"):
        Tokenizer(tmp_path, CONFIG)
    shutil.copy(legacy_folder / "vocab.json", tmp_path)
    with pytest.raises(ValueError, match=r"merges\.txt"):
        Tokenizer(tmp_path, CONFIG)


@pytest.mark.parametrize("text", ["", "{", '{"version": "1.0"}'])
def test_a_broken_tokenizer_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path, CONFIG)


def test_batches_are_texts_one_by_one(ours: Tokenizer) -> None:
    assert ours.encode(TEXTS) == [ours.encode([text])[0] for text in TEXTS]


def test_training_is_reproducible(tmp_path: Path) -> None:
    for name in ("a", "b"):
        train_tokenizer(iter(TEXTS), 290, tmp_path / name)
    assert (tmp_path / "a" / "tokenizer.json").read_text() == (tmp_path / "b" / "tokenizer.json").read_text()


def test_checkpoints_carry_their_tokenizer(checkpoint_factory: Callable[..., Path], ours: Tokenizer) -> None:
    folder = checkpoint_factory("350m", layers=2)
    assert Tokenizer(folder, read_config(folder)).encode(TEXTS) == ours.encode(TEXTS)
