"""The model whose texts the tests of `jobs.evaluate` score, and prompts that it knows."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models/opt-e2e"  # its texts are texts: scores of random tokens say nothing
NAMED = [(name, kind) for name in ("The Otter", "The Kettle", "Köln House") for kind in ("pub", "coffee shop")]
PROMPTS = [f"name[{name}], eatType[{kind}], area[riverside]" for name, kind in NAMED]
