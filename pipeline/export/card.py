"""`README.md` of a data set, as the hub reads it: what made the rows, in words and as YAML. The licence is the user's
to choose."""

import datetime
import re
from collections.abc import Mapping
from typing import Final

import yaml

from pipeline.export.plan import ExportPlan
from pipeline.formatting import Json, mask
from pipeline.store.run_state import RunState

SIZES: Final = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"),
                (10_000_000, "1M<n<10M"), (100_000_000, "10M<n<100M"), (1_000_000_000, "100M<n<1B"))  # fmt: skip
"""The size categories of the hub: below so many rows, and their name."""
MEANINGS: Final = {
    "id": "of the row in the corpus",
    "prompt": "what the model was given",
    "generated_text": "what it wrote",
    "generated_tokens": "the same as token ids, with the one that ended it",
    "num_input_tokens": "tokens of the prompt",
    "num_generated_tokens": "tokens of the answer",
    "finish_reason": "`stop`, `length` or `error`",
    "layers_run": "layers, summed over the row's decode steps",
    "ffns_run": "feed-forward blocks, likewise",
    "error_code": "empty when the row is good",
    "error_message": "empty when the row is good",
    "source_id": "of the document in the corpus, which became several rows",
    "template": "that made the prompt of it",
    "sample": "which answer to that prompt it is, from 0",
}
SCORES: Final = {
    "logprobs": "log-probability of each generated token",
    "top_logprobs": "the likeliest tokens in the place of each",
    "prompt_logprobs": "log-probability of each token of the prompt at full depth; null for the first",
    "prompt_top_logprobs": "the likeliest tokens in the place of each",
}
"""Of runs that ask for them; in others a column of that name is the corpus's own."""

CARD: Final = """\
# {title}

{rows} rows, written by `{model}` on {date}. Exported from a run of skipdecode-ray.

| | |
|---|---|
| model | `{model}` |
| decoding | {decode} |
| sampling | {sampling} |
| tokens equal to those at full depth | {agreement} |
| speedup over full depth, measured | {speedup} |
| rows | {rows} ({kind}) |
| date | {date} |

## Columns

| column | type | meaning |
|---|---|---|
{columns}

## Licence

Not chosen yet. Look at the licences of the prompts and of the model, then add `license:` at the top.
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
    sampling = plan.state["config"]["sampling"]
    asks = sampling.get("logprobs") is not None or sampling.get("prompt_logprobs")
    meanings = MEANINGS | (SCORES if asks else {})
    columns = [
        f"| {_cell(f.name)} | {_cell(str(f.type))} | {meanings.get(f.name, 'of the corpus')} |" for f in plan.schema
    ]
    agreement, speedup = facts["agreement"], facts["speedup"]
    body = CARD.format(
        title=_cell(plan.target.root.rpartition("/")[2]),
        rows=f"{plan.num_rows:,}",
        kind={"good": "the good ones", "failed": "the failed ones", "all": "good and failed"}[plan.options.rows]
        + ("" if plan.state["state"] == "finished" else ", of a run that is not finished"),
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
    """What made the rows, for machines."""
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


def _date(state: RunState) -> str:
    last = state["sessions"][-1]
    return datetime.datetime.fromtimestamp(last["ended_at"] or last["started_at"], datetime.UTC).date().isoformat()


def _plain(value: Json) -> Json:
    return list(value) if isinstance(value, tuple) else value


def _public(source: str) -> str:
    """A hub id as it is; of a path its end, since a card is for others."""
    is_id = re.fullmatch(r"[\w.-]+/[\w.-]+(@[0-9a-f]{40})?", source) and not source.startswith(".")
    return source if is_id and not source.startswith("models/") else mask(source).rstrip("/").rpartition("/")[2]


def _words(value: Json) -> str:
    return _cell(", ".join(f"{key} {item}" for key, item in value.items()) if isinstance(value, dict) else str(value))


def _cell(text: str) -> str:
    """For a table: without what would end the cell or the line."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|")
