"""Rows through every stage of a run, in this process and without Ray; of batch files, the files of answers too."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from actors.generator import Generator
from actors.templates.chat_template_files import load_chat_template
from pipeline.config.job import JobConfig, build_config
from pipeline.generate.openai_batch import write_batch_files
from pipeline.generate.row_accounting import output_schema
from pipeline.generate.stage_config import make_sampling, make_tokenize_config
from pipeline.input.expansion import Expansion
from pipeline.input.prompt_templates import Prompter, form_of
from pipeline.input.read import read_file
from pipeline.stages.detokenize import detokenize
from pipeline.stages.tokenize import tokenize
from pipeline.stages.window import Window
from pipeline.store.run_folder import STATUSES, RunFolder
from tests.support.input_helpers import make_plan

CHATS = "/v1/chat/completions"


def answer_lines(
    generator: Generator, folder: Path, bodies: Mapping[str, Mapping[str, Any]], url: str = CHATS, **sections: Any
) -> dict[str, dict[str, Any]]:
    """By id, the body that the output file has for each line, or its error."""
    source, run = folder / "in.jsonl", folder / "run"
    lines = [{"custom_id": id, "method": "POST", "url": url, "body": body} for id, body in bodies.items()]
    folder.mkdir(parents=True, exist_ok=True)
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    input = {"path": [str(source)], "format": "openai_batch"}
    config = build_config(JobConfig, {"model": {"source": generator.config.source}, "input": input, **sections})
    table = finished_rows(generator, config)
    for status in STATUSES:
        rows = table.filter(pa.compute.equal(table["status"], status)).drop_columns(["status"])
        (run / f"data/status={status}").mkdir(parents=True)
        pq.write_table(rows, run / f"data/status={status}/part-s1-x-0.parquet")
    opened = RunFolder.open(str(run))
    write_batch_files(opened, {status: opened.data_files(status) for status in STATUSES}, "tiny", 1)
    found = [json.loads(line) for name in ("output", "errors") for line in _lines(run / f"batch_{name}.jsonl")]
    return {line["custom_id"]: line["error"] or line["response"]["body"] for line in found}


def finished_rows(generator: Generator, config: JobConfig) -> pa.Table:
    """The rows of a run of one small file, as they are written, with their status."""
    model = generator.model.config
    plan = make_plan(config.input, Expansion.of(config.input, config.sampling))
    chat = load_chat_template(generator.config.source, model.tokenizer_rules)
    format = plan.listing.format
    prompter = Prompter.of(config.input, format, chat, datetime.now(UTC))
    tokens = make_tokenize_config(config, generator.config.source, model, make_sampling(config), format)
    tokens = replace(tokens, has_choices=plan.has_choices, tool_form=form_of(prompter))
    (block,) = read_file(plan, 0, config.input, prompter=prompter)
    window = Window.of(tokenize(block, config=tokens), tokens.sampling)
    table, _ = window.with_answers(generator(window.requests).answers)
    made = detokenize(table, config=tokens, extra_names=tuple(plan.carried_schema.names))
    assert made.drop_columns(["status"]).schema.equals(output_schema(plan, tokens.asked_schema)), "as run.json says"
    return made


def _lines(path: Path) -> Sequence[str]:
    return path.read_text(encoding="utf-8").splitlines()
