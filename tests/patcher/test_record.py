"""RECORD: rows are edited one by one, and every other byte stays."""

from __future__ import annotations

import base64
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devtools import wheels
from patcher import record
from tests.conftest import RELEASES

TEXT = (
    b'sglang/a.py,sha256=AAAA,3\n"sglang/b,c.py",sha256=BBBB,4\nsglang/d.pyc,,\n../../../bin/x,,\n'
)


def test_a_row_is_what_the_specification_says() -> None:
    hashed = base64.urlsafe_b64encode(hashlib.sha256(b"x").digest()).decode().rstrip("=")
    assert record.row("a.py", b"x") == f"a.py,sha256={hashed},1"
    assert record.row("a,b.py", b"x") == f'"a,b.py",sha256={hashed},1'
    assert record.bare_row("a.py") == "a.py,,"
    assert record.lists(record.row("a.py", b"x"), hashlib.sha256(b"x").hexdigest())
    assert not record.lists(record.row("a.py", b"x"), hashlib.sha256(b"y").hexdigest())


def test_rows_of_the_real_wheels_are_reproduced() -> None:
    for release in RELEASES:
        tree = wheels.tree(release)
        rows = record.rows(next(tree.glob("*.dist-info/RECORD")).read_bytes())
        for path in list(rows)[:50]:
            if not rows[path].endswith(",,"):
                assert rows[path] == record.row(path, (tree / path).read_bytes())


def test_edit_replaces_in_place_appends_and_drops() -> None:
    edited = record.edit(
        TEXT, put={"sglang/b,c.py": "NEW,,", "sglang/z.py": "sglang/z.py,,"}, drop=["sglang/d.pyc"]
    )
    assert edited == b"sglang/a.py,sha256=AAAA,3\nNEW,,\n../../../bin/x,,\nsglang/z.py,,\n"


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_line_ends_are_kept(newline: bytes) -> None:
    text = TEXT.replace(b"\n", newline)
    assert record.edit(text, put={}) == text
    assert record.edit(text, put={"q": "q,,"}) == text + b"q,," + newline


PATHS = st.text(
    st.characters(exclude_characters='\r\n"', exclude_categories=["Cs"]), min_size=1
).map(lambda text: "p" + text)


@given(st.dictionaries(PATHS, st.binary(max_size=8), max_size=8), st.data())
def test_putting_and_dropping_again_gives_the_same_bytes(
    content: dict[str, bytes], data: st.DataObject
) -> None:
    text = "".join(record.row(p, c) + "\n" for p, c in content.items()).encode()
    assert list(record.rows(text)) == list(content)
    new = data.draw(st.dictionaries(PATHS, st.binary(max_size=8), max_size=4))
    added = {p: record.row(p, c) for p, c in new.items() if p not in content}
    there = record.edit(text, put=added)
    assert record.rows(there) == {**record.rows(text), **added}
    assert record.edit(there, put={}, drop=added) == text
