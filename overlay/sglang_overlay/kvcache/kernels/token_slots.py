"""Kernel that says which slots the new tokens of requests get, once their new pages are known."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import triton
import triton.language as tl


@triton.jit
def _begin(before, end, request, exists):
    """Return how many tokens there were before: one less than at the ``end`` if nobody says."""
    if before is None:
        begin = end - 1
    else:
        begin = tl.load(before + request, mask=exists, other=0).to(tl.int64)
    return begin


# As for `place_units_kernel`: a compiled kernel fits all calls with arguments of the same types.
@triton.jit(do_not_specialize_on_alignment=["before", "after", "last", "pages", "out"])
def token_slots_kernel(
    before,
    after,
    last,
    pages,
    out,
    PAGE: tl.constexpr,
    REQUESTS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Write the slots of TOKENS tokens of a request; the grid is (requests, blocks of tokens).

    A request grows from ``before[request]`` tokens, or without ``before`` by one, to
    ``after[request]``. What is left of its page, behind slot ``last[request]``, is filled first.
    Of the earlier requests REQUESTS are looked at at once.
    """
    request = tl.program_id(0)
    tokens = tl.full([], 0, tl.int64)
    used = tl.full([], 0, tl.int64)
    for first in range(0, request, REQUESTS):
        earlier = first + tl.arange(0, REQUESTS)
        exists = earlier < request
        end = tl.load(after + earlier, mask=exists, other=0).to(tl.int64)
        begin = tl.where(exists, _begin(before, end, earlier, exists), end)
        tokens += tl.sum(end - begin, axis=0)
        used += tl.sum((end + PAGE - 1) // PAGE - (begin + PAGE - 1) // PAGE, axis=0)
    end = tl.load(after + request).to(tl.int64)
    begin = _begin(before, end, request, request >= 0)
    place = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    token = begin + place
    full = (begin + PAGE - 1) // PAGE
    is_new = token >= full * PAGE
    page = tl.load(pages + used + token // PAGE - full, mask=is_new & (token < end), other=0)
    behind = tl.load(last + request).to(tl.int64) + 1 + place
    slot = tl.where(is_new, page * PAGE + token % PAGE, behind)
    tl.store(out + tokens + place, slot, mask=token < end)
