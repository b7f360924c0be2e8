"""`evaluate --tasks`: scores of the harness on local data, and refusals before the model is loaded."""

import json
import re
from pathlib import Path

import pytest

from pipeline.config.job import ConfigError, build_config
from pipeline.evaluation.lm_eval_tasks import TasksConfig, evaluate_tasks

pytest.importorskip("lm_eval", reason="lm-eval is not installed (the extra `eval`)")


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A folder with one task, on rows beside it."""
    rows = [{"q": f"name[The Mill], area[{n}]", "a": "The Mill"} for n in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "names.yaml").write_text(
        f"task: names\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}\n"
        'test_split: test\noutput_type: generate_until\ndoc_to_text: "{{q}}"\ndoc_to_target: "{{a}}"\n'
        'generation_kwargs: {until: [" is", " has"], max_gen_toks: 16}\n'
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n"
    )
    return tmp_path


def config(task: Path, **keys: object) -> TasksConfig:
    return build_config(TasksConfig, {"tasks": ["names"], "tasks_path": str(task), "device": "cpu"} | keys)


@pytest.mark.slow  # the harness takes 15 s to import
@pytest.mark.parametrize("decode", [{"method": "full"}, {"speedup": 2}])
def test_a_task_is_scored(task: Path, decode: dict[str, object]) -> None:
    """The demo model begins with the name."""
    notes: list[str] = []
    found = evaluate_tasks(config(task, decode=decode, limit=4), notes.append)
    assert found["results"]["names"]["exact_match,none"] == 1.0
    assert found["num_documents"] == {"names": 4}
    assert found["decode"]["method"] == decode.get("method", "skipdecode")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        pytest.param({"tasks": ["nmaes"]}, "tasks: no task 'nmaes' in the harness or in ", marks=pytest.mark.slow),
        ({"tasks": []}, "tasks: "),
        ({"decode": {"lossless": True}}, "decode.lossless: has the scores of full depth"),
        ({"decode": {"speedup": 7}}, "decode.speedup"),
        ({"model": {"source": "nowhere/at-all"}}, "model.source"),
        ({"max_new_tokens": 5000}, "max_new_tokens"),
        ({"limit": 0}, "limit"),
    ],
)
def test_what_is_refused(task: Path, keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        evaluate_tasks(config(task, **keys), print)
