"""The state from which the next training step follows: weights, moments, random numbers."""

from typing import Any

import torch

from .pieces import NOTHING, Holdings, Saved, copy_piece, cut_buffers, cut_parameters, refuse_other_parameters, whole


class TrainingState:
    """This process's part of the state, taken for a checkpoint and put back from one."""

    def __init__(self, accelerator: Any, model: Any, optimizer: Any) -> None:
        """Remember where the state is.

        Args:
            accelerator: the Accelerator.
            model: prepared by it.
            optimizer: prepared by it; DeepSpeed's engine has its own.
        """
        self._accelerator = accelerator
        if accelerator.state.deepspeed_plugin is not None:
            self._model, self._optimizer = model.module, model.optimizer
        else:
            self._model, self._optimizer = accelerator.unwrap_model(model), getattr(optimizer, "optimizer", optimizer)

    def take(self) -> dict[str, Any]:
        """Return what this process has to save, without copying a tensor."""
        holdings, device = self._holdings(), self._accelerator.device
        random = {"cpu": torch.get_rng_state()}
        if device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(device)
        others_save_it = holdings.shared and not self._accelerator.is_main_process
        return {"random": random} | (NOTHING if others_save_it else holdings.state())

    def put_back(self, sources: list[dict[str, Any]]) -> None:
        """Go on from what every process of an earlier run took.

        Raises:
            ValueError: that run trained other parameters.
        """
        refuse_other_parameters(self._model, sources)
        self._holdings().load(sources)
        self._update_model(sources)
        rank, device = self._accelerator.process_index, self._accelerator.device
        random = sources[rank if rank < len(sources) else 0]["random"]
        torch.set_rng_state(random["cpu"])
        if "cuda" in random and device.type == "cuda":
            torch.cuda.set_rng_state(random["cuda"], device)

    def _holdings(self) -> Holdings:
        if self._is_zero_3():
            return cut_parameters(self._model, self._optimizer, self._accelerator.process_index)
        if self._has_cut_buffers():
            return cut_buffers(self._model, self._optimizer)
        return whole(self._model, self._optimizer)

    def _is_zero_3(self) -> bool:
        return hasattr(self._optimizer, "fp32_partitioned_groups_flat")

    def _has_cut_buffers(self) -> bool:
        return any(
            hasattr(self._optimizer, name) for name in ("single_partition_of_fp32_groups", "fp32_groups_flat_partition")
        )

    def _update_model(self, sources: list[Saved]) -> None:
        """Give the model the weights of the optimizer's float32 buffers, which DeepSpeed keeps apart from it."""
        if self._is_zero_3():
            zero = self._optimizer
            zero.checkpoint_event_prologue()  # parameters that every process keeps whole are cut as well
            zero.load_state_dict({self._accelerator.process_index: zero.state_dict()})
            zero.checkpoint_event_epilogue()
        elif self._has_cut_buffers():
            for name, parameter in self._model.named_parameters():
                if parameter.requires_grad:
                    copy_piece(parameter.data.view(-1), name, 0, sources)
