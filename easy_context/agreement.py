"""Make a check that fails on one rank fail on every rank of its group, so that no rank waits in a collective forever.

A check costs one all-reduce of three integers, or nothing with one process. Texts are sent only when a check fails.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .communication import communication_device, group_size

Facts = dict[str, Any]


def check_together(check: Callable[[], Facts], group: dist.ProcessGroup | None, differ: str) -> None:
    """Run `check` on every rank of `group`; collective.

    Args:
        check: function that raises if something is wrong on this rank, and returns facts that must be equal on all
            ranks. Different values must have a different `repr`.
        group: process group of the ranks; None for one process, whose error is raised unchanged.
        differ: beginning of the message if the facts differ.

    Raises:
        ValueError: the check failed on a rank, or the facts differ. The message is the same on every rank.
    """
    if group_size(group) == 1:
        check()
        return
    problem, facts, cause = None, {}, None
    try:
        facts = check()
    except Exception as error:  # catch every error, since the other ranks are about to wait for this one
        problem, cause = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}", error
    digest = int.from_bytes(hashlib.blake2b(repr(facts).encode(), digest_size=7).digest(), "big")
    # One maximum shows whether any rank has a problem, and whether the largest digest equals the smallest.
    report = torch.tensor([problem is not None, digest, -digest], dtype=torch.int64, device=communication_device(group))
    dist.all_reduce(report, op=dist.ReduceOp.MAX, group=group)
    failed, largest, minus_smallest = report.tolist()
    if failed or largest != -minus_smallest:
        raise ValueError(_message(problem, facts, group, differ)) from cause


def _message(problem: str | None, facts: Facts, group: dist.ProcessGroup | None, differ: str) -> str:
    """Return the same text on every rank: the first rank's problem, or the facts that differ and their values."""
    reports: list = [None] * group_size(group)
    dist.all_gather_object(reports, (problem, facts), group=group)
    problems = {rank: text for rank, (text, _) in enumerate(reports) if text is not None}
    if problems:
        ranks = ", ".join(str(rank) for rank in problems)
        return f"{next(iter(problems.values()))} (found on rank {ranks} of {len(reports)} that share a row)"
    differences = [
        f"{name} {_by_rank([other[name] for _, other in reports])}"
        for name, value in facts.items()
        if any(other[name] != value for _, other in reports)
    ]
    return f"{differ}: {'; '.join(differences)}"


def _by_rank(values: list) -> str:
    """Describe which ranks have which value."""
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(str(value), []).append(str(rank))
    return ", ".join(f"{value} on rank {', '.join(holders)}" for value, holders in ranks.items())
