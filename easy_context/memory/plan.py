"""Memory plans: which tensors each layer keeps for its backward, and where."""

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
    """Where one layer keeps tensors for its backward: on the device ("gpu"), in host memory ("cpu"), or not ("none").

    Attributes:
        input: the layer's input hidden states; without them, backward runs the previous layer again.
        attention: attention's output and residuals; without them, attention and its communication run twice.
        projections: outputs of the linear layers for q, k, v, attention's output, gate and up; without them, these
            matrix products run twice. A layer that keeps them runs its MLP whole, not in tiles.
        everything: whether the layer is not recomputed at all; the other fields are then ignored.
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
    """Return the plan of every layer for --gradient-checkpointing {none,full,offload} and --keep-attention."""
    if gradient_checkpointing == "none":
        return KEEP_EVERYTHING
    return LayerPlan(input={"full": "gpu", "offload": "cpu"}[gradient_checkpointing], attention=keep_attention)


MemoryPlan = tuple[LayerPlan, ...]  # one entry for each layer, in order
KEEP_EVERYTHING = LayerPlan(everything=True)


def parse_memory_plan(text: str, layers: int) -> MemoryPlan:
    """Return the plan that a text describes.

    Args:
        text: see `SYNTAX`.
        layers: number of layers in the model.

    Raises:
        ValueError: the text is not a plan, its counts do not add up to `layers`, or backward cannot follow the plan.
    """
    try:
        groups = [_parse_group(group) for group in re.split(r",(?![^(]*\))", text)]
    except ValueError as error:
        raise ValueError(f"memory_plan {text!r}: {error}. Give {SYNTAX}") from None
    counts = [count for count, _ in groups if count is not None]
    total = sum((count or 0) * len(group) for count, group in groups)
    if not counts:
        turns = itertools.cycle([layer for _, group in groups for layer in group])
        plan = tuple(itertools.islice(turns, layers))
    elif len(counts) < len(groups):
        raise ValueError(f"memory_plan {text!r} gives some entries a count and others none: give all a count, or none")
    elif total != layers:
        raise ValueError(
            f"memory_plan {text!r} is for {total} layers, but the model has {layers}: change the counts, or omit them"
        )
    else:
        plan = tuple(layer for count, group in groups for layer in group * (count or 0))
    check_memory_plan(plan)
    return plan


def _parse_group(group: str) -> tuple[int | None, MemoryPlan]:
    """Return an entry's count (None without one) and its layers (several if the entry is in parentheses)."""
    count, star, entries = group.rpartition("*")
    if star and not re.fullmatch(r"[1-9]\d*", count.strip()):
        raise ValueError(f"the count {count.strip()!r} is not a whole number of at least 1")
    if match := re.fullmatch(r"\(([^()]*)\)", entries.strip()):
        entries = match[1]
    elif re.search(r"[(),]", entries):
        raise ValueError(f"the parentheses of {group.strip()!r} do not match")
    layers = tuple(_parse_layer(entry.strip()) for entry in entries.split(","))
    return int(count) if star else None, layers


def _parse_layer(entry: str) -> LayerPlan:
    if not entry:
        raise ValueError("an entry is empty")
    if entry == "all":
        return KEEP_EVERYTHING
    places: dict[str, Any] = dict.fromkeys(_PARTS, "none")
    for word in entry.split("+") if entry != "nothing" else ():
        part, at, place = word.partition("@")
        if part in ("all", "nothing"):
            raise ValueError(f"{part} cannot be combined with other words, as in {entry!r}")
        if part not in _PARTS:
            raise ValueError(f"{part!r} is not one of {', '.join(_PARTS)}, all or nothing")
        if at and place not in ("cpu", "gpu"):
            raise ValueError(f"{place!r} in {word!r} is neither cpu nor gpu")
        if places[part] != "none":
            raise ValueError(f"{part} is given twice in {entry!r}")
        places[part] = place or "gpu"
    return LayerPlan(**places)


def check_memory_plan(plan: MemoryPlan) -> None:
    """Raise ValueError if a layer keeps no input and the previous layer cannot run again to recompute it."""
    for number, (before, layer) in enumerate(zip((None, *plan), plan, strict=False), start=1):
        if not layer.everything and layer.input == "none" and (before is None or before.everything):
            raise ValueError(
                f"memory_plan: layer {number} does not keep its input, and no recomputed layer before it can make it "
                f"again; add input to the plan of layer {number}"
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
    """Return how many times in a row the first `period` texts repeat at the beginning."""
    count = 1
    while texts[count * period : (count + 1) * period] == texts[:period]:
        count += 1
    return count
