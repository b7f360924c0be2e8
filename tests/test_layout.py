"""The architecture as a test: import arrows, who may import what, headers, and what a job ships to a cluster."""

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("skipdecode", "actors", "pipeline", "jobs")  # each may import itself and those before it
MODULES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
ONLY_IN = {  # third party -> the packages that may import it
    "ray": {"pipeline", "jobs"},
    "pyarrow": {"pipeline"},
    "pydantic": {"pipeline"},
    "aiohttp": {"pipeline"},
    "fastapi": {"pipeline"},
    "starlette": {"pipeline"},
    "yaml": {"pipeline"},
    "matplotlib": {"pipeline"},
    "sacrebleu": {"pipeline"},
    "rouge_score": {"pipeline"},
    "tokenizers": {"skipdecode"},
    "safetensors": {"skipdecode"},
    "gguf": {"skipdecode"},
    "huggingface_hub": {"skipdecode"},
    "triton": {"skipdecode"},
    "transformers": set(),  # the reference of the tests, never part of the product
}
PYPI_NAMES = {
    "yaml": "pyyaml",
    "pydantic_core": "pydantic",
    "huggingface_hub": "huggingface-hub",
    "starlette": "fastapi",
    "rouge_score": "rouge-score",
    "triton": "torch",  # its CUDA builds bring it
}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> frozenset[str]:
    """Top-level names of every import in the file, local imports included."""
    names = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add((node.module or "").split(".")[0])
    return frozenset(names)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def modules_of(package: str) -> list[Path]:
    return [path for path in MODULES if path.relative_to(ROOT).parts[0] == package]


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_follow_the_arrows(package: str) -> None:
    own = {*PACKAGES, "tests", "configs", "benchmarks"} - set(PACKAGES[: PACKAGES.index(package) + 1])
    forbidden = own | {third_party for third_party, users in ONLY_IN.items() if package not in users}
    assert {name(path): wrong for path in modules_of(package) if (wrong := imports(path) & forbidden)} == {}


def test_third_party_imports_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {line.split("[")[0].split(">")[0].split("=")[0].strip() for line in project["dependencies"]}
    known = set(PACKAGES) | set(sys.stdlib_module_names)
    used = {name(path): {PYPI_NAMES.get(module, module) for module in imports(path) - known} for path in MODULES}
    assert {path: modules - declared for path, modules in used.items() if modules - declared} == {}


def test_every_module_says_what_it_is() -> None:
    assert [name(path) for path in MODULES if not ast.get_docstring(parsed(path))] == []


def imported_from(path: Path, package: str) -> set[str]:
    """The modules of `package` that the file imports, by their bare names."""
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.module == package:
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{package}."):
            found.add((node.module or "").removeprefix(f"{package}.").split(".")[0])
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[2] for a in node.names if a.name.startswith(f"{package}.")}
    return found


def test_only_a_back_end_knows_its_kernels() -> None:
    """All others hold a `Backend` and use it. `linear` passes a question of `cost`'s on."""
    others = [path for path in modules_of("skipdecode") + modules_of("actors") if path.parent.name != "backends"]
    doors = {path: {"backend", "device"} | ({"compiled"} if path.name == "linear.py" else set()) for path in others}
    inside = {path: imported_from(path, "skipdecode.backends") - doors[path] for path in others}
    assert {name(path): modules for path, modules in inside.items() if modules} == {}


RUN_LAYERS = {
    "decoder", "forced", "graphed", "kept_steps", "layer_loop", "layers", "padded", "ragged", "swiftkv", "tokens",
    "unpadded", "view",
}  # fmt: skip
"""Modules of skipdecode/ and its kv/ that hold what a back end made of a layer, to give it work."""


def kernels_named_in(tree: ast.Module) -> set[str]:
    """Names of kernels, or of a question after them (`is_fused`), as part of a name or by themselves."""
    names = names_in(tree) | {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return {name for name in names if re.search(r"kernel|(?<![a-z])fused", name.lower())}


@pytest.mark.parametrize("code", ["model.is_fused", "def is_fused(self): ...", "layer.kernel is None", "has_kernels"])
def test_questions_after_kernels_are_seen(code: str) -> None:
    assert kernels_named_in(ast.parse(code))


def test_nobody_asks_what_kernels_there_are() -> None:
    """Outside a back end they ask it for what they want (`Backend.prompt_tokens`, `reads_shared`), whoever computes."""
    asked = {path: kernels_named_in(parsed(path)) for path in MODULES if path.parent.name != "backends"}
    found = {name(path): names for path, names in asked.items() if names and path.stem not in RUN_LAYERS}
    assert found == {}


def test_whoever_runs_layers_asks_for_no_kernel_by_name() -> None:
    """They hold a `FusedLayer` or None, and no property that says which."""
    paths = [path for path in modules_of("skipdecode") if path.stem in RUN_LAYERS]
    assert len(paths) == len(RUN_LAYERS)
    assert {name(path) for path in paths if re.search(r"is_fused|reads_prompts", path.read_text("utf-8"))} == set()


SCHEDULES = ("plan", "lossless", "ffn_skip")  # modules of skipdecode/ that define schedules


def schedule_classes() -> set[str]:
    trees = [parsed(ROOT / "skipdecode" / f"{module}.py") for module in SCHEDULES]
    classes = {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}
    found = {name for name, node in classes.items() if any(getattr(one, "name", "") == "step" for one in node.body)}
    while more := {name for name, node in classes.items() if names_in(*node.bases) & found} - found:
        found |= more
    return found


def names_in(*nodes: ast.AST) -> set[str]:
    walked = [found for node in nodes for found in ast.walk(node)]
    return {found.id for found in walked if isinstance(found, ast.Name)} | {
        found.attr for found in walked if isinstance(found, ast.Attribute)
    }


def asked_for_types(tree: ast.Module) -> set[str]:
    """Names in questions after a type: isinstance, issubclass, a pattern of `match`, and comparisons with `type(x)` or
    `x.__class__`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and names_in(node.func) & {"isinstance", "issubclass"}:
            found |= names_in(*node.args[1:])
        elif isinstance(node, ast.Compare) and names_in(node) & {"type", "__class__"}:
            found |= names_in(node)
        elif isinstance(node, ast.MatchClass):
            found |= names_in(node.cls)
    return found


@pytest.mark.parametrize(
    "code",
    [
        "isinstance(x, int | Lossless)",
        "type(x) is not plan.Lossless",
        "match x:\n    case Lossless(drafts=y):\n        y",
    ],
)
def test_questions_after_a_type_are_seen(code: str) -> None:
    assert "Lossless" in asked_for_types(ast.parse(code))


def test_nobody_asks_which_schedule_it_has() -> None:
    """`Schedule` says what there is to know: a wrapper around one would hide its type."""
    classes = schedule_classes()
    assert classes >= {"Schedule", "FullDepth", "Unified", "SwiftPrefill", "Lossless", "SkipBand", "SkipSaturated"}
    paths = [*MODULES, *sorted((ROOT / "benchmarks").rglob("*.py"))]
    assert {name(path): wrong for path in paths if (wrong := asked_for_types(parsed(path)) & classes)} == {}


@pytest.mark.parametrize("path", sorted((ROOT / "jobs").glob("*.py")), ids=name)
def test_jobs_hold_no_classes(path: Path) -> None:
    assert not [
        node for node in ast.walk(parsed(path)) if isinstance(node, ast.ClassDef)
    ]  # __main__ is pickled by value


def modules_after(statement: str) -> set[str]:
    code = f"{statement}; import sys; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.process
def test_plan_and_config_need_no_torch() -> None:
    loaded = modules_after("import skipdecode.schedule, skipdecode.ffn_skip, skipdecode.config, skipdecode.cost")
    assert "skipdecode" in loaded
    assert not loaded & {"torch", "ray", "pyarrow", "pydantic", "numpy"}


@pytest.mark.process
def test_light_tasks_need_no_torch() -> None:
    """Half a dozen processes start with every run to read, tokenise and write; torch would cost each 2 s and 200 MB."""
    loaded = modules_after(
        "import pipeline.stages.tokens, pipeline.store.write, pipeline.input.source, pipeline.generate.row_index, "
        "pipeline.processor.rows"
    )
    assert {"ray", "tokenizers"} <= loaded
    assert "torch" not in loaded


@pytest.mark.process
def test_the_worker_needs_no_ray() -> None:
    loaded = modules_after("import actors.generator, actors.trainer, actors.bench, actors.calibrate, skipdecode.train")
    assert "torch" in loaded
    assert not loaded & {"ray", "pydantic", "pyarrow", "transformers", "gguf"}


@pytest.mark.process
@pytest.mark.parametrize("path", [path for path in MODULES if path.parts[-2] == "jobs"], ids=name)
def test_help_needs_neither_torch_nor_ray(path: Path) -> None:
    assert not modules_after(f"import jobs.{path.stem}") & {"torch", "ray", "pydantic"}


def tracked_files() -> list[Path]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / line for line in done.stdout.splitlines()]


def test_a_job_ships_little() -> None:
    sizes = {path.relative_to(ROOT): path.stat().st_size for path in tracked_files() if path.is_file()}
    lines = (ROOT / ".rayignore").read_text(encoding="utf-8").splitlines()
    stays = {line.strip("/") for line in lines if line.startswith("/")}
    ships = {path: size for path, size in sizes.items() if not any(map(path.is_relative_to, stays))}
    assert sum(ships.values()) < 15e6, sorted(ships, key=lambda path: -ships[path])[:5]
    assert sum(size for path, size in sizes.items() if path.parts[0] == "models") <= 30e6
    assert sum(sizes.values()) < 75e6, sorted(sizes, key=lambda path: -sizes[path])[:5]  # what a clone costs


def test_configs_are_no_package() -> None:
    assert {path.suffix for path in (ROOT / "configs").iterdir()} == {".yaml"}


def test_the_page_of_packages_names_every_folder() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    folders = {f"{name(path.parent)}/" for path in MODULES}
    assert folders >= {"skipdecode/", "actors/", "pipeline/", "pipeline/input/", "jobs/"}
    assert {folder for folder in folders if f"| `{folder}` |" not in page} == set()
