"""Move cache rows to other slots, in all layers of a pool by one launch and without a copy aside.

Two modes, because a target may be another pair's source. *Disjoint*: it never is; rows are split
over programs freely. *Overlap-safe*: it may be, within a group of pairs, such as a request's
accepted path that moves to the front of its draft slots; a program then has some columns of the
whole group to itself and loads all its rows before it stores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from sglang_overlay.kvcache.kernels.move_rows import move_disjoint_kernel, move_overlapping_kernel
from sglang_overlay.kvcache.move_list import PATH_LIMIT, check_moves
from sglang_overlay.kvcache.rows import VECTOR_BYTES, RowBuffers


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Launch shape: ``rows`` of ``vectors`` 16-byte vectors per program, ``warps`` to copy them."""

    rows: int
    vectors: int
    warps: int


def disjoint_tiles(vectors: int) -> Tiles:
    """Return the shape for rows of ``vectors`` vectors, each copied whole."""
    return Tiles(rows=max(1, 1024 // vectors), vectors=vectors, warps=4)


def overlapping_tiles(vectors: int, pairs: int) -> Tiles:
    """Return the shape for groups of ``pairs``: few shapes, so that few kernels are compiled."""
    rows = next((size for size in (8, 32) if pairs <= size), PATH_LIMIT)
    tiles = -(-vectors // (2048 // rows))
    return Tiles(rows=rows, vectors=-(-vectors // tiles), warps=4 if rows <= 32 else 8)


def move_rows(
    buffers: RowBuffers,
    targets: torch.Tensor,
    sources: torch.Tensor,
    *,
    overlap: bool = False,
    tiles: Tiles | None = None,
) -> None:
    """Copy row ``sources[i]`` to row ``targets[i]`` in every buffer; no synchronisation.

    ``targets`` and ``sources`` [pairs] or [groups, pairs], int32 or int64. A pair with a negative
    slot is skipped, so that padded paths can be passed as they are. Targets must be distinct.

    Without ``overlap`` no target may be a source, but for a pair that stays where it is. With it,
    each group is moved as if all its rows were read before any is written, up to `PATH_LIMIT`
    pairs; a longer group goes by blocks of that many in the order of pairs, and then a target may
    not be a source of a later block (a path that moves to the front never asks for that). Slots of
    one group must not be in another.

    On a GPU none of this can be checked without a synchronisation: a wrong list gives wrong rows.
    On a CPU it is checked.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit; on a CPU also slots that break
            the rules above or that no buffer has.

    """
    _check(buffers, targets, sources)
    if targets.numel() == 0:
        return
    if targets.device.type == "cpu":
        _move_on_cpu(buffers, targets, sources, overlap=overlap)
    elif overlap:
        launch_overlapping(buffers, targets, sources, tiles)
    else:
        launch_disjoint(buffers, targets, sources, tiles)


def launch_disjoint(
    buffers: RowBuffers, targets: torch.Tensor, sources: torch.Tensor, tiles: Tiles | None = None
) -> None:
    """Launch the kernel for lists without overlap."""
    targets, sources = targets.reshape(-1), sources.reshape(-1)
    vectors = buffers.widest // VECTOR_BYTES
    tiles = tiles or disjoint_tiles(vectors)
    pairs = targets.shape[0]
    move_disjoint_kernel[(-(-pairs // tiles.rows), len(buffers.tensors))](
        buffers.pointers,
        buffers.row_bytes,
        targets,
        sources,
        pairs,
        ROWS=tiles.rows,
        TILE=vectors,
        LANES=triton.next_power_of_2(tiles.rows * vectors),
        num_warps=tiles.warps,
    )


def launch_overlapping(
    buffers: RowBuffers, targets: torch.Tensor, sources: torch.Tensor, tiles: Tiles | None = None
) -> None:
    """Launch the kernel for groups whose rows overlap."""
    targets, sources = torch.atleast_2d(targets), torch.atleast_2d(sources)
    groups, pairs = targets.shape
    vectors = buffers.widest // VECTOR_BYTES
    tiles = tiles or overlapping_tiles(vectors, pairs)
    move_overlapping_kernel[(groups, len(buffers.tensors), -(-vectors // tiles.vectors))](
        buffers.pointers,
        buffers.row_bytes,
        targets,
        sources,
        pairs,
        targets.stride(0),
        sources.stride(0),
        ROWS=tiles.rows,
        TILE=tiles.vectors,
        LANES=triton.next_power_of_2(tiles.rows * tiles.vectors),
        num_warps=tiles.warps,
    )


def _move_on_cpu(
    buffers: RowBuffers, targets: torch.Tensor, sources: torch.Tensor, *, overlap: bool
) -> None:
    pairs = torch.stack([torch.atleast_2d(targets), torch.atleast_2d(sources)], dim=2)
    slots = min(tensor.shape[0] for tensor in buffers.tensors)
    check_moves(pairs.tolist(), slots, overlap=overlap)
    kept = (targets >= 0) & (sources >= 0)
    to, origin = targets[kept].long(), sources[kept].long()
    for tensor in buffers.tensors:
        tensor[to] = tensor[origin]


def _check(buffers: RowBuffers, targets: torch.Tensor, sources: torch.Tensor) -> None:
    device = buffers.row_bytes.device
    for name, slots in (("targets", targets), ("sources", sources)):
        if slots.dtype not in (torch.int32, torch.int64) or slots.device != device:
            raise ValueError(
                f"{name}: got {slots.dtype} on {slots.device}, needed int32 or int64 on {device}, "
                "where the buffers are"
            )
        if slots.dim() not in (1, 2) or (slots.shape[-1] > 1 and slots.stride(-1) != 1):
            raise ValueError(
                f"{name}: got shape {tuple(slots.shape)} with strides {slots.stride()}, needed "
                "[pairs] or [groups, pairs] without gaps between pairs; pass .contiguous()"
            )
    if targets.shape != sources.shape:
        raise ValueError(
            f"targets, sources: got {tuple(targets.shape)} and {tuple(sources.shape)}, needed one "
            "shape; pass a source for each target"
        )
