"""Log-probabilities of answers and prompts from a worker: those of Hugging Face, whatever schedule and batches are."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from actors.batching.prompt_scoring import with_scores
from actors.generator import Generator
from actors.generator_config import GeneratorConfig
from skipdecode.checkpoint.weights import load_model, save_model
from skipdecode.config.sampling import Sampling
from skipdecode.engine.request import Request
from skipdecode.engine.results import Completion, TokenLogprobs
from skipdecode.model.teacher_forcing import teacher_batch, teacher_forced_logits
from tests.support.family_tokenizers import sentencepiece
from tests.support.gguf_models import random_model
from tests.support.schedules import decodes

CLOSE = {"atol": 1e-4, "rtol": 0.0}
NEW = 7
LENGTHS = (1, 2, 9, 30, 5, 9)
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 400, "num_hidden_layers": 4}
DECODES: dict[str, dict[str, Any]] = decodes(SHAPE["num_hidden_layers"]) | {
    "ffn_skip": {"method": "full", "ffn_skip": {"mode": "row", "threshold": 0.5, "cold_start": 1, "cold_end": 1}},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    random_model("llama", max_position_embeddings=128, **SHAPE).save_pretrained(folder)
    sentencepiece("metaspace").save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def swiftkv(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("swiftkv")
    model = load_model(tiny_checkpoint).with_swiftkv(3, 1)
    torch.manual_seed(3)
    assert model.swiftkv is not None
    for parameter in model.swiftkv.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))
    save_model(model, folder)
    shutil.copy(tiny_checkpoint / "tokenizer.json", folder)
    return folder


def requests(**keys: Any) -> list[Request]:
    rng = torch.Generator().manual_seed(5)
    prompts = [[2, *torch.randint(4, 300, (length - 1,), generator=rng).tolist()] for length in LENGTHS]
    sampling = Sampling(max_new_tokens=NEW, ignore_eos=True)
    return [replace(Request(str(n), tokens, sampling), **keys) for n, tokens in enumerate(prompts)]


def completed(generator: Generator, rows: list[Request]) -> list[Completion]:
    found = [answer for answer in generator(rows).answers if isinstance(answer, Completion)]
    assert len(found) == len(rows)
    return found


def check(scored: list[TokenLogprobs], logprobs: Tensor, tokens: list[int], num_top: int) -> None:
    """`logprobs` [T, V] of the reference, for these tokens."""
    assert len(scored) == len(tokens)
    if not tokens:
        return
    own = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor([one.logprob for one in scored]), own, **CLOSE)
    assert {len(one.top) for one in scored} == {num_top}
    if num_top:
        values = torch.tensor([[value for _, value in one.top] for one in scored])
        torch.testing.assert_close(values, logprobs.topk(num_top).values, **CLOSE)
        ids = torch.tensor([[token for token, _ in one.top] for one in scored])
        torch.testing.assert_close(logprobs.gather(1, ids), values, **CLOSE)


@pytest.mark.parametrize("decode", DECODES.values(), ids=DECODES)
@pytest.mark.parametrize("family", ["opt", "llama", "swiftkv"])
@pytest.mark.grid
def test_scores_are_those_of_hugging_face(
    family: str, decode: dict[str, Any], request: pytest.FixtureRequest, tiny_checkpoint: Path
) -> None:
    folder = tiny_checkpoint if family == "opt" else request.getfixturevalue(family)
    prefill = "swiftkv" if family == "swiftkv" else "full"
    generator = Generator(GeneratorConfig(str(folder), decode, prefill, dtype="float32", device="cpu", batch_size=4))
    rows = requests(top_logprobs=3, score_prompt=True)
    theirs = AutoModelForCausalLM.from_pretrained(tiny_checkpoint if family == "swiftkv" else folder).eval()
    for row, answer in zip(rows, completed(generator, rows), strict=True):
        with torch.no_grad():
            whole = torch.tensor([row.prompt_tokens + answer.tokens])
            logprobs = theirs(whole).logits[0].log_softmax(-1)
        length = len(row.prompt_tokens)
        assert answer.prompt_logprobs is not None
        check(answer.prompt_logprobs, logprobs[: length - 1], row.prompt_tokens[1:], 3)
        if decode != DECODES["full"] or prefill == "swiftkv":  # their model skips nothing: one pass of ours that does
            batch = teacher_batch([(row.prompt_tokens, answer.tokens)], generator.model.config.filler_token_id)
            with torch.no_grad():
                forced = teacher_forced_logits(generator.model, batch, generator.schedule(NEW))
            check(answer.logprobs, forced[0].log_softmax(-1), answer.tokens, 3)
        else:
            check(answer.logprobs, logprobs[length - 1 : -1], answer.tokens, 3)


def test_rows_that_do_not_ask_have_none_and_others_their_own_number(tiny_checkpoint: Path) -> None:
    generator = Generator(
        GeneratorConfig(str(tiny_checkpoint), {"method": "full"}, dtype="float32", device="cpu", batch_size=8)
    )
    plain = completed(generator, requests())
    asks = [None, 0, 2, None, 5, 1]
    rows = [
        replace(row, top_logprobs=top, score_prompt=n % 2 == 0)
        for n, (row, top) in enumerate(zip(requests(), asks, strict=True))
    ]
    for n, (answer, before, top) in enumerate(zip(completed(generator, rows), plain, asks, strict=True)):
        assert answer.tokens == before.tokens
        assert len(answer.logprobs) == (0 if top is None else NEW)
        assert all(len(one.top) == top for one in answer.logprobs)
        assert (answer.prompt_logprobs is not None) == (n % 2 == 0)
        assert all(len(one.top) == (top or 0) for one in answer.prompt_logprobs or [])


@pytest.mark.parametrize("deterministic", [False, True])
def test_prompts_are_scored_alone_beside_rows_that_are_decoded(tiny_checkpoint: Path, deterministic: bool) -> None:
    config = GeneratorConfig(
        str(tiny_checkpoint), DECODES["skipdecode"], dtype="float32", device="cpu", batch_size=4,
        deterministic=deterministic, baseline_fraction=1.0,
    )  # fmt: skip
    generator = Generator(config)
    rows = requests(top_logprobs=1, score_prompt=True)
    rows = [
        replace(row, sampling=replace(row.sampling, max_new_tokens=0)) if n % 2 else row for n, row in enumerate(rows)
    ]
    wanted = completed(generator, requests(top_logprobs=1, score_prompt=True))
    result = generator(rows)
    for n, (answer, whole) in enumerate(zip(result.answers, wanted, strict=True)):
        assert isinstance(answer, Completion)
        assert answer.prompt_logprobs is not None
        assert whole.prompt_logprobs is not None
        ours, theirs = ([one.logprob for one in scored] for scored in (answer.prompt_logprobs, whole.prompt_logprobs))
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), **CLOSE)
        assert not deterministic or ours == theirs, "bit for bit"
        assert answer.tokens == ([] if n % 2 else whole.tokens)
        assert (answer.finish_reason, answer.layers_run > 0) == ("length", n % 2 == 0)
    alone = [record for record in result.batches if not record["output_tokens"]]
    assert sum(record["rows"] for record in alone) == 3
    assert all("full_decode_s" not in record and record["prefill_s"] > 0 for record in alone)


def test_a_prompt_as_long_as_the_context_is_scored_and_a_longer_one_fails_alone(
    tiny_checkpoint: Path, ours: Callable[[Path], Any]
) -> None:
    generator = Generator(GeneratorConfig(str(tiny_checkpoint), {"method": "full"}, dtype="float32", device="cpu"))
    sampling = Sampling(max_new_tokens=0)
    rows = [Request(str(n), [2] + [9] * (n - 1), sampling, score_prompt=True) for n in (128, 140)]
    whole, longer = generator(rows).answers
    assert isinstance(whole, Completion)
    assert len(whole.prompt_logprobs or []) == 127
    assert getattr(longer, "error_code", "") == "engine_error"


@pytest.mark.slow
@pytest.mark.parametrize("decode", [DECODES["skipdecode"], DECODES["skipdecode"] | {"lossless": True}], ids=str)
def test_heads_that_rows_share_and_drafts_change_no_score(tiny_checkpoint: Path, decode: dict[str, Any]) -> None:
    head = [2, *range(10, 58)]
    sampling = Sampling(max_new_tokens=NEW, ignore_eos=True)
    rows = [Request(str(n), [*head, 80 + n, 90][: 49 + n % 3], sampling, 2, score_prompt=True) for n in range(8)]
    found = {}
    for shares in (False, True):
        config = GeneratorConfig(
            str(tiny_checkpoint), decode, dtype="float32", device="cpu", batch_size=8, shares_prefixes=shares
        )
        found[shares] = Generator(config)(rows)
    assert sum(record["prefix_tokens_saved"] for record in found[True].batches) > 0
    assert sum(record["prefix_tokens_saved"] for record in found[False].batches) == 0
    for one, other in zip(found[True].answers, found[False].answers, strict=True):
        assert isinstance(one, Completion)
        assert isinstance(other, Completion)
        assert one.tokens == other.tokens
        for ours, theirs in ((one.logprobs, other.logprobs), (one.prompt_logprobs or [], other.prompt_logprobs or [])):
            values = [torch.tensor([score.logprob for score in scores]) for scores in (ours, theirs)]
            torch.testing.assert_close(*values, **CLOSE)


def test_a_batch_that_fails_while_it_is_scored_is_counted_once(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = GeneratorConfig(str(tiny_checkpoint), DECODES["full"], dtype="float32", device="cpu", batch_size=4)
    generator, rows = Generator(config), requests(score_prompt=True)
    wanted = [answer.tokens for answer in completed(generator, rows)]
    score = with_scores

    def raising(model: Any, chosen: list[Request], *others: Any) -> list[Completion]:
        if len(chosen) > 2:
            raise torch.OutOfMemoryError("no room for scores")
        return score(model, chosen, *others)

    monkeypatch.setattr("actors.batching.prompt_scoring.with_scores", raising)
    result = generator(rows)
    assert [answer.tokens for answer in result.answers if isinstance(answer, Completion)] == wanted
    assert sum(record["rows"] for record in result.batches) == len(rows)
    assert all(record["score_s"] > 0 for record in result.batches)
