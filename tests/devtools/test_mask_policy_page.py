"""The operator's page is what the table says today."""

from __future__ import annotations

from sglang_overlay import mask_table

from devtools import mask_policy_page


def test_the_committed_page_is_the_generated_one() -> None:
    message = "run devtools/mask_policy_page.py and commit docs/mask-policy.md"
    assert mask_policy_page.PAGE.read_text(encoding="utf-8") == mask_policy_page.page(), message


def test_the_page_shows_every_release_and_what_is_refused() -> None:
    page = mask_policy_page.page()
    for release in mask_table.RELEASES:
        assert f"## SGLang {release}\n" in page
    assert page.count("| `FlashMLABackend` | `flashmla` | otherwise | no mask | right |") == 3
    assert page.count("`TokenspeedMLABackend`") == 2
