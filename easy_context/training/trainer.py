"""The Hugging Face Trainer on split rows: a mixin to put before `transformers.Trainer` or a subclass of it."""

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.data_loader import prepare_data_loader

from ..data.columns import apply_columns, kind_of
from ..loss import IGNORE_INDEX, next_token_targets
from ..mesh import CurrentMesh
from ..patch import current_patch
from ..shards import shard_batch

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer  # whose attributes a mixin before it has
else:
    _Trainer = object

_COLUMNS = ("input_ids", "labels", "attention_mask", "position_ids")
_ROWS_CHECKED = 16  # for columns that the Trainer removes although they say how a row is to be read
Batch = dict[str, torch.Tensor]


class SequenceParallelTrainerMixin(_Trainer):
    """Train, evaluate and log as `transformers.Trainer` does on one process, with every row split over ranks.

    `class LongTrainer(SequenceParallelTrainerMixin, Trainer): pass`, after `apply_seq_parallel_monkey_patch`, with a
    model to which `apply_fused_loss` was applied. Batch sizes in the arguments are those of a data-parallel group.

    - The ranks of a sequence-parallel group get the same batches, other groups others.
    - The loss is the sum over all targets that are not -100, divided by their number, over all ranks and the whole
      accumulation window. Gradients, logged losses and gradient norms are those of one process.
    - `eval_loss` is Trainer's: the mean over rows of the mean loss of their batch.

    Raises:
        TypeError: the mixin stands behind Trainer in the class.
        RuntimeError: no mode is applied.
        ValueError: a model that the mode is not applied to, or an argument that cannot be honoured on split rows.
    """

    _signature_columns: list[str]  # Trainer's
    loss_is_scaled_for_ga = True  # transformers that lack it conclude the same from the **kwargs of the model

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        before = cls.__mro__[: cls.__mro__.index(SequenceParallelTrainerMixin)]
        if any(base.__name__ == "Trainer" for base in before):
            raise TypeError(
                f"{cls.__name__}: put SequenceParallelTrainerMixin before Trainer, whose methods would hide its own"
            )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        current_patch()
        super().__init__(*args, **kwargs)
        _refuse_settings(self)

    # --- Batches: shared out by groups, then split. ---

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare_data_loader = self._prepare_data_loader  # for training, evaluation and prediction

    def _prepare_data_loader(self, dataloader: Any, *_: Any, **__: Any) -> Any:
        """Share a dataloader's batches out over data-parallel groups instead of processes."""
        accelerator, mesh = self.accelerator, _mesh()
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        if getattr(dataloader.sampler, "generator", dataloader.sampler) is None:
            # Else it shuffles by this process's random state, which need not be that of its group.
            dataloader.sampler.generator = torch.Generator().manual_seed(seed)
        return prepare_data_loader(
            dataloader,
            num_processes=mesh.data_size,
            process_index=mesh.data_rank,
            put_on_device=False,  # whole rows stay on the host
            dispatch_batches=False,
            use_seedable_sampler=accelerator.use_seedable_sampler,
            data_seed=seed,
        )

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()  # the fused loss hides the names of forward's arguments
        self._signature_columns = list(dict.fromkeys([*self._signature_columns, *_COLUMNS]))

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        kept = super()._remove_unused_columns(dataset, description)
        lost = [name for name in dataset.column_names if kind_of(name) and name not in kept.column_names]
        if lost and "input_ids" in kept.column_names:
            for row in dataset.select(range(min(_ROWS_CHECKED, len(dataset)))).with_format("numpy"):
                apply_columns({name: row[name] for name in lost}, row["input_ids"], row.get("labels"))
        return kept

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], torch.Tensor]:
        """Return this rank's parts of an accumulation window and the number of targets in it over all ranks."""
        parts = [split_batch(batch, device) for batch in islice(epoch_iterator, num_batches)]
        targets = sum(int((part["shift_labels"] != IGNORE_INDEX).sum()) for part in parts)
        counts = self.accelerator.gather(torch.tensor([[targets, len(parts)]], device=device))
        if len(counts[:, 1].unique()) > 1:
            raise ValueError(
                f"the ranks have {counts[:, 1].tolist()} batches left: give every data-parallel group as many rows, or "
                "set max_steps to what the shortest has"
            )
        return parts, counts[:, 0].sum().clamp(min=1)

    def get_total_train_batch_size(self, args: Any) -> int:
        return super().get_total_train_batch_size(args) // _mesh().sequence_size

    # --- The loss, for which `inputs` is what split_batch gave. ---

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Return this rank's share of the loss times the ranks, as DDP and DeepSpeed average gradients over ranks."""
        if "shift_labels" not in inputs:
            inputs = split_batch(inputs, self.args.device)
        if num_items_in_batch is None:
            num_items_in_batch = self.accelerator.reduce((inputs["shift_labels"] != IGNORE_INDEX).sum()).clamp(min=1)
        part = {name: inputs[name] for name in ("input_ids", "position_ids", "shift_labels")}
        outputs = model(**part, num_items_in_batch=num_items_in_batch, use_cache=False)
        if outputs.loss is None:
            raise ValueError(
                "the model computes no loss of split rows: call apply_fused_loss(model) before the Trainer"
            )
        loss = outputs.loss * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss

    def training_step(
        self, model: torch.nn.Module, inputs: Batch, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Run Trainer's step and return the loss over all ranks: one rank's share means little in a log."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        return self.accelerator.reduce(loss, reduction="mean")

    # --- Evaluation. ---

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        if _mesh().data_size > 1 and isinstance(dataloader.dataset, torch.utils.data.IterableDataset):
            raise ValueError(
                "an IterableDataset cannot be evaluated by several data-parallel groups, as rows that fill the last "
                "batch would count twice: pass a dataset with a length"
            )
        self._evaluated = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        output = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        # Trainer's own mean weighs the last batch by its number of ranks, and rows that fill it up.
        total, rows = self.accelerator.reduce(self._evaluated, reduction="sum")
        output.metrics[f"{metric_key_prefix}_loss"] = (total / rows).item()
        return output

    def prediction_step(
        self,
        model: torch.nn.Module,
        inputs: Batch,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor, None, None]:
        """Return the mean loss over the targets of a batch, the same on every rank of the group."""
        if not prediction_loss_only:
            raise ValueError("no rank has the logits of whole rows: set prediction_loss_only=True in the arguments")
        mesh, state, rows = _mesh(), self.accelerator.gradient_state, len(inputs["input_ids"])
        if state.end_of_dataloader and state.remainder > 0:  # the last rows only fill up the batches of all groups
            rows = min(max(state.remainder - mesh.data_rank * rows, 0), rows)
            inputs = {**inputs, "labels": inputs["labels"].clone()}
            inputs["labels"][rows:] = IGNORE_INDEX
        part = split_batch(inputs, self.args.device)
        with torch.no_grad(), self.compute_loss_context_manager():
            share = self.compute_loss(model, part, num_items_in_batch=1) / self.accelerator.num_processes
        sums = torch.stack((share.double(), (part["shift_labels"] != IGNORE_INDEX).sum()))
        if mesh.sequence_size > 1:
            dist.all_reduce(sums, group=mesh.sequence_group)
        loss = sums[0] / sums[1]
        if sums[1] > 0:
            self._evaluated += torch.stack((loss * rows, torch.full_like(loss, rows)))
        return loss, None, None


def split_batch(batch: Batch, device: torch.device | str) -> Batch:
    """Split a collator's batch of whole rows, the same on every rank of the sequence-parallel group.

    Args:
        batch: `input_ids` and `labels` `[batch, seq]` int64, perhaps `attention_mask` with zeros at the right end of
            rows, whose labels become -100, and `position_ids` 0, 1, 2, ...
        device: where the shards go.

    Returns:
        This rank's `input_ids`, `position_ids`, `shift_labels` and `attention_mask` (0 for padding), `[batch, shard]`.

    Raises:
        ValueError: a column is missing, unknown, or asks for something other than causal attention over whole rows.
    """
    batch = {name: tensor for name, tensor in batch.items() if tensor is not None}
    unknown = sorted(batch.keys() - set(_COLUMNS))
    if unknown or not {"input_ids", "labels"} <= batch.keys():
        raise ValueError(
            f"the data collator gives {sorted(batch)}: it must give input_ids and labels, perhaps attention_mask and "
            "position_ids, and nothing else (for text, DataCollatorForLanguageModeling(tokenizer, mlm=False))"
        )
    input_ids, labels = batch["input_ids"], batch["labels"]
    position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    mask = batch.get("attention_mask", torch.ones_like(input_ids)).bool()
    if mask.shape != input_ids.shape or bool((mask[:, 1:] > mask[:, :-1]).any()):
        raise ValueError(
            "attention_mask hides tokens before the right end of a row, which cannot be honoured: pad on the right "
            '(tokenizer.padding_side = "right")'
        )
    if bool(((batch.get("position_ids", position_ids) != position_ids) & mask).any()):
        raise ValueError(
            "position_ids are not 0, 1, 2, ... in every row: packed documents cannot be honoured (packing and "
            "padding_free of trl, DataCollatorWithFlattening); give each document a row of its own, or train with "
            "train.py --respect-documents or a loop of your own over shard_batch(..., documents=...)"
        )
    mode, mesh = current_patch().mode, _mesh()
    targets = next_token_targets(labels.masked_fill(~mask, IGNORE_INDEX))
    shard = shard_batch(mode.name, input_ids, targets, mesh, device)
    padding = shard["input_ids"].shape[1] * mesh.sequence_size - input_ids.shape[1]
    padded = F.pad(mask.long(), (0, padding))
    return shard | {"attention_mask": mode.shard(padded)}


def _mesh() -> CurrentMesh:
    return current_patch().mesh


def _refuse_settings(trainer: Any) -> None:
    """Raise ValueError with every setting of a Trainer that would silently give wrong results on split rows."""
    args, accelerator, family = trainer.args, trainer.accelerator, trainer.model.config.model_type
    one_count = args.average_tokens_across_devices or args.world_size == 1
    whole_logits = "no rank has the logits of whole rows; evaluation gives eval_loss"
    refused = (
        (family != current_patch().family, f"the model: call apply_seq_parallel_monkey_patch(mode, {family!r})"),
        (args.label_smoothing_factor, "label_smoothing_factor: the fused loss has none, set 0"),
        (trainer.compute_loss_func, "compute_loss_func: the loss is the cross-entropy of split rows"),
        (trainer.compute_metrics, f"compute_metrics: {whole_logits}"),
        (trainer.preprocess_logits_for_metrics, f"preprocess_logits_for_metrics: {whole_logits}"),
        (args.neftune_noise_alpha, "neftune_noise_alpha: its noise would depend on the length of a shard"),
        (args.use_liger_kernel, "use_liger_kernel: it replaces the fused loss, which uses Liger's by itself"),
        (not one_count, "average_tokens_across_devices=False: a rank has the targets of a shard only"),
        (accelerator.dispatch_batches, "dispatch_batches: every rank reads the rows of its group itself"),
        (accelerator.split_batches, "split_batches: batch sizes are those of a data-parallel group"),
        (not accelerator.even_batches, "even_batches=False: groups would wait for one that has no batch left"),
        (args.train_sampling_strategy == "batch_rebalance", "train_sampling_strategy='batch_rebalance': use another"),
        (getattr(accelerator, "parallelism_config", None), "parallelism_config: rows would be split a second time"),
        (trainer.is_fsdp_enabled, "fsdp: not tested; use DDP or DeepSpeed"),
        (args.n_gpu > 1, f"{args.n_gpu} GPUs in one process: start one a GPU with torchrun or accelerate launch"),
    )
    if reasons := [reason for is_set, reason in refused if is_set]:
        raise ValueError(
            "the Trainer cannot honour on split rows:\n" + "\n".join(f"  - {reason}" for reason in reasons)
        )
