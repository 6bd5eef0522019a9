"""SGLang's masked verify kernel beside the oracle and the adapter, in a process with real SGLang.

``python stock_oracle.py RESULT`` with TRITON_INTERPRET=1; writes JSON. SGLang's kernel is the
released one, called as `TritonAttnBackend` calls it; the adapter is the product's, on the reference
prefix engine, with the tree taken from the same FULL_MASK.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from sglang_overlay.attention.adapter import VerifyAdapter
from sglang_overlay.attention.oracle import ancestor_mask
from sglang_overlay.attention.plan import PlanSizes, VerifyPlan
from sglang_overlay.srt.stock_verify import stock_verify

from tests.support.prefix_reference import ReferencePrefixEngine
from tests.support.verify_case import SCALE, VerifyCase, full_mask, make_case

# Prefix lengths, topologies, nodes, heads: edges of SGLang's tiles (32) and of ours.
CASES = {
    "edges": ([0, 1, 31, 32, 65], ["random", "star", "binary", "chain", "random"], 16, 1),
    "one word": ([5], ["random"], 64, 1),
    "two words": ([40], ["random"], 70, 1),
    "heads": ([33, 3], ["random", "star"], 7, 8),
}


def stock(case: VerifyCase, masks: list[torch.Tensor]) -> torch.Tensor:
    """Return what SGLang's kernel makes of ``case`` under ``masks``."""
    slots = case.tree_slots.view(len(masks), -1)
    call = stock_verify(
        case.query, case.cache, case.prefix_slots, slots, masks, softmax_scale=SCALE
    )
    return call().clone()


def adapter(case: VerifyCase, prefixes: list[int]) -> torch.Tensor:
    """Return what the adapter makes of ``case``, its tree from the FULL_MASK."""
    sizes = PlanSizes(max_requests=8, max_context=128, nodes=len(case.parents[0]))
    verify = VerifyAdapter(ReferencePrefixEngine(), VerifyPlan(sizes, "cpu"))
    step = replace(case.step, parents=None, full_mask=full_mask(prefixes, case.parents))
    verify.prepare(step, case.query.shape[1])
    return verify.attend(case.query, case.cache, case.tree_slots, softmax_scale=SCALE)


def distances(name: str) -> dict[str, float]:
    """Return the largest difference of each pair on one case."""
    prefixes, topologies, nodes, heads = CASES[name]
    case = make_case(prefixes, topologies, nodes, heads, seed=nodes)
    masks = [ancestor_mask(parents) for parents in case.parents]
    theirs, (want, _) = stock(case, masks), case.expected()
    for mask in masks:
        mask[2:, 1] = ~mask[2:, 1]
    return {
        "stock to oracle": float((theirs - want).abs().max()),
        "adapter to stock": float((adapter(case, prefixes) - theirs).abs().max()),
        "stock under another mask": float((stock(case, masks) - want).abs().max()),
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps({name: distances(name) for name in CASES}))
