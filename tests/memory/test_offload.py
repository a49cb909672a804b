"""Activations that wait on the host: the same values again, on their device, in any order."""

import random

import pytest
import torch

from easy_context.memory import offload
from easy_context.memory.offload import OffloadedTensors


def tensors_of_layer(layer: int, device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(layer)
    shapes = ((2, 300, 16), (2, 4, 300), (1,))
    dtypes = (torch.bfloat16, torch.float32, torch.float32)
    return [torch.randn(s, generator=generator).to(device, d) for s, d in zip(shapes, dtypes, strict=True)]


def assert_values_return(device: str, order: list[int]) -> None:
    """Layers are put away in their order and fetched in `order`; the originals are overwritten meanwhile."""
    put_away = []
    for layer in range(len(order)):
        tensors = tensors_of_layer(layer, device)
        put_away.append(OffloadedTensors([x.clone() for x in tensors]))
        del tensors
        torch.full((2, 300, 16), torch.nan, device=device)  # may land in memory that is free again
    for layer in order:
        fetched = put_away[layer].fetch()
        for actual, expected in zip(fetched, tensors_of_layer(layer, device), strict=True):
            assert actual.device == expected.device and actual.dtype == expected.dtype
            assert torch.equal(actual, expected), f"layer {layer}"


ORDERS = ([3, 2, 1, 0], [0, 1, 2, 3], [1, 3, 0, 2], [0])


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_values_return_on_cpu(order):
    assert_values_return("cpu", order)


def test_on_the_host_nothing_is_copied():
    tensors = tensors_of_layer(0, "cpu")
    for actual, expected in zip(OffloadedTensors(tensors).fetch(), tensors, strict=True):
        assert actual is expected


def test_nothing_to_put_away():
    assert OffloadedTensors([]).fetch() == []


@pytest.fixture
def buffers(monkeypatch):
    """Buffers of plain memory: pinning needs CUDA."""
    monkeypatch.setattr(offload, "_pin", lambda size: torch.empty(size, dtype=torch.uint8))
    monkeypatch.setattr(offload, "_unpin", lambda buffers: None)
    return offload._HostBuffers()


def test_rows_of_many_lengths_hold_no_more_than_the_longest_needs(buffers):
    """Training on rows of unequal lengths: every layer takes a buffer in forward and gives it back in backward."""
    rng = random.Random(0)
    longest = 0
    for _ in range(200):
        size = rng.randint(1, 1000)
        longest = max(longest, size)
        taken = [buffers.take(size) for _ in range(4)]
        assert all(buffer.numel() >= size for buffer in taken)
        assert len({buffer.data_ptr() for buffer in taken}) == 4
        for buffer in rng.sample(taken, 4):
            buffers.give_back(buffer)
        assert buffers.free_bytes() <= 4 * longest


def test_buffers_are_pinned_once(buffers):
    first = [buffers.take(100) for _ in range(3)]
    for buffer in first:
        buffers.give_back(buffer)
    again = [buffers.take(size) for size in (100, 7, 60)]
    assert {buffer.data_ptr() for buffer in again} == {buffer.data_ptr() for buffer in first}


def test_the_smallest_buffer_that_fits_is_taken(buffers):
    small, large = buffers.take(10), buffers.take(1000)
    buffers.give_back(large)
    buffers.give_back(small)
    assert buffers.take(9) is small and buffers.take(9) is large


def test_free_buffers_can_be_let_go(buffers):
    kept, free = buffers.take(10), buffers.take(20)
    buffers.give_back(free)
    buffers.let_go(buffers.free_bytes())
    assert buffers.free_bytes() == 0
    buffers.give_back(kept)
    assert buffers.free_bytes() == 10


@pytest.mark.gpu
def test_buffers_of_any_size_are_pinned_and_unpinned():
    buffers = [offload._pin(size) for size in (1, 5000, 3 * 2**20 + 7, 2**20)]
    assert [buffer.numel() for buffer in buffers] == [1, 5000, 3 * 2**20 + 7, 2**20]
    assert all(buffer.is_pinned() for buffer in buffers)
    offload._unpin(buffers)
    assert not any(buffer.is_pinned() for buffer in buffers)


@pytest.mark.gpu
def test_rows_of_growing_length_on_gpu():
    for length in (300, 17, 1000, 4000, 999):
        put_away = []
        for layer in range(3):
            generator = torch.Generator("cuda").manual_seed(layer)
            put_away.append(OffloadedTensors([torch.randn(length, 64, device="cuda", generator=generator)]))
        for layer in reversed(range(3)):
            expected = torch.randn(length, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(layer))
            assert torch.equal(put_away[layer].fetch()[0], expected)
    offload.release_host_memory()
    assert not any(b.free_bytes() for host in offload._hosts.values() for b in host.buffers.values())


@pytest.mark.gpu
def test_a_copy_that_nobody_fetches_writes_into_no_other_tensor():
    for _ in range(20):
        first = OffloadedTensors([torch.ones(2**24, device="cuda")])
        second = OffloadedTensors([torch.ones(2**24, device="cuda")])
        second.fetch()  # starts the copy of `first`
        del first
        other = torch.zeros(2**24, device="cuda")
        torch.cuda.synchronize()
        assert not other.any()


@pytest.mark.gpu
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_values_return_on_gpu(order):
    for _ in range(3):  # later rounds reuse the pinned buffers
        assert_values_return("cuda", order)


@pytest.mark.gpu
def test_strided_tensors_return_on_gpu():
    strided = torch.randn(4, 6, 8, device="cuda").transpose(0, 2)
    (fetched,) = OffloadedTensors([strided]).fetch()
    assert torch.equal(fetched, strided)


@pytest.mark.gpu
def test_device_memory_is_free_meanwhile():
    tensor = torch.ones(2**24, device="cuda")
    before = torch.cuda.memory_allocated()
    put_away = OffloadedTensors([tensor])
    del tensor
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")  # the allocator takes memory back that another stream has done with
    assert torch.cuda.memory_allocated() <= before - 2**26
    assert (put_away.fetch()[0] == 1).all()
