"""How large the tensors are that a piece of code makes, and how many bytes of them are alive at once."""

import weakref
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """Inside `with LargestTensor() as seen:` every operation's result is measured; `seen.largest` is in elements."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


class LivePeak(TorchDispatchMode):
    """Inside `with LivePeak() as seen:` the bytes of all tensors made there are counted as long as they are alive.

    Memory that an operation takes and frees within itself is not seen, nor are tensors from before the block.

    Attributes:
        peak: most bytes that were alive at once.
        alive_at_peak: their bytes by the operation that made them, with dtype and shape.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._alive = 0
        self.alive_at_peak: Counter[str] = Counter()
        self._made: dict[int, tuple[str, int]] = {}  # address of a storage -> who made it, bytes

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        before = {x.untyped_storage()._cdata for x in _tensors((args, kwargs or {}))}
        result = function(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in before and storage._cdata not in self._made and storage.nbytes():
                name = f"{function} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
                self._made[storage._cdata] = name, storage.nbytes()
                self._alive += storage.nbytes()
                weakref.finalize(storage, self._forget, storage._cdata)
        if self._alive > self.peak:
            self.peak, self.alive_at_peak = self._alive, Counter()
            for name, size in self._made.values():
                self.alive_at_peak[name] += size
        return result

    def _forget(self, address: int) -> None:
        self._alive -= self._made.pop(address)[1]


def _tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
