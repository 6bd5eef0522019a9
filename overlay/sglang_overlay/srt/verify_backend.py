"""The backends that target verify runs, found from a live object or from a resolved name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from sglang_overlay import mask_table, upstream
from sglang_overlay.mask_policy import Judgement, Kind, Traits, judge, unknown

# Set on a backend whose target verify gets draft trees by SGLang's own mask.
_EXPECTS_TREES = "overlay_expects_trees"

# Deeper than any nesting that SGLang builds (TBO over hybrid over hybrid-linear); ends a cycle.
_DEPTH = 8


def leaves(backend: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """Yield the backends that ``backend`` runs in target verify: itself, unless it is a wrapper.

    A hybrid-linear wrapper yields its full-attention backend first, then the recurrent one.
    """
    row = mask_table.row_for(type(backend))
    if row is None or row.kind is not Kind.WRAPPER or depth == 0:
        yield backend
    elif row.class_name == upstream.HYBRID:
        yield from leaves(upstream.verify_backend_of_hybrid(backend), depth - 1)
    else:
        for attribute in upstream.WRAPPED[row.class_name]:
            yield from leaves(getattr(backend, attribute), depth - 1)


def judge_object(backend: Any, server: Traits) -> Judgement:
    """Judge one backend object that is not a wrapper.

    ``server`` holds the facts of its server; what only the object shows is read from it. An
    attribute that the class of this release lacks stands for something that it cannot do.
    """
    row = mask_table.row_for(type(backend))
    if row is None or not row.cases:
        return unknown(type(backend).__name__)
    traits = replace(
        server,
        mla=getattr(backend, "use_mla", None) if server.mla is None else server.mla,
        fa_version=getattr(backend, "fa_impl_ver", None),
        unified_verify=bool(getattr(backend, "_use_unified_verify", False)),
        bidirectional_extend=bool(
            getattr(backend, "allow_bidirectional_attention_in_extend", False)
        ),
    )
    return judge(row, traits)


def judge_name(name: str, server: Traits) -> Judgement:
    """Judge the class that ``--attention-backend name`` will make, before it exists."""
    rows = mask_table.newest_rows()
    traits = replace(server, fa_version=4 if name == "fa4" else 3)
    for candidate in mask_table.NAMES:
        if candidate.name == name and candidate.mla in (None, traits.mla):
            return judge(rows[candidate.class_name], traits)
    return unknown(f"the backend registered as {name!r}")


def resolve_chain(backend: Any) -> tuple[str, bool]:
    """Return the class name that verifies DFLASH's drafts on ``backend``, and whether it is masked.

    A chain has a mask where the backend needs one; a tree (`expect_trees`) always has.
    """
    leaf = next(leaves(backend))
    if getattr(leaf, _EXPECTS_TREES, False):
        return type(leaf).__name__, True
    return type(leaf).__name__, judge_object(leaf, Traits(topk=1)).needs_chain_mask


def expect_trees(backend: Any) -> None:
    """Have SGLang hand a mask to ``backend`` in every verify, and in graph capture before that.

    Graph capture builds its drafts without a tree; a graph that was captured without a mask would
    ignore that of every later tree.
    """
    for leaf in leaves(backend):
        setattr(leaf, _EXPECTS_TREES, True)
