"""Choose the fastest memory plan that fits."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any

from .forecast import Load, Memory, Shape, activation_memory, micro_batch_seconds
from .plan import KEEP_EVERYTHING, LayerPlan, MemoryPlan

TILE_SIZE = 16384  # tokens, if the tile size is chosen automatically


def fastest_plan(
    shape: Shape,
    load: Load,
    fits: Callable[[Memory], bool],
    tile_sizes: Iterable[int] = (0, TILE_SIZE),
    plan: MemoryPlan | None = None,
) -> tuple[MemoryPlan, int] | None:
    """Return the fastest plan that fits and the tile size of its MLPs in tokens; None if no plan fits.

    Backward begins with the last layers. These keep the most, because their tensors are freed before the first layers
    are recomputed and need memory.

    Args:
        shape: sizes of the model.
        load: a micro-batch; its tile size is not used.
        fits: returns whether the given memory of activations is available.
        tile_sizes: tile sizes to choose from; 0 for untiled MLPs.
        plan: the only plan to try, if given.
    """
    best: tuple[float, MemoryPlan, int] | None = None
    for tile_size in tile_sizes:
        tiled = replace(load, mlp_tile_size=tile_size)

        def plan_fits(candidate: MemoryPlan, load: Load = tiled) -> bool:
            return fits(activation_memory(shape, load, candidate))

        for candidate in [plan] if plan else _full_plans(shape.layers, plan_fits):
            seconds = micro_batch_seconds(shape, tiled, candidate)
            if plan_fits(candidate) and (best is None or seconds < best[0]):
                best = seconds, candidate, tile_size
    return best[1:] if best else None


def most_frugal_plan(layers: int) -> MemoryPlan:
    """Return the plan that needs the least GPU memory."""
    return (LayerPlan(input="cpu", attention="none"),) * layers


def _full_plans(layers: int, fits: Callable[[MemoryPlan], bool]) -> Iterator[MemoryPlan]:
    """Yield maximal plans, one for each place of the inputs and each order of places for attention."""
    for inputs, places in itertools.product((("gpu",), ("cpu",), ("cpu", "none")), (("gpu", "cpu"), ("cpu", "gpu"))):
        turns = itertools.cycle(LayerPlan(input=place, attention="none") for place in inputs)
        plan, without = tuple(itertools.islice(turns, layers)), layers
        for place in places:
            plan, without = _keep_more(plan, without, fits, attention=place)
        if without == 0:
            kept = inputs[0]  # layers that keep their projections also keep their input
            plan, _ = _keep_more(plan, layers, fits, input=kept, projections="gpu")
        plan, _ = _keep_more(plan, layers, fits, **asdict(KEEP_EVERYTHING))
        yield plan


def _keep_more(plan: MemoryPlan, end: int, fits: Callable[[MemoryPlan], bool], **more: Any) -> tuple[MemoryPlan, int]:
    """Let as many layers before `end` as fit keep more, starting with the last of them.

    Returns:
        The plan, and the number of layers before the changed ones.
    """

    def changed(count: int) -> MemoryPlan:
        return plan[: end - count] + tuple(replace(keeps, **more) for keeps in plan[end - count : end]) + plan[end:]

    fitting, too_many = 0, end + 1
    while too_many - fitting > 1:
        count = (fitting + too_many) // 2
        if fits(changed(count)):
            fitting = count
        else:
            too_many = count
    return changed(fitting), end - fitting
