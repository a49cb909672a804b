"""Show progress within a slow step, such as the first step on long rows or any step on a CPU."""

import functools
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from .watch.watch import Watch

SECONDS_BETWEEN_SIGNS = 2.0


class StepProgress:
    """Shows on a bar which micro-batch of a step runs, and in the first step which layer of the model."""

    def __init__(self, bar: Any, watch: Watch, step: int, enabled: bool) -> None:
        """Show nothing yet.

        Args:
            bar: a tqdm bar over steps.
            watch: is told the same, on every process.
            step: the last one that has been made.
            enabled: whether this process shows one.
        """
        self._bar, self._watch, self._step, self._enabled = bar, watch, step, enabled
        self._hooks: list[Any] = []
        self._micro_batch, self._layer, self._shown = "", 0, time.perf_counter()

    def show_layers_of_first_step(self, model: torch.nn.Module) -> None:
        """Follow the layers of a decoder until the first step has been made."""
        layers: Any = next((module for module in model.modules() if isinstance(module, torch.nn.ModuleList)), [])
        for number, layer in enumerate(layers, start=1) if self._enabled else ():
            entered = functools.partial(self._enter_layer, number, len(layers))
            # Not every version of Transformers calls the layer itself when checkpointing runs it again.
            inner = next(layer.children(), layer)
            self._hooks.append(inner.register_forward_pre_hook(entered))

    def _enter_layer(self, number: int, of: int, *_: Any) -> None:
        # Gradient checkpointing runs the layers again in backward, from the last to the first.
        direction = "forward" if number == self._layer + 1 else "backward"
        self._layer = number
        self._show(f"{self._micro_batch}, {direction}, layer {number} of {of}")

    def start_micro_batch(self, number: int, of: int) -> None:
        """Say that micro-batch `number` of a step begins, counted from 1."""
        self._micro_batch, self._layer = f"micro-batch {number} of {of}", 0
        self._watch.at(f"in step {self._step + 1}, {self._micro_batch}")
        self._show(self._micro_batch)

    def reading(self, steps: Iterable[Any]) -> Iterator[Any]:
        """Yield the micro-batches of each step; the watch is told that they are read."""
        for micro_batches in steps:
            self._watch.at(f"in step {self._step + 1}, its rows read")
            yield micro_batches

    def evaluating(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of an evaluation; the watch is told of each."""
        for number, batch in enumerate(batches, start=1):
            self._watch.at(f"evaluating behind step {self._step + 1}, batch {number}")
            yield batch

    def _show(self, text: str) -> None:
        now = time.perf_counter()
        if self._enabled and now - self._shown > SECONDS_BETWEEN_SIGNS:
            self._shown = now
            self._bar.set_description_str(text)

    def finish_step(self) -> None:
        """Take away what was shown, and follow no layers any more."""
        self._step += 1
        self._watch.at(f"behind step {self._step}")
        while self._hooks:
            self._hooks.pop().remove()
        self._shown = time.perf_counter()
        self._bar.set_description_str("", refresh=False)
