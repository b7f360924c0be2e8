"""The architecture as a test: which subpackage imports which, which package may import what, what a job ships."""

import ast
import subprocess
import sys
import tomllib
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("skipdecode", "actors", "pipeline", "jobs")  # each may import itself and those before it
MODULES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
ONLY_IN = {  # third party -> the packages that may import it
    "ray": {"pipeline"},
    "grpc": {"pipeline"},
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
    "transformers": {"skipdecode"},
    "lm_eval": {"skipdecode", "pipeline"},
    "peft": {"skipdecode"},
    "safetensors": {"skipdecode"},
    "gguf": {"skipdecode"},
    "huggingface_hub": {"skipdecode", "pipeline"},
    "triton": {"skipdecode"},
}
PYPI_NAMES = {
    "grpc": "grpcio",
    "yaml": "pyyaml",
    "pydantic_core": "pydantic",
    "huggingface_hub": "huggingface-hub",
    "starlette": "fastapi",
    "rouge_score": "rouge-score",
    "triton": "torch",  # its CUDA builds bring it
}
ARROWS = {
    "skipdecode": {
        "user_cache": set(),
        "config": set(),
        "families": {"config"},
        "backends": {"config", "user_cache"},
        "schedules": {"config"},
        "cost": {"config", "schedules"},
        "kv": {"backends", "config"},
        "checkpoint": {"backends", "config", "families", "model", "schedules", "user_cache"},
        "api": {"checkpoint", "config", "engine", "model", "schedules"},
        "lm_eval": {"api", "checkpoint", "config", "engine", "model"},
        "model": {"backends", "config", "kv", "schedules"},
        "training": {"checkpoint", "config", "kv", "model", "schedules"},
        "engine": {"backends", "checkpoint", "config", "cost", "kv", "model", "schedules"},
        "speculative": {"backends", "config", "cost", "engine", "kv", "model", "schedules"},
    },
    "actors": {
        "ceilings": set(),
        "failures": set(),
        "generator_config": set(),
        "memory": set(),
        "templates": set(),
        "text": set(),
        "training": set(),
        "warm_up": set(),
        "batching": set(),
        "loading": {"generator_config", "memory"},
        "measuring": {"ceilings", "memory"},
        "serving": {"batching", "failures", "generator", "memory"},
        "generator": {"batching", "ceilings", "failures", "generator_config", "loading", "memory", "warm_up"},
    },
    "pipeline": {
        "arrow_cast": set(),
        "fault_injection": set(),
        "formatting": set(),
        "json_size": set(),
        "plots": set(),
        "schema": set(),
        "standard_streams": set(),
        "config": {"formatting"},
        "demo": {"config"},
        "openai_format": {"formatting"},
        "resolve_model": {"config", "formatting"},
        "cluster": {"config", "formatting"},
        "export": {"arrow_cast", "config", "formatting", "store"},
        "report": {"cluster", "config", "formatting", "store"},
        "stages": {"cluster", "fault_injection", "openai_format", "schema", "store"},
        "batches": {
            "cluster",
            "config",
            "formatting",
            "generate",
            "input",
            "json_size",
            "openai_format",
            "stages",
            "store",
        },
        "bench": {"cluster", "config", "demo", "formatting", "service"},
        "estimate": {"cluster", "config", "formatting", "input", "stages", "store"},
        "input": {"arrow_cast", "config", "formatting", "json_size", "openai_format", "schema"},
        "service": {
            "batches",
            "resolve_model",
            "cluster",
            "config",
            "fault_injection",
            "formatting",
            "generate",
            "json_size",
            "openai_format",
            "stages",
        },
        "store": {"arrow_cast", "config", "fault_injection", "formatting", "schema"},
        "doctor": {"resolve_model", "cluster", "config", "estimate", "formatting", "generate", "input", "store"},
        "training": {"resolve_model", "cluster", "config", "demo", "formatting", "input", "plots", "store"},
        "evaluation": {"resolve_model", "cluster", "config", "demo", "formatting", "input", "plots", "report", "store"},
        "processor": {
            "resolve_model",
            "cluster",
            "config",
            "estimate",
            "formatting",
            "generate",
            "input",
            "schema",
            "stages",
        },
        "generate": {
            "resolve_model",
            "cluster",
            "config",
            "estimate",
            "fault_injection",
            "formatting",
            "input",
            "report",
            "schema",
            "stages",
            "store",
        },
    },
}
"""Package -> subpackage -> the subpackages that it imports. A module beside the subpackages counts as one."""


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


KNOWN = {module_of(path) for path in MODULES}


@cache
def imports(path: Path) -> frozenset[str]:
    """Dotted names of every module that the file imports, local imports and those for type checking included."""
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            package = node.module or ""
            names = {f"{package}.{alias.name}" for alias in node.names}
            found |= {name if name in KNOWN else package for name in names}
    return frozenset(found)


def top(module: str) -> str:
    return module.split(".")[0]


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_follow_the_arrows(package: str) -> None:
    own = {*PACKAGES, "tests", "configs", "benchmarks"} - set(PACKAGES[: PACKAGES.index(package) + 1])
    forbidden = own | {third_party for third_party, users in ONLY_IN.items() if package not in users}
    paths = [path for path in MODULES if path.relative_to(ROOT).parts[0] == package]
    assert {name(path): wrong for path in paths if (wrong := set(map(top, imports(path))) & forbidden)} == {}


def test_transformers_is_imported_for_its_models_alone() -> None:
    """An import of it takes seconds, and light tasks would pay them each time."""
    users = {path for path in MODULES if "transformers" in set(map(top, imports(path)))}
    own = ROOT / "skipdecode"
    others = {own / "lm_eval.py", own / "backends" / "rope.py", own / "checkpoint" / "tokenizer_conversion.py"}
    assert {path for path in users if path.parent != own / "model" / "wrapped"} == others


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = {module_of(path): {module for module in imports(path) if module in KNOWN} for path in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import circle: {' <- '.join(error.args[1])}")


def part_of(module: str) -> str:
    """`skipdecode.kv` of `skipdecode.kv.view`; a module that lies beside the subpackages counts as one."""
    return ".".join(module.split(".")[:2])


def test_subpackages_import_what_they_may() -> None:
    found: dict[str, set[str]] = {}
    for path in MODULES:
        module = module_of(path)
        if "." in module and top(module) != "jobs":
            own = {part_of(used) for used in imports(path) if top(used) == top(module) and "." in used}
            found.setdefault(part_of(module), set()).update(own - {part_of(module)})
    expected = {
        f"{package}.{part}": {f"{package}.{used}" for used in others}
        for package, arrows in ARROWS.items()
        for part, others in arrows.items()
    }
    assert found == expected


def test_the_subpackages_have_no_circle() -> None:
    for arrows in ARROWS.values():
        TopologicalSorter(arrows).prepare()


def test_third_party_imports_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["eval"], *extras["peft"], *extras["structured-outputs"]]
    declared = {line.split("[")[0].split(">")[0].split("=")[0].strip() for line in lines}
    known = set(PACKAGES) | set(sys.stdlib_module_names)
    used = {
        name(path): {PYPI_NAMES.get(module, module) for module in set(map(top, imports(path))) - known}
        for path in MODULES
    }
    assert {path: modules - declared for path, modules in used.items() if modules - declared} == {}


def test_every_module_says_what_it_is() -> None:
    assert [name(path) for path in MODULES if not ast.get_docstring(parsed(path))] == []


@pytest.mark.parametrize("path", sorted((ROOT / "jobs").glob("*.py")), ids=name)
def test_jobs_hold_no_classes(path: Path) -> None:
    """A class of `__main__` is pickled by value."""
    assert not [node for node in ast.walk(parsed(path)) if isinstance(node, ast.ClassDef)]


def modules_after(*modules: str) -> set[str]:
    """Top-level names in `sys.modules` of a new process that imported `modules`."""
    code = f"import {', '.join(modules)}, sys; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_schedules_and_configuration_need_no_torch() -> None:
    loaded = modules_after(
        "skipdecode.schedules.from_config",
        "skipdecode.schedules.ffn_skip",
        "skipdecode.config.model",
        "skipdecode.config.wrapped",
        "skipdecode.families",
        "skipdecode.cost.roofline",
    )
    assert "skipdecode" in loaded
    assert not loaded & {"torch", "ray", "pyarrow", "pydantic", "numpy", "transformers"}


def test_light_tasks_need_no_torch() -> None:
    """Half a dozen processes start with every run to read, tokenise and write; torch would cost each 2 s and 200 MB."""
    loaded = modules_after(
        "pipeline.stages.tokenize",
        "pipeline.store.row_writer",
        "pipeline.input.datasource",
        "pipeline.generate.row_index",
        "pipeline.processor.dataset_rows",
    )
    assert {"ray", "tokenizers"} <= loaded
    assert not loaded & {"torch", "transformers"}


def test_the_worker_needs_no_ray() -> None:
    loaded = modules_after(
        "actors.generator",
        "actors.training.trainer",
        "actors.measuring.bench",
        "actors.measuring.ffn_calibration",
        "skipdecode.training.loss",
    )
    assert "torch" in loaded
    assert not loaded & {"ray", "pydantic", "pyarrow", "transformers", "gguf"}


@pytest.mark.parametrize("path", [path for path in MODULES if path.parts[-2] == "jobs"], ids=name)
def test_help_needs_neither_torch_nor_ray(path: Path) -> None:
    assert not modules_after(f"jobs.{path.stem}") & {"torch", "ray", "pydantic", "transformers"}


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
    assert sum(sizes.values()) <= 24 << 20, sorted(sizes, key=lambda path: -sizes[path])[:5]  # what a clone costs


def test_configs_are_no_package() -> None:
    assert {path.suffix for path in (ROOT / "configs").iterdir()} == {".yaml"}


def test_the_page_on_architecture_names_every_package() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    folders = {f"{name(path.parent)}/" for path in MODULES}
    assert {folder for folder in folders if f"`{folder}`" not in page} == set()
