"""GGUF files against transformers' own reading of them, and against the models they were made from."""

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from skipdecode.checkpoint import gguf_file
from skipdecode.checkpoint.gguf_header import read_header
from skipdecode.families import config_of
from tests.support.examples import examples
from tests.support.gguf_models import Writer, add_tensor, random_model, write_model

SOME = ("F32", "Q4_0", "Q4_K")
CLOSE = ("Q8_0", "BF16", "F16")
TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL")


def theirs(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)


@pytest.mark.parametrize(
    ("arch", "kind"),
    [*(("llama", kind) for kind in TYPES), *((arch, k) for arch in ("qwen2", "qwen3", "gemma3") for k in SOME)],
)
def test_tensors_are_those_of_transformers(tmp_path: Path, arch: str, kind: str) -> None:
    model = random_model(arch)
    path = write_model(tmp_path / "model.gguf", model, kind)
    found, wanted = dict(gguf_file.tensors(path)), theirs(path).state_dict()
    assert found.keys() == wanted.keys() == model.state_dict().keys()
    stored = [(name, info.shape) for name, info in gguf_file.weights(path)]
    assert [(name, tuple(tensor.shape)) for name, tensor in found.items()] == stored
    for name, tensor in found.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, wanted[name]), name
        assert torch.isfinite(tensor).all(), name
        if kind == "F32":
            torch.testing.assert_close(tensor, model.state_dict()[name], atol=2e-7 if arch == "gemma3" else 0, rtol=0)
        elif kind in CLOSE:
            torch.testing.assert_close(tensor, model.state_dict()[name], atol=1e-2, rtol=1e-2)
    with torch.no_grad():  # they are weights of their own, and not of the file
        found["model.norm.weight"].zero_()


@pytest.mark.parametrize(
    ("arch", "shape"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
        ("llama", {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}),
        ("qwen2", {"tie_word_embeddings": True, "rms_norm_eps": 1e-6}),
        ("qwen3", {}),
        ("gemma3", {"tie_word_embeddings": True}),
    ],
)
def test_the_configuration_is_that_of_the_model(tmp_path: Path, arch: str, shape: dict[str, Any]) -> None:
    model = random_model(arch, **shape)
    path = write_model(tmp_path / "model.gguf", model)
    found = config_of(gguf_file.read_config(path))
    assert found == config_of(model.config.to_dict() | {"torch_dtype": "float32"})
    read = theirs(path).config
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
                 "num_key_value_heads", "max_position_embeddings", "tie_word_embeddings", "bos_token_id",
                 "eos_token_id", "head_dim"):  # fmt: skip
        if name != "head_dim" or arch != "qwen2":
            assert getattr(found, name) == getattr(read, name), name
    assert found.rms_norm_eps == pytest.approx(read.rms_norm_eps)
    state = dict(gguf_file.tensors(path))
    assert state.keys() == model.state_dict().keys() - {"lm_head.weight" if found.has_tied_head else ""}
    for name, tensor in state.items():  # Gemma's norms are stored plus 1
        torch.testing.assert_close(tensor, model.state_dict()[name], atol=2e-7 if arch == "gemma3" else 0, rtol=0)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_found_in_its_factors(tmp_path: Path, factor: float) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": factor, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
    model = random_model("llama", rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, torch.device("cpu"))
    plain = 500_000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float32) / 64)

    def freqs(values: np.ndarray) -> Any:
        return lambda writer: writer.add_tensor("rope_freqs.weight", values)

    path = write_model(tmp_path / "model.gguf", model, extra=freqs((plain / scaled).numpy()))
    assert config_of(gguf_file.read_config(path)) == config_of(model.config.to_dict())
    assert "rope_freqs" not in str(list(gguf_file.weights(path)))
    path = write_model(tmp_path / "ones.gguf", model, extra=freqs(np.ones(32, dtype=np.float32)))
    assert gguf_file.read_config(path)["rope_scaling"] is None
    other = np.linspace(1, factor, 32, dtype=np.float32)
    with pytest.raises(ValueError, match=r"other\.gguf: .*rope_freqs\.weight.*high_freq_factor 4"):
        gguf_file.read_config(write_model(tmp_path / "other.gguf", model, extra=freqs(other)))
    with pytest.raises(ValueError, match=r"rope_freqs\.weight"):
        gguf_file.read_config(write_model(tmp_path / "few.gguf", model, extra=freqs(other[:8])))


def test_linear_scaling(tmp_path: Path) -> None:
    model = random_model("llama")
    wanted = {"rope_type": "linear", "factor": 2.0}
    for keys in ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, {"rope.scale_linear": 2.0}):
        path = write_model(tmp_path / "model.gguf", model, metadata=keys)
        assert gguf_file.read_config(path)["rope_scaling"] == wanted
    path = write_model(
        tmp_path / "model.gguf", model, metadata={"rope.scaling.type": "none", "rope.scaling.factor": 2.0}
    )
    assert gguf_file.read_config(path)["rope_scaling"] is None


def test_every_token_that_ends_a_text(tmp_path: Path) -> None:
    def ends(writer: Writer) -> None:
        writer.add_eot_token_id(7)
        writer.add_uint32("tokenizer.ggml.eom_token_id", 2)

    path = write_model(tmp_path / "model.gguf", random_model("llama"), extra=ends)
    assert config_of(gguf_file.read_config(path)).eos_token_ids == (2, 7)


def test_the_chat_template(tmp_path: Path) -> None:
    model = random_model("qwen2")
    assert gguf_file.chat_template(write_model(tmp_path / "a.gguf", model)) is None
    path = write_model(tmp_path / "b.gguf", model, extra=lambda writer: writer.add_chat_template("{{ messages }} 東"))
    assert gguf_file.chat_template(path) == "{{ messages }} 東"


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"expert_count": 8}, r"llama\.expert_count is 8"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, r"llama\.rope\.scaling\.type is 'yarn'"),
        ({"rope.scaling.type": "longrope"}, r"llama\.rope\.scaling\.type"),
        ({"rope.scaling.factor": "x"}, r"llama\.rope\.scaling\.factor is 'x'"),
        ({"attention.sliding_window": "x"}, "cannot be read"),
        ({"rope.dimension_count": 32, "attention.key_length": 64}, r"llama\.rope\.dimension_count is 32"),
        ({"rope.dimension_count": 32}, r"llama\.rope\.dimension_count is 32; only rotating all 64"),
        ({"attention.value_length": 32}, r"llama\.attention\.value_length"),
        ({"attention.sliding_window": 64}, r"llama\.attention\.sliding_window is 64"),
        ({"block_count": None}, r"llama\.block_count is 'None'"),
        ({"feed_forward_length": [512, 256]}, r"llama\.feed_forward_length"),
        ({"attention.head_count": 0}, r"llama\.attention\.head_count"),
        ({"embedding_length": 2.5}, r"llama\.embedding_length"),
    ],
)
def test_what_we_lack_is_refused_by_key(tmp_path: Path, metadata: dict[str, Any], named: str) -> None:
    path = write_model(tmp_path / "model.gguf", random_model("llama"), metadata=metadata)
    with pytest.raises(ValueError, match=rf"model\.gguf: .*{named}"):
        gguf_file.read_config(path)


@pytest.mark.parametrize(
    ("name", "kind", "named"),
    [
        ("blk.0.attn_v.weight", "IQ3_S", r"'blk\.0\.attn_v\.weight' is IQ3_S; supported are F32"),
        ("blk.0.ffn_gate_exps.weight", "F32", r"unexpected tensor 'blk\.0\.ffn_gate_exps\.weight'"),
        ("blk.x.attn_v.weight", "F32", "unexpected tensor"),
        ("blk.0", "F32", "unexpected tensor"),
        ("something", "F32", "unexpected tensor 'something'"),
    ],
)
def test_tensors_we_lack_are_refused_by_name(tmp_path: Path, name: str, kind: str, named: str) -> None:
    values = np.zeros((32, 256), dtype=np.float32)
    path = tmp_path / "model.gguf"
    model = random_model("llama")
    del model.model.layers[0].self_attn.v_proj
    write_model(path, model, extra=lambda writer: add_tensor(writer, name, values, kind))
    for read in (gguf_file.weights, gguf_file.tensors):
        with pytest.raises(ValueError, match=rf"model\.gguf: .*{named}"):
            list(read(path))


@pytest.mark.parametrize("arch", ["opt", "qwen3moe", "gemma2", None])
def test_other_architectures_are_refused_by_name(tmp_path: Path, arch: str | None) -> None:
    path = tmp_path / "model.gguf"
    writer = Writer(path, arch or "llama")
    writer.add_uint32("some.key", 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if arch is None:
        path.write_bytes(path.read_bytes().replace(b"general.architecture", b"general.architecturf"))
    with pytest.raises(ValueError, match=rf"model\.gguf: general\.architecture is {arch!r}; supported are llama"):
        gguf_file.read_config(path)


@contextmanager
def suppress_one(name: str) -> Iterator[None]:
    """Nothing, or a ValueError that has `name`."""
    try:
        yield
    except ValueError as error:
        if name not in str(error):
            raise


def read_all(path: Path) -> None:
    gguf_file.read_config(path)
    gguf_file.chat_template(path)
    for _ in gguf_file.tensors(path):
        pass


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 8}
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"

    def tokens(writer: Writer) -> None:
        writer.add_token_list(["a", "b", "東"])
        writer.add_token_scores([0.0, 1.0, 2.0])
        writer.add_chat_template("x")

    return write_model(path, random_model("llama", **shape), "Q8_0", extra=tokens).read_bytes()


def test_truncated_files_are_one_error(small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(small)
    read_all(path)
    header = read_header(path).num_bytes
    for length in [*range(0, header, 11), *range(header, len(small) - 64, 997)]:
        path.write_bytes(small[:length])
        with pytest.raises(ValueError, match=r"model\.gguf: no GGUF file that can be read: (it is|is empty|it begins)"):
            gguf_file.read_config(path)


@settings(max_examples=examples(300))
@given(data=st.data())
def test_damaged_files_are_at_most_one_error(
    small: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever a few bytes of the header are: no other kind of error, and no more memory than the file is long."""
    path = tmp_path_factory.mktemp("damaged") / "model.gguf"
    path.write_bytes(small)
    header, damaged = read_header(path).num_bytes, bytearray(small)
    for at in data.draw(st.lists(st.integers(0, header - 9), min_size=1, max_size=3)):
        some = st.sampled_from([b"\xff" * 8, b"\0" * 8, b"\x7f", struct.pack("<Q", 1 << 40), b"\x09", b"\xff"])
        new = data.draw(some)
        damaged[at : at + len(new)] = new
    path.write_bytes(damaged)
    with suppress_one(str(path)):
        read_all(path)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "is empty"),
        (b"PK\x03\x04" + bytes(64), "begins with"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version is 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "little-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62), "truncated"),
    ],
)
def test_foreign_files_are_one_error(tmp_path: Path, content: bytes, named: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"model\.gguf: .*{named}"):
        gguf_file.read_config(path)


def test_parts_of_a_file_name_the_remedy(tmp_path: Path) -> None:
    path = write_model(
        tmp_path / "model.gguf", random_model("llama"), extra=lambda writer: writer.add_uint16("split.count", 3)
    )
    with pytest.raises(ValueError, match=r"one of 3 parts .*llama-gguf-split"):
        gguf_file.read_config(path)


@pytest.mark.slow
@pytest.mark.skipif("SKIPDECODE_SMOLLM2" not in os.environ, reason="SKIPDECODE_SMOLLM2 names no .gguf file")
def test_smollm2() -> None:
    path = Path(os.environ["SKIPDECODE_SMOLLM2"])
    wanted = theirs(path)
    config = config_of(gguf_file.read_config(path))
    assert (config.num_hidden_layers, config.hidden_size, config.num_kv_heads) == (30, 576, 3)
    assert config.rope is not None
    assert config.rope.theta == wanted.config.rope_parameters["rope_theta"] == 100_000
    assert config.has_tied_head == wanted.config.tie_word_embeddings
    assert config.eos_token_ids == (wanted.config.eos_token_id,)
    state = wanted.state_dict()
    found = dict(gguf_file.tensors(path))
    assert found.keys() == state.keys() - {"lm_head.weight"}
    assert all(torch.equal(tensor, state[name]) for name, tensor in found.items())
    assert gguf_file.chat_template(path) is not None
    assert gguf.GGUFReader(path).fields["tokenizer.chat_template"].contents() == gguf_file.chat_template(path)
