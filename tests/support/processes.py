"""Helpers of the tests that start `jobs.generate` as a process and hurt it: the command, its rows, what is left."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

ROOT = Path(__file__).parents[2]


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def write_prompts(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"id": f"r{i}", "prompt": f"row {i % 97}"}) + "\n" for i in range(count)))
    return path


def command(model: Path, source: Path, output: str | Path, *arguments: str) -> list[str]:
    """Small windows of 8 rows, no measurements beside the work; `arguments` come last and win."""
    return [
        sys.executable, "-m", "jobs.generate", f"model.source={model}", "model.dtype=float32", "-i", str(source),
        "-o", str(output), "sampling.max_new_tokens=8", "actors.batch_size=8", "actors.window_batches=1",
        "baseline.fraction=0", *arguments,
    ]  # fmt: skip


def environment(faults: dict[str, Any] | None, folder: Path, **more: str) -> dict[str, str]:
    """That of this process, with a fault plan in `folder`; worker processes import this checkout."""
    env = os.environ | {"PYTHONPATH": str(ROOT)} | more
    if faults is not None:
        plan = folder / "faults.json"
        plan.write_text(json.dumps(faults))
        env["SKIPDECODE_FAULTS"] = str(plan)
    return env


def hits(folder: Path) -> list[str]:
    """The fault points that were hit."""
    return sorted(path.name.removeprefix("faults.json.").rsplit(".", 2)[0] for path in folder.glob("faults.json.*.hit"))


def start(command: list[str], env: dict[str, str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def run(command: list[str], env: dict[str, str], timeout_s: float = 600) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout_s)


def wait_for(what: Callable[[], Any], process: "subprocess.Popen[str] | None" = None, timeout_s: float = 300) -> Any:
    """The first truthy answer of `what`; fails when `process` ends before, or after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (found := what()):
        assert process is None or process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return found


def rows(output: Path, status: str = "*") -> dict[str, dict[str, Any]]:
    """Rows by id; fails when an id is there twice or a file is torn."""
    found: dict[str, dict[str, Any]] = {}
    for row in row_list(output, status):
        assert row["id"] not in found, f"{row['id']} twice"
        found[row["id"]] = row
    return found


def row_list(output: Path, status: str = "*") -> list[dict[str, Any]]:
    """Rows in the order of the files, whatever their ids."""
    paths = sorted((output / "data").glob(f"status={status}/*.parquet"))
    return [row for path in paths for row in pq.ParquetFile(path).read().to_pylist()]


def state(output: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((output / "run.json").read_text())
    return document


def descendants(pid: int) -> set[int]:
    """Processes of the session that `pid` leads, and their children: all that a driver has started."""
    found = {pid}
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if fields[0] != "Z":
                parents[int(entry.name)] = int(fields[1])
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def alive(pids: set[int]) -> set[int]:
    """Those of `pids` that are processes still; a zombie is none."""
    living = set()
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                living.add(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return living


def titles(pids: set[int]) -> dict[int, str]:
    """Command lines; Ray names its processes by what they run."""
    found = {}
    for pid in pids:
        try:
            found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def workers(pids: set[int], name: str = "ray::MapWorker") -> set[int]:
    """Those of `pids` whose title begins with `name`."""
    return {pid for pid, title in titles(pids).items() if title.startswith(name)}


def programs(pids: set[int], name: str) -> set[int]:
    """Those of `pids` that run the program `name`, in whatever folder it lies."""
    return {pid for pid, title in titles(pids).items() if Path(title.partition("\0")[0]).name == name}
