"""The comparison with peers: arguments, the worker's protocol on our own engine, peers that are missing or that fail.

The peers themselves are not installed here; Hugging Face is.
"""

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import OPTForCausalLM

from benchmarks.compare_peers import CPU, CUDA, KNOWN, SPECULATIVE, arguments, check, compare, make_prompts, run
from benchmarks.peer_engines import Spec, make_engine
from benchmarks.peer_worker import Contestant, PeerError
from skipdecode.backends.choice import NAMES
from skipdecode.checkpoint.tokenizer import Tokenizer
from skipdecode.checkpoint.weights import load_model
from skipdecode.engine.generate import generate
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.schedule import FullDepth
from tests.support.naive import greedy, random_prompts, requests_for, tokens_of

VOCABULARY = 320


@pytest.fixture
def spec(tiny_checkpoint: Path, tmp_path: Path) -> Callable[[str], Spec]:
    return lambda name: Spec(name, str(tiny_checkpoint), str(tmp_path), "float32", "cpu", 1, 3)


def wait_for_state(pid: int, wanted: str) -> None:
    """A signal takes a moment. pytest's own timeout ends what waits in vain."""
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != wanted:
        time.sleep(0.01)


def test_every_dtype_has_its_engines() -> None:
    assert arguments([]).engines == CPU["bfloat16"]
    assert arguments(["--dtype", "float32"]).engines == CPU["float32"]
    assert arguments(["--device", "cuda"]).engines == CUDA
    assert arguments(["--speculative"]).engines == SPECULATIVE
    assert set(SPECULATIVE) <= set(KNOWN)
    for engines in (*CPU.values(), CUDA):
        assert {"full", "vllm"} <= set(engines) <= set(KNOWN)
    assert not any("int8" in name or "bfloat16" in name for name in CPU["float32"])


def test_a_check_is_in_float32_and_skips_no_layers() -> None:
    args = arguments(["--check", "--dtype", "bfloat16"])
    assert args.dtype == "float32"
    assert set(args.engines) == {n for n in CPU["float32"] if not n.startswith("skipdecode")}


@pytest.mark.parametrize("wrong", [["--engines", "openvino"], ["--engines", "full", "vlm"], ["--dtype", "int8"]])
def test_wrong_arguments_are_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as error:
        arguments(wrong)
    assert error.value.code == 2


def test_vllm_may_have_its_own_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEERS_VLLM_PYTHON", "venv/bin/python")
    assert arguments([]).vllm_python == os.path.abspath("venv/bin/python")
    assert arguments(["--vllm-python", "/other/python"]).vllm_python == "/other/python"


@pytest.mark.slow
def test_a_worker_decodes_and_rests(spec: Callable[[str], Spec], hf: Callable[[Path], OPTForCausalLM]) -> None:
    prompts = make_prompts(3, 8, VOCABULARY)
    model = hf(Path(spec("full").model))
    model.generation_config.eos_token_id = None
    expected = model.generate(torch.tensor(prompts), max_new_tokens=5, do_sample=False)[:, 8:].tolist()
    with Contestant(spec("full")) as contestant:
        assert contestant.facts["backend"]["name"] in NAMES
        assert contestant.facts["backend"]["reason"]
        assert contestant.facts["torch_threads"] == 1
        assert contestant.facts["packages"]["torch"] == version("torch")
        for _ in range(2):
            seconds, tokens = contestant.run(prompts, 5)
            assert seconds > 0
            assert tokens == expected
            wait_for_state(contestant.pid, "T")
        with pytest.raises(PeerError, match=r"ValueError: .*128"):
            contestant.run(make_prompts(1, 200, VOCABULARY), 5)  # more than the model has positions
    assert not Path(f"/proc/{contestant.pid}").exists()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["full-lossless", "hf-prompt-lookup"])
def test_who_drafts_makes_the_tokens_of_full_depth(spec: Callable[[str], Spec], name: str) -> None:
    prompts = [[2, *[5, 6, 7] * 6], [2, 9, 8, 9, 8, 9], [2, 4]]
    threads = torch.get_num_threads()
    try:
        assert make_engine(spec(name)).run(prompts, 9) == make_engine(spec("full")).run(prompts, 9)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ["full", "full-lossless"])
def test_natural_answers_end_at_eos(
    ending_checkpoint: Callable[[str], Path], ours: Callable[[Path], Decoder], spec: Callable[[str], Spec], name: str
) -> None:
    """Three rows at a time of eight."""
    folder = ending_checkpoint("125m")
    prompts, threads = random_prompts([5] * 8, seed=2), torch.get_num_threads()
    try:
        made = make_engine(replace(spec(name), model=str(folder), ends=True)).run(prompts, 20)
    finally:
        torch.set_num_threads(threads)
    assert made == tokens_of(generate(ours(folder), requests_for(prompts, greedy(20)), FullDepth(6)))
    assert len({len(tokens) for tokens in made}) > 1


def test_answers_keep_a_schema(ending_checkpoint: Callable[[str], Path], spec: Callable[[str], Spec]) -> None:
    pytest.importorskip("llguidance")
    folder, threads = ending_checkpoint("125m"), torch.get_num_threads()
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    asked = replace(spec("full"), model=str(folder), ends=True, schema=json.dumps(schema))
    try:
        made = make_engine(asked).run(random_prompts([5] * 3, seed=2), 60)
    finally:
        torch.set_num_threads(threads)
    tokenizer = Tokenizer(folder, load_model(folder).config)
    assert all(json.loads(tokenizer.decode(tokens)) in ({"n": 1}, {"n": 2}) for tokens in made)


def test_who_cannot_end_answers_is_refused(spec: Callable[[str], Spec]) -> None:
    with pytest.raises(ValueError, match=r"hf-dynamic.*is not made to end at EOS"):
        make_engine(replace(spec("hf-dynamic"), ends=True))
    for wrong in (["--natural"], ["--natural", "--questions", "x", "--engines", "full", "hf-dynamic"]):
        with pytest.raises(SystemExit) as error:
            arguments(wrong)
        assert error.value.code == 2
    made = arguments(["--natural", "--questions", "x"])
    assert made.engines == ["full", "full-int8", "skipdecode-2x", "openvino", "vllm"]


def test_an_interpreter_that_is_not_there_is_said(spec: Callable[[str], Spec]) -> None:
    with pytest.raises(PeerError, match="cannot start its interpreter"):
        Contestant(spec("vllm"), "/no/such/python")


@pytest.mark.slow
def test_missing_peers_are_named_and_the_others_compared(tiny_checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    args = arguments(
        f"--model {tiny_checkpoint} --engines full vllm openvino ctranslate2-int8 --batch-sizes 2 3 --rounds 2"
        f" --prompt-tokens 8 --new-tokens 4 --threads 1 --output-json {output} --vllm-python /no/such/python".split()
    )
    document = run(args, tmp_path)
    assert json.loads(output.read_text()) == document
    assert document["left_out"].keys() == {"vllm", "openvino", "ctranslate2-int8"}
    assert document["left_out"]["openvino"] == "not installed here: No module named 'openvino'"
    assert document["backend"]["name"] in NAMES
    assert document["engines"].keys() == {"full"}
    assert [(row["batch_size"], row["engine"], len(row["seconds"])) for row in document["rows"]] == [
        (2, "full", 2), (3, "full", 2),
    ]  # fmt: skip
    for row in document["rows"]:
        assert row["output_tokens_per_s"] == pytest.approx(row["batch_size"] * 4 / (sum(row["seconds"]) / 2))


@pytest.mark.slow
def test_a_peer_that_dies_loses_nothing_but_itself(spec: Callable[[str], Spec]) -> None:
    args = arguments("--batch-sizes 1 2 3 --rounds 1 --prompt-tokens 8 --new-tokens 4".split())
    kept: list[tuple[int, str]] = []
    errors: dict[str, str] = {}
    with Contestant(spec("full")) as full, Contestant(spec("hf-dynamic")) as other:
        checked = check([full, other], make_prompts(3, 8, VOCABULARY), 5, errors)
        assert [(row["engine"], row["equal_rows"]) for row in checked] == [("full", 3), ("hf-dynamic", 3)]

        def keep(rows: list[dict[str, Any]]) -> None:
            kept.extend((row["batch_size"], row["engine"]) for row in rows)
            if len(kept) == 2:
                os.kill(other.pid, signal.SIGKILL)

        works = {batch: make_prompts(batch, 8, VOCABULARY) for batch in (1, 2, 3)}
        compare(args, [full, other], works, errors, keep)
        assert kept == [(1, "full"), (1, "hf-dynamic"), (2, "full"), (3, "full")]
        assert errors == {"hf-dynamic": "batch 2: its process died"}
        os.kill(full.pid, signal.SIGKILL)
        with pytest.raises(SystemExit, match="full: batch 1: its process died"):
            compare(args, [full, other], works, errors, keep)


@pytest.mark.slow
def test_prompts_of_mixed_lengths_come_back_in_their_order(spec: Callable[[str], Spec]) -> None:
    prompts = [make_prompts(1, length, VOCABULARY)[0] for length in (3, 9, 5, 12, 4)]
    two = {"max_batch": 2}
    with Contestant(replace(spec("full"), **two)) as full, Contestant(replace(spec("hf-dynamic"), **two)) as other:
        _, made = full.run(prompts, 4)
        assert made == other.run(prompts, 4)[1]
        assert made == [full.run([prompt], 4)[1][0] for prompt in prompts]
