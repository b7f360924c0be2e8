"""Released models at full depth against Hugging Face `generate`, on real questions.

They are not part of the project: SKIPDECODE_REAL_MODEL names the folder or the GGUF file of a chat model
(SmolLM2-135M-Instruct), SKIPDECODE_GEMMA3 the GGUF file of Gemma 3 270M (`make demo-chat MODEL=gemma3` fetches it), and
SKIPDECODE_QUESTIONS a JSONL file with a column `question` (GSM8K). In float32 tokens are equal; where they are not, the
two likeliest logits lie within 1e-4.
"""

import copy
import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from skipdecode.checkpoint.tokenizer import Tokenizer
from skipdecode.checkpoint.weights import load_model
from skipdecode.engine.generate import generate
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.schedule import FullDepth
from tests.support.naive import greedy, requests_for, tokens_of

ROWS, NEW, AT_ONCE = 200, 64, 20
MODEL, QUESTIONS = os.environ.get("SKIPDECODE_REAL_MODEL"), os.environ.get("SKIPDECODE_QUESTIONS")
GEMMA3 = os.environ.get("SKIPDECODE_GEMMA3")


def reference(source: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """As transformers opens a folder, or makes weights in float32 of a GGUF file."""
    folder, file = (source.parent, source.name) if source.is_file() else (source, None)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(folder, gguf_file=file)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not (MODEL and QUESTIONS), reason="SKIPDECODE_REAL_MODEL, SKIPDECODE_QUESTIONS name no files")
def test_a_chat_model_answers_as_in_hugging_face() -> None:
    assert MODEL is not None
    theirs, tokenizer = reference(Path(MODEL))
    model = load_model(MODEL).pack()
    ends = theirs.generation_config.eos_token_id
    assert set(model.config.eos_token_ids) == set(ends if isinstance(ends, list) else [ends])
    chats = [[{"role": "user", "content": question}] for question in questions(ROWS)]
    prompts = [
        tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=True)["input_ids"] for c in chats
    ]
    assert_answers(model, theirs, prompts)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not (GEMMA3 and QUESTIONS), reason="SKIPDECODE_GEMMA3, SKIPDECODE_QUESTIONS name no files")
@pytest.mark.parametrize("is_folder", [False, True])
def test_gemma_answers_as_in_hugging_face(tmp_path: Path, is_folder: bool) -> None:
    """From the GGUF file, and from the folder that transformers makes of it; prompts beyond the window of 512 too."""
    assert GEMMA3 is not None
    theirs, tokenizer = reference(Path(GEMMA3))
    if is_folder:
        config = copy.deepcopy(theirs.config)
        del config.quantization_config  # with which transformers saves nothing
        plain = AutoModelForCausalLM.from_config(config)
        plain.load_state_dict(theirs.state_dict())
        plain.save_pretrained(tmp_path)
    model = load_model(tmp_path if is_folder else GEMMA3, implementation="own").pack()
    texts = [*questions(ROWS // 5), "\n".join(questions(12)), "\n".join(questions(20))]
    prompts = Tokenizer(GEMMA3, model.config).encode(texts)
    assert prompts == [tokenizer(text)["input_ids"] for text in texts]
    assert max(map(len, prompts)) > 2 * 512
    assert_answers(model, theirs, prompts)


def questions(count: int) -> list[str]:
    assert QUESTIONS is not None
    lines = Path(QUESTIONS).read_text(encoding="utf-8").splitlines()[:count]
    assert len(lines) == count
    return [json.loads(line)["question"] for line in lines]


def assert_answers(model: Decoder, theirs: PreTrainedModel, prompts: list[list[int]]) -> None:
    schedule, close = FullDepth(model.config.num_hidden_layers), 0
    for at in range(0, len(prompts), AT_ONCE):
        part = prompts[at : at + AT_ONCE]
        made = tokens_of(generate(model, requests_for(part, greedy(NEW)), schedule))
        for prompt, ours in zip(part, made, strict=True):
            with torch.inference_mode():
                logits = theirs(torch.tensor([prompt + ours[:-1]])).logits[0, len(prompt) - 1 :]
            # each of our tokens is what Hugging Face would have chosen behind those before it, so all of them are
            best = logits.topk(2).values
            for token, row, (first, second) in zip(ours, logits, best, strict=True):
                if int(row.argmax()) != token:
                    assert float(first - second) <= 1e-4, (token, int(row.argmax()), float(first - second))
                    assert float(first - row[token]) <= 1e-4
                    close += 1
            assert len(ours) == NEW or ours[-1] in model.config.eos_token_ids
            assert not set(ours[:-1]) & set(model.config.eos_token_ids)
    print(f"{close} tokens of two that are equally likely")
