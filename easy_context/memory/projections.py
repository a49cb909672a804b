"""Reuse or skip the outputs of linear layers when a checkpointed decoder layer is recomputed."""

import types
from collections.abc import Callable
from typing import Any

import torch

from .autocast import autocast_dtype
from .layer_run import current_layer_run

# In these families the last linear layer's output is only added to the residual: no gradient depends on its value.
_LAST_OUTPUT_IS_ADDED = ("llama", "mistral", "qwen2", "qwen3")


def apply_known_projections(layer: Any, model_type: str) -> None:
    """Make the linear layers of a decoder layer follow its `LayerRun`.

    If the run keeps projections, the first run records the outputs of all linear layers but the last, and the
    recomputation reuses them. A recomputation skips the last one, the MLP's down projection, because nothing reads the
    output of a recomputed layer. This saves 27 % of the recomputed matrix products of a Llama-3-8B shape.

    Args:
        layer: a Hugging Face decoder layer. Call this before DeepSpeed or DDP wraps the model.
        model_type: model type in its config; the last linear layer is skipped only in families known to allow it.
    """
    last = layer.mlp.down_proj if model_type in _LAST_OUTPUT_IS_ADDED else None
    last = getattr(last, "base_layer", last)  # LoRA's product is added to its output, which nothing reads either
    for name, module in layer.named_modules():
        if ".lora_" in name:  # LoRA's two thin products are cheaper to compute again than to keep
            continue
        if type(module) is torch.nn.Linear and "forward" not in vars(module):  # replace forward only once
            # Liger rotates q and k in place, which would change the recorded tensors.
            changed_in_place = name.endswith(("q_proj", "k_proj"))
            forward = _last_forward if module is last else _recorded_forward(changed_in_place)
            module.forward = types.MethodType(forward(module.forward), module)


def _last_forward(plain_forward: Callable) -> Callable:
    def forward(self: torch.nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
        run = current_layer_run()
        if run is None or not run.output_unread:
            return plain_forward(hidden)
        # One number expanded to the full shape. It is NaN, so that reading it by mistake is noticed.
        nothing = hidden.new_full((), torch.nan, dtype=autocast_dtype(hidden))
        return _known_output(self, hidden, nothing.expand(*hidden.shape[:-1], self.out_features))

    return forward


def _recorded_forward(changed_in_place: bool) -> Callable:
    def wrap(plain_forward: Callable) -> Callable:
        def forward(self: torch.nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
            run = current_layer_run()
            if run is None or run.projections is None:
                return plain_forward(hidden)
            if run.recomputing:
                return _known_output(self, hidden, run.projections.pop(0))
            out = plain_forward(hidden)
            run.projections.append(out.clone() if changed_in_place else out)
            return out

        return forward

    return wrap


def _known_output(linear: torch.nn.Linear, hidden: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return `out` as if `linear` had just computed it from `hidden`, under autocast too."""
    inputs = (None if x is None else x.to(autocast_dtype(x)) for x in (hidden, linear.weight, linear.bias))
    return _KnownOutput.apply(*inputs, out)


class _KnownOutput(torch.autograd.Function):
    """A linear layer in the graph that skips its forward computation."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden if ctx.needs_input_grad[1] else None, weight)
        return out.view_as(out)  # autograd modifies the returned tensor, and `out` may be recorded for several runs

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        rows = dout.flatten(0, -2)
        dhidden = dout @ weight if ctx.needs_input_grad[0] else None
        dweight = rows.T @ hidden.flatten(0, -2) if ctx.needs_input_grad[1] else None
        dbias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return dhidden, dweight, dbias, None
