"""A memory plan: what each layer keeps for its backward, and where."""

import itertools
import re
from dataclasses import dataclass

PLACES = ("gpu", "cpu", "none")
_PARTS = ("input", "attention", "projections")
SYNTAX = (
    "entries separated by commas, each all or some of input, attention, projections joined by +, with @cpu for what "
    "waits in host memory, and COUNT* in front for so many layers: 24*input@cpu+attention,8*all. Entries without "
    "counts take turns"
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
    entries = [_parse_entry(entry.strip(), text) for entry in text.split(",")]
    counts = [count for count, _ in entries if count is not None]
    if not counts:
        plan = tuple(layer for _, layer in itertools.islice(itertools.cycle(entries), layers))
    elif len(counts) < len(entries) or sum(counts) != layers:
        raise ValueError(
            f"memory plan {text!r} must give every entry a count, or none; the counts must add up to the model's "
            f"{layers} layers"
        )
    else:
        plan = tuple(layer for count, layer in entries for _ in range(count))
    check_memory_plan(plan)
    return plan


def _parse_entry(entry: str, text: str) -> tuple[int | None, LayerPlan]:
    match = re.fullmatch(r"(?:([1-9]\d*)\s*\*\s*)?([a-z@+]+)", entry)
    if match is None:
        raise ValueError(f"{entry!r} in memory plan {text!r} is no entry. Give {SYNTAX}")
    count = None if match[1] is None else int(match[1])
    if match[2] == "all":
        return count, KEEP_EVERYTHING
    places = dict.fromkeys(_PARTS, "none")
    for word in match[2].split("+") if match[2] != "nothing" else ():
        part, _, place = word.partition("@")
        if places.get(part) != "none" or place not in ("", "cpu", "gpu") or word.endswith("@"):
            raise ValueError(f"{word!r} in memory plan {text!r} is unknown or given twice. Give {SYNTAX}")
        places[part] = place or "gpu"
    return count, LayerPlan(**places)


def check_memory_plan(plan: MemoryPlan) -> None:
    """Raise ValueError where a layer keeps no input and the layer before it cannot be run again to make it."""
    for number, (before, layer) in enumerate(zip((None, *plan), plan, strict=False), start=1):
        if not layer.everything and layer.input == "none" and (before is None or before.everything):
            raise ValueError(
                f"layer {number} of the memory plan keeps no input, and there is no recomputed layer before it that "
                "could make it again: keep its input"
            )


def format_memory_plan(plan: MemoryPlan) -> str:
    """Return the shortest text that `parse_memory_plan` turns into `plan` again."""
    texts = [str(layer) for layer in plan]
    for period in (1, *range(2, len(texts) // 2 + 1)):
        if all(text == texts[i % period] for i, text in enumerate(texts)):
            return ",".join(texts[:period])
    return ",".join(f"{len(list(same))}*{text}" for text, same in itertools.groupby(texts))
