"""Draw the committed results as SVG, into docs/results: ``python benchmarks/plots.py``.

Reads the JSON files of benchmarks/results alone; the same files give the same bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs" / "results"
ADAPTER = "2026-11-30-h200-verify-adapter.json"
PORTABLE = "verify-portable-2026-11-30.json"
ENGINES = {"bf16": "verify-engine-2026-11-30.json", "fp8": "verify-engine-fp8-2026-11-30.json"}
TABLE_SHAPES = 9  # the first rows of the adapter's results: the shapes of the reference table
CHAIN, STOCK = "FlashMLA, causal chain", "stock Triton"
ADAPTER_WAYS = {"floor": "floor", "chain": CHAIN, "adapter": "adapter, random tree", "stock": STOCK}
PORTABLE_WAYS = {"chain": CHAIN, "portable": "portable", "mma": "sm_120's kernel", "stock": STOCK}

COLOURS = ("#9aa0a6", "#4e79a7", "#59a14f", "#e15759")
WIDTH, LABELS, ROW, TOP = 860, 250, 22, 62


class Canvas:
    """SVG elements under a title and a legend, a labelled row each ``ROW`` pixels."""

    def __init__(self, title: str, legend: Sequence[str], rows: int) -> None:
        self.height = TOP + rows * ROW + 40
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{self.height}" '
            f'viewBox="0 0 {WIDTH} {self.height}" font-family="sans-serif" font-size="12">',
            '<rect width="100%" height="100%" fill="white"/>',
        ]
        self.text(10, 20, title, size=14)
        for place, name in enumerate(legend):
            if not name:
                continue
            x = LABELS + 150 * place
            self.parts.append(f'<circle cx="{x}" cy="40" r="5" fill="{COLOURS[place]}"/>')
            self.text(x + 10, 44, name)

    def text(
        self, x: float, y: float, words: str, *, size: int = 12, anchor: str = "start"
    ) -> None:
        """Write ``words`` with their baseline at (x, y)."""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
            f'fill="#222">{escape(words)}</text>'
        )

    def tick(self, x: float, words: str, colour: str = "#ddd") -> None:
        """Draw a vertical line over all rows, with its value below."""
        end = self.height - 34
        self.parts.append(f'<path d="M{x:.1f} {TOP - 8}V{end}" stroke="{colour}"/>')
        self.text(x, end + 16, words, anchor="middle")

    def label(self, row: int, words: str) -> None:
        """Write a row's name."""
        self.text(LABELS - 20, TOP + row * ROW + 8, words, anchor="end")

    def dot(self, row: int, x: float, colour: str) -> None:
        """Draw one value of a row."""
        y = TOP + row * ROW + 4
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y}" r="5" fill="{colour}"/>')

    def bar(self, row: int, x: float, colour: str, words: str) -> None:
        """Draw a bar from the left edge to ``x``, with its value behind."""
        y, length = TOP + row * ROW - 5, x - LABELS
        self.parts.append(
            f'<rect x="{LABELS}" y="{y}" width="{length:.1f}" height="16" fill="{colour}"/>'
        )
        self.text(x + 6, y + 13, words)

    def done(self) -> str:
        """Return the document."""
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def shape_of(row: Mapping[str, Any]) -> str:
    """Return a row's shape as a label."""
    return "bs {requests}, {context}, {heads} heads, {nodes} nodes, {cache}".format(**row)


def times(rows: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> str:
    """Return the times of one layer per shape, on a logarithmic axis: ``names`` by key of a row."""
    legend = tuple(names.values())
    canvas = Canvas("Verify of one layer, ms (log scale), one H200", legend, len(rows))
    low, high = -3.0, 1.5

    def place(value: float) -> float:
        return LABELS + (math.log10(value) - low) / (high - low) * (WIDTH - LABELS - 30)

    for power in (0.001, 0.01, 0.1, 1, 10):
        canvas.tick(place(power), f"{power:g}")
    for number, row in enumerate(rows):
        canvas.label(number, shape_of(row))
        for key, colour in zip(names, COLOURS, strict=True):
            if key in row:
                canvas.dot(number, place(row[key]), colour)
    return canvas.done()


def ratios(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return adapter ÷ FlashMLA's own chain for every shape, with the limit."""
    names = ("", "≤ 1.10", "≤ 6 µs more", "misses")
    canvas = Canvas("Adapter ÷ FlashMLA's causal chain", names, len(rows))

    def place(value: float) -> float:
        return LABELS + (value - 0.95) / 0.35 * (WIDTH - LABELS - 30)

    for value in (1.0, 1.05, 1.1, 1.15, 1.2, 1.25):
        canvas.tick(place(value), f"{value:.2f}", "#e15759" if value == 1.1 else "#ddd")
    for number, row in enumerate(rows):
        canvas.label(number, shape_of(row))
        held = 1 if row["ratio"] <= 1.10 else 2 if row["passes"] else 3
        canvas.dot(number, place(row["ratio"]), COLOURS[held])
    return canvas.done()


def throughput(servers: Mapping[str, Mapping[str, Any]]) -> str:
    """Return tokens per second of the real engine, by cache dtype, batch and server."""
    names = ("", "flashmla (chain alone)", "adapter", "triton")
    rows = [
        (f"{cache}, {batch}, {mode}", names.index(_legend(mode)), figures["tokens_per_second"])
        for cache, found in servers.items()
        for batch in ("bs 1", "bs 4")
        for mode in ("flashmla", "adapter", "triton")
        for figures in [found[mode]["throughput"][batch]]
    ]
    title = "Tokens per second, 33,000 tokens of context, 16 committed a step, one H200"
    canvas = Canvas(title, names, len(rows))
    most = max(value for _, _, value in rows)
    for number, (label, colour, value) in enumerate(rows):
        canvas.label(number, label)
        x = LABELS + value / most * (WIDTH - LABELS - 80)
        canvas.bar(number, x, COLOURS[colour], f"{value:,.0f}")
    return canvas.done()


def _legend(mode: str) -> str:
    return "flashmla (chain alone)" if mode == "flashmla" else mode


def plots() -> dict[str, str]:
    """Return every plot: file name → SVG."""
    rows = json.loads((RESULTS / ADAPTER).read_text())["rows"]
    portable = json.loads((RESULTS / PORTABLE).read_text())["rows"]
    servers = {
        cache: json.loads((RESULTS / name).read_text())["servers"]
        for cache, name in ENGINES.items()
    }
    return {
        "verify-times.svg": times(rows[:TABLE_SHAPES], ADAPTER_WAYS),
        "portable-times.svg": times(portable, PORTABLE_WAYS),
        "verify-ratios.svg": ratios(rows),
        "engine-throughput.svg": throughput(servers),
    }


if __name__ == "__main__":
    DOCS.mkdir(exist_ok=True)
    for file, text in plots().items():
        (DOCS / file).write_text(text, encoding="utf-8")
