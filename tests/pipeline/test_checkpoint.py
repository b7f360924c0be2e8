"""The schedule that a checkpoint is decoded with by default, and the warning where it was not tuned for skipping."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from jobs import generate
from pipeline.config.job import ConfigError, JobConfig, build_config
from pipeline.resolve_model import check_model, resolve_decode, resolve_prefill
from skipdecode.checkpoint.model_config import read_config
from skipdecode.checkpoint.weights import load_model, save_model
from skipdecode.config.model import SwiftKVConfig
from skipdecode.families import released
from skipdecode.families.llama_swiftkv import as_llama_swiftkv
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.trained import SCHEDULE_FILE, TRAINED_FILE
from tests.support.lora_adapters import write_adapter
from tests.support.verbs import Call

TUNED = {"method": "skipdecode", "speedup": 2, "horizon": 9}


@pytest.fixture
def tuned(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(tiny_checkpoint, tmp_path / "tuned"))
    config = json.loads((folder / "config.json").read_text()) | {"skip_decode": TUNED}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def notes_of(source: Path, adapter: Path | None = None, **sections: Any) -> list[str]:
    notes: list[str] = []
    tree = {"model": {"source": str(source), "adapter": adapter and str(adapter)}, **sections}
    check_model(build_config(JobConfig, tree), notes.append)
    return notes


def test_full_depth_is_the_default_unless_the_checkpoint_carries_a_schedule(tiny_checkpoint: Path, tuned: Path) -> None:
    def decode_of(source: Path, **decode: Any) -> dict[str, Any]:
        return resolve_decode(build_config(JobConfig, {"decode": decode}), read_config(source), print)

    assert decode_of(tiny_checkpoint) == decode_of(tiny_checkpoint, prefix="off") == {"method": "full"}
    assert decode_of(tiny_checkpoint, speedup=2) == {"method": "skipdecode", "speedup": 2}
    assert decode_of(tiny_checkpoint, lossless=True)["method"] == "skipdecode", "drafts cannot change a token"
    assert decode_of(tiny_checkpoint, ffn_skip={"mode": "row"})["method"] == "full"
    assert decode_of(tuned) == TUNED
    for keys in ({}, {"decode": {"prefix": "off"}}):
        (log,) = notes_of(tiny_checkpoint, **keys)
        assert log.startswith("full depth: this checkpoint carries no schedule; decode.speedup=2 skips layers")
    assert notes_of(tuned) == notes_of(tiny_checkpoint, decode={"method": "full"}) == []


@pytest.mark.parametrize(
    ("decode", "method"),
    [
        ({"speedup": 3}, "skipdecode"),
        ({"method": "early_exit", "max_layers": 4, "min_layers": 2}, "early_exit"),
        ({"method": "unified", "layers": 5, "ffn_skip": {"cold_start": 1, "cold_end": 1}}, "unified"),
    ],
)
def test_an_untuned_model_is_named_with_the_remedy(tiny_checkpoint: Path, decode: dict[str, Any], method: str) -> None:
    (log,) = notes_of(tiny_checkpoint, decode=decode)
    start = f"warning: {tiny_checkpoint} carries no skip_decode schedule, so nothing says that it was tuned for "
    assert log.startswith(start + f"decode.method={method}")
    for remedy in ("jobs.finetune", "decode.method=full", "decode.lossless=true", "agreement in the report"):
        assert remedy in log
    assert "\n" not in log


def test_the_demo_model_is_not_looked_for_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=r"model\.source: the demo model models/opt-e2e is not here; run in the project"
    ):
        check_model(build_config(JobConfig, {}), print)


def test_no_cause(tiny_checkpoint: Path, tuned: Path) -> None:
    rows = {"mode": "row", "cold_start": 1, "cold_end": 1}
    for decode in ({"method": "full"}, {"speedup": 1}, {"lossless": True}, {"method": "full", "ffn_skip": rows}):
        assert notes_of(tiny_checkpoint, decode=decode) == []
    assert notes_of(tiny_checkpoint, sampling={"max_new_tokens": 0, "prompt_logprobs": True}) == []
    assert notes_of(tuned) == notes_of(tuned, decode={"speedup": 4}) == []


def test_tuned_for_another_method(tuned: Path) -> None:
    (log,) = notes_of(tuned, decode={"method": "unified", "layers": 3})
    assert f"{tuned} carries the schedule of method skipdecode, so nothing says" in log
    assert "tuned for decode.method=unified" in log


TRAINED = [
    {"method": "full"},
    {"speedup": 1},
    {"max_layers": 6, "min_layers": 3, "prefill": "swiftkv", "horizon": 9},
    {"max_layers": 4, "min_layers": 4, "warmup_layers": 3},
    {"method": "unified", "layers": 4},
    {"method": "layers", "layers": [0, 1, 5]},
    {"method": "unified", "layers": 99},
    {"method": [], "speedup": 2},
]


def listing(tuned: Path, trained: Any) -> Path:
    config = json.loads((tuned / "config.json").read_text()) | {"trained_schedules": trained}
    (tuned / "config.json").write_text(json.dumps(config))
    return tuned


@pytest.mark.parametrize(
    ("decode", "new", "why"),
    [
        ({}, 50, "skipdecode with 3 layers or more, and this schedule comes down to 2 of 6 "),  # carried, untrained
        ({"max_layers": 5, "min_layers": 3}, 50, None),
        ({"max_layers": 3, "min_layers": 3, "horizon": 3}, 50, None),
        ({"max_layers": 4, "min_layers": 4, "warmup_layers": 3}, 50, None),
        (
            {"max_layers": 4, "min_layers": 4, "warmup_layers": 4},
            50,
            "skipdecode with other layers, and .* to 4 of 6",
        ),
        ({"max_layers": 5, "min_layers": 1}, 3, "skipdecode with 3 layers or more, and .* to 1 of 6 layers: "),
        ({"max_layers": 5, "min_layers": 1, "horizon": 50}, 3, None),  # so short a text stays above
        ({"max_layers": 5, "min_layers": 1, "horizon": 50}, 99, "skipdecode with 3 layers or more, and .* to 1 of 6"),
        ({"max_layers": 1, "min_layers": 1}, 1, None),  # there is no step
        ({"method": "unified", "layers": 4}, 50, None),
        ({"method": "unified", "layers": 3}, 50, "unified with 4 layers or more, and .* to 3 of 6 layers"),
        ({"method": "layers", "layers": [0, 1, 2, 5]}, 50, None),
        (
            {"method": "layers", "layers": [0, 2, 4, 5]},
            50,
            "method=layers with other layers, and .* to 4 of 6",
        ),
        ({"method": "early_exit", "max_layers": 6, "min_layers": 6}, 50, None),
        ({"method": "early_exit"}, 50, "carries schedules of methods layers, skipdecode, unified, so nothing says"),
    ],
)
def test_other_layers_than_it_was_tuned_for(tuned: Path, decode: dict[str, Any], new: int, why: str | None) -> None:
    notes = notes_of(listing(tuned, TRAINED), decode=decode, sampling={"max_new_tokens": new})
    assert len(notes) == (why is not None)
    assert all(re.search(str(why), log) for log in notes)


def test_a_list_alone(tuned: Path) -> None:
    config = json.loads((listing(tuned, TRAINED) / "config.json").read_text())
    del config["skip_decode"]
    (tuned / "config.json").write_text(json.dumps(config))
    assert notes_of(tuned, decode={"max_layers": 5, "min_layers": 3}) == []


def test_a_list_that_this_model_cannot_run_says_nothing_is_known(tuned: Path) -> None:
    (log,) = notes_of(listing(tuned, [{"speedup": 7}]))
    assert "was tuned for decode.method=skipdecode with 6 layers or more" in log


@pytest.mark.parametrize("trained", [{"speedup": 2}, [2]])
def test_what_is_no_list_is_refused(tuned: Path, trained: Any) -> None:
    with pytest.raises(ConfigError, match=rf"trained_schedules is {re.escape(repr(trained))}, expected a list of"):
        notes_of(listing(tuned, trained))


def test_what_is_no_schedule_is_refused(tuned: Path) -> None:
    config = json.loads((tuned / "config.json").read_text()) | {"skip_decode": [2]}
    (tuned / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"skip_decode is \[2\], expected a mapping"):
        notes_of(tuned)


def test_an_adapter_says_it_too(tiny_checkpoint: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint)
    adapter = write_adapter(tmp_path / "a", model, dict.fromkeys(["model.decoder.layers.0.fc1"], 2), r=2,
                            target_modules="model.decoder.layers.0.fc1")  # fmt: skip
    (log,) = notes_of(tiny_checkpoint, adapter, decode={"speedup": 2})
    assert f"{tiny_checkpoint} with {adapter} carries no" in log
    (adapter / SCHEDULE_FILE).write_text(json.dumps(TUNED))
    assert notes_of(tiny_checkpoint, adapter) == notes_of(tiny_checkpoint, adapter, decode={"speedup": 5}) == []
    (adapter / TRAINED_FILE).write_text(json.dumps([TUNED]))
    assert notes_of(tiny_checkpoint, adapter) == []
    (log,) = notes_of(tiny_checkpoint, adapter, decode={"speedup": 5})
    assert (
        "tuned for decode.method=skipdecode with 2 layers or more, and this schedule comes down to 1 of 6 layers" in log
    )


def test_the_prompt_of_a_checkpoint_that_was_released_with_swiftkv() -> None:
    llama = released("tinyllama-1.1b")
    swiftkv = replace(llama, swiftkv=SwiftKVConfig(llama.num_hidden_layers // 2))
    for config, default in ((swiftkv, "full"), (as_llama_swiftkv(swiftkv), "swiftkv")):
        assert resolve_prefill(JobConfig(), config) == default
        for method in ("full", "swiftkv"):
            given = JobConfig.model_validate({"prefill": {"method": method}})
            assert resolve_prefill(given, config) == method
        assert resolve_prefill(JobConfig.model_validate({"decode": {"lossless": True}}), config) == "full"


def test_swiftkv_that_was_made_without_the_adapter(tiny_checkpoint: Path, tmp_path: Path) -> None:
    swiftkv: Decoder = load_model(tiny_checkpoint).with_swiftkv(3)
    save_model(swiftkv, tmp_path / "swiftkv")
    shutil.copy(tiny_checkpoint / "tokenizer.json", tmp_path / "swiftkv")
    keys: dict[str, Any] = {"decode": {"method": "full"}, "prefill": {"method": "swiftkv"}}
    assert notes_of(tmp_path / "swiftkv", **keys) == []
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint)
    adapter = write_adapter(tmp_path / "a", model, {"model.decoder.layers.0.fc1": 4}, target_modules=r".*\.0\.fc1")
    (log,) = notes_of(tmp_path / "swiftkv", adapter, **keys)
    assert "prefill.method=swiftkv" in log
    assert "without model.adapter" in log
    first, second = notes_of(tmp_path / "swiftkv", adapter, **keys | {"decode": {"method": "skipdecode", "speedup": 2}})
    assert "prefill.method=swiftkv" in first
    assert "carries no skip_decode schedule" in second


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"actors": {"num_gpus": 7}}, "actors.num_gpus: 7 GPUs for 6 layers"),
        (
            {"actors": {"num_gpus": 3}, "sampling": {"deterministic": True}},
            "sampling.deterministic: .*no 3 equal parts",
        ),
        ({"decode": {"lossless": True}}, "decode.lossless: .*or actors.num_gpus=1 instead of 2"),
        (
            {"decode": {"method": "full", "ffn_skip": {"mode": "row", "cold_start": 1, "cold_end": 1}}},
            "decode.ffn_skip.mode: .*calibrated or fixed",
        ),
        ({"swiftkv": True, "prefill": {"method": "swiftkv"}}, "prefill.method: .*use prefill.method=full"),
    ],
)
def test_what_cannot_run_on_several_gpus(
    tiny_checkpoint: Path, tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    source = tiny_checkpoint
    if keys.pop("swiftkv", False):
        source = tmp_path / "swiftkv"
        save_model(load_model(tiny_checkpoint).with_swiftkv(3), source)
        shutil.copy(tiny_checkpoint / "tokenizer.json", source)
    keys = {"actors": {"num_gpus": 2}} | keys
    with pytest.raises(ConfigError, match=message):
        notes_of(source, **keys)
    if "num_gpus" not in keys["actors"] or keys["actors"]["num_gpus"] == 2:
        notes_of(source, **(keys | {"actors": {"num_gpus": 1}}))


@pytest.mark.parametrize(("num_gpus", "devices"), [("auto", 1), (0, 1), (0.5, 1), (1, 1), (2, 2), (4.0, 4)])
def test_gpus_of_an_actor_above_one_share_out_its_layers(num_gpus: Any, devices: int) -> None:
    assert JobConfig.model_validate({"actors": {"num_gpus": num_gpus}}).actors.num_devices == devices


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("ray_is_up")
def test_it_is_the_first_line_and_agreement_among_the_first_of_the_report(
    tiny_checkpoint: Path, tmp_path: Path, call: Call
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"id": f"r{n}", "prompt": f"dish {n}"}) + "\n" for n in range(4)))
    settings = [
        f"model.source={tiny_checkpoint}", "sampling.max_new_tokens=8", "baseline.fraction=1.0", "decode.speedup=2",
    ]  # fmt: skip
    code, _, err = call(generate, "-i", path, "-o", tmp_path / "run", *settings)
    assert code == 0, err
    lines = [line for line in err.splitlines() if not line.startswith(("20", "("))]  # Ray's own begin so
    assert lines[0].startswith(f"warning: {tiny_checkpoint} carries no skip_decode schedule"), err
    told = next(n for n, line in enumerate(lines) if line.startswith("done: "))
    agreement = lines[told + 1]
    assert "tokens equal to full depth: " in agreement, err
    assert "not measured" not in agreement
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert "agreement" in list(report)[:5]
    assert report["agreement"]["token_match"] is not None
