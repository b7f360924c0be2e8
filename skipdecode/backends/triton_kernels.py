"""Triton's kernels of a decode step: `cuda_kernels.Kernels` says what each computes, `triton_launch` on what grid.

Importing this needs Triton. Products are cuBLAS's, and no kernel here reads more than one new column per row.

B rows, D width, H heads of queries, G of keys and values, K head dim, M queries that share a head of keys (padded), V
vocabulary. Names in capitals are pointers, and numbers known when a kernel is compiled.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)  # exp(x) = 2^(x log2 e): the device has the latter


@triton.jit
def turned(x, other, cos, sin, d, HALF: tl.constexpr):
    """Numbers `d` of a head and those they turn with: the first half of those that turn, then the second."""
    sign = tl.where(d < HALF, -1.0, 1.0)
    return tl.where(d < 2 * HALF, x * cos + sign * other * sin, x)


@triton.jit
def ready(
    X, rows, d, mask, position, WEIGHT, ROTATIONS, epsilon, K: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr
):  # fmt: skip
    """Heads X + rows [M, K] normed, then turned; rounded to their type after each. As float32."""
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
        x = turned(x, other, cos[None, :], sin[None, :], d[None, :], HALF).to(dtype).to(tl.float32)
    return x


# Rows of a batch begin at any place of FIRST, LAST and UNIFORM: by their alignment, kernels would be compiled twice.
@triton.jit(do_not_specialize=["last_step", "num_positions"], do_not_specialize_on_alignment=["FIRST", "LAST"])
def attend_kernel(
    Q, NEW_K, NEW_V, KEYS, VALUES, WHERE, FIRST, LAST, OUT, ROTATIONS, Q_NORM, K_NORM, PARTS, SUMS, ARRIVED,
    q_row, k_row, v_row, memory_row, memory_head, last_step, num_positions, scale, epsilon,
    G: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, MIN_CHUNK: tl.constexpr,
    HAS_NEW: tl.constexpr, HAS_TABLE: tl.constexpr, HAS_Q_NORM: tl.constexpr, HAS_K_NORM: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
):  # fmt: skip
    """One head of keys and values of a row, or a part of its columns: the queries that share it read them once.

    The part with the row's last column stores the new key and value, and attends to them from registers. The part that
    ends last adds up the results of all, in their order.
    """
    g, b, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    first, last = tl.load(FIRST + b), tl.load(LAST + b * last_step)
    live, start, end = 1, first, last + 1
    if SPLITS > 1:
        chunk = tl.maximum(tl.cdiv(tl.cdiv(last + 1 - first, SPLITS), BLOCK) * BLOCK, MIN_CHUNK)
        live = tl.cdiv(last + 1 - first, chunk).to(tl.int32)
        start = first + part * chunk
        end = tl.minimum(start + chunk, last + 1)
    if part < live:
        keys, values = KEYS, VALUES
        if HAS_TABLE:  # multiples of 16, so that 16 bytes are loaded at once
            keys += tl.multiple_of(tl.load(WHERE), 16)
            values += tl.multiple_of(tl.load(WHERE + 1), 16)
            row = b * tl.multiple_of(tl.load(WHERE + 2), 16) + g * tl.multiple_of(tl.load(WHERE + 3), 16)
        else:
            row = b * memory_row + g * memory_head.to(tl.int64)
        keys += row
        values += row
        d, m = tl.arange(0, KP), tl.arange(0, M)
        is_in = d < K
        position = tl.minimum(last - first, num_positions - 1)
        q_mask = (m[:, None] < GROUP) & is_in[None, :]
        q_rows = b * q_row + g * GROUP * K + m[:, None] * K
        q = ready(Q, q_rows, d, q_mask, position, Q_NORM, ROTATIONS, epsilon, K, HALF, HAS_Q_NORM)  # [M, K]
        best = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        made = tl.zeros([M, KP], tl.float32)
        stored = end
        if HAS_NEW:
            one = tl.arange(0, 1)
            rows, row_mask = b * k_row + g * K + one[:, None], is_in[None, :]
            new = ready(NEW_K, rows, d, row_mask, position, K_NORM, ROTATIONS, epsilon, K, HALF, HAS_K_NORM)  # [1, K]
            new_v = tl.load(NEW_V + b * v_row + g * K + d, mask=is_in, other=0.0)
            has_last = end == last + 1
            stores = is_in & has_last
            tl.store(keys + last * K + d[None, :], new.to(KEYS.dtype.element_ty), mask=stores[None, :])
            tl.store(values + last * K + d, new_v, mask=stores)
            stored = tl.minimum(end, last)
            its_score = tl.sum(q * new, 1) * (scale * LOG2_E)
            best = tl.where(has_last, its_score, best)
            total = tl.where(has_last, total + 1.0, total)
            made = tl.where(has_last, made + new_v.to(tl.float32)[None, :], made)
        for at in range(start, stored, BLOCK):
            columns = at + tl.arange(0, BLOCK)
            sees = columns < stored
            place = columns[:, None] * K + d[None, :]
            k = tl.load(keys + place, mask=sees[:, None] & is_in[None, :], other=0.0)  # [BLOCK, K]
            v = tl.load(values + place, mask=sees[:, None] & is_in[None, :], other=0.0)
            if M == 1:
                score = tl.sum(k.to(tl.float32) * q, 1)[None, :]
            elif IN_FLOAT32:
                score = tl.dot(q, tl.trans(k.to(tl.float32)), input_precision="ieee")
            else:
                score = tl.dot(q.to(k.dtype), tl.trans(k), input_precision="ieee")
            score = tl.where(sees[None, :], score * (scale * LOG2_E), float("-inf"))  # [M, BLOCK]
            better = tl.maximum(best, tl.max(score, 1))
            p = tl.exp2(score - better[:, None])
            shrink = tl.exp2(best - better)
            total = total * shrink + tl.sum(p, 1)
            if M == 1:
                p = tl.reshape(p, [BLOCK, 1])
                made = made * shrink[:, None] + tl.sum(p * v.to(tl.float32), 0)[None, :]
            elif IN_FLOAT32:
                p = p.to(v.dtype).to(tl.float32)
                made = made * shrink[:, None] + tl.dot(p, v.to(tl.float32), input_precision="ieee")
            else:
                made = made * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
            best = better
        out = OUT + b * (G * GROUP * K) + g * GROUP * K + m[:, None] * K + d[None, :]
        if SPLITS == 1:
            tl.store(out, (made / total[:, None]).to(OUT.dtype.element_ty), mask=q_mask)
        else:
            slot = (b * G + g) * SPLITS
            row = (slot + part) * GROUP + m
            tl.store(PARTS + row[:, None] * K + d[None, :], made, mask=q_mask)
            tl.store(SUMS + row * 2, best, mask=m < GROUP)
            tl.store(SUMS + row * 2 + 1, total, mask=m < GROUP)
            tl.debug_barrier()  # all of this part is written before it counts as arrived
            if tl.atomic_add(ARRIVED + b * G + g, 1, sem="acq_rel") == live - 1:
                tl.store(ARRIVED + b * G + g, 0)  # for the next call
                best = tl.full([M], float("-inf"), tl.float32)
                total = tl.zeros([M], tl.float32)
                made = tl.zeros([M, KP], tl.float32)
                for other in range(live):
                    row = (slot + other) * GROUP + m
                    its_best = tl.load(SUMS + row * 2, mask=m < GROUP, other=0.0, cache_modifier=".cg")
                    its_total = tl.load(SUMS + row * 2 + 1, mask=m < GROUP, other=1.0, cache_modifier=".cg")
                    its = tl.load(PARTS + row[:, None] * K + d[None, :], mask=q_mask, other=0.0, cache_modifier=".cg")
                    better = tl.maximum(best, its_best)
                    shrink, its_shrink = tl.exp2(best - better), tl.exp2(its_best - better)
                    total = total * shrink + its_total * its_shrink
                    made = made * shrink[:, None] + its * its_shrink[:, None]
                    best = better
                tl.store(out, (made / total[:, None]).to(OUT.dtype.element_ty), mask=q_mask)


@triton.jit
def add_norm_kernel(
    STATES, ADDED, ADDED_BIAS, WEIGHT, BIAS, OUT, row, added_row, out_row, epsilon,
    D: tl.constexpr, BLOCK: tl.constexpr, HAS_ADDED: tl.constexpr, HAS_ADDED_BIAS: tl.constexpr,
    STORES_SUM: tl.constexpr, NORM: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One row: states + (added + its bias), rounded; its norm in float32, from what was rounded."""
    b, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    is_in = d < D
    x = tl.load(STATES + b * row + d, mask=is_in, other=0.0)
    dtype = x.dtype
    if HAS_ADDED:
        added = tl.load(ADDED + b * added_row + d, mask=is_in, other=0.0).to(tl.float32)
        if HAS_ADDED_BIAS:  # rounded, as a product with its bias is
            added = (added + tl.load(ADDED_BIAS + d, mask=is_in, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
        x = (x.to(tl.float32) + added).to(dtype)
    if STORES_SUM:
        tl.store(STATES + b * row + d, x, mask=is_in)
    if NORM != "none":
        x = x.to(tl.float32)
        if NORM == "layer":
            x = tl.where(is_in, x - tl.sum(x, 0) / D, 0.0)
        x = x * tl.rsqrt(tl.sum(x * x, 0) / D + epsilon)
        if HAS_WEIGHT:
            x = x * tl.load(WEIGHT + d, mask=is_in, other=0.0).to(tl.float32)
        if HAS_BIAS:
            x = x + tl.load(BIAS + d, mask=is_in, other=0.0).to(tl.float32)
        tl.store(OUT + b * out_row + d, x.to(dtype), mask=is_in)


@triton.jit
def gate_kernel(Y, OUT, row, F, BLOCK: tl.constexpr):
    """silu(gate) * other of [gate; other], the first rounded as torch's operator does."""
    b, f = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_in = f < F
    gate = tl.load(Y + b * row + f, mask=is_in, other=0.0)
    other = tl.load(Y + b * row + F + f, mask=is_in, other=0.0).to(tl.float32)
    x = gate.to(tl.float32)
    x = (x / (1.0 + tl.exp(-x))).to(gate.dtype).to(tl.float32)
    tl.store(OUT + b * F + f, (x * other).to(gate.dtype), mask=is_in)


@triton.jit
def likeliest(ROW, V, BLOCK: tl.constexpr):
    """The largest of ROW [V] and its lowest place. What is no number counts as infinite, as torch has it."""
    at = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    for start in range(0, V, BLOCK):
        x = tl.load(ROW + start + at, mask=start + at < V, other=float("-inf")).to(tl.float32)
        x = tl.where(x != x, float("inf"), x)
        where = tl.where(x > best, start + at, where)
        best = tl.maximum(best, x)
    largest = tl.max(best, 0)
    return largest, tl.min(tl.where(best == largest, where, 2147483647), 0)


@triton.jit
def argmax_kernel(LOGITS, OUT, row, V, BLOCK: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    _, where = likeliest(LOGITS + b * row, V, BLOCK)
    # lanes without a number of the row hold -inf at place 0, which is right where all are
    tl.store(OUT + b, where.to(tl.int64))


@triton.jit
def scaled(ROW, at, V, largest, temperature):
    """(logit - largest) / temperature, rounded as torch does; -inf behind the end."""
    x = tl.load(ROW + at, mask=at < V, other=float("-inf")).to(tl.float32)
    return tl.div_rn(x - largest, temperature)


@triton.jit
def key_of(x):
    """x <= 0 -> int32 that rises as x falls, equal where x is."""
    return tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def searched(ROW, V, largest, temperature, most_key, wanted, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The lowest key whose numbers, with those of lower keys, reach `wanted`: a count, or a mass (sum of exp). At most
    `most_key`, and the key of some number.

    Gives back the key, the count or mass of lower keys, and the count at the key. Eight passes of four bits each.
    """
    at, bins = tl.arange(0, BLOCK), tl.arange(0, 16)
    key, before, here, shift = 0, wanted * 0, 0, 28
    while shift >= 0:
        counts = tl.zeros([BLOCK, 16], tl.int32)
        masses = tl.zeros([BLOCK, 16], tl.float32)
        for start in range(0, V, BLOCK):
            x = scaled(ROW, start + at, V, largest, temperature)
            own = key_of(x)
            digit = (own ^ key) >> shift  # at least 16 where a higher digit is another
            hit = ((start + at < V) & (own <= most_key))[:, None] & (digit[:, None] == bins[None, :])
            counts += hit.to(tl.int32)
            if BY_MASS:
                masses += tl.where(hit, tl.exp(x)[:, None], 0.0)
        in_bin = tl.sum(counts, 0)  # [16]
        if BY_MASS:
            size = tl.sum(masses, 0)
        else:
            size = in_bin
        reached = (before + tl.cumsum(size, 0) >= wanted) & (in_bin > 0)
        chosen = tl.min(tl.where(reached, bins, 16), 0)
        chosen = tl.where(chosen == 16, tl.max(tl.where(in_bin > 0, bins, 0), 0), chosen)
        before += tl.sum(tl.where(bins < chosen, size, 0), 0)
        here = tl.sum(tl.where(bins == chosen, in_bin, 0), 0)
        key = key | (chosen << shift)
        shift -= 4
    return key, before, here


@triton.jit
def kept(ROW, at, V, largest, temperature, key, ties, seen):
    """Weights of the tokens `at`, 0 for those left out: higher keys, and all but the first `ties` of this key. `seen`:
    of these, before `at`; gives back those before the next ones, too."""
    x = scaled(ROW, at, V, largest, temperature)
    own = key_of(x)
    is_tie = (own == key) & (at < V)
    rank = seen + tl.cumsum(is_tie.to(tl.int32), 0)
    keeps = (at < V) & ((own < key) | (is_tie & (rank <= ties)))
    return tl.where(keeps, tl.exp(x), 0.0), seen + tl.sum(is_tie.to(tl.int32), 0)


@triton.jit(do_not_specialize=["uniform_row"], do_not_specialize_on_alignment=["UNIFORM"])
def draw_kernel(
    LOGITS, TEMPERATURE, TOP_K, TOP_P, UNIFORM, OUT, row, uniform_row, V, BLOCK: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """One row: where the sorted row would be cut is found by counting, then one number draws by token id."""
    b = tl.program_id(0).to(tl.int64)
    ROW = LOGITS + b * row
    largest, where = likeliest(ROW, V, WIDE)
    temperature = tl.load(TEMPERATURE + b)
    if temperature == 0:
        tl.store(OUT + b, where.to(tl.int64))
    else:
        at = tl.arange(0, WIDE)
        top_k, top_p = tl.minimum(tl.load(TOP_K + b), V).to(tl.int32), tl.load(TOP_P + b)
        key, ties = 2147483647, V  # kept: numbers of lower keys, and as many of this key, the lowest ids first
        if top_k < V:
            key, below, _here = searched(ROW, V, largest, temperature, key, top_k, False, BLOCK)
            ties = top_k - below
        if top_p < 1:
            mass, seen = 0.0, 0
            for start in range(0, V, WIDE):
                weight, seen = kept(ROW, start + at, V, largest, temperature, key, ties, seen)
                mass += tl.sum(weight, 0)
            wanted = top_p * mass
            found, lighter, here = searched(ROW, V, largest, temperature, key, wanted, True, BLOCK)
            # a number stays while those before it weigh less than `wanted`; the first always does
            weight_of_one = tl.maximum(tl.exp(-(found.to(tl.float32, bitcast=True))), 1e-37)
            room = tl.minimum(tl.maximum(tl.ceil(tl.div_rn(wanted - lighter, weight_of_one)), 1.0), here.to(tl.float32))
            ties = tl.where(found == key, tl.minimum(room.to(tl.int32), ties), room.to(tl.int32))
            key = found
        # the sum of all, then the first token at which the sum passes the uniform's share of it
        whole, seen = tl.full([], 0.0, tl.float64), 0
        for start in range(0, V, WIDE):
            weight, seen = kept(ROW, start + at, V, largest, temperature, key, ties, seen)
            whole += tl.sum(weight, 0).to(tl.float64)
        share = tl.load(UNIFORM + b * uniform_row).to(tl.float64) * whole
        before, seen, token, fallback, start = tl.full([], 0.0, tl.float64), 0, V, 0, 0
        while (start < V) & (token == V):
            weight, seen = kept(ROW, start + at, V, largest, temperature, key, ties, seen)
            passes = (before + tl.cumsum(weight, 0).to(tl.float64) > share) & (weight > 0)
            token = tl.min(tl.where(passes, start + at, V), 0)
            fallback = tl.maximum(fallback, tl.max(tl.where(weight > 0, start + at, 0), 0))
            before += tl.sum(weight, 0).to(tl.float64)
            start += WIDE
        tl.store(OUT + b, tl.where(token == V, fallback, token).to(tl.int64))
