"""torch's flash attention for sequences without padding: whether a torch has it, and the reference for it.

What it computes on a GPU: `self_test`, `tests/skipdecode/test_gpu.py`.
"""

from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from skipdecode.backends.flash_attention import misfit, missing, reference_attention

BEGINS = (
    "aten::_flash_attention_forward(Tensor query, Tensor key, Tensor value, Tensor? cum_seq_q, Tensor? cum_seq_k, "
    "SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, bool return_debug_mask, *, float? scale=None"
)
WINDOW = ", SymInt? window_size_left=None, SymInt? window_size_right=None, Tensor? seqused_k=None"
ENDS = ") -> (Tensor output, Tensor softmax_logsumexp, Tensor {}, Tensor {}, Tensor debug_attn_mask)"
SCHEMAS = {
    "2.6": BEGINS + WINDOW + ", Tensor? alibi_slopes=None" + ENDS.format("philox_seed", "philox_offset"),
    "2.8 and 2.10": BEGINS + WINDOW + ", Tensor? alibi_slopes=None" + ENDS.format("rng_state", "unused"),
    "2.13": BEGINS + WINDOW + ", Tensor? alibi_slopes=None, Tensor? block_table=None, int? num_splits=None"
    + ENDS.format("rng_state", "unused"),
}  # fmt: skip
"""Of released versions, from their native_functions.yaml."""


class Packet:
    """An operator with another schema."""

    def __init__(self, schema: str) -> None:
        self.default = self
        self._schema = torch._C.parse_schema(schema)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch, "__version__", "2.6.0")


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("version", SCHEMAS)
def test_every_supported_torch_takes_these_arguments(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    assert missing.__wrapped__() is None, "the torch that is installed"
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", Packet(SCHEMAS[version]))
    assert missing.__wrapped__() is None


@pytest.mark.usefixtures("built")
def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", Packet(BEGINS + ENDS.format("a", "b")))
    assert str(missing.__wrapped__()).startswith("aten::_flash_attention_forward of torch 2.6.0 takes other arguments")
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", None)
    assert missing.__wrapped__() == "torch 2.6.0 has no operator aten::_flash_attention_forward"
    monkeypatch.undo()
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    assert missing.__wrapped__() == f"torch {torch.__version__} was built without flash attention"


def test_heads_that_it_does_not_take() -> None:
    assert misfit(64, torch.bfloat16) is misfit(256, torch.float16) is None
    assert misfit(64, torch.float32) == "torch's flash attention takes bfloat16 and float16, and this is float32"
    for head_dim in (12, 264):
        assert f"these have {head_dim}" in str(misfit(head_dim, torch.bfloat16))


@given(
    sizes=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 9)), min_size=1, max_size=5),
    groups=st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    window=st.none() | st.integers(1, 14),
    seed=st.integers(0, 99),
)
@settings(max_examples=40)
def test_the_reference_is_masked_attention(
    sizes: list[tuple[int, int]], groups: tuple[int, int], window: int | None, seed: int
) -> None:
    """Of each sequence alone, by softmax written out: the last queries of its keys."""
    rng, (H, G), K = torch.Generator().manual_seed(seed), groups, 8
    lengths, totals = [n for n, _ in sizes], [n + before for n, before in sizes]
    q = torch.randn(sum(lengths), H, K, generator=rng, dtype=torch.float64)
    k, v = (torch.randn(sum(totals), G, K, generator=rng, dtype=torch.float64) for _ in "kv")
    starts = [torch.tensor([0, *accumulate(counts)], dtype=torch.int32) for counts in (lengths, totals)]
    made = reference_attention(q, k, v, *starts, max(lengths), max(totals), window)
    at = first = 0
    for count, total in zip(lengths, totals, strict=True):
        for query in range(count):
            last = first + total - count + query
            begin = first if window is None else max(first, last - window + 1)
            for head in range(H):
                group = head // (H // G)
                scores = k[begin : last + 1, group] @ q[at + query, head] / K**0.5
                wanted = F.softmax(scores, dim=0) @ v[begin : last + 1, group]
                torch.testing.assert_close(made[at + query, head], wanted)
        at, first = at + count, first + total
