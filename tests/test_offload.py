"""Activations that wait on the host: the same values again, on their device, in any order."""

import pytest
import torch

from easy_context.offload import OffloadedTensors


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
