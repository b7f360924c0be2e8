"""Where two ways to decode may differ in float32: sums come in another order, so near ties may go either way."""

import numpy as np
import torch

from skipdecode.engine.request import Request
from skipdecode.model.decoder import Decoder
from skipdecode.model.random_numbers import row_uniforms
from skipdecode.model.teacher_forcing import teacher_batch, teacher_forced_logits
from skipdecode.schedules.schedule import FullDepth

LOGITS_CLOSE, NUMBER_CLOSE = 1e-5, 1e-6


def first_difference(a: list[int], b: list[int]) -> int | None:
    """The first place where they differ; None: they are equal."""
    for at, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return at
    return None if len(a) == len(b) else min(len(a), len(b))


def is_tie(model: Decoder, request: Request, made: list[int], wanted: list[int]) -> bool:
    """Whether full depth has no clear choice between the first tokens in which they differ: these are the two likeliest
    and their logits lie within 1e-5, or the row's number within 1e-6 of the border between them."""
    at = first_difference(made, wanted)
    assert at is not None, "equal"
    if at >= min(len(made), len(wanted)):
        return False  # one of them goes on behind the other's end
    fed = [*request.prompt_tokens, *wanted[:at]]
    batch = teacher_batch([(fed, [0])], model.config.filler_token_id, model.device)
    logits = teacher_forced_logits(model, batch, FullDepth(model.config.num_hidden_layers))[0, 0].double()
    sampling = request.sampling
    if sampling.temperature == 0:
        top = logits.topk(2)
        are_those = {made[at], wanted[at]} == set(top.indices.tolist())
        return are_those and bool(top.values[0] - top.values[1] < LOGITS_CLOSE)
    p = (logits / sampling.temperature).softmax(0)
    ordered, tokens = p.sort(descending=True, stable=True)
    before = ordered.cumsum(0) - ordered
    kept = torch.ones(len(p), dtype=torch.bool)
    if sampling.top_k:
        kept[sampling.top_k :] = False
        ordered = ordered * kept / (ordered * kept).sum()
        before = ordered.cumsum(0) - ordered
    if sampling.top_p < 1:
        if bool(((before - sampling.top_p).abs() < NUMBER_CLOSE).any()):
            return True  # a token that is nearly cut
        kept &= before < sampling.top_p
    mass = torch.zeros_like(p).scatter(0, tokens, torch.where(kept, ordered, torch.zeros_like(ordered)))
    above = (mass.cumsum(0) / mass.sum()).numpy()
    below = np.concatenate([[0.0], above[:-1]])
    number = float(row_uniforms(sampling.seed, request.id, at + 1)[at])
    near = (below - NUMBER_CLOSE < number) & (number < above + NUMBER_CLOSE) & (mass > 0).numpy()
    return bool(near[made[at]] and near[wanted[at]])
