"""A finished run, and every figure of its report recomputed from its Parquet files by other code."""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset as ds
import pytest

from skipdecode.backends import choice
from tests.support.processes import row_list

NUM_ROWS, NEW, LAYERS = 90, 12, 6


@dataclass
class Finished:
    output: Path
    arguments: list[str]
    """Of the run, without -o."""
    report: dict[str, Any]
    state: dict[str, Any]
    collector: Any
    """The collector's handle: while it is held, Prometheus sees its figures."""

    def read(self, kind: str) -> list[dict[str, Any]]:
        paths = sorted((self.output / "metrics").glob(f"{kind}-*.parquet"))
        return [row for path in paths for row in ds.dataset(path).to_table().to_pylist()]

    def rows(self, status: str) -> list[dict[str, Any]]:
        return row_list(self.output, status)


class Recount:
    """A run's files, and which figures of its report were recomputed from them."""

    def __init__(self, finished: Finished) -> None:
        self.finished, self.unseen = finished, set(finished.report)
        self.good, self.bad = finished.rows("ok"), finished.rows("failed")
        self.batches, self.windows, self.workers = (finished.read(kind) for kind in ("batches", "windows", "workers"))
        self.pairs = [b for b in self.batches if b["full_output_tokens"]]
        self.begin, self.end = (finished.state["sessions"][0][f"{edge}_at"] for edge in ("started", "ended"))
        self.seconds = self.end - self.begin
        self.prompts, self.answers = (
            [row[f"num_{kind}_tokens"] for row in self.good] for kind in ("input", "generated")
        )
        self.steps = sum(n - 1 for n in self.answers)

    def figure(self, name: str) -> Any:
        self.unseen.discard(name)
        return self.finished.report[name]


def check_counts(of: Recount) -> None:
    assert len(of.good) > 70
    assert of.figure("duration_s") == pytest.approx(of.seconds)
    assert (of.figure("completed"), of.figure("failed")) == (len(of.good), len(of.bad))
    assert (of.figure("total_input_tokens"), of.figure("total_output_tokens")) == (sum(of.prompts), sum(of.answers))
    assert of.figure("request_throughput") == pytest.approx(len(of.good) / of.seconds)
    assert of.figure("output_throughput") == pytest.approx(sum(of.answers) / of.seconds)
    assert of.figure("total_token_throughput") == pytest.approx((sum(of.answers) + sum(of.prompts)) / of.seconds)
    decoding = sum(b["prefill_s"] + b["decode_s"] for b in of.batches)
    assert of.figure("decode_output_throughput") == pytest.approx(sum(of.answers) / decoding)
    assert of.figure("prefill_s") + of.figure("decode_s") == pytest.approx(decoding)
    saved = sum(b["prefix_tokens_saved"] for b in of.batches)
    assert of.figure("prefix_tokens_saved") == saved
    prefill_s = sum(b["prefill_s"] for b in of.batches)
    assert of.figure("prefix_saved_s") == pytest.approx(prefill_s * saved / (sum(of.prompts) - saved))
    assert of.figure("layers_per_token") == pytest.approx(sum(row["layers_run"] for row in of.good) / of.steps)
    assert of.figure("ffns_per_token") == pytest.approx(sum(row["ffns_run"] for row in of.good) / of.steps)
    assert of.figure("reasoning") == {"tokens": None, "unfinished": 0.0}
    padding = sum(b["prompt_padding"] for b in of.batches)
    assert of.figure("padding_fraction") == pytest.approx(padding / (padding + sum(of.prompts)))


def check_speedup(of: Recount) -> None:
    assert len(of.pairs) > 3
    logs = [
        math.log((b["full_prefill_s"] + b["full_decode_s"]) / b["full_output_tokens"])
        - math.log((b["prefill_s"] + b["decode_s"]) / b["output_tokens"])
        for b in of.pairs
    ]
    speedup = of.figure("speedup")
    assert speedup["measured"] == pytest.approx(math.exp(statistics.mean(logs)))
    low, high = (math.log(end) for end in speedup["ci95"])
    assert (low + high) / 2 == pytest.approx(statistics.mean(logs))
    error = statistics.stdev(logs) / math.sqrt(len(logs))
    assert 1.96 < (high - low) / 2 / error < 4.31, "Student's t for 3 to 100 pairs"
    assert speedup["layers"] == pytest.approx(LAYERS * of.steps / sum(row["layers_run"] for row in of.good))
    ratio = [
        sum(b[f"{kind}predicted_prefill_s"] + b[f"{kind}predicted_decode_s"] for b in of.pairs)
        for kind in ("full_", "")
    ]
    assert speedup["predicted"] == pytest.approx(ratio[0] / ratio[1])
    assert speedup["batches"] == len(of.pairs)
    decode_logs = [
        math.log(b["full_decode_s"] / b["full_output_tokens"]) - math.log(b["decode_s"] / b["output_tokens"])
        for b in of.pairs
    ]
    assert speedup["measured_decode"] == pytest.approx(math.exp(statistics.mean(decode_logs)))


def check_agreement(of: Recount) -> None:
    agreement = of.figure("agreement")
    assert agreement["rows"] == sum(b["rows"] for b in of.pairs)
    assert agreement["exact_rows"] == pytest.approx(sum(b["exact_rows"] for b in of.pairs) / agreement["rows"])
    matched, compared = (sum(b[name] for b in of.pairs) for name in ("matched_tokens", "compared_tokens"))
    assert agreement["token_match"] == pytest.approx(matched / compared)
    assert of.figure("baseline_s") == pytest.approx(sum(b["full_prefill_s"] + b["full_decode_s"] for b in of.pairs))


def check_actors(of: Recount) -> None:
    actors = {actor["worker"]: actor for actor in of.figure("actors")}
    assert actors.keys() == {start["worker"] for start in of.workers}
    for start in of.workers:
        own, actor = [w for w in of.windows if w["worker"] == start["worker"]], actors[start["worker"]]
        assert actor["rows"] == sum(w["rows"] for w in own)
        assert actor["busy_s"] == pytest.approx(sum(w["ended_at"] - w["started_at"] for w in own))
        assert actor["load_s"] == start["load_s"]
        if not actor["left"]:
            assert actor["idle_s"] + actor["busy_s"] == pytest.approx(of.end - start["ready_at"])
        assert actor["restarts"] == 0
        assert actor["backend"] == start["backend"]
        assert actor["backend"]["name"] in choice.NAMES


def check_tail(of: Recount) -> None:
    tail, last = of.figure("tail"), max(w["ended_at"] for w in of.windows)
    names, actors = {w["worker"] for w in of.windows}, of.figure("actors")
    ends = [max(w["ended_at"] for w in of.windows if w["worker"] == name) for name in names]
    left = [end for end in ends if any(windows_after(of.windows, a["worker"], end) >= 4 for a in actors)]
    ends = [end for end in ends if end not in left]
    assert tail["left"] == len(left) == sum(actor["left"] for actor in actors)
    assert tail["idle_s"] == pytest.approx(sum(last - end for end in ends))
    assert tail["duration_s"] == pytest.approx(last - min(ends))
    span = last - min(w["started_at"] for w in of.windows)
    assert tail["idle_share"] == pytest.approx(tail["idle_s"] / (span * len(ends)))


def check_throughput(of: Recount) -> None:
    rate = of.figure("throughput")
    assert rate["bin_s"] * len(rate["output_tokens_per_s"]) == pytest.approx(of.seconds)
    assert sum(rate["output_tokens_per_s"]) * rate["bin_s"] == pytest.approx(sum(of.answers))
    fine = np.zeros(60_000)  # the same by brute force: each batch spread over thousands of slices
    for b in of.batches:
        took = sum(b[part] or 0 for part in ("prefill_s", "decode_s", "full_prefill_s", "full_decode_s"))
        at = b["started_at"] - of.begin + took * (np.arange(5000) + 0.5) / 5000
        np.add.at(fine, (at / of.seconds * len(fine)).astype(int), b["output_tokens"] / 5000)
    brute = fine.reshape(60, -1).sum(axis=1) / rate["bin_s"]
    assert rate["output_tokens_per_s"] == pytest.approx(brute, abs=0.01 * brute.max())


def check_lengths(of: Recount) -> None:
    for kind, counted in (("input", of.prompts), ("output", of.answers)):
        found = of.figure("lengths")[kind]
        assert (found["min"], found["max"]) == (min(counted), max(counted))
        assert found["mean"] == pytest.approx(statistics.mean(counted))
        for name, share in (("p50", 0.5), ("p95", 0.95)):
            assert found[name] == sorted(counted)[math.ceil(share * len(counted)) - 1]
        assert found["rows"] == np.histogram(counted, bins=np.array(found["edges"]) - 0.5)[0].tolist()


def check_layers(of: Recount) -> None:
    steps_of = of.figure("layers_by_step")
    # max 5, min 2 over NEW - 1 steps, by the formula of the schedule's definition
    planned = [math.floor(5 - 3 * min(k / (NEW - 2), 1) + 0.5) for k in range(NEW - 1)]
    assert steps_of["planned"] == planned
    assert len(steps_of["run"]) > 3
    for piece in steps_of["run"]:
        inside = planned[piece["first"] : piece["last"] + 1]
        assert piece["layers"] == pytest.approx(sum(inside) / len(inside))
    assert steps_of["run"][-1]["last"] == max(of.answers) - 2
    assert steps_of["reason"] is None


def check_errors(of: Recount) -> None:
    codes = [row["error_code"] for row in of.bad]
    reasons = [row["finish_reason"] for row in of.good]
    assert of.figure("finish_reasons") == {reason: reasons.count(reason) for reason in set(reasons)}
    assert of.figure("errors") == {code: codes.count(code) for code in set(codes)}
    assert set(codes) == {"prompt_missing", "prompt_too_long", "duplicate_id"}
    messages = {(row["error_code"], row["id"], row["error_message"]) for row in of.bad}
    for code, examples in of.figure("error_examples").items():
        assert len(examples) == min(3, codes.count(code))
        assert {(code, e["id"], e["message"]) for e in examples} <= messages


def check_the_rest(of: Recount) -> None:
    assert of.figure("books") == {"input": NUM_ROWS, "ok": len(of.good), "failed": len(of.bad), "closed": True}
    assert of.figure("split_batches") == of.figure("baseline_errors") == {"count": 0, "first": None}
    again = {"rows": sum(b["rows"] for b in of.batches) - len(of.good), "output_tokens": 0}
    assert of.figure("decoded_again") == again == {"rows": 0, "output_tokens": 0}
    assert of.figure("cost") is None
    assert (of.figure("decode"), of.figure("model")) == (of.finished.state["decode"], of.finished.state["model"])
    assert of.figure("prefill") == "full"
    assert {of.figure(name) for name in ("draft_acceptance", "tokens_per_pass", "drafts")} == {None}
    assert of.figure("documents") == NUM_ROWS
    assert of.figure("version") == "1.0.0"
    said, expected = of.figure("estimate"), of.finished.state.get("estimate")
    assert (said is None) == (expected is None)  # there is none where the run was over before its first look
    if said is not None:
        assert said["duration_ratio"] == pytest.approx(expected["duration_s"] / of.seconds)
        assert said["output_tokens_ratio"] == pytest.approx(expected["output_tokens"] / sum(of.answers))


def windows_after(windows: list[dict[str, Any]], worker: str, moment: float) -> int:
    """How many windows of its own the worker began after that."""
    begun: dict[int, float] = {}
    for window in windows:
        if window["worker"] == worker and window["window"]:
            begun[window["window"]] = min(window["started_at"], begun.get(window["window"], math.inf))
    return sum(at > moment for at in begun.values())
