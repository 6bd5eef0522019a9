"""Launches, orders and records: what crosses from a test into the engine's processes and back."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.engine.launch import STUBS, Launch
from tests.support.engine.orders import Orders
from tests.support.engine.record import Record, Step

LAUNCH = Launch(tree=Path("/site"))


def test_launches_are_equal_only_when_all_of_them_is() -> None:
    assert Launch(tree=Path("/site")) == LAUNCH
    assert len({LAUNCH, LAUNCH.plain(), replace(LAUNCH, options=(("page_size", 1),))}) == 3


def test_plain_differs_from_dflash_by_the_speculative_arguments() -> None:
    drafted, plain = LAUNCH.arguments(), LAUNCH.plain().arguments()
    assert {name.split("_")[0] for name in drafted.keys() - plain.keys()} == {"speculative"}
    assert drafted.items() >= plain.items()
    for name in ("model_path", "speculative_draft_model_path"):
        assert Path(drafted[name], "config.json").is_file()


def test_a_command_line_says_what_the_arguments_say() -> None:
    launch = replace(LAUNCH, options=(("page_size", 1), ("disable_cuda_graph", False)))
    command = launch.command(port=1234)
    assert command[command.index("--page-size") + 1] == "1"
    assert command[command.index("--port") + 1] == "1234"
    assert "--skip-tokenizer-init" in command
    assert "--disable-cuda-graph" not in command


def test_the_callers_settings_do_not_reach_the_engine() -> None:
    shell = {"HOME": "/home", "SGLANG_PLUGINS": "x", "TRITON_INTERPRET": "0", "PYTHONPATH": "/y"}
    environment = replace(LAUNCH, variables=(("OMP_NUM_THREADS", "2"),)).environment(shell)
    assert environment["PYTHONPATH"].split(os.pathsep)[:2] == ["/site", str(STUBS)]
    assert environment["HOME"] == "/home"
    assert environment["TRITON_INTERPRET"] == "1"
    assert environment["OMP_NUM_THREADS"] == "2"
    assert "SGLANG_PLUGINS" not in environment


def test_orders_arrive_as_they_were_given(tmp_path: Path) -> None:
    orders = Orders(record=tmp_path, known=(((1, 2), (3,)), ((4,), ())), fault="lost-slot")
    assert Orders.read(orders.environment()) == orders


def test_an_unknown_fault_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such planted fault: 'rust'"):
        Orders(record=tmp_path, fault="rust").environment()


def test_a_record_gives_back_the_steps_of_each_process(tmp_path: Path) -> None:
    step = Step(
        contexts=(5, 9), committed=(1, 8), mask_elements=0, bool_elements=0, allocated_bytes=16
    )
    record = Record(tmp_path)
    record.add(step)
    record.add(step)
    record.add_model()
    record.add_model()
    assert record.steps() == ((step, step),)
    assert record.model_processes() == 1
