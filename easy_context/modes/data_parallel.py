"""Data parallelism: rows are not split, and every rank has its own rows."""

from .base import ParallelMode


class DataParallel(ParallelMode):
    """Run the local kernel on whole rows, with any mask that the kernel supports."""

    name = "data_parallel"
    splits_rows = False

    @classmethod
    def sequence_size(cls, requested, processes):
        if requested not in (None, 1):
            raise ValueError(
                f"sequence_parallel_size {requested} has no meaning with seq_algo data_parallel, which never splits a "
                "row: leave it out or choose another mode"
            )
        return 1

    @property
    def multiple_of(self):
        return 1

    def chunk_indices(self, rank):
        return [0]

    def unshard(self, shards, dim=1):
        return shards[0]
