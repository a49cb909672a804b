"""AdamW with weight decay on matrices only, and the learning rate schedule."""

import math
from collections.abc import Callable
from typing import Any

import torch

from .arguments import Arguments


def adamw(model: torch.nn.Module, args: Arguments, accelerator: Any) -> Any:
    """Return AdamW for the weights that are trained.

    Args:
        model: the model, before it is prepared.
        args: `optimizer`, `learning_rate`, `adam_betas`, `weight_decay` and `seed` are used.
        accelerator: the Accelerator; under DeepSpeed, which builds AdamW itself, return what tells it the rest.
    """
    groups = parameter_groups(model, args.weight_decay)
    if accelerator.state.deepspeed_plugin is not None:
        from accelerate.utils import DummyOptim

        return DummyOptim(groups, lr=args.learning_rate, weight_decay=args.weight_decay)
    first, second = args.adam_betas
    if args.optimizer == "adamw8bit":
        from .adamw8bit import AdamW8bit

        embeddings = [module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)]
        rounding_seed = args.seed * 1_000_003 if accelerator.num_processes > 1 else None
        return AdamW8bit(groups, args.learning_rate, (first, second), embeddings, rounding_seed)
    return torch.optim.AdamW(groups, lr=args.learning_rate, betas=(first, second))


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return one group of matrices with weight decay and one of norms and biases without, if any are trained."""
    trained = [p for p in model.parameters() if p.requires_grad]
    # Under ZeRO-3 a parameter's own shape is empty.
    matrices = [p for p in trained if len(getattr(p, "ds_shape", p.shape)) > 1]
    vectors = [p for p in trained if len(getattr(p, "ds_shape", p.shape)) <= 1]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]  # DeepSpeed cannot flatten an empty group.


def warmup_then(args: Arguments) -> Callable[[int], float]:
    """Return the learning rate's share of --learning-rate as a function of the optimizer step, counted from 0.

    A linear warm-up over --warmup-steps, whose first step already trains, then --lr-scheduler: constant, or a cosine or
    linear decay that would reach 0 one step after --max-train-steps.
    """

    def share(step: int) -> float:
        if step < args.warmup_steps:
            return (step + 1) / (args.warmup_steps + 1)
        progress = (step - args.warmup_steps) / max(1, args.max_train_steps - args.warmup_steps)
        if args.lr_scheduler == "cosine":
            return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        if args.lr_scheduler == "linear":
            return max(0.0, 1 - progress)
        return 1.0

    return share


def set_learning_rate(optimizer: Any, rate: float) -> float:
    """Set and return the learning rate of the next step."""
    for group in optimizer.param_groups:
        if torch.is_tensor(group["lr"]):  # torchao would compile its step again for another number.
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    return rate


def keeps_weights_in_bf16(args: Arguments) -> bool:
    """Return whether the weights are bf16 and have no float32 copy."""
    return args.optimizer == "adamw8bit" and args.mixed_precision == "bf16"
