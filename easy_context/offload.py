"""Host memory for activations: copied out and back on a side stream, one layer ahead in backward."""

import weakref
from collections import defaultdict

import torch


class _HostBuffers:
    """Pinned buffers that are reused: pinning memory is slow, and every layer of every step needs the same sizes."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = defaultdict(list)

    def take(self, like: torch.Tensor) -> torch.Tensor:
        free = self._free[like.shape, like.dtype]
        return free.pop() if free else torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def give_back(self, buffer: torch.Tensor) -> None:
        self._free[buffer.shape, buffer.dtype].append(buffer)


_buffers = _HostBuffers()
_streams: dict[torch.device, torch.cuda.Stream] = {}
_newest: dict[torch.device, "weakref.ref[OffloadedTensors]"] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


class OffloadedTensors:
    """Tensors in host memory until `fetch`. Tensors that are on the host already are simply kept.

    Backward asks for layers in the reverse of the order in which forward put them away, so fetching one starts the copy
    of the one before it.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        """Start copying `tensors`, all on one device, to the host."""
        self._kept: list[torch.Tensor] | None = None
        self._fetched: list[torch.Tensor] | None = None
        self._previous: weakref.ref[OffloadedTensors] | None = None
        self.device = tensors[0].device if tensors else torch.device("cpu")
        if self.device.type != "cuda":
            self._kept = tensors
            return
        stream = _side_stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        self._host = []
        with torch.cuda.stream(stream):
            for tensor in tensors:
                buffer = _buffers.take(tensor)
                buffer.copy_(tensor, non_blocking=True)
                tensor.record_stream(stream)  # its memory is not reused before the copy has read it
                self._host.append(buffer)
        self._previous = _newest.get(self.device)
        _newest[self.device] = weakref.ref(self)

    def start_fetch(self) -> None:
        """Start copying back, if that has not begun."""
        if self._kept is not None or self._fetched is not None or self._host is None:
            return
        stream = _side_stream(self.device)
        current = torch.cuda.current_stream(self.device)
        # Allocated on the current stream: the copy may not start before what used this memory earlier is done.
        self._fetched = [torch.empty_like(buffer, device=self.device) for buffer in self._host]
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for tensor, buffer in zip(self._fetched, self._host, strict=True):
                tensor.copy_(buffer, non_blocking=True)
            self._ready = stream.record_event()

    def fetch(self) -> list[torch.Tensor]:
        """The tensors on their device again, once; starts the copy of the tensors that were put away before these."""
        if self._kept is not None:
            return self._kept
        self.start_fetch()
        previous = self._previous() if self._previous is not None else None
        if previous is not None:
            previous.start_fetch()
        self._previous = None
        tensors, self._fetched = self._fetched, None
        torch.cuda.current_stream(self.device).wait_event(self._ready)
        # Later copies into these buffers run on the same side stream, after the copy out of them.
        for buffer in self._host:
            _buffers.give_back(buffer)
        self._host = None
        return tensors
