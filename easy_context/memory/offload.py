"""Offload activations to host memory on a side stream, and prefetch them one layer ahead in backward."""

import contextlib
import mmap
import weakref
from collections import defaultdict

import torch


class _HostBuffers:
    """A pool of reusable pinned buffers. Pinning memory is slow, and every layer of every step needs some.

    A buffer serves any tensor that fits. The pool never holds more bytes than the largest amount in use at one time;
    otherwise rows of increasing length would leave buffers of every length behind.
    """

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []  # 1-D uint8, longest unused first
        self._in_use = self._most = 0  # bytes

    def take(self, size: int) -> torch.Tensor:
        """Return the smallest free pinned uint8 buffer of at least `size` bytes, or a new one."""
        fitting = [i for i, buffer in enumerate(self._free) if buffer.numel() >= size]
        if fitting:
            buffer = self._free.pop(min(fitting, key=lambda i: self._free[i].numel()))
        else:
            self._most = max(self._most, self._in_use + size)
            self.let_go(self._in_use + size + self.free_bytes() - self._most)
            buffer = _pin(size)
        self._in_use += buffer.numel()
        self._most = max(self._most, self._in_use)
        return buffer

    def give_back(self, buffer: torch.Tensor) -> None:
        self._in_use -= buffer.numel()
        self._free.append(buffer)

    def free_bytes(self) -> int:
        return sum(buffer.numel() for buffer in self._free)

    def let_go(self, size: int) -> None:
        """Unpin free buffers of at least `size` bytes in all."""
        leaving = []
        while size > 0:
            leaving.append(self._free.pop(0))
            size -= leaving[-1].numel()
        if leaving:
            _unpin(leaving)


def _pin(size: int) -> torch.Tensor:
    """Return `size` bytes of pinned memory, in whole pages. PyTorch's pinned memory comes in powers of two."""
    buffer = torch.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), size, 0))
    return buffer


def _unpin(buffers: list[torch.Tensor]) -> None:
    torch.cuda.synchronize()  # a copy may still be in progress
    for buffer in buffers:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr()))


class _Host:
    """The copy stream and the host buffers of one device.

    Tensors with the same index in different layers have similar sizes, so each index has its own buffer pool.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.buffers: defaultdict[int, _HostBuffers] = defaultdict(_HostBuffers)
        self.newest: weakref.ref[OffloadedTensors] | None = None


_hosts: dict[torch.device, _Host] = {}


def release_host_memory() -> None:
    """Unpin the buffers that hold no tensor."""
    for host in _hosts.values():
        for buffers in host.buffers.values():
            buffers.let_go(buffers.free_bytes())


class OffloadedTensors:
    """Tensors that stay in host memory until `fetch`. Tensors that are on the host already are kept unchanged.

    Backward needs the layers in the reverse order of forward, so fetching one layer starts the copy of the layer before
    it.
    """

    _host: _Host  # on CUDA
    _buffers: list[torch.Tensor] | None = None  # until the tensors are fetched
    _fetched: list[torch.Tensor] | None = None  # between `start_fetch` and `fetch`

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        """Start copying `tensors`, all on one device, to the host."""
        self._kept: list[torch.Tensor] | None = None
        self._previous: weakref.ref[OffloadedTensors] | None = None
        self.device = tensors[0].device if tensors else torch.device("cpu")
        if self.device.type != "cuda":
            self._kept = tensors
            return
        if self.device not in _hosts:
            _hosts[self.device] = _Host(self.device)
        self._host = _hosts[self.device]
        self._buffers = []
        self._shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        self._host.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._host.stream):
            for i, tensor in enumerate(tensors):
                buffer = self._host.buffers[i].take(tensor.numel() * tensor.element_size())
                self._buffers.append(buffer)
                self._view(buffer, i).copy_(tensor, non_blocking=True)
                tensor.record_stream(self._host.stream)  # its memory must not be reused before the copy has read it
        self._previous = self._host.newest
        self._host.newest = weakref.ref(self)

    def _view(self, buffer: torch.Tensor, i: int) -> torch.Tensor:
        """Return a view of a buffer with the shape and dtype of the i-th tensor, which is stored in it."""
        shape, dtype = self._shapes[i]
        return buffer[: shape.numel() * dtype.itemsize].view(dtype).view(shape)

    def start_fetch(self) -> None:
        """Start copying the tensors back, unless the copy has already started."""
        if self._buffers is None or self._fetched is not None:
            return
        # The memory is allocated on the current stream, so the copy must wait for earlier work that used this memory.
        fetched = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in self._shapes]
        self._host.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._host.stream):
            for i, (tensor, buffer) in enumerate(zip(fetched, self._buffers, strict=True)):
                tensor.copy_(self._view(buffer, i), non_blocking=True)
            self._ready = self._host.stream.record_event()
        self._fetched = fetched

    def fetch(self) -> list[torch.Tensor]:
        """Return the tensors on their device and start copying the previous layer's. May be called only once."""
        if self._kept is not None:
            return self._kept
        self.start_fetch()
        previous = self._previous() if self._previous is not None else None
        if previous is not None:
            previous.start_fetch()
        self._previous = None
        tensors = self._fetched
        assert tensors is not None, "fetched before"
        self._finish()
        return tensors

    def _finish(self) -> None:
        """Make the current stream wait for a started copy, and return the buffers to the pool."""
        if self._fetched is not None:
            torch.cuda.current_stream(self.device).wait_event(self._ready)
            self._fetched = None
        # Later copies into these buffers run on the same side stream, after the copies out of them.
        for i, buffer in enumerate(self._buffers or ()):
            self._host.buffers[i].give_back(buffer)
        self._buffers = None

    def __del__(self) -> None:
        """Wait for the copy: without a fetch, memory would be reused while the copy still writes to it."""
        with contextlib.suppress(Exception):  # CUDA may be shut down when the interpreter exits
            self._finish()
