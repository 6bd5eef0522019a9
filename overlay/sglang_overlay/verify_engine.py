"""Who verifies on a server: SGLang's own backend, or one of the overlay's engines. Chosen once.

The rule is a function of facts, and imports neither torch nor SGLang; ``srt/selection.py`` collects
the facts. The overlay verifies what a backend cannot (a tree on FlashMLA) or does badly: SGLang's
Triton kernel walks a prefix in batch × heads programs, whatever its length. A chain on FlashMLA
stays on the causal kernel, which needs no mask and is as fast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang_overlay import switches
from sglang_overlay.mask_policy import Drafts
from sglang_overlay.switches import Switches

FLASHMLA = "flashmla"
PORTABLE = "portable"
FLASHMLA_BACKEND = "FlashMLABackend"
TRITON_BACKEND = "TritonAttnBackend"
BACKENDS = (FLASHMLA_BACKEND, TRITON_BACKEND)
# The algorithms whose verify on Triton the overlay takes without being asked: it knows their
# drafts. EAGLE and NGRAM bring masks of their own, which SGLang's kernel applies too.
BLOCK_DRAFTS = frozenset({"DFLASH", "DDTREE"})
PAGE_SIZE = 64  # of FlashMLA
MAX_TREE = 256
MAX_WIDTH = 256  # of a head, without MLA
# A row of an absorbed MLA cache: 512 latent and 64 rope columns.
ROW_WIDTH = 576
# FlashMLA's dense decode kernels exist for Hopper alone; the portable ones use what Ampere has.
FLASHMLA_CAPABILITY = (9, 0)
PORTABLE_CAPABILITY = (8, 0)
FP8_CAPABILITY = (8, 9)
CACHE_DTYPES = {
    FLASHMLA: frozenset({"bfloat16", "float8_e4m3fn"}),
    PORTABLE: frozenset({"bfloat16", "float16", "float8_e4m3fn"}),
}
MODEL_DTYPES = {FLASHMLA: frozenset({"bfloat16"}), PORTABLE: frozenset({"bfloat16", "float16"})}


class ImpossibleVerifyError(ValueError):
    """What the operator asked of the verify engine cannot be had on this server."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What decides which engine can run. None means: not known yet, and no obstacle.

    ``backends`` are the class names that target verify runs. ``capability`` is the GPU's, or None
    without an NVIDIA one. ``cache_dtype`` and ``model_dtype`` are names of torch's. ``row_width``
    counts an MLA cache row's elements; a model without MLA has none. ``tree_size`` counts the
    tokens of one verify. ``splits_batches`` names the option that makes SGLang run verify on more
    backend objects than one. ``commits_trees`` is False where SGLang itself cannot keep the
    accepted path of such drafts. ``odd_layer`` says what some attention layer does that no engine
    does; ``hidden_layers`` that none can be asked; ``odd_pool`` is the class name of a KV pool that
    no engine reads.
    """

    backends: tuple[str, ...]
    device: str
    capability: tuple[int, int] | None
    tree_size: int
    deterministic: bool
    commits_trees: bool
    mla: bool = True
    splits_batches: str | None = None
    page_size: int | None = None
    cache_dtype: str | None = None
    model_dtype: str | None = None
    row_width: int | None = None
    odd_layer: str | None = None
    hidden_layers: bool = False
    odd_pool: str | None = None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """``engine`` is one of `switches.ENGINES`; ``obstacles``: why the overlay cannot verify."""

    engine: str
    reason: str
    obstacles: tuple[str, ...] = ()

    @property
    def runs_adapter(self) -> bool:
        """Whether the overlay verifies itself."""
        return self.engine != switches.STOCK

    @property
    def could_run_adapter(self) -> bool:
        """Whether the overlay could verify a tree here."""
        return not self.obstacles

    def line(self) -> str:
        """Return the start-up log line."""
        return f"Verify engine: {self.engine}, because {self.reason}"


def choose(drafts: Drafts | None, facts: Facts, wanted: Switches) -> Choice:
    """Choose the engine for a server.

    Raises:
        ImpossibleVerifyError: ``wanted`` asks for an engine where it cannot run, or contradicts
            itself.
    """
    if wanted.force_tree and wanted.verify_engine == switches.STOCK:
        raise ImpossibleVerifyError(
            f"{switches.FORCE_TREE}=1 and {switches.VERIFY_ENGINE}={switches.STOCK} contradict "
            "each other: unset one of them"
        )
    if drafts is None:
        return Choice(engine=switches.STOCK, reason="there is no speculative decoding")
    if wanted.verify_engine == switches.STOCK:
        why = f"{switches.VERIFY_ENGINE}={switches.STOCK}"
        return Choice(engine=switches.STOCK, reason=f"of {why}", obstacles=(f"{why} forbids it",))
    engine, found = _first_able(facts, wanted.verify_engine)
    if found and (wanted.force_tree or wanted.verify_engine):
        raise ImpossibleVerifyError(_refusal(facts, found, wanted))
    if found:
        return Choice(engine=switches.STOCK, reason="; ".join(found), obstacles=found)
    if wanted.force_tree:
        return Choice(engine=engine, reason=f"of {switches.FORCE_TREE}=1")
    if facts.backends == (TRITON_BACKEND,):
        return _on_triton(drafts, engine, wanted)
    if not drafts.branches:
        return Choice(engine=switches.STOCK, reason=f"{drafts} needs no mask")
    return Choice(engine=engine, reason=f"{drafts} needs a mask")


def obstacles(engine: str, facts: Facts) -> tuple[str, ...]:
    """Return every reason why the overlay cannot verify with ``engine`` under ``facts``."""
    return (*_shared_obstacles(facts), *_OWN_OBSTACLES[engine](facts))


def _on_triton(drafts: Drafts, engine: str, wanted: Switches) -> Choice:
    if wanted.verify_engine:
        why = f"of {switches.VERIFY_ENGINE}={wanted.verify_engine}"
        return Choice(engine=engine, reason=why)
    if drafts.algorithm in BLOCK_DRAFTS:
        why = f"SGLang's own kernel verifies {drafts} without splitting the prefix"
        return Choice(engine=engine, reason=why)
    why = f"SGLang's own kernel verifies {drafts}, and {switches.VERIFY_ENGINE} is not set"
    return Choice(engine=switches.STOCK, reason=why)


def _first_able(facts: Facts, wanted: str) -> tuple[str, tuple[str, ...]]:
    """Return the first engine that can run and nothing, or the last with what is in the way.

    The order is that of preference: FlashMLA is the faster one where it runs.
    """
    candidates = (wanted,) if wanted else (FLASHMLA, PORTABLE)
    own: list[str] = []
    for engine in candidates:
        if not obstacles(engine, facts):
            return engine, ()
        own += _OWN_OBSTACLES[engine](facts)
    return candidates[-1], (*_shared_obstacles(facts), *dict.fromkeys(own))


def _refusal(facts: Facts, found: tuple[str, ...], wanted: Switches) -> str:
    asked = switches.VERIFY_ENGINE if wanted.verify_engine else switches.FORCE_TREE
    name = f" {wanted.verify_engine}" if wanted.verify_engine else ""
    others = [
        engine
        for engine in (FLASHMLA, PORTABLE)
        if wanted.verify_engine not in ("", engine) and not obstacles(engine, facts)
    ]
    works = f" {switches.VERIFY_ENGINE}={others[0]} would work here." if others else ""
    return (
        f"{asked} asks for the overlay's verify engine{name}, which cannot run here: "
        f"{'; '.join(found)}. Change what is named, or unset {asked}.{works}"
    )


def _shared_obstacles(facts: Facts) -> list[str]:
    found = []
    if len(facts.backends) != 1 or facts.backends[0] not in BACKENDS:
        names = "+".join(facts.backends) or "no known backend"
        known = " and ".join(BACKENDS)
        found.append(f"target verify runs on {names}, and the adapter works on {known}")
    if facts.deterministic:
        found.append("--enable-deterministic-inference keeps SGLang's own kernels")
    if facts.row_width not in (None, ROW_WIDTH):
        found.append(f"an MLA row has {facts.row_width} elements, and the engines' {ROW_WIDTH}")
    if facts.odd_layer is not None:
        found.append(f"{facts.odd_layer}, which no engine does")
    if facts.odd_pool is not None:
        found.append(f"the KV pool is a {facts.odd_pool}, whose slots no engine reads")
    if facts.hidden_layers:
        found.append("the model's attention layers cannot be seen")
    if facts.tree_size > MAX_TREE:
        found.append(f"a tree has {facts.tree_size} tokens, and the adapter takes {MAX_TREE}")
    if facts.splits_batches is not None:
        found.append(f"{facts.splits_batches} verifies on several backend objects")
    if not facts.commits_trees:
        found.append(
            "SGLang cannot keep an accepted path of these drafts: its KV pool cannot move rows"
        )
    return found


def _flashmla_obstacles(facts: Facts) -> list[str]:
    found = []
    if not facts.mla:
        found.append("the model has no MLA attention, and FlashMLA does no other")
    if facts.capability != FLASHMLA_CAPABILITY:
        found.append(f"FlashMLA's kernels need sm_90, and this is {_machine(facts)}")
    if facts.page_size not in (None, PAGE_SIZE):
        found.append(f"the page size is {facts.page_size}, and FlashMLA reads pages of {PAGE_SIZE}")
    return found + _dtype_obstacles(FLASHMLA, facts)


def _portable_obstacles(facts: Facts) -> list[str]:
    found = []
    if facts.capability is None or facts.capability < PORTABLE_CAPABILITY:
        found.append(f"the portable kernels need sm_80 or later, and this is {_machine(facts)}")
    elif facts.cache_dtype == "float8_e4m3fn" and facts.capability < FP8_CAPABILITY:
        found.append(f"an fp8 KV cache needs sm_89 or later here, and this is {_machine(facts)}")
    converted = facts.cache_dtype in (None, "float8_e4m3fn")
    if not converted and facts.model_dtype not in (None, facts.cache_dtype):
        found.append(
            f"the KV cache is {facts.cache_dtype} and the model computes in {facts.model_dtype}; "
            "the portable kernels read a cache of the model's type or of fp8"
        )
    return found + _dtype_obstacles(PORTABLE, facts)


def _dtype_obstacles(engine: str, facts: Facts) -> list[str]:
    found = []
    if facts.cache_dtype not in (None, *CACHE_DTYPES[engine]):
        known = " and ".join(sorted(CACHE_DTYPES[engine]))
        found.append(f"the KV cache is {facts.cache_dtype}, and {engine} reads {known}")
    if facts.model_dtype not in (None, *MODEL_DTYPES[engine]):
        known = " and ".join(sorted(MODEL_DTYPES[engine]))
        found.append(f"the model computes in {facts.model_dtype}, and {engine} in {known}")
    return found


def _machine(facts: Facts) -> str:
    sm = "no NVIDIA GPU" if facts.capability is None else "sm_{}{}".format(*facts.capability)
    return f"{facts.device} with {sm}"


_OWN_OBSTACLES: dict[str, Callable[[Facts], list[str]]] = {
    FLASHMLA: _flashmla_obstacles,
    PORTABLE: _portable_obstacles,
}
