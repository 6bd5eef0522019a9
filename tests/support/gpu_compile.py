"""Compile the overlay's kernels for a GPU that is not there, and report what each needs.

Run as a program, without TRITON_INTERPRET, with a capability and a JSON list of kernels with their
tiles: ``python -m tests.support.gpu_compile 90 '[{"kernel": "tree_merge", "nodes": 16, ...}]'``.
Triton's driver is replaced by one that only names a target; ptxas then runs as it would on the
machine.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from sglang_overlay.attention.flashmla_schedule import OVERHEAD, PAGE_SIZE, Layout, warps_for
from sglang_overlay.attention.kernels.ancestors import pack_full_mask_kernel
from sglang_overlay.attention.kernels.flashmla_schedule import flashmla_schedule_kernel
from sglang_overlay.attention.kernels.split_prefix import split_prefix_kernel
from sglang_overlay.attention.kernels.split_prefix_hopper import split_prefix_hopper_kernel
from sglang_overlay.attention.kernels.split_prefix_mma import split_prefix_mma_kernel
from sglang_overlay.attention.kernels.tree_merge import tree_merge_kernel
from sglang_overlay.kvcache import free_runs, placement
from sglang_overlay.kvcache.free_map import FreeMap
from sglang_overlay.kvcache.free_runs import launch_look, longest_runs
from sglang_overlay.kvcache.kernels.longest_runs import list_runs_kernel, pick_runs_kernel
from sglang_overlay.kvcache.kernels.place_units import place_units_kernel
from sglang_overlay.kvcache.kernels.token_slots import token_slots_kernel
from sglang_overlay.kvcache.placement import Demand, RowEnds, launch_place, tiles
from sglang_overlay.kvcache.token_slots import (
    REQUESTS,
    TOKENS,
    WARPS,
    Growth,
    launch_token_slots,
)
from sglang_overlay.tree import top_tokens
from sglang_overlay.tree.kernels.top_tokens import merge_tokens_kernel, top_tokens_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel, LazyDict
from triton.knobs import HookChain
from triton.runtime.driver import driver
from triton.runtime.jit import MockTensor


class NamedDriver:
    """A driver that knows the target's name and nothing else."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def resources(compiled: Any) -> dict[str, int]:
    """Return registers and stack bytes per thread, shared memory per block, and instructions."""
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [folder / "cuobjdump", "-res-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", text)
    assert found, text
    names = {"wgmma": "wgmma.mma_async", "mma": "\tmma.sync", "ldmatrix": "\tldmatrix.sync"}
    names |= {"redux": "redux.sync"}
    return {
        "registers": int(found[1]),
        "stack": int(found[2]),
        "shared": int(compiled.metadata.shared),
        **{key: compiled.asm["ptx"].count(name) for key, name in names.items()},
        **barriers(compiled.asm["ptx"]),
    }


def barriers(ptx: str) -> dict[str, int]:
    """Return how many mbarriers there are, and how many lie where something else is stored.

    Only stores at known addresses are found, such as those of the arguments of warp groups.
    """
    bases = re.findall(r"mov\.b32\s+(%r\d+), global_smem;", ptx)
    places = {
        register: int(offset)
        for register, base, offset in re.findall(r"add\.s32\s+(%r\d+), (%r\d+), (\d+);", ptx)
        if base in bases
    }
    made = [places[register] for register in re.findall(r"mbarrier\.init\S+ \[(%r\d+)\]", ptx)]
    stored: set[int] = set()
    store = r"st\.shared(?:\.v(\d))?\.b(\d+)\s+\[global_smem\+(\d+)\]"
    for several, bits, offset in re.findall(store, ptx):
        stored.update(range(int(offset), int(offset) + int(several or 1) * int(bits) // 8))
    assert stored or not made, "no store at a known address: is it written in another way now?"
    lost = [place for place in made if not stored.isdisjoint(range(place, place + 8))]
    return {"barriers": len(made), "barriers_lost": len(lost)}


def compile_tree_merge(
    capability: int,
    *,
    nodes: int,
    heads: int,
    rows: int,
    values: int,
    key_chunk: int,
    value_chunk: int,
    warps: int,
    stages: int = 1,
    fp8: bool = False,
    parts: bool = False,
) -> dict[str, int]:
    """Compile one specialisation for contiguous bf16 queries and a bf16 or fp8 cache.

    The prefix comes whole in bf16, or with ``parts`` in parts in float32.
    """
    driver.set_active(NamedDriver(capability))
    row = MockTensor(torch.bfloat16)
    cache = MockTensor(torch.float8_e4m3fn) if fp8 else row
    words = -(-nodes // 64)
    part = nodes * heads if parts else 0
    strides = [
        *(heads * 576, 576, 576, 2 * nodes * words),
        *(heads * 512, 512, part * 512),
        *(heads, 1, part),
        *(heads * 512, 512),
    ]
    compiled = tree_merge_kernel.warmup(
        row,
        cache,
        MockTensor(torch.int64),
        MockTensor(torch.int32),
        MockTensor(torch.int32),
        MockTensor(torch.float32) if parts else row,
        MockTensor(torch.float32),
        MockTensor(torch.int32),
        row,
        0.06,
        1.0,
        *strides,
        NODES=nodes,
        HEADS=heads,
        HALF_WORDS=2 * words,
        LATENT=512,
        ROPE=64,
        ROWS=rows,
        COLUMNS=max(16, triton.next_power_of_2(nodes)),
        VALUES=values,
        KEY_CHUNK=key_chunk,
        VALUE_CHUNK=value_chunk,
        PARTS=parts,
        num_warps=warps,
        num_stages=stages,
        grid=(1,),
    )
    return resources(_finished(compiled))


def compile_split_prefix(
    capability: int,
    *,
    nodes: int,
    heads: int,
    page: int,
    rows: int,
    tile: int,
    warps: int,
    stages: int,
    kind: str = "triton",
    fp8: bool = False,
    ptx: bool = False,
) -> dict[str, Any]:
    """Compile one specialisation for contiguous bf16 queries and a bf16 or fp8 cache.

    With ``ptx`` the text of the program is returned too.
    """
    driver.set_active(NamedDriver(capability))
    number, single = MockTensor(torch.int32), MockTensor(torch.float32)
    tensors = (
        MockTensor(torch.bfloat16),
        MockTensor(torch.float8_e4m3fn if fp8 else torch.bfloat16),
        *(number, number, number),
        *(single, single),
    )
    scalars = (0.06, 1.0, heads * 576, 576, 576, 513)
    sizes = {"NODES": nodes, "HEADS": heads, "PAGE": page, "num_warps": warps, "grid": (1, 1)}
    if kind != "triton":
        kernel = {"wgmma": split_prefix_hopper_kernel, "mma": split_prefix_mma_kernel}[kind]
        if kind == "wgmma":
            sizes["num_warps"] = warps // 4  # of one role of four
        done = _finished(kernel.warmup(*tensors, *scalars, **sizes))
        return resources(done) | ({"ptx": done.asm["ptx"]} if ptx else {})
    tiles = {"LATENT": 512, "ROPE": 64, "ROWS": rows, "TILE": tile, "num_stages": stages}
    return resources(_finished(split_prefix_kernel.warmup(*tensors, *scalars, **sizes, **tiles)))


def compile_place_units(
    capability: int, *, from_table: bool, equal: bool, page: int
) -> dict[str, int]:
    """Compile what places a batch whose last slots stand in SGLang's table, or in a list.

    ``equal``: every request needs as much.
    """
    driver.set_active(NamedDriver(capability))
    number = MockTensor(torch.int64)
    compiled = place_units_kernel.warmup(
        MockTensor(torch.uint8),
        number,
        MockTensor(torch.int32) if from_table else number,
        *(number if from_table else None,) * 2,
        None if equal else number,
        *(number,) * 4,
        *(12, 8192 if from_table else 0),
        *(7, 16, 1000, 255, 1024, 99),
        PAGE=page,
        **tiles(),
        num_warps=placement.WARPS,
        grid=(1,),
    )
    return resources(_finished(compiled))


def compile_longest_runs(capability: int, *, pick: bool) -> dict[str, int]:
    """Compile what lists the runs of the pieces, or what picks from the lists."""
    driver.set_active(NamedDriver(capability))
    number, notes = MockTensor(torch.int64), MockTensor(torch.int32)
    kept = {"KEPT": free_runs.KEPT, "num_warps": free_runs.WARPS}
    if pick:
        compiled = pick_runs_kernel.warmup(
            *(notes, number, number, 9), BLOCK=free_runs.BLOCK, **kept, grid=(1,)
        )
    else:
        compiled = list_runs_kernel.warmup(
            *(MockTensor(torch.uint8), notes, 70_000, 9), PIECE=free_runs.PIECE, **kept, grid=(9,)
        )
    return resources(_finished(compiled))


def launch_place_units(capability: int, *, from_table: bool, equal: bool) -> dict[str, Any]:
    """Place a batch three times on a GPU that is only named; return what is launched."""
    last: torch.Tensor | RowEnds = torch.tensor([3, 9])
    if from_table:
        table = torch.zeros(4, 6, dtype=torch.int32)
        last = RowEnds(table=table, rows=torch.tensor([0, 2]), lengths=torch.tensor([1, 2]))
    free = FreeMap(1000, "cpu")
    demand, runs = Demand(last=last, counts=[5, 5] if equal else [5, 4]), longest_runs(free)
    return _launched(capability, lambda: launch_place(free, demand, runs, 8))


def launch_longest_runs(capability: int) -> dict[str, Any]:
    """Look for the longest runs three times on a GPU that is only named, likewise."""
    free = FreeMap(20_000, "cpu")
    return _launched(capability, lambda: launch_look(free))


def compile_token_slots(capability: int, *, one_each: bool) -> dict[str, int]:
    """Compile what says which slots tokens get."""
    driver.set_active(NamedDriver(capability))
    number = MockTensor(torch.int64)
    compiled = token_slots_kernel.warmup(
        None if one_each else number,
        *(number,) * 4,
        PAGE=64,
        REQUESTS=REQUESTS,
        TOKENS=TOKENS,
        num_warps=WARPS,
        grid=(1, 1),
    )
    return resources(_finished(compiled))


def launch_slots_of_tokens(capability: int, *, one_each: bool) -> dict[str, Any]:
    """Give tokens their slots three times on a GPU that is only named, likewise."""
    before, after = torch.tensor([3, 64]), torch.tensor([4, 65] if one_each else [70, 200])
    grown = Growth(
        before=None if one_each else before,
        after=after,
        last=torch.tensor([130, 255], dtype=torch.int32),
        before_on_host=before.numpy(),
        after_on_host=after.numpy(),
        total=int((after - before).sum()),
    )
    pages = torch.arange(sum(grown.pages(64)))
    return _launched(capability, lambda: launch_token_slots(grown, pages, 64))


def _launched(capability: int, call: Callable[[], Any]) -> dict[str, Any]:
    """Return what three of ``call`` launch; each tensor, or its address, by its type and size."""
    driver.set_active(NamedDriver(capability))
    launched: list[list[str]] = []
    asked: dict[int, torch.Tensor] = {}
    address_of = torch.Tensor.data_ptr

    def data_ptr(tensor: torch.Tensor) -> int:
        address: int = address_of(tensor)
        asked[address] = tensor
        return address

    def told(arg: Any) -> str:
        # For hooks, of which there are none: Triton's launch calls an empty chain.
        if isinstance(arg, LazyDict | HookChain):
            return repr(None)
        if isinstance(arg, int):
            arg = asked.get(arg, arg)
        return f"{arg.dtype} {arg.shape}" if isinstance(arg, torch.Tensor) else repr(arg)

    def note(*args: Any) -> None:
        launched.append([told(arg) for arg in args])

    def ready(kernel: Any) -> None:
        kernel.module, kernel.function, kernel._run = "module", "function", note

    with (
        mock.patch.object(CompiledKernel, "_init_handles", ready),
        mock.patch.object(torch.Tensor, "data_ptr", data_ptr),
    ):
        for _ in range(3):
            call()
    return {"launched": launched}


def compile_flashmla_schedule(capability: int, *, layout: str, block: int) -> dict[str, int]:
    """Compile the planner for batches of up to ``block`` requests."""
    driver.set_active(NamedDriver(capability))
    number = MockTensor(torch.int32)
    compiled = flashmla_schedule_kernel.warmup(
        *(number, number, number),
        *(7, 66),
        PAGE=PAGE_SIZE,
        OVERHEAD=OVERHEAD,
        FLAGS=Layout[layout] is Layout.FLAGS,
        SLOTS=Layout[layout] is Layout.SLOTS,
        BLOCK=block,
        num_warps=warps_for(block),
        grid=(67,),
    )
    return resources(_finished(compiled))


def compile_full_mask(capability: int, *, sizes: list[int]) -> dict[str, int]:
    """Compile what packs a mask; add how many kernels masks of these ``sizes`` would take."""
    driver.set_active(NamedDriver(capability))

    def given(size: int) -> tuple[Any, ...]:
        number = MockTensor(torch.int64)
        return MockTensor(torch.uint8), size, number, number, 16, 16

    tiles = {"ROWS": 16, "WORDS": 1, "REQUESTS": 8, "num_warps": 2}
    compiled = pack_full_mask_kernel.warmup(*given(sizes[0]), **tiles, grid=(1, 1, 1))
    *_, bind = pack_full_mask_kernel.device_caches[0]
    variants = {str(bind(*given(size), **tiles)[1]) for size in sizes}
    return resources(_finished(compiled)) | {"kernels": len(variants)}


def compile_top_tokens(capability: int, *, k: int, dtype: str) -> dict[str, int]:
    """Compile what finds the top ``k`` tokens of logits."""
    driver.set_active(NamedDriver(capability))
    compiled = top_tokens_kernel.warmup(
        MockTensor(getattr(torch, dtype)),
        MockTensor(torch.int64),
        *(19_000, 19_000, 5, 1, 15, 0, k),
        K=top_tokens.width(k),
        CHUNK=top_tokens.CHUNK,
        num_warps=top_tokens.WARPS,
        grid=(1, 1),
    )
    return resources(_finished(compiled))


def compile_merge_tokens(capability: int, *, k: int, finish: bool) -> dict[str, int]:
    """Compile what merges the top ``k`` tokens of pieces, or of ranks."""
    driver.set_active(NamedDriver(capability))
    tops, log_probs = MockTensor(torch.int64), MockTensor(torch.float32)
    compiled = merge_tokens_kernel.warmup(
        tops,
        None if finish else tops,
        log_probs if finish else None,
        tops if finish else None,
        *(9, 15, k),
        K=top_tokens.width(k),
        BLOCK=top_tokens.block(k, top_tokens.CHUNK),
        FINISH=finish,
        num_warps=top_tokens.WARPS,
        grid=(1,),
    )
    return resources(_finished(compiled))


def _finished(compiled: Any) -> Any:
    return compiled.result() if hasattr(compiled, "result") else compiled


KERNELS: dict[str, Callable[..., dict[str, Any]]] = {
    "tree_merge": compile_tree_merge,
    "split_prefix": compile_split_prefix,
    "place_units": compile_place_units,
    "place_units_launch": launch_place_units,
    "longest_runs": compile_longest_runs,
    "longest_runs_launch": launch_longest_runs,
    "token_slots": compile_token_slots,
    "token_slots_launch": launch_slots_of_tokens,
    "flashmla_schedule": compile_flashmla_schedule,
    "full_mask": compile_full_mask,
    "top_tokens": compile_top_tokens,
    "merge_tokens": compile_merge_tokens,
}


def main() -> None:
    """Compile what the command line lists, and write the needs of each as JSON."""
    assert os.environ.get("TRITON_INTERPRET") != "1", "the interpreter compiles nothing"
    capability, cases = int(sys.argv[1]), json.loads(sys.argv[2])
    print(json.dumps([KERNELS[case.pop("kernel")](capability, **case) for case in cases]))


if __name__ == "__main__":
    main()
