"""What the fleet is: rows for people in a terminal, one HTML file, and JSON for machines."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from openssh.rollout import Course

SCHEMA = 1
COLUMNS = ("host", "group", "result", "state", "live", "overlay", "sglang", "verify path", "stale")


def to_json(command: str, run: str, courses: Sequence[Course]) -> dict[str, Any]:
    """Return the report: one object for each host."""
    hosts = [_entry(course) for course in courses]
    return {"schema": SCHEMA, "command": command, "run": run, "hosts": hosts}


def _entry(course: Course) -> dict[str, Any]:
    seen = course.seen
    overlay = seen.get("overlay", {})
    identities = [one for one in seen.get("identities", []) if one]
    state = overlay.get("state_after")
    return {
        "host": course.host.name,
        "group": course.host.group,
        "release": overlay.get("release"),
        "overlay": overlay.get("overlay_version") if state == "patched" else None,
        "state": state,
        "live": _live(seen),
        "verify_path": identities[0].get("verify_path") if identities else None,
        "stale": _stale(seen),
        "result": course.result,
        "message": course.message,
        "journal": _left(seen),
    }


def _left(seen: Mapping[str, Any]) -> str | None:
    """Return what an unfinished rollout left on the host; None if there is none."""
    kept = seen.get("journal")
    if not kept:
        return None
    return (
        f"the rollout {kept['run']} is at work here, or was lost in the phase {kept['phase']}: "
        "the next run goes on with this host"
    )


def _stale(seen: Mapping[str, Any]) -> list[str] | None:
    """Return which processes run older code than the disk's; None where it is not known."""
    if "verify" not in seen:
        return None
    return [
        check["message"]
        for check in seen["verify"]["checks"]
        if check["name"] == "processes" and check["status"] == "failed"
    ]


def _live(seen: Mapping[str, Any]) -> str | None:
    if "ready" not in seen:
        return None
    if not seen["ready"]:
        return "down"
    found = {one["fingerprint"] if one else None for one in seen["identities"]}
    if found != {seen["fingerprint"]}:
        return "other than the disk"
    return "as the disk"


def rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return a row of texts for each host, under `COLUMNS`."""
    return [
        (
            host["host"],
            "–" if host["group"] == host["host"] else host["group"],
            host["result"],
            host["state"] or "unknown",
            host["live"] or "–",
            host["overlay"] or "–",
            host["release"] or "–",
            host["verify_path"] or "–",
            "–" if host["stale"] is None else "yes" if host["stale"] else "no",
        )
        for host in report["hosts"]
    ]


def to_text(report: Mapping[str, Any]) -> str:
    """Return the table for a terminal, and under it why a host failed."""
    lines = [COLUMNS, *rows(report)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    notes = [f"{h['host']}: {note}" for h in report["hosts"] for note in _notes(h)]
    return "\n".join([*text, *notes])


def _notes(host: Mapping[str, Any]) -> list[str]:
    return [note for note in (host["message"], *(host["stale"] or ()), host["journal"]) if note]


_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 84rem; }
body { padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
tbody { border-bottom: 1px solid #8884; }
th, td { text-align: left; vertical-align: top; padding: .4rem .6rem; }
th { font-weight: 600; border-bottom: 2px solid #8884; white-space: nowrap; }
td { white-space: nowrap; }
td[data-name=host] { min-width: 16rem; }
.name, .note { white-space: normal; overflow-wrap: anywhere; }
.note { font-size: .9em; opacity: .85; padding-top: 0; }
.good { color: #18794e; } .bad { color: #c62a2f; font-weight: 600; }
@media (prefers-color-scheme: dark) { .good { color: #4cc38a; } .bad { color: #ff8f8f; } }
@media (max-width: 76rem) {
  table, tbody, tr, td { display: block; }
  thead { display: none; }
  tbody { padding: .5rem 0; }
  td { display: flex; gap: .6rem; padding: .1rem 0; white-space: normal; }
  td[data-name]::before { content: attr(data-name); flex: 0 0 6.5rem; }
  td[data-name]::before { color: CanvasText; opacity: .7; font-weight: 400; }
  td[data-name=host] { font-weight: 600; }
  .none { display: none; }
}
"""
_GOOD = {"patched", "as the disk", "done", "unchanged"}
_BAD = {"foreign", "mixed", "interrupted", "absent", "unknown", "down", "other than the disk"}
_BAD |= {"yes", "failed", "refused", "lost", "rolled back", "out of service"}
# Their texts are of any length, and break anywhere.
_NAMES = ("host", "group", "verify path")


def to_html(report: Mapping[str, Any]) -> str:
    """Return one HTML page that needs nothing beside it."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in COLUMNS)
    # One body for each host, so that its notes stay with it.
    bodies = "\n".join(
        f"<tbody><tr>{''.join(map(_cell, COLUMNS, row))}</tr>{_note_row(host)}</tbody>"
        for row, host in zip(rows(report), report["hosts"], strict=True)
    )
    patched = sum(host["state"] == "patched" for host in report["hosts"])
    results = Counter(host["result"] for host in report["hosts"])
    counts = ", ".join(f"{number} {result}" for result, number in results.most_common())
    title = f"Overlay fleet: {patched} of {len(report['hosts'])} hosts patched"
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{title}</h1><p>{html.escape(report['command'])}, run {html.escape(report['run'])}: "
        f"{html.escape(counts)}</p>"
        f"<table><thead><tr>{head}</tr></thead>\n{bodies}\n</table></body></html>\n"
    )


def _cell(name: str, text: str) -> str:
    kinds = ["name"] if name in _NAMES else []
    kinds += ["good"] if text in _GOOD and name not in _NAMES else []
    kinds += ["bad"] if text in _BAD and name not in _NAMES else []
    kinds += ["none"] if text == "–" else []
    kind = f' class="{" ".join(kinds)}"' if kinds else ""
    return f'<td{kind} data-name="{name}">{html.escape(text)}</td>'


def _note_row(host: Mapping[str, Any]) -> str:
    notes = "<br>".join(html.escape(note) for note in _notes(host))
    cell = f"<td class=note colspan={len(COLUMNS)}><span>{notes}</span></td>"
    return f"<tr>{cell}</tr>" if notes else ""
