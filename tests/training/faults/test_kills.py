"""Processes that are killed, some of them or all, anywhere in a run: what survives, and the run that goes on from it.

Each run is killed again after it was resumed. The one that ends at last has the losses and the weights of a run to
which nothing happened, to the last bit.
"""

from dataclasses import replace

import pytest
from faults import Fault
from faulty_runs import assert_like, assert_same_run, saved_in

SAVE = ("--save-every", "2")
BEFORE_SAVING_4 = Fault("kill", "before a save", number=2)
HALF_A_FILE = Fault("halve", "one file is written", number=2, behind=True)
NO_MANIFEST = Fault("kill", "before the manifest", number=2)
NOT_RENAMED = Fault("kill", "before the rename", argument=".saving-checkpoint")
RENAMED = replace(NOT_RENAMED, behind=True)
MODEL_WRITTEN = Fault("kill", "the model is written")
MODEL_MOVED = Fault("kill", "a file is moved", argument=".saving-model/model.safetensors", behind=True)
PARTIAL = ".saving-checkpoint"
ONE_ROW = ("--gradient-accumulate-every", "1")

# setup: for each kill in turn, the fault, the checkpoint that the run goes on from, and what is left behind it.
KILLS = {
    "one process": [
        (BEFORE_SAVING_4, None, ["checkpoint-2"]),
        (replace(HALF_A_FILE, number=1), 2, [PARTIAL, "checkpoint-2"]),
        (RENAMED, 2, ["checkpoint-2", "checkpoint-4"]),
        (replace(NO_MANIFEST, number=1), 4, [PARTIAL, "checkpoint-2", "checkpoint-4"]),
        (MODEL_WRITTEN, 4, ["checkpoint-4", "checkpoint-6"]),
        (MODEL_MOVED, 6, ["checkpoint-4", "checkpoint-6"]),
    ],
    "two processes": [
        (replace(BEFORE_SAVING_4, rank=1), None, ["checkpoint-2"]),
        (replace(NOT_RENAMED, rank=0), 2, [PARTIAL, "checkpoint-2"]),
        (replace(HALF_A_FILE, rank=1, number=1), 2, [PARTIAL, "checkpoint-2"]),
        (replace(BEFORE_SAVING_4, number=2), 2, ["checkpoint-2", "checkpoint-4"]),
        (replace(MODEL_WRITTEN, rank=0), 4, ["checkpoint-4", "checkpoint-6"]),
        (Fault("kill", "end", rank=1), 6, ["checkpoint-4", "checkpoint-6"]),
    ],
    "ZeRO-3 with offload": [
        (replace(HALF_A_FILE, rank=1), None, [PARTIAL, "checkpoint-2"]),
        (replace(BEFORE_SAVING_4, number=2), 2, ["checkpoint-2", "checkpoint-4"]),
        (replace(MODEL_WRITTEN, rank=0), 4, ["checkpoint-4", "checkpoint-6"]),
    ],
}


@pytest.mark.launch
@pytest.mark.parametrize("setup", KILLS)
def test_a_run_that_is_killed_again_and_again_is_the_run_that_was_not(runs, whole, setup):
    for fault, resumed, left in KILLS[setup]:
        codes, said = runs.end(setup, "cut", *SAVE, faults=(fault,))
        assert ("resumed from" in said) == (resumed is not None), said
        assert resumed is None or f"resumed from {runs.folder}/cut/checkpoint-{resumed}" in said
        killed = [code == -9 for code in codes]
        assert killed == [fault.rank in (None, rank) for rank in range(len(codes))], said
        if fault.rank is not None:
            assert codes[1 - fault.rank] == 1, said
            # The other may show that its connection was lost, but only below the reason.
            assert "has ended without a word" in said.split("Traceback")[0].split(f"the run ends: rank {fault.rank}")[1]
        assert saved_in(runs.folder / "cut") == left
        assert not (runs.folder / "cut" / "config.json").exists(), "a model that is not whole would be taken for one"
    if "ZeRO" in setup:
        assert (runs.folder / "cut" / "checkpoint-6" / "rank-00001.pt").stat().st_size > 100_000, "each has its share"
    codes, said = runs.end(setup, "cut", *SAVE)
    assert not any(codes) and "left out" not in said, said
    assert_same_run(runs.folder / "cut", whole(setup))
    assert not list((runs.folder / "cut").glob(".saving-*")), "what half a save left is gone"


@pytest.mark.slow
def test_others_take_over(runs, whole):
    """Another mode, kernel, number of processes, ZeRO stage, and none: all train the same rows."""
    runs.end("two that share rows", "cut", *SAVE, faults=(BEFORE_SAVING_4,))
    takers = [
        ("three under ZeRO-3", "--parallel_mode", "dist_flash_attn"),
        ("two processes", "--attn-kernel", "reference"),
        ("ZeRO-3", "--parallel_mode", "ulysses_attn"),
    ]
    for setup, *flags in takers:
        codes, said = runs.end(setup, "cut", "--save-every", "1", *flags, faults=(BEFORE_SAVING_4,))
        assert "resumed from" in said and set(codes) == {-9}, said
    codes, said = runs.end("two that share rows", "cut", "--sequence-parallel-size", "1", *ONE_ROW)
    assert codes == [0, 0] and "resumed from" in said, said
    assert_like(runs.folder / "cut", whole("one process"))
