"""Update each parameter in backward as soon as its gradient is ready, and free the gradient immediately."""

from typing import Any

import torch

from .arguments import Arguments


def updates_in_backward(args: Arguments, processes: int, plugin: Any) -> bool:
    """Return whether updating the parameters one by one in backward gives the same step.

    This holds only if a gradient is final when it is ready: the step needs no norm of all gradients (for clipping or
    for skipping steps), no further micro-batches, and no gradients of other processes.

    Args:
        args: train.py's arguments.
        processes: number of processes in the launch.
        plugin: Accelerate's DeepSpeed plugin, as DeepSpeed makes its own steps; None without DeepSpeed.
    """
    return (
        plugin is None
        and processes == 1
        and args.gradient_accumulate_every == 1
        and args.max_grad_norm == 0
        and args.skip_nonfinite == 0
    )


class UpdatesInBackward:
    """Wrapper around an optimizer that makes its step during backward, one parameter at a time."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Let each of the optimizer's parameters be updated by it as soon as its gradient is there.

        Args:
            optimizer: which updates parameters independently of each other, as AdamW does.
        """
        self.optimizer = optimizer
        self._norms: dict[torch.Tensor, torch.Tensor] = {}  # of this backward's gradients
        self._stopped = False
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.register_post_accumulate_grad_hook(self._update)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, in which a learning rate can be set."""
        return self.optimizer.param_groups

    def _update(self, parameter: torch.Tensor) -> None:
        if parameter in self._norms:
            raise RuntimeError(
                "a parameter got a second gradient in one backward, after the first had been used: pass "
                "--max-grad-norm 1, with which gradients are used after backward"
            )
        assert parameter.grad is not None
        norm = torch.linalg.vector_norm(parameter.grad, dtype=torch.float32)
        # A loss that is not finite shows in the first gradient. Waiting for each would keep the GPU waiting as well.
        if not self._norms:
            self._stopped = not bool(norm.isfinite())
        self._norms[parameter] = norm
        if not self._stopped:
            self.optimizer.step()  # all other gradients are None, so that this parameter alone is updated
        parameter.grad = None

    def finish_step(self) -> float:
        """Return the norm of all gradients of the backward that has ended, and be ready for the next."""
        norm = torch.stack(list(self._norms.values())).norm()
        self._norms.clear()
        return float(norm)
