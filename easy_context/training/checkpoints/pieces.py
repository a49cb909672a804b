"""The float32 weights and Adam moments that a process holds, in one form for every way of sharding them.

Plain PyTorch and DDP hold whole parameters. DeepSpeed joins parameters into flat buffers and cuts them: ZeRO-3 cuts
each parameter into equal pieces, the lower stages cut the joined buffer. A checkpoint holds the buffers and where the
piece of each parameter lies in them, so that any number of processes, under any stage, can put their own together.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ...model.weights import whole_size

WEIGHTS = "weights"
Saved = dict[str, Any]  # what `Holdings.state` returns
NOTHING: Saved = {"pieces": {}, WEIGHTS: [], "states": []}


@dataclass(frozen=True)
class Piece:
    """A piece of a flattened parameter within a buffer.

    Attributes:
        buffer: index of the buffer.
        offset: where the piece starts in the buffer.
        start: the element of the parameter with which the piece starts.
        length: elements of the piece.
        numel: elements of the whole parameter.
    """

    buffer: int
    offset: int
    start: int
    length: int
    numel: int


class Holdings:
    """The pieces of one process, and the optimizer that updates them."""

    def __init__(self, pieces: dict[str, Piece], buffers: list[torch.Tensor], optimizer: Any, shared: bool) -> None:
        """Remember where everything lies.

        Args:
            pieces: pieces by parameter name; a process may hold no piece of a parameter.
            buffers: tensors that `optimizer` updates; they are float32 except for `AdamW8bit`.
            optimizer: AdamW, with its state stored per buffer.
            shared: whether all processes hold the same state, so that only one copy is saved.
        """
        self.pieces, self.shared = pieces, shared
        self._buffers, self._optimizer = buffers, optimizer

    def state(self) -> Saved:
        """Return the pieces, the weights and the optimizer's state, without copying a tensor."""
        return {
            "pieces": {name: asdict(piece) for name, piece in self.pieces.items()},
            WEIGHTS: [buffer.data for buffer in self._buffers],
            "states": [dict(self._optimizer.state.get(buffer, {})) for buffer in self._buffers],
        }

    def load(self, sources: list[Saved]) -> None:
        """Fill the buffers and the optimizer's state from what every process of an earlier run saved.

        Raises:
            ValueError: a part of a parameter is in no source.
        """
        for name, piece in self.pieces.items():
            buffer = self._buffers[piece.buffer]
            state = self._optimizer.state[buffer]
            for key, value in _state_of(sources, name).items():
                if torch.is_tensor(value) and value.dim():
                    if key not in state:
                        state[key] = torch.zeros_like(buffer.data)
                    copy_piece(_within(state[key], piece), name, piece.start, sources, key)
                else:  # Adam's count of steps, the same for all parameters
                    state[key] = self._count(value, buffer)
            copy_piece(_within(buffer.data, piece), name, piece.start, sources)

    def _count(self, value: Any, buffer: torch.Tensor) -> Any:
        """Return a count of steps as this optimizer keeps it: PyTorch's in a tensor, DeepSpeed's as a number."""
        if not isinstance(self._optimizer, torch.optim.Adam | torch.optim.AdamW):
            return int(value)
        settings = self._optimizer.defaults
        device = buffer.device if settings.get("fused") or settings.get("capturable") else "cpu"
        return torch.tensor(float(value), device=device)


class WholeIn8Bits(Holdings):
    """Whole parameters that `AdamW8bit` updates; its states are tensor subclasses, and saved as ordinary tensors."""

    def state(self) -> Saved:
        """Return what `Holdings.state` does."""
        return super().state() | {"states": [self._optimizer.plain_state(buffer) for buffer in self._buffers]}

    def load(self, sources: list[Saved]) -> None:
        """Do what `Holdings.load` does, from states that an `AdamW8bit` saved."""
        for name, piece in self.pieces.items():
            buffer = self._buffers[piece.buffer]
            self._optimizer.load_plain_state(buffer, _state_of(sources, name))
            copy_piece(buffer.data.view(-1), name, 0, sources)


def _within(flat: torch.Tensor, piece: Piece) -> torch.Tensor:
    return flat.view(-1).narrow(0, piece.offset, piece.length)


def _state_of(sources: list[Saved], name: str) -> dict[str, Any]:
    """Return the optimizer's state of a buffer with a piece of the parameter, for its keys and counts."""
    return next(source["states"][source["pieces"][name]["buffer"]] for source in sources if name in source["pieces"])


def copy_piece(into: torch.Tensor, name: str, start: int, sources: Iterable[Saved], key: str = WEIGHTS) -> None:
    """Copy a part of a parameter, or of one of its moments, out of the saved buffers.

    Args:
        into: flat destination tensor; its size is the number of copied elements.
        name: name of the parameter.
        start: index of `into`'s first element in the flattened parameter.
        sources: saved states of all processes.
        key: key in the optimizer's state; the weights are copied if not given.

    Raises:
        ValueError: some of the elements are in no source.
    """
    copied = 0
    for source in sources:
        if name not in source["pieces"]:
            continue
        piece = Piece(**source["pieces"][name])
        first, last = max(start, piece.start), min(start + into.numel(), piece.start + piece.length)
        if first >= last:
            continue
        saved = source[WEIGHTS][piece.buffer] if key == WEIGHTS else source["states"][piece.buffer][key]
        into[first - start : last - start] = _within(saved, piece)[first - piece.start : last - piece.start]
        copied += last - first
    if copied != into.numel():
        raise ValueError(f"the checkpoint holds {copied} of {into.numel()} elements of {name}")


def refuse_other_parameters(model: torch.nn.Module, sources: list[Saved]) -> None:
    """Raise ValueError unless the sources hold the trained parameters of `model` and no others, each of its size."""
    saved = {name: piece["numel"] for source in sources for name, piece in source["pieces"].items()}
    own = {name: whole_size(p) for name, p in model.named_parameters() if p.requires_grad}
    if saved != own:
        different = sorted(name for name in saved.keys() | own.keys() if saved.get(name) != own.get(name))
        raise ValueError(
            f"the checkpoint is of a model with other parameters ({different[0]} and {len(different) - 1} more)"
        )


def whole(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Holdings:
    """Return the holdings of a process that has every parameter whole: plain PyTorch, DDP, DeepSpeed without ZeRO."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    pieces = {name: Piece(i, 0, 0, p.numel(), p.numel()) for i, (name, p) in enumerate(trained.items())}
    holdings = WholeIn8Bits if hasattr(optimizer, "plain_state") else Holdings
    return holdings(pieces, list(trained.values()), optimizer, shared=True)


def cut_buffers(model: torch.nn.Module, optimizer: Any) -> Holdings:
    """Return the holdings under DeepSpeed's ZeRO stages 1 and 2, and in bf16 also 0: a slice of each joined buffer."""
    buffers = getattr(optimizer, "single_partition_of_fp32_groups", None) or optimizer.fp32_groups_flat_partition
    pieces = {}
    for name, parameter in model.named_parameters():
        # As DeepSpeed links a parameter ("low precision") with its slice of the float32 buffer ("high precision").
        link = getattr(parameter, "_hp_mapping", None)
        if link is not None:
            own, parameters = link.hp_fragment_address, link.lp_fragment_address
            pieces[name] = Piece(link.param_group_index, own.start, parameters.start, own.numel, parameter.numel())
    return Holdings(pieces, buffers, optimizer.optimizer, shared=False)


def cut_parameters(model: torch.nn.Module, zero: Any, rank: int) -> Holdings:
    """Return the holdings under ZeRO-3: the piece number `rank` of every parameter, padded to equal lengths."""
    pieces = {}
    parameter: Any  # with DeepSpeed's attributes
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            buffer, offset, length = zero.grad_position[zero.get_param_id(parameter)]
            length_without_padding = max(0, min(length, parameter.ds_numel - rank * length))
            pieces[name] = Piece(buffer, offset, rank * length, length_without_padding, parameter.ds_numel)
    return Holdings(pieces, zero.fp32_partitioned_groups_flat, zero.optimizer, shared=False)
