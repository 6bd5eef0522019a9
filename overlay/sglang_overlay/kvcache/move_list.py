"""The rules of a list of moves, for devices whose lists can be read without waiting for them."""

from __future__ import annotations

from collections.abc import Sequence

# Rows of a group that one program of the overlap-safe kernel holds at once.
PATH_LIMIT = 256

Pair = tuple[int, int]  # target, source


def check_moves(groups: Sequence[Sequence[Pair]], slots: int, *, overlap: bool) -> None:
    """Refuse what `mover.move_rows` does not define; a pair with a negative slot is skipped.

    Raises:
        ValueError: a slot is not below ``slots``, a target is repeated, or a pair reads what
            another writes where that is not allowed.

    """
    # Where a row is written: group and block of the overlap-safe kernel.
    writers: dict[int, tuple[int, int]] = {}
    staying = set()
    moves = [
        (group, place // PATH_LIMIT, target, source)
        for group, pairs in enumerate(groups)
        for place, (target, source) in enumerate(pairs)
        if target >= 0 and source >= 0
    ]
    for group, block, target, source in moves:
        if max(target, source) >= slots:
            raise ValueError(
                f"targets, sources: got the pair {target}, {source}, needed slots below {slots}; "
                "pass slots of this pool"
            )
        if target in writers or target in staying:
            raise ValueError(f"targets: got {target} twice, needed distinct slots; drop one pair")
        if target == source:
            staying.add(target)
        else:
            writers[target] = group, block
    for group, block, target, source in moves:
        if target == source or source not in writers:
            continue
        writing_group, writing_block = writers[source]
        if not (overlap and writing_group == group and writing_block >= block):
            raise ValueError(
                f"sources: got {source} for target {target}, which another pair writes; "
                + _allowed(overlap)
            )


def _allowed(overlap: bool) -> str:
    if not overlap:
        return "needed sources that are no targets; pass overlap=True"
    return (
        f"needed the writing pair in the same group and not in an earlier block of {PATH_LIMIT}; "
        "move such rows in two calls"
    )
