"""Distribute a DataLoader's batches over sequence-parallel groups; the ranks of a group get the same batches."""

from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from .modes import find_mode
from .patch import applied_patch, current_patch
from .sequence_parallel import require_applied


def prepare_dataloader(
    seq_algo: str, dataloader: DataLoader, accelerator: Any = None, *, acclerator: Any = None
) -> DataLoader:
    """Distribute a dataloader's batches over sequence-parallel groups; the ranks of a group get the same batches.

    As with `accelerator.prepare`, rank 0's random state determines the shuffling on every rank at the start of each
    epoch. This is the state of the sampler's generator (or an IterableDataset's `generator`), which also seeds worker
    processes. Every rank must start the epoch. Code that uses other random states (a collate function in the main
    process, an IterableDataset without a generator) must give the same results on all ranks of a group;
    `prepare_seq_parallel_inputs` detects differences.

    Args:
        seq_algo: the applied mode; data_parallel does not have to be applied.
        dataloader: a torch DataLoader over the same dataset on every rank.
        accelerator: an accelerate Accelerator.
        acclerator: the same; this is the argument's name in the original EasyContext.

    Returns:
        The dataloader to iterate. Under a patch, whole rows stay on the host.

    Raises:
        TypeError: there is no accelerator, or there are two.
        ValueError: another mode is applied, the Accelerator's processes differ from torch.distributed's, or the
            Accelerator dispatches batches, which is not supported.
        RuntimeError: no mode is applied.
    """
    if (accelerator is None) == (acclerator is None):
        raise TypeError("prepare_dataloader needs one accelerator=")
    accelerator = acclerator if accelerator is None else accelerator
    if not find_mode(seq_algo).splits_rows and applied_patch() is None:
        return accelerator.prepare(dataloader)
    patch = current_patch()
    require_applied(seq_algo, patch, "the dataloader is prepared")
    processes = dist.get_world_size() if dist.is_initialized() else 1
    if accelerator.num_processes != processes:
        raise ValueError(
            f"the Accelerator sees {accelerator.num_processes} processes and torch.distributed {processes}: start with "
            "accelerate launch or torchrun, and make the Accelerator before the dataloader is prepared"
        )
    if accelerator.dispatch_batches:
        raise ValueError("dispatch_batches=True cannot be honoured on split rows: every rank reads its group's rows")
    return _share_out(dataloader, accelerator, patch.mesh.data_rank, patch.mesh.data_size)


def _share_out(dataloader: DataLoader, accelerator: Any, data_rank: int, data_size: int) -> DataLoader:
    """Distribute batches as accelerate does, over groups instead of processes."""
    from accelerate.data_loader import prepare_data_loader

    generator = _common_generator(dataloader)
    shared = prepare_data_loader(
        dataloader,
        device=accelerator.device,
        num_processes=data_size,
        process_index=data_rank,
        split_batches=accelerator.split_batches,
        even_batches=accelerator.even_batches,
        put_on_device=False,  # prepare_seq_parallel_inputs moves the shard
        use_seedable_sampler=accelerator.use_seedable_sampler,
        data_seed=_data_seed(accelerator),
        use_stateful_dataloader=accelerator.use_stateful_dataloader,
    )
    # accelerate omits these for a single group of all ranks, but its ranks still need the same batches.
    shared.rng_types, shared.synchronized_generator = ["generator"], generator
    return shared


def _common_generator(dataloader: DataLoader) -> torch.Generator:
    """Return the generator that decides what the dataloader gives; one that it draws from the global state is made."""
    from accelerate.data_loader import get_sampler

    is_iterable = isinstance(dataloader.dataset, IterableDataset)
    source = dataloader.dataset if is_iterable else get_sampler(dataloader)
    generator = getattr(source, "generator", None) or dataloader.generator
    if generator is None:
        generator = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
    if not is_iterable and hasattr(source, "generator"):
        source.generator = generator
    dataloader.generator = generator  # seeds the workers
    return generator


def _data_seed(accelerator: Any) -> int:
    """Return the seed of accelerate's seedable sampler: its own, or rank 0's of the process."""
    seed = accelerator.dataloader_config.data_seed
    if seed is not None:
        return seed
    seeds = [torch.initial_seed()]
    if dist.is_initialized():
        dist.broadcast_object_list(seeds, src=0)
    return seeds[0]
