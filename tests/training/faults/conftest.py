"""Assets of runs to which something happens, and runs to which nothing does, to compare with."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from faulty_runs import Runs, save_assets


@pytest.fixture(scope="session")
def assets(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    save_assets(folder)
    return folder


@pytest.fixture
def runs(assets, tmp_path):
    started = Runs(assets, tmp_path)
    yield started
    started.kill()


@pytest.fixture
def whole(assets, runs) -> Callable[[str], Path]:
    """`whole(setup)`: the folder of a run to which nothing happened, trained once."""

    def run(setup: str) -> Path:
        kept = assets / f"whole {setup}"
        if not kept.exists():
            codes, said = runs.end(setup, "whole")
            assert not any(codes), said
            shutil.move(runs.folder / "whole", kept)
        return kept

    return run
