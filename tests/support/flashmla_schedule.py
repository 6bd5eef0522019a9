"""FlashMLA's schedules in plain Python: planned one part after another, read, and judged."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_overlay.attention.flashmla_schedule import Layout

PAGE, OVERHEAD = 64, 5


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What one part does of one request: blocks ``begin`` to ``end``, as its piece ``number``.

    ``alone`` is whether the attention kernel takes it for the request's only piece, and so writes
    its result as the final one.
    """

    part: int
    request: int
    begin: int
    end: int
    number: int
    alone: bool


def read_schedule(schedule: list[list[int]], lengths: list[int], layout: Layout) -> list[Piece]:
    """Return the pieces as FlashMLA's attention kernels read them, part by part."""
    pieces = []
    for part, row in enumerate(schedule):
        if layout is Layout.FLAGS:
            first, last, begin, end, number = row[:5]
        else:
            first, begin, last, end, number = row[:5]
        if layout is Layout.SLOTS:
            begin, end = begin // PAGE, -(-end // PAGE)
        if not 0 <= first < len(lengths):
            continue
        for request in range(first, last + 1):
            size = -(-lengths[request] // PAGE)
            start = begin if request == first else 0
            stop = end if request == last else size
            if layout is not Layout.FLAGS:
                alone = start == 0 and stop == size
            elif request == first:
                alone = not row[5]
            else:
                alone = not row[6] if request == last else True
            pieces.append(
                Piece(
                    part=part,
                    request=request,
                    begin=start,
                    end=stop,
                    number=number if request == first else 0,
                    alone=alone,
                )
            )
    return pieces


def check_schedule(
    schedule: list[list[int]], splits: list[int], lengths: list[int], layout: Layout
) -> list[int]:
    """See that every block is done once and every result is found; return each part's cost.

    A part costs its blocks and OVERHEAD for each of its pieces.
    """
    pieces = read_schedule(schedule, lengths, layout)
    assert len(splits) == len(lengths) + 1
    assert splits[0] == 0
    for request, length in enumerate(lengths):
        own = [piece for piece in pieces if piece.request == request]
        # In the order of the parts: one after another, from the first block to the last.
        assert [piece.begin for piece in own] == [0] + [piece.end for piece in own[:-1]], request
        assert own[-1].end == -(-length // PAGE), request
        assert length == 0 or all(piece.begin < piece.end for piece in own), request
        assert [piece.number for piece in own] == list(range(len(own))), request
        assert [piece.alone for piece in own] == [len(own) == 1] * len(own), request
        assert len({piece.part for piece in own}) == len(own), request
        assert splits[request + 1] - splits[request] == len(own), request
    # What the attention kernel allocates for partial results.
    assert splits[-1] <= len(lengths) + len(schedule)
    costs = [0] * len(schedule)
    for piece in pieces:
        costs[piece.part] += piece.end - piece.begin + OVERHEAD
    return costs


def fair_share(lengths: list[int], parts: int, layout: Layout) -> int:
    """Return the mean cost of a part, rounded up, were no request cut."""
    return -(-sum(_counted(length, layout) + OVERHEAD for length in lengths) // parts)


def serial_plan(
    lengths: list[int], parts: int, layout: Layout
) -> tuple[list[list[int]], list[int]]:
    """Return schedule and splits as FlashMLA's op plans them: greedily, a part at a time.

    A part has room for a share and the overhead of one piece. It takes what is left of a request if
    that fits, else as many blocks as fit, if any. Idle parts are [requests, 0, …].
    """
    room = fair_share(lengths, parts, layout) + OVERHEAD
    request = block = number = 0
    schedule, counts = [], [0] * len(lengths)
    for _ in range(parts):
        if request == len(lengths):
            schedule.append([request] + [0] * 7)
            continue
        begin = request, block, number
        left = room
        last, stop = request, block
        while request < len(lengths):
            missing = _counted(lengths[request], layout) - block
            if left >= missing + OVERHEAD:
                left -= missing + OVERHEAD
                last, stop = request, -(-lengths[request] // PAGE)
                counts[request] = number + 1
                request, block, number = request + 1, 0, 0
            else:
                if left > OVERHEAD:
                    block += left - OVERHEAD
                    number += 1
                    last, stop = request, block
                break
        schedule.append(_row(begin, last, stop, block > 0, lengths[last], layout))
    assert request == len(lengths)
    splits = [sum(counts[:index]) for index in range(len(lengths) + 1)]
    return schedule, splits


def _row(
    begin: tuple[int, int, int], last: int, stop: int, cut: bool, length: int, layout: Layout
) -> list[int]:
    first, block, number = begin
    if layout is Layout.SLOTS:
        return [first, block * PAGE, last, stop * PAGE if cut else length, number, 0, 0, 0]
    if layout is Layout.BLOCKS:
        return [first, block, last, stop, number, 0, 0, 0]
    one = first == last
    first_split = block > 0 or (one and cut)
    last_split = cut or (one and block > 0)
    return [first, last, block, stop, number, int(first_split), int(last_split), 0]


def _counted(length: int, layout: Layout) -> int:
    return max(-(-length // PAGE), 0 if layout is Layout.SLOTS else 1)
