"""What target verify does with a draft tree's mask, per attention backend.

The rows are data, in `mask_table`. This module holds their types, the judgement of one backend
under the facts of one server (`Traits`), and the one message that every refusal uses. It imports
neither torch nor SGLang: the walk from a live backend object to its class is in
``srt/verify_backend.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from sglang_overlay import switches


class Chain(Enum):
    """What the verify of a chain (one draft token a depth) asks of a backend."""

    CAUSAL = "right without a mask"
    MASK = "right, but only with a mask"
    FAILS = "fails: no verify path"


class Tree(Enum):
    """What the verify of a branching draft tree gets from a backend."""

    HONOURED = "mask honoured"
    DROPPED = "mask dropped in silence"
    MISREAD = "reads wrong KV rows"
    REJECTED = "rejected by SGLang"
    FAILS = "fails: no verify path"


class Condition(Enum):
    """A fact about a server that decides between the cases of a row."""

    MLA = "MLA model"
    TOPK_ABOVE_ONE = "speculative_eagle_topk > 1"
    PAGE_ABOVE_ONE = "page size > 1"
    FA4 = "FlashAttention 4"
    UNIFIED_VERIFY = "aiter unified attention in verify"
    BIDIRECTIONAL_EXTEND = "bidirectional attention in extend"
    COUNTS_ROWS = "a window or temperature by position"
    WINDOW = "a sliding window"
    TREE_ADAPTER = "the overlay verifies"


class Kind(Enum):
    """The part that a class plays in a server."""

    ATTENTION = "attention"
    RECURRENT = "recurrent layers"  # the linear half of a hybrid model: state instead of a KV cache
    WRAPPER = "delegates"
    DRAFT = "drafter only"
    ABSTRACT = "abstract"


@dataclass(frozen=True, kw_only=True)
class Traits:
    """The facts that the conditions test. None means: not known yet.

    ``counts_rows``: some layer needs a query's position in its request; ``window``: the model has a
    sliding window, of which backends make metadata. Both are known once the model is.
    ``tree_adapter``: the overlay verifies itself on the server's backend.
    """

    topk: int | None = None
    mla: bool | None = None
    page_size: int | None = None
    fa_version: int | None = None
    unified_verify: bool | None = None
    bidirectional_extend: bool | None = None
    counts_rows: bool = False
    window: bool = False
    tree_adapter: bool = False


@dataclass(frozen=True, kw_only=True)
class Case:
    """What happens when all of ``when`` hold and no earlier case of the row does."""

    when: tuple[Condition, ...] = ()
    chain: Chain
    tree: Tree
    because: str


@dataclass(frozen=True, kw_only=True)
class Row:
    """One class of one or more releases. ``module`` is its dotted path: a row matches exactly."""

    class_name: str
    module: str
    releases: frozenset[str]
    kind: Kind = Kind.ATTENTION
    cases: tuple[Case, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BackendName:
    """A value of ``--attention-backend``: the class it makes, and where it can run."""

    name: str
    class_name: str
    mla: bool | None = None  # the class is made for this architecture only; None: for both
    device: str | None = None  # ServerArgs.device; None: any
    paged_trees: bool = False  # SGLang accepts every tree with it at a page size above one
    remark: str = ""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What one class does, under one server's facts; None where they do not decide."""

    class_name: str
    chain: Chain | None
    tree: Tree | None
    because: str
    known: bool = True

    @property
    def needs_chain_mask(self) -> bool:
        """Whether a chain must come with a mask; a class that is not known gets one."""
        return self.chain is not Chain.CAUSAL


@dataclass(frozen=True, kw_only=True)
class Drafts:
    """What the speculative algorithm hands to verify: a chain, or a tree of some width."""

    algorithm: str
    width: int

    @property
    def branches(self) -> bool:
        """Whether the drafts are a tree that is not a chain."""
        return self.width > 1

    def __str__(self) -> str:
        width = f"a tree of width {self.width}" if self.branches else "a chain"
        return f"{self.algorithm} ({width})"


class DroppedMaskError(ValueError):
    """The verify backend cannot honour the mask of the draft tree that was asked for."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The judgement on a whole server: one entry per backend that verify runs.

    ``tree_engine`` names the overlay's engine where it verifies; None where SGLang's own code does.
    ``only_prefills``: the server leaves every verify to another one, so that nothing is judged.
    """

    drafts: Drafts | None  # None: no speculative decoding
    judgements: tuple[Judgement, ...] = ()
    tree_engine: str | None = None
    only_prefills: bool = False

    @property
    def unable(self) -> Judgement | None:
        """The first backend that certainly does not honour the tree, or None."""
        if self.drafts is None or not self.drafts.branches:
            return None
        return next(
            (one for one in self.judgements if one.tree not in (Tree.HONOURED, None)),
            None,
        )

    @property
    def backend(self) -> str:
        """The class names that verify runs, joined by ``+``."""
        return "+".join(one.class_name for one in self.judgements)

    @property
    def summary(self) -> str:
        """The verdict in a few words, as in the start-up line, server info and the metric."""
        if self.drafts is None:
            return "no speculative decoding"
        if self.only_prefills:
            return "a prefill server verifies nothing"
        worst = self.unable or self.judgements[0]
        if not worst.known:
            return "unknown backend class"
        shape, value = ("tree", worst.tree) if self.drafts.branches else ("chain", worst.chain)
        return f"{shape}: {value.value if value else 'undecided'}"

    @property
    def verify_path(self) -> str:
        """Which code masks the draft tokens.

        ``none``, ``causal``, ``stock-mask``, or the overlay's engine with ``-tree`` behind it.
        """
        if self.drafts is None or self.only_prefills:
            return "none"
        if self.tree_engine is not None:
            return f"{self.tree_engine}-tree"
        if self.unable is not None:
            return "causal"
        needs_mask = self.drafts.branches or self.judgements[0].needs_chain_mask
        return "stock-mask" if needs_mask else "causal"


def holds(condition: Condition, traits: Traits) -> bool | None:
    """Return whether ``condition`` holds under ``traits``, or None when the facts do not say."""
    if condition is Condition.MLA:
        return traits.mla
    if condition is Condition.TOPK_ABOVE_ONE:
        return None if traits.topk is None else traits.topk > 1
    if condition is Condition.PAGE_ABOVE_ONE:
        return None if traits.page_size is None else traits.page_size > 1
    if condition is Condition.FA4:
        return None if traits.fa_version is None else traits.fa_version == 4
    if condition is Condition.UNIFIED_VERIFY:
        return traits.unified_verify
    if condition is Condition.COUNTS_ROWS:
        return traits.counts_rows
    if condition is Condition.WINDOW:
        return traits.window
    if condition is Condition.TREE_ADAPTER:
        return traits.tree_adapter
    return traits.bidirectional_extend


def judge(row: Row, traits: Traits) -> Judgement:
    """Judge the class of ``row`` under ``traits``.

    The first case whose conditions all hold decides. Where a condition is unknown, every case that
    could still decide is asked, and what they do not agree on is left undecided.
    """
    candidates = []
    for case in row.cases:
        answers = [holds(condition, traits) for condition in case.when]
        if False in answers:
            continue
        candidates.append(case)
        if None not in answers:
            break
    assert candidates, f"the last case of {row.class_name} must be unconditional"
    chains = {case.chain for case in candidates}
    trees = {case.tree for case in candidates}
    return Judgement(
        class_name=row.class_name,
        chain=chains.pop() if len(chains) == 1 else None,
        tree=trees.pop() if len(trees) == 1 else None,
        because=candidates[0].because,
    )


def unknown(class_name: str) -> Judgement:
    """Return the judgement on a class that has no row: unable, and said so."""
    return Judgement(
        class_name=class_name,
        chain=None,
        tree=Tree.DROPPED,
        because="this overlay does not know the class, so it counts as unable",
        known=False,
    )


def able_names(
    names: Iterable[BackendName],
    rows: Mapping[str, Row],
    traits: Traits,
    device: str | None,
    registered: frozenset[str],
) -> list[str]:
    """Return the ``--attention-backend`` values that would honour a tree on this server.

    A value that would do so at page size 1 alone is listed with that remark.
    """
    able = []
    for name in names:
        elsewhere = name.device is not None and device is not None and name.device != device
        if name.name not in registered or elsewhere or name.mla not in (None, traits.mla):
            continue
        row = rows[name.class_name]
        version = 4 if name.name == "fa4" else 3
        # SGLang rejects its own trees on a paged backend by name, FlashMLA's included, so the
        # adapter is never a way out for them.
        facts = replace(traits, fa_version=version, tree_adapter=False)
        here = judge(row, facts)
        alone = judge(row, replace(facts, page_size=1))
        remarks = [name.remark] if name.remark else []
        if traits.page_size != 1 and not (name.paged_trees and here.tree is Tree.HONOURED):
            remarks.append("with --page-size 1")
        if Tree.HONOURED in (here.tree, alone.tree):
            able.append(f"{name.name} ({', '.join(remarks)})" if remarks else name.name)
    return able


def refusal_message(verdict: Verdict, *, chosen_by: str, able: Iterable[str]) -> str:
    """Return the one message of every refusal.

    It says what was asked, which backend would fail it and why, what would work, and the way past.
    ``chosen_by`` names the option that chose the backend.
    """
    unable = verdict.unable
    assert unable is not None, "only a verdict against a backend has a refusal"
    fault = {
        Tree.DROPPED: "would drop the tree's mask and verify the tree as if it were a chain",
        Tree.MISREAD: "would read wrong KV rows for the tree",
    }.get(unable.tree or Tree.DROPPED, "cannot verify a tree")
    names = ", ".join(able)
    works = (
        f"Backends that honour the mask on this server: {names}."
        if names
        else "No attention backend honours the mask on this server."
    )
    return (
        f"{verdict.drafts} was asked for, but target verify runs on {unable.class_name} "
        f"({chosen_by}), which {fault}: {unable.because}. {works} "
        "Choose one of these, or make the drafts a chain (--speculative-eagle-topk 1, or DFLASH in "
        "place of DDTREE; NGRAM's are always a tree). "
        f"{switches.ALLOW_DROPPED_MASK}=1 starts the server all the same; its output is then not "
        "the target model's."
    )
