"""No split: every rank has rows of its own."""

from .base import ParallelMode


class DataParallel(ParallelMode):
    """The local kernel on whole rows, whatever the ranks; any mask that the kernel honours."""

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
