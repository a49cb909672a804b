"""Run the training steps that are timed: with plain PyTorch on one device, or under DeepSpeed's ZeRO-3 on several."""

import functools
import gc
from dataclasses import dataclass
from typing import Any

import torch

from easy_context import shard_batch
from easy_context.loss import IGNORE_INDEX, next_token_targets
from easy_context.mesh import Mesh

from .recipes import Recipe
from .world import World

Batch = dict[str, torch.Tensor]


@dataclass
class PlainStep:
    """Forward and backward on one device. There is no optimizer: its states of an 8B model fit no single GPU."""

    model: torch.nn.Module
    recipe: Recipe

    def step(self, batch: Batch, micro_batches: int) -> float:
        """Run the same batch `micro_batches` times and return the loss."""
        self.model.zero_grad(set_to_none=True)
        for _ in range(micro_batches):
            loss = compute_loss(self.model, self.recipe, batch)
            loss.backward()
        return loss.item()

    def close(self) -> None:
        """Free the model."""
        self.model = None
        _free_memory()


class Zero3Step:
    """Whole optimizer steps under ZeRO-3: weights and AdamW's states are sharded over the GPUs, nothing on the host."""

    def __init__(self, model: torch.nn.Module, recipe: Recipe, world: World, mpu: Any, batch_size: int) -> None:
        """Shard the model.

        Args:
            model: whole, on this rank's device, the same on all ranks.
            recipe: what the model was made for.
            world: the ranks.
            mpu: of DeepSpeed's sequence parallelism, or None.
            batch_size: rows in a micro-batch.
        """
        import deepspeed

        if world.device.type == "cpu":
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo serves; nothing is compiled
        # fused: one pass over the states, and no temporary copies of them
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=world.device.type == "cuda")
        config = zero3_config(batch_size, model.config.hidden_size)
        self._engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=mpu)
        self._recipe, self._world = recipe, world
        _free_memory()  # the whole weights are sharded now

    def step(self, batch: Batch, micro_batches: int) -> float:
        """Make one optimizer step of `micro_batches` times the same batch and return the loss over all ranks."""
        engine = self._engine
        if engine.gradient_accumulation_steps() != micro_batches:
            # What set_train_batch_size does; that asks for a data-parallel size, which ALST's mpu does not have.
            engine._config.gradient_accumulation_steps = micro_batches
            engine.micro_steps = 0  # a window begins
        for _ in range(micro_batches):
            loss = compute_loss(engine, self._recipe, batch)
            engine.backward(loss * self._world.size)  # DeepSpeed averages over ranks
            engine.step()
        return self._world.total(loss.detach().float()).item()

    def close(self) -> None:
        """Free the model and the optimizer's states."""
        self._engine.destroy()
        self._engine = None
        _forget_deepspeed_modules()
        _free_memory()


def zero3_config(batch_size: int, hidden_size: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration: ZeRO-3 without offload, with buckets large enough for NVLink."""
    return {
        "train_micro_batch_size_per_gpu": batch_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "steps_per_print": 1_000_000,
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": 16 * hidden_size**2,
            "stage3_prefetch_bucket_size": 16 * hidden_size**2,
            "stage3_param_persistence_threshold": 10 * hidden_size,
        },
    }


def make_batch(recipe: Recipe, world: World, batch_size: int, seq_length: int, vocab_size: int, seed: int) -> Batch:
    """Return this rank's shard of random rows, which are the same for every recipe, as arguments of the model.

    Returns:
        input_ids, position_ids and shift_labels `[batch, shard]` int64, and num_items_in_batch, the number of targets
        in the whole rows.
    """
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(vocab_size, (batch_size, seq_length), generator=generator)
    targets = next_token_targets(input_ids)
    mesh = Mesh(sequence_rank=world.rank, sequence_size=world.size)
    shard = shard_batch(recipe.mode, input_ids, targets, mesh, world.device)
    return shard | {"num_items_in_batch": (targets != IGNORE_INDEX).sum().to(world.device)}


def compute_loss(model: Any, recipe: Recipe, batch: Batch) -> torch.Tensor:
    """Return the sum of the losses of this rank's targets, divided by the number of targets in the whole rows."""
    # Without the fused loss Hugging Face computes a loss only if there are labels; it then reads shift_labels.
    labels = {} if recipe.fused_loss else {"labels": batch["shift_labels"]}
    return model(**batch, **labels, use_cache=False).loss


def _forget_deepspeed_modules() -> None:
    """Empty a list and a method's cache in which DeepSpeed keeps a destroyed engine, with its weights, alive."""
    from deepspeed.runtime.zero import parameter_offload, partitioned_param_coordinator

    parameter_offload.FWD_MODULE_STACK.clear()
    for value in gc.get_objects():
        if type(value) is functools._lru_cache_wrapper and value.__module__ == partitioned_param_coordinator.__name__:
            value.cache_clear()


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
