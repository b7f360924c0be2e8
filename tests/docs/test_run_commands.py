"""Commands of README and docs, run as they are typed in a fresh copy of the checkout: one of every verb.

Each code block that is run gets the shell, the files and the model that its page speaks of. A hub id becomes a tiny
checkpoint, and a port a free one: nothing is downloaded. What the block shows is compared where it says the same on
every machine. Left out: NOT_RUN.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.dataset as ds
import pytest

from pipeline.demo.restaurant_prompts import make_prompts
from tests.docs.pages import FENCE, README, ROOT, Command, block_commands, name
from tests.support.processes import wait_for
from tests.support.service_helpers import free_port

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]
BIN = Path(sys.executable).parent
PROMPTS = [
    {"id": "mill", "prompt": "name[The Mill], eatType[pub], food[Italian], area[riverside]", "city": "Leeds"},
    {"id": "oak", "prompt": "name[The Oak], eatType[restaurant], food[French], priceRange[cheap]", "city": "York"},
    {"id": "anchor", "prompt": "name[Anchor House], eatType[coffee shop], familyFriendly[yes]", "city": "Hull"},
    {"id": "none", "prompt": None, "city": "Bath"},
    {"id": "fern", "prompt": "name[The Fern], eatType[pub], near[Tall Hall]", "city": "Hull"},
]
GOOD_PROMPTS = [row for row in PROMPTS if row["prompt"] is not None]
REFERENCES = [
    {"prompt": PROMPTS[0]["prompt"], "reference": "The Mill is an Italian pub by the riverside."},
    {"prompt": PROMPTS[1]["prompt"], "reference": "The Oak is a cheap French restaurant."},
]
PAGES_TO_RUN = (  # in this order: later ones use what earlier ones made
    "corpus", "reliability", "report", "evaluation", "training", "methods/ffn_skip", "methods/swiftkv",
    "methods/schedules", "methods/combined", "configuration", "backends",
)  # fmt: skip
WITH_A_BAD_ROW = ("corpus", "reliability", "report", "evaluation")  # they speak of it
NOT_RUN = ("make ", "head ", "ls ", "ray ", "serve ", "curl ")  # and the endpoint, which has a test of its own


def write_jsonl(path: Path, rows: list[dict[str, str | None]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    os.utime(path, (1.7e9, 1.7e9))  # the same prompts are the same input, for the runs that pages go on with


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a fresh clone holds, as links, and the data files that the pages speak of."""
    folder = tmp_path_factory.mktemp("clone")
    for entry in ROOT.iterdir():
        if not entry.name.startswith(".") and entry.name not in ("outputs", "build", "data"):
            (folder / entry.name).symlink_to(entry)
    write_jsonl(folder / "prompts.jsonl", PROMPTS)
    write_jsonl(folder / "references.jsonl", REFERENCES)
    pairs: list[dict[str, str | None]] = [
        {"prompt": row["prompt"], "response": f"{row['name']} is open."} for row in make_prompts(24)
    ]
    write_jsonl(folder / "train.jsonl", pairs[:16])
    write_jsonl(folder / "dev.jsonl", pairs[16:])
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The activated environment; `skipdecode` is there whether or not the package is installed."""
    folder = tmp_path_factory.mktemp("bin")
    script = folder / "skipdecode"
    script.write_text(f'#!/bin/sh\nverb="$1"\nshift\nexec {shlex.quote(sys.executable)} -m "jobs.$verb" "$@"\n')
    script.chmod(0o755)
    return os.environ | {"PATH": f"{folder}:{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}


def run(text: str, clone: Path, environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["bash", "-c", text], cwd=clone, env=environment, capture_output=True, text=True, timeout=600)


def readme_block(start: str) -> str:
    """The code block of the README that begins with `start`."""
    (block,) = (block for _, block in FENCE.findall(README.read_text(encoding="utf-8")) if block.startswith(start))
    return block


def opening(page: str) -> list[Command]:
    """Commands of the first code block of a page."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    _, block = FENCE.findall(text)[0]
    found = [command for command in block_commands(page, block) if not command.text.startswith(NOT_RUN)]
    assert found, page
    return found


def stable_lines(output: str) -> list[str]:
    """Lines of a page that every machine prints: what `verify` proves, and what a refusal says."""
    return [line for line in output.splitlines() if line.startswith(("verified:", "input:", "error:", "exit code"))]


@pytest.mark.parametrize("page", PAGES_TO_RUN)
def test_the_opening_of_a_page_runs(page: str, clone: Path, environment: dict[str, str]) -> None:
    write_jsonl(clone / "prompts.jsonl", PROMPTS if page in WITH_A_BAD_ROW else GOOD_PROMPTS)
    for command in opening(page):
        done = run(command.text, clone, environment)
        assert done.returncode == command.exit_code, f"{command.text}\n{done.stderr[-3000:]}"
        for line in stable_lines(command.output):
            assert line in done.stderr, line


def test_the_measuring_verbs_run(clone: Path, environment: dict[str, str]) -> None:
    """`bench`, `retry`, `export` and `doctor` as their pages have them, with fewer tokens for the first."""
    write_jsonl(clone / "prompts.jsonl", PROMPTS)
    for command in opening("corpus") if not (clone / "outputs/run").exists() else ():  # where this test runs alone
        run(command.text, clone, environment)
    bench = opening("results/speed")[0].text + " 'prompt_tokens=[8]' new_tokens=4"
    made = "skipdecode export outputs/run -o outputs/answers"
    assert made in (ROOT / "docs/corpus.md").read_text(encoding="utf-8")
    for text in (bench, "skipdecode retry outputs/run", made, opening("troubleshooting")[0].text):
        done = run(text, clone, environment)
        assert done.returncode == 0, done.stderr[-3000:]
        json.loads(done.stdout.splitlines()[-1])


def test_readme_corpus(clone: Path, environment: dict[str, str], tmp_path: Path) -> None:
    for entry in clone.iterdir():
        if entry.is_symlink():
            (tmp_path / entry.name).symlink_to(entry)
    write_jsonl(tmp_path / "prompts.jsonl", PROMPTS[:1])
    done = run(f"set -e\n{readme_block('skipdecode generate')}", tmp_path, environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "verified: every input row is present exactly once" in done.stderr
    (written,) = ds.dataset(tmp_path / "outputs/mine/data").to_table().to_pylist()
    assert (written["id"], written["city"]) == ("mill", "Leeds")
    report = json.loads((tmp_path / "outputs/mine/report.json").read_text())
    assert report["cost"]["price_per_hour"] == 12.5


def test_readme_fine_tune_then_generate(clone: Path, environment: dict[str, str]) -> None:
    block = readme_block("skipdecode finetune")
    write_jsonl(clone / "prompts.jsonl", GOOD_PROMPTS)
    text = block.replace("outputs/tuned", "outputs/readme-tuned")
    done = run(f"set -e\n{text}", clone, environment)
    assert done.returncode == 0, done.stderr[-3000:]
    good = ds.dataset(clone / "outputs/fast/data/status=ok").to_table()
    assert good.num_rows == len(GOOD_PROMPTS)


@pytest.fixture
def chat_model(tmp_path: Path) -> Path:
    """The demo model with a chat template, which stands for the chat model of the README."""
    folder = tmp_path / "chat"
    shutil.copytree(ROOT / "models/opt-e2e", folder)
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    return folder


@pytest.fixture
def served(
    clone: Path, environment: dict[str, str], chat_model: Path, tmp_path: Path
) -> Iterator[Callable[[str], str]]:
    """The README's server on a free port; gives a function that rewrites its other commands to that port."""
    port, log = free_port(), tmp_path / "serve.log"
    command = (
        readme_block("SKIPDECODE_API_KEYS").strip().replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(chat_model))
    )
    with log.open("w") as target:
        process = subprocess.Popen(
            ["bash", "-c", f"exec env {command} --port {port}"], cwd=clone, env=environment, stdout=target,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        wait_for(lambda: "serving " in log.read_text() or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        yield lambda text: text.replace(":8000/", f":{port}/")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)


def test_readme_chat(served: Callable[[str], str], clone: Path, environment: dict[str, str]) -> None:
    ask = served(readme_block("curl")).replace("What is the capital of France?", "name[The Mill], food[Italian]")
    answer = json.loads(run(ask, clone, environment).stdout)
    assert answer["choices"][0]["message"]["content"]
    refused = json.loads(run(ask.replace("my-secret-key", "another-key"), clone, environment).stdout)
    assert refused["error"]["code"] == "invalid_api_key"


def test_every_verb_is_run_here_or_by_a_test_of_its_own() -> None:
    texts = [command.text for page in (*PAGES_TO_RUN, "results/speed", "troubleshooting") for command in opening(page)]
    texts += [readme_block(start) for start in ("skipdecode generate", "skipdecode finetune", "SKIPDECODE_API_KEYS")]
    run_here = {verb for text in texts for verb in re.findall(r"\bskipdecode (\w+)", text)} | {
        "retry",
        "export",
        "demo",
    }
    verbs = {path.stem for path in (ROOT / "jobs").glob("*.py")} - {"__init__", "__main__", "cli"}
    assert verbs <= run_here, f"{verbs - run_here}; tests/jobs/test_demo.py runs the demo ({name(README)})"
