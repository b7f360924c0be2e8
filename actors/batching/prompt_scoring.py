"""Log-probabilities of prompts at full depth, in addition to the answers of a batch or without generating anything."""

import time
from collections.abc import Sequence
from dataclasses import replace

from skipdecode.engine.logprobs import score_prompts
from skipdecode.engine.request import Request, refuse_too_long
from skipdecode.engine.results import BatchResult, BatchStats, Completion
from skipdecode.model.decoder import Decoder

MAX_TOKENS = 2048  # prompt tokens scored in one pass, since all their hidden states are in memory


def is_scored_alone(request: Request) -> bool:
    """True if nothing is to be generated."""
    return request.sampling.max_new_tokens == 0


def with_scores(
    model: Decoder, requests: Sequence[Request], completions: Sequence[Completion], together: bool
) -> list[Completion]:
    """The completions, with the scores of their prompts if requested.

    `together`: score several prompts in one pass; otherwise a prompt's scores do not depend on the other prompts.
    """
    asking = sorted(
        (row for row, request in enumerate(requests) if request.score_prompt),
        key=lambda row: len(requests[row].prompt_tokens),
    )
    done = list(completions)
    while asking:
        longest = len(requests[asking[-1]].prompt_tokens)
        count = max(1, MAX_TOKENS // longest) if together else 1
        rows, asking = asking[-count:], asking[:-count]
        num_top = max(requests[row].top_logprobs or 0 for row in rows)
        scores = score_prompts(model, [requests[row].prompt_tokens for row in rows], num_top)
        for row, scored in zip(rows, scores, strict=True):
            own = requests[row].top_logprobs or 0
            cut = [replace(one, top=one.top[:own]) for one in scored]
            done[row] = replace(done[row], prompt_logprobs=cut)
    return done


def score_alone(model: Decoder, requests: Sequence[Request], together: bool) -> BatchResult:
    """The scores of prompts for which nothing is generated."""
    refuse_too_long(requests, model.config.max_position_embeddings)
    start = time.perf_counter()
    nothing = [Completion([], "length", 0, 0) for _ in requests]
    completions = with_scores(model, requests, nothing, together)
    lengths = [len(request.prompt_tokens) for request in requests]
    stats = BatchStats(len(requests), max(lengths), sum(lengths), prefill_s=time.perf_counter() - start)
    return BatchResult(completions, stats)
