"""The table against the class definitions of every release, read from their syntax trees."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from sglang_overlay import mask_table
from sglang_overlay.mask_policy import Kind

from tests.support import trees

ROOT = "sglang.srt.layers.attention.base_attn_backend"


def class_definitions(package: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Yield module, name and base names of every class that could be a backend."""
    for path in sorted((package / "srt").rglob("*.py")):
        # One file of the releases starts with a byte order mark.
        text = path.read_text(encoding="utf-8-sig")
        if "Backend" not in text:
            continue  # a subclass names its base; see the assertion in `attention_backends`
        module = "sglang." + ".".join(path.relative_to(package).with_suffix("").parts)
        with warnings.catch_warnings(action="ignore"):  # of SGLang's own escape sequences
            tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                yield module, node.name, [ast.unparse(base).split(".")[-1] for base in node.bases]


@cache
def attention_backends(release: str) -> frozenset[tuple[str, str]]:
    """Return module and name of every subclass of ``AttentionBackend``, at any distance."""
    definitions = list(class_definitions(trees.tree(release) / "sglang"))
    names = {"AttentionBackend"}
    found: set[tuple[str, str]] = set()
    grown = True
    while grown:
        fresh = {(m, n) for m, n, bases in definitions if names & set(bases)} - found
        grown = bool(fresh)
        found |= fresh
        names |= {name for _, name in fresh}
    assert all("Backend" in name for name in names), "the filter on file text no longer holds"
    assert any(module == ROOT and name == "AttentionBackend" for module, name, _ in definitions)
    return frozenset(found)


@pytest.mark.parametrize("release", mask_table.RELEASES)
def test_every_attention_backend_has_a_row_and_every_row_a_backend(release: str) -> None:
    rows = {(row.module, row.class_name) for row in mask_table.rows_of(release).values()}
    assert rows == attention_backends(release)


@pytest.mark.parametrize("release", mask_table.RELEASES)
def test_a_class_has_one_row_per_release(release: str) -> None:
    names = [row.class_name for row in mask_table.ROWS if release in row.releases]
    assert len(names) == len(set(names))


def test_every_row_that_verify_can_run_ends_in_an_unconditional_case() -> None:
    for row in mask_table.ROWS:
        if row.kind in (Kind.ATTENTION, Kind.RECURRENT):
            assert row.cases[-1].when == (), row.class_name
        else:
            assert row.cases == (), row.class_name


def test_every_name_leads_to_a_class_with_a_row() -> None:
    rows = mask_table.newest_rows()
    assert [name.name for name in mask_table.NAMES if name.class_name not in rows] == []


def test_a_class_of_the_same_name_elsewhere_matches_no_row() -> None:
    double = type("FlashMLABackend", (), {"__module__": "elsewhere"})
    assert mask_table.row_for(double) is None


def test_the_rows_follow_the_sources_that_decide() -> None:
    """The fragments that the rows of the conditional backends rest on are in the releases."""
    layers = Path("sglang/srt/layers/attention")
    evidence = {
        layers / "aiter_backend.py": {
            "self._use_unified_verify = (": {"0.5.12", "0.5.12.post1"},
            "self.topk = topk\n": set(mask_table.RELEASES),
        },
        layers / "flashattention_backend.py": {
            'assert self.fa_impl_ver == 3, "Only FA3 support here"': set(mask_table.RELEASES),
            "topk > 1 speculative decoding with page size > 1 sliding window attention": set(
                mask_table.RELEASES
            ),
            "self.topk = model_runner.server_args.speculative_eagle_topk or 0": set(
                mask_table.RELEASES
            ),
        },
        layers / "flashinfer_backend.py": {
            "(self.sliding_window_size) + seq_lens - prefix_lens,": set(mask_table.RELEASES),
            f"prefix_lens=None,\n{'':16}prefill_wrappers=self.prefill_wrappers_verify,": set(
                mask_table.RELEASES
            ),
        },
        layers / "flashinfer_mla_backend.py": {
            "# TODO: Support topk > 1 with custom mask": set(mask_table.RELEASES)
        },
    }
    for path, fragments in evidence.items():
        for fragment, releases in fragments.items():
            holding = {
                release
                for release in mask_table.RELEASES
                if fragment in (trees.tree(release) / path).read_text()
            }
            assert holding == releases, (path.name, fragment)


@pytest.mark.parametrize("release", mask_table.RELEASES)
@pytest.mark.parametrize(
    "file",
    [
        "cutlass_mla_backend.py",
        "flashmla_backend.py",
        "nsa_backend.py",
        "tokenspeed_mla_backend.py",
        "torch_flex_backend.py",
        "torch_native_backend.py",
        "trtllm_mha_backend.py",
        "trtllm_mla_backend.py",
        "deepseek_v4_backend.py",
    ],
)
def test_a_backend_that_never_reads_the_mask_does_not_name_it(release: str, file: str) -> None:
    path = trees.tree(release) / "sglang/srt/layers/attention" / file
    if path.name[: -len("_backend.py")] in ("tokenspeed_mla", "deepseek_v4"):
        assert path.exists() == (release != "0.5.11")
    assert not path.exists() or "custom_mask" not in path.read_text()
