"""Verify of grouped-query and multi-head attention: keys and values apart, in any page size.

The same split as for MLA (`adapter`), with the same plan and the same shares of work (`portable`):
the prefix in parts, unmasked, then the tree under its packed mask on top of the combined parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from sglang_overlay.attention.kernels.grouped import grouped_prefix_kernel, grouped_tree_kernel
from sglang_overlay.attention.parts import Parts, PartSizes
from sglang_overlay.attention.plan import VerifyPlan, VerifyStep
from sglang_overlay.attention.split_config import SplitConfig

MAX_DIM = 256
_LOG2_E = 1.4426950408889634
# The tree kernel: few rows, because the parts that it combines are held in registers; a tile of
# the tree is at most one 32-bit half of a mask word.
TREE_ROWS = 16
_TREE_TILE = 32


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The heads of one rank: ``query`` and ``kv`` counts, ``key_dim`` and ``value_dim`` widths."""

    query: int
    kv: int
    key_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        widest = max(self.key_dim, self.value_dim)
        if self.query % self.kv or widest > MAX_DIM:
            raise ValueError(
                f"heads: got {self}; needed a multiple of the KV heads, and at most {MAX_DIM} wide"
            )

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.query // self.kv

    @property
    def key_columns(self) -> int:
        """Key width in a kernel: a power of two, at least what a matrix product takes."""
        return int(max(16, triton.next_power_of_2(self.key_dim)))

    @property
    def value_columns(self) -> int:
        """Value width in a kernel."""
        return int(max(16, triton.next_power_of_2(self.value_dim)))


def choose_tiles(heads: Heads, nodes: int) -> SplitConfig:
    """Return the launch shape of the prefix kernel for ``heads`` and a tree of ``nodes``.

    Keys, values and queries of a step stay within 101,376 B of shared memory (sm_120) at every
    width up to 256.
    """
    wide = max(heads.key_columns, heads.value_columns) > 128
    most = 32 if wide else 64
    rows = max(16, min(most, triton.next_power_of_2(nodes * heads.group)))
    return SplitConfig(rows=rows, tile=32 if wide else 64, warps=4, stages=2, resident=2)


def tree_tile(nodes: int) -> int:
    """Return how many nodes the tree kernel walks at a time."""
    return int(max(16, min(_TREE_TILE, triton.next_power_of_2(nodes))))


class GroupedVerifier:
    """What `adapter.VerifyAdapter` is for MLA: prepare once per step, attend once per layer.

    ``tree_launches`` counts tree kernels issued by Python (once per captured call, not per replay).
    """

    def __init__(self, plan: VerifyPlan, heads: Heads) -> None:
        sizes = plan.sizes
        self.plan = plan
        self.heads = heads
        self.tree_launches = 0
        self.config = choose_tiles(heads, sizes.nodes)
        blocks = heads.kv * -(-sizes.nodes * heads.group // self.config.rows)
        self._parts = Parts(
            PartSizes(
                max_requests=sizes.max_requests,
                max_context=sizes.max_context,
                blocks=blocks,
                rows=sizes.nodes * heads.query,
                width=heads.value_columns,
            ),
            self.config,
            plan.page_table.device,
        )
        self._requests = 0

    def prepare(self, step: VerifyStep, heads: int) -> None:
        """Refill the plan and share out the work; no synchronisation, safe to capture."""
        self._requests = step.prefix_lens.shape[0]
        self.plan.fill(step)
        self._parts.plan(self.plan.planned_lengths[: self._requests])

    def attend(
        self,
        query: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
        *,
        softmax_scale: float,
    ) -> torch.Tensor:
        """Return attention over prefix ∪ ancestors, [tokens, heads, value_dim] in query's dtype.

        ``query`` [requests × nodes, heads, key_dim]; ``cache`` keys [slots, kv heads, key_dim] and
        values [slots, kv heads, value_dim] of this layer, in the query's dtype or fp8, the tree's
        rows already stored; ``slots`` [requests × nodes] their rows.

        Raises:
            ValueError: shapes or strides do not fit.
        """
        keys, values = cache
        self._check(query, keys, values, slots)
        heads, nodes, config = self.heads, self.plan.sizes.nodes, self.config
        out = query.new_empty(query.shape[0], heads.query, heads.value_dim)
        part_out, part_lse = self._parts.buffers()
        strides = (
            query.stride(0),
            query.stride(1),
            keys.stride(0),
            keys.stride(1),
            values.stride(0),
            values.stride(1),
        )
        shape = {
            "NODES": nodes,
            "HEADS": heads.query,
            "GROUP": heads.group,
            "KEY_DIM": heads.key_dim,
            "VALUE_DIM": heads.value_dim,
            "KEY_COLUMNS": heads.key_columns,
            "VALUE_COLUMNS": heads.value_columns,
        }
        rows = nodes * heads.group
        page_table = self.plan.page_table
        grouped_prefix_kernel[(-(-rows // config.rows), self._parts.workers, heads.kv)](
            query,
            keys,
            values,
            page_table,
            self.plan.planned_lengths,
            self._parts.work,
            part_out,
            part_lse,
            softmax_scale * _LOG2_E,
            *strides,
            page_table.stride(0),
            PAGE=self.plan.sizes.page_size,
            ROWS=config.rows,
            TILE=config.tile,
            num_warps=config.warps,
            num_stages=config.stages,
            **shape,
        )
        ancestors = self.plan.ancestors
        grouped_tree_kernel[(-(-rows // TREE_ROWS), self._requests, heads.kv)](
            query,
            keys,
            values,
            slots,
            ancestors.view(torch.int32),
            self.plan.lengths,
            part_out,
            part_lse,
            self._parts.first,
            out,
            softmax_scale * _LOG2_E,
            *strides,
            2 * ancestors.stride(0),
            out.stride(0),
            out.stride(1),
            HALF_WORDS=2 * ancestors.shape[2],
            ROWS=TREE_ROWS,
            TILE=tree_tile(nodes),
            num_warps=4,
            **shape,
        )
        self.tree_launches += 1
        return out

    def _check(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
    ) -> None:
        heads = self.heads
        tokens = self._requests * self.plan.sizes.nodes
        needed = {
            "query": (tuple(query.shape), (tokens, heads.query, heads.key_dim)),
            "keys": (tuple(keys.shape[1:]), (heads.kv, heads.key_dim)),
            "values": (tuple(values.shape[1:]), (heads.kv, heads.value_dim)),
            "slots": (tuple(slots.shape), (tokens,)),
        }
        for name, (got, want) in needed.items():
            if got != want:
                raise ValueError(f"{name}: got {got}, needed {want}; see attend's shapes")
        for name, tensor in (("query", query), ("keys", keys), ("values", values)):
            if tensor.stride(-1) != 1:
                raise ValueError(
                    f"{name}: got stride {tensor.stride(-1)} in the last dimension, needed 1; "
                    "pass a tensor whose rows are contiguous"
                )
