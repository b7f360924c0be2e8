"""Triton kernels that choose tokens: argmax, and a draw after temperature, top-k and top-p that needs no sort.

`triton_kernels` launches them. B rows, V vocabulary. Names in capitals are pointers, and constants at compile time.
"""

import triton
import triton.language as tl


@triton.jit
def argmax(ROW, V, BLOCK: tl.constexpr):
    """The largest value of ROW [V] and its lowest index, which is -1 (NO_TOKEN) where one is NaN or +inf."""
    at = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    for start in range(0, V, BLOCK):
        x = tl.load(ROW + start + at, mask=start + at < V, other=float("-inf")).to(tl.float32)
        x = tl.where(x != x, float("inf"), x)
        where = tl.where(x > best, start + at, where)
        best = tl.maximum(best, x)
    largest = tl.max(best, 0)
    found = tl.min(tl.where(best == largest, where, 2147483647), 0)
    return largest, tl.where(largest == float("inf"), -1, found)


@triton.jit
def argmax_kernel(LOGITS, OUT, row, V, BLOCK: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    _, where = argmax(LOGITS + b * row, V, BLOCK)
    # lanes past the row hold -inf at index 0, which is right where the whole row is -inf
    tl.store(OUT + b, where.to(tl.int64))


@triton.jit
def scaled(ROW, at, V, largest, temperature):
    """(logit - largest) / temperature, rounded as by torch; -inf past the end."""
    x = tl.load(ROW + at, mask=at < V, other=float("-inf")).to(tl.float32)
    return tl.div_rn(x - largest, temperature)


@triton.jit
def key_of(x):
    """Maps x <= 0 to an int32 that rises as x falls; equal values have equal keys."""
    return tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def searched(ROW, V, largest, temperature, most_key, wanted, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The lowest key at which the logits with this or a lower key reach `wanted`, a count or a mass (sum of exp). It is
    at most `most_key`, and some logit has it.

    Returns the key, the count or mass of lower keys, and the count at the key. Eight passes of four bits each.
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
    """Weights of the tokens `at`: 0 for higher keys, and for all but the first `ties` tokens with exactly this key.
    `seen`: how many of the latter come before `at`; returned for the next tokens, too."""
    x = scaled(ROW, at, V, largest, temperature)
    own = key_of(x)
    is_tie = (own == key) & (at < V)
    rank = seen + tl.cumsum(is_tie.to(tl.int32), 0)
    keeps = (at < V) & ((own < key) | (is_tie & (rank <= ties)))
    return tl.where(keeps, tl.exp(x), 0.0), seen + tl.sum(is_tie.to(tl.int32), 0)


# A batch may begin anywhere in UNIFORM; specialised on its alignment, the kernel would be compiled twice.
@triton.jit(do_not_specialize=["uniform_row"], do_not_specialize_on_alignment=["UNIFORM"])
def draw_kernel(
    LOGITS, TEMPERATURE, TOP_K, TOP_P, UNIFORM, OUT, row, uniform_row, V, BLOCK: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """One row. Where top-k and top-p would cut the sorted row is found by counting; one uniform number then draws by
    token id."""
    b = tl.program_id(0).to(tl.int64)
    ROW = LOGITS + b * row
    largest, where = argmax(ROW, V, WIDE)
    temperature = tl.load(TEMPERATURE + b)
    if (temperature == 0) | (where < 0):
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
