"""The decorators on SGLang's functions, and their kill switch."""

from __future__ import annotations

import logging
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from sglang_overlay import switches
from sglang_overlay.srt import admission, hooks, server_info, verify_backend
from sglang_overlay.switches import Switches

DECORATORS = (
    hooks.verify_mask_policy,
    hooks.speculative_arguments,
    hooks.attention_backend,
    hooks.model_worker,
    hooks.internal_state,
)


def stock(*_: Any) -> tuple[str, bool]:
    """Stand for one of SGLang's functions."""
    return "stock", True


@pytest.mark.parametrize("decorate", DECORATORS)
def test_switched_off_every_hook_is_the_stock_function(
    decorate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(switches, "ACTIVE", Switches(disabled=True))
    assert decorate(stock) is stock


@pytest.mark.parametrize("decorate", DECORATORS)
def test_switched_on_a_hook_wraps_and_keeps_the_name(decorate: Any) -> None:
    hooked = decorate(stock)
    assert hooked is not stock
    assert (hooked.__name__, hooked.__doc__) == (stock.__name__, stock.__doc__)


def test_the_mask_policy_never_raises_and_falls_back_to_stock(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Any) -> Any:
        raise RuntimeError("no such attribute")

    monkeypatch.setattr(verify_backend, "resolve_chain", fail)
    resolve = hooks.verify_mask_policy(stock)
    with caplog.at_level(logging.ERROR):
        assert [resolve(object()), resolve(object())] == [("stock", True)] * 2
    assert [record.message for record in caplog.records] == [
        "the overlay cannot resolve object (RuntimeError('no such attribute')); "
        "SGLang's rule is used"
    ]


def test_the_mask_policy_answers_from_the_table() -> None:
    flashmla = type(
        "FlashMLABackend", (), {"__module__": "sglang.srt.layers.attention.flashmla_backend"}
    )
    assert hooks.verify_mask_policy(stock)(flashmla()) == ("FlashMLABackend", False)
    assert hooks.verify_mask_policy(stock)(SimpleNamespace()) == ("SimpleNamespace", True)


def test_arguments_are_judged_after_stock_has_resolved_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    monkeypatch.setattr(admission, "admit_arguments", lambda args: seen.append(args.resolved))

    def resolve(args: Any) -> None:
        args.resolved = "yes"

    args = SimpleNamespace(resolved="no", speculative_algorithm=None)
    hooks.speculative_arguments(resolve)(args)
    assert seen == ["yes"]


@pytest.mark.parametrize("drafter", [True, False])
def test_a_drafter_is_never_judged(drafter: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[Any] = []
    monkeypatch.setattr(admission, "admit_runner", judged.append)
    made: list[Any] = []
    runner = SimpleNamespace(is_draft_worker=drafter)
    hooks.attention_backend(made.append)(runner)
    assert made == [runner]
    assert judged == ([] if drafter else [runner])


def test_the_identity_is_added_to_what_stock_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        server_info, "add_to_internal_state", lambda _, output: output.update(overlay="here")
    )
    assert hooks.internal_state(lambda *_: {"stock": 1})(None, None) == {
        "stock": 1,
        "overlay": "here",
    }


def test_the_hooks_import_neither_torch_nor_sglang() -> None:
    # server_args imports them in every process, before SGLang has set torch up.
    script = (
        "import sys, sglang_overlay.srt.hooks as h\n"
        "heavy = {'torch', 'sglang', 'triton', 'numpy', 'prometheus_client'} & set(sys.modules)\n"
        "sys.exit(f'imported: {sorted(heavy)}' if heavy else 0)"
    )
    path = str(switches.__file__).rsplit("/sglang_overlay/", 1)[0]
    result = subprocess.run(
        [sys.executable, "-c", script], env={"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert (result.returncode, result.stderr) == (0, "")
