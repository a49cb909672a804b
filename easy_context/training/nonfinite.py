"""Skip steps whose loss or gradient norm is not finite, and stop or continue training."""

import logging
import math
import sys
from collections.abc import Callable
from typing import Any

import torch

from .arguments import Arguments
from .gradient_release import updates_in_backward

logger = logging.getLogger(__name__)
_MOST_ROWS_NAMED = 20


def nan_unless_finite(loss: torch.Tensor) -> torch.Tensor:
    """Return the loss, and make its gradients NaN if the loss is not finite.

    All processes know the gradient norm before any of them steps, so it reveals such a loss on any process.
    """
    return loss * torch.where(loss.detach().isfinite(), 1.0, math.nan)


class NonfiniteSteps:
    """Stop the run on all processes after a step that is not finite, or let the run continue without that step."""

    def __init__(
        self, accelerator: Any, args: Arguments, checkpoints: Any, rows_of_step: Callable[[int], list[int]]
    ) -> None:
        """Remember what a message needs.

        Args:
            accelerator: the Accelerator.
            args: `skip_nonfinite` and `dataset` are used.
            checkpoints: knows the steps that were skipped, also before this run went on.
            rows_of_step: returns where the rows of a step are in the dataset.
        """
        self._accelerator, self._args = accelerator, args
        self._checkpoints, self._rows_of_step = checkpoints, rows_of_step

    def check(self, log: Any, record: dict[str, Any]) -> None:
        """End the run with exit code 1 where the step's loss or gradient norm is not finite and no more may be skipped.

        Args:
            log: where the record of the last step is written before the end.
            record: `step`, `loss` and `grad_norm`, the same on all processes.
        """
        step, loss, norm = record["step"], record["loss"], record["grad_norm"]
        if math.isfinite(loss) and math.isfinite(norm):
            return
        rows = self._rows_of_step(step)
        named = ", ".join(map(str, rows[:_MOST_ROWS_NAMED])) + (", ..." if len(rows) > _MOST_ROWS_NAMED else "")
        what = f"step {step}: loss {loss}, gradient norm {norm}, from rows {named} of --dataset {self._args.dataset}"
        skipped = self._checkpoints.skipped_steps
        if len(skipped) < self._args.skip_nonfinite:
            skipped.append(step)
            logger.info(
                "%s. Skipped: the weights are left as they were (%d of --skip-nonfinite %d)",
                *(what, len(skipped), self._args.skip_nonfinite),
            )
            return
        log.write(record)
        log.close()
        self._checkpoints.finish()
        saved = self._checkpoints.saved_step
        plugin = self._accelerator.state.deepspeed_plugin
        in_backward = updates_in_backward(self._args, self._accelerator.num_processes, plugin)
        # A gradient may overflow after others have been used.
        weights = "weights in memory are spoiled" if in_backward and math.isfinite(loss) else "weights were not changed"
        self._accelerator.print(
            f"\n{what}. The {weights} by it; training stopped and saved nothing more"
            f"{f' than checkpoint-{saved}' if saved else ''}. Lower --learning-rate, raise --warmup-steps, look at "
            "these rows, or let --skip-nonfinite leave out such steps",
            file=sys.stderr,
        )
        self._accelerator.wait_for_everyone()  # the launcher ends rank 0 as soon as another exits
        self._accelerator.state.destroy_process_group()
        sys.exit(1)

    def sum_up(self) -> None:
        """Say at the end of the run which steps were skipped, if any."""
        if skipped := self._checkpoints.skipped_steps:
            logger.info(
                "left out because they were not finite: %d of %d steps (%s)",
                *(len(skipped), self._args.max_train_steps, ", ".join(map(str, skipped))),
            )
