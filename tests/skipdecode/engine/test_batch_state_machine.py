"""A batch that anything may happen to, against the naive decoder: rows join, step, end, are cancelled; joins and steps
fail. Float32.
"""

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from transformers import OPTForCausalLM

from skipdecode.checkpoint.detokenizer import StopStringSearch
from skipdecode.checkpoint.weights import load_model, save_model
from skipdecode.config.sampling import Sampling
from skipdecode.engine.continuous_batch import ContinuousBatch
from skipdecode.engine.generate import generate
from skipdecode.engine.prefix_sharing import share_prefixes
from skipdecode.engine.request import Request, Row
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.lossless import Lossless
from skipdecode.schedules.schedule import FullDepth, Schedule, SkipDecode, Unified
from skipdecode.speculative.speculative_batch import SpeculativeBatch
from tests.support.cpu_backends import NAMES, forced
from tests.support.examples import examples
from tests.support.naive import naive_decode, random_prompts
from tests.support.shared_prompts import LAYERS as L
from tests.support.shared_prompts import VOCAB, opt, random_decoder

SCHEDULES: dict[str, Schedule] = {
    "full": FullDepth(L),
    "skipdecode": SkipDecode(L, 6, 2, 1, 9),
    "lossless": Lossless(L, Unified(L, 3), 2),
}
PREFIXES = [random_prompts([length], seed=7, vocab=VOCAB)[0] for length in (4, 12)]
ENDS = random_prompts([1, 2, 3, 5, 9, 17], seed=3, vocab=VOCAB)  # few, since the naive decoder is slow
STOPS = ((), (), ("Q",), ("AB", "K"))


def decode_text(tokens: Sequence[int]) -> str:
    return "".join(chr(ord("A") + token % 26) for token in tokens)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose EOS comes up at many steps."""
    folder = tmp_path_factory.mktemp("opt")
    save_model(random_decoder(opt()), folder)
    free = OPTForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    made = [
        naive_decode(free, prompt, FullDepth(L), 12, eos=-7) for prompt in random_prompts([5] * 12, vocab=VOCAB, seed=1)
    ]
    tokens = [token for row in made for token in row[2:]]
    config = json.loads((folder / "config.json").read_text())
    config["eos_token_id"] = max(set(tokens), key=lambda token: (sum(token in row[2:] for row in made), token))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> OPTForCausalLM:
    return OPTForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(params=["torch", *NAMES[:1]])
def model(request: pytest.FixtureRequest, folder: Path) -> Iterator[Decoder]:
    with forced(request.param):
        yield load_model(folder).pack()


class Machine(RuleBasedStateMachine):
    model: Decoder
    reference: OPTForCausalLM
    schedule: Schedule

    def __init__(self) -> None:
        super().__init__()
        if isinstance(self.schedule, Lossless):
            self.batch: ContinuousBatch = SpeculativeBatch(self.model, self.schedule, decode_text=decode_text)
        else:
            self.batch = ContinuousBatch(self.model, self.schedule, decode_text=decode_text)
        self.rows: list[Row] = []
        self.cancelled: set[str] = set()

    def requests(self, data: st.DataObject) -> tuple[list[Request], list[list[int]]]:
        """Some requests, and what each shares with others."""
        made, ends = list[Request](), list[list[int]]()
        for _ in range(data.draw(st.integers(1, 4))):
            prefix = data.draw(st.sampled_from([[], *PREFIXES]))
            own = data.draw(st.sampled_from(ENDS))
            sampling = Sampling(
                max_new_tokens=data.draw(st.integers(1, 14)),
                temperature=data.draw(st.sampled_from([0.0, 0.0, 0.0, 0.9])),
                ignore_eos=data.draw(st.booleans()),
                stop=data.draw(st.sampled_from(STOPS)),
            )
            made.append(Request(f"{len(self.rows) + len(made)}", [*prefix, *own], sampling))
            ends.append([len(prefix)] if prefix else [])
        return made, ends

    @rule(data=st.data(), shares=st.booleans())
    def join(self, data: st.DataObject, shares: bool) -> None:
        requests, ends = self.requests(data)
        sharing = share_prefixes([request.prompt_tokens for request in requests], ends) if shares else None
        self.rows += self.batch.join(requests, sharing)

    @rule(data=st.data(), where=st.sampled_from(["_feed_prompts", "_set"]))
    def join_without_memory(self, data: st.DataObject, where: str) -> None:
        requests, ends = self.requests(data)
        sharing = share_prefixes([request.prompt_tokens for request in requests], ends)
        self.batch._drop_ended()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.batch, where, out_of_memory)
            with pytest.raises(MemoryError):
                self.batch.join(requests, sharing)

    @rule()
    def join_too_long(self) -> None:
        with pytest.raises(ValueError, match="positions"):
            self.batch.join([Request("long", [3] * 150, Sampling(20))])

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.batch.step()

    @precondition(lambda self: self.batch._members)
    @rule()
    def step_without_memory(self) -> None:
        """After the layers have stored their keys and values."""
        self.batch._drop_ended()
        if not self.batch._members:
            return
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(self.model), "argmax", out_of_memory)
            patch.setattr(type(self.model), "head", out_of_memory)
            with pytest.raises(MemoryError):
                self.batch.step()

    @precondition(lambda self: any(row.is_running for row in self.rows))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from([row for row in self.rows if row.is_running]))
        row.cancel()
        self.cancelled.add(row.request.id)

    @invariant()
    def every_row_has_a_slot_of_its_own(self) -> None:
        slots = [member.slot for member in self.batch._members]
        assert self.batch._cache.slots == slots or set(map(id, self.batch._cache.slots)) == set(map(id, slots))
        assert len({slot.index for slot in slots}) == len(slots)
        used = [member.prefix for member in self.batch._members if member.prefix is not None]
        held = list(self.batch._prefixes._by_tokens.values())
        for prefix in held:
            children = sum(other.parent is prefix for other in held)
            assert prefix.num_users == used.count(prefix) + children > 0
        assert len(self.batch._prefixes.cache.slots) == len(held)

    def teardown(self) -> None:
        while not self.batch.is_done:
            self.batch.step()
        self.batch.step()
        assert self.batch.cache_bytes == 0
        for row in self.rows:
            tokens, reason = self.wanted(row.request)
            if row.finish_reason == "cancelled":
                assert row.request.id in self.cancelled
                assert row.tokens == tokens[: len(row.tokens)]
            else:
                assert (row.tokens, row.finish_reason) == (tokens, reason), row.request

    def wanted(self, request: Request) -> tuple[list[int], str]:
        """What the row has alone: by the naive decoder, or, if it draws, by a batch of its own."""
        schedule = FullDepth(L) if isinstance(self.schedule, Lossless) else self.schedule
        sampling = request.sampling
        if sampling.temperature > 0:
            made = generate(self.model, [request], schedule, decode_text=decode_text).completions[0]
            return made.tokens, made.finish_reason
        eos = -7 if sampling.ignore_eos else min(self.model.config.eos_token_ids)
        tokens = naively(self.reference, tuple(request.prompt_tokens), schedule, eos)[: sampling.max_new_tokens]
        search = StopStringSearch(sampling.stop, decode_text) if sampling.stop else None
        for count, token in enumerate(tokens, start=1):
            if token == eos or (search is not None and search.push(token)):
                return tokens[:count], "stop"
        return tokens, "length"


def out_of_memory(*_: object, **__: object) -> None:
    raise MemoryError


@lru_cache(maxsize=1024)
def naively(reference: OPTForCausalLM, prompt: tuple[int, ...], schedule: Schedule, eos: int) -> list[int]:
    return naive_decode(reference, list(prompt), schedule, 14, eos)


@pytest.mark.parametrize("name", SCHEDULES)
def test_rows_have_the_tokens_of_the_naive_decoder(model: Decoder, reference: OPTForCausalLM, name: str) -> None:
    assert len(model.config.eos_token_ids) == 1
    Machine.model, Machine.reference, Machine.schedule = model, reference, SCHEDULES[name]
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=examples(24), stateful_step_count=20, deadline=None)
    )
