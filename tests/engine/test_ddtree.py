"""DDTREE on the real engine: plain decoding's tokens, whatever happens to requests meanwhile."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.engine.launch import Launch
from tests.support.engine.models import BLOCK
from tests.support.engine.processes import EngineFailure
from tests.support.engine.quick import quicken
from tests.support.engine.scene import Report, play
from tests.support.engine.server import serving
from tests.support.engine.workload import (
    SMALL,
    STANDARD,
    Outcome,
    Workload,
    generate,
    generate_by_steps,
)

pytestmark = pytest.mark.engine

TREE = 24
STOCK_KERNEL = ("SGLANG_OVERLAY_VERIFY_ENGINE", "stock")


def ddtree(
    tree: Path, attention: str = "flashmla", page: int = 64, size: int = TREE, **more: Any
) -> Launch:
    """Return a launch of DDTREE with trees of ``size`` tokens.

    ``attention`` is ``flashmla``; ``triton``, where SGLang's own kernel verifies with a mask; or
    ``portable``, where the overlay verifies on Triton.
    """
    sizes = (("page_size", page), ("speculative_num_draft_tokens", size))
    options = (*sizes, *more.pop("options", ()))
    if attention == "triton":
        more["variables"] = (*more.get("variables", ()), STOCK_KERNEL)
    if attention == "portable":
        attention = "triton"
    return Launch(tree=tree, algorithm="DDTREE", attention=attention, options=options, **more)


WAYS = [
    pytest.param("flashmla", 64, id="flashmla-page-64"),
    pytest.param("triton", 1, id="triton-page-1"),
    pytest.param("triton", 64, id="triton-page-64", marks=pytest.mark.full),
]


def tally(bed: Any) -> dict[str, int]:
    counts: dict[str, int] = bed.scheduler.tp_worker.model_runner.overlay_draft_trees.as_dict()
    return counts


# --- the tokens of plain decoding


def run_workload(
    bed: Any, rounds: list[list[list[int]]], tokens: int, quick: bool = True
) -> dict[str, Any]:
    """Scene: the workload, and what the server says about itself afterwards."""
    if quick:
        quicken(bed)
    result = generate_by_steps(bed, rounds, tokens)
    runner = bed.scheduler.tp_worker.model_runner
    result["tally"] = tally(bed)
    result["identity"] = runner.overlay_identity.as_dict()
    verify = getattr(runner, "overlay_tree_verify", None)
    result["adapter_steps"] = verify.steps if verify else 0
    return result


def reference(launch: Launch, stock: Path) -> Launch:
    """Return a launch of SGLang as released that decodes plainly with the target of ``launch``."""
    if launch.grouped:
        return Launch(tree=stock, grouped=True, attention="torch_native").plain()
    return Launch(tree=stock, experts=launch.experts).plain()


def check_plain(
    launch: Launch, stock: Path, workload: Workload, *, quick: bool = True
) -> tuple[Report, Outcome]:
    """Run ``workload`` with drafts of every kind; it must give plain decoding's tokens."""
    plain = generate(reference(launch, stock), workload)
    report = play(
        run_workload,
        launch,
        known=plain.known(),
        rounds=workload.rounds,
        tokens=workload.tokens,
        quick=quick,
    )
    found = report.result
    assert tuple(map(tuple, found["tokens"])) == plain.tokens
    assert found["tally"]["steps"] == len(report.steps[0])
    assert found["tally"]["branched_paths"] > found["tally"]["requests"] // 8
    return report, plain


@pytest.mark.parametrize(("attention", "page"), WAYS)
def test_the_tokens_are_plains_and_dflashs(
    stock: Path, overlay: Path, attention: str, page: int
) -> None:
    report, plain = check_plain(ddtree(overlay, attention, page, size=64), stock, STANDARD)
    chain = generate(Launch(tree=stock), STANDARD, known=plain.known())
    assert chain.tokens == plain.tokens
    # Every length was committed; the shared head came from the cache.
    assert {count for step in report.steps[0] for count in step.committed} == set(
        range(1, BLOCK + 1)
    )
    assert max(report.result["cached"]) >= 128
    identity = report.result["identity"]
    assert identity["tree_size"] == 64
    assert identity["mask_policy"] == "tree: mask honoured"
    on_adapter = attention == "flashmla"
    assert identity["verify_path"] == ("flashmla-tree" if on_adapter else "stock-mask")
    assert report.result["adapter_steps"] == (len(report.steps[0]) if on_adapter else 0)


TINY = Workload(rounds=((SMALL.prompts[0][:7], SMALL.prompts[1][:12]),), tokens=12)


@pytest.mark.parametrize(
    ("attention", "page"),
    [
        pytest.param("flashmla", 64, marks=pytest.mark.full),
        ("triton", 1),
        pytest.param("portable", 1, marks=pytest.mark.full),
        pytest.param("portable", 64, marks=pytest.mark.full),
    ],
)
def test_the_kernels_themselves(stock: Path, overlay: Path, attention: str, page: int) -> None:
    check_plain(ddtree(overlay, attention, page, size=12), stock, TINY, quick=False)


def test_a_target_with_experts(stock: Path, overlay: Path) -> None:
    check_plain(ddtree(overlay, experts=True), stock, SMALL)


@pytest.mark.parametrize(
    ("attention", "page"),
    [
        pytest.param("triton", 1, marks=pytest.mark.full),
        ("triton", 64),
        pytest.param("portable", 1, marks=pytest.mark.full),
        pytest.param("portable", 64, marks=pytest.mark.full),
    ],
)
def test_a_target_with_grouped_heads(stock: Path, overlay: Path, attention: str, page: int) -> None:
    """Keys and values have buffers of their own there, which the commit on pages moves."""
    report, _ = check_plain(ddtree(overlay, attention, page, grouped=True), stock, SMALL)
    path = "stock-mask" if attention == "triton" else "portable-tree"
    assert report.result["identity"]["verify_path"] == path
    assert {count for step in report.steps[0] for count in step.committed} >= {1, 2, 3, 4, 5}


@pytest.mark.parametrize(("attention", "page"), WAYS)
def test_400_tokens_at_a_tree_of_64(stock: Path, overlay: Path, attention: str, page: int) -> None:
    long = Workload(rounds=((SMALL.prompts[0], SMALL.prompts[1]),), tokens=400)
    check_plain(ddtree(overlay, attention, page, size=64), stock, long)


@pytest.mark.full
@pytest.mark.parametrize("page", [1, 64])
def test_up_to_the_end_of_the_context(stock: Path, overlay: Path, page: int) -> None:
    prompt = STANDARD.prompts[4] + STANDARD.prompts[4][:200] + STANDARD.prompts[0]
    whole = Workload(rounds=((prompt, prompt[:600]),), tokens=1018 - len(prompt))
    way = ("triton", 1) if page == 1 else ("flashmla", 64)
    check_plain(ddtree(overlay, *way, size=100), stock, whole)


def test_two_ranks_agree(stock: Path, overlay: Path) -> None:
    launch = Launch(tree=stock, ranks=2)
    plain = generate(launch.plain(), TINY, driver="engine")
    trees = generate(ddtree(overlay, size=12, ranks=2), TINY, driver="engine", known=plain.known())
    assert trees.tokens == plain.tokens
    first, second = trees.steps
    assert first == second
    assert max(count for step in first for count in step.committed) > 2


# --- what happens to requests


class Words:
    """A tokenizer of a word per token, for stop strings."""

    additional_stop_token_ids = None
    eos_token_id = 257

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(f"<{each}>" for each in ids)

    def encode(self, text: str, **_: Any) -> list[int]:
        return [0] * text.count("<")


def live(bed: Any, prompts: list[list[int]], tokens: int, quick: bool) -> dict[str, Any]:
    """Scene: requests that join late, end early in every way, are aborted, biased and refused."""
    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

    if quick:
        quicken(bed)
    scheduler = bed.scheduler
    scheduler.tokenizer = Words()
    free = bed.free_slots()
    retracted = 0
    stock = ScheduleBatch.retract_decode

    def retract(*args: Any) -> Any:
        nonlocal retracted
        found = stock(*args)
        retracted += len(found[0])
        return found

    done: dict[str, Any] = {}
    with mock.patch.object(ScheduleBatch, "retract_decode", retract):
        done["first"] = bed.submit(prompts[0], tokens=tokens)
        for _ in range(3):
            bed.step()
        # Joins a running batch; its prompt begins like the first one's.
        done["late"] = bed.submit(prompts[1], tokens=tokens)
        done["short"] = bed.submit(prompts[2], tokens=5)
        aborted = bed.submit(prompts[3], tokens=tokens)
        for _ in range(4):
            bed.step()
        scheduler.abort_request(AbortReq(rid=aborted.rid))
        bed.run()
    stop = done["first"].output_ids[tokens // 2]
    done["stop token"] = bed.submit(
        prompts[0], tokens=tokens, ignore_eos=False, stop_token_ids=[stop]
    )
    done["stop string"] = bed.submit(prompts[0], tokens=tokens, stop=[f"<{stop}>"])
    bias = {str(token): -100.0 for token in done["first"].output_ids[:2]}
    done["biased"] = bed.submit(prompts[0], tokens=tokens, logit_bias=bias)
    done["unbiased"] = bed.submit(prompts[1], tokens=tokens)
    forbidden = {"token_ids": done["first"].output_ids[:2]}
    done["processed"] = bed.submit(prompts[0], tokens=tokens, custom_params=forbidden)
    done["processed"].custom_logit_processor = DisallowedTokensLogitsProcessor.to_str()
    bed.run()
    return {
        "tokens": {name: list(request.output_ids) for name, request in done.items()},
        "reasons": {name: str(request.finished_reason.to_json()) for name, request in done.items()},
        # Also where it had been retracted, and was waiting again.
        "aborted after": len(aborted.output_ids),
        "retracted": retracted,
        "lost": free - bed.free_slots(),
    }


LIVE = [
    list(STANDARD.prompts[0][:70]),
    list(STANDARD.prompts[0][:66] + STANDARD.prompts[3]),
    list(STANDARD.prompts[3][:9]),
    list(STANDARD.prompts[4][:150]),
]


@pytest.mark.parametrize(("attention", "page"), WAYS[:2])
def test_requests_that_join_leave_stop_and_are_retracted(
    stock: Path, overlay: Path, attention: str, page: int
) -> None:
    tokens = 40
    # Chunks of a prompt, and room for less than the batch needs.
    tight = (
        ("chunked_prefill_size", 64),
        ("max_total_tokens", 384 if page == 64 else 180),
        ("schedule_conservativeness", 0.05),
    )
    processors = ("enable_custom_logit_processor", True)
    stock_launch = Launch(tree=stock, options=(processors,)).plain()
    plain = play(live, stock_launch, prompts=LIVE, tokens=tokens, quick=False).result
    known = tuple(
        (tuple(prompt), tuple(plain["tokens"][name]))
        for prompt, name in zip(LIVE[:3], ("first", "late", "short"), strict=True)
    )
    report = play(
        live,
        ddtree(overlay, attention, page, options=(*tight, processors)),
        known=known,
        prompts=LIVE,
        tokens=tokens,
        quick=True,
    )
    found = report.result
    assert found["tokens"] == plain["tokens"]
    assert found["reasons"] == plain["reasons"]
    assert found["aborted after"] < tokens
    assert found["lost"] == plain["lost"] == 0
    assert found["retracted"] > 0
    assert len(found["tokens"]["stop token"]) == len(found["tokens"]["stop string"]) < tokens
    assert found["tokens"]["biased"] != found["tokens"]["first"]
    assert found["tokens"]["processed"] == found["tokens"]["biased"]
    # Some of it was accepted as drafts, also where a bias had changed the target's choice.
    assert max(count for step in report.steps[0] for count in step.committed) > 3


def finish(bed: Any, prompt: list[int], stops: list[list[int]], quick: bool) -> dict[str, Any]:
    """Scene: for each of ``stops``, a place and its token, requests that end there in each way."""
    if quick:
        quicken(bed)
    bed.scheduler.tokenizer = Words()
    free = bed.free_slots()
    found: dict[str, Any] = {}
    ways: dict[str, Any] = {
        "tokens": lambda at, token: {"tokens": at + 1},
        "stop token": lambda at, token: {"ignore_eos": False, "stop_token_ids": [token]},
        "stop string": lambda at, token: {"stop": [f"<{token}>"]},
    }
    for way, asked in ways.items():
        ends, later = [], []
        with Cuts.counted(quick) as cuts:
            for at, token in stops:
                request = bed.submit(prompt, **({"tokens": 40} | asked(at, token)))
                bed.run()
                ends.append(list(request.output_ids))
                # Reads on in the rows that the request left in the cache.
                follower = bed.submit([*prompt, *request.output_ids, 7], tokens=4)
                bed.run()
                later.append(list(follower.output_ids))
                bed.scheduler.flush_cache()
        found[way] = {"ends": ends, "later": later, "cuts": cuts.count}
    return found | {"lost": free - bed.free_slots()}


class Cuts:
    """Counts the accepted paths that a finished request left before their end."""

    count = 0

    @classmethod
    @contextmanager
    def counted(cls, trees: bool) -> Iterator[Cuts]:
        own = cls()
        if not trees:
            yield own
            return
        from sglang_overlay.srt.ddtree import commit

        stock = commit.commit

        def watched(path: Any, *others: Any) -> Any:
            result = stock(path, *others)
            own.count += int((result[1] < path.held.sum(dim=1)).sum())
            return result

        with mock.patch.object(commit, "commit", watched):
            yield own


@pytest.mark.parametrize(
    ("attention", "page", "ends"),
    [
        pytest.param("flashmla", 64, slice(3, 6), id="flashmla-page-64-few"),
        pytest.param("flashmla", 64, slice(12), id="flashmla-page-64", marks=pytest.mark.full),
        pytest.param("triton", 1, slice(12), id="triton-page-1", marks=pytest.mark.full),
    ],
)
def test_requests_that_end_inside_a_path(
    stock: Path, overlay: Path, attention: str, page: int, ends: slice
) -> None:
    prompt = LIVE[0]
    workload = Workload(rounds=((tuple(prompt),),), tokens=40)
    known = generate(Launch(tree=stock).plain(), workload).known()
    tokens = known[0][1]
    # Tokens that come for the first time, so that nothing ends before them.
    stops = [(at, token) for at, token in enumerate(tokens) if token not in tokens[:at]][ends]
    scene: dict[str, Any] = {"prompt": prompt, "stops": stops}
    plain = play(finish, Launch(tree=stock).plain(), quick=False, **scene).result
    found = play(finish, ddtree(overlay, attention, page), known=known, quick=True, **scene).result
    assert found["lost"] == plain["lost"] == 0
    for way in ("tokens", "stop token", "stop string"):
        assert found[way]["ends"] == plain[way]["ends"], way
        assert found[way]["later"] == plain[way]["later"], way
        assert found[way]["cuts"] > 0, way
        assert [len(end) for end in found[way]["ends"]] == [at + 1 for at, _ in stops], way


def refuse(bed: Any) -> list[str]:
    """Scene: requests that cannot be served exactly, one by one."""
    embeds = SimpleNamespace(positions=[1], embeds=torch.zeros(1, 512))
    wanted: list[dict[str, Any]] = [
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 20, "min_p": 0.1},
        {"frequency_penalty": 0.5},
        {"presence_penalty": -0.5, "repetition_penalty": 1.2},
        {"min_new_tokens": 3},
        {"regex": "a+"},
        {"asked": {"return_hidden_states": True}},
        {"asked": {"positional_embed_overrides": embeds}},
    ]
    bed.scheduler.tokenizer = Words()
    found = []
    for sampling in wanted:
        request = bed.submit([1, 2, 3], tokens=4, **sampling)
        found.append((request.to_finish or request.finished_reason).message)
        bed.run()
        assert not request.output_ids[1:], request.output_ids
    return found


def test_what_cannot_be_served_exactly_is_refused_by_name(overlay: Path) -> None:
    found = play(refuse, ddtree(overlay)).result
    begin = "DDTREE speculative decoding does not support "
    assert all(message.startswith(begin) for message in found)
    assert [message.removeprefix(begin)[:26] for message in found] == [
        "sampling yet: set temperat",
        "sampling yet: set temperat",
        "frequency_penalty: the pen",
        "presence_penalty, repetiti",
        "min_new_tokens: the penalt",
        "grammar-constrained decodi",
        "return_hidden_states: a ve",
        "positional_embed_overrides",
    ]


def refuse_beside(bed: Any, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Scene: served requests that share their prefill with refused ones."""
    from sglang.srt.layers.sampler import Sampler

    quicken(bed)
    width = bed.scheduler.tp_worker.model_runner.model_config.hidden_size
    embeds = SimpleNamespace(positions=[0], embeds=torch.full((1, width), 3.0))
    greedy: list[bool] = []
    stock = Sampler.forward

    def forward(own: Any, logits_output: Any, sampling_info: Any, *args: Any) -> Any:
        greedy.append(bool(sampling_info.is_all_greedy))
        return stock(own, logits_output, sampling_info, *args)

    with mock.patch.object(Sampler, "forward", forward):
        served = [bed.submit(prompts[0], tokens=tokens)]
        refused = [
            bed.submit([1, 2, 3], tokens=4, temperature=0.9),
            bed.submit([1, 2, 3], tokens=4, asked={"positional_embed_overrides": embeds}),
        ]
        served.append(bed.submit(prompts[1], tokens=tokens))
        bed.run()
    return {
        "tokens": [list(request.output_ids) for request in served],
        "refused": [type(request.finished_reason).__name__ for request in refused],
        "greedy": greedy,
    }


def test_refused_requests_leave_their_neighbours_alone(stock: Path, overlay: Path) -> None:
    plain = generate(Launch(tree=stock).plain(), SMALL)
    prompts = [list(prompt) for prompt in SMALL.prompts[:2]]
    launch = ddtree(overlay)
    found = play(
        refuse_beside, launch, known=plain.known(), prompts=prompts, tokens=SMALL.tokens
    ).result
    assert found["refused"] == ["FINISH_ABORT", "FINISH_ABORT"]
    # One prefill for all four: a sampling request in it took all of them to the random sampler.
    assert found["greedy"] == [True]
    assert tuple(map(tuple, found["tokens"])) == plain.tokens[:2]


# --- below the tokens: every node's logits, every committed row


class Nodes:
    """Keeps each verified tree with its logits."""

    def __init__(self) -> None:
        self.trees: list[dict[str, Any]] = []

    @contextmanager
    def kept(self) -> Iterator[None]:
        from sglang_overlay.srt.ddtree.verify_input import TreeVerifyInput

        stock = TreeVerifyInput.verify

        def verify(info: Any, *, batch: Any, logits_output: Any, **kwargs: Any) -> Any:
            shape = (len(batch.reqs), info.draft_token_num, -1)
            logits = logits_output.next_token_logits.view(shape).clone()
            for row, request in enumerate(batch.reqs):
                self.trees.append(
                    {
                        # The newest output token is the root, which is not in the cache yet.
                        "context": [*request.origin_input_ids, *request.output_ids[:-1]],
                        "tokens": info.tree.tokens[row].tolist(),
                        "parents": info.tree.parents[row].tolist(),
                        "logits": logits[row],
                    }
                )
            return stock(info, batch=batch, logits_output=logits_output, **kwargs)

        with mock.patch.object(TreeVerifyInput, "verify", verify):
            yield


def plain_logits(bed: Any, prompt: list[int]) -> torch.Tensor:
    """Return the logits [vocabulary] that a plain prefill gives behind ``prompt``."""
    runner = bed.scheduler.tp_worker.model_runner
    kept: list[torch.Tensor] = []
    stock = runner.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = stock(*args, **kwargs)
        kept.append(output.logits_output.next_token_logits.clone())
        return output

    bed.scheduler.flush_cache()
    with mock.patch.object(runner, "forward", forward):
        bed.submit(prompt, tokens=1)
        bed.run()
    return kept[0][0]


def worst_node(bed: Any, trees: list[dict[str, Any]]) -> float:
    """Return the largest error of any node's logits, in standard deviations of plain's."""
    worst = 0.0
    for tree in trees:
        paths: list[list[int]] = []
        for token, parent in zip(tree["tokens"], tree["parents"], strict=True):
            paths.append([*(paths[parent] if parent >= 0 else []), token])
        for path, got in zip(paths, tree["logits"], strict=True):
            expected = plain_logits(bed, [*tree["context"], *path])
            worst = max(worst, float((got - expected).abs().max() / expected.std()))
    return worst


class Rows:
    """Keeps the cache rows of every committed token, of target and drafter, by request."""

    def __init__(self) -> None:
        self.rows: dict[str, list[list[float]]] = {}

    @contextmanager
    def kept(self, bed: Any) -> Iterator[None]:
        worker = bed.scheduler.draft_worker
        runner, drafter = worker.model_runner, worker.draft_model_runner
        table = runner.req_to_token_pool.req_to_token
        target = runner.token_to_kv_pool
        # Of an MLA model both the latent's end and the rope part are looked at.
        layers = (
            [target.kv_buffer[-1]]
            if runner.use_mla_backend
            else [
                target.k_buffer[-1],
                target.v_buffer[-1],
            ]
        )
        stock = type(worker)._append_target_hidden_to_draft_kv

        def append(own: Any, batch: Any, draft_input: Any) -> None:
            stock(own, batch, draft_input)
            for request, length in zip(batch.reqs, batch.seq_lens.tolist(), strict=True):
                slots = table[request.req_pool_idx, :length].long()
                both = [
                    drafter.token_to_kv_pool.k_buffer[0][slots].flatten(1)[:, :24],
                    drafter.token_to_kv_pool.v_buffer[0][slots].flatten(1)[:, :8],
                    *(layer[slots].flatten(1)[:, -76:-46] for layer in layers),
                ]
                self.rows[str(list(request.origin_input_ids))] = torch.cat(both, 1).tolist()

        with mock.patch.object(type(worker), "_append_target_hidden_to_draft_kv", append):
            yield


FAULTS = ("mask", "parent", "position", "commit", "hidden gather", "mover")


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """Plant one fault into DDTREE for a while."""
    from sglang_overlay.srt.ddtree import commit, verify_input

    info, path = verify_input.TreeVerifyInput, commit.Path
    with ExitStack() as patches:

        def replace(where: Any, name: str, by: Any) -> None:
            patches.enter_context(mock.patch.object(where, name, by))

        def chain(own: Any) -> torch.Tensor:
            return torch.arange(-1, own.draft_token_num - 1).expand_as(own.tree.parents).int()

        def shifted(own: Any) -> torch.Tensor:
            parents = own.tree.parents.clone()
            parents[:, 2:] = (parents[:, 2:] + 1) % 2
            return parents

        def by_node(tree: Any, starts: torch.Tensor) -> torch.Tensor:
            return starts[:, None] + torch.arange(tree.tokens.shape[1])

        def first(own: Any) -> torch.Tensor:
            rows = torch.arange(own.nodes.shape[0]) * own.tree_size
            return (rows[:, None] + torch.arange(own.nodes.shape[1])).view(-1)

        def backwards(rows: Any, targets: Any, sources: Any, **_: Any) -> None:
            for to, origin in zip(targets.T.flip(0), sources.T.flip(0), strict=True):
                held = origin >= 0
                for tensor in rows.tensors:
                    tensor[to[held]] = tensor[origin[held]]

        def front_slots(own: Any, batch: Any) -> None:
            slots = batch.out_cache_loc.view(-1, own.tree_size)
            width = own.nodes.shape[1]
            batch.token_to_kv_pool_allocator.free(slots[:, width:].reshape(-1))
            batch.out_cache_loc = slots[:, :width].reshape(-1)

        if fault == "mask":
            replace(info, "parents", property(chain))
        elif fault == "parent":
            replace(info, "parents", property(shifted))
        elif fault == "position":
            replace(verify_input, "positions", by_node)
        elif fault == "commit":
            replace(commit, "keep_slots", front_slots)
            replace(commit, "move_rows", lambda *_, **__: None)
        elif fault == "hidden gather":
            replace(path, "rows", property(first))
        elif fault == "mover":
            replace(commit, "move_rows", backwards)
        else:
            assert not fault, fault
        yield


def look_below(bed: Any, prompts: list[list[int]], tokens: int, faults: list[str]) -> Any:
    """Scene: the committed rows as they should be and with each fault; the nodes of some trees."""
    quicken(bed)
    found: dict[str, Any] = {}
    for fault in faults:
        bed.scheduler.flush_cache()
        nodes, rows = Nodes(), Rows()
        with nodes.kept(), rows.kept(bed), planted(fault):
            for prompt in prompts:
                bed.submit(prompt, tokens=tokens)
            bed.run()
        found[fault] = {"rows": rows.rows}
        if fault in ("", "mask", "parent", "position"):
            found[fault]["worst node"] = worst_node(bed, nodes.trees[2:8:3])
    return found


def keep_rows(bed: Any, prompts: list[list[int]], tokens: int) -> Any:
    """Scene: the committed rows of DFLASH's chains."""
    rows = Rows()
    with rows.kept(bed):
        for prompt in prompts:
            bed.submit(prompt, tokens=tokens)
        bed.run()
    return rows.rows


BELOW = [list(SMALL.prompts[0]), list(STANDARD.prompts[0][:61])]
BELOW_TOKENS = 30


def distance(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Return the largest difference of rows that both runs committed."""
    worst = 0.0
    for prompt, rows in theirs.items():
        count = min(len(rows), len(ours[prompt]))
        assert count > len(json.loads(prompt)) + BELOW_TOKENS // 2
        mine, other = torch.tensor(ours[prompt][:count]), torch.tensor(rows[:count])
        worst = max(worst, float((mine - other).abs().max()))
    return worst


@pytest.mark.parametrize(
    ("attention", "page", "grouped"),
    [
        pytest.param("flashmla", 64, False, id="flashmla-page-64"),
        pytest.param("triton", 1, False, id="triton-page-1"),
        pytest.param("triton", 64, True, id="grouped-page-64", marks=pytest.mark.full),
    ],
)
def test_nodes_and_rows_are_those_of_chains_and_faults_show(
    stock: Path, overlay: Path, attention: str, page: int, grouped: bool
) -> None:
    workload = Workload(rounds=(tuple(map(tuple, BELOW)),), tokens=BELOW_TOKENS)
    launch = ddtree(overlay, attention, page, size=16, grouped=grouped)
    known = generate(reference(launch, stock), workload).known()
    chain = Launch(tree=stock, grouped=grouped, attention="triton" if grouped else "flashmla")
    chains = play(keep_rows, chain, known=known, prompts=BELOW, tokens=BELOW_TOKENS).result
    faults = [each for each in ("", *FAULTS) if page > 1 or each != "mover"]
    found = play(
        look_below,
        launch,
        known=known,
        prompts=BELOW,
        tokens=BELOW_TOKENS,
        faults=faults,
    ).result
    assert found[""]["worst node"] < 1e-4
    assert distance(found[""]["rows"], chains) < 1e-4
    for fault in faults[1:]:
        if "worst node" in found[fault]:
            assert found[fault]["worst node"] > 1e-2, fault
        assert distance(found[fault]["rows"], chains) > 1e-2, fault


# --- graphs


def replay_at_the_end(bed: Any) -> list[int]:
    """Scene: a captured verify of one request is replayed, its prefix as long as it can be."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    backend = bed.scheduler.tp_worker.model_runner.attn_backend
    nodes, prefix = backend.num_draft_tokens, backend.max_context_len - 1
    backend.init_cuda_graph_state(1, nodes)
    mask = torch.arange(nodes * (prefix + nodes)).remainder(3) == 0
    lens = torch.tensor([prefix])
    backend.init_forward_metadata_replay_cuda_graph(
        1,
        torch.tensor([1]),
        lens,
        prefix,
        None,
        ForwardMode.TARGET_VERIFY,
        SimpleNamespace(custom_mask=mask),
        seq_lens_cpu=lens,
    )
    held = backend.cuda_graph_custom_mask
    return [held.numel() - len(mask), int((held[: len(mask)] != mask).sum())]


def test_a_captured_verify_reaches_the_end_of_the_context(overlay: Path) -> None:
    """With one request captured SGLang's mask was too short for a tree behind a full context."""
    spare, wrong = play(replay_at_the_end, ddtree(overlay, "triton", 1)).result
    assert spare >= 0
    assert wrong == 0


# --- the server


def test_a_server_without_the_overlay_does_not_know_ddtree(overlay: Path) -> None:
    off = ddtree(overlay, variables=(("SGLANG_OVERLAY_DISABLE", "1"),))
    with pytest.raises(EngineFailure) as failure:
        play(run_workload, off, rounds=TINY.rounds, tokens=1)
    assert "Unknown speculative algorithm name: DDTREE" in failure.value.log


def test_a_server_streams_and_tells_of_its_trees(stock: Path, overlay: Path) -> None:
    plain = generate(Launch(tree=stock).plain(), TINY)
    with serving(ddtree(overlay, size=12), known=plain.known()) as server:
        sampling = {"temperature": 0, "max_new_tokens": TINY.tokens, "ignore_eos": True}
        order = {"input_ids": list(TINY.prompts[0]), "sampling_params": sampling}
        answer = server.post("/generate", order)
        events = server.stream("/generate", order | {"stream": True})
        (state,) = json.loads(server.get("/server_info"))["internal_states"]
    assert tuple(answer["output_ids"]) == plain.tokens[0]
    assert tuple(events[-1]["output_ids"]) == plain.tokens[0]
    assert len(events) > 1
    assert state["overlay"]["draft_trees"]["steps"] > 0
    assert state["overlay"]["tree_size"] == 12
