"""A memory plan: what each layer keeps for its backward, and where."""

import itertools
import re
from dataclasses import dataclass
from typing import Any

PLACES = ("gpu", "cpu", "none")
_PARTS = ("input", "attention", "projections")
SYNTAX = (
    "entries separated by commas, each all or some of input, attention, projections joined by +, with @cpu for what "
    "waits in host memory, and COUNT* in front for so many layers: 24*input@cpu+attention,8*all. Entries in "
    "parentheses, and all entries where none has a count, take turns"
)


@dataclass(frozen=True)
class LayerPlan:
    """What one layer keeps for its backward: on the device ("gpu"), in host memory ("cpu"), or not at all ("none").

    Attributes:
        input: the hidden states that the layer starts from. Without them, backward computes the layer before once more.
        attention: attention's output and residuals; without them, attention and its communication run twice.
        projections: outputs of the linear layers for q, k, v, attention's output, gate and up; without them, these
            matrix products run twice. A layer that keeps them runs its MLP whole, not in tiles.
        everything: the layer is not recomputed at all; the other fields mean nothing.
    """

    input: str = "gpu"
    attention: str = "gpu"
    projections: str = "none"
    everything: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for an unknown place."""
        for part in _PARTS:
            if getattr(self, part) not in PLACES:
                raise ValueError(f"{part} {getattr(self, part)!r} is unknown; choose one of {', '.join(PLACES)}")

    def __str__(self) -> str:
        """Write the entry that `parse_memory_plan` reads."""
        if self.everything:
            return "all"
        suffix = {"gpu": "", "cpu": "@cpu"}
        places = ((part, getattr(self, part)) for part in _PARTS)
        return "+".join(part + suffix[place] for part, place in places if place != "none") or "nothing"


def plan_of_flags(gradient_checkpointing: str, keep_attention: str) -> LayerPlan:
    """Return what --gradient-checkpointing {none,full,offload} and --keep-attention ask of every layer."""
    if gradient_checkpointing == "none":
        return KEEP_EVERYTHING
    return LayerPlan(input={"full": "gpu", "offload": "cpu"}[gradient_checkpointing], attention=keep_attention)


MemoryPlan = tuple[LayerPlan, ...]  # one for each layer, the first layer's first
KEEP_EVERYTHING = LayerPlan(everything=True)


def parse_memory_plan(text: str, layers: int) -> MemoryPlan:
    """Return the plan that a text describes.

    Args:
        text: see `SYNTAX`.
        layers: of the model.

    Raises:
        ValueError: the text is not a plan, its counts do not give `layers`, or backward could not follow it.
    """
    groups = [_parse_group(group, text) for group in re.split(r",(?![^(]*\))", text)]
    if all(count is None for count, _ in groups):
        turns = itertools.cycle([layer for _, group in groups for layer in group])
        plan = tuple(itertools.islice(turns, layers))
    else:
        plan = tuple(layer for count, group in groups for layer in group * (count or 0))
        if len(plan) != layers or None in (count for count, _ in groups):
            raise ValueError(
                f"memory_plan {text!r} must give every entry a count, or none; the counts must add up to the model's "
                f"{layers} layers"
            )
    check_memory_plan(plan)
    return plan


def _parse_group(group: str, text: str) -> tuple[int | None, MemoryPlan]:
    """Return the count of an entry, None if it has none, and its layers: several if it is in parentheses."""
    match = re.fullmatch(r"\s*(?:([1-9]\d*)\s*\*\s*)?(?:\(([^()]+)\)|([^()]+?))\s*", group)
    if match is None:
        raise ValueError(f"{group!r} in memory_plan {text!r} is no entry. Give {SYNTAX}")
    count = None if match[1] is None else int(match[1])
    return count, tuple(_parse_layer(entry.strip(), text) for entry in (match[2] or match[3]).split(","))


def _parse_layer(entry: str, text: str) -> LayerPlan:
    if entry == "all":
        return KEEP_EVERYTHING
    places: dict[str, Any] = dict.fromkeys(_PARTS, "none")
    for word in entry.split("+") if entry != "nothing" else ():
        match = re.fullmatch(r"([a-z]+)(?:@(cpu|gpu))?", word)
        if match is None or places.get(match[1]) != "none":
            raise ValueError(f"{word!r} in memory_plan {text!r} is unknown or given twice. Give {SYNTAX}")
        places[match[1]] = match[2] or "gpu"
    return LayerPlan(**places)


def check_memory_plan(plan: MemoryPlan) -> None:
    """Raise ValueError where a layer keeps no input and the layer before it cannot be run again to make it."""
    for number, (before, layer) in enumerate(zip((None, *plan), plan, strict=False), start=1):
        if not layer.everything and layer.input == "none" and (before is None or before.everything):
            raise ValueError(
                f"memory_plan: layer {number} keeps no input, and there is no recomputed layer before it that could "
                "make it again; keep its input"
            )


def format_memory_plan(plan: MemoryPlan) -> str:
    """Return a short text that `parse_memory_plan` turns into `plan` again."""
    texts, groups = [str(layer) for layer in plan], []
    while texts:
        period = max((1, 2), key=lambda period: period * _repeats(texts, period) if _repeats(texts, period) > 1 else 0)
        count = _repeats(texts, period)
        groups.append((count, ",".join(texts[:period])))
        texts = texts[period * count :]
    if len(groups) == 1:
        return groups[0][1]
    return ",".join(f"{count}*({group})" if "," in group else f"{count}*{group}" for count, group in groups)


def _repeats(texts: list[str], period: int) -> int:
    """Return how many times in a row the first `period` texts come at the beginning."""
    count = 1
    while texts[count * period : (count + 1) * period] == texts[:period]:
        count += 1
    return count
