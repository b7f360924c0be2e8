"""The metrics against figures worked out by hand, and ragged references against the libraries' own behaviour."""

import pytest
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from pipeline.evaluation.metrics import bleu, chrf, rouge, scores, slot_share

TEXTS = ["The Vaults is a cheap pub near Café Adriatic .", "There is a coffee shop called Cotto .", "A pub ."]
RAGGED = [
    ["The Vaults is a pub near Café Adriatic with low prices .", "Near Café Adriatic , The Vaults is a cheap pub ."],
    ["Cotto is a coffee shop ."],
    ["It is a pub .", "The pub is there .", "A cheap pub ."],
]


def test_bleu_by_hand() -> None:
    # 1-grams 5 of 6 ("the" is clipped to one), 2-grams 3 of 5, 3-grams 2 of 4, 4-grams 1 of 3; equal lengths
    expected = 100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** (1 / 4)
    assert bleu(["The cat sat on THE mat"], [["the cat sat on a mat"]]) == pytest.approx(expected)
    assert bleu(["a b c d e"], [["x", "a b c d e"]]) == pytest.approx(100)


def test_chrf_by_hand() -> None:
    # 1-grams 2 of 3, 2-grams 1 of 2, 3-grams 0 of 1, longer ones there are none
    assert chrf(["abc"], [["abd"]]) == pytest.approx(100 * (2 / 3 + 1 / 2 + 0) / 3)
    assert chrf(["ABC"], [["abc"]]) == 0


def test_rouge_by_hand_takes_the_best_reference_by_each_measure_apart() -> None:
    # the first reference has all words in the wrong order, the second half of them in the right one
    figures = rouge(["a b c d"], [["d c b a", "a b x y"]])
    assert figures == pytest.approx({"rouge1": 100, "rouge2": 100 / 3, "rougeL": 50})
    # two texts: the mean; three words of which two are in a reference of two: P 2/3, R 1, F1 0.8
    assert rouge(["the cat sat", ""], [["the cat"], ["a dog"]])["rougeL"] == pytest.approx(40)


def test_ragged_references_are_what_the_libraries_make_of_them() -> None:
    # repeating a reference changes no clipped count, no closest length and no best score
    streams = [[own[min(i, len(own) - 1)] for own in RAGGED] for i in range(3)]
    assert bleu(TEXTS, RAGGED) == pytest.approx(BLEU(lowercase=True).corpus_score(TEXTS, streams).score)
    assert chrf(TEXTS, RAGGED) == pytest.approx(CHRF().corpus_score(TEXTS, streams).score)
    scorer = RougeScorer(["rougeL"])
    best = [max(scorer.score(r, text)["rougeL"].fmeasure for r in own) for text, own in zip(TEXTS, RAGGED, strict=True)]
    assert rouge(TEXTS, RAGGED)["rougeL"] == pytest.approx(100 * sum(best) / 3)
    assert bleu(TEXTS, RAGGED) > bleu(TEXTS, [own[:1] for own in RAGGED]), "more references can only help here"


def test_an_empty_text_costs_every_measure() -> None:
    whole, holed = scores(TEXTS, RAGGED), scores(["", *TEXTS[1:]], RAGGED)
    assert set(whole) == {"bleu", "chrf", "rouge1", "rouge2", "rougeL"}
    assert all(holed[name] < whole[name] for name in whole), (holed, whole)
    assert scores([""], [["a b"]]) == dict.fromkeys(whole, 0)


def test_slots() -> None:
    prompts = [
        "name[The Vaults], eatType[pub], priceRange[more than £30], customer rating[5 out of 5], near[Café Adriatic]",
        "name[Cotto], food[Fast food], familyFriendly[yes], area[city centre]",
    ]
    texts = ["Near CAFÉ ADRIATIC the vaults is a public house.", "Cotto serves fast food in the city center."]
    figures = slot_share(prompts, texts)
    assert figures["num_slots"] == 6, "price, rating and families are not judged"
    assert figures["slots"] == {"name": 100, "near": 100, "food": 100, "eatType": 0, "area": 0}, "whole words, verbatim"
    assert figures["slot_share"] == pytest.approx(100 * 4 / 6)


def test_prompts_without_slots_have_no_share() -> None:
    assert slot_share(["Tell me a story", "x[0]"], ["a", "b"]) == {"slot_share": None, "slots": {}, "num_slots": 0}


def test_a_text_without_a_reference_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(AssertionError):
        bleu(["a", "b"], [["a"], []])
