"""Triton's attention kernels: for one new token per row, and for several, as when drafts are verified.

`attend_kernel` stores and attends in one launch. With several tokens of a row any may attend to any, so `store_kernel`
stores the keys and values of all first, and `attend_several_kernel` attends; those of prompts are stored likewise.
`triton_kernels` launches them. Triton inlines the helper functions, which therefore share registers. No column is read
but a row's own.

B rows or tokens, G KV heads, K head dim (KP padded), M queries that share a KV head (GROUP, padded), T tokens of a row
that are handled together. Names in capitals are pointers, and constants at compile time.
"""

import triton
import triton.language as tl

from skipdecode.backends.triton_fp8 import as_stored

LOG2_E = tl.constexpr(1.4426950408889634)  # exp(x) = 2^(x log2 e): the device has the latter


@triton.jit
def apply_rotary(x, other, cos, sin, d, HALF: tl.constexpr):
    """Rotates elements `d` of a head together with their partners `other`."""
    sign = tl.where(d < HALF, -1.0, 1.0)
    return tl.where(d < 2 * HALF, x * cos + sign * other * sin, x)


@triton.jit
def ready(
    X, rows, d, mask, position, WEIGHT, ROTATIONS, epsilon, K: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr
):  # fmt: skip
    """Heads X + rows [M, K] in float32 after norm and rotary embedding, rounded to their type after each."""
    x = tl.load(X + rows + d[None, :], mask=mask, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    if HAS_NORM:
        rms = tl.rsqrt(tl.sum(x * x, 1) / K + epsilon)
        weight = tl.load(WEIGHT + d, mask=d < K, other=0.0).to(tl.float32)
        x = (x * rms[:, None] * weight[None, :]).to(dtype).to(tl.float32)
    if HALF > 0:
        turns = d < 2 * HALF
        partner = tl.where(d < HALF, d + HALF, tl.where(turns, d - HALF, d))
        other = tl.load(X + rows + partner[None, :], mask=mask, other=0.0).to(tl.float32)
        if HAS_NORM:
            weight = tl.load(WEIGHT + partner, mask=d < K, other=0.0).to(tl.float32)
            other = (other * rms[:, None] * weight[None, :]).to(dtype).to(tl.float32)
        angle = tl.where(d < HALF, d, partner)
        table = ROTATIONS + position * (2 * HALF) + angle
        cos = tl.load(table, mask=turns, other=1.0)
        sin = tl.load(table + HALF, mask=turns, other=0.0)
        x = apply_rotary(x, other, cos[None, :], sin[None, :], d[None, :], HALF).to(dtype).to(tl.float32)
    return x


@triton.jit
def part_of(first, last, part, BLOCK: tl.constexpr, SPLITS: tl.constexpr, MIN_CHUNK: tl.constexpr):
    """How many parts of a row have columns, and where those of this part begin and end."""
    live, start, end = 1, first, last + 1
    if SPLITS > 1:
        chunk = tl.maximum(tl.cdiv(tl.cdiv(last + 1 - first, SPLITS), BLOCK) * BLOCK, MIN_CHUNK)
        live = tl.cdiv(last + 1 - first, chunk).to(tl.int32)
        start = first + part * chunk
        end = tl.minimum(start + chunk, last + 1)
    return live, start, end


@triton.jit
def prefix_chunk(count, BLOCK: tl.constexpr, SPLITS: tl.constexpr, MIN_CHUNK: tl.constexpr):
    """Columns of each part of a shared prefix of `count` columns."""
    return tl.maximum(tl.cdiv(tl.cdiv(count, SPLITS), BLOCK) * BLOCK, MIN_CHUNK)


@triton.jit
def memory_of(KEYS, VALUES, WHERE, b, g, memory_row, memory_head, HAS_TABLE: tl.constexpr):
    """Pointers to the keys and values [columns, K] of a row and head."""
    keys, values = KEYS, VALUES
    if HAS_TABLE:  # multiples of 16, so that loads are of 16 bytes
        keys += tl.multiple_of(tl.load(WHERE), 16)
        values += tl.multiple_of(tl.load(WHERE + 1), 16)
        row = b * tl.multiple_of(tl.load(WHERE + 2), 16) + g * tl.multiple_of(tl.load(WHERE + 3), 16)
    else:
        row = b * memory_row + g * memory_head.to(tl.int64)
    return keys + row, values + row


@triton.jit
def with_new(
    q, NEW_K, NEW_V, keys, values, k_row, v_row, b, g, last, end, best, total, made, d, position, K_NORM, ROTATIONS,
    scale, epsilon, K: tl.constexpr, HALF: tl.constexpr, HAS_K_NORM: tl.constexpr,
):  # fmt: skip
    """Adds the row's new key and value to the attention of q [M, K] so far (see `attended`), and stores them. Only the
    part that ends with column `last` does so; others change nothing."""
    one, is_in = tl.arange(0, 1), d < K
    rows, row_mask = b * k_row + g * K + one[:, None], is_in[None, :]
    new = ready(NEW_K, rows, d, row_mask, position, K_NORM, ROTATIONS, epsilon, K, HALF, HAS_K_NORM)  # [1, K]
    new = as_stored(new, keys)
    new_v = as_stored(tl.load(NEW_V + b * v_row + g * K + d, mask=is_in, other=0.0), values)
    has_last = end == last + 1
    stores = is_in & has_last
    tl.store(keys + last * K + d[None, :], new, mask=stores[None, :])
    tl.store(values + last * K + d, new_v, mask=stores)
    its_score = tl.sum(q * new.to(tl.float32), 1) * (scale * LOG2_E)
    best = tl.where(has_last, its_score, best)
    total = tl.where(has_last, total + 1.0, total)
    made = tl.where(has_last, made + new_v.to(tl.float32)[None, :], made)
    return best, total, made


@triton.jit
def attended(
    q, keys, values, at, stored, until, best, total, made, d, scale,
    M: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, IN_FLOAT32: tl.constexpr, HAS_UNTIL: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Adds BLOCK columns from `at` on, those before `stored`, to the attention of q [M, K] so far: the best score [M],
    the sum of weights [M] and the weighted values [M, K]. With HAS_UNTIL a query sees columns up to `until` [M], and
    only the last WINDOW of them if that is not 0."""
    columns = at + tl.arange(0, BLOCK)
    sees = columns < stored
    offsets, mask = columns[:, None] * K + d[None, :], sees[:, None] & (d < K)[None, :]
    k = tl.load(keys + offsets, mask=mask, other=0.0)  # [BLOCK, K]
    v = tl.load(values + offsets, mask=mask, other=0.0)
    if M > 1 and k.dtype == tl.float8e4nv:
        k = k.to(tl.float32 if IN_FLOAT32 else tl.bfloat16)
        v = v.to(tl.float32 if IN_FLOAT32 else tl.bfloat16)
    if M == 1:
        score = tl.sum(k.to(tl.float32) * q, 1)[None, :]
    elif IN_FLOAT32:
        score = tl.dot(q, tl.trans(k.to(tl.float32)), input_precision="ieee")
    else:
        score = tl.dot(q.to(k.dtype), tl.trans(k), input_precision="ieee")
    seen = sees[None, :]
    if HAS_UNTIL:
        seen = seen & (columns[None, :] <= until[:, None])
        if WINDOW > 0:
            seen = seen & (columns[None, :] > until[:, None] - WINDOW)
    score = tl.where(seen, score * (scale * LOG2_E), float("-inf"))  # [M, BLOCK]
    better = tl.maximum(best, tl.max(score, 1))
    base = better
    if HAS_UNTIL:  # a query may see none of these columns
        base = tl.where(better == float("-inf"), 0.0, better)
    p = tl.exp2(score - base[:, None])
    shrink = tl.exp2(best - base)
    total = total * shrink + tl.sum(p, 1)
    if M == 1:
        p = tl.reshape(p, [BLOCK, 1])
        made = made * shrink[:, None] + tl.sum(p * v.to(tl.float32), 0)[None, :]
    elif IN_FLOAT32:
        p = p.to(v.dtype).to(tl.float32)
        made = made * shrink[:, None] + tl.dot(p, v.to(tl.float32), input_precision="ieee")
    else:
        made = made * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return better, total, made


@triton.jit
def with_parts(
    best, total, made, PARTS, SUMS, rows, step, live, is_one, d, mask, K: tl.constexpr,
):  # fmt: skip
    """Adds the results of parts to the attention so far, in order. `rows` [M]: where those of the first one are, `step`
    before those of the next. A query may have seen none of a part's columns."""
    for part in range(live):
        row = rows + part * step
        its_best = tl.load(SUMS + row * 2, mask=is_one, other=0.0, cache_modifier=".cg")
        its_total = tl.load(SUMS + row * 2 + 1, mask=is_one, other=1.0, cache_modifier=".cg")
        its = tl.load(PARTS + row[:, None] * K + d[None, :], mask=mask, other=0.0, cache_modifier=".cg")
        better = tl.maximum(best, its_best)
        base = tl.where(better == float("-inf"), 0.0, better)
        shrink, its_shrink = tl.exp2(best - base), tl.exp2(its_best - base)
        total = total * shrink + its_total * its_shrink
        made = made * shrink[:, None] + its * its_shrink[:, None]
        best = better
    return best, total, made


@triton.jit(
    do_not_specialize=["last_step", "num_rows", "num_groups"],
    do_not_specialize_on_alignment=["FIRST", "LAST", "OFFSETS", "COUNTS", "ROWS", "STARTS", "SIZES", "NUMBERS"],
)
def attend_prefix_kernel(
    Q, OFFSETS, COUNTS, KEYS, VALUES, WHERE, ROWS, STARTS, SIZES, NUMBERS, FIRST, LAST, PARTS, SUMS,
    q_row, memory_head, last_step, num_rows, num_groups, scale,
    G: tl.constexpr, GROUP: tl.constexpr, T: tl.constexpr, M: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr, SPLITS: tl.constexpr, MIN_CHUNK: tl.constexpr, HAS_TABLE: tl.constexpr,
    WINDOW: tl.constexpr, IN_FLOAT32: tl.constexpr,
):  # fmt: skip
    """One KV head of shared prefixes, or a part of their columns, for T rows of each group at a time, which read it
    together (`PrefixGroups`): the results of parts, which the kernels below add to those of the rows' own columns. The
    queries are normed and rotated already. STEP columns are read at a time, and parts are whole BLOCKs.

    Each program goes through groups, since only the device knows how many there are.
    """
    g, group = tl.program_id(0), tl.program_id(1)
    part, piece = tl.program_id(2) % SPLITS, tl.program_id(2) // SPLITS
    d, m = tl.arange(0, KP), tl.arange(0, M)
    token, member = m // GROUP, m % GROUP
    begin = tl.load(NUMBERS)
    size = tl.load(SIZES + group)
    while size > 0:
        at = piece * T + token
        listed = tl.load(ROWS + tl.load(STARTS + group) + at, mask=(token < T) & (at < size), other=-1)
        row = listed - begin
        is_one = (listed >= begin) & (row < num_rows)  # this step may have the batch's last rows alone
        some = tl.max(tl.where(is_one, row, -1), 0)
        count = tl.load(COUNTS + some, mask=some >= 0, other=0)
        chunk = prefix_chunk(count, BLOCK, SPLITS, MIN_CHUNK)
        start = part * chunk
        end = tl.minimum(start + chunk, count)
        if start < end:
            until = count
            if WINDOW > 0:  # the position of each query
                last = tl.load(LAST + row * last_step, mask=is_one, other=0)
                until = last - tl.load(FIRST + row, mask=is_one, other=0) + count
                start = tl.maximum(start, tl.min(tl.where(is_one, until, count + WINDOW), 0) - WINDOW + 1)
            keys, values = memory_of(KEYS, VALUES, WHERE, 0, g, 0, memory_head, HAS_TABLE)
            place = tl.load(OFFSETS + some) * K
            mask = is_one[:, None] & (d < K)[None, :]
            rows = row * q_row + g * GROUP * K + member * K
            q = tl.load(Q + rows[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
            best = tl.full([M], float("-inf"), tl.float32)
            total = tl.zeros([M], tl.float32)
            made = tl.zeros([M, KP], tl.float32)
            for column in range(start, end, STEP):
                best, total, made = attended(
                    q, keys + place, values + place, column, end, until, best, total, made, d, scale, M, K, STEP,
                    IN_FLOAT32, WINDOW > 0, WINDOW,
                )  # fmt: skip
            line = ((row * G + g) * SPLITS + part) * GROUP + member
            tl.store(PARTS + line[:, None] * K + d[None, :], made, mask=mask)
            tl.store(SUMS + line * 2, best, mask=is_one)
            tl.store(SUMS + line * 2 + 1, total, mask=is_one)
        group += tl.num_programs(1)
        size = tl.load(SIZES + group, mask=group < num_groups, other=0)


# A batch may begin anywhere in FIRST and LAST; specialised on their alignment, the kernel would be compiled twice.
@triton.jit(
    do_not_specialize=["last_step", "num_positions"],
    do_not_specialize_on_alignment=["FIRST", "LAST", "SLOTS", "PREFIX_COUNTS"],
)
def attend_kernel(
    Q, NEW_K, NEW_V, KEYS, VALUES, WHERE, FIRST, LAST, SLOTS, OUT, ROTATIONS, Q_NORM, K_NORM, PARTS, SUMS, ARRIVED,
    PREFIX_COUNTS, PREFIX_PARTS, PREFIX_SUMS,
    q_row, k_row, v_row, memory_row, memory_head, last_step, num_positions, scale, epsilon,
    G: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, MIN_CHUNK: tl.constexpr,
    HAS_NEW: tl.constexpr, HAS_TABLE: tl.constexpr, HAS_SLOTS: tl.constexpr,
    HAS_Q_NORM: tl.constexpr, HAS_K_NORM: tl.constexpr, WINDOW: tl.constexpr, IN_FLOAT32: tl.constexpr,
    PREFIX_SPLITS: tl.constexpr,
):  # fmt: skip
    """One KV head of a row, or a part of its columns, for all queries that share it.

    The part with the row's last column stores the new key and value, and attends to them from registers. The program
    that finishes last combines the results of all parts, in order, those of a shared prefix first (PREFIX_SPLITS; 0:
    there are none).
    """
    g, b, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    first, last = tl.load(FIRST + b), tl.load(LAST + b * last_step)
    before, prefix_live = 0, 0
    if PREFIX_SPLITS > 0:
        before = tl.load(PREFIX_COUNTS + b)
        prefix_live = tl.cdiv(before, prefix_chunk(before, BLOCK, PREFIX_SPLITS, MIN_CHUNK)).to(tl.int32)
    position = tl.minimum(last - first + before, num_positions - 1)
    if WINDOW > 0:
        first = tl.maximum(first, last - WINDOW + 1)
    live, start, end = part_of(first, last, part, BLOCK, SPLITS, MIN_CHUNK)
    if part < live:
        row_slot = tl.load(SLOTS + b) if HAS_SLOTS else b
        keys, values = memory_of(KEYS, VALUES, WHERE, row_slot, g, memory_row, memory_head, HAS_TABLE)
        d, m = tl.arange(0, KP), tl.arange(0, M)
        q_mask = (m[:, None] < GROUP) & (d < K)[None, :]
        q_rows = b * q_row + g * GROUP * K + m[:, None] * K
        q = ready(Q, q_rows, d, q_mask, position, Q_NORM, ROTATIONS, epsilon, K, HALF, HAS_Q_NORM)  # [M, K]
        best = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        made = tl.zeros([M, KP], tl.float32)
        stored = end
        if HAS_NEW:
            best, total, made = with_new(
                q, NEW_K, NEW_V, keys, values, k_row, v_row, b, g, last, end, best, total, made, d, position, K_NORM,
                ROTATIONS, scale, epsilon, K, HALF, HAS_K_NORM,
            )  # fmt: skip
            stored = tl.minimum(end, last)
        for at in range(start, stored, BLOCK):
            best, total, made = attended(
                q, keys, values, at, stored, 0, best, total, made, d, scale, M, K, BLOCK, IN_FLOAT32, False, 0
            )  # fmt: skip
        out = OUT + b * (G * GROUP * K) + g * GROUP * K + m[:, None] * K + d[None, :]
        prefix = (b * G + g) * PREFIX_SPLITS * GROUP + m
        if SPLITS == 1:
            if PREFIX_SPLITS > 0:
                best, total, made = with_parts(
                    best, total, made, PREFIX_PARTS, PREFIX_SUMS, prefix, GROUP, prefix_live, m < GROUP, d, q_mask, K
                )  # fmt: skip
            tl.store(out, (made / total[:, None]).to(OUT.dtype.element_ty), mask=q_mask)
        else:
            begin = (b * G + g) * SPLITS
            row = (begin + part) * GROUP + m
            tl.store(PARTS + row[:, None] * K + d[None, :], made, mask=q_mask)
            tl.store(SUMS + row * 2, best, mask=m < GROUP)
            tl.store(SUMS + row * 2 + 1, total, mask=m < GROUP)
            tl.debug_barrier()  # all of this part is written before it counts as arrived
            if tl.atomic_add(ARRIVED + b * G + g, 1, sem="acq_rel") == live - 1:
                tl.store(ARRIVED + b * G + g, 0)  # for the next call
                best = tl.full([M], float("-inf"), tl.float32)
                total = tl.zeros([M], tl.float32)
                made = tl.zeros([M, KP], tl.float32)
                if PREFIX_SPLITS > 0:
                    best, total, made = with_parts(
                        best, total, made, PREFIX_PARTS, PREFIX_SUMS, prefix, GROUP, prefix_live, m < GROUP, d, q_mask,
                        K,
                    )  # fmt: skip
                best, total, made = with_parts(
                    best, total, made, PARTS, SUMS, begin * GROUP + m, GROUP, live, m < GROUP, d, q_mask, K
                )  # fmt: skip
                tl.store(out, (made / total[:, None]).to(OUT.dtype.element_ty), mask=q_mask)


@triton.jit(
    do_not_specialize=["last_step", "num_positions"],
    do_not_specialize_on_alignment=["FIRST", "LAST", "SLOTS", "PREFIX_COUNTS"],
)
def store_kernel(
    Q, NEW_K, NEW_V, KEYS, VALUES, SLOTS, FIRST, LAST, PREFIX_COUNTS, READY, READY_KEYS, READY_VALUES,
    ROTATIONS, Q_NORM, K_NORM,
    q_row, k_row, v_row, memory_row, memory_head, last_step, num_positions, epsilon,
    G: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, HALF: tl.constexpr,
    HAS_NEW: tl.constexpr, HAS_Q: tl.constexpr, HAS_KEYS: tl.constexpr, HAS_VALUES: tl.constexpr,
    HAS_Q_NORM: tl.constexpr, HAS_K_NORM: tl.constexpr, HAS_PREFIX: tl.constexpr,
):  # fmt: skip
    """For one token and KV head: stores the new key, after norm and rotary embedding, and the value (HAS_NEW), and the
    queries that share the head, likewise, in READY [N, G GROUP K] (HAS_Q). HAS_KEYS, HAS_VALUES: the key goes to
    READY_KEYS [N, G K], too, and the value to READY_VALUES, as the cache has them."""
    n, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    last = tl.load(LAST + n * last_step)
    position = last - tl.load(FIRST + n)
    if HAS_PREFIX:
        position += tl.load(PREFIX_COUNTS + n)
    position = tl.minimum(position, num_positions - 1)
    d, m, one = tl.arange(0, KP), tl.arange(0, M), tl.arange(0, 1)
    is_in = d < K
    if HAS_Q:
        mask = (m[:, None] < GROUP) & is_in[None, :]
        rows = n * q_row + g * GROUP * K + m[:, None] * K
        q = ready(Q, rows, d, mask, position, Q_NORM, ROTATIONS, epsilon, K, HALF, HAS_Q_NORM)
        out = READY + n * (G * GROUP * K) + g * GROUP * K + m[:, None] * K + d[None, :]
        tl.store(out, q.to(READY.dtype.element_ty), mask=mask)
    if HAS_NEW:
        keys, values = memory_of(KEYS, VALUES, None, tl.load(SLOTS + n), g, memory_row, memory_head, False)
        rows = n * k_row + g * K + one[:, None]
        new = ready(NEW_K, rows, d, is_in[None, :], position, K_NORM, ROTATIONS, epsilon, K, HALF, HAS_K_NORM)
        new = as_stored(new, keys)
        tl.store(keys + last * K + d[None, :], new, mask=is_in[None, :])
        own = n * (G * K) + g * K + d
        if HAS_KEYS:
            tl.store(READY_KEYS + own[None, :], new.to(READY_KEYS.dtype.element_ty), mask=is_in[None, :])
        new_v = as_stored(tl.load(NEW_V + n * v_row + g * K + d, mask=is_in, other=0.0), values)
        tl.store(values + last * K + d, new_v, mask=is_in)
        if HAS_VALUES:
            tl.store(READY_VALUES + own, new_v.to(READY_VALUES.dtype.element_ty), mask=is_in)


@triton.jit(do_not_specialize_on_alignment=["FIRST", "LAST", "SLOTS", "QUERY_INDEX", "COUNTS", "PREFIX_COUNTS"])
def attend_several_kernel(
    Q, QUERY_INDEX, COUNTS, KEYS, VALUES, SLOTS, FIRST, LAST, OUT, PARTS, SUMS, ARRIVED,
    PREFIX_COUNTS, PREFIX_PARTS, PREFIX_SUMS,
    q_row, memory_row, memory_head, scale,
    G: tl.constexpr, GROUP: tl.constexpr, T: tl.constexpr, M: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, MIN_CHUNK: tl.constexpr, WINDOW: tl.constexpr, IN_FLOAT32: tl.constexpr,
    PREFIX_SPLITS: tl.constexpr,
):  # fmt: skip
    """One KV head, or a part of its columns, for T tokens of a slot, the first of which is the program's. Programs of
    the other tokens do nothing, since only the device knows which tokens share a slot. PREFIX_SPLITS as in
    `attend_kernel`."""
    g, n, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    index = tl.load(QUERY_INDEX + n)
    if index % T == 0:
        d, m = tl.arange(0, KP), tl.arange(0, M)
        token, member = m // GROUP, m % GROUP
        is_one = token < tl.minimum(tl.load(COUNTS + n) - index, T)
        first = tl.load(FIRST + n)
        until = tl.load(LAST + n + token, mask=is_one, other=0)  # of each query; missing ones see the first column
        until = tl.maximum(until, first)
        last = tl.max(until, 0)
        if WINDOW > 0:
            oldest = tl.min(tl.where(is_one, until, last), 0)
            first = tl.maximum(first, oldest - WINDOW + 1)
            until = tl.maximum(until, first)
        live, start, end = part_of(first, last, part, BLOCK, SPLITS, MIN_CHUNK)
        if part < live:
            keys, values = memory_of(KEYS, VALUES, None, tl.load(SLOTS + n), g, memory_row, memory_head, False)
            mask = is_one[:, None] & (d < K)[None, :]
            of_query = g * GROUP * K + member * K
            rows = (n + token) * q_row + of_query
            q = tl.load(Q + rows[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
            best = tl.full([M], float("-inf"), tl.float32)
            total = tl.zeros([M], tl.float32)
            made = tl.zeros([M, KP], tl.float32)
            for at in range(start, end, BLOCK):
                best, total, made = attended(
                    q, keys, values, at, end, until, best, total, made, d, scale, M, K, BLOCK, IN_FLOAT32, True, WINDOW
                )  # fmt: skip
            out = OUT + ((n + token) * (G * GROUP * K) + of_query)[:, None] + d[None, :]
            of_part, prefix_live = m < T * GROUP, 0
            prefix = ((n + token) * G + g) * PREFIX_SPLITS * GROUP + member
            if PREFIX_SPLITS > 0:
                before = tl.load(PREFIX_COUNTS + n)
                prefix_live = tl.cdiv(before, prefix_chunk(before, BLOCK, PREFIX_SPLITS, MIN_CHUNK)).to(tl.int32)
            if SPLITS == 1:
                if PREFIX_SPLITS > 0:
                    best, total, made = with_parts(
                        best, total, made, PREFIX_PARTS, PREFIX_SUMS, prefix, GROUP, prefix_live, is_one, d, mask, K
                    )  # fmt: skip
                tl.store(out, (made / total[:, None]).to(OUT.dtype.element_ty), mask=mask)
            else:
                begin = (n * G + g) * SPLITS
                row = (begin + part) * (T * GROUP) + m
                tl.store(PARTS + row[:, None] * K + d[None, :], made, mask=of_part[:, None] & (d < K)[None, :])
                tl.store(SUMS + row * 2, best, mask=of_part)
                tl.store(SUMS + row * 2 + 1, total, mask=of_part)
                tl.debug_barrier()  # all of this part is written before it counts as arrived
                if tl.atomic_add(ARRIVED + n * G + g, 1, sem="acq_rel") == live - 1:
                    tl.store(ARRIVED + n * G + g, 0)  # for the next call
                    best = tl.full([M], float("-inf"), tl.float32)
                    total = tl.zeros([M], tl.float32)
                    made = tl.zeros([M, KP], tl.float32)
                    if PREFIX_SPLITS > 0:
                        best, total, made = with_parts(
                            best, total, made, PREFIX_PARTS, PREFIX_SUMS, prefix, GROUP, prefix_live, is_one, d, mask, K
                        )  # fmt: skip
                    best, total, made = with_parts(
                        best, total, made, PARTS, SUMS, begin * (T * GROUP) + m, T * GROUP, live, of_part, d, mask, K
                    )  # fmt: skip
                    tl.store(out, (made / total[:, None]).to(OUT.dtype.element_ty), mask=mask)
