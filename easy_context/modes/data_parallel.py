"""No split: every rank has rows of its own."""

from .base import ParallelMode


class DataParallel(ParallelMode):
    """The local kernel on whole rows. Its group has size 1, whatever rank and size are passed."""

    name = "data_parallel"

    def multiple_of(self, size):
        return 1

    def chunk_indices(self, rank, size):
        return [0]

    def unshard(self, shards, dim=1):
        return shards[0]

    def forward(self, q, k, v, *, scale, mask, kernel, group):
        out, lse = kernel.forward(q, k, v, scale, mask)
        return out, (lse,)

    def backward(self, dout, q, k, v, out, residuals, *, scale, mask, kernel, group):
        return kernel.backward(dout, q, k, v, out, *residuals, scale, mask)
