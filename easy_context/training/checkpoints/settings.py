"""Settings that affect the weights. By default, a run resumes only from a checkpoint with the same settings."""

import hashlib
from typing import Any

from ...data.token_rows import TokenRows
from ...model.adapters import lora_settings
from ..arguments import Arguments

_ROWS_MEASURED = 1000  # their lengths
_ROWS_READ = 8  # whole
# Modes, kernels, ZeRO stages, and what is kept where, may change.
_FLAGS = (
    "model",
    "dataset",
    "seq_length",
    "rope_theta",
    "learning_rate",
    "warmup_steps",
    "lr_scheduler",
    "weight_decay",
    "adam_betas",
    "optimizer",
    "max_grad_norm",
    "seed",
    "mixed_precision",
    "train_only",
)
_OF_OLDER_CHECKPOINTS = {"optimizer": "adamw"}  # they were made before the flag was there


def settings_of(args: Arguments, data_size: int, rows: TokenRows) -> dict[str, Any]:
    """Return what decides the weights of each step, as values that JSON keeps.

    Args:
        args: train.py's arguments.
        data_size: groups of processes with rows of their own.
        rows: of --dataset.
    """
    settings = {name: getattr(args, name) for name in _FLAGS}
    settings |= {"adam_betas": list(args.adam_betas), "rows": len(rows), "some_rows": _digest(rows)}
    settings["rows_per_step"] = args.batch_size * args.gradient_accumulate_every * data_size
    # None where documents are not kept apart, as in checkpoints of versions that could not do it.
    settings["documents"] = [args.documents_begin_with, args.documents_end_with] if args.respect_documents else None
    settings["lora"] = lora_settings(args)
    if args.lr_scheduler != "constant":
        settings["max_train_steps"] = args.max_train_steps
    return settings


def _digest(rows: TokenRows) -> str:
    """Return a checksum of some rows, the first and the last among them, and of many lengths.

    It differs where other data has taken the place of a dataset, and is the same on every machine.
    """
    digest = hashlib.sha256(repr(rows.lengths(_ROWS_MEASURED)).encode())
    for index in sorted({(len(rows) - 1) * part // (_ROWS_READ - 1) for part in range(_ROWS_READ)}):
        digest.update(rows.content(index))
    return digest.hexdigest()[:16]


def differences(saved: dict[str, Any], own: dict[str, Any]) -> list[str]:
    """Return a phrase for each setting that differs from the checkpoint's."""
    saved = _OF_OLDER_CHECKPOINTS | saved
    return [
        f"{name} was {saved.get(name)!r} and is {value!r}" for name, value in own.items() if saved.get(name) != value
    ]
