"""Point-to-point exchanges and all-to-all on torch.distributed, the same over NCCL and gloo."""

from collections.abc import Sequence

import torch
import torch.distributed as dist


def group_size(group: dist.ProcessGroup | None) -> int:
    """Return the number of processes in `group`; 1 for None (no torch.distributed)."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: dist.ProcessGroup | None) -> int:
    """Return this process's rank in `group`; 0 for None."""
    return 0 if group is None else dist.get_rank(group)


def communication_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device that the collectives of `group` (None: the default group) need tensors to be on.

    This is the process's CUDA device with NCCL, and the CPU otherwise.
    """
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class Exchange:
    """The sends and receives of one step, started together so that they run while the caller computes.

    Collect them with `send` and `receive`, start them with `start`, and call `wait` before reading a received tensor or
    overwriting a sent one. NCCL runs the exchanges of a group one after another, so communicating ranks must start
    their exchanges in the same order to avoid deadlocks. Rank numbers are those within the group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._operations: list[dist.P2POp] = []
        self._works: list[dist.Work] = []

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """Send `tensor` (made contiguous) to `rank`."""
        self._add(dist.isend, tensor.contiguous(), rank)

    def receive(self, buffer: torch.Tensor, rank: int) -> torch.Tensor:
        """Receive into `buffer` (contiguous) from `rank`, and return it; read it only after `wait`."""
        self._add(dist.irecv, buffer, rank)
        return buffer

    def start(self) -> "Exchange":
        """Start all sends and receives collected so far."""
        if self._operations:
            self._works = dist.batch_isend_irecv(self._operations)
        return self

    def wait(self) -> None:
        """Block (on CUDA: make the current stream wait) until all is sent and received."""
        for work in self._works:
            work.wait()
        self._works, self._operations = [], []  # the operations kept the sent tensors alive

    def _add(self, operation, tensor: torch.Tensor, rank: int) -> None:
        peer = dist.get_global_rank(self._group, rank)
        self._operations.append(dist.P2POp(operation, tensor, peer, self._group))


def ring_exchange(tensor: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, Exchange]:
    """Send `tensor` to the next rank of the ring and receive the previous rank's, of the same shape.

    Returns:
        The receive buffer, and the started exchange to wait for.
    """
    rank, size = group_rank(group), group_size(group)
    exchange = Exchange(group)
    exchange.send(tensor, (rank + 1) % size)
    received = exchange.receive(torch.empty_like(tensor, memory_format=torch.contiguous_format), (rank - 1) % size)
    return received, exchange.start()


def scatter_heads(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """All-to-all from sequence shards to head shards (DeepSpeed Ulysses, arXiv 2309.14509), one message for all.

    Args:
        tensors: each `[batch, seq / size, heads, head_dim]`, this rank's tokens, of one dtype; heads may
            differ and are divisible by size.

    Returns:
        each as `[batch, seq, heads / size, head_dim]`: the whole sequence for this rank's heads. They share memory.
    """
    size = group_size(group)
    parts = [tensor.unflatten(2, (size, -1)).permute(2, 0, 1, 3, 4) for tensor in tensors]
    received = _all_to_all(parts, group)  # [size, batch, seq / size, heads of all / size, head_dim]
    return list(received.transpose(0, 1).flatten(1, 2).split([part.shape[3] for part in parts], dim=2))


def gather_heads(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Inverse of `scatter_heads`: `[batch, seq, heads / size, head_dim]` to `[batch, seq / size, heads, head_dim]`."""
    size = group_size(group)
    parts = [tensor.unflatten(1, (size, -1)).transpose(0, 1) for tensor in tensors]
    received = _all_to_all(parts, group).split([part.shape[3] for part in parts], dim=3)
    return [part.permute(1, 2, 0, 3, 4).flatten(2, 3) for part in received]


def _all_to_all(parts: list[torch.Tensor], group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange `[size, batch, tokens, heads, head_dim]` tensors, joined along heads with a single copy of each."""
    if len(parts) == 1:
        sent = parts[0].contiguous()
    else:
        heads = [part.shape[3] for part in parts]
        sent = parts[0].new_empty(*parts[0].shape[:3], sum(heads), parts[0].shape[4])
        for place, part in zip(sent.split(heads, dim=3), parts, strict=True):
            place.copy_(part)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received
