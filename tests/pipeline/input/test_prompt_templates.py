"""Prompts made of columns by templates, over every format: what fails a row, and what refuses a run."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config.job import SamplingConfig
from pipeline.input.prompt_templates import Prompter, unknown_names
from pipeline.input.read import read_file
from tests.support.input_helpers import make_config, make_plan, write, write_jsonl, write_parquet
from tests.support.prompt_helpers import NOW, read, refuse, texts


def test_a_template_reads_columns_of_every_format(tmp_path: Path) -> None:
    rows = [{"id": "a", "question": "Why?", "n": 1, "city": "Leeds"}, {"id": "b", "question": "{{ n }}", "n": 2.5}]
    template = "{{ id }} Question: {{ question }}\nAnswer:"
    wanted = ["a Question: Why?\nAnswer:", "b Question: {{ n }}\nAnswer:"]
    found = read(write_jsonl(tmp_path / "a.jsonl", rows), template=template)
    assert texts(found) == wanted, "what rows hold is no template"
    assert [(row["id"], row["question"], row["city"]) for row in found] == [
        ("a", "Why?", "Leeds"),
        ("b", "{{ n }}", None),
    ]
    columns = {"id": ["a", "b"], "question": pa.array(["Why?", "{{ n }}"]).dictionary_encode()}
    assert texts(read(write_parquet(tmp_path / "a.parquet", columns), template=template)) == wanted
    assert texts(read(write(tmp_path / "a.csv", "id,question\na,Why?\nb,{{ n }}\n"), template=template)) == wanted
    lines = write(tmp_path / "a.txt", "Why?\n{{ n }}\n")
    assert texts(read(lines, template="Q: {{ prompt }}")) == ["Q: Why?", "Q: {{ n }}"]


def test_each_template_makes_a_row_of_each_document(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"id": "x", "text": "T"}, {"id": "y", "text": "U"}])
    templates = {"sum_1": "Sum: {{ text }}", "b": "Ask: {{ text }}"}
    rows = read(path, templates=templates, sampling=SamplingConfig(n=2, temperature=1))
    assert [(row["id"], row["prompt"]) for row in rows] == [
        (f"{id}-{name}-{j}", f"{word}: {text}")
        for id, text in (("x", "T"), ("y", "U"))
        for name, word in (("b", "Ask"), ("sum_1", "Sum"))
        for j in (0, 1)
    ]
    assert [(row["source_id"], row["template"], row["sample"]) for row in rows[:3]] == [
        ("x", "b", 0), ("x", "b", 1), ("x", "sum_1", 0),
    ]  # fmt: skip
    rows = read(path, templates={"b": templates["b"]})
    assert [(row["id"], row["template"], row["sample"]) for row in rows] == [("x-b", "b", 0), ("y-b", "b", 0)]


def test_a_template_may_read_a_column_called_prompt(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "P", "n": 1}])
    rows = read(path, template="Q: {{ prompt }}")
    assert texts(rows) == ["Q: P"]
    assert rows[0]["n"] == 1
    refuse(path, "has a column 'prompt'", template="Q: {{ n }}")
    parquet = write_parquet(tmp_path / "a.parquet", {"prompt": ["P"], "n": [1]})
    assert texts(read(parquet, templates={"a": "{{ prompt }}", "b": "{{ n }}"})) == ["P", "1"]


def test_nested_values_reach_templates_as_python_has_them(tmp_path: Path) -> None:
    value = {"a": [{"b": 1}, {"b": 2}], "s": "ü"}
    template = "{% for x in v.a %}{{ x.b }},{% endfor %}{{ v['s'] }} {{ m|tojson }}"
    path = write_jsonl(tmp_path / "a.jsonl", [{"v": value, "m": {"k": [1, None]}}, {"v": value, "m": "text"}])
    assert texts(read(path, template=template)) == ['1,2,ü {"k": [1, null]}', '1,2,ü "text"']
    table = pa.table({"v": pa.array([value]), "m": pa.array([[("k", 1), ("l", 2)]], pa.map_(pa.string(), pa.int64()))})
    pq.write_table(table, tmp_path / "a.parquet")
    assert texts(read(tmp_path / "a.parquet", template=template)) == ['1,2,ü {"k": 1, "l": 2}']


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ a }} {{ missing }}", "'missing' is undefined"),
        ("{{ a.b.c }}", "has no attribute"),
        ("{{ a }}{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ a }}{{ raise_exception('no ' ~ a) }}", "no x"),
        ("{{ a }}{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ a }}{{ 'a' * 10**9 }}", ""),
        ("{{ a }}{% for i in range(9**9) %}{% for j in range(9**9) %}{% endfor %}{% endfor %}", ""),
    ],
)
def test_a_template_that_cannot_be_rendered_fails_its_rows_alone(tmp_path: Path, template: str, reason: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"id": "1", "a": "x", "missing": 1}, {"id": "2", "a": "x"}, {"id": "3"}])
    rows = read(path, templates={"bad": template, "good": "{{ id }}"})
    assert [row["prompt"] for row in rows if row["template"] == "good"] == ["1", "2", "3"]
    bad = [row for row in rows if row["template"] == "bad"]
    assert [row["error_code"] for row in bad[1:]] == ["bad_template"] * 2
    assert [row["prompt"] for row in bad[1:]] == [None, None]
    assert bad[1]["error_message"].startswith("a.jsonl line 2: template 'bad': ")
    assert reason in bad[1]["error_message"]


def test_a_time_that_python_cannot_say_fails_its_row_alone(tmp_path: Path) -> None:
    for name, column in {
        "us": pa.array([0, 2**61, None], pa.timestamp("us")), "day": pa.array([0, 2**31 - 1, None], pa.date32()),
        "nested": pa.array([[0], [0, -(2**61)], None], pa.list_(pa.timestamp("us"))),
    }.items():  # fmt: skip
        pq.write_table(pa.table({"id": ["a", "b", "c"], "when": column}), tmp_path / f"{name}.parquet")
        config = make_config(tmp_path / f"{name}.parquet", template="{{ id }}{{ when or 0 }}")
        plan, prompter = make_plan(config), Prompter.of(config, "parquet", None, NOW)
        blocks = [block.drop_columns(["when"]) for block in read_file(plan, 0, config, prompter=prompter)]
        rows = [row for block in blocks for row in block.to_pylist()]
        assert [row["error_code"] for row in rows] == ["", "bad_line", ""], name
        assert "cannot be read" in rows[1]["error_message"]


def test_a_null_is_no_text(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"a": "x", "b": 1}, {"a": None, "b": 1}])
    parquet = write_parquet(tmp_path / "a.parquet", {"a": ["x", None], "b": [1, 1]})
    for source in (path, parquet):
        rows = read(source, template="{{ a }} {{ b }}")
        assert [(row["prompt"], row["error_code"]) for row in rows] == [("x 1", ""), (None, "bad_template")]
        assert "a value that it prints is null" in rows[1]["error_message"]
        made = texts(read(source, template="{% if a %}{{ a }}{% endif %}{{ a or 'y' }}{{ a|default('z', true) }}"))
        assert made == ["xxx", "yz"]


def test_a_null_within_a_text_and_a_method_fail_their_rows(tmp_path: Path) -> None:
    rows = [{"q": "x", "o": {"items": [1]}}, {"q": None, "o": {"items": [1]}}, {"q": "x", "o": {}}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    made = read(path, template="City: {{ q | trim }} {{ o.items[0] }}\nA:\n")
    assert [row["prompt"] for row in made] == ["City: x 1\nA:\n", None, None]
    assert [row["error_code"] for row in made] == ["", "bad_template", "bad_template"]
    assert "is null" in made[1]["error_message"]
    assert "'items' is no key here, but a method" in made[2]["error_message"]


def test_columns_of_any_name_are_reached_through_the_row(tmp_path: Path) -> None:
    rows = [{"Best Answer": "x", "a-b": 1, "c": 2}, {"Best Answer": "y", "a-b": None, "c": 2}]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    sources = [write_jsonl(tmp_path / "a.jsonl", rows), write_parquet(tmp_path / "a.parquet", columns)]
    sources.append(write(tmp_path / "a.csv", "Best Answer,a-b,c\nx,1,2\ny,,2\n"))
    for path in sources:
        assert texts(read(path, template="{{ row['Best Answer'] }} {{ c }}")) == ["x 2", "y 2"]
        assert texts(read(path, template="{% for k in ['c', 'Best Answer'] %}{{ row[k] }}{% endfor %}")) == ["2x", "2y"]
        if path.suffix != ".csv":
            made = read(path, template="{{ row['a-b'] }}")
            assert [row["error_code"] for row in made] == ["", "bad_template"]
            assert "is null" in made[1]["error_message"]
        refuse(path, r"input\.template: names no column .*it reads Worst; there are", template="{{ row['Worst'] }}")
    config = make_config(sources[0], template="{{ row.c }}{{ row['d e'] }}{{ e }}")
    assert [log.split("'")[1] for log in unknown_names(config, ["c"])] == ["d e", "e"]
    config = make_config(sources[0], template="{{ row | tojson }}")
    assert unknown_names(config, ["c"]) == []
    lines = write(tmp_path / "a.txt", "Why?\n")
    assert texts(read(lines, template="{{ row.prompt }}{{ row }}")) == ["Why?{'prompt': 'Why?'}"]
    prompts = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "Why?"}])
    assert texts(read(prompts, template="{{ row.prompt }}!")) == ["Why?!"], "the column is the template's"


def test_a_column_called_row_is_that_column(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"row": {"c": 1}, "c": 2}, {"c": 2}])
    rows = read(path, template="{{ row.c }}")
    assert [(row["prompt"], row["error_code"]) for row in rows] == [("1", ""), (None, "bad_template")]
    refuse(path, r"names no column .*it reads x; there are: c, row", template="{{ x }}")


def test_the_newline_that_ends_a_template_belongs_to_the_prompt(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"q": "x"}])
    assert texts(read(path, template="Q: {{ q }}\nA:\n\n")) == ["Q: x\nA:\n\n"]


def test_a_bad_document_fails_with_its_own_reason(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"a": 1}\nnot json\n')
    rows = read(path, templates={"x": "{{ a }}", "y": "{{ a }}!"})
    assert [row["error_code"] for row in rows] == ["", "", "bad_line", "bad_line"]
    nested = pa.array([[b"\xff"], [b"ok"]])
    broken = pa.ListArray.from_arrays(nested.offsets, pa.StringArray.from_buffers(2, *nested.values.buffers()[1:]))
    pq.write_table(pa.table({"not_utf8": broken}), tmp_path / "a.parquet")
    rows = read(tmp_path / "a.parquet", template="{{ not_utf8[0] }}")
    assert [(row["prompt"], row["error_code"]) for row in rows] == [(None, "bad_line"), ("ok", "")]


def test_templates_are_checked_before_the_start(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"id": "x", "a": 1}])
    refuse(
        path,
        r"input\.template: names no column of the input: it reads b, c; there are: a, id",
        template="{{ b }}{{ c }}",
    )
    refuse(path, r"input\.templates\.q: names no column .*reads nothing", templates={"p": "{{ a }}", "q": "just text"})
    refuse(path, r"input\.template: no Jinja template: line 1", template="{{ a")
    refuse(path, r"input\.templates\.q: no Jinja template", templates={"q": "{% for %}"})
    config = make_config(path, template="{{ a }} {{ aa }}{% set z = 1 %}{{ z }}{{ range(2) }}")
    assert unknown_names(config, ["a"]) == ["input.template: no file has a column 'aa'; rows that need it will fail"]
    batch = {"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": {"prompt": "p"}}
    for keys in ({"template": "{{ body }}"}, {"messages_column": "body"}, {"chat": True}):
        refuse(write_jsonl(tmp_path / "b.jsonl", [batch]), "OpenAI batch lines bring prompts", **keys)
    refuse(path, r"input\.chat_template: has no effect", prompt_column="a", chat_template="x.jinja")
    refuse(path, r"input\.messages_column: the input has no column 'm'; there are: a, id", messages_column="m")
    parquet = write_parquet(tmp_path / "a.parquet", {"m": [1]})
    refuse(parquet, r"input\.messages_column: 'm' in .* has type int64; a conversation is a list", messages_column="m")
    refuse(parquet, r"input\.messages_column: .* has no column 'n'; there are: m", messages_column="n")
