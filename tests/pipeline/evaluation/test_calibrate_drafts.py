"""`jobs.calibrate target=drafts`: the verb, what the checkpoint carries, and who takes it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import OPTForCausalLM

from actors.generator import Generator
from actors.generator_config import GeneratorConfig
from jobs import calibrate, generate
from pipeline.config.job import ConfigError, JobConfig, build_config
from pipeline.resolve_model import check_model
from skipdecode.checkpoint.model_config import read_config
from skipdecode.checkpoint.weights import load_model, save_model
from skipdecode.config.sampling import Sampling
from skipdecode.cost.roofline import Ceilings
from skipdecode.engine.request import Request
from skipdecode.engine.results import Completion
from skipdecode.families.llama_swiftkv import as_llama_swiftkv
from skipdecode.schedules.lossless import Lossless
from skipdecode.speculative.draft import LAYERS
from tests.support.verbs import Call
from tests.support.wrapped_models import save

L = 6
IDLE = (1, 3, 4)
CEILINGS = Ceilings(flops_per_s=1e12, bytes_per_s=2.5e10, call_s=3e-6)
LEFT = {"method": "layers", "layers": [0, 2, 5]}
Verb = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture(scope="module")
def idle_checkpoint(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in which three layers do nothing at all."""
    folder = tmp_path_factory.mktemp("idle") / "model"
    shutil.copytree(tiny_checkpoint, folder)
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if (".fc2." in name or ".out_proj." in name) and any(f"layers.{i}." in name for i in IDLE):
            weights[name] = torch.zeros_like(weights[name])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"name[The Otter], near[Willow {i}]"}) + "\n" for i in range(12)))
    return path


@pytest.fixture
def verb(call: Call, monkeypatch: pytest.MonkeyPatch) -> Verb:
    """With the ceilings of no busy machine."""
    monkeypatch.setattr("pipeline.evaluation.calibrate_drafts.measure_ceilings", lambda *_: CEILINGS)
    settings = ["target=drafts", "max_new_tokens=16", "threads=1", "model.dtype=float32"]
    return lambda *arguments: call(calibrate, *settings, *arguments)


@pytest.fixture
def found(verb: Verb, prompts: Path, idle_checkpoint: Path, tmp_path: Path) -> tuple[Path, dict[str, Any], str]:
    """The checkpoint that the verb wrote, its document, and what it said."""
    out = tmp_path / "drafts"
    code, document, err = verb("-i", prompts, "-o", out, f"model.source={idle_checkpoint}", "batch_sizes=[1, 4]")
    assert code == 0, err
    return out, document, err


def resolved(source: Path, **decode: Any) -> dict[str, Any]:
    tree = {"model": {"source": str(source)}, "decode": decode, "sampling": {"max_new_tokens": 16}}
    return check_model(build_config(JobConfig, tree), print).decode


def test_the_checkpoint_carries_the_best_drafts(found: tuple[Path, dict[str, Any], str]) -> None:
    out, document, err = found
    assert document["pays"] is True
    assert document["drafts"] == LEFT
    best = document["candidates"][0]
    assert (best["decode"], best["layers_per_token"], best["acceptance"]) == (LEFT, 3.0, [1.0])
    assert [gain["batch_size"] for gain in best["gains"]] == [1, 4]
    assert all(gain["speedup"] >= 1.02 for gain in best["gains"])
    assert all(0 <= rate <= 1 for one in document["candidates"] for rate in one["acceptance"])
    assert set(document["ceilings"]) == {"flops_per_s", "bytes_per_s", "call_s"}
    assert document == json.loads((out / "calibration/calibration.json").read_text())
    raw = json.loads((out / "config.json").read_text())
    assert raw["drafts"] == {"num_layers": L, "decode": LEFT, "acceptance": [1.0]}
    assert OPTForCausalLM.from_pretrained(out).config.num_hidden_layers == L, "Hugging Face opens it"
    assert "sample: 12 prompts" in err
    assert "progress: " in err
    assert f"drafts: {json.dumps(LEFT)}" in err
    assert f"(model.source={out} decode.lossless=auto)" in err


def test_lossless_jobs_take_them_and_no_others_do(found: tuple[Path, dict[str, Any], str]) -> None:
    out, _, _ = found
    carried = LEFT | {"lossless": "auto", "draft_tokens": "auto"}
    assert resolved(out, lossless="auto") == carried
    assert resolved(out, lossless=True) == carried | {"lossless": True}
    assert resolved(out, lossless=True, method="full")["method"] == "full", "the job's own goes first"
    assert resolved(out) == {"method": "full"}, "decoding by drafts would write nonsense"


def test_what_was_measured_is_where_decoding_starts(found: tuple[Path, dict[str, Any], str]) -> None:
    """A worker of that job: its tokens are those of full depth, and its first decision knows the acceptance."""
    out, _, _ = found
    one = Generator(GeneratorConfig(str(out), resolved(out, lossless="auto"), dtype="float32", num_threads=1))
    schedule = one.schedule(16)
    assert isinstance(schedule, Lossless)
    assert one.speculation(schedule).acceptance.rates[LAYERS] == 1.0
    other = one.with_decode({"method": "unified", "layers": 3, "lossless": True})
    unknown = other.schedule(16)
    assert isinstance(unknown, Lossless)
    assert other.speculation(unknown).acceptance.rates[LAYERS] == 0.8, "of another schedule nothing is known"
    requests = [Request(str(i), [2, 5 + i, 9], Sampling(16)) for i in range(4)]
    full = one.with_decode({"method": "full"})
    made, wanted = ([a.tokens for a in way(requests).answers if isinstance(a, Completion)] for way in (one, full))
    assert made == wanted
    assert len(made) == 4


def test_acceptance_is_what_a_run_has(found: tuple[Path, dict[str, Any], str]) -> None:
    """Of layers that matter, too: the share that the table gives, within 15 points for a dozen short texts."""
    out, document, _ = found
    poor = document["candidates"][-1]
    assert poor["acceptance"][0] < 0.99
    config = GeneratorConfig(str(out), poor["decode"] | {"lossless": True, "draft_tokens": 1}, dtype="float32",
                             num_threads=1)  # fmt: skip
    one = Generator(config)
    tokens = one.tokenizer.encode([f"name[The Otter], near[Willow {i}]" for i in range(12)])
    records = one([Request(str(i), ids, Sampling(16)) for i, ids in enumerate(tokens)]).batches
    drafted, accepted = (sum(record[key][0] for record in records) for key in ("drafted_at", "accepted_at"))
    assert accepted / drafted == pytest.approx(poor["acceptance"][0], abs=0.15)


def test_nothing_pays_is_said_and_stored(verb: Verb, prompts: Path, tmp_path: Path, tiny_checkpoint: Path) -> None:
    """Random weights, of which every layer matters."""
    out = tmp_path / "drafts"
    code, document, err = verb("-i", prompts, "-o", out, f"model.source={tiny_checkpoint}", "batch_sizes=[2, 16]")
    assert code == 0, err
    assert document["pays"] is False
    assert document["drafts"] == {"method": "full"}
    assert "nothing pays: no draft with fewer layers is expected to gain 2 % over full depth in batches of 2, 16" in err
    assert json.loads((out / "config.json").read_text())["drafts"] == {
        "num_layers": L, "decode": {"method": "full"}, "acceptance": []
    }  # fmt: skip
    assert resolved(out, lossless="auto") == {"method": "full", "lossless": "auto", "draft_tokens": "auto"}


def test_drafts_of_a_checkpoint_with_swiftkv_are_for_the_whole_prompt(
    verb: Verb, prompts: Path, tmp_path: Path, tokenizer_folder: Path
) -> None:
    """Though its `prefill.method` is swiftkv by default."""
    save("llama", tmp_path / "llama", vocab_size=320)
    model = load_model(tmp_path / "llama").with_swiftkv(3)
    model.config = as_llama_swiftkv(model.config)
    source = tmp_path / "swiftkv"
    save_model(model, source)
    shutil.copy(tokenizer_folder / "tokenizer.json", source)
    assert read_config(source).default_prefill == "swiftkv"
    code, document, err = verb("-i", prompts, "-o", tmp_path / "drafts", f"model.source={source}", "batch_sizes=[2]")
    assert code == 0, err
    assert document["prefill"] == "full"


def test_a_carried_schedule_that_is_none_is_named_before_anything_is_decoded(
    verb: Verb, prompts: Path, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    source = Path(shutil.copytree(tiny_checkpoint, tmp_path / "model"))
    raw = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(raw | {"skip_decode": {"method": "skipdecode", "speedup": 7}}))
    code, _, err = verb("-i", prompts, "-o", tmp_path / "drafts", f"model.source={source}")
    assert code == 2
    assert "model.source: skip_decode in its config.json: decode.speedup: 7 has no preset" in err
    assert "sample: " not in err
    assert not (tmp_path / "drafts").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["skip_share=0.2"], "skip_share: has no meaning with target=drafts; leave it out, or target=ffn_skip"),
        (["warmup_tokens=2"], "warmup_tokens: has no meaning with target=drafts"),
        (["target=ffn_skip", "batch_sizes=[2]"], "batch_sizes: has no meaning with target=ffn_skip"),
        (["target=layers"], "target: "),
        (["batch_sizes=[]"], "batch_sizes: "),
        (["batch_sizes=[0]"], "batch_sizes"),
        (["batch_sizes=[8, 8]"], "batch_sizes: 8 is there twice"),
        (["batch_sizes=[1000000000]"], "batch_sizes: 1000000000 rows are too many: there is room for"),
        (["decode.method=skipdecode"], "decode: drafts are for full depth, and looked for by target=drafts; leave out"),
        (["decode.lossless=auto"], "decode.lossless: "),
        (["prefill.method=swiftkv"], "prefill.method: full depth, which drafts are for, has no SwiftKV prompt"),
        (["model.quantization=int8"], "model.quantization: "),
    ],
)
def test_bad_input_is_named_and_writes_nothing(
    verb: Verb, prompts: Path, tmp_path: Path, tiny_checkpoint: Path, overrides: list[str], message: str
) -> None:
    out = tmp_path / "drafts"
    code, document, err = verb("-i", prompts, "-o", out, f"model.source={tiny_checkpoint}", *overrides)
    assert (code, document["exit_code"]) == (2, 2), err
    assert message in err
    assert not out.exists()


@pytest.mark.parametrize(
    ("drafts", "message"),
    [
        ([1], "drafts is [1], expected a mapping"),
        (
            {"num_layers": L},
            "decode.lossless: drafts in the checkpoint's config.json is not what jobs.calibrate writes",
        ),
        (
            {"num_layers": L, "decode": LEFT, "acceptance": [2.0]},
            "is not what jobs.calibrate writes; run jobs.calibrate",
        ),
        ({"num_layers": 24, "decode": LEFT, "acceptance": []}, "are for 24 layers, and this model has 6"),
        (
            {"num_layers": L, "decode": {"method": "layers", "layers": [9]}, "acceptance": []},
            "decode.lossless: drafts in the",
        ),
        ({"num_layers": L, "decode": {}, "acceptance": []}, "is not what jobs.calibrate writes"),
        ({"num_layers": L, "decode": {"method": ["x"]}, "acceptance": []}, "is not what jobs.calibrate writes"),
    ],
)
def test_what_the_calibration_did_not_write_is_refused(
    tiny_checkpoint: Path, tmp_path: Path, drafts: Any, message: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint, folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"drafts": drafts}))
    with pytest.raises(ConfigError) as caught:
        resolved(folder, lossless=True, method="full")
    assert message in str(caught.value)


@pytest.mark.slow
@pytest.mark.ray
def test_a_run_drafts_with_them_and_goes_on(
    call: Call, found: tuple[Path, dict[str, Any], str], prompts: Path, tmp_path: Path
) -> None:
    out, _, _ = found
    fixed = ["-i", prompts, "-o", tmp_path / "run", f"model.source={out}", "model.dtype=float32"]
    fixed += ["sampling.max_new_tokens=16", "sampling.ignore_eos=true", "baseline.fraction=1.0"]
    code, report, err = call(generate, *fixed, "decode.lossless=true")
    assert code == 0, err
    assert report["agreement"]["exact_rows"] == 1.0
    assert report["tokens_per_pass"] > 1
    state = json.loads((tmp_path / "run/run.json").read_text())
    assert state["fingerprint"]["decode.method"] == "layers"
    assert state["fingerprint"]["decode.layers"] == LEFT["layers"]
    code, _, err = call(generate, *fixed, "decode.lossless=auto", "--resume")
    assert code == 0, err
    code, _, err = call(generate, *fixed, "decode.lossless=auto", "decode.method=full", "--resume")
    assert code == 2
    assert "decode.method: the run was started with 'layers', now it is 'full'" in err
