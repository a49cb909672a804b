"""`merge_block_` as one pass over the data: each program merges some tokens of one head."""

import triton
import triton.language as tl


@triton.jit
def merge_kernel(
    out, block_out, lse, block_lse,
    out_b, out_s, out_h, block_b, block_s, block_h,
    lse_b, lse_h, lse_s, block_lse_b, block_lse_h, block_lse_s,
    heads, seq, head_dim,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Merge TOKENS tokens of one head: grid (seq / TOKENS, batch * heads), strides in elements, WIDTH >= head_dim."""
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = tl.program_id(1) % heads
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    column = tl.arange(0, WIDTH)
    in_seq = token < seq
    lse_at = lse + batch * lse_b + head * lse_h + token * lse_s
    a = tl.load(lse_at, mask=in_seq, other=0.0)
    b = tl.load(block_lse + batch * block_lse_b + head * block_lse_h + token * block_lse_s, mask=in_seq, other=0.0)
    high = tl.maximum(a, b)
    safe = tl.where(high == float("-inf"), 0.0, high)  # neither saw a key: both weights are 0 below
    weight_a, weight_b = tl.exp(a - safe), tl.exp(b - safe)
    total = weight_a + weight_b
    share = tl.where(total > 0, weight_b / tl.where(total > 0, total, 1.0), 0.0)
    mask = in_seq[:, None] & (column < head_dim)[None, :]
    out_at = out + batch * out_b + head * out_h + token[:, None] * out_s + column[None, :]
    block_at = block_out + batch * block_b + head * block_h + token[:, None] * block_s + column[None, :]
    mine = tl.load(out_at, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(block_at, mask=mask, other=0.0).to(tl.float32)
    merged = mine + share[:, None] * (other - mine)
    tl.store(out_at, merged.to(out.dtype.element_ty), mask=mask)
    tl.store(lse_at, safe + tl.log(total), mask=in_seq)
