"""Next-token cross-entropy on sharded rows, computed without storing the logits of all tokens at once."""

import types
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F

from .common.constants import IGNORE_INDEX
from .communication import communication_device, group_size
from .memory.autocast import autocast_dtype
from .model.liger import liger_unavailable
from .patch import group_sharing_rows_of

_CHUNK_BYTES = 256 * 2**20  # of float32 logits at a time


def next_token_targets(labels: torch.Tensor) -> torch.Tensor:
    """Targets for next-token prediction, to be made before rows are split so that no boundary token is lost.

    Args:
        labels: `[batch, seq]` int64.

    Returns:
        `[batch, seq]`: `targets[:, i] = labels[:, i + 1]`, the last column -100.
    """
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)


@torch.no_grad()
def count_targets(targets: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return how many targets the ranks of `group` have together, at least 1: an int64 scalar. Collective.

    Args:
        targets: this rank's, -100 where there is none.
        group: the ranks that share the rows; None for this rank alone.
    """
    count = (targets != IGNORE_INDEX).sum()
    if group_size(group) > 1:
        count = count.to(communication_device(group))
        dist.all_reduce(count, group=group)
    return count.clamp(min=1).to(targets.device)


@torch.no_grad()
def token_losses(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, chunk_size: int = 1024
) -> torch.Tensor:
    """Negative log-likelihood of every target, in natural logarithms. No gradient.

    Args:
        hidden: `[batch, seq, hidden_size]`, the decoder's last hidden state.
        weight: `[vocab, hidden_size]`, the output embedding.
        targets: `[batch, seq]` int64, already shifted; -100 is ignored.
        chunk_size: tokens whose logits are in memory at once.

    Returns:
        `[batch, seq]` float32 (float64 for float64 inputs), 0 where the target is -100.
    """
    flat = zip(hidden.flatten(0, 1).split(chunk_size), targets.flatten().split(chunk_size), strict=True)
    losses = [
        F.cross_entropy(_logits(rows, weight), chunk, ignore_index=IGNORE_INDEX, reduction="none")
        for rows, chunk in flat
    ]
    return torch.cat(losses).view(targets.shape)


def apply_fused_loss(model: torch.nn.Module, *, liger: bool | None = None) -> torch.nn.Module:
    """Make a Hugging Face causal language model compute its loss inside `lm_head`, in chunks.

    `model(input_ids, ..., shift_labels=targets, num_items_in_batch=n)` then returns an output whose `loss` is the sum
    of the cross-entropy over all targets that are not -100, divided by n, and whose `logits` are None. Without n, the
    divisor is the number of targets in these rows over all ranks that share them, so the losses of these ranks add up
    to the mean. (Each data-parallel group then has its own mean; pass the total number n for a common mean.) Without
    `shift_labels` the model works as before. The loss is computed in `lm_head.forward`, because ZeRO-3 gathers the
    weight only there.

    Args:
        model: with attributes `lm_head` (a Linear without bias, tied or not) and the usual forward.
        liger: on CUDA use liger-kernel's loss, not `ChunkedLinearCrossEntropy`; None: where it is installed.

    Returns:
        The same model.

    Raises:
        ValueError: the output layer is not a plain Linear without bias.
    """
    head = getattr(model, "lm_head", None)
    if not isinstance(head, torch.nn.Linear) or head.bias is not None:
        raise ValueError(f"{type(model).__name__} has no plain lm_head without bias: the fused loss cannot be applied")
    head_forward, model_forward = _unbound(head.forward), _unbound(model.forward)
    pending: list[torch.Tensor] = []  # the targets, while a forward pass with targets runs

    def loss_or_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(hidden, self.weight, pending[0], liger) if pending else head_forward(self, hidden)

    def forward(self, *args, shift_labels=None, num_items_in_batch=None, **kwargs):
        if shift_labels is None:
            return model_forward(self, *args, **kwargs)
        if kwargs.get("labels") is not None:
            raise ValueError("pass shift_labels or labels to a model with the fused loss, not both")
        if kwargs.get("logits_to_keep"):
            raise ValueError("the fused loss is of all tokens: leave logits_to_keep out")
        if num_items_in_batch is None:
            num_items_in_batch = count_targets(shift_labels, group_sharing_rows_of(self))
        pending.append(shift_labels)
        try:
            output = model_forward(self, *args, **kwargs)
        finally:
            pending.clear()
        if isinstance(output, tuple):
            raise ValueError("the fused loss is an attribute of the output: leave return_dict=False out")
        if output.logits.dim() > 0:
            raise ValueError(
                f"lm_head has become a {type(self.lm_head).__name__}, which adds to what the fused loss returns: leave "
                "lm_head out of the adapter's target_modules, or apply_fused_loss out"
            )
        output.loss, output.logits = output.logits / num_items_in_batch, None
        return output

    head.forward = types.MethodType(loss_or_logits, head)
    model.forward = types.MethodType(forward, model)
    return model


def _unbound(method: Callable) -> Callable:
    """Return `method` as a function of its object first: in a copy of the model it must run on the copy's weights."""
    if isinstance(method, types.MethodType):
        return method.__func__
    return lambda self, *args, **kwargs: method(*args, **kwargs)  # a wrapper that somebody put on the object


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, liger: bool | None = None
) -> torch.Tensor:
    """Sum of the cross-entropy of `hidden @ weight.T`, with gradients if autograd is on.

    Args:
        hidden: `[batch, seq, hidden_size]`.
        weight: `[vocab, hidden_size]`.
        targets: `[batch, seq]` int64, already shifted; -100 is ignored.
        liger: see `apply_fused_loss`.

    Returns:
        A float32 scalar (float64 for float64 inputs): 0, with zero gradients, if every target is ignored.
    """
    hidden, targets = hidden.flatten(0, 1), targets.flatten()
    hidden, weight = (x.to(autocast_dtype(x)) for x in (hidden, weight))
    if not torch.is_grad_enabled():  # forward would otherwise compute unused gradients
        hidden, weight = hidden.detach(), weight.detach()
    if hidden.is_cuda and (liger_unavailable() is None if liger is None else liger):
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        return liger_fused_linear_cross_entropy(
            hidden, weight, targets, ignore_index=IGNORE_INDEX, reduction="sum", accum_dtype=torch.float32
        )
    return ChunkedLinearCrossEntropy.apply(hidden, weight, targets)


class ChunkedLinearCrossEntropy(torch.autograd.Function):
    """Cross-entropy of a linear layer, some tokens at a time; gradients are made in forward, so nothing is repeated.

    Shapes as in `linear_cross_entropy`, with batch and seq flattened. Softmax, the loss and the sum of the weight's
    gradient are float32 or wider.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        ctx.weight_dtype = weight.dtype
        total = hidden.new_zeros((), dtype=wide)
        dhidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        dweight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        rows = max(1, _CHUNK_BYTES // (4 * weight.shape[0]))
        for start in range(0, hidden.shape[0], rows):
            chunk = slice(start, start + rows)
            valid = targets[chunk] != IGNORE_INDEX
            safe = targets[chunk].where(valid, 0).unsqueeze(-1)
            logits = _logits(hidden[chunk], weight)
            log_probabilities = logits.log_softmax(dim=-1)
            total -= log_probabilities.gather(-1, safe).squeeze(-1).where(valid, 0).sum()
            if dhidden is None and dweight is None:
                continue
            dlogits = log_probabilities.exp_()
            dlogits.scatter_add_(-1, safe, torch.full_like(safe, -1, dtype=wide))
            dlogits = (dlogits * valid.unsqueeze(-1)).to(hidden.dtype)
            if dhidden is not None:
                dhidden[chunk] = dlogits @ weight
            if dweight is not None:
                dweight += dlogits.T @ hidden[chunk]
        ctx.save_for_backward(dhidden, dweight)  # autograd frees them as soon as they are used
        return total

    @staticmethod
    def backward(ctx, dloss):
        dhidden, dweight = ctx.saved_tensors
        if dhidden is not None:
            dhidden = (dhidden * dloss).to(dhidden.dtype)
        if dweight is not None:
            dweight = (dweight * dloss).to(ctx.weight_dtype)
        return dhidden, dweight, None


def _logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (hidden @ weight.T).to(torch.promote_types(hidden.dtype, torch.float32))
