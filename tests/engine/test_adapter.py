"""Verify through the overlay's adapter, with each of its engines: real SGLang, real backends."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support import trees
from tests.support.engine.launch import Launch
from tests.support.engine.models import BLOCK, TARGET_LAYERS, VOCABULARY
from tests.support.engine.processes import EngineFailure
from tests.support.engine.scene import Report, play
from tests.support.engine.workload import (
    SMALL,
    STANDARD,
    Outcome,
    Workload,
    generate,
    generate_by_steps,
)

pytestmark = pytest.mark.engine

FORCED = ("SGLANG_OVERLAY_FORCE_TREE", "1")
PORTABLE = ("SGLANG_OVERLAY_VERIFY_ENGINE", "portable")
HYBRID: dict[str, Any] = {
    "attention": "flashinfer",
    "options": (
        ("decode_attention_backend", "flashmla"),
        ("speculative_attention_mode", "decode"),
    ),
}


def on_triton(page_size: int, prefill: str = "flashinfer") -> dict[str, Any]:
    """Return settings of a server that verifies on Triton, and prefills without its slow kernel."""
    options = (
        ("decode_attention_backend", "triton"),
        ("speculative_attention_mode", "decode"),
        ("page_size", page_size),
    )
    return {"attention": prefill, "options": options}


# Each way to verify through the adapter: the engine, and the settings of a server.
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "flashmla": ("flashmla", {"variables": (FORCED,)}),
    "triton, page 1": ("portable", on_triton(1)),
    "triton, page 64": ("portable", {**on_triton(64), "variables": (PORTABLE,)}),
    "grouped": ("portable", {**on_triton(64, "torch_native"), "grouped": True}),
}
# Those whose trees also run with planted faults.
FAULTED = ("flashmla", "triton, page 64")


# --- a chain, verified as a tree


def count_tree_steps(bed: Any, rounds: list[list[list[int]]], tokens: int) -> dict[str, Any]:
    """Scene: the standard run, with what went through the adapter."""
    result = generate_by_steps(bed, rounds, tokens)
    runner = bed.scheduler.tp_worker.model_runner
    verify = getattr(runner, "overlay_tree_verify", None)
    result["steps"] = verify.steps if verify else 0
    result["launches"] = verify.adapter.tree_launches if verify else 0
    identity = getattr(runner, "overlay_identity", None)
    result["identity"] = identity.as_dict() if identity else None
    return result


def plainly(launch: Launch, stock: Path, workload: Workload) -> Outcome:
    """Run ``workload`` without drafts on the model of ``launch``."""
    if launch.grouped:
        native = Launch(tree=stock, grouped=True, attention="torch_native")
        return generate(native.plain(), workload)
    return generate(Launch(tree=stock).plain(), workload)


def drafted(launch: Launch, stock: Path, workload: Workload) -> tuple[Report, Any]:
    """Run ``workload`` with known-good drafts; return the report and plain's outcome."""
    plain = plainly(launch, stock, workload)
    report = play(
        count_tree_steps,
        launch,
        known=plain.known(),
        rounds=workload.rounds,
        tokens=workload.tokens,
    )
    return report, plain


def check_chain(launch: Launch, stock: Path, workload: Workload, engine: str = "flashmla") -> None:
    report, plain = drafted(launch, stock, workload)
    (steps,) = report.steps
    assert tuple(map(tuple, report.result["tokens"])) == plain.tokens
    assert {count for step in steps for count in step.committed} == set(range(1, BLOCK + 1))
    assert report.result["steps"] == len(steps) > 0
    assert report.result["launches"] == len(steps) * TARGET_LAYERS
    assert report.result["identity"]["verify_path"] == f"{engine}-tree"
    assert report.result["identity"]["tree_size"] == BLOCK
    assert {step.mask_elements for step in steps} == {0}


@pytest.mark.parametrize(
    "way",
    [
        "flashmla",
        "triton, page 1",
        pytest.param("triton, page 64", marks=pytest.mark.full),
        "grouped",
    ],
)
def test_a_chain_through_the_tree_path_gives_the_tokens_of_plain_decoding(
    stock: Path, overlay: Path, way: str
) -> None:
    engine, settings = WAYS[way]
    check_chain(Launch(tree=overlay, **settings), stock, SMALL, engine)


@pytest.mark.full
def test_a_forced_chain_over_cached_pages_and_unequal_contexts(stock: Path, overlay: Path) -> None:
    check_chain(Launch(tree=overlay, variables=(FORCED,)), stock, STANDARD)


@pytest.mark.full
def test_a_hybrid_backend_verifies_through_its_flashmla_half(stock: Path, overlay: Path) -> None:
    check_chain(Launch(tree=overlay, variables=(FORCED,), **HYBRID), stock, SMALL)


@pytest.mark.full
def test_triton_alone_and_a_hybrid_that_prefills_with_it(stock: Path, overlay: Path) -> None:
    alone: dict[str, Any] = {"attention": "triton", "options": (("page_size", 1),)}
    check_chain(Launch(tree=overlay, **alone), stock, SMALL, "portable")
    prefill: dict[str, Any] = {
        "attention": "triton",
        "options": (("decode_attention_backend", "flashinfer"), ("page_size", 1)),
    }
    check_chain(Launch(tree=overlay, **prefill), stock, SMALL, "portable")


@pytest.mark.full
@pytest.mark.parametrize("release", ["0.5.11", "0.5.12"])
def test_the_other_releases(release: str) -> None:
    for engine, settings in WAYS.values():
        launch = Launch(tree=trees.patched(release), **settings)
        check_chain(launch, trees.tree(release), SMALL, engine)


def test_the_kill_switch_beats_the_forced_tree(stock: Path, overlay: Path) -> None:
    variables = (FORCED, ("SGLANG_OVERLAY_DISABLE", "1"))
    report, plain = drafted(Launch(tree=overlay, variables=variables), stock, SMALL)
    assert tuple(map(tuple, report.result["tokens"])) == plain.tokens
    assert (report.result["steps"], report.result["identity"]) == (0, None)
    # Stock builds a mask for FlashMLA, which nobody reads.
    assert all(step.mask_elements > 0 for step in report.steps[0])


def test_without_the_switch_a_chain_stays_on_the_causal_kernel(stock: Path, overlay: Path) -> None:
    report, plain = drafted(Launch(tree=overlay), stock, SMALL)
    assert tuple(map(tuple, report.result["tokens"])) == plain.tokens
    assert (report.result["steps"], report.result["launches"]) == (0, 0)
    assert report.result["identity"]["verify_path"] == "causal"


def test_flashmla_on_pages_of_one_is_refused_at_start_with_what_would_work(overlay: Path) -> None:
    flashmla = ("SGLANG_OVERLAY_VERIFY_ENGINE", "flashmla")
    launch = Launch(tree=overlay, **on_triton(1), variables=(flashmla,))
    with pytest.raises(EngineFailure) as failure:
        play(count_tree_steps, launch, rounds=SMALL.rounds, tokens=1)
    assert "ImpossibleVerifyError: SGLANG_OVERLAY_VERIFY_ENGINE asks for" in failure.value.log
    assert "the page size is 1, and FlashMLA reads pages of 64" in failure.value.log
    assert "SGLANG_OVERLAY_VERIFY_ENGINE=portable would work here" in failure.value.log


def test_stock_by_switch_verifies_on_tritons_own_kernel(stock: Path, overlay: Path) -> None:
    launch = Launch(
        tree=overlay, **on_triton(1), variables=(("SGLANG_OVERLAY_VERIFY_ENGINE", "stock"),)
    )
    report, plain = drafted(launch, stock, SMALL)
    assert tuple(map(tuple, report.result["tokens"])) == plain.tokens
    assert (report.result["steps"], report.result["launches"]) == (0, 0)
    assert report.result["identity"]["verify_path"] == "causal"


# --- random trees: each node against a plain forward of its path


def random_parents(rows: int, generator: torch.Generator) -> torch.Tensor:
    """Return [rows, BLOCK] int64: every node's parent is any earlier node, the root's is −1."""
    draw = torch.rand(rows, BLOCK, generator=generator)
    node = torch.arange(BLOCK)
    parents = (draw * node).long()
    parents[:, 0] = -1
    return parents


def path_of(node: int, parents: list[int]) -> list[int]:
    """Return the nodes from the root to ``node``."""
    return ([*path_of(parents[node], parents), node]) if node >= 0 else []


class Forest:
    """Turns every verify of DFLASH into one of random trees and tokens, and keeps its logits."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.seen: list[dict[str, Any]] = []

    @contextmanager
    def grown(self) -> Iterator[None]:
        from sglang.srt.speculative.dflash_info import DFlashVerifyInput as Input

        with (
            mock.patch.object(Input, "prepare_for_verify", self._prepare(Input.prepare_for_verify)),
            mock.patch.object(Input, "verify", self._verify(Input.verify)),
        ):
            yield

    def _prepare(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def prepare(info: Any, batch: Any, page_size: int, **kwargs: Any) -> Any:
            rows = len(batch.reqs)
            parents = random_parents(rows, self.generator)
            depth = torch.zeros(rows, BLOCK, dtype=torch.int64)
            for node in range(1, BLOCK):
                depth[:, node] = depth.gather(1, parents[:, node, None]).squeeze(1) + 1
            tokens = info.draft_token.view(rows, BLOCK).clone()
            tokens[:, 1:] = torch.randint(VOCABULARY, (rows, BLOCK - 1), generator=self.generator)
            info.draft_token = tokens.view(-1)
            info.positions = (batch.seq_lens[:, None] + depth).view(-1)
            info.parents = parents
            return stock(info, batch, page_size, **kwargs)

        return prepare

    def _verify(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def verify(info: Any, *, batch: Any, logits_output: Any, **kwargs: Any) -> Any:
            logits = logits_output.next_token_logits.view(len(batch.reqs), BLOCK, -1).clone()
            for row, request in enumerate(batch.reqs):
                self.seen.append(
                    {
                        # The newest output token is the root, which is not in the cache yet.
                        "context": [*request.origin_input_ids, *request.output_ids[:-1]],
                        "tokens": info.draft_token.view(-1, BLOCK)[row].tolist(),
                        "parents": info.parents[row].tolist(),
                        "logits": logits[row],
                    }
                )
            return stock(info, batch=batch, logits_output=logits_output, **kwargs)

        return verify


def plain_logits(bed: Any, prompt: list[int]) -> torch.Tensor:
    """Return the logits [vocabulary] that a plain prefill gives behind ``prompt``."""
    runner = bed.scheduler.tp_worker.model_runner
    kept: list[torch.Tensor] = []
    stock = runner.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = stock(*args, **kwargs)
        kept.append(output.logits_output.next_token_logits.clone())
        return output

    with mock.patch.object(runner, "forward", forward):
        bed.submit(prompt, tokens=1)
        bed.run()
    assert len(kept) == 1
    return kept[0][0]


_plain: dict[tuple[int, ...], torch.Tensor] = {}


def worst_node(bed: Any, prompts: list[list[int]], tokens: int, seed: int) -> dict[str, Any]:
    """Grow random trees over ``prompts``; return the largest error of any node's logits."""
    forest = Forest(seed)
    with forest.grown():
        for prompt in prompts:
            bed.submit(prompt, tokens=tokens)
        bed.run()
    worst, spread = 0.0, 0.0
    for tree in forest.seen:
        for node in range(BLOCK):
            path = [tree["tokens"][each] for each in path_of(node, tree["parents"])]
            whole = (*tree["context"], *path)
            # Runs with a fault see the same first trees.
            if whole not in _plain:
                _plain[whole] = plain_logits(bed, list(whole))
            expected = _plain[whole]
            worst = max(worst, float((tree["logits"][node] - expected).abs().max()))
            spread = max(spread, float(expected.std()))
    return {"trees": len(forest.seen), "worst": worst, "spread": spread}


@contextmanager
def planted(bed: Any, fault: str) -> Iterator[None]:
    """Plant one fault into the path for a while."""
    from sglang_overlay.attention.plan import VerifyPlan
    from sglang_overlay.srt import tree_verify

    verify = bed.scheduler.tp_worker.model_runner.overlay_tree_verify
    plan = verify.adapter.plan
    stock_fill, stock_prepare = VerifyPlan.fill, verify.prepare
    patches: list[Any] = []
    if fault == "wrong mask":

        def fill(plan: Any, step: Any) -> None:
            stock_fill(plan, step)
            plan.ancestors[:, 2:, :] |= 2  # every node also sees node 1

        patches.append(mock.patch.object(VerifyPlan, "fill", fill))
    elif fault == "wrong parent":

        def prepare(rows: Any, lens: Any, info: Any = None) -> None:
            info.parents[:, 2:] = (info.parents[:, 2:] + 1) % 2
            stock_prepare(rows, lens, info)

        patches.append(mock.patch.object(verify, "prepare", prepare))
    elif fault == "prefix and tree lengths":

        def fill(plan: Any, step: Any) -> None:
            stock_fill(plan, step)
            plan.planned_lengths += BLOCK

        patches.append(mock.patch.object(VerifyPlan, "fill", fill))
    elif fault == "stale metadata":
        calls = 0

        def prepare(rows: Any, lens: Any, info: Any = None) -> None:
            nonlocal calls
            calls += 1
            if calls == 1:
                stock_prepare(rows, lens, info)

        patches.append(mock.patch.object(verify, "prepare", prepare))
    elif fault == "chain path":
        patches.append(mock.patch.object(tree_verify, "of", return_value=None))
    else:
        assert not fault, fault
    assert plan is verify.adapter.plan
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


FAULTS = ("wrong mask", "wrong parent", "prefix and tree lengths", "stale metadata", "chain path")


def grow_trees(bed: Any, prompts: list[list[int]], faults: list[str]) -> dict[str, Any]:
    """Scene: random trees as they should be, then with each fault; and the backend by itself."""
    found: dict[str, Any] = {"sound": worst_node(bed, prompts, tokens=4, seed=0)}
    for fault in faults:
        with planted(bed, fault):
            found[fault] = worst_node(bed, prompts[:1], tokens=3, seed=1)
    found["backend"] = drive_backend(bed)
    if type(bed.scheduler.tp_worker.model_runner.attn_backend).__name__ == "FlashMLABackend":
        found["stock table"] = fill_graph_table(bed, hooked=False)
        found["our table"] = fill_graph_table(bed, hooked=True)
    return found


# --- the backend object by itself, against the oracle


def drive_backend(bed: Any) -> dict[str, float]:
    """Drive metadata and forward of the live backend; return errors by way."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    runner = bed.scheduler.tp_worker.model_runner
    backend, mode = runner.attn_backend, ForwardMode.TARGET_VERIFY
    case = BackendCase(runner)
    errors = {}

    case.draw([130, 1, 64])
    for topology in ("parents", "mask"):
        backend.init_forward_metadata(case.batch(mode, case.spec(topology)))
        errors[f"eager, {topology}"] = case.error(backend, mode)

    # As the graph runner does it: captured with bare shapes, replayed with padding behind.
    backend.init_forward_metadata_capture_cuda_graph(
        4,
        4 * BLOCK,
        torch.zeros(4, dtype=torch.int64),
        torch.ones(4, dtype=torch.int64),
        None,
        mode,
        case.bare_spec(),
    )
    for lengths, topology in (
        ([65, 190], "parents"),
        ([63, 0, 300], "mask"),
        ([7, 9, 70], "chain"),
    ):
        case.draw(lengths)
        rows, lens = case.padded(4)
        backend.init_forward_metadata_replay_cuda_graph(
            4, rows, lens, int(lens.sum()), None, mode, case.spec(topology), seq_lens_cpu=lens
        )
        errors[f"replay, {topology}"] = case.error(backend, mode, rows=4)
    return errors


def fill_graph_table(bed: Any, *, hooked: bool) -> dict[str, Any]:
    """Replay chains of 100 tokens near the context's end through SGLang's own methods.

    Returns which rows of the graph's page table hold the pages that they should; the last one pads.
    """
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    backend = copy.copy(bed.scheduler.tp_worker.model_runner.attn_backend)
    del backend.overlay_tree_verify
    context, chain, mode = backend.max_context_len, 100, ForwardMode.TARGET_VERIFY
    backend.num_draft_tokens = chain
    # Rows 1 and 2 have descending pages from 500 and 900 on; row 0 is nobody's.
    pages = torch.tensor([[0], [500], [900]]) - torch.arange(-(-(context + 4 + chain) // 64))
    slots = pages[:, :, None] * 64 + torch.arange(64)
    backend.req_to_token = slots.flatten(1)[:, : context + 4 + chain].int().contiguous()
    method = type(backend).init_cuda_graph_state
    with on_a_cpu():
        (method if hooked else method.__wrapped__)(backend, 3, 3 * chain)
    rows, lens = torch.tensor([1, 2, 0]), torch.tensor([40, context - 20, 1])
    backend.init_forward_metadata_capture_cuda_graph(
        3, 3 * chain, rows * 0, torch.ones_like(lens), None, mode, None
    )
    table = backend.cuda_graph_kv_indices
    table[2] = 7
    backend.init_forward_metadata_replay_cuda_graph(
        2, rows[:2], lens[:2], int(lens[:2].sum()), None, mode, None, seq_lens_cpu=lens[:2]
    )
    used = [-(-(int(length) + chain) // 64) for length in lens[:2]]
    width = table.shape[1]
    within = [min(each, width) for each in used]
    right = [torch.equal(table[i, :n], pages[i + 1, :n].int()) for i, n in enumerate(within)]
    return {"pages": used, "width": width, "right": [*right, bool((table[2] == 7).all())]}


@contextmanager
def on_a_cpu() -> Iterator[None]:
    """Let SGLang make its graph buffers, which it wants on a GPU, in main memory."""
    full, empty = torch.full, torch.empty
    processors = SimpleNamespace(multi_processor_count=8)
    with (
        mock.patch.object(torch, "full", lambda *a, **k: full(*a, **(k | {"device": "cpu"}))),
        mock.patch.object(torch, "empty", lambda *a, **k: empty(*a, **(k | {"device": "cpu"}))),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=processors),
    ):
        yield


class BackendCase:
    """Random rows in the engine's own pools, a ragged batch over them, and what it should give."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.generator = torch.Generator().manual_seed(3)
        self.pool = runner.token_to_kv_pool
        self.mla = runner.use_mla_backend
        key, value = (576, 512) if self.mla else (32, 32)
        self.layer = SimpleNamespace(
            layer_id=1, scaling=0.11, tp_q_head_num=4, head_dim=key, v_head_dim=value
        )
        self.lengths: list[int] = []

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def draw(self, lengths: list[int]) -> None:
        """Place requests of these prefixes on shuffled pages, each with a random tree behind it."""
        self.lengths = lengths
        table = self.runner.req_to_token_pool.req_to_token
        size = self.runner.server_args.page_size
        pages = (torch.randperm(3800 // size, generator=self.generator) + 1).tolist()
        self.slots = []
        for row, length in enumerate(lengths):
            count = -(-(length + BLOCK) // size)
            own = torch.tensor([pages.pop() for _ in range(count)])
            slots = (own[:, None] * size + torch.arange(size)).flatten()[: length + BLOCK]
            table[row, : slots.numel()] = slots.int()
            self.slots.append(slots)
        for buffer in self.pool.get_kv_buffer(self.layer.layer_id)[: 1 if self.mla else 2]:
            buffer.copy_(self.random(*buffer.shape))
        self.parents = random_parents(len(lengths), self.generator)

    def spec(self, topology: str) -> Any:
        """Return a spec input as the producers of this kind of topology make it."""
        info = self.bare_spec()
        if topology == "parents":
            info.parents = self.parents
        elif topology == "mask":
            info.custom_mask = torch.cat([mask.flatten() for mask in self._full_masks()])
        else:
            self.parents = torch.arange(-1, BLOCK - 1).expand(len(self.lengths), -1)
        return info

    def bare_spec(self) -> Any:
        from sglang.srt.speculative.dflash_info import DFlashVerifyInput

        return DFlashVerifyInput(draft_token=None, positions=None, draft_token_num=BLOCK)

    def _full_masks(self) -> list[torch.Tensor]:
        from sglang_overlay.attention.oracle import ancestor_mask

        return [
            torch.cat([torch.ones(BLOCK, length, dtype=torch.bool), ancestor_mask(own)], dim=1)
            for length, own in zip(self.lengths, self.parents.tolist(), strict=True)
        ]

    def padded(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows of the token table and prefix lengths, with a graph's padding behind them."""
        count = len(self.lengths)
        request_rows, lens = (
            torch.zeros(rows, dtype=torch.int64),
            torch.ones(rows, dtype=torch.int64),
        )
        request_rows[:count], lens[:count] = torch.arange(count), torch.tensor(self.lengths)
        return request_rows, lens

    def batch(self, mode: Any, spec: Any = None, rows: int | None = None) -> Any:
        rows = len(self.lengths) if rows is None else rows
        request_rows, lens = self.padded(rows)
        slots = torch.zeros(rows * BLOCK, dtype=torch.int64)
        own = torch.cat([each[-BLOCK:] for each in self.slots])
        slots[: own.numel()] = own
        return SimpleNamespace(
            forward_mode=mode,
            batch_size=rows,
            req_pool_indices=request_rows,
            seq_lens=lens,
            seq_lens_cpu=lens,
            spec_info=spec,
            out_cache_loc=slots,
            token_to_kv_pool=self.pool,
        )

    def error(self, backend: Any, mode: Any, rows: int | None = None) -> float:
        """Run ``forward_extend`` on the prepared step; return the largest error to the oracle."""
        from sglang_overlay.attention.oracle import (
            ancestor_mask,
            grouped_tree_attention,
            tree_attention,
        )

        batch = self.batch(mode, rows=rows)
        tokens, layer = batch.out_cache_loc.numel(), self.layer
        query = self.random(tokens, 4, layer.head_dim)
        key = self.random(tokens, 1 if self.mla else 2, layer.head_dim)
        value = key[..., : layer.v_head_dim] if self.mla else self.random(*key.shape)
        out = backend.forward_extend(query, key, value, layer, batch)
        count = len(self.lengths) * BLOCK
        places = (
            [each[:-BLOCK] for each in self.slots],
            torch.stack([each[-BLOCK:] for each in self.slots]),
            [ancestor_mask(own) for own in self.parents.tolist()],
            layer.scaling,
        )
        keys, values = self.pool.get_kv_buffer(layer.layer_id)
        if self.mla:
            expected, _ = tree_attention(query[:count], keys.squeeze(1), *places)
        else:
            expected = grouped_tree_attention(query[:count], keys, values, *places)
        got = out.view(tokens, 4, layer.v_head_dim)[:count]
        return float((got - expected).abs().max())


@cache
def grown(way: str, overlay: Path) -> Report:
    """Return one run of `grow_trees`, for the tests below."""
    _, settings = WAYS[way]
    prompts = [list(STANDARD.prompts[0][:70]), list(STANDARD.prompts[3])]
    faults = list(FAULTS) if way in FAULTED else []
    return play(grow_trees, Launch(tree=overlay, **settings), prompts=prompts, faults=faults)


TOLERANCE = 1e-4


@pytest.mark.parametrize("way", WAYS)
def test_every_node_of_a_random_tree_has_the_logits_of_its_path(way: str, overlay: Path) -> None:
    report = grown(way, overlay)
    sound = report.result["sound"]
    assert sound["trees"] >= 6
    assert sound["worst"] < TOLERANCE * sound["spread"]
    # Random drafts are not accepted, so that no context rests on a row of a side branch.
    assert {count for step in report.steps[0] for count in step.committed} == {1}


@pytest.mark.parametrize("way", FAULTED)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_shows_in_the_logits(way: str, fault: str, overlay: Path) -> None:
    found = grown(way, overlay).result[fault]
    assert found["worst"] > 10 * TOLERANCE * found["spread"]


@pytest.mark.parametrize("way", WAYS)
def test_the_live_backend_agrees_with_the_oracle(way: str, overlay: Path) -> None:
    errors = grown(way, overlay).result["backend"]
    assert len(errors) == 5
    assert {way: error for way, error in errors.items() if not error < 2e-5} == {}


def test_a_chain_behind_a_full_context_stays_in_its_row(overlay: Path) -> None:
    """SGLang's own table is (context + 64) // 64 wide: 17 pages, and this chain needs 18."""
    found = grown("flashmla", overlay).result
    stock, ours = found["stock table"], found["our table"]
    assert stock["pages"] == ours["pages"] == [3, 18]
    assert (stock["width"], stock["right"]) == (17, [True, True, False])
    assert ours["width"] >= 18
    assert ours["right"] == [True, True, True]
