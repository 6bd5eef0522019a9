"""Compiled kernels run on the CPU: as much of PTX as the kernel of mma.sync needs.

What the Gluon source means is one thing (`gluon_emulation`), how the compiler spreads it over
threads, swizzles shared memory and places barriers another. Here the PTX itself runs, one block at
a time, an instruction for all threads at once. A branch must be taken by all threads alike. A copy
lands only when it is waited for, and its target is no number until then. It is an error if two
warps touch a word of shared memory between two barriers and one of them writes, or if anything
touches what a copy in flight writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Lanes = np.ndarray[Any, Any]
Copy = tuple[Lanes, Lanes, Lanes]  # indices, bytes and warps of what is under way
_LINE = re.compile(r"(?:@(!?)(%p\d+)\s+)?([a-z][\w.:]*)\s*(.*);$")
_OPERAND = re.compile(r"\[[^\]]*\]|[^\s,{}]+")
_WARP = 32
_GAP = 256
_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).half().numpy()
_TYPES = {
    "b8": np.uint8,
    "b16": np.uint16,
    "u16": np.uint16,
    "f32": np.float32,
    "s32": np.int32,
    "u32": np.uint32,
    "b32": np.uint32,
    "s64": np.int64,
    "u64": np.uint64,
    "b64": np.uint64,
    "pred": np.bool_,
}


def _shift(left: Lanes, by: Lanes) -> Lanes:
    shifted: Lanes = left << by.astype(left.dtype)
    return shifted


_ALU: dict[str, Callable[..., Lanes]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "shl": _shift,
    "shr": lambda a, b: a >> b.astype(a.dtype),
    "min": np.fmin,
    "max": np.fmax,
    "div": np.divide,
    "fma": lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float32),
    "ex2": np.exp2,
    "not": np.invert,
    "neg": np.negative,
}
_COMPARE: dict[str, Callable[[Lanes, Lanes], Lanes]] = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "geu": lambda a, b: ~(a < b),
    "ltu": lambda a, b: ~(a >= b),
    "gtu": lambda a, b: ~(a <= b),
    "leu": lambda a, b: ~(a > b),
}


@dataclass(frozen=True)
class Instruction:
    """One line: ``guard`` is (negated, register) or None."""

    guard: tuple[bool, str] | None
    name: str
    operands: list[str]
    text: str


class Memory:
    """Global memory: arrays at addresses with gaps between them, which nothing may touch."""

    def __init__(self, arrays: list[Lanes]) -> None:
        self.addresses, end = [], _GAP
        for array in arrays:
            self.addresses.append(end)
            end += -(-array.nbytes // _GAP) * _GAP + _GAP
        self._arrays = arrays
        self.bytes = np.zeros(end, np.uint8)
        self.valid = np.zeros(end, bool)
        for address, array in zip(self.addresses, arrays, strict=True):
            own = slice(address, address + array.nbytes)
            self.bytes[own] = array.reshape(-1).view(np.uint8)
            self.valid[own] = True

    def write_back(self) -> None:
        """Copy the bytes back into the arrays."""
        for address, array in zip(self.addresses, self._arrays, strict=True):
            array.reshape(-1).view(np.uint8)[:] = self.bytes[address : address + array.nbytes]

    def spots(self, address: Lanes, width: int) -> Lanes:
        """Return the indices [threads, width] of the bytes at ``address``."""
        assert not (address % width).any(), "misaligned"
        spots = address.astype(np.int64)[:, None] + np.arange(width)
        assert spots.min(initial=0) >= 0
        assert self.valid[spots].all(), "outside of every tensor"
        return spots


class Shared:
    """A block's shared memory, with who touched each word since the last barrier."""

    def __init__(self, size: int) -> None:
        self.bytes = np.full(size, 0xFF, np.uint8)
        words = size // 4
        self.pending = np.zeros(words, bool)
        self.writer = np.full(words, -1)
        self.readers = np.zeros(words, np.int64)  # a bit per warp

    def barrier(self) -> None:
        self.writer[:] = -1
        self.readers[:] = 0

    def spots(self, address: Lanes, width: int) -> Lanes:
        assert not (address % width).any(), "misaligned"
        spots = address.astype(np.int64)[:, None] + np.arange(width)
        assert spots.max(initial=0) < self.bytes.size, "outside of shared memory"
        return spots

    def read(self, address: Lanes, width: int, warp: Lanes) -> Lanes:
        """Return the bytes [threads, width] at ``address`` for threads of these warps."""
        spots = self.spots(address, width)
        words, warp = spots[:, ::4] // 4, warp[:, None]
        assert not self.pending[words].any(), "read before the copy was waited for"
        foreign = (self.writer[words] >= 0) & (self.writer[words] != warp)
        assert not foreign.any(), "read what another warp wrote, without a barrier"
        np.bitwise_or.at(self.readers, words, np.left_shift(1, warp))
        return self.bytes[spots]

    def claim(self, address: Lanes, width: int, warp: Lanes) -> Lanes:
        """Check that these warps may write there, and return the spots."""
        spots = self.spots(address, width)
        words, warp = spots[:, ::4] // 4, warp[:, None]
        assert not self.pending[words].any(), "written while a copy is under way"
        foreign = (self.writer[words] >= 0) & (self.writer[words] != warp)
        foreign |= (self.readers[words] & ~np.left_shift(1, warp)) != 0
        assert not foreign.any(), "written what another warp touched, without a barrier"
        self.writer[words] = warp
        return spots


class Block:
    """One block's threads: their registers, and the instruction that they are at."""

    def __init__(
        self, program: Program, memory: Memory, parameters: list[Any], place: tuple[int, int]
    ) -> None:
        self.program, self.memory, self.parameters = program, memory, parameters
        threads = program.threads
        self.registers: dict[str, Lanes] = {
            "%tid.x": np.arange(threads, dtype=np.uint32),
            "%ctaid.x": np.full(threads, place[0], np.uint32),
            "%ctaid.y": np.full(threads, place[1], np.uint32),
        }
        self.warp = np.arange(threads) // _WARP
        self.shared = Shared(program.shared)
        self.copies: list[Copy] = []
        self.groups: list[list[Copy]] = []

    def run(self) -> None:
        at, program = 0, self.program
        while True:
            step = program.steps[at]
            at += 1
            family = step.name.split(".")[0]
            live = self._live(step.guard)
            if family == "ret":
                return
            if family == "bra":
                assert live.all() or not live.any(), f"threads part at: {step.text}"
                at = program.labels[step.operands[0]] if live.any() else at
                continue
            try:
                with np.errstate(all="ignore"):
                    self._step(step, live)
            except AssertionError as error:
                raise AssertionError(f"{error}: {step.text}") from None

    def _live(self, guard: tuple[bool, str] | None) -> Lanes:
        if guard is None:
            return np.ones(self.program.threads, bool)
        negated, register = guard
        live: Lanes = self.registers[register] != negated
        return live

    def value(self, operand: str, kind: str) -> Lanes:
        """Return an operand as ``kind`` of a type, one element per thread."""
        dtype = np.dtype(_TYPES[kind])
        if operand.startswith("%"):
            lanes = self.registers[operand]
            return lanes if kind == "pred" else lanes.view(dtype)
        if operand.startswith("0f"):
            bits = np.uint32(int(operand[2:], 16))
            return np.full(self.program.threads, bits, np.uint32).view(dtype)
        if operand == "global_smem":
            return np.zeros(self.program.threads, dtype)
        number = int(operand, 0)
        unsigned = np.dtype(f"u{dtype.itemsize}")
        mask = (1 << 8 * dtype.itemsize) - 1
        return np.full(self.program.threads, number & mask, unsigned).view(dtype)

    def put(self, register: str, lanes: Lanes, live: Lanes) -> None:
        if lanes.dtype != np.bool_:
            lanes = lanes.view(f"u{lanes.dtype.itemsize}")
        if not live.all():
            lanes = np.where(live, lanes, self.registers.get(register, np.zeros_like(lanes)))
        self.registers[register] = lanes

    def address(self, operand: str) -> Lanes:
        parts = re.split(r"\s*\+\s*", operand.strip("[] "))
        base = self.value(parts[0], "b64" if parts[0].startswith("%rd") else "b32")
        return base.astype(np.int64) + (int(parts[1]) if len(parts) > 1 else 0)

    def _step(self, step: Instruction, live: Lanes) -> None:
        name, *marks = step.name.split(".")
        handler = getattr(self, f"_do_{name}", None)
        if handler is not None:
            handler(marks, step.operands, live)
            return
        target, *sources = step.operands
        kind = marks[-1]
        lanes = _ALU[name](*(self.value(source, self._kind_of(source, kind)) for source in sources))
        self.put(target, lanes.astype(_TYPES[kind], copy=False), live)

    def _kind_of(self, source: str, kind: str) -> str:
        # The distance of a shift of 64 bits has 32.
        return "b32" if re.fullmatch(r"%r\d+", source) and kind.endswith("64") else kind

    def _do_mul(self, marks: list[str], operands: list[str], live: Lanes) -> None:
        target, left, right = operands
        kind = marks[-1]
        a, b = self.value(left, kind), self.value(right, kind)
        if "wide" in marks:
            wide = np.int64 if kind == "s32" else np.uint64
            a, b = a.astype(wide), b.astype(wide)
        self.put(target, a * b, live)

    def _do_mad(self, marks: list[str], operands: list[str], live: Lanes) -> None:
        target, left, right, added = operands
        wide = marks[0] == "wide"
        self._do_mul(marks, [target, left, right], live)
        kind = f"{marks[-1][0]}64" if wide else marks[-1]
        self.put(target, self.value(target, kind) + self.value(added, kind), live)

    def _do_setp(self, marks: list[str], operands: list[str], live: Lanes) -> None:
        a, b = (self.value(operand, marks[-1]) for operand in operands[1:])
        self.put(operands[0], _COMPARE[marks[0]](a, b), live)

    def _do_selp(self, marks: list[str], operands: list[str], live: Lanes) -> None:
        target, left, right, chooser = operands
        a, b = self.value(left, marks[-1]), self.value(right, marks[-1])
        self.put(target, np.where(self.value(chooser, "pred"), a, b), live)

    def _do_bfe(self, marks: list[str], operands: list[str], live: Lanes) -> None:
        target, source, start, length = operands
        size = np.dtype(_TYPES[marks[-1]]).itemsize * 8
        left = size - int(start) - int(length)
        lanes = self.value(source, marks[-1])
        self.put(target, (lanes << left) >> (size - int(length)), live)

    def _do_cvt(self, marks: list[str], operands: list[str], live: Lanes) -> None:
        if marks == ["rn", "f16x2", "e4m3x2"]:
            both = self.value(operands[1], "b16")
            high, low = (_E4M3[part].view(np.uint16) for part in (both >> 8, both & 0xFF))
            self.put(operands[0], high.astype(np.uint32) << 16 | low, live)
            return
        if marks == ["f32", "bf16"]:
            wide = self.registers[operands[1]].astype(np.uint32) << 16
            self.put(operands[0], wide, live)
            return
        if marks == ["f32", "f16"] or marks[-2:] in (["bf16", "f16"], ["bf16", "f32"]):
            kind = np.float16 if marks[-1] == "f16" else np.float32
            wide = self.registers[operands[1]].view(kind).astype(np.float32)
            result = wide if marks[0] == "f32" else _to_bf16(wide).astype(np.uint16)
            self.put(operands[0], result, live)
            return
        if marks[1] in ("bf16x2", "f16x2"):
            narrow = _to_bf16 if marks[1] == "bf16x2" else _to_f16
            high, low = (narrow(self.value(source, "f32")) for source in operands[1:])
            self.put(operands[0], high << 16 | low, live)
            return
        lanes = self.value(operands[1], marks[-1])
        self.put(operands[0], lanes.astype(_TYPES[marks[-2]]), live)

    def _do_mov(self, marks: list[str], operands: list[str], live: Lanes) -> None:
        if len(operands) == 2:
            self.put(operands[0], self.value(operands[1], marks[-1]), live)
        elif operands[0].startswith("%r") and not operands[0].startswith("%rs"):
            low, high = (self.registers[half].astype(np.uint32) for half in operands[1:])
            self.put(operands[0], high << 16 | low, live)
        else:
            both = self.registers[operands[2]]
            for half, lanes in zip(operands[:2], (both & 0xFFFF, both >> 16), strict=True):
                self.put(half, lanes.astype(np.uint16), live)

    def _do_ld(self, marks: list[str], operands: list[str], live: Lanes) -> None:
        *targets, source = operands
        width = int(marks[-1][1:]) // 8
        if marks[0] == "param":
            number = int(source.strip("[]").rsplit("_", 1)[1])
            lanes = np.full(self.program.threads, self.parameters[number])
            assert lanes.dtype.itemsize == width, (source, lanes.dtype)
            self.put(targets[0], lanes, live)
            return
        bytes_ = np.zeros((self.program.threads, width * len(targets)), np.uint8)
        address = self.address(source)[live]
        if marks[0] == "shared":
            bytes_[live] = self.shared.read(address, bytes_.shape[1], self.warp[live])
        else:
            bytes_[live] = self.memory.bytes[self.memory.spots(address, bytes_.shape[1])]
        for target, lanes in zip(targets, bytes_.view(f"u{width}").T, strict=True):
            # No register holds 8 bits.
            wide = lanes.astype(np.uint16) if width == 1 else np.ascontiguousarray(lanes)
            self.put(target, wide, live)

    def _do_st(self, marks: list[str], operands: list[str], live: Lanes) -> None:
        target, *sources = operands
        lanes = np.stack([self.value(source, marks[-1]) for source in sources], axis=1)
        bytes_ = np.ascontiguousarray(lanes).view(np.uint8)[live]
        address = self.address(target)[live]
        if marks[0] == "shared":
            self.shared.bytes[self.shared.claim(address, bytes_.shape[1], self.warp[live])] = bytes_
        else:
            self.memory.bytes[self.memory.spots(address, bytes_.shape[1])] = bytes_

    def _do_cp(self, marks: list[str], operands: list[str], live: Lanes) -> None:
        if marks[1] == "commit_group":
            self.groups.append(self.copies)
            self.copies = []
        elif marks[1] == "wait_group":
            while len(self.groups) > int(operands[0]):
                for spots, bytes_, warp in self.groups.pop(0):
                    self.shared.bytes[spots] = bytes_
                    self.shared.pending[spots[:, ::4] // 4] = False
                    # Other warps see it only behind a barrier.
                    self.shared.writer[spots[:, ::4] // 4] = warp[:, None]
        else:
            target, source, width, taken = operands
            size = int(width, 0)
            # What is not taken from memory is zero.
            some = live if taken == width else live & (self.value(taken, "b32") == size)
            bytes_ = np.zeros((live.size, size), np.uint8)
            bytes_[some] = self.memory.bytes[self.memory.spots(self.address(source)[some], size)]
            bytes_ = bytes_[live]
            spots = self.shared.claim(self.address(target)[live], size, self.warp[live])
            self.shared.bytes[spots] = 0xFF
            self.shared.pending[spots[:, ::4] // 4] = True
            self.copies.append((spots, bytes_, self.warp[live]))

    def _do_bar(self, marks: list[str], operands: list[str], live: Lanes) -> None:
        assert live.all()
        self.shared.barrier()

    def _do_redux(self, marks: list[str], operands: list[str], live: Lanes) -> None:
        assert marks == ["sync", "min", "s32"]
        lowest = self.value(operands[1], "s32").reshape(-1, 32).min(axis=1)
        self.put(operands[0], lowest.repeat(32), live)

    def _do_shfl(self, marks: list[str], operands: list[str], live: Lanes) -> None:
        assert marks[1] == "bfly"
        target, source, mask = operands[:3]
        self.put(target, self.value(source, "b32")[np.arange(live.size) ^ int(mask)], live)

    def _do_ldmatrix(self, marks: list[str], operands: list[str], live: Lanes) -> None:
        *targets, source = operands
        address = self.address(source)[: self.program.threads]
        # The lanes 8 i to 8 i + 7 of a warp hold the addresses of the rows of its matrix i.
        rows = self.shared.read(address, 16, self.warp).view(np.uint16)
        matrices = rows.reshape(-1, 4, 8, 8)
        if "trans" in marks:
            matrices = matrices.transpose(0, 1, 3, 2)
        pairs = np.ascontiguousarray(matrices).view(np.uint32)  # [warps, 4, 8, 4]
        for number, target in enumerate(targets):
            self.put(target, pairs[:, number].reshape(-1).copy(), live)

    def _do_mma(self, marks: list[str], operands: list[str], live: Lanes) -> None:
        assert "m16n8k16" in marks
        kinds = [["f32"] * 4, ["b32"] * 4, ["b32"] * 2, ["f32"] * 4]
        flat = [kind for group in kinds for kind in group]
        lanes = [self.value(o, k) for o, k in zip(operands[4:], flat[4:], strict=True)]
        a, b, c = lanes[:4], lanes[4:6], lanes[6:]
        left = _blocks([_pairs(part, marks[-2]) for part in a], 2)  # [warps, 16, 16]
        right = _blocks([_pairs(part, marks[-2]) for part in b], 1)  # [warps, 8, 16]
        before = np.concatenate(
            [np.stack(c[i : i + 2], axis=1).reshape(-1, 8, 8) for i in (0, 2)], axis=1
        )
        sums = before + left @ right.transpose(0, 2, 1)
        halves = sums.astype(np.float32).reshape(-1, 2, 8, 4, 2)
        for number, target in enumerate(operands[:4]):
            part = halves[:, number // 2, :, :, number % 2]
            self.put(target, part.reshape(-1).copy(), live)


def _to_bf16(lanes: Lanes) -> Lanes:
    bits = lanes.view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def _to_f16(lanes: Lanes) -> Lanes:
    return lanes.astype(np.float16).view(np.uint16).astype(np.uint32)


def _pairs(lanes: Lanes, kind: str) -> Lanes:
    """Return the two numbers of each register of a fragment, [warps, 8, 8] float32."""
    if kind == "f16":
        return lanes.view(np.float16).astype(np.float32).reshape(-1, 8, 8)
    both = np.stack([lanes << 16, lanes & 0xFFFF0000], axis=1).astype(np.uint32)
    return both.view(np.float32).reshape(-1, 8, 8)


def _blocks(parts: list[Lanes], tall: int) -> Lanes:
    """Return fragments put together: ``tall`` of them above each other, then to the right."""
    columns = [np.concatenate(parts[i : i + tall], axis=1) for i in range(0, len(parts), tall)]
    return np.concatenate(columns, axis=2)


class Program:
    """The kernel in a text of PTX."""

    def __init__(self, text: str, shared: int) -> None:
        self.steps: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.shared = shared
        found = re.search(r"\.reqntid (\d+)", text)
        assert found
        self.threads = int(found[1])
        for line in text[found.end() :].splitlines():
            stripped = line.split("//")[0].strip()
            if re.fullmatch(r"\$L__BB\w+:", stripped):
                self.labels[stripped[:-1]] = len(self.steps)
            for statement in re.findall(r"[^;]+;", stripped.removeprefix("{")):
                match = _LINE.match(statement.strip())
                if match is None:
                    continue
                negated, guard, name, rest = match.groups()
                self.steps.append(
                    Instruction(
                        (negated == "!", guard) if guard else None,
                        name,
                        _OPERAND.findall(rest),
                        stripped,
                    )
                )

    def launch(self, grid: tuple[int, int], arrays: list[Lanes], scalars: list[Any]) -> None:
        """Run the grid's blocks in turn; ``arrays`` are the first parameters, changed in place."""
        memory = Memory(arrays)
        parameters: list[Any] = [np.uint64(address) for address in memory.addresses]
        parameters += [
            np.float32(scalar).view(np.uint32) if isinstance(scalar, float) else np.uint32(scalar)
            for scalar in scalars
        ]
        for y in range(grid[1]):
            for x in range(grid[0]):
                Block(self, memory, parameters, (x, y)).run()
        memory.write_back()
