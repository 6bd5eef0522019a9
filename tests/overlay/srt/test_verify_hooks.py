"""The decorators on SGLang's attention backends: who is asked, and when stock goes on alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_overlay import switches
from sglang_overlay.attention.plan import PlanSizes
from sglang_overlay.mask_policy import Drafts
from sglang_overlay.srt import tree_verify, verify_hooks
from sglang_overlay.switches import Switches

NODES = 4
SLOTS = torch.arange(14)
VERIFY = SimpleNamespace(is_target_verify=lambda: True)
DECODE = SimpleNamespace(is_target_verify=lambda: False)


class Adapter:
    """Stands for the adapter: keeps the steps it is given."""

    def __init__(self) -> None:
        self.plan = SimpleNamespace(sizes=PlanSizes(max_requests=3, max_context=64, nodes=NODES))
        self.steps: list[Any] = []

    def prepare(self, step: Any, heads: int) -> None:
        parents = None if step.parents is None else step.parents.tolist()
        self.steps.append((step.prefix_lens.tolist(), step.request_rows.tolist(), parents, heads))
        self.full_mask = step.full_mask

    def attend(self, query: Any, cache: Any, slots: Any, **scales: float) -> Any:
        self.attended = (tuple(query.shape), cache, slots, scales)
        return torch.ones(query.shape[0], query.shape[1], 512)


def backend_with_adapter(algorithm: str = "DFLASH", width: int = 1) -> tuple[Any, Adapter]:
    backend, adapter = SimpleNamespace(), Adapter()
    table = torch.zeros(3, 64, dtype=torch.int32)
    drafts = Drafts(algorithm=algorithm, width=width)
    verify = tree_verify.TreeVerify(
        adapter,  # type: ignore[arg-type]
        drafts,
        req_to_token=table,
        heads=2,
    )
    tree_verify.attach(backend, verify)
    return backend, adapter


def stock(*arguments: Any, **named: Any) -> tuple[str, int]:
    """Stand for a method of SGLang's."""
    return "stock", len(arguments) + len(named)


def call(hook: str, backend: Any, mode: Any, spec: Any = None) -> Any:
    """Call one decorated method as SGLang does, for two requests in a graph of three."""
    rows, lens = torch.tensor([2, 1, 0]), torch.tensor([9, 30, 1])
    decorated: Any = getattr(verify_hooks, hook)(stock)
    if hook == "eager_metadata":
        batch = SimpleNamespace(
            forward_mode=mode, req_pool_indices=rows, seq_lens=lens, spec_info=spec
        )
        return decorated(backend, batch)
    if hook == "capture_metadata":
        return decorated(backend, 3, 12, rows, lens, None, mode, spec)
    if hook == "replay_metadata":
        return decorated(backend, 3, rows, lens, 40, None, mode, spec, seq_lens_cpu=lens)
    batch = SimpleNamespace(
        forward_mode=mode,
        out_cache_loc=SLOTS,
        token_to_kv_pool=SimpleNamespace(
            set_kv_buffer=lambda *stored: backend.__dict__.update(stored=stored),
            get_key_buffer=lambda layer_id: f"cache {layer_id}",
        ),
    )
    layer = SimpleNamespace(tp_q_head_num=2, head_dim=576, v_head_dim=512, layer_id=5, scaling=0.1)
    return decorated(backend, torch.zeros(SLOTS.numel(), 2 * 576), "k", "v", layer, batch)


HOOKS = ("eager_metadata", "capture_metadata", "replay_metadata", "forward_extend")


@pytest.mark.parametrize("hook", [*HOOKS, "graph_buffers", "graph_state"])
def test_switched_off_every_hook_is_the_stock_method(
    hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(switches, "ACTIVE", Switches(disabled=True))
    assert getattr(verify_hooks, hook)(stock) is stock


@pytest.mark.parametrize("hook", HOOKS)
def test_without_an_adapter_or_outside_verify_stock_gets_all_its_arguments(hook: str) -> None:
    taken = {"eager_metadata": 2, "capture_metadata": 8, "replay_metadata": 9, "forward_extend": 7}
    assert call(hook, SimpleNamespace(), VERIFY) == ("stock", taken[hook])
    backend, adapter = backend_with_adapter()
    assert call(hook, backend, DECODE) == ("stock", taken[hook])
    assert adapter.steps == []


def drafted(**topology: Any) -> Any:
    return SimpleNamespace(draft_token_num=NODES, **topology)


@pytest.mark.parametrize("hook", ["eager_metadata", "replay_metadata"])
def test_parents_and_padding_reach_the_adapter(hook: str) -> None:
    backend, adapter = backend_with_adapter()
    parents = torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, 1]])
    call(hook, backend, VERIFY, drafted(parents=parents, custom_mask=None))
    lens, rows, found, heads = adapter.steps[0]
    assert (lens, rows, heads) == ([9, 30, 1], [2, 1, 0], 2)
    # The padding row keeps a valid topology.
    assert found == [*parents.tolist(), [-1, 0, 1, 2]]


def test_a_full_mask_is_handed_on_as_it_is() -> None:
    backend, adapter = backend_with_adapter()
    mask = torch.tensor([True, False, True])
    call("replay_metadata", backend, VERIFY, drafted(custom_mask=mask))
    assert adapter.steps[0][2] is None
    assert adapter.full_mask.data_ptr() == mask.data_ptr()
    assert adapter.full_mask.tolist() == mask.tolist()


def test_a_mask_in_bytes_as_eagle_fills_it_on_triton_is_one_too() -> None:
    backend, adapter = backend_with_adapter("EAGLE", width=4)
    mask = torch.tensor([1, 0, 1], dtype=torch.uint8)
    call("eager_metadata", backend, VERIFY, drafted(custom_mask=mask))
    assert adapter.full_mask.tolist() == [True, False, True]


def test_the_mask_of_a_chain_that_is_filled_after_preparing_is_not_read() -> None:
    backend, adapter = backend_with_adapter("EAGLE", width=1)
    mask = torch.zeros(7, dtype=torch.bool)
    call("replay_metadata", backend, VERIFY, drafted(custom_mask=mask))
    assert adapter.full_mask is None
    assert adapter.steps[0][2] == [[-1, 0, 1, 2]] * 3


def test_sinks_are_refused() -> None:
    backend, _ = backend_with_adapter()
    layer = SimpleNamespace(layer_id=5)
    batch = SimpleNamespace(forward_mode=VERIFY)
    forward: Any = verify_hooks.forward_extend(stock)
    with pytest.raises(ValueError, match="sinks: got some in layer 5, needed none"):
        forward(backend, "q", "k", "v", layer, batch, sinks=torch.ones(2))
    plain = forward(SimpleNamespace(), "q", "k", "v", layer, batch, sinks=torch.ones(2))
    assert plain == ("stock", 8)


def graph_tokens(backend: Any) -> int:
    """Return for how many tokens stock would allocate its buffers, of 24 for 3 requests."""
    hooked: Any = verify_hooks.graph_state(lambda backend, max_bs, tokens: tokens)
    return int(hooked(backend, max_bs=3, max_num_tokens=24))


def test_buffers_of_graphs_that_are_never_captured_are_small() -> None:
    assert graph_tokens(SimpleNamespace()) == 24
    assert graph_tokens(backend_with_adapter()[0]) == 3
    # EAGLE's masks are made in one of these buffers.
    assert graph_tokens(backend_with_adapter("EAGLE", width=4)[0]) == 24
    assert graph_tokens(backend_with_adapter("PLUGIN", width=4)[0]) == 24


@pytest.mark.parametrize(
    ("drafts", "verified", "length"),
    [(8, False, 24 * 112), (8, True, 3 * 100), (None, False, 2400)],
)
def test_a_graphs_mask_has_room_for_the_drafts_of_a_full_context(
    drafts: int | None, verified: bool, length: int
) -> None:
    """SGLang's has columns for a context of 100 alone; without a verify nobody reads it."""
    backend = backend_with_adapter()[0] if verified else SimpleNamespace()
    backend.num_draft_tokens = drafts
    backend.req_to_token = torch.zeros(5, 112)

    def make(backend: Any, max_bs: int, max_num_tokens: int) -> None:
        backend.cuda_graph_custom_mask = torch.zeros(max_num_tokens * 100, dtype=torch.uint8)

    hooked: Any = verify_hooks.graph_state(make)
    hooked(backend, 3, 24)
    mask = backend.cuda_graph_custom_mask
    assert (mask.numel(), mask.dtype) == (length, torch.uint8)


@pytest.mark.parametrize("spec", [None, drafted(custom_mask=None), drafted()])
def test_without_a_topology_every_request_has_a_chain(spec: Any) -> None:
    backend, adapter = backend_with_adapter()
    call("eager_metadata", backend, VERIFY, drafted(parents=torch.full((3, NODES), -1)))
    call("eager_metadata", backend, VERIFY, spec)
    assert adapter.steps[1][2] == [[-1, 0, 1, 2]] * 3


def test_capture_never_looks_at_the_spec_input() -> None:
    backend, adapter = backend_with_adapter()
    call("capture_metadata", backend, VERIFY, SimpleNamespace(custom_mask=torch.ones(1)))
    assert adapter.steps[0][2] == [[-1, 0, 1, 2]] * 3


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (SimpleNamespace(draft_token_num=5), "draft_token_num: got 5, needed 4"),
        (drafted(parents=torch.zeros(4, NODES)), r"parents: got \(4, 4\), needed at most 3 × 4"),
        (drafted(parents=torch.zeros(3, 5)), r"parents: got \(3, 5\), needed at most 3 × 4"),
    ],
)
def test_a_tree_that_does_not_fit_is_refused(spec: Any, message: str) -> None:
    backend, adapter = backend_with_adapter()
    with pytest.raises(ValueError, match=message):
        call("eager_metadata", backend, VERIFY, spec)
    assert adapter.steps == []


def test_forward_stores_the_rows_and_attends_to_those_of_the_step() -> None:
    """Under DP attention SGLang fills the tokens of an eager batch up behind its requests."""
    backend, adapter = backend_with_adapter()
    call("eager_metadata", backend, VERIFY, drafted())
    out = call("forward_extend", backend, VERIFY)
    assert tuple(out.shape) == (14, 2 * 512)
    assert out.sum(1).tolist() == [1024] * 12 + [0] * 2
    assert backend.stored[1:] == (SLOTS, "k", "v")
    shape, cache, slots, scales = adapter.attended
    assert (shape, cache, scales) == ((12, 2, 576), "cache 5", {"softmax_scale": 0.1})
    assert slots.tolist() == list(range(12))


def test_a_compiled_model_runs_the_adapter_untraced() -> None:
    """--enable-torch-compile: the count of launches would make Dynamo compile every call anew."""
    backend, adapter = backend_with_adapter()
    traced: list[bool] = []
    attend = adapter.attend

    def watched(*given: Any, **scales: float) -> Any:
        traced.append(torch.compiler.is_compiling())
        return attend(*given, **scales)

    adapter.attend = watched  # type: ignore[method-assign]
    call("eager_metadata", backend, VERIFY, drafted())
    compiled = torch.compile(lambda: call("forward_extend", backend, VERIFY), backend="eager")
    for _ in range(3):
        compiled()
    assert traced == [False] * 3


def test_the_counter_counts_prepared_steps() -> None:
    backend, _ = backend_with_adapter()
    for hook in HOOKS[:3]:
        call(hook, backend, VERIFY, drafted())
    assert tree_verify.of(backend, VERIFY).steps == 3  # type: ignore[union-attr]


def backend_of(context: int, drafts: int) -> Any:
    """Return a backend as far as its page table goes; SGLang has 4 spare columns a request."""
    table = torch.zeros(3, context + 4 + drafts, dtype=torch.int32)
    return SimpleNamespace(req_to_token=table, max_context_len=context)


def table_given(backend: Any, *more: Any) -> Any:
    """Return the page table that SGLang's method is given for 3 requests."""
    decorated: Any = verify_hooks.graph_buffers(lambda *arguments: arguments)
    assert decorated(backend, 3, 300, *more)[:3] == (backend, 3, 300)
    return decorated(backend, 3, 300, *more)[3]


@pytest.mark.parametrize("context", [4032, 4095, 4096])
@pytest.mark.parametrize("drafts", [1, 2, 16, 64, 65, 66, 128, 256])
def test_the_graph_table_has_room_for_the_drafts_of_a_full_context(
    context: int, drafts: int
) -> None:
    table = table_given(backend_of(context, drafts))
    pages = (context + 64) // 64 if table is None else table.shape[1]
    assert pages * 64 >= context + drafts
    if table is not None:
        assert (tuple(table.shape), table.dtype) == ((3, pages), torch.int32)
        assert (table == 1).all()


def test_a_table_that_is_wide_enough_or_given_is_left_alone() -> None:
    assert table_given(backend_of(4096, 16)) is None
    given = torch.zeros(3, 1)
    assert table_given(backend_of(4096, 100), given) is given


def parts(heads: int, width: int, offset: float) -> torch.Tensor:
    return torch.arange(3 * heads * width, dtype=torch.float32).view(3, heads * width) + offset


def test_rope_parts_are_joined_where_a_backend_takes_none() -> None:
    """EAGLE's drafter on Triton got them apart from a model that asks for FlashInfer's name."""
    seen: list[Any] = []

    def whole(backend: Any, q: Any, k: Any, v: Any, *others: Any) -> None:
        seen.append((q, k, v))

    def apart(backend: Any, q: Any, k: Any, v: Any, *others: Any, q_rope: Any, k_rope: Any) -> None:
        seen.append((q, k, v, q_rope, k_rope))

    layer = SimpleNamespace(tp_q_head_num=2, tp_k_head_num=1)
    batch = SimpleNamespace(forward_mode=DECODE)
    query, query_rope = parts(2, 4, 0), parts(2, 3, 100)
    key, key_rope = parts(1, 4, 200), parts(1, 3, 300)
    for method in (whole, apart):
        forward: Any = verify_hooks.forward_extend(method)
        forward(
            SimpleNamespace(),
            *(query, key, key, layer, batch),
            q_rope=query_rope.view(3, 2, 3),
            k_rope=key_rope.view(3, 1, 3),
        )
    q, k, v = seen[0]
    assert (q.shape, k.shape) == ((3, 2, 7), (3, 1, 7))
    assert torch.equal(q[..., :4].reshape(3, -1), query)
    assert torch.equal(q[..., 4:].reshape(3, -1), query_rope)
    assert torch.equal(k[..., 4:].reshape(3, -1), key_rope)
    assert v is key
    assert seen[1][0] is query
    assert seen[1][3].shape == (3, 2, 3)
