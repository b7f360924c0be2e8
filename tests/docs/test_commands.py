"""Every command that README and docs show is one that exists: verbs, flags, configuration files, overrides, targets.

Nothing runs here: a verb's own parser reads its arguments, and its configuration class what they say. Commands are run
by `test_run_commands`.
"""

import argparse
import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config.job import ConfigError, Section, build_config, read_tree, set_key
from tests.docs.pages import PAGES, ROOT, Command, commands, name
from tests.docs.test_configuration import generator as generator

COMMANDS = [command for path in PAGES for command in commands(path)]
VERBS = sorted({path.stem for path in (ROOT / "jobs").glob("*.py")} - {"__init__", "__main__", "cli"})
CLASSES = {
    "calibrate": "CalibrateConfig",
    "distill": "FinetuneConfig",
    "finetune": "FinetuneConfig",
    "bench": "BenchConfig",
    "bench --serve": "ServeBenchConfig",
    "evaluate": "EvaluateConfig",
    "evaluate --sweep": "SweepConfig",
}  # every other verb takes the configuration of a run
OTHERS = {"echo", "export", ".", "head", "ls", "apt-get"}  # programs of the system
LATER = {"setup", "setup-dev", "docs", "test-fast"}  # targets that come with the console script
OVERRIDE = re.compile(r"[a-z_]+(\.[a-z_]+)*=")


class Parsed(BaseException):
    """Stops a verb once its command line is read."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments


def read(verb: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """The command line as the verb's own parser reads it; SystemExit where it does not."""

    def stopping(original: Callable[..., argparse.Namespace]) -> Callable[..., argparse.Namespace]:
        def parse(self: argparse.ArgumentParser, *args: Any, **keys: Any) -> argparse.Namespace:
            raise Parsed(original(self, *args, **keys))

        return parse

    for method in ("parse_args", "parse_intermixed_args"):
        monkeypatch.setattr(argparse.ArgumentParser, method, stopping(getattr(argparse.ArgumentParser, method)))
    with pytest.raises(Parsed) as stopped:
        importlib.import_module(f"jobs.{verb}").main(words)
    return stopped.value.arguments


def load(verb: str, arguments: argparse.Namespace, find: Callable[[str], type[Section]]) -> None:
    """Builds the configuration that the command line stands for; ConfigError."""
    words = [*getattr(arguments, "overrides", []), *getattr(arguments, "words", [])]
    overrides = [word for word in words if OVERRIDE.match(word)]
    config = getattr(arguments, "config", None)
    if verb == "serve":
        load_serve(config, overrides, find)
        return
    tree = read_tree(config, overrides)
    flags = [flag for flag in ("serve", "sweep") if getattr(arguments, flag, False)]
    cls = CLASSES.get(f"{verb} --{flags[0]}" if flags else verb, "JobConfig")
    if cls == "EvaluateConfig":
        tree["generated"] = words[0]
    build_config(find(cls), tree)


def load_serve(path: str | None, overrides: list[str], find: Callable[[str], type[Section]]) -> None:
    tree = yaml.safe_load(Path(path).read_text(encoding="utf-8")) if path else {"applications": [{}]}
    args = tree["applications"][0].setdefault("args", {})
    for override in overrides:
        key, _, value = override.partition("=")
        set_key(args, key, yaml.safe_load(value))
    build_config(find("ServeConfig"), args)
    build_config(find("ServeTree"), tree)


def check(command: Command, words: list[str], find: Callable[[str], type[Section]], patch: pytest.MonkeyPatch) -> None:
    """Raises or fails where the command could not run."""
    program, rest = words[0], words[1:]
    if program == "ray" and "--" in rest:
        assert rest[:2] == ["job", "submit"]
        check(command, rest[rest.index("--") + 1 :], find, patch)
    elif words == ["skipdecode"]:
        assert (ROOT / "jobs" / "__main__.py").is_file()  # the list of verbs
    elif program == "skipdecode" or (words[1:2] == ["-m"] and words[2].startswith("jobs.")):
        verb, *arguments = rest if program == "skipdecode" else [words[2].removeprefix("jobs."), *words[3:]]
        assert verb in VERBS, verb
        with patch.context() as context:
            parsed = read(verb, [word for word in arguments if not word.startswith("[key")], context)
        load_or_explain(command, verb, parsed, find)
    elif program == "make":
        check_target(rest)
    elif program == "python" and rest[0] != "-c":
        check_script(rest)
    elif program == "pytest":
        assert all((ROOT / word).exists() for word in rest if word.startswith("tests")), rest
    elif program == "serve":
        assert rest[0] in ("deploy", "run")
        if rest[1:]:
            load_serve(rest[1], [], find)
    else:
        assert program in OTHERS | {"ray", "curl", "python"}, f"what is {program}?"


def load_or_explain(command: Command, verb: str, parsed: argparse.Namespace, find: Callable[[str], Any]) -> None:
    """A command that the page shows as refused is refused, with the words that the page has."""
    if re.search(r"^error: .*(unknown key)", command.output, re.MULTILINE):
        with pytest.raises(ConfigError) as refused:
            load(verb, parsed, find)
        assert f"error: {refused.value}" in command.output
    else:
        load(verb, parsed, find)


def check_target(words: list[str]) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    asked = {word for word in words if "=" not in word}
    if LATER - targets:
        asked -= LATER
    assert asked <= targets, asked - targets


def check_script(words: list[str]) -> None:
    """A script of the checkout, and flags that its text names."""
    path = ROOT / (words[1].replace(".", "/") + ".py" if words[0] == "-m" else words[0])
    text = path.read_text(encoding="utf-8")
    assert [word for word in words if word.startswith("--") and word not in text] == []


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.page}: {command.text[:60]}")
def test_the_command_exists(command: Command, generator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["skipdecode"])
    if words := command.words:
        check(command, words, generator.find, monkeypatch)


@pytest.mark.parametrize("target", ["bench", "baselines", "quality"])
def test_the_commands_of_the_makefile_exist(target: str, generator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    made = subprocess.run(
        ["make", "--dry-run", target, "TRAIN=README.md", "E2E=README.md"], capture_output=True, text=True, check=True
    )
    lines = [line for line in made.stdout.replace("\\\n", "").splitlines() if line.startswith(".venv/bin/skipdecode")]
    assert lines
    for line in lines:
        command = Command("Makefile", line.removeprefix(".venv/bin/"))
        check(command, command.words, generator.find, monkeypatch)


def test_every_verb_is_shown() -> None:
    shown = {command.words[1] for command in COMMANDS if command.words[:1] == ["skipdecode"] and len(command.words) > 1}
    assert shown >= set(VERBS) - {"demo"}  # `make demo` is how one runs it
    assert any(command.words[:2] == ["make", "demo"] for command in COMMANDS)


@pytest.mark.parametrize(
    "text",
    [
        "skipdecode generat -i prompts",
        "skipdecode generate --imput prompts",
        "skipdecode generate decode.spedup=3",
        "skipdecode generate --config configs/none.yaml",
        "skipdecode serve --config configs/serve.yaml engine.size=3",
        "make nothing",
        "python benchmarks/simulate.py --no-such-flag",
        "no-such-program",
    ],
)
def test_wrong_commands_are_noticed(text: str, generator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    command = Command(name(ROOT / "README.md"), text)
    with pytest.raises((AssertionError, SystemExit, ConfigError, pytest.fail.Exception)):
        check(command, command.words, generator.find, monkeypatch)
