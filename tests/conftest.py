"""Shared fixtures: `pool` for distributed tests; `--slow` for long tests; `gpu` tests skip where there is no CUDA."""

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
for folder in (Path(__file__).parent, Path(__file__).parent.parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests that are marked slow")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--slow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="long: run with --slow"))
    gpu_items = [item for item in items if "gpu" in item.keywords]
    if gpu_items:
        import torch

        if not torch.cuda.is_available():
            for item in gpu_items:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def pool():
    """Eight gloo workers, started at their first use and kept for the whole session; see worker_pool.py."""
    from worker_pool import WorkerPool

    worker_pool = WorkerPool()
    yield worker_pool
    worker_pool.close()


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tests share few cores with the workers."""
    import torch

    torch.set_num_threads(1)
