"""The peer of `jobs.finetune`: the same pairs, steps and LoRA shape with Hugging Face's model and PEFT, at full depth.

    python -m benchmarks.hf_finetune MODEL --train train.jsonl --validation dev.jsonl -o FOLDER

Says whether full depth as tuned here is as good as anyone's. Batches, learning rates, AdamW and clipping are those of
`actors.training.trainer`; forward, backward and adapter are theirs. MODEL is a Hugging Face folder. Needs peft and
transformers (the extra `test`). The adapter goes to FOLDER in PEFT's format; one JSON document on stdout.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.training.recipe import TrainConfig, learning_rate
from actors.training.trainer import length_sorted_batches
from actors.training.workers import Pair

IGNORED = -100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a Hugging Face folder")
    parser.add_argument("--train", type=Path, required=True, help="JSON Lines with prompt and response")
    parser.add_argument("--validation", type=Path, required=True)
    parser.add_argument("-o", "--output", required=True, metavar="FOLDER")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=8e-4)
    parser.add_argument("--final-learning-rate", type=float, default=5e-5)
    parser.add_argument("--warmup-steps", type=int, default=20)
    arguments = parser.parse_args()
    print(json.dumps(train(arguments)))


def train(arguments: argparse.Namespace) -> dict[str, Any]:
    from peft import LoraConfig, get_peft_model
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = Tokenizer.from_file(f"{arguments.model}/tokenizer.json")
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).to(device)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(
        model, LoraConfig(r=arguments.rank, lora_alpha=2 * arguments.rank, target_modules=names, task_type="CAUSAL_LM")
    )
    eos = model.config.eos_token_id
    pairs, held_out = (read_pairs(path, tokenizer, eos) for path in (arguments.train, arguments.validation))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=arguments.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    per_epoch = -(-len(pairs) // arguments.batch_size)
    total, start = round(arguments.epochs * per_epoch), time.monotonic()
    for step in range(total):
        if step % per_epoch == 0:
            batches = length_sorted_batches(pairs, arguments.batch_size, f"0 epoch {step // per_epoch}")
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, total, cast(TrainConfig, arguments))  # it has the same names
        nats, count = summed_loss(model, batches[step % per_epoch], device)
        torch.autograd.backward(nats / count)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    seconds = time.monotonic() - start
    model.eval()
    with torch.no_grad():
        sums = [summed_loss(model, held_out[i : i + 32], device) for i in range(0, len(held_out), 32)]
    loss = float(sum(nats for nats, _ in sums)) / sum(count for _, count in sums)
    model.to(torch.bfloat16).save_pretrained(arguments.output)
    return {"steps": total, "seconds": seconds, "validation_loss": loss, "device": device, "output": arguments.output}


def read_pairs(path: Path, tokenizer: Any, eos: int) -> list[Pair]:
    """Prompts are what a chat template made, so nothing is added to them; responses end with EOS."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    texts = [(row["prompt"], row["response"]) for row in rows if row["response"]]

    def tokens(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    return [(tokens(prompt), [*tokens(response), eos]) for prompt, response in texts]


def summed_loss(model: Any, batch: Sequence[Pair], device: str) -> tuple[Tensor, int]:
    """Nats of all response tokens of a batch, padded on the right, and how many they are."""
    width = max(len(prompt) + len(response) for prompt, response in batch)
    tokens, targets = torch.zeros(len(batch), width, dtype=torch.long), torch.full((len(batch), width), IGNORED)
    mask = torch.zeros(len(batch), width, dtype=torch.long)
    for row, (prompt, response) in enumerate(batch):
        size = len(prompt) + len(response)
        tokens[row, :size] = torch.tensor([*prompt, *response])
        targets[row, len(prompt) : size] = torch.tensor(response)
        mask[row, :size] = 1
    wanted = targets[:, 1:].to(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        logits = model(input_ids=tokens.to(device), attention_mask=mask.to(device)).logits[:, :-1]
    kept = wanted != IGNORED
    return F.cross_entropy(logits[kept].float(), wanted[kept], reduction="sum"), int(kept.sum())


if __name__ == "__main__":
    main()
