"""Gluon kernels run on the CPU as plain Python: Triton 3.6.0 interprets only its own language.

A copy of the kernel's module is imported, and its names from Gluon are replaced by the stand-ins
here. Tensors are torch tensors with a layout, pointers offsets into a flat tensor. Checked beside
the numbers: that the operands of an operation have one layout, that shapes and dtypes fit as Gluon
asks, that no address leaves its tensor, and that what the hardware would not order is ordered by
the kernel (barriers and fences around the products of a warp group).

Asynchronous work happens as `Order` says. Late, a copy lands only at the wait that completes it and
its target is NaN until then, and a product reads shared memory only at its wait; early, both happen
at once. A kernel that waits properly gives the same numbers in every order. Warps do not run apart
here, so a barrier that the compiler is to insert is taken for granted.

The partitions of a kernel that gives its warps roles take turns: one runs until it waits at a
barrier in shared memory that is not complete. A late copy that arrives at such a barrier does so
only when nothing else can go on; where copies are early, the last partition goes on first.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language.nvidia import ampere, hopper

NAN = float("nan")
# Most of Gluon's types and torch's have the same names.
_OF_TORCH = {
    dtype: getattr(gl, name)
    for name in ("bfloat16", "float16", "float32", "int32", "int64")
    for dtype in [getattr(torch, name)]
}
_OF_TORCH[torch.float8_e4m3fn] = gl.float8e4nv
_TO_TORCH = {str(ours): dtype for dtype, ours in _OF_TORCH.items()}


@dataclass(frozen=True, kw_only=True)
class Order:
    """When copies land and when products read their operands."""

    late_copies: bool
    late_products: bool


ORDERS = [
    Order(late_copies=copies, late_products=products)
    for copies, products in itertools.product((True, False), repeat=2)
]


class Value:
    """A tensor in registers, or a scalar (``layout`` None); a pointer if it has ``memory``."""

    def __init__(self, data: torch.Tensor, layout: Any = None, memory: Any = None) -> None:
        assert (layout is None) == (data.dim() == 0), "a block has a layout, a scalar none"
        self.data, self.layout, self.memory = data, layout, memory

    @property
    def dtype(self) -> Any:
        if self.memory is not None:
            return SimpleNamespace(element_ty=_OF_TORCH[self.memory.dtype])
        return _OF_TORCH[self.data.dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    def to(self, dtype: Any, bitcast: bool = False) -> Value:
        if isinstance(dtype, gl.pointer_type):
            assert bitcast
            assert self.data == 0, "only whole tensors are seen as another type"
            return Value(self.data, None, self.memory.view(_TO_TORCH[str(dtype.element_ty)]))
        kind = _TO_TORCH[str(dtype)]
        return Value(self.data.view(kind) if bitcast else self.data.to(kind), self.layout)

    def reshape(self, shape: Sequence[int]) -> Value:
        # Its layout is the compiler's; `convert_layout` names one.
        return Value(self.data.reshape(tuple(shape)), ("reshaped", self.layout))

    def __getitem__(self, slices: tuple[Any, ...]) -> Value:
        data, layout = self.data, self.layout
        for axis, part in enumerate(slices):
            if part is None:
                assert isinstance(layout, gl.SliceLayout), layout
                assert layout.dim == axis, (layout, axis)
                data, layout = data.unsqueeze(axis), layout.parent
        return Value(data, layout)

    def __bool__(self) -> bool:
        return bool(self.data.item())

    def __index__(self) -> int:
        return int(self.data.item())

    def __add__(self, other: Any) -> Value:
        if self.memory is None:
            return _combined(torch.add, self, other)
        offsets = other.data if isinstance(other, Value) else torch.tensor(other)
        sum_ = _combined(torch.add, Value(self.data, self.layout), _like(other, offsets.long()))
        return Value(sum_.data, sum_.layout, self.memory)

    def __radd__(self, other: Any) -> Value:
        return self.__add__(other)


def _like(value: Any, data: torch.Tensor) -> Value:
    return Value(data, value.layout if isinstance(value, Value) else None)


def _combined(operation: Callable[..., torch.Tensor], left: Any, right: Any) -> Value:
    """Return ``operation`` on both, by Triton's rules: a number takes the tensor's dtype."""
    values = [side for side in (left, right) if isinstance(side, Value)]
    assert all(value.memory is None for value in values), "no arithmetic on pointers but a sum"
    dtype = values[0].data.dtype
    for value in values[1:]:
        dtype = torch.promote_types(dtype, value.data.dtype)
    if not dtype.is_floating_point and any(isinstance(side, float) for side in (left, right)):
        dtype = torch.float32
    layouts = [value.layout for value in values if value.layout is not None]
    assert all(layout == layouts[0] for layout in layouts), f"layouts differ: {layouts}"
    blocks = [value.data.dim() for value in values if value.layout is not None]
    assert len(set(blocks)) <= 1, f"ranks differ: {blocks}"
    sides = [s.data if isinstance(s, Value) else torch.tensor(s) for s in (left, right)]
    result = operation(*(side.to(dtype) for side in sides))
    return Value(result, layouts[0] if layouts else None)


_OPERATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "sub": torch.sub,
    "mul": torch.mul,
    "truediv": torch.true_divide,
    "floordiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"),  # as the hardware does
    "mod": torch.fmod,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "eq": torch.eq,
    "ne": torch.ne,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
}
for _name, _operation in _OPERATIONS.items():
    setattr(Value, f"__{_name}__", lambda a, b, o=_operation: _combined(o, a, b))
    setattr(Value, f"__r{_name}__", lambda a, b, o=_operation: _combined(o, b, a))


class Shared:
    """A view of shared memory: its elements, and per element what still has to be ordered."""

    def __init__(
        self,
        emulation: Emulation,
        data: torch.Tensor,
        read: torch.Tensor,
        landed: torch.Tensor,
    ) -> None:
        self.emulation = emulation
        self.data = data
        self.read = read  # by a product, and not every warp is known to be past it
        self.landed = landed  # by a copy or a store, and no fence since

    def _view(self, view: Callable[[torch.Tensor], torch.Tensor]) -> Shared:
        return Shared(self.emulation, view(self.data), view(self.read), view(self.landed))

    @property
    def dtype(self) -> Any:
        return _OF_TORCH[self.data.dtype]

    def index(self, index: Any) -> Shared:
        at = int(index)
        assert 0 <= at < self.data.shape[0], f"buffer {at} of {self.data.shape[0]}"
        return self._view(lambda tensor: tensor[at])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return self._view(lambda tensor: tensor.narrow(dim, start, length))

    def permute(self, order: Sequence[int]) -> Shared:
        return self._view(lambda tensor: tensor.permute(*order))

    def _reinterpret(self, dtype: Any, shape: Sequence[int], layout: Any) -> Shared:
        data = self.data.view(_TO_TORCH[str(dtype)])
        assert data.shape == tuple(shape), (data.shape, shape)
        return Shared(self.emulation, data, self.read, self.landed)

    def load(self, layout: Any) -> Value:
        return Value(self.data.clone(), layout)

    def store(self, value: Value) -> None:
        assert value.data.shape == self.data.shape, (value.data.shape, self.data.shape)
        assert value.data.dtype == self.data.dtype, (value.data.dtype, self.data.dtype)
        assert not self.read.any(), "stored before every warp passed a barrier"
        self.data.copy_(value.data)
        program = self.emulation.program
        program.stored = True
        self.landed.fill_(True)
        program.landed.append(self)


@dataclass
class Product:
    """A product of a warp group, in flight until ``value`` is there."""

    left: Any
    right: Shared
    sum: Any
    layout: Any
    value: torch.Tensor | None = None

    def compute(self) -> None:
        before = self.sum.value if isinstance(self.sum, Product) else self.sum
        value = self.left.data.float() @ self.right.data.float()
        assert before is None or before.shape == value.shape, (before.shape, value.shape)
        self.value = value if before is None else before + value


@dataclass
class Program:
    """What one program of the grid has under way."""

    place: tuple[int, ...]
    uncommitted: list[Callable[[], None]] = field(default_factory=list)
    groups: list[list[Callable[[], None]]] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)
    read: list[Shared] = field(default_factory=list)
    landed: list[Shared] = field(default_factory=list)
    stored: bool = False  # and not every warp is known to be past it
    warps: int = 0

    def check_done(self) -> None:
        """See that nothing is left under way."""
        assert not self.products, "a product is never waited for"


@dataclass
class Barrier:
    """A barrier in shared memory."""

    count: int
    pending: int
    phase: int = 0

    def arrive(self, count: int) -> None:
        assert self.pending >= count, "more arrive than the barrier expects"
        self.pending -= count
        if self.pending == 0:
            self.pending = self.count
            self.phase ^= 1


class Stopped(Exception):
    """Another partition has failed."""


class Partition:
    """A role's warps, in a thread that runs only when it is given the turn."""

    def __init__(self, emulation: Emulation, program: Program, call: Callable[[], None]) -> None:
        self._emulation, self.program, self._call = emulation, program, call
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.ready: Callable[[], bool] = lambda: True
        self.failure: BaseException | None = None
        self.ended = self.stopped = False

    def _run(self) -> None:
        self._turn.acquire()
        try:
            if not self.stopped:
                self._call()
                self.program.check_done()
        except Stopped:
            pass
        except Exception as failure:  # noqa: BLE001 it is raised where the turns are given
            self.failure = failure
        self.ended = True
        self._back.release()

    def start(self) -> None:
        self._thread.start()

    def resume(self) -> None:
        """Run until the partition waits or ends; raise what it raised."""
        self._emulation.program = self.program
        self._turn.release()
        self._back.acquire()
        if self.failure is not None:
            raise self.failure

    def wait(self, ready: Callable[[], bool]) -> None:
        """Give the turn back until ``ready``; called by the partition itself."""
        while not ready():
            self.ready = ready
            self._back.release()
            self._turn.acquire()
            if self.stopped:
                raise Stopped
        self.ready = lambda: True

    def stop(self) -> None:
        self.stopped = True
        self._turn.release()
        self._thread.join()


class Emulation:
    """The stand-ins for Gluon's modules, and the kernels that run on them."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.program = Program(place=())
        self._barriers: dict[int, Barrier] = {}
        self._partitions: list[Partition] = []
        self._arrivals: list[Callable[[], None]] = []

    # --- gluon.language -------------------------------------------------------------------------

    def program_id(self, axis: int) -> Value:
        return Value(torch.tensor(self.program.place[axis], dtype=torch.int32))

    def arange(self, start: int, end: int, layout: Any) -> Value:
        return Value(torch.arange(start, end, dtype=torch.int32), layout)

    def full(self, shape: Sequence[int], value: float, dtype: Any, layout: Any) -> Value:
        return Value(torch.full(tuple(shape), value, dtype=_TO_TORCH[str(dtype)]), layout)

    def zeros(self, shape: Sequence[int], dtype: Any, layout: Any) -> Value:
        return self.full(shape, 0, dtype, layout)

    def load(self, pointer: Value, mask: Any = None, other: Any = None) -> Value:
        return Value(_gathered(pointer, mask, other), pointer.layout)

    def store(self, pointer: Value, value: Value, mask: Any = None) -> None:
        assert value.layout == pointer.layout, (value.layout, pointer.layout)
        assert value.data.shape == pointer.data.shape, (value.data.shape, pointer.data.shape)
        live = _live(pointer, mask)
        _inside(pointer, live)
        pointer.memory[pointer.data[live]] = value.data[live].to(pointer.memory.dtype)

    def where(self, condition: Value, left: Any, right: Any) -> Value:
        chosen = _combined(lambda a, b: torch.where(condition.data, a, b), left, right)
        assert chosen.layout in (None, condition.layout), (chosen.layout, condition.layout)
        return Value(chosen.data, condition.layout)

    def reduced(self, operation: Callable[..., torch.Tensor], value: Value, axis: int) -> Value:
        data = operation(value.data, axis)
        layout = None if data.dim() == 0 else gl.SliceLayout(axis, value.layout)
        return Value(data, layout)

    def convert_layout(self, value: Value, layout: Any, assert_trivial: bool = False) -> Value:
        return Value(value.data, layout)

    def allocate_shared_memory(self, dtype: Any, shape: Sequence[int], layout: Any) -> Shared:
        kind = _TO_TORCH[str(dtype)]
        data = torch.full(tuple(shape), NAN if kind.is_floating_point else -1, dtype=kind)
        return Shared(self, data, torch.zeros_like(data).bool(), torch.zeros_like(data).bool())

    def thread_barrier(self) -> None:
        for view in self.program.read:
            view.read.fill_(False)
        self.program.read.clear()
        self.program.stored = False

    def warp_specialize(
        self, roles: Sequence[Any], warps: Sequence[int], registers: Sequence[int]
    ) -> None:
        """Run the partitions in turns until all have ended."""
        assert len(roles) == len(warps) + 1 == len(registers) + 1
        outer = self.program
        self._partitions = [
            Partition(
                self,
                Program(place=outer.place, warps=count),
                partial(function, *arguments),
            )
            for (function, arguments), count in zip(roles, [4, *warps], strict=True)
        ]
        for partition in self._partitions:
            partition.start()
        try:
            while any(not partition.ended for partition in self._partitions):
                able = [each for each in self._partitions if not each.ended and each.ready()]
                if able:
                    # A partition that loads stands last.
                    able[0 if self.order.late_copies else -1].resume()
                else:
                    assert self._arrivals, "every partition waits for another"
                    self._arrivals.pop(0)()
        finally:
            for partition in self._partitions:
                partition.stop()
        self.program = outer

    def widen(self, words: Value) -> Value:
        """Do what the kernel's function of this name does in PTX."""
        wide = words.data.view(torch.float8_e4m3fn).to(torch.float16)
        return Value(wide.view(torch.int32), words.layout)

    def language(self) -> SimpleNamespace:
        def elementwise(operation: Callable[..., torch.Tensor]) -> Callable[[Value], Value]:
            return lambda value: Value(operation(value.data), value.layout)

        def pairwise(operation: Callable[..., torch.Tensor]) -> Callable[[Any, Any], Value]:
            return lambda left, right: _combined(operation, left, right)

        names = ["program_id", "arange", "full", "zeros", "load", "store", "where"]
        names += ["convert_layout", "allocate_shared_memory", "thread_barrier", "warp_specialize"]
        same = [name for name in dir(gl) if name.endswith("Layout") or "float" in name]
        return SimpleNamespace(
            **{name: getattr(self, name) for name in names},
            **{name: getattr(gl, name) for name in [*same, "int32", "int64", "constexpr"]},
            pointer_type=gl.pointer_type,
            **{name: elementwise(getattr(torch, name)) for name in ("exp2", "log2")},
            **{name: pairwise(getattr(torch, name)) for name in ("minimum", "maximum")},
            max=lambda value, axis: self.reduced(torch.amax, value, axis),
            min=lambda value, axis: self.reduced(torch.amin, value, axis),
            sum=lambda value, axis: self.reduced(torch.sum, value, axis),
            static_range=range,
        )

    # --- nvidia.ampere --------------------------------------------------------------------------

    def async_copy_global_to_shared(self, target: Shared, pointer: Value, mask: Any = None) -> None:
        assert target.data.shape == pointer.data.shape, (target.data.shape, pointer.data.shape)
        assert target.data.dtype == pointer.memory.dtype, (target.data.dtype, pointer.memory.dtype)
        assert not target.read.any(), "copied over before every warp passed a barrier"
        if mask is not None and mask.layout is None:
            mask = Value(mask.data.expand(pointer.data.shape), pointer.layout)
        live = _live(pointer, mask)
        values = _gathered(pointer, mask, NAN)

        def land() -> None:
            target.data[live] = values[live]
            target.landed.fill_(True)
            for program in (self.program, *(other.program for other in self._partitions)):
                program.landed.append(target)

        if self.order.late_copies:
            target.data[live] = torch.full_like(values, NAN)[live]
            self.program.uncommitted.append(land)
        else:
            land()
            self.program.uncommitted.append(lambda: None)

    def commit_group(self) -> None:
        self.program.groups.append(self.program.uncommitted)
        self.program.uncommitted = []

    def wait_group(self, outstanding: int = 0) -> None:
        while len(self.program.groups) > outstanding:
            for land in self.program.groups.pop(0):
                land()
        self.thread_barrier()  # Triton puts one behind every such wait.

    def mbarrier_arrive(self, barrier: Shared, increment_count: bool = True) -> None:
        assert not increment_count, "only arrivals that the barrier counts on are emulated"
        copies, self.program.uncommitted = self.program.uncommitted, []
        threads = 32 * self.program.warps

        def arrive() -> None:
            for land in copies:
                land()
            self._barrier(barrier).arrive(threads)

        if self.order.late_copies:
            self._arrivals.append(arrive)
        else:
            arrive()

    def mma_v2(self, a: Value, b: Value, acc: Value) -> Value:
        for index, operand in enumerate((a, b)):
            assert operand.layout.parent == acc.layout, (operand.layout, acc.layout)
            assert operand.layout.operand_index == index, operand.layout
        assert acc.layout.version == [2, 0], acc.layout
        product = a.data.float() @ b.data.float()
        assert product.shape == acc.data.shape, (product.shape, acc.data.shape)
        return Value(acc.data + product, acc.layout)

    # --- nvidia.hopper --------------------------------------------------------------------------

    def fence_async_shared(self) -> None:
        for view in self.program.landed:
            view.landed.fill_(False)
        self.program.landed.clear()

    def warpgroup_mma_init(self, value: Value) -> Product:
        return Product(None, None, None, value.layout, value.data)  # type: ignore[arg-type]

    def warpgroup_mma(
        self, a: Any, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool = False
    ) -> Product:
        assert is_async, "only asynchronous products are emulated"
        if isinstance(a, Value):
            assert a.layout.parent == acc.layout, (a.layout, acc.layout)
        for operand in (a, b):
            assert not isinstance(operand, Shared) or not operand.landed.any(), "no fence"
        before = acc if isinstance(acc, Product) else acc.data
        product = Product(a, b, before if use_acc else None, acc.layout)
        if not self.order.late_products:
            product.compute()
        self.program.products.append(product)
        return product

    def warpgroup_mma_wait(self, outstanding: int = 0, deps: Sequence[Any] = ()) -> Any:
        while len(self.program.products) > outstanding:
            product = self.program.products.pop(0)
            if product.value is None:
                product.compute()
            for operand in (product.left, product.right):
                if isinstance(operand, Shared):
                    operand.read.fill_(True)
                    self.program.read.append(operand)
        results = [dep if isinstance(dep, Value) else self._result(dep) for dep in deps]
        return results[0] if len(results) == 1 else tuple(results)

    def _result(self, product: Product) -> Value:
        if product.value is None:  # not waited for
            return Value(torch.full((), NAN).expand(self._shape(product)), product.layout)
        return Value(product.value, product.layout)

    def _shape(self, product: Product) -> tuple[int, int]:
        return product.left.data.shape[0], product.right.data.shape[1]

    # --- nvidia.hopper.mbarrier -----------------------------------------------------------------

    def _barrier(self, barrier: Shared) -> Barrier:
        assert barrier.data.shape == (1,), barrier.data.shape
        return self._barriers[barrier.data.data_ptr()]

    def barriers(self) -> SimpleNamespace:
        def init(barrier: Shared, count: int) -> None:
            assert barrier.data.shape == (1,), barrier.data.shape
            self._barriers[barrier.data.data_ptr()] = Barrier(count, count)
            self.program.stored = True

        def wait(barrier: Shared, phase: int) -> None:
            state = self._barrier(barrier)
            (partition,) = (each for each in self._partitions if each.program is self.program)
            partition.wait(lambda: state.phase != phase)

        def arrive(barrier: Shared, count: int) -> None:
            # One thread arrives, for all.
            assert not self.program.stored, "arrived before every warp passed a barrier"
            assert not self.program.read, "arrived before every warp passed a barrier"
            self._barrier(barrier).arrive(count)

        layout = hopper.mbarrier.MBarrierLayout
        return SimpleNamespace(init=init, wait=wait, arrive=arrive, MBarrierLayout=layout)

    # --- kernels --------------------------------------------------------------------------------

    def kernel(self, source: Path, name: str) -> EmulatedKernel:
        """Return the kernel ``name`` of the module at ``source``, which is imported anew."""
        specification = importlib.util.spec_from_file_location(f"emulated_{source.stem}", source)
        assert specification is not None
        assert specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        for key, value in list(vars(module).items()):
            setattr(module, key, self._stand_in(key, value))
        vars(module)["range"] = lambda *bounds: (
            Value(torch.tensor(step, dtype=torch.int32)) for step in range(*bounds)
        )
        return EmulatedKernel(self, getattr(module, name))

    def _stand_in(self, name: str, value: Any) -> Any:
        if value is gl:
            return self.language()
        if value is ampere.async_copy:
            return self
        if value is hopper.mbarrier:
            return self.barriers()
        if name == "widen":
            return self.widen
        if isinstance(value, gl.constexpr):
            return value.value
        if isinstance(value, GluonJITFunction):
            return value.fn
        if callable(value) and getattr(hopper, name, None) is value:
            return getattr(self, name)
        return value


class EmulatedKernel:
    """A kernel that is launched as a real one."""

    def __init__(self, emulation: Emulation, function: Callable[..., None]) -> None:
        self._emulation, self._function = emulation, function
        self.launches = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **named: self._launch(grid, arguments, named)

    def _launch(self, grid: tuple[int, ...], arguments: Any, named: dict[str, Any]) -> None:
        self.launches += 1
        known = inspect.signature(self._function).parameters
        named = {name: value for name, value in named.items() if name in known}
        values = [_argument(argument) for argument in arguments]
        for place in itertools.product(*map(range, grid)):
            self._emulation.program = Program(place=place)
            self._function(*values, **named)
            self._emulation.program.check_done()


def _argument(argument: Any) -> Value:
    """Return a kernel's run-time argument as the kernel sees it."""
    if isinstance(argument, torch.Tensor):
        first = argument.storage_offset()
        extent = argument.untyped_storage().nbytes() // argument.element_size() - first
        flat = argument.as_strided((extent,), (1,))
        return Value(torch.tensor(0), memory=flat)
    if isinstance(argument, float):
        return Value(torch.tensor(argument, dtype=torch.float32))
    # The launcher passes what fits as int32, so that products of it may wrap around.
    dtype = torch.int32 if abs(argument) < 1 << 31 else torch.int64
    return Value(torch.tensor(argument, dtype=dtype))


def _live(pointer: Value, mask: Any) -> torch.Tensor:
    if mask is None:
        return torch.ones(pointer.data.shape, dtype=torch.bool)
    assert mask.layout == pointer.layout, (mask.layout, pointer.layout)
    return mask.data.expand(pointer.data.shape)


def _inside(pointer: Value, live: torch.Tensor) -> None:
    offsets = pointer.data[live]
    size = pointer.memory.numel()
    inside = (offsets >= 0) & (offsets < size)
    assert inside.all(), f"offset {offsets[~inside][:1].tolist()} is outside of {size} elements"


def _gathered(pointer: Value, mask: Any, other: Any) -> torch.Tensor:
    live = _live(pointer, mask)
    _inside(pointer, live)
    # What a masked load leaves undefined is NaN, or the lowest number of an integer.
    memory = pointer.memory
    filler = other
    if filler is None:
        filler = NAN if memory.dtype.is_floating_point else torch.iinfo(memory.dtype).min
    result = torch.full(pointer.data.shape, filler, dtype=memory.dtype)
    result[live] = memory[pointer.data[live]]
    return result
