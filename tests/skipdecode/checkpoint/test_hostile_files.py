"""Files of strangers that would take memory or time without bound, or end in a traceback: a ValueError names each."""

import base64
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, processors
from torch import Tensor

from skipdecode.checkpoint.gguf_header import MAX_HEADER_BYTES, read_header
from skipdecode.checkpoint.gguf_tokenizer import merges_of
from skipdecode.checkpoint.lora_adapter import LoraKeys
from skipdecode.checkpoint.model_config import read_config
from skipdecode.checkpoint.tokenizer import Tokenizer as OurTokenizer
from skipdecode.checkpoint.weights import check_folder, load_model
from skipdecode.families import config_of
from tests.support.measured_memory import most_bytes
from tests.support.wrapped_models import INSTALLED_TYPES, small_config

Factory = Callable[..., Path]
SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A Llama of two layers, whose weights are not random."""
    from skipdecode.checkpoint.weights import save_model
    from skipdecode.model.decoder import Decoder

    model = Decoder(config_of({"model_type": "llama"} | SHAPE))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.01)
    save_model(model, tmp_path / "model")
    return tmp_path / "model"


def change(folder: Path, **keys: Any) -> Path:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | keys))
    return folder


def refuse(folder: Path, match: str) -> None:
    for read in (check_folder, load_model):
        with most_bytes(64 << 20), pytest.raises(ValueError, match=match):
            read(folder)


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"num_hidden_layers": 10**7}, r"layers\.2\..* is missing; num_hidden_layers"),
        ({"num_hidden_layers": 2**62}, r"layers\.2\..* is missing; num_hidden_layers"),
        ({"vocab_size": 2**62}, "vocab_size of config.json asks for a tensor of"),
        ({"hidden_size": 2**62, "head_dim": 8}, "of config.json asks for a tensor of"),
        ({"intermediate_size": 2**40}, "intermediate_size of config.json asks for a tensor of"),
        ({"num_attention_heads": 2**40, "head_dim": 8}, "num_attention_heads of config.json asks for a tensor of"),
        ({"head_dim": 2**40}, "num_attention_heads of config.json asks for a tensor of"),
        ({"max_position_embeddings": 2**40}, "max_position_embeddings 1099511627776 of config.json needs"),
    ],
)
def test_a_shape_that_the_files_cannot_fill(llama: Path, keys: dict[str, Any], match: str) -> None:
    refuse(change(llama, **keys), match)


def test_learned_positions_that_the_files_cannot_fill(checkpoint_factory: Factory, tmp_path: Path) -> None:
    folder = checkpoint_factory("125m", layers=2)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    refuse(change(tmp_path, max_position_embeddings=2**40), "max_position_embeddings of config.json asks for a tensor")


def test_a_long_context_of_a_small_model_is_taken(llama: Path) -> None:
    check_folder(change(llama, max_position_embeddings=131072))


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("olmo2", {"vocab_size": 2**40}),
        ("olmo2", {"intermediate_size": 2**40}),
        ("olmo2", {"hidden_size": 2**26}),
        ("mixtral", {"num_local_experts": 2**30}),
        ("gpt2", {"n_positions": 2**40}),
        *([("gptj", {"n_positions": 2**40})] if "gptj" in INSTALLED_TYPES else []),
    ],
)
def test_a_model_of_transformers_that_the_files_cannot_fill(tmp_path: Path, kind: str, keys: dict[str, int]) -> None:
    """It would take memory for what the files lack, before it says that they do."""
    config = small_config(kind).to_dict() | {"num_hidden_layers": 2, "n_layer": 2, "layer_types": None}
    (tmp_path / "config.json").write_text(json.dumps(config | keys))
    save_file({"model.norm.weight": torch.ones(64)}, tmp_path / "model.safetensors")
    match = r"config\.json asks for a model of \d{10,} values, and the weight files have \d{3} bytes"
    refuse(tmp_path, match)


def as_bin(folder: Path, tensors: Any) -> Path:
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink(missing_ok=True)
    return folder


def test_tensors_without_strides(llama: Path) -> None:
    """7 KB that say they are terabytes."""
    big = {"vocab_size": 2**20, "hidden_size": 2**14, "intermediate_size": 2**14}
    model_names = load_file(llama / "model.safetensors")
    shapes = {name: (2**14,) * tensor.dim() for name, tensor in model_names.items()}
    shapes |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (2**20, 2**14))
    tensors = {name: torch.zeros(1).expand(shape) for name, shape in shapes.items()}
    refuse(as_bin(change(llama, **big), tensors), "asks for a tensor of")


def test_tensors_that_share_their_bytes(llama: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    shared = torch.zeros(64, 64)
    refuse(
        as_bin(llama, {name: shared.flatten()[: t.numel()].view(t.shape) for name, t in tensors.items()}),
        r"the tensors take \d+ bytes, and their files have \d+",
    )


@pytest.mark.parametrize(
    "content",
    [{}, {"a": 5}, [torch.zeros(2)], {3: torch.zeros(2)}, {"a": {"b": torch.zeros(2)}}, torch.zeros(2)],
    ids=str,
)
def test_a_bin_file_of_something_else(llama: Path, content: Any) -> None:
    refuse(as_bin(llama, content), r"pytorch_model\.bin: holds|is missing")


@pytest.mark.parametrize("kind", ["sparse", "meta"])
def test_a_bin_file_of_tensors_without_values(llama: Path, kind: str) -> None:
    tensors: dict[str, Tensor] = load_file(llama / "model.safetensors")
    name = "model.norm.weight"
    tensors[name] = tensors[name].to_sparse() if kind == "sparse" else tensors[name].to("meta")
    refuse(as_bin(llama, tensors), r"model\.norm\.weight' has no plain values")


def test_a_name_in_two_shards(llama: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    (llama / "model.safetensors").unlink()
    for number in (1, 2):
        save_file(tensors, llama / f"{number}.safetensors")
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    refuse(llama, r"2\.safetensors: tensor .* is there twice")


def test_a_tensor_by_two_names(llama: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    save_file(tensors | {"norm.weight": torch.ones(32)}, llama / "model.safetensors", metadata={"format": "pt"})
    refuse(llama, r"norm\.weight' is there twice")


def test_a_config_that_is_nested_deeply(llama: Path) -> None:
    (llama / "config.json").write_text("[" * 200_000)
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        read_config(llama)


@pytest.mark.parametrize("pattern", ["(", ["("], ["layers", "*"]])
def test_a_pattern_that_is_none(pattern: Any) -> None:
    with pytest.raises(ValueError, match=r"layers_pattern: .* is no regular expression"):
        LoraKeys.from_dict({"peft_type": "LORA", "target_modules": ["q_proj"], "layers_pattern": pattern})


# --- GGUF


def header_with(value: bytes) -> bytes:
    """A GGUF file of one value, and no tensors."""
    return b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + value


@pytest.mark.parametrize(("kind", "width"), [(0, 1), (6, 4), (10, 8), (7, 1)])
def test_numbers_take_no_more_memory_than_in_the_file(tmp_path: Path, kind: int, width: int) -> None:
    count = (8 << 20) // width
    path = tmp_path / "a.gguf"
    path.write_bytes(header_with(struct.pack("<IIQ", 9, kind, count) + bytes(8 << 20)))
    with most_bytes(20 << 20):
        values = read_header(path).metadata["a"]
    assert (len(values), set(values[:9])) == (count, {0})


def test_a_header_larger_than_any_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    with path.open("wb") as file:
        file.write(header_with(struct.pack("<IIQ", 9, 0, MAX_HEADER_BYTES)))
        file.truncate(2 * MAX_HEADER_BYTES)
    with most_bytes(1 << 20), pytest.raises(ValueError, match="its header has more than 64 MiB"):
        read_header(path)


def test_tensors_of_a_gguf_file_that_overlap(tmp_path: Path) -> None:
    tensor = lambda name: struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, 1024, 0, 0)  # noqa: E731
    names = [b"token_embd.weight", b"output.weight"]
    header = b"GGUF" + struct.pack("<IQQ", 3, len(names), 0) + b"".join(map(tensor, names))
    (tmp_path / "a.gguf").write_bytes(header.ljust(-(-len(header) // 32) * 32, b"\0") + bytes(4096))
    with pytest.raises(ValueError, match="its tensors overlap"):
        read_header(tmp_path / "a.gguf")


def test_a_piece_of_a_vocabulary_that_is_a_book() -> None:
    with pytest.raises(ValueError, match="has one of 1000000 characters"):
        merges_of({"a" * 10**6: 0}, {"a" * 10**6: 0.0})


# --- tokenizers


def charsmap(text: bytes) -> str:
    """A normalizer of SentencePiece without a rule, and one text to write."""
    return base64.b64encode(struct.pack("<I", 1024) + bytes(1024) + text + b"\0").decode()


@pytest.mark.parametrize(
    ("part", "is_bomb"),
    [
        ({"normalizer": normalizers.Replace("a", "b" * 10**6)}, True),
        ({"normalizer": normalizers.Sequence([normalizers.Replace("a", "aa")] * 12)}, True),
        ({"normalizer": normalizers.Sequence([normalizers.Prepend("a" * 2000)])}, True),
        (
            {"decoder": decoders.Sequence([decoders.Replace(Regex("."), "ab" * 30), decoders.Replace("a", "b" * 40)])},
            True,
        ),
        ({"normalizer": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])}, False),
        ({"decoder": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])}, False),
    ],
)
def test_rules_that_multiply_every_prompt(tmp_path: Path, part: dict[str, Any], is_bomb: bool) -> None:
    made = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "▁": 2}, merges=[]))
    for name, value in part.items():
        setattr(made, name, value)
    made.save(str(tmp_path / "tokenizer.json"))
    config = config_of({"model_type": "mistral"} | SHAPE)
    if is_bomb:
        with pytest.raises(ValueError, match="rules that make a text more than 1000 times as long"):
            OurTokenizer(tmp_path, config)
    else:
        OurTokenizer(tmp_path, config)


@pytest.mark.parametrize(("length", "is_bomb"), [(18, False), (10_000, True)])
def test_a_normalizer_table_that_multiplies(tmp_path: Path, length: int, is_bomb: bool) -> None:
    made = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    made.normalizer = normalizers.Precompiled(base64.b64decode(charsmap(b"x" * length)))
    made.save(str(tmp_path / "tokenizer.json"))
    config = config_of({"model_type": "mistral"} | SHAPE)
    if is_bomb:
        with pytest.raises(ValueError, match="1000 times as long"):
            OurTokenizer(tmp_path, config)
    else:
        OurTokenizer(tmp_path, config)


def test_a_table_that_the_library_panics_at(tmp_path: Path) -> None:
    made = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    made.normalizer = normalizers.Precompiled(struct.pack("<I", 4) + bytes(4) + b"x\0")
    made.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="the tokenizer panicked"):
        OurTokenizer(tmp_path, config_of({"model_type": "mistral"} | SHAPE))


def test_a_template_that_adds_thousands_of_tokens(tmp_path: Path) -> None:
    made = Tokenizer(models.BPE(vocab={"a": 0, "<s>": 1}, merges=[]))
    special = {"id": "<s>", "ids": [1] * 5000, "tokens": ["<s>"] * 5000}
    made.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[special])
    made.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="adds 5000 tokens to every text"):
        OurTokenizer(tmp_path, config_of({"model_type": "mistral"} | SHAPE))
