"""A causal language model spread over the processes, asked for token losses or for the tokens it would write.

Neither ever holds the logits of a whole row: losses go chunk by chunk, and answers need only their own positions. Keys
and values are not cached, and layers run by tiles.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from ..loss import IGNORE_INDEX, token_losses
from ..memory.tiled_forward import SMALL_TILE_SIZE, TILE_SIZE, tiled_forward
from ..mesh import CurrentMesh, Mesh
from ..sequence_parallel import gather_seq_parallel_outputs
from ..shards import shard_batch

LOSS_CHUNK, SMALL_LOSS_CHUNK = 1024, 256  # positions whose logits exist at once
Value = TypeVar("Value")


def sizes_at_once(frugal: bool) -> tuple[int, int]:
    """Return the tokens of a tile of layers, and those whose logits exist at once; fewer if `frugal`."""
    return (SMALL_TILE_SIZE, SMALL_LOSS_CHUNK) if frugal else (TILE_SIZE, LOSS_CHUNK)


@dataclass
class Scorer:
    """A loaded model under a parallel mode.

    Attributes:
        model: Hugging Face causal LM (or a DeepSpeed engine's module), in eval mode.
        mode: name of the parallel mode; None if the model runs its own attention on one process.
        mesh: this process's place.
        device: where the model is.
        loss_chunk: positions whose logits exist at once.
        tile_size: tokens that go through a layer together, but for its attention; 0 for whole rows.
        frugal: give cached memory back after every pass.
    """

    model: PreTrainedModel
    mode: str | None
    mesh: CurrentMesh | Mesh
    device: torch.device
    loss_chunk: int = LOSS_CHUNK
    tile_size: int = TILE_SIZE
    frugal: bool = False

    @torch.no_grad()
    def token_losses(self, input_ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the negative log-likelihood of every target.

        Args:
            input_ids: int64 `[batch, seq]`, the same on every rank of the sequence-parallel group.
            targets: int64 `[batch, seq]`, already shifted: targets[:, i] follows input_ids[:, i]; -100 is not scored.

        Returns:
            float32 `[batch, seq]` on the CPU of every rank; 0 where there is no target.
        """
        hidden, local_targets = self._hidden(input_ids, targets)
        return self._gather(self._losses(hidden, local_targets), input_ids.shape[1])

    @torch.no_grad()
    def predictions(self, input_ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the most likely token wherever there is a target.

        If every prediction equals its target then greedy decoding from the prompt writes exactly the targets: its first
        token is the first prediction; given that this is right, its second is predicted from the very input that this
        pass had, and so on. So one forward pass decides what would otherwise take one pass a token.

        Args:
            input_ids, targets: as for `token_losses`.

        Returns:
            int64 `[batch, seq]` on the CPU of every rank, -100 where there is no target.
        """
        hidden, local_targets = self._hidden(input_ids, targets)
        return self._gather(self._predictions(hidden, local_targets), input_ids.shape[1])

    @torch.no_grad()
    def losses_and_predictions(
        self, input_ids: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what `token_losses` and `predictions` do, from one forward pass."""
        hidden, local_targets = self._hidden(input_ids, targets)
        parts = self._losses(hidden, local_targets), self._predictions(hidden, local_targets)
        losses, predictions = (self._gather(part, input_ids.shape[1]) for part in parts)
        return losses, predictions

    def _losses(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with self._head_weight() as weight:
            return token_losses(hidden, weight, targets, chunk_size=self.loss_chunk)

    def _predictions(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        wanted = targets != IGNORE_INDEX
        predicted = torch.full_like(targets, IGNORE_INDEX)
        # Called even for no position at all: under ZeRO-3 every rank must take part in gathering the weight.
        predicted[wanted] = self.model.get_output_embeddings()(hidden[wanted]).argmax(dim=-1)
        return predicted

    def _hidden(self, input_ids: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the last hidden states `[batch, seq / size, hidden]` and the targets of this rank's shard."""
        decoder = self.model.base_model
        by_tiles: contextlib.AbstractContextManager = contextlib.nullcontext()
        if self.mode is None:
            shard = {"input_ids": input_ids.to(self.device), "shift_labels": targets.to(self.device)}
        else:
            shard = shard_batch(self.mode, input_ids, targets, self.mesh, self.device)
            if self.tile_size:
                by_tiles = tiled_forward(decoder, max(1, self.tile_size // len(input_ids)))
        local_targets = shard.pop("shift_labels")
        with by_tiles:
            return decoder(**shard, use_cache=False).last_hidden_state, local_targets

    def _gather(self, local: torch.Tensor, length: int) -> torch.Tensor:
        if self.mode is not None:
            local = gather_seq_parallel_outputs(self.mode, local, dim=1, length=length)
        whole = local.cpu()
        if self.frugal and self.device.type == "cuda":
            torch.cuda.empty_cache()
        return whole

    @contextlib.contextmanager
    def _head_weight(self) -> Iterator[torch.Tensor]:
        """Yield the output embedding `[vocab, hidden]`, gathered if ZeRO-3 has split it."""
        weight = self.model.get_output_embeddings().weight
        if hasattr(weight, "ds_id"):
            from deepspeed.runtime.zero import GatheredParameters

            with GatheredParameters([weight]):
                yield weight
        else:
            yield weight

    def from_every_group(self, value: Value) -> list[Value]:
        """Return `value` of each data-parallel group, in their order, on every rank."""
        if not dist.is_initialized():
            return [value]
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values[:: self.mesh.sequence_size]

    def from_first_rank(self, value: Value) -> Value:
        """Return rank 0's `value` on every rank."""
        if not dist.is_initialized():
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, device=self.device)
        return values[0]

    @property
    def is_first_rank(self) -> bool:
        """Whether this process is the one that writes files and shows progress."""
        return self.mesh.data_rank == 0 and self.mesh.sequence_rank == 0
