"""The committed plots are what the committed results say."""

from __future__ import annotations

import re

import pytest

from benchmarks import plots

PAGE = plots.ROOT / "docs" / "results.md"


@pytest.mark.parametrize("name", ["verify-times.svg", "verify-ratios.svg", "engine-throughput.svg"])
def test_a_committed_plot_is_the_drawn_one(name: str) -> None:
    drawn = plots.plots()[name]
    committed = (plots.DOCS / name).read_text(encoding="utf-8")
    assert committed == drawn, "run benchmarks/plots.py and commit docs/results"
    assert f"results/{name}" in PAGE.read_text()


def test_a_miss_is_shown_as_one() -> None:
    drawn = plots.plots()["verify-ratios.svg"]
    red = plots.COLOURS[3]
    # Four shapes, and the legend.
    assert len(re.findall(rf'<circle [^>]*fill="{red}"', drawn)) == 5


def test_every_link_of_the_page_leads_to_a_file() -> None:
    links = re.findall(r"\]\(([^)]+)\)", PAGE.read_text())
    assert len(links) >= 9
    assert [link for link in links if not (PAGE.parent / link).exists()] == []
