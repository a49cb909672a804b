"""Dataloaders over processes: the same rows within a group, every row once over the groups, in any random state."""

import types

import pytest
import torch
from family_models import patched
from launching import launched
from torch.utils.data import DataLoader, Dataset, IterableDataset

import easy_context

ROWS = 24


class Rows(Dataset):
    """Row r holds r + 1."""

    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        return torch.tensor(row + 1)


class Stream(IterableDataset):
    """The same rows in an order that its generator decides."""

    def __init__(self):
        self.generator = torch.Generator()

    def __iter__(self):
        return iter((torch.randperm(ROWS, generator=self.generator) + 1).tolist())


def make_loader(kind: str, rank: int) -> DataLoader:
    generator = torch.Generator().manual_seed(rank)
    return {
        "in order": lambda: DataLoader(Rows(), batch_size=2),
        "shuffled": lambda: DataLoader(Rows(), batch_size=2, shuffle=True),
        "own generator": lambda: DataLoader(Rows(), batch_size=2, shuffle=True, generator=generator),
        "own sampler": lambda: DataLoader(
            Rows(), batch_size=2, sampler=torch.utils.data.SubsetRandomSampler(range(ROWS))
        ),
        "batch sampler": lambda: DataLoader(
            Rows(), batch_sampler=torch.utils.data.BatchSampler(torch.utils.data.RandomSampler(Rows()), 2, False)
        ),
        "stream": lambda: DataLoader(Stream(), batch_size=2),
    }[kind]()


def epochs(
    rank: int, world_size: int, kinds: list[str], mode: str, size: int | None, state: str, seedable: bool
) -> dict[str, list[list[list[int]]]]:
    """For each kind of loader, the batches of three epochs."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed

    with launched(rank, world_size, ""), patched(mode, sequence_parallel_size=size):
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable))
        given = {}
        for kind in kinds:
            set_seed(42, device_specific=state == "device-specific seeds")
            if rank == 0 and state == "rank 0 drew a number":
                torch.rand(1)
            loader = easy_context.prepare_dataloader(mode, make_loader(kind, rank), accelerator)
            assert loader.generator is loader.synchronized_generator  # which seeds worker processes
            given[kind] = []
            for _ in range(3):
                if rank == 1:
                    torch.rand(3)
                given[kind].append([batch.tolist() for batch in loader])
        return given


GRIDS = [
    ("zigzag_ring_attn", None),
    ("dist_flash_attn", 2),
    ("ulysses_attn", 1),
    ("data_parallel", None),
]


@pytest.mark.parametrize("state", ["device-specific seeds", "rank 0 drew a number"])
@pytest.mark.parametrize("mode,size", GRIDS)
def test_groups_share_rows_out_and_ranks_of_a_group_get_the_same(pool, mode, size, state):
    kinds = ["in order", "shuffled", "own generator", "own sampler", "batch sampler", "stream"]
    for seedable in (False, True):
        per_rank = pool.run(epochs, 4, kinds, mode, size, state, seedable)
        sequence_size = 1 if mode == "data_parallel" else size or 4
        for kind in kinds:
            groups = [
                [given[kind] for given in per_rank[start : start + sequence_size]]
                for start in range(0, 4, sequence_size)
            ]
            orders = []
            for epoch in range(3):
                for group in groups:
                    assert all(given[epoch] == group[0][epoch] for given in group), (kind, epoch, seedable)
                seen = [row for group in groups for batch in group[0][epoch] for row in batch]
                assert sorted(seen) == list(range(1, ROWS + 1)), (kind, epoch, seedable)
                orders.append(seen)
            assert (len({tuple(order) for order in orders}) == 1) == (kind == "in order"), (kind, seedable)


def prepared_without_a_patch(rank: int, world_size: int) -> list[int]:
    from accelerate import Accelerator

    with launched(rank, world_size, ""):
        accelerator = Accelerator(cpu=True)
        with pytest.raises(RuntimeError, match="apply_seq_parallel_monkey_patch"):
            easy_context.prepare_dataloader("zigzag_ring_attn", make_loader("shuffled", rank), accelerator)
        torch.manual_seed(rank)
        loader = easy_context.prepare_dataloader("data_parallel", make_loader("shuffled", rank), acclerator=accelerator)
        return [row for batch in loader for row in batch.tolist()]


def test_data_parallel_needs_no_patch(pool):
    """As under accelerator.prepare, and by the original's name of the argument."""
    per_rank = pool.run(prepared_without_a_patch, 2)
    assert sorted(per_rank[0] + per_rank[1]) == list(range(1, ROWS + 1))


def refusals(rank: int, world_size: int) -> None:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    loader = make_loader("in order", rank)
    with patched("zigzag_ring_attn"):
        with launched(rank, world_size, ""):
            accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
            for accelerators in ({}, {"accelerator": accelerator, "acclerator": accelerator}):
                with pytest.raises(TypeError, match="accelerator="):
                    easy_context.prepare_dataloader("zigzag_ring_attn", loader, **accelerators)
            with pytest.raises(ValueError, match="dispatch_batches"):
                easy_context.prepare_dataloader("zigzag_ring_attn", loader, accelerator)
            with pytest.raises(ValueError, match="(?s)ulysses_attn.*zigzag_ring_attn"):
                easy_context.prepare_dataloader("ulysses_attn", loader, accelerator)
        # Without a launcher's environment Accelerate does not see the other processes.
        with pytest.raises(ValueError, match="1 processes .* 2"):
            easy_context.prepare_dataloader("zigzag_ring_attn", loader, types.SimpleNamespace(num_processes=1))


def test_what_prepare_dataloader_cannot_honour_is_refused(pool):
    pool.run(refusals, 2)
