"""The adapter for the LM Evaluation Harness: at full depth its own `hf` model, under a schedule what decoding makes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.families import BASE
from tests.support.family_tokenizers import VOCAB, byte_level, template, write_folder

pytest.importorskip("lm_eval", reason="lm-eval is not installed (the extra `eval`)")

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from skipdecode import generate, load
from skipdecode.lm_eval import SkipDecodeLM

PAIRS = [
    ("The Golden Otter is", " a cheap pub near Willow Station"),
    ("", "The Golden Otter"),
    ("it serves ", "Italian food"),
    ("priceRange[less than £20]\n", "x"),
    ("a pub " * 200, "is family friendly" * 9),
]
TEXTS = [("The Golden Otter is a cheap pub. " * 40,), ("Grüße",)]
CHAT = "{% for m in messages %}<|begin|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}" \
       "{% if add_generation_prompt %}assistant:{% endif %}"  # fmt: skip


@pytest.fixture(scope="module", params=["begin", "bare"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A narrow Llama model, whose texts begin with a token of their own or not."""
    path = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    tokenizer = byte_level("llama3")
    names = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "pad_token": "<|im_end|>", "chat_template": CHAT}
    if request.param == "begin":
        tokenizer.post_processor = template("<|begin|>", of=tokenizer)
    write_folder(path, tokenizer, "llama", tokenizer_class="PreTrainedTokenizerFast", **names)
    ids = {f"{kind}_token_id": tokenizer.token_to_id(names[f"{kind}_token"]) for kind in ("bos", "eos", "pad")}
    model = LlamaForCausalLM(LlamaConfig(**BASE | ids | {"vocab_size": VOCAB, "initializer_range": 0.3}))
    model.generation_config.eos_token_id = ids["eos_token_id"]
    model.save_pretrained(path)
    return path


def ask(kind: str, arguments: list[Any]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=each, idx=number) for number, each in enumerate(arguments)]


def ours(folder: Path, **keys: Any) -> SkipDecodeLM:
    return SkipDecodeLM(str(folder), dtype="float32", device="cpu", batch_size=3, **{"max_gen_toks": 16} | keys)


def test_full_depth_is_the_harness_with_hugging_face(folder: Path) -> None:
    lm, hf = ours(folder), HFLM(str(folder), dtype="float32", device="cpu", batch_size=1)
    for kind, arguments in (("loglikelihood", PAIRS), ("loglikelihood_rolling", TEXTS)):
        made, wanted = (getattr(model, kind)(ask(kind, arguments), disable_tqdm=True) for model in (lm, hf))
        torch.testing.assert_close(torch.tensor(made), torch.tensor(wanted), atol=2e-3, rtol=1e-5)
    keys = {"until": ["e", "\n\n"], "do_sample": False}
    contexts = [(context, keys | {"max_gen_toks": length}) for context, _ in PAIRS if context for length in (5, 9)]
    made, wanted = (m.generate_until(ask("generate_until", contexts), disable_tqdm=True) for m in (lm, hf))
    assert made == wanted
    assert any(made)
    messages = [{"role": "user", "content": "Is it cheap?"}]
    assert lm.apply_chat_template(messages) == hf.apply_chat_template(messages)
    assert lm.chat_template(True) == hf.chat_template(True)


@pytest.mark.parametrize("keys", [{"speedup": 2.0}, {"method": "early_exit", "max_layers": 5, "min_layers": 2}])
def test_a_continuation_is_scored_as_it_is_decoded(folder: Path, keys: dict[str, Any]) -> None:
    lm, model = ours(folder, **keys), load(folder, dtype="float32", device="cpu")
    contexts = [context for context, _ in PAIRS[:3] if context]
    made = generate(model, contexts, max_new_tokens=16, ignore_eos=True, logprobs=0, **keys)
    requests = [(None, lm.tok_encode(context), one.tokens) for context, one in zip(contexts, made, strict=True)]
    for (score, is_greedy), one in zip(lm._loglikelihood_tokens(requests, disable_tqdm=True), made, strict=True):
        assert is_greedy
        assert score == pytest.approx(sum(token.logprob for token in one.logprobs), abs=1e-3)
    full = ours(folder)._loglikelihood_tokens(requests, disable_tqdm=True)
    assert not any(is_greedy for _, is_greedy in full), "the schedule must matter here"


def test_what_has_no_counterpart_is_named(folder: Path) -> None:
    lm = ours(folder)
    for keys, name in (
        ({"num_beams": 4}, "num_beams"),
        ({"max_gen_toks": 500}, "max_gen_toks"),
        ({"do_sample": True, "temperature": -1.0}, "temperature"),
    ):
        with pytest.raises(ValueError, match=name):
            lm.generate_until(ask("generate_until", [("a", keys)]), disable_tqdm=True)
    with pytest.raises(ValueError, match="max_length: must be from 17"):
        ours(folder, max_length=9)
    with pytest.raises(ValueError, match="cannot be scored"):
        lm.loglikelihood(ask("loglikelihood", [("a", "x " * 400)]), disable_tqdm=True)
    with pytest.raises(ValueError, match="speedup"):
        ours(folder, speedup=0.5)


def test_a_task_on_local_data(folder: Path, tmp_path: Path) -> None:
    """Multiple choice and generation, with the same scores as Hugging Face at full depth."""
    rows = [{"q": f"The Golden Otter costs {n}", "a": n % 3, "text": str(n)} for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}\ntest_split: test\n"
    (tmp_path / "choose.yaml").write_text(
        data + 'task: choose\noutput_type: multiple_choice\ndoc_to_text: "{{q}}"\n'
        'doc_to_choice: [" cheap", " near", " friendly"]\ndoc_to_target: a\n'
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )
    (tmp_path / "write.yaml").write_text(
        data + 'task: write\noutput_type: generate_until\ndoc_to_text: "{{q}}"\ndoc_to_target: "{{text}}"\n'
        'generation_kwargs: {until: ["\\n"], do_sample: false, max_gen_toks: 8}\n'
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n"
    )
    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)
    found = [
        lm_eval.simple_evaluate(lm, tasks=["choose", "write"], task_manager=tasks, bootstrap_iters=0, log_samples=True)
        for lm in (ours(folder), HFLM(str(folder), dtype="float32", device="cpu", batch_size=1))
    ]
    assert found[0]["results"] == found[1]["results"]
    for task in ("choose", "write"):
        made, wanted = ([sample["filtered_resps"] for sample in one["samples"][task]] for one in found)
        assert len(made) == 12
        if task == "write":
            assert made == wanted
