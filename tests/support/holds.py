"""Holds of a batch that is not there."""

from skipdecode.speculative.controller import Decision, Hold

WANTED, NONE = Decision(3, {2: 1}), Decision(0, {})


def hold(decision: Decision, round_s: float, tokens: float = 1.0, rounds: int = 0) -> Hold:
    """Of a batch of 4 rows whose steps take 1 s by the cost model."""
    made = Hold(decision, 4, 100)
    for _ in range(rounds or decision.rounds):
        made.add(4, round(4 * tokens), round_s, 1.0)
    return made
