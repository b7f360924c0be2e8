"""The dataset card, README.md: how the rows were generated, as text and as YAML metadata for the hub.

The licence is left to the user.
"""

import datetime
import re
from collections.abc import Mapping
from typing import Final

import yaml

from pipeline.export.export_plan import ExportPlan
from pipeline.formatting import Json, mask
from pipeline.store.run_state import RunState

SIZES: Final = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"),
                (10_000_000, "1M<n<10M"), (100_000_000, "10M<n<100M"), (1_000_000_000, "100M<n<1B"))  # fmt: skip
"""Size categories of the hub: exclusive upper bound and name."""
MEANINGS: Final = {
    "id": "id of the row in the corpus",
    "prompt": "the prompt",
    "generated_text": "the answer",
    "generated_tokens": "its token ids, including the one that ended it",
    "num_input_tokens": "tokens of the prompt",
    "num_generated_tokens": "tokens of the answer",
    "finish_reason": "`stop`, `length`, `repetition` (a loop) or `error`",
    "layers_run": "layers, summed over the row's decode steps",
    "ffns_run": "feed-forward blocks, summed over the row's decode steps",
    "error_code": "empty when the row is good",
    "error_message": "empty when the row is good",
    "source_id": "id of the document in the corpus, of which there are several rows",
    "template": "name of the template that made the prompt",
    "sample": "number of the answer to the same prompt, from 0",
}
SCORES: Final = {
    "logprobs": "log-probability of each generated token",
    "top_logprobs": "the most likely tokens at each position",
    "prompt_logprobs": "log-probability of each token of the prompt at full depth; null for the first",
    "is_valid": "whether the answer has the structure that was asked for; an answer that was cut off has not",
    "prompt_top_logprobs": "the most likely tokens at each position of the prompt",
    "reasoning": "what the model wrote before it answered (`<think>`)",
    "num_reasoning_tokens": "tokens of the answer that are reasoning",
}
"""Columns of runs that ask for them; otherwise a column of that name comes from the corpus."""

CARD: Final = """\
# {title}

{rows} rows, written by `{model}` on {date}. Exported from a run of skipdecode-ray.

| | |
|---|---|
| model | `{model}` |
| decoding | {decode} |
| sampling | {sampling} |
| tokens equal to full depth | {agreement} |
| speedup over full depth, measured | {speedup} |
| rows | {rows} ({kind}) |
| date | {date} |

## Columns

| column | type | meaning |
|---|---|---|
{columns}

## Licence

Not chosen yet. Check the licences of the prompts and of the model, then add `license:` at the top.
"""


def make_card(plan: ExportPlan) -> str:
    facts = card_facts(plan)
    head = {
        "configs": [{"config_name": "default", "data_files": [{"split": "train", "path": "data/train-*"}]}],
        "task_categories": ["text-generation"],
        "size_categories": [next((name for below, name in SIZES if plan.num_rows < below), "n>1T")],
        "tags": ["synthetic"],
        "skipdecode": facts,
    }
    text = yaml.safe_dump(head, sort_keys=False, allow_unicode=True)
    meanings = MEANINGS | {name: SCORES[name] for name in _asked(plan.state)}
    columns = [
        f"| {_cell(f.name)} | {_cell(str(f.type))} | {meanings.get(f.name, 'column of the corpus')} |"
        for f in plan.schema
    ]
    agreement, speedup = facts["agreement"], facts["speedup"]
    body = CARD.format(
        title=_cell(plan.target.root.rpartition("/")[2]),
        rows=f"{plan.num_rows:,}",
        kind={"good": "good rows only", "failed": "failed rows only", "all": "good and failed rows"}[plan.options.rows]
        + ("" if plan.state["state"] == "finished" else ", from an unfinished run"),
        model=_cell(str(facts["model"]) + (f" with the adapter {facts['adapter']}" if "adapter" in facts else "")),
        date=facts["date"],
        decode=_words(facts["decode"]),
        sampling=_words(facts["sampling"]),
        agreement="not measured" if not isinstance(agreement, float) else f"{100 * agreement:.1f} %",
        speedup="not measured" if not isinstance(speedup, float) else f"{speedup:.2f}",
        columns="\n".join(columns),
    )
    return f"---\n# license: yours to choose\n{text}---\n\n{body}"


def card_facts(plan: ExportPlan) -> dict[str, Json]:
    """How the rows were generated, as metadata."""
    state = plan.state
    report: Mapping[str, Mapping[str, Json]] = state.get("report", {})
    sampling = {key: _plain(value) for key, value in state["config"]["sampling"].items() if value not in (None, [], ())}
    adapter = state["model"].get("adapter")
    return {
        "model": _public(state["model"]["source"]),
        **({} if adapter is None else {"adapter": _public(adapter)}),
        "decode": {key: value for key, value in state["decode"].items() if value is not None},
        "sampling": sampling,
        "agreement": report.get("agreement", {}).get("token_match"),
        "speedup": report.get("speedup", {}).get("measured"),
        "rows": plan.num_rows,
        "date": _date(state),
    }


def _asked(state: RunState) -> list[str]:
    """The columns of SCORES that the run has made itself."""
    sampling, output = state["config"]["sampling"], state["config"].get("output", {})
    has_scores = sampling.get("logprobs") is not None or sampling.get("prompt_logprobs")
    names = [name for name in SCORES if has_scores and name.endswith("logprobs")]
    has_own = state["config"].get("input", {}).get("sampling_column") is not None
    names += ["is_valid"] if sampling.get("structured_outputs") or has_own else []
    return names + (["reasoning", "num_reasoning_tokens"] if output.get("reasoning_parser") else [])


def _date(state: RunState) -> str:
    last = state["sessions"][-1]
    return datetime.datetime.fromtimestamp(last["ended_at"] or last["started_at"], datetime.UTC).date().isoformat()


def _plain(value: Json) -> Json:
    return list(value) if isinstance(value, tuple) else value


def _public(source: str) -> str:
    """A hub id unchanged; only the last part of a path, since the card will be public."""
    is_id = re.fullmatch(r"[\w.-]+/[\w.-]+(@[0-9a-f]{40})?", source) and not source.startswith(".")
    return source if is_id and not source.startswith("models/") else mask(source).rstrip("/").rpartition("/")[2]


def _words(value: Json) -> str:
    return _cell(", ".join(f"{key} {item}" for key, item in value.items()) if isinstance(value, dict) else str(value))


def _cell(text: str) -> str:
    """Text escaped for a cell of a Markdown table."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|")
