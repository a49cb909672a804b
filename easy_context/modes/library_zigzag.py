"""zigzag_ring_attn as ring-flash-attn computes it, for comparisons."""

import torch

from .library import LibraryMode, import_library, import_without_package
from .zigzag_ring_attn import ZigzagRingAttention


class LibraryZigzag(LibraryMode, ZigzagRingAttention):
    """ring-flash-attn's zigzag ring. It calls flash-attn itself and uses `kernel` only on a single process."""

    def __init__(self, ranks) -> None:
        super().__init__(ranks)
        # Its __init__ imports a Hugging Face adapter that transformers 5 breaks.
        module, requirement = "ring_flash_attn.zigzag_ring_flash_attn", "ring-flash-attn==0.1.8"
        self._ring = import_library(module, requirement, import_without_package)

    def _forward(self, q, k, v, scale, mask, kernel):
        if q.dtype == torch.float32:  # its sums would alias the buffers that the next block is written to
            raise ValueError("attn_engine library: ring-flash-attn's gradients are wrong in float32, use bfloat16")
        k, v = k.contiguous(), v.contiguous()
        out, lse = self._ring.zigzag_ring_flash_attn_forward(self.group, q, k, v, softmax_scale=scale)
        return out, (lse,)

    def _backward(self, dout, q, k, v, out, lse, scale, mask, kernel):
        k, v, lse = (x.contiguous() for x in (k, v, lse))
        return self._ring.zigzag_ring_flash_attn_backward(self.group, dout, q, k, v, out, lse, softmax_scale=scale)
