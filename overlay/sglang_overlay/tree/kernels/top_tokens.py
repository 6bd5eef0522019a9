"""Kernels that find the best tokens of a row of logits, and its log-sum-exp.

Both write ``top`` rows as `marginals` exchanges them, [k + 1] int64: k keys, descending, then the
bits of the float32 log-sum-exp. A key is ordered as (logit, then the smaller token) is: the upper
half is the float32 logit's bits, ordered, the lower one 2³² − 1 − token. No two keys are equal, so
no order of a sort shows.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import triton
import triton.language as tl

# Stands for no token: below every key.
NOTHING = tl.constexpr(-(1 << 63))
TOKEN_MASK = tl.constexpr((1 << 32) - 1)
_NOTHING_32 = tl.constexpr(-(1 << 31))


@triton.jit
def _merged(best, keys):
    """Return the largest of two lists [K], both descending."""
    return tl.sort(tl.maximum(best, tl.flip(keys, 0)), descending=True)


@triton.jit
def _added(most, total, values):
    """Return the largest value and the sum of exponentials relative to it, with ``values``."""
    highest = tl.maximum(most, tl.max(values))
    # Relative to a finite number: −inf less −inf would be NaN.
    base = tl.where(highest == -float("inf"), 0.0, highest)
    return highest, total * tl.exp(most - base) + tl.sum(tl.exp(values - base))


@triton.jit
def _log_sum_exp(most, total):
    # Of nothing it is −inf, and NaN where a value is NaN or the largest infinite.
    return tl.where(most == -float("inf"), 0.0, most) + tl.log(total)


@triton.jit
def _store(top, keys, normaliser, k, K: tl.constexpr):
    column = tl.arange(0, K)
    tl.store(top + column, keys, mask=column < k)
    tl.store(top + k, normaliser.to(tl.int32, bitcast=True).to(tl.int64))


# Not specialised: neither a vocabulary nor a batch must compile anew.
@triton.jit(do_not_specialize=["vocabulary", "token", "chunks", "rows", "piece"])
def top_tokens_kernel(
    logits,
    top,
    row_stride,
    vocabulary,
    token,
    chunks,
    rows,
    piece,
    k,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write ``top`` [pieces, rows, k + 1] from ``piece`` on; the grid is (rows, own pieces).

    ``logits`` [rows, vocabulary] are of the tokens from ``token`` on; a piece is ``chunks`` times
    CHUNK of them. K, a power of two, is at least ``k`` and at most CHUNK, which is at most 2¹⁶.
    """
    row, own = tl.program_id(0), tl.program_id(1)
    place = tl.arange(0, CHUNK)
    best = tl.full([K], NOTHING, tl.int64)
    most = -float("inf")
    total = 0.0
    logits += row.to(tl.int64) * row_stride
    for chunk in range(own * chunks, (own + 1) * chunks):
        first = chunk * CHUNK
        present = first + place < vocabulary
        given = tl.load(logits + first + place, mask=present, other=float("-inf"))
        value = given.to(tl.float32)
        most, total = _added(most, total, value)
        # −0 and +0 are equal, and so must their bits be.
        bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
        ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        if logits.dtype.element_ty == tl.bfloat16:
            # The lower half of the bits tells nothing: the place goes there, in half the width.
            short = (ordered & -0x10000) | (0xFFFF - place)
            short = tl.topk(tl.where(present, short, _NOTHING_32), K)
            upper = short & -0x10000
            upper = tl.where(short < 0, upper | 0xFFFF, upper)
            where = 0xFFFF - (short & 0xFFFF)
            keys = (upper.to(tl.int64) << 32) | (TOKEN_MASK - (token + first + where).to(tl.int64))
            keys = tl.where(short == _NOTHING_32, NOTHING, keys)
        else:
            keys = (ordered.to(tl.int64) << 32) | (
                TOKEN_MASK - (token + first + place).to(tl.int64)
            )
            keys = tl.topk(tl.where(present, keys, NOTHING), K)
        best = _merged(best, keys)
    target = ((piece + own).to(tl.int64) * rows + row) * (k + 1)
    _store(top + target, best, _log_sum_exp(most, total), k, K)


@triton.jit(do_not_specialize=["pieces", "rows"])
def merge_tokens_kernel(
    tops,
    top,
    log_probs,
    candidates,
    pieces,
    rows,
    k,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    FINISH: tl.constexpr,
):
    """Merge ``tops`` [pieces, rows, k + 1]; the grid is (rows,).

    The result goes to ``top`` [rows, k + 1]; with FINISH to ``log_probs`` [rows, k] float32 and
    ``candidates`` [rows, k] int64 in its place: −inf and token 0 where there is nothing, and
    everywhere if the log-sum-exp is not finite. BLOCK keys are sorted at a time, at least 2 × K.
    """
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK) % K
    place = tl.arange(0, BLOCK) // K
    alone = tl.arange(0, BLOCK // K)
    best = tl.full([K], NOTHING, tl.int64)
    most = -float("inf")
    total = 0.0
    for start in range(0, pieces, BLOCK // K):
        piece = start + place
        inside = (piece < pieces) & (column < k)
        source = tops + (piece.to(tl.int64) * rows + row) * (k + 1) + column
        best = _merged(best, tl.topk(tl.load(source, mask=inside, other=NOTHING), K))
        piece = start + alone
        source = tops + (piece.to(tl.int64) * rows + row) * (k + 1) + k
        bits = tl.load(source, mask=piece < pieces, other=0).to(tl.int32)
        sums = tl.where(piece < pieces, bits.to(tl.float32, bitcast=True), -float("inf"))
        most, total = _added(most, total, sums)
    normaliser = _log_sum_exp(most, total)
    if FINISH:
        ordered = (best >> 32).to(tl.int32)
        bits = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
        logit = bits.to(tl.float32, bitcast=True)
        value = logit - normaliser
        # Neither is NaN or infinite.
        known = value - value == 0.0
        target = row.to(tl.int64) * k + tl.arange(0, K)
        written = tl.arange(0, K) < k
        tl.store(log_probs + target, tl.where(known, value, -float("inf")), mask=written)
        token = tl.where(known, TOKEN_MASK - (best & TOKEN_MASK), 0)
        tl.store(candidates + target, token, mask=written)
    else:
        _store(top + row.to(tl.int64) * (k + 1), best, normaliser, k, K)
