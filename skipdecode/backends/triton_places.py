"""Triton's kernels of attention for several new columns of a row, as drafts are verified (`KVRange.query_index`).

One stores keys and values of all, since any may attend to any; the next one attends. Tokens of a row lie side by side,
and share what is read of its columns: each sees those up to its own. Names as in `triton_attention`, of whose steps
these are made.

N tokens, T of a row at a time; M queries: the GROUP of each of these that share a head of keys, padded.
"""

import triton
import triton.language as tl

from skipdecode.backends.triton_attention import attended, memory_of, part_of, ready, sum_of_parts


@triton.jit(do_not_specialize=["num_positions"], do_not_specialize_on_alignment=["FIRST", "LAST", "PLACES"])
def store_kernel(
    Q, NEW_K, NEW_V, KEYS, VALUES, PLACES, FIRST, LAST, READY, ROTATIONS, Q_NORM, K_NORM,
    q_row, k_row, v_row, memory_row, memory_head, num_positions, epsilon,
    G: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, HALF: tl.constexpr,
    HAS_NEW: tl.constexpr, HAS_Q: tl.constexpr, HAS_Q_NORM: tl.constexpr, HAS_K_NORM: tl.constexpr,
):  # fmt: skip
    """Of a token and head of keys: the new key, normed and turned, and value to their place, where it HAS_NEW; the
    queries that share the head, likewise, to READY [N, G GROUP K], where it HAS_Q."""
    g, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    last = tl.load(LAST + n)
    position = tl.minimum(last - tl.load(FIRST + n), num_positions - 1)
    d, m, one = tl.arange(0, KP), tl.arange(0, M), tl.arange(0, 1)
    is_in = d < K
    if HAS_Q:
        mask = (m[:, None] < GROUP) & is_in[None, :]
        rows = n * q_row + g * GROUP * K + m[:, None] * K
        q = ready(Q, rows, d, mask, position, Q_NORM, ROTATIONS, epsilon, K, HALF, HAS_Q_NORM)
        out = READY + n * (G * GROUP * K) + g * GROUP * K + m[:, None] * K + d[None, :]
        tl.store(out, q.to(READY.dtype.element_ty), mask=mask)
    if HAS_NEW:
        keys, values = memory_of(KEYS, VALUES, None, tl.load(PLACES + n), g, memory_row, memory_head, False)
        rows = n * k_row + g * K + one[:, None]
        new = ready(NEW_K, rows, d, is_in[None, :], position, K_NORM, ROTATIONS, epsilon, K, HALF, HAS_K_NORM)
        tl.store(keys + last * K + d[None, :], new.to(keys.dtype.element_ty), mask=is_in[None, :])
        new_v = tl.load(NEW_V + n * v_row + g * K + d, mask=is_in, other=0.0)
        tl.store(values + last * K + d, new_v, mask=is_in)


@triton.jit(do_not_specialize_on_alignment=["FIRST", "LAST", "PLACES", "SLOTS", "COUNTS"])
def attend_places_kernel(
    Q, SLOTS, COUNTS, KEYS, VALUES, PLACES, FIRST, LAST, OUT, PARTS, SUMS, ARRIVED,
    q_row, memory_row, memory_head, scale,
    G: tl.constexpr, GROUP: tl.constexpr, T: tl.constexpr, M: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, MIN_CHUNK: tl.constexpr, IN_FLOAT32: tl.constexpr,
):  # fmt: skip
    """One head of keys and values of T tokens of a place, the first of which is the program's, or a part of their
    columns. Programs of the other tokens have nothing to do: which those are is known on the device alone."""
    g, n, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    slot = tl.load(SLOTS + n)
    if slot % T == 0:
        d, m = tl.arange(0, KP), tl.arange(0, M)
        token, member = m // GROUP, m % GROUP
        is_one = token < tl.minimum(tl.load(COUNTS + n) - slot, T)
        first = tl.load(FIRST + n)
        until = tl.load(LAST + n + token, mask=is_one, other=0)  # of each query; nobody's sees the first column
        until = tl.maximum(until, first)
        last = tl.max(until, 0)
        live, start, end = part_of(first, last, part, BLOCK, SPLITS, MIN_CHUNK)
        if part < live:
            keys, values = memory_of(KEYS, VALUES, None, tl.load(PLACES + n), g, memory_row, memory_head, False)
            mask = is_one[:, None] & (d < K)[None, :]
            of_query = g * GROUP * K + member * K
            rows = (n + token) * q_row + of_query
            q = tl.load(Q + rows[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
            best = tl.full([M], float("-inf"), tl.float32)
            total = tl.zeros([M], tl.float32)
            made = tl.zeros([M, KP], tl.float32)
            for at in range(start, end, BLOCK):
                best, total, made = attended(
                    q, keys, values, at, end, until, best, total, made, d, scale, M, K, BLOCK, IN_FLOAT32, True
                )  # fmt: skip
            out = OUT + ((n + token) * (G * GROUP * K) + of_query)[:, None] + d[None, :]
            if SPLITS == 1:
                tl.store(out, (made / total[:, None]).to(OUT.dtype.element_ty), mask=mask)
            else:
                begin = (n * G + g) * SPLITS
                row = (begin + part) * (T * GROUP) + m
                of_part = m < T * GROUP
                tl.store(PARTS + row[:, None] * K + d[None, :], made, mask=of_part[:, None] & (d < K)[None, :])
                tl.store(SUMS + row * 2, best, mask=of_part)
                tl.store(SUMS + row * 2 + 1, total, mask=of_part)
                tl.debug_barrier()  # all of this part is written before it counts as arrived
                if tl.atomic_add(ARRIVED + n * G + g, 1, sem="acq_rel") == live - 1:
                    tl.store(ARRIVED + n * G + g, 0)  # for the next call
                    whole = sum_of_parts(PARTS, SUMS, begin, live, m, d, mask, T * GROUP, M, K, KP)
                    tl.store(out, whole.to(OUT.dtype.element_ty), mask=mask)
