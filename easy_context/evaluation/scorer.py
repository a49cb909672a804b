"""Compute token losses and greedy answers with a causal language model that is spread over the processes.

The logits of a whole row are never in memory: losses are computed chunk by chunk, and answers need only their own
positions. Keys and values are not cached, and layers run by tiles.
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
    """Return the tokens of a tile of layers, and of a chunk of logits; both are smaller if `frugal`."""
    return (SMALL_TILE_SIZE, SMALL_LOSS_CHUNK) if frugal else (TILE_SIZE, LOSS_CHUNK)


@dataclass
class Scorer:
    """A loaded model under a parallel mode.

    Attributes:
        model: Hugging Face causal LM (or the module of a DeepSpeed engine) in eval mode.
        mode: name of the parallel mode; None if the model runs its own attention on one process.
        mesh: this process's place among the processes.
        device: device of the model.
        loss_chunk: positions whose logits exist at once.
        tile_size: number of tokens that pass through a layer, except its attention, at a time; 0 for whole rows.
        frugal: whether cached GPU memory is released after every pass.
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

        If every prediction equals its target, greedy decoding from the prompt writes exactly the targets: its first
        token is the first prediction; if that is right, its second token is predicted from the same input as in this
        pass, and so on. So one forward pass replaces a pass for each token.

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
        """Return the results of `token_losses` and `predictions` from one forward pass."""
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
        # Runs even without a position: under ZeRO-3 every rank must take part in gathering the weight.
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
        """Return, on every rank, the `value` of each data-parallel group in their order."""
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
        """Whether this process writes files and shows progress."""
        return self.mesh.data_rank == 0 and self.mesh.sequence_rank == 0
