"""Prefill: pads prompts, allocates their cache, and feeds them, several rows at a time.

Decoding continues in `skipdecode.engine.static_batch` or `skipdecode.engine.continuous_batch`.

B rows, P prompt columns, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from skipdecode.backends.pinned_copy import to_device
from skipdecode.engine.cuda_graphs import CudaGraphs
from skipdecode.engine.prefix_sharing import Allocate, Parts, PrefixSharing, SharedPrompts
from skipdecode.engine.request import Request
from skipdecode.kv.slot_cache import Slot, SlotCache
from skipdecode.kv.static_cache import KVCache, SharedPrefixKV
from skipdecode.kv.view import wants_all_heads
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.layer_plan import LayerPlan
from skipdecode.schedules.schedule import Schedule, kv_capacities, kv_owner_of_layers

PREFILL_BYTES = 1 << 30  # GPU memory for states, masks and copies of keys of the prompts that are fed together
PACKED_TOKENS = 8192  # of prompts without padding that are fed together: enough for products to be at their best
PROMPT_STEP = 16  # lengths are padded to multiples: kernels prepare for every shape, and padding costs little


def rounded_columns(longest: int) -> int:
    """Columns for prompts of up to `longest` tokens in a server, where few different shapes are wanted."""
    return -(-longest // PROMPT_STEP) * PROMPT_STEP


def pad_prompts(
    model: Decoder, requests: Sequence[Request], prompt_columns: int | None, batch_rows: int | None
) -> tuple[Tensor, Tensor, list[int]]:
    """Left-padded prompts [B, P] int64, the padding of each row [B] int64, both on the model's device, and the padding
    on the host."""
    columns = prompt_columns or max(len(r.prompt_tokens) for r in requests)
    config = model.config
    lines = [r.prompt_tokens for r in requests]
    lines += [[config.filler_token_id]] * ((batch_rows or len(lines)) - len(lines))
    longest = max(len(line) for line in lines)
    assert min(len(line) for line in lines) > 0, "a prompt has no token"
    assert longest <= columns, (longest, columns)
    padded = [[config.filler_token_id] * (columns - len(line)) + line for line in lines]
    num_pad_host = [columns - len(line) for line in lines]
    return to_device(padded, model.device), to_device(num_pad_host, model.device), num_pad_host


def feed_prompts(
    model: Decoder,
    tokens: Tensor,
    cache: KVCache,
    plan: LayerPlan,
    *,
    in_equal_parts: bool = False,
    return_argmax: bool = False,
) -> Tensor:
    """Feeds left-padded prompts [B, P] into an empty `cache`: logits of the last column [B, V], or with `return_argmax`
    the most likely token [B].

    Where the model `supports_packed_prompts`, `packed_parts` go through together, without padding; elsewhere
    `rows_at_once` rows, on a GPU without the columns that are padding in all of them. `in_equal_parts`: all parts have
    the same size, and all columns, so that a row's result does not depend on its index in the batch.
    """
    positions = (torch.arange(tokens.shape[1], device=model.device) - cache.num_pad[:, None]).clamp(min=-1)
    whole, made = len(tokens), []
    if not in_equal_parts and cache.num_pad_host is not None and model.supports_packed_prompts(cache.k[0]):
        lengths = [tokens.shape[1] - pad for pad in cache.num_pad_host]
        for part in packed_parts(model, lengths):
            view = cache.slice_rows(part.start, part.stop)
            own = lengths[part]
            made.append(model(tokens[part], positions[part], view, plan, return_argmax=return_argmax, lengths=own))
        cache.length += tokens.shape[1]
        return torch.cat(made)
    rows = rows_at_once(model, tokens.shape[1], tokens.shape[1], has_mask=cache.valid is not None)
    if in_equal_parts:
        rows = next(size for size in range(min(rows, whole), 0, -1) if whole % size == 0)
    # Rows come by length, so most parts have none of the batch's longest. A part without padding needs no mask, which
    # over a long prompt is larger than everything else.
    trims = model.device.type == "cuda" and not in_equal_parts and cache.valid is not None
    paddings = cache.num_pad_host if trims else None
    for at in range(0, whole, rows):
        part = slice(at, min(at + rows, whole))
        pad = 0 if paddings is None else min(paddings[part])
        is_trimmed = paddings is not None and (pad > 0 or not any(paddings[part]))
        view = cache.trimmed(part.start, part.stop) if is_trimmed else cache.slice_rows(part.start, part.stop)
        fed = slice(pad, None)
        made.append(model(tokens[part, fed], positions[part, fed], view, plan, return_argmax=return_argmax))
    cache.length += tokens.shape[1]
    return torch.cat(made)


def feed_in_place(
    model: Decoder,
    lines: Sequence[Sequence[int]],
    cache: SlotCache,
    slots: Sequence[Slot],
    plan: LayerPlan,
    num_cached: Sequence[int],
    shared: SharedPrefixKV | None = None,
    *,
    return_argmax: bool = False,
) -> Tensor:
    """Feeds the tokens `lines[i]` to slot i of `cache`, without padding: logits of the last ones [B, V], or with
    `return_argmax` the most likely tokens [B]. Only where the model `supports_packed_prompts`.

    `num_cached[i]` tokens come before them, in the same slot, or in `shared` if it is given.
    """
    made, filler, lengths = [], model.config.filler_token_id, list(map(len, lines))
    for part in packed_parts(model, lengths, num_cached):
        some, own = lines[part], lengths[part]
        ends, longest = to_device(list(num_cached[part]), model.device, torch.int64), max(own)
        tokens = to_device([[filler] * (longest - len(line)) + list(line) for line in some], model.device)
        num_pad = to_device([longest - count for count in own], model.device)
        at = torch.arange(longest, device=model.device) - num_pad[:, None]
        positions = torch.where(at >= 0, at + ends[:, None], -1)
        view = cache.prompts_at(slots[part])
        view.shared = None if shared is None else shared.of(part)
        how = {"num_cached": num_cached[part], "lengths": own}
        made.append(model(tokens, positions, view, plan, return_argmax=return_argmax, **how))
    return torch.cat(made)


def packed_parts(model: Decoder, lengths: Sequence[int], num_cached: Sequence[int] | None = None) -> Iterator[slice]:
    """The prompts that go through the model together without padding: consecutive ones of at most PACKED_TOKENS tokens
    (`lengths`), and on a GPU of at most PREFILL_BYTES; at least one. `num_cached`: tokens of each that are cached
    already, whose keys and values are read with its own.
    """
    most, room = min(model.max_prefill_tokens, PACKED_TOKENS), PREFILL_BYTES
    is_gpu = model.device.type == "cuda"
    of_token = _bytes_of_row(model, 1, 1, has_mask=False) if is_gpu else 0
    of_cached = 2 * model.config.kv_dim * model.dtype.itemsize if is_gpu and any(num_cached or ()) else 0
    start = tokens = size = 0
    for at, (count, cached) in enumerate(zip(lengths, num_cached or [0] * len(lengths), strict=True)):
        # those of a prefix that rows share are read, and then put before the row's own
        its_size = count * of_token + (count + cached) * of_cached + cached * of_cached // 2
        if at > start and (tokens + count > most or size + its_size > room):
            yield slice(start, at)
            start, tokens, size = at, 0, 0
        tokens, size = tokens + count, size + its_size
    yield slice(start, len(lengths))


def shared_prompts(
    model: Decoder,
    requests: Sequence[Request],
    schedule: Schedule,
    sharing: PrefixSharing,
    allocate: Allocate,
    *,
    copies: bool = False,
    graphs: CudaGraphs | None = None,
) -> SharedPrompts:
    """The prompts of a batch with shared prefixes, to be fed later. `copies`, `graphs`: as in `SharedPrompts`."""
    prompts, at_once = [r.prompt_tokens for r in requests], partial(rows_at_once, model, has_mask=True)
    assert len(prompts) == len(sharing.prefix_of_row), "the sharing of another batch"
    how = Parts(at_once, partial(packed_parts, model))
    return SharedPrompts(model, prompts, schedule, sharing, allocate, parts=how, copies=copies, graphs=graphs)


def rows_at_once(model: Decoder, num_new: int, columns: int, *, has_mask: bool) -> int:
    """How many rows of prompts go through the model together, at least one: `num_new` columns of each, which attend to
    `columns`. `has_mask`: attention needs a mask.
    """
    rows = model.max_prefill_tokens // num_new
    if model.device.type == "cuda":
        rows = min(rows, PREFILL_BYTES // _bytes_of_row(model, num_new, columns, has_mask))
    return max(1, rows)


def _bytes_of_row(model: Decoder, num_new: int, columns: int, has_mask: bool) -> int:
    """Bytes of a row's prompt that exist at the same time on a GPU."""
    c, itemsize, gates = model.config, model.dtype.itemsize, 2 if model.config.is_gated else 1
    attends, feeds = num_new * (2 * c.q_dim + 2 * c.kv_dim), num_new * 2 * gates * c.ffn_dim  # with its activation
    if c.q_dim != c.kv_dim and wants_all_heads(model.dtype, has_mask=has_mask):
        attends += 2 * columns * c.q_dim
    if model.kv_dtype != model.dtype:  # torch's attention reads a copy in the type of states
        attends += 2 * columns * c.kv_dim
    scores = num_new * columns if has_mask else 0
    # a mask has a byte per score; torch inverts it, converts it to numbers, and copies these with rows padded to 16
    attending, feeding = attends * itemsize + scores * (1 + 2 * itemsize), feeds * itemsize
    states = 4 * num_new * c.hidden_size * itemsize  # embedded, before and after attention, and normed
    return states + scores + max(attending, feeding)


def allocate_cache(
    model: Decoder,
    num_pad: Tensor,
    columns: int,
    schedule: Schedule,
    num_new: int,
    *,
    force_mask: bool = False,
    graphs: CudaGraphs | None = None,
    num_pad_host: Sequence[int] | None = None,
) -> KVCache:
    """A cache with, per layer, `columns` for the prompt and one for each decode step that runs the layer, or one that
    shares its K/V. `num_pad_host` as in `KVCache`.
    """
    kv_owner, capacities = _capacities(model, columns, schedule, num_new)
    if graphs is not None:
        return graphs.allocate(num_pad, capacities, kv_owner, force_mask=force_mask, num_pad_host=num_pad_host)
    return KVCache.allocate(
        model.config,
        num_pad=num_pad,
        capacities=capacities,
        kv_owner=kv_owner,
        dtype=model.kv_dtype,
        force_mask=force_mask,
        devices=None if model.placement is None else model.placement.of_layers,
        num_pad_host=num_pad_host,
    )


def has_room(graphs: CudaGraphs, schedule: Schedule, num_rows: int, columns: int, num_new: int) -> bool:
    """True if `allocate_cache` would find memory in `graphs` for a batch of `num_rows` now."""
    kv_owner, capacities = _capacities(graphs.model, columns, schedule, num_new)
    return graphs.has_room(num_rows, capacities, kv_owner)


def _capacities(model: Decoder, columns: int, schedule: Schedule, num_new: int) -> tuple[list[int], list[int]]:
    """[L] the layer that stores each layer's K/V, and [L] the columns it needs."""
    kv_owner = kv_owner_of_layers(schedule, model.config.kv_group_size)
    columns_of = kv_capacities(kv_owner, schedule, columns, num_new)
    return kv_owner, [columns_of[layer] for layer in kv_owner]
