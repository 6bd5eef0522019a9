"""The reference kernels against torch's own attention, and where they must not be forgiving."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tests.support.engine.reference import (
    PagedMLA,
    RaggedPrefill,
    attend,
    flash_mla_with_kvcache,
    get_mla_metadata,
)

PAGE = 64


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def by_torch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, causal: bool
) -> torch.Tensor:
    """Return torch's answer for q [rows, heads, d] over one shared head of keys and values."""
    rows, columns = q.shape[0], k.shape[0]
    mask = torch.ones(rows, columns, dtype=torch.bool)
    if causal:
        mask = mask.tril(columns - rows)
    out = scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=mask, scale=scale
    )
    return out.transpose(0, 1)


@pytest.mark.parametrize("causal", [True, False])
def test_attention_is_torchs_and_lse_is_the_log_of_the_sum(causal: bool) -> None:
    q, k = randn(3, 4, 16), randn(7, 1, 16)
    v = k[..., :8]
    out, lse = attend(q, k, v, scale=0.3, causal=causal)
    heads = k.expand(7, 4, 16), v.expand(7, 4, 8)
    torch.testing.assert_close(out, by_torch(q, *heads, 0.3, causal=causal))
    # The last row sees every column, causal or not.
    scores = torch.einsum("hd,chd->hc", q[-1], heads[0]) * 0.3
    torch.testing.assert_close(lse[:, -1], scores.exp().sum(-1).log())


def paged(lengths: list[int], dim: int) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return a poisoned cache, a shuffled block table (-1 behind its end) and the rows in it."""
    cache = torch.full((9, PAGE, 1, dim), float("nan"))
    table = torch.full((len(lengths), 3), -1, dtype=torch.int32)
    blocks = iter([5, 2, 8, 1, 7, 4])
    rows = []
    for index, length in enumerate(lengths):
        rows.append(randn(length, 1, dim) + index)
        for page, part in enumerate(rows[-1].split(PAGE)):
            block = next(blocks)
            table[index, page] = block
            cache[block, : len(part)] = part
    return cache, table, rows


def test_flash_mla_reads_its_pages_and_nothing_else() -> None:
    lengths = [70, 5, 130]
    cache, table, rows = paged(lengths, dim=16)
    q = randn(3, 2, 4, 16)
    seqlens = torch.tensor(lengths, dtype=torch.int32)
    out, lse = flash_mla_with_kvcache(
        q, cache, table, seqlens, 8, *get_mla_metadata(seqlens), softmax_scale=0.2, causal=True
    )
    for index, kv in enumerate(rows):
        heads = kv.expand(-1, 4, 16), kv[..., :8].expand(-1, 4, 8)
        torch.testing.assert_close(out[index], by_torch(q[index], *heads, 0.2, causal=True))
    assert lse.shape == (3, 4, 2)
    assert lse.isfinite().all()


def test_flash_mla_answers_an_empty_row_as_the_cuda_kernel_does() -> None:
    cache, table, _ = paged([], dim=16)
    table = torch.full((1, 1), -1, dtype=torch.int32)
    seqlens = torch.zeros(1, dtype=torch.int32)
    out, lse = flash_mla_with_kvcache(
        randn(1, 2, 4, 16), cache, table, seqlens, 8, *get_mla_metadata(seqlens)
    )
    assert out.eq(0).all()
    assert lse.eq(float("inf")).all()


@pytest.mark.parametrize("length", [65, 193], ids=["unset-block", "table-too-narrow"])
def test_flash_mla_refuses_a_table_that_does_not_cover_the_length(length: int) -> None:
    cache, table, _ = paged([64], dim=16)
    seqlens = torch.tensor([length], dtype=torch.int32)
    with pytest.raises(IndexError, match=f"does not cover {length} tokens"):
        flash_mla_with_kvcache(
            randn(1, 2, 4, 16), cache, table, seqlens, 8, *get_mla_metadata(seqlens)
        )


def test_ragged_and_paged_prefill_agree_on_the_same_rows() -> None:
    offsets = torch.tensor([0, 3, 8], dtype=torch.int32)
    latent, rope, q = randn(8, 1, 16), randn(8, 1, 4), randn(8, 2, 20)
    slots = torch.tensor([9, 2, 7, 4, 1, 8, 3, 6])
    keys = torch.cat([latent, rope], dim=-1)

    ragged = RaggedPrefill()
    ragged.begin_forward(qo_indptr=offsets, kv_indptr=offsets, causal=True)
    wanted = ragged.forward(q, keys, latent, causal=True, sm_scale=0.25)

    caches = torch.full((10, 1, 16), float("nan")), torch.full((10, 1, 4), float("nan"))
    caches[0][slots], caches[1][slots] = latent, rope
    pages = PagedMLA()
    pages.plan(offsets, offsets, slots, offsets.diff(), 2, 16, 4, 1, True, 0.25)
    out = pages.run(q[..., :16], q[..., 16:], *caches, out=torch.empty(8, 2, 16))
    torch.testing.assert_close(out, wanted)


def test_paged_prefill_knows_page_size_one_only() -> None:
    offsets = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(ValueError, match="page size 1 only, got 64"):
        PagedMLA().plan(offsets, offsets, offsets, offsets, 2, 16, 4, 64, True, 0.25)
