"""Small tokenizers of the kinds that Llama-type models have, trained on a few lines, in Hugging Face layout."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers.convert_slow_tokenizer import bytes_to_unicode

VOCAB = 400
LINES = (
    "The Golden Otter is a cheap pub near Willow Station; it serves Italian food and is family friendly.",
    "name[The Copper Kettle], eatType[coffee shop], priceRange[less than £20], customer rating[5 out of 5]",
    "Grüße aus Köln: naïve café, 東京 and Ωmega cost 20 € — it's 12345 times cheaper, they've said.\n\n\tYes.",
)
NASTY = (
    "The Golden Otter is a cheap pub.",
    "",
    " ",
    "   three spaces before, two  between, and some behind   ",
    "tabs\tand\r\nnew\n\nlines\u2028\u00a0 \n x",
    "Grüße: 東京 costs 20 € 🙂👨‍👩‍👧 e\u0301\u0323 ﬁ",
    "don't CAN'T I'll we've 12345 1 23 ...!!! \t 7",
    "\x00\x7f\u200b\ufeff\ufffd\ufffd",
    "▁ and ▁▁x, <0x41> written out",
    "</s> <s>hello</s><|im_end|> a<think>b</think>  <|begin|> c",
    "ひらがな 한국어 አማርኛ ظهر " * 3,
)
SPLITS = {
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
BYTE_LEVEL_SPECIAL = ["<|begin|>", "<|im_end|>", "<|end|>"]
SENTENCEPIECE_SPECIAL = ["<unk>", "<s>", "</s>"]


def template(front: str = "", back: str = "", *, of: Tokenizer) -> processors.TemplateProcessing:
    """Puts these tokens before and behind every text."""
    single = " ".join(part for part in (front, "$A", back) if part)
    special = [(token, of.token_to_id(token)) for token in (front, back) if token]
    return processors.TemplateProcessing(single=single, pair=f"{single} $B", special_tokens=special)


def byte_level(split: str) -> Tokenizer:
    """`llama3`, `qwen2`, or `smollm` (digits by themselves)."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=split == "llama3"))
    if split == "smollm":
        parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        parts = [pre_tokenizers.Split(Regex(SPLITS[split]), "isolated"), last]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    if split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 4,
        special_tokens=BYTE_LEVEL_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES * 3, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer


def sentencepiece(kind: str = "normalizer", scheme: str = "first") -> Tokenizer:
    """BPE with byte tokens. Spaces by a `normalizer` (Prepend, Replace: Llama 2's file) or by `metaspace`."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=True)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 260, special_tokens=SENTENCEPIECE_SPECIAL, limit_alphabet=45, show_progress=False
    )
    tokenizer.train_from_iterator(LINES * 3, trainer)
    raw = json.loads(tokenizer.to_str())
    trained = sorted(raw["model"]["vocab"], key=raw["model"]["vocab"].__getitem__)
    tokens = [*trained[:3], *(f"<0x{byte:02X}>" for byte in range(256)), *trained[3:]]
    raw["model"]["vocab"] = {token: number for number, token in enumerate(tokens)}
    raw["pre_tokenizer"] = None
    tokenizer = Tokenizer.from_str(json.dumps(raw))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    strip = [decoders.Strip(" ", 1, 0)] if scheme != "never" else []
    tokenizer.decoder = decoders.Sequence([*parts, *strip])
    return tokenizer


def write_sentencepiece(path: Path, model_type: str) -> None:
    """A tokenizer.model that SentencePiece trains itself, `bpe` or `unigram`, with the options of Llama 2's."""
    library = pytest.importorskip("sentencepiece", reason="transformers reads tokenizer.model with this")
    with path.open("wb") as file:
        library.SentencePieceTrainer.train(
            sentence_iterator=iter(LINES * 3), model_writer=file, model_type=model_type, vocab_size=VOCAB,
            hard_vocab_limit=False, byte_fallback=True, character_coverage=0.98, split_digits=True,
            normalization_rule_name="identity", remove_extra_whitespaces=False, allow_whitespace_only_pieces=True,
            minloglevel=2,
        )  # fmt: skip


def write_tekken(path: Path) -> None:
    """A tekken.json: bytes in their order, then merged tokens by rank; special tokens are numbered before them."""
    byte_of = {char: byte for byte, char in bytes_to_unicode().items()}
    vocab = byte_level("llama3").get_vocab(with_added_tokens=False)
    texts = sorted((text for text in vocab if len(text) > 1 and text not in BYTE_LEVEL_SPECIAL), key=vocab.__getitem__)
    merged = [bytes(byte_of[char] for char in text) for text in texts]
    tokens = [*(bytes([byte]) for byte in range(256)), *merged]
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
               "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "<pad>", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
               "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]"]  # fmt: skip
    reserved = len(special) + 3  # the last ones have no name in the file
    made = {
        "config": {
            "pattern": SPLITS["llama3"],
            "num_vocab_tokens": len(tokens),
            "default_vocab_size": len(tokens) + reserved,
            "default_num_special_tokens": reserved,
            "version": "v7",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(tokens)
        ],
        "special_tokens": [{"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(special)],
    }
    path.write_text(json.dumps(made))


def write_folder(folder: Path, tokenizer: Tokenizer, model_type: str, **settings: Any) -> Path:
    """tokenizer.json, tokenizer_config.json and the config.json by which `AutoTokenizer` knows the family."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder
