"""Shared fixtures, such as `pool` for distributed tests, and the options --slow and --fast; helpers/ is importable."""

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
for folder in (Path(__file__).parent / "helpers", Path(__file__).parent.parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests that are marked slow")
    parser.addoption("--fast", action="store_true", help="leave out the tests that are marked launch")


def pytest_collection_modifyitems(config, items):
    def skip(marker: str, reason: str) -> None:
        for item in items:
            if item.get_closest_marker(marker):  # item.keywords also has the names of folders, such as a clone in gpu/
                item.add_marker(pytest.mark.skip(reason=reason))

    # The files that take longest come first, so that no process of pytest-xdist is left with one of them at the end.
    long = {item.path for item in items if item.get_closest_marker("launch")}
    items.sort(key=lambda item: item.path not in long)
    if not config.getoption("--slow"):
        skip("slow", "long: run with --slow")
    if config.getoption("--fast"):
        skip("launch", "starts processes: run without --fast")
    if any(item.get_closest_marker("gpu") for item in items):
        import torch

        if not torch.cuda.is_available():
            skip("gpu", "needs a CUDA device")


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
