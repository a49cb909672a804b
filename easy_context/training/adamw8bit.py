"""torchao's AdamW with 8-bit moments, adapted to this package's training and checkpoints. Importing needs torchao."""

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
import torchao.optim
from torchao.optim.subclass_8bit import OptimState8bit

_CODES, _SCALE = ".codes", ".scale"  # suffixes for the name of an 8-bit moment


class AdamW8bit(torchao.optim.AdamW8bit):
    """AdamW whose weights stay in bf16 without a float32 copy, and whose moments take 8 bits each.

    A step is computed in float32. Its result is rounded to bf16 stochastically, so that updates below bf16's resolution
    count on average. 256 elements of a moment share a float32 scale. Moments are float32 for embeddings, for parameters
    with fewer than 4096 elements, and for parameters whose number of elements is not a multiple of 256.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        embeddings: Iterable[torch.Tensor] = (),
        rounding_seed: int | None = None,
    ) -> None:
        """Make the optimizer.

        Args:
            groups: parameter groups, each with its `weight_decay`.
            lr: learning rate, which torchao keeps in tensors.
            betas: AdamW's betas.
            embeddings: embedding parameters, whose gradients are zero for tokens that a step does not contain. In 8
                bits, a small second moment can become 0 before the first does, and the step would divide by it.
            rounding_seed: seed for processes that hold the same weights and must round them in the same way; None to
                use PyTorch's current random state.
        """
        super().__init__(groups, lr=lr, betas=betas, bf16_stochastic_round=True)
        self._embeddings, self._rounding_seed = set(embeddings), rounding_seed

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters that have a gradient; on a CPU without compiling, which takes minutes there."""
        if self._rounding_seed is not None:
            torch.manual_seed(self._rounding_seed + self._steps_made())
        on_cpu = all(parameter.device.type == "cpu" for group in self.param_groups for parameter in group["params"])
        with torch.compiler.set_stance("force_eager") if on_cpu else contextlib.nullcontext():
            return super().step(closure)

    def _new_buffer(self, p: torch.Tensor, signed: bool) -> torch.Tensor:
        """Return the zeros with which a moment begins, as torchao asks for them."""
        if p not in self._embeddings and isinstance(moment := super()._new_buffer(p, signed), OptimState8bit):
            return moment
        # torchao would take the parameter's dtype. In bf16 the decay by a second beta of 0.999 is lost in rounding.
        return torch.zeros_like(p, dtype=torch.float32)

    def _steps_made(self) -> int:
        return max((int(state["step"]) for state in self.state.values() if state), default=0)

    def plain_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a parameter's state as ordinary tensors without copying. An 8-bit moment becomes its codes and scales.

        The state is empty before the first step.
        """
        plain: dict[str, torch.Tensor] = {}
        for name, value in self.state.get(parameter, {}).items():
            if isinstance(value, OptimState8bit):
                plain |= {name + _CODES: value.codes, name + _SCALE: value.scale}
            else:
                plain[name] = value
        return plain

    def load_plain_state(self, parameter: torch.Tensor, plain: dict[str, torch.Tensor]) -> None:
        """Load a parameter's state that `plain_state` returned.

        Raises:
            ValueError: the state belongs to a different optimizer, or to a parameter of a different size.
        """
        state: dict[str, torch.Tensor] = {}
        for name in ("exp_avg", "exp_avg_sq") if plain else ():
            moment = self._new_buffer(parameter, name == "exp_avg")
            if isinstance(moment, OptimState8bit):
                parts = {name + _CODES: moment.codes, name + _SCALE: moment.scale}
            else:
                parts = {name: moment}
            for key, part in parts.items():
                if key not in plain or plain[key].shape != part.shape:
                    raise ValueError("the optimizer's state is not that of --optimizer adamw8bit")
                part.copy_(plain[key])
            state[name] = moment
        if plain:
            state["step"] = plain["step"].clone()
            self.state[parameter] = state
