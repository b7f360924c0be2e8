"""What `compare_peers.py` gives all engines alike: a checkpoint and prompts, as token ids."""

import argparse
import json
import random
from pathlib import Path

from benchmarks.peer_engines import Prompts


def read_questions(args: argparse.Namespace, model: Path) -> Prompts:
    """Prompts of mixed lengths, as the model's template has them."""
    from transformers import AutoTokenizer

    lines = args.questions.read_text(encoding="utf-8").splitlines()[: args.limit]
    tokenizer = AutoTokenizer.from_pretrained(model)
    chats = [[{"role": "user", "content": json.loads(line)[args.column]}] for line in lines]
    return [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=True)["input_ids"] for c in chats]


def make_prompts(batch: int, length: int, vocabulary: int) -> Prompts:
    rng = random.Random(batch)
    return [[2, *(rng.randrange(4, vocabulary) for _ in range(length - 1))] for _ in range(batch)]


def checkpoint(source: str, work: Path, dtype: str) -> Path:
    """The folder itself; or random weights of a released shape, with a vocabulary of its size."""
    if Path(source).is_dir():
        return Path(source).resolve()
    import torch

    from actors.measuring.bench import random_model
    from skipdecode.checkpoint.weights import save_model
    from skipdecode.families import released

    target = work / f"{source}-{dtype}"
    if not (target / "merges.txt").is_file():  # written last
        config = released(source)
        save_model(random_model(config, device="cpu", dtype=getattr(torch, dtype)), target)
        words = {f"w{i}": i for i in range(config.vocab_size)} | {"</s>": 2, "<pad>": 1}
        names = {i: w for w, i in words.items()}
        (target / "vocab.json").write_text(json.dumps({names[i]: i for i in sorted(names)}))
        (target / "merges.txt").write_text("#version: 0.2\n")
    return target
