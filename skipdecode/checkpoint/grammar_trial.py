"""A trial compilation of a grammar in a process of its own (this file), with limits of time and memory.

llguidance counts what most grammars cost, and refuses those that cost too much. Two kinds escape it: `$ref`s or rules
that follow each other a thousand deep overflow its stack, which ends the process, and intersections of many
expressions (`&`, or patterns under `allOf`) take it minutes. `is_risky` tells what may be one of them. Nothing else is
tried, since a process takes a fifth of a second.
"""

import re
import signal
import subprocess
import sys
import threading
from contextlib import suppress

LARGE_CHARS = 8192
"""Smaller grammars do not nest deeply enough to overflow a stack of STACK_BYTES."""
FEW_EXPRESSIONS = 4
"""That an intersection may have without a trial."""
TRIAL_S = 5
"""Of CPU time."""
MAX_WAIT_S = 60.0
"""Where the machine is so busy that this time does not pass."""
TRIAL_BYTES = 2 << 30
"""Of address space."""
STACK_BYTES = 6 << 20
"""Less than the 8 MiB that threads usually have, where the grammar is compiled afterwards."""
_EXPRESSION = re.compile(r'[&~]|"pattern|"format"|"allOf"|\\u')  # \u: a key of a schema in a grammar may be spelt so


def is_risky(text: str) -> bool:
    """Whether compiling a schema, an expression or a grammar of this text may take long, or end the process."""
    return len(text) > LARGE_CHARS or len(_EXPRESSION.findall(text)) > FEW_EXPRESSIONS


def try_compile(source: str) -> None:
    """Compiles a grammar in llguidance's form elsewhere; ValueError if that takes too long or ends the process. What
    the library refuses is not told apart from what it compiles. OSError if no process can start."""
    command = [sys.executable, "-P", __file__, str(TRIAL_S), *sys.path]  # -P: its folder is no place for imports
    try:
        ended = subprocess.run(
            command,
            input=source.encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=MAX_WAIT_S,
            check=False,
        ).returncode
    except subprocess.TimeoutExpired:
        ended = -signal.SIGXCPU
    if ended == -signal.SIGXCPU:
        remedy = "it intersects too many expressions, or is too large; make it simpler"
        raise ValueError(f"compiling it takes more than {TRIAL_S} s: {remedy}")
    if ended in (-signal.SIGSEGV, -signal.SIGBUS):
        raise ValueError("its rules or $refs follow each other too deeply; make it flatter")
    if ended < 0:
        limit = f"{TRIAL_BYTES >> 30} GiB of memory"
        raise ValueError(f"compiling it needs more than {limit}, or ends the process; make it simpler")


def main(cpu_s: str, *path: str) -> None:
    """Compiles what comes by standard input, for a vocabulary of bytes. `path`: where modules are."""
    import resource

    with suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (TRIAL_BYTES, TRIAL_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_s), resource.getrlimit(resource.RLIMIT_CPU)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.path[:] = path
    import llguidance

    tokenizer, source = llguidance.LLTokenizer("byte"), sys.stdin.buffer.read().decode()

    def compile_it() -> None:
        matcher = llguidance.LLMatcher(tokenizer, source, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()

    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=compile_it)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
