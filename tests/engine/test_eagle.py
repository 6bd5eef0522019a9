"""EAGLE's and NGRAM's trees on the overlay's adapter: plain decoding's tokens and cache rows.

SGLang commits them on pages by ``MLATokenToKVPool.move_kv_cache``, which the overlay adds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.engine.eagle import eagle
from tests.support.engine.launch import Launch
from tests.support.engine.quick import quicken
from tests.support.engine.scene import play
from tests.support.engine.workload import SMALL, STANDARD, Workload, generate

pytestmark = pytest.mark.engine

STEPS, NODES = 3, 9
# Prompts that share a page, paths over the end of a page, requests that end in one batch.
SHORT = Workload(rounds=((STANDARD.prompts[0][:52], (5, 6, 7)),), tokens=16)
LONG = Workload(
    rounds=((STANDARD.prompts[0][:70],), (STANDARD.prompts[0][:66], SMALL.prompts[1], (5, 6, 7))),
    tokens=32,
)
FAULTS = ("mover", "mask")


def launch_eagle(tree: Path, backend: str, page: int, prefill: str, *variables: Any) -> Launch:
    """Return a launch of EAGLE with trees of width 2 that verifies on ``backend``."""
    return Launch(
        tree=tree,
        algorithm="EAGLE",
        # SGLang takes paged trees where it reads this name.
        attention=prefill,
        options=(
            ("decode_attention_backend", backend),
            ("speculative_attention_mode", "decode"),
            ("page_size", page),
            ("speculative_num_steps", STEPS),
            ("speculative_eagle_topk", 2),
            ("speculative_num_draft_tokens", NODES),
        ),
        variables=variables,
    )


class Rows:
    """The target's cache rows of each request's committed tokens, after its last step but one."""

    def __init__(self, bed: Any) -> None:
        self.rows: dict[str, list[list[float]]] = {}
        runner = bed.scheduler.tp_worker.model_runner
        self._scheduler = bed.scheduler
        self._table = runner.req_to_token_pool.req_to_token
        self._cache = runner.token_to_kv_pool.kv_buffer[-1]

    def keep(self) -> None:
        for request in self._scheduler.cur_batch.reqs:
            if request.finished():
                continue
            # The newest output token is not in the cache yet.
            length = len(request.origin_input_ids) + len(request.output_ids) - 1
            slots = self._table[request.req_pool_idx, :length].long()
            rows = self._cache[slots].flatten(1)[:, 500:530]
            self.rows[str(list(request.origin_input_ids))] = rows.tolist()


def run_rounds(bed: Any, rounds: list[list[list[int]]], tokens: int) -> dict[str, Any]:
    """Run the workload by hand; return its tokens and the cache rows."""
    free, rows, done = bed.free_slots(), Rows(bed), []
    for prompts in rounds:
        done += [bed.submit(prompt, tokens=tokens) for prompt in prompts]
        while bed.step():
            rows.keep()
    assert bed.free_slots() == free
    return {"tokens": [list(request.output_ids) for request in done], "rows": rows.rows}


def decode_plainly(bed: Any, **workload: Any) -> dict[str, Any]:
    """Scene: the workload without drafts."""
    return run_rounds(bed, **workload)


class Counts:
    """What the verify steps of EAGLE accepted, and how many rows their commits moved."""

    def __init__(self) -> None:
        self.steps = 0
        self.lengths: set[int] = set()
        self.beside = 0
        self.moved = {"target": 0, "drafter": 0}

    @contextmanager
    def kept(self, bed: Any) -> Iterator[None]:
        from sglang.srt.speculative.eagle_info import EagleVerifyInput

        verify = EagleVerifyInput.verify

        def count(info: Any, *args: Any) -> Any:
            result = verify(info, *args)
            self.steps += 1
            accepted = iter((result.accept_indices % NODES).tolist())
            for correct in result.num_correct_drafts_per_req_cpu:
                path = [next(accepted) for _ in range(correct + 1)]
                self.lengths.add(len(path))
                # Node 2 is the second child of the root.
                self.beside += path[1:2] == [2]
            return result

        scheduler = bed.scheduler
        pools = {
            "target": scheduler.tp_worker.model_runner.token_to_kv_pool,
            "drafter": scheduler.draft_worker.draft_model_runner.token_to_kv_pool,
        }
        with mock.patch.object(EagleVerifyInput, "verify", count):
            patches = [self._counted(name, pool) for name, pool in pools.items()]
            for patch in patches:
                patch.start()
            try:
                yield
            finally:
                for patch in patches:
                    patch.stop()

    def _counted(self, name: str, pool: Any) -> Any:
        stock = getattr(pool, "move_kv_cache", None)

        def move(targets: torch.Tensor, sources: torch.Tensor) -> None:
            self.moved[name] += int((targets != sources).sum())
            assert stock is not None
            stock(targets, sources)

        return mock.patch.object(pool, "move_kv_cache", move, create=True)


@contextmanager
def planted(bed: Any, fault: str) -> Iterator[None]:
    """Plant one fault into the overlay's part for a while."""
    from sglang_overlay.srt.tree_verify import TreeVerify

    pool = bed.scheduler.tp_worker.model_runner.token_to_kv_pool
    with ExitStack() as patches:
        if fault == "mover":
            patches.enter_context(mock.patch.object(pool, "move_kv_cache", return_value=None))
        elif fault == "mask":
            chain = property(lambda own: False)
            patches.enter_context(mock.patch.object(TreeVerify, "_trusts_masks", chain))
        else:
            assert not fault, fault
        yield


def decode_trees(
    bed: Any, faults: list[str], rounds: list[list[list[int]]], tokens: int, quick: bool
) -> dict[str, Any]:
    """Scene: the workload with EAGLE's trees, as they are and with each fault."""
    if quick:
        quicken(bed)
    runner = bed.scheduler.tp_worker.model_runner
    found: dict[str, Any] = {"identity": runner.overlay_identity.as_dict()}
    for fault in faults:
        bed.scheduler.flush_cache()
        counts = Counts()
        with eagle(bed), planted(bed, fault), counts.kept(bed):
            found[fault] = run_rounds(bed, rounds[:1] if fault else rounds, tokens)
        verify = getattr(runner, "overlay_tree_verify", None)
        found[fault] |= {
            "steps": counts.steps,
            "lengths": sorted(counts.lengths),
            "beside": counts.beside,
            "moved": counts.moved,
        }
        found.setdefault("adapter steps", verify.steps if verify else 0)
    return found


def distance(ours: dict[str, Any], theirs: dict[str, Any], tokens: int) -> float:
    """Return the largest difference of rows that both runs committed."""
    worst = 0.0
    for prompt, rows in ours.items():
        count = min(len(theirs[prompt]), len(rows))
        assert count > len(json.loads(prompt)) + tokens // 2
        mine, other = torch.tensor(rows[:count]), torch.tensor(theirs[prompt][:count])
        worst = max(worst, float((mine - other).abs().max()))
    return worst


def check(
    stock: Path,
    launch: Launch,
    workload: Workload,
    faults: tuple[str, ...] = (),
    *,
    quick: bool = True,
) -> dict[str, Any]:
    """Run ``workload`` with trees; tokens and rows must be plain's, and not so with a fault."""
    plain = generate(Launch(tree=stock).plain(), workload)
    order: dict[str, Any] = {"rounds": workload.rounds, "tokens": workload.tokens}
    rows = play(decode_plainly, Launch(tree=stock).plain(), **order).result["rows"]
    found: dict[str, Any] = play(
        decode_trees, launch, known=plain.known(), faults=["", *faults], quick=quick, **order
    ).result
    right = found[""]
    assert tuple(map(tuple, right["tokens"])) == plain.tokens
    assert distance(right["rows"], rows, workload.tokens) < 1e-4
    # Paths of every length, many of them off the first branch.
    assert right["lengths"] == list(range(1, STEPS + 2))
    assert right["beside"] > right["steps"] // 8
    for fault in faults:
        assert distance(found[fault]["rows"], rows, workload.tokens) > 1e-2, fault
    assert found["identity"]["mask_policy"] == "tree: mask honoured"
    return found


def check_paged(found: dict[str, Any], path: str) -> None:
    """Rows had to move in both pools, and the adapter verified every step."""
    right = found[""]
    assert right["moved"]["target"] > right["steps"] // 2
    assert right["moved"]["drafter"] > 0
    assert found["identity"]["verify_path"] == path
    assert found["adapter steps"] == right["steps"]


def test_trees_on_flashmla(stock: Path, overlay: Path) -> None:
    launch = launch_eagle(overlay, "flashmla", 64, "flashinfer")
    check_paged(check(stock, launch, SHORT), "flashmla-tree")


@pytest.mark.full
def test_trees_on_flashmla_over_shared_pages_and_faults_show(stock: Path, overlay: Path) -> None:
    launch = launch_eagle(overlay, "flashmla", 64, "flashinfer")
    check_paged(check(stock, launch, LONG, FAULTS), "flashmla-tree")


@pytest.mark.full
def test_trees_on_the_portable_engine(stock: Path, overlay: Path) -> None:
    portable = ("SGLANG_OVERLAY_VERIFY_ENGINE", "portable")
    launch = launch_eagle(overlay, "triton", 64, "flashinfer", portable)
    check_paged(check(stock, launch, SHORT, quick=False), "portable-tree")


@pytest.mark.full
def test_trees_on_sglangs_own_masked_kernel(stock: Path, overlay: Path) -> None:
    launch = launch_eagle(overlay, "triton", 1, "triton", ("SGLANG_OVERLAY_VERIFY_ENGINE", "stock"))
    found = check(stock, launch, SHORT)
    assert found["identity"]["verify_path"] == "stock-mask"
    assert (found["adapter steps"], found[""]["moved"]["target"]) == (0, 0)


def decode_ngrams(bed: Any, rounds: list[list[list[int]]], tokens: int) -> dict[str, Any]:
    """Scene: the workload with NGRAM's trees."""
    quicken(bed)
    runner, moved = bed.scheduler.tp_worker.model_runner, 0
    stock = runner.token_to_kv_pool.move_kv_cache

    def move(targets: torch.Tensor, sources: torch.Tensor) -> None:
        nonlocal moved
        moved += int((targets != sources).sum())
        stock(targets, sources)

    with mock.patch.object(runner.token_to_kv_pool, "move_kv_cache", move):
        found = run_rounds(bed, rounds, tokens)
    path = runner.overlay_identity.as_dict()["verify_path"]
    return found | {"moved": moved, "path": path, "steps": runner.overlay_tree_verify.steps}


@pytest.mark.parametrize("breadth", [1, 10])
def test_ngrams_trees_on_flashmla(stock: Path, overlay: Path, breadth: int) -> None:
    """SGLang takes NGRAM on CUDA only: the bed tells its guards that the CPU is that.

    A breadth of 1 does not make a chain: see `upstream.draft_width`.
    """
    options = (
        ("decode_attention_backend", "flashmla"),
        ("speculative_attention_mode", "decode"),
        ("speculative_algorithm", "NGRAM"),
        ("speculative_num_draft_tokens", NODES),
        ("speculative_ngram_max_bfs_breadth", breadth),
    )
    launch = Launch(tree=overlay, algorithm="", attention="flashinfer", options=options)
    plain = generate(Launch(tree=stock).plain(), SHORT)
    order: dict[str, Any] = {"rounds": SHORT.rounds, "tokens": SHORT.tokens}
    rows = play(decode_plainly, Launch(tree=stock).plain(), **order).result["rows"]
    found = play(decode_ngrams, launch, known=plain.known(), **order).result
    assert tuple(map(tuple, found["tokens"])) == plain.tokens
    assert distance(found["rows"], rows, SHORT.tokens) < 1e-4
    assert found["path"] == "flashmla-tree"
    assert found["moved"] > found["steps"] > 0


def decode_in_frame(bed: Any, rounds: list[list[list[int]]], tokens: int) -> dict[str, Any]:
    """Scene: the workload with NGRAM's trees, on the model that SGLang frames."""
    runner = bed.scheduler.tp_worker.model_runner
    done = []
    for prompts in rounds:
        done += [bed.submit(prompt, tokens=tokens) for prompt in prompts]
        while bed.step():
            pass
    verify = getattr(runner, "overlay_tree_verify", None)
    return {
        "model": type(runner.model).__name__,
        "tokens": [list(request.output_ids) for request in done],
        "path": runner.overlay_identity.as_dict()["verify_path"],
        "steps": verify.steps if verify else 0,
    }


@pytest.mark.full
@pytest.mark.parametrize(
    ("engine", "path"), [("stock", "stock-mask"), ("portable", "portable-tree")]
)
def test_trees_on_a_model_that_keeps_its_attention_layers_in_a_dict(
    stock: Path, overlay: Path, engine: str, path: str
) -> None:
    """``--model-impl transformers``: no walk over the modules finds the layers."""
    options = (
        ("speculative_algorithm", "NGRAM"),
        ("speculative_num_draft_tokens", NODES),
        ("page_size", 1),
        ("model_impl", "transformers"),
    )
    launch = Launch(
        tree=overlay,
        algorithm="",
        attention="triton",
        grouped=True,
        options=options,
        variables=(("SGLANG_OVERLAY_VERIFY_ENGINE", engine),),
    )
    plain = generate(Launch(tree=stock, attention="triton", grouped=True).plain(), SHORT)
    order: dict[str, Any] = {"rounds": SHORT.rounds, "tokens": SHORT.tokens}
    found = play(decode_in_frame, launch, known=plain.known(), **order).result
    assert found["model"].startswith("Transformers")
    assert tuple(map(tuple, found["tokens"])) == plain.tokens
    assert found["path"] == path
    assert (found["steps"] > 0) == (engine == "portable")
