"""Compile the grouped-query kernels for a GPU that is not there, as `gpu_compile` does.

``python -m tests.support.grouped_compile 120 '[{"query": 32, "kv": 8, ..., "nodes": 16}]'``
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from sglang_overlay.attention.grouped import TREE_ROWS, Heads, choose_tiles, tree_tile
from sglang_overlay.attention.kernels.grouped import grouped_prefix_kernel, grouped_tree_kernel
from triton.runtime.driver import driver
from triton.runtime.jit import MockTensor

from tests.support.gpu_compile import NamedDriver, resources


def compile_grouped(*, nodes: int, page: int = 1, **shape: int) -> list[dict[str, int]]:
    """Compile both kernels for bf16 and heads of this shape; return what each needs."""
    heads = Heads(**shape)
    tiles = choose_tiles(heads, nodes)
    row, float32 = MockTensor(torch.bfloat16), MockTensor(torch.float32)
    int32, int64 = MockTensor(torch.int32), MockTensor(torch.int64)
    key_row, value_row = heads.kv * heads.key_dim, heads.kv * heads.value_dim
    strides = [
        heads.query * heads.key_dim,
        heads.key_dim,
        key_row,
        heads.key_dim,
        value_row,
        heads.value_dim,
    ]
    common: dict[str, Any] = {
        "NODES": nodes,
        "HEADS": heads.query,
        "GROUP": heads.group,
        "KEY_DIM": heads.key_dim,
        "VALUE_DIM": heads.value_dim,
        "KEY_COLUMNS": heads.key_columns,
        "VALUE_COLUMNS": heads.value_columns,
        "grid": (1,),
    }
    words = -(-nodes // 64)
    prefix = grouped_prefix_kernel.warmup(
        *(row, row, row, int32, int32, int32, float32, float32, 0.1),
        *strides,
        1000,
        PAGE=page,
        ROWS=tiles.rows,
        TILE=tiles.tile,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **common,
    )
    tree = grouped_tree_kernel.warmup(
        *(row, row, row, int64, int32, int32, float32, float32, int32, row, 0.1),
        *strides,
        2 * nodes * words,
        heads.query * heads.value_dim,
        heads.value_dim,
        HALF_WORDS=2 * words,
        ROWS=TREE_ROWS,
        TILE=tree_tile(nodes),
        num_warps=4,
        **common,
    )
    return [
        resources(made.result() if hasattr(made, "result") else made) for made in (prefix, tree)
    ]


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") != "1", "the interpreter compiles nothing"
    driver.set_active(NamedDriver(int(sys.argv[1])))
    print(json.dumps([compile_grouped(**case) for case in json.loads(sys.argv[2])]))
