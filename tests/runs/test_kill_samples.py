"""A driver that is killed while documents become rows of templates, samples and chats, and the run that goes on."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.processes import rows, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
NUM_DOCUMENTS = 1500
TEMPLATES = {"ask": "Ask: {{ text }}", "tell": "Tell: {{ text }}"}
CHAT = "{{ strftime_now('%Y-%m-%d %H:%M:%S.%f') }} {% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def test_a_killed_run_of_samples_is_resumed_exactly_once(tiny_checkpoint: Path, tmp_path: Path) -> None:
    model, source, output = tmp_path / "model", tmp_path / "in.jsonl", tmp_path / "run"
    shutil.copytree(tiny_checkpoint, model)
    (model / "chat_template.jinja").write_text(CHAT)
    documents = [{"id": f"r{n}", "text": f"row {n % 97}"} for n in range(NUM_DOCUMENTS)]
    source.write_text("".join(json.dumps(document) + "\n" for document in documents))
    settings = {
        "input": {"templates": TEMPLATES, "chat": True, "system": "S"},
        "sampling": {"n": 2, "temperature": 0.9},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    command = [
        sys.executable, "-m", "jobs.generate", "--config", str(tmp_path / "run.yaml"), f"model.source={model}",
        "model.dtype=float32", "-i", str(source), "-o", str(output), "sampling.max_new_tokens=40",
        "actors.batch_size=8", "actors.window_batches=4",
    ]  # fmt: skip
    driver = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        wait_for(lambda: len(list(output.glob("data/status=ok/*.parquet"))) >= 5, driver)
    finally:
        driver.kill()
        driver.communicate(timeout=60)
    time.sleep(3)  # what Ray still had in hand may land
    before = {id: row["generated_tokens"] for id, row in rows(output).items()}
    assert 0 < len(before) < 4 * NUM_DOCUMENTS, "it must die in the middle for this test to mean anything"
    (model / "chat_template.jinja").write_text(CHAT + " ")
    refused = subprocess.run([*command, "--resume"], cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert refused.returncode == 2
    assert "input.chat_template: the run was started with" in refused.stderr
    (model / "chat_template.jinja").write_text(CHAT)
    done = subprocess.run([*command, "--resume"], cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    after = rows(output)
    assert after.keys() == {f"r{n}-{name}-{j}" for n in range(NUM_DOCUMENTS) for name in TEMPLATES for j in (0, 1)}
    assert {id: after[id]["generated_tokens"] for id in before} == before
    total = 4 * NUM_DOCUMENTS
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["books"] == {"input": total, "ok": total, "failed": 0, "closed": True}
    began = {row["prompt"].partition(" system: S\n")[0] for row in after.values()}
    assert len(began) == 1, "both sessions render the time of the run's start"
    assert {row["prompt"].partition("user: ")[2] for row in after.values()} == {
        f"{word}: row {n}\n" for word in ("Ask", "Tell") for n in range(97)
    }
    verified = subprocess.run(
        [sys.executable, "-m", "jobs.verify", str(output)], cwd=ROOT, capture_output=True, text=True, timeout=400
    )
    assert verified.returncode == 0, verified.stderr
