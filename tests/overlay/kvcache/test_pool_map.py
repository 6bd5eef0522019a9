"""The picture of a pool, read back."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import numpy as np
from sglang_overlay.kvcache.pool_map import CACHED, FREE, draw

RECT = "{http://www.w3.org/2000/svg}rect"


def cells(svg: str, width: int, units: int) -> list[str]:
    colours = [""] * units
    for rect in ET.fromstring(svg).iter(RECT):
        x, y, wide, high = (int(rect.attrib[name]) for name in ("x", "y", "width", "height"))
        for at in range(x // high, (x + wide) // high):
            colours[y // high * width + at] = rect.attrib["fill"]
    return colours


def test_every_unit_has_the_colour_of_its_owner() -> None:
    owners = np.array([FREE, CACHED, CACHED, 1, 1, 2, FREE, 1, 9, CACHED])
    found = cells(draw(owners, width=4), 4, len(owners))
    by_owner = {
        owner: {c for c, o in zip(found, owners, strict=True) if o == owner} for owner in owners
    }
    assert all(len(colours) == 1 for colours in by_owner.values())
    assert len({*by_owner[FREE], *by_owner[CACHED], *by_owner[1], *by_owner[2]}) == 4
    # Eight colours go round: request 9 looks like request 1.
    assert by_owner[9] == by_owner[1]


def test_a_run_is_one_shape_and_the_size_fits_the_units() -> None:
    svg = draw(np.zeros(10, dtype=np.int64), width=4)
    assert svg.count("<rect") == 3
    assert re.search(r'width="12" height="9"', svg)
