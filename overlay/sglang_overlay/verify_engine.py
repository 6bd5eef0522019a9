"""Who verifies on a server: SGLang's own backend, or the overlay's adapter. Chosen once.

The rule is a function of facts, and imports neither torch nor SGLang; ``srt/selection.py`` collects
the facts. The adapter serves draft trees. A chain stays on FlashMLA's causal kernel, which needs no
mask and is as fast, unless a test forces it through the adapter.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_overlay import switches
from sglang_overlay.mask_policy import Drafts
from sglang_overlay.switches import Switches

FLASHMLA = "flashmla"
FLASHMLA_BACKEND = "FlashMLABackend"
PAGE_SIZE = 64
MAX_TREE = 256
# A row of FlashMLA's cache: 512 latent and 64 rope columns.
ROW_WIDTH = 576
CACHE_DTYPES = frozenset({"bfloat16", "float8_e4m3fn"})
# FlashMLA's dense decode kernels exist for Hopper alone.
CAPABILITY = (9, 0)


class ImpossibleVerifyError(ValueError):
    """What the operator asked of the verify engine cannot be had on this server."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What decides whether the adapter can run. None means: not known yet, and no obstacle.

    ``backends`` are the class names that target verify runs. ``capability`` is the GPU's, or None
    without CUDA. ``cache_dtype`` is a name of torch's. ``row_width`` counts a cache row's elements.
    ``tree_size`` counts the tokens of one verify. ``splits_batches`` names the option that makes
    SGLang run verify on more backend objects than one. ``commits_trees`` is False where SGLang
    itself cannot keep the accepted path of such drafts.
    """

    backends: tuple[str, ...]
    device: str
    capability: tuple[int, int] | None
    tree_size: int
    deterministic: bool
    commits_trees: bool
    splits_batches: str | None = None
    page_size: int | None = None
    cache_dtype: str | None = None
    row_width: int | None = None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """``engine`` is `FLASHMLA` or `switches.STOCK`; ``obstacles``: why the adapter cannot run."""

    engine: str
    reason: str
    obstacles: tuple[str, ...] = ()

    @property
    def runs_adapter(self) -> bool:
        """Whether the overlay verifies itself."""
        return self.engine == FLASHMLA

    @property
    def could_run_adapter(self) -> bool:
        """Whether the overlay could verify a tree here."""
        return not self.obstacles

    def line(self) -> str:
        """Return the start-up log line."""
        return f"Verify engine: {self.engine}, because {self.reason}"


def obstacles(facts: Facts) -> tuple[str, ...]:
    """Return every reason why the adapter cannot verify under ``facts``."""
    found = []
    if facts.backends != (FLASHMLA_BACKEND,):
        names = "+".join(facts.backends) or "no known backend"
        found.append(f"target verify runs on {names}, and the adapter works on {FLASHMLA_BACKEND}")
    if facts.deterministic:
        found.append("--enable-deterministic-inference keeps SGLang's own kernels")
    if facts.capability != CAPABILITY:
        sm = "no CUDA device" if facts.capability is None else "sm_{}{}".format(*facts.capability)
        found.append(f"FlashMLA's kernels need sm_90, and this is {facts.device} with {sm}")
    if facts.page_size not in (None, PAGE_SIZE):
        found.append(f"the page size is {facts.page_size}, and FlashMLA reads pages of {PAGE_SIZE}")
    if facts.cache_dtype is not None and facts.cache_dtype not in CACHE_DTYPES:
        known = " and ".join(sorted(CACHE_DTYPES))
        found.append(f"the KV cache is {facts.cache_dtype}, and the adapter reads {known}")
    if facts.row_width not in (None, ROW_WIDTH):
        found.append(f"a KV row has {facts.row_width} elements, and FlashMLA's have {ROW_WIDTH}")
    if facts.tree_size > MAX_TREE:
        found.append(f"a tree has {facts.tree_size} tokens, and the adapter takes {MAX_TREE}")
    if facts.splits_batches is not None:
        found.append(f"{facts.splits_batches} verifies on several backend objects")
    if not facts.commits_trees:
        found.append(
            "SGLang cannot keep an accepted path of these drafts: its MLA pool has no move_kv_cache"
        )
    return tuple(found)


def choose(drafts: Drafts | None, facts: Facts, wanted: Switches) -> Choice:
    """Choose the engine for a server.

    Raises:
        ImpossibleVerifyError: ``wanted`` asks for the adapter where it cannot run, or contradicts
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
    found = obstacles(facts)
    if found and (wanted.force_tree or wanted.verify_engine == FLASHMLA):
        asked = switches.FORCE_TREE if wanted.force_tree else switches.VERIFY_ENGINE
        raise ImpossibleVerifyError(
            f"{asked} asks for the overlay's verify engine {FLASHMLA}, which cannot run here: "
            f"{'; '.join(found)}. Change what is named, or unset {asked}."
        )
    if found:
        return Choice(engine=switches.STOCK, reason="; ".join(found), obstacles=found)
    if wanted.force_tree:
        return Choice(engine=FLASHMLA, reason=f"of {switches.FORCE_TREE}=1")
    if not drafts.branches:
        return Choice(engine=switches.STOCK, reason=f"{drafts} needs no mask")
    return Choice(engine=FLASHMLA, reason=f"{drafts} needs a mask")
