"""Quality of texts: BLEU, chrF and ROUGE against references, and the share of E2E slot values that the texts mention.

Pure functions over lists of strings, all figures times 100. Each text has one or more references, and texts may have
different numbers of them. Which reference belongs to which row is the caller's business. The metric libraries are
imported where they are used: whoever only trains or generates does not wait for them.
"""

import re
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest

from pipeline.evaluation.documents import Scores, SlotFigures

ROUGE = ("rouge1", "rouge2", "rougeL")
VERBATIM_SLOTS = ("name", "near", "food", "eatType", "area")
SLOT = re.compile(r"(\w[\w ]*)\[([^\]]*)\]")  # `customer rating[5 out of 5]`


def scores(texts: Sequence[str], references: Sequence[Sequence[str]]) -> Scores:
    """`bleu`, `chrf`, `rouge1`, `rouge2`, `rougeL`; `references[i]` are those of `texts[i]`, at least one."""
    found = rouge(texts, references)
    return {
        "bleu": bleu(texts, references),
        "chrf": chrf(texts, references),
        "rouge1": found["rouge1"],
        "rouge2": found["rouge2"],
        "rougeL": found["rougeL"],
    }


def bleu(texts: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Corpus BLEU of sacrebleu, lower-cased as in the E2E challenge."""
    from sacrebleu.metrics.bleu import BLEU

    return float(BLEU(lowercase=True).corpus_score(texts, _streams(references)).score)


def chrf(texts: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Corpus chrF2 of sacrebleu, case-sensitive."""
    from sacrebleu.metrics.chrf import CHRF

    return float(CHRF().corpus_score(texts, _streams(references)).score)


def rouge(texts: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Means of `rouge_rows`."""
    return {name: sum(rows) / len(rows) for name, rows in rouge_rows(texts, references).items()}


def rouge_rows(texts: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, list[float]]:
    """F1 of rouge-score, without stemming, of every text with its best reference, by each measure apart."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(ROUGE))
    rows = [scorer.score_multi(own, text) for text, own in zip(texts, references, strict=True)]
    return {name: [100 * row[name].fmeasure for row in rows] for name in ROUGE}


def _streams(references: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """sacrebleu's layout: the first reference of every text, then the second, None where a text has no more."""
    assert all(references), "a text without a reference"
    return [list(stream) for stream in zip_longest(*references)]


def slot_share(prompts: Sequence[str], texts: Sequence[str]) -> SlotFigures:
    """The share of slot values of the prompts (`name[The Vaults], eatType[pub]`) that occur in the texts.

    `slot_share` over all, `slots` by name, `num_slots` looked for; None and empty where the prompts hold no slots.
    Values are searched verbatim as whole words, ignoring case, and only in slots whose value people mostly write as
    it is
    (`VERBATIM_SLOTS`). Price, rating and family-friendliness are put into words in many ways ("low cost", "five star",
    "kids welcome") and not judged; nor is what a text claims beyond its prompt. People score below 100 too ("city
    center", "by the river"): compare with the references' own share.
    """
    found: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    for prompt, text in zip(prompts, texts, strict=True):
        for slot, value in SLOT.findall(prompt):
            if slot in VERBATIM_SLOTS and value:
                asked[slot] += 1
                found[slot] += re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text, re.IGNORECASE) is not None
    return {
        "slot_share": 100 * found.total() / asked.total() if asked else None,
        "slots": {slot: 100 * found[slot] / asked[slot] for slot in VERBATIM_SLOTS if asked[slot]},
        "num_slots": asked.total(),
    }
