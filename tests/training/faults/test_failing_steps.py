"""Steps that fail, freeze, are not finite or are interrupted: all processes end soon, and say why."""

import json

import pytest
from faults import Fault, seconds_since_fault
from faulty_runs import SECONDS_TO_END, STEPS, assert_same_run, record_of, saved_in
from tiny_models import VOCABULARY, tiny_llama

pytestmark = pytest.mark.launch
SETUP = "two processes"
SAVE = ("--save-every", "2")
SPOILED = Fault("spoil", "loss", number=3, rank=1)  # one micro-batch a step


def test_a_loader_that_raises_ends_all_and_its_error_is_on_top(runs):
    codes, said = runs.end(SETUP, "out", faults=(Fault("fail", "row", number=5, rank=1),))
    assert codes == [1, 1]
    assert said.count("Traceback") == 1 and "faults.Broken: this was planned" in said
    assert said.index("faults.Broken") < said.index("the run ends: rank 1 failed: Broken: this was planned")


def test_a_row_that_cannot_be_used_ends_all_with_a_message(runs):
    import datasets

    rows = [[1] * 32] * 16 + [[VOCABULARY] * 32] * 2  # only the first sixteen are checked at the start
    datasets.Dataset.from_dict({"input_ids": rows}).save_to_disk(runs.folder / "rows")
    flags = ("--dataset", str(runs.folder / "rows"), "--max-train-steps", "9")
    codes, said = runs.end(SETUP, "out", *flags, faults=(Fault("check few", "rows are checked"),))
    assert codes == [2, 1] and "Traceback" not in said, said
    assert "train.py cannot continue" in said and f"token ids from {VOCABULARY} to {VOCABULARY}" in said


@pytest.mark.parametrize("rank", [0, 1])
def test_a_frozen_process_is_noticed(runs, rank):
    run = runs.start(SETUP, "out", "--hang-timeout", "4", faults=(Fault("freeze", "loss", number=3, rank=rank),))
    other = run.processes[1 - rank]
    other.join(120)
    said = run.said()
    assert other.exitcode == 1, said
    assert seconds_since_fault(said) < SECONDS_TO_END
    assert f"rank {rank}" in said and "has not answered for" in said
    assert f"rank {1 - rank} is in step 3" in said and "backward" in said, "where it stands"


def test_a_process_that_does_not_go_on_is_named(runs):
    codes, said = runs.end(SETUP, "out", "--hang-timeout", "4", faults=(Fault("sleep", "row", number=3, rank=1),))
    assert codes == [1, 1]
    assert "nothing has moved for" in said and "least far is rank 1" in said
    assert "time.sleep(1000)" in said, "the stack of the one that sleeps"


def test_a_gradient_that_is_not_finite_stops_all_before_the_weights_are_touched(runs, whole):
    codes, said = runs.end(SETUP, "out", *SAVE, faults=(SPOILED,))
    assert codes == [1, 1] and "Traceback" not in said, said
    assert said.count("step 3: loss") == 1 and "gradient norm nan, from rows" in said
    assert "saved nothing more than checkpoint-2" in said
    codes, said = runs.end(SETUP, "out")
    assert codes == [0, 0] and "resumed from" in said
    assert_same_run(runs.folder / "out", whole(SETUP))


def test_skipped_steps_leave_the_weights_and_are_counted_over_a_resume(runs):
    last = Fault("spoil", "loss", number=4, rank=0)  # of a run that begins with step 4
    skip = (*SAVE, "--skip-nonfinite", "2", "--save-every", "3")
    faults = (SPOILED, Fault("kill", "before a save", number=2))
    codes, said = runs.end(SETUP, "out", *skip, faults=faults)
    assert "Skipped: the weights are left as they were (1 of --skip-nonfinite 2)" in said
    codes, said = runs.end(SETUP, "out", *skip, faults=(last,))
    assert codes == [0, 0], said
    assert "(2 of --skip-nonfinite 2)" in said
    assert "left out because they were not finite: 2 of 7 steps (3, 7)" in said
    assert [step for step, _, norm, _ in record_of(runs.folder / "out") if norm is None] == [3, 7]


def test_a_signal_in_the_middle_of_a_step_saves_and_goes_on(runs, whole):
    codes, said = runs.end(SETUP, "out", faults=(Fault("terminate", "loss", number=3, rank=1),))
    assert codes == [0, 0] and saved_in(runs.folder / "out") == ["checkpoint-3"], said
    assert "the same command goes on from checkpoint-3" in said
    codes, said = runs.end(SETUP, "out")
    assert codes == [0, 0]
    assert_same_run(runs.folder / "out", whole(SETUP))


@pytest.mark.parametrize("rank,how", [(0, "fill the disk"), (1, "fill it to the brim")])
def test_a_full_disk_costs_a_checkpoint(runs, whole, rank, how):
    """One that fills up while a file is written, by the first process or by another, whose file is short."""
    full = Fault(how, "before a save", number=2, rank=rank)
    free = Fault("empty the disk", "before a save", number=3, rank=rank)
    codes, said = runs.end(SETUP, "out", *SAVE, "--keep-last", "9", faults=(full, free))
    assert codes == [0, 0] and "Traceback" not in said, said
    assert said.count("checkpoint of step 4 could not be saved") == 1, said
    assert saved_in(runs.folder / "out") == ["checkpoint-2", "checkpoint-6"]
    assert_same_run(runs.folder / "out", whole(SETUP))


def test_a_disk_that_is_full_at_the_end_is_a_message_and_the_last_checkpoint_stays(runs, whole):
    codes, said = runs.end(SETUP, "out", *SAVE, faults=(Fault("fill the disk", "end", rank=0),))
    assert codes == [1, 1] and "Traceback" not in said, said
    assert "the model could not be saved" in said and "checkpoint-6" in said
    assert not (runs.folder / "out" / "config.json").exists()
    codes, said = runs.end(SETUP, "out")
    assert codes == [0, 0] and "resumed from" in said
    assert_same_run(runs.folder / "out", whole(SETUP))


def test_a_checkpoint_of_another_model_is_refused(runs):
    runs.end(SETUP, "out", *SAVE, faults=(Fault("terminate", "loss", number=2),))
    before = json.loads((runs.folder / "out" / "checkpoint-2" / "manifest.json").read_text())
    tiny_llama(num_hidden_layers=1).save_pretrained(runs.folder / "other")
    codes, said = runs.end(SETUP, "out", "--model", str(runs.folder / "other"))
    assert codes == [2, 1] and "model was" in said and "Traceback" not in said, said
    codes, said = runs.end(SETUP, "out", "--model", str(runs.folder / "other"), "--resume-anyway")
    assert codes == [2, 1] and "Traceback" not in said, said
    assert "the checkpoint is of a model with other parameters" in said
    assert json.loads((runs.folder / "out" / "checkpoint-2" / "manifest.json").read_text()) == before


def test_a_second_run_into_the_same_folder_is_refused(runs):
    first = runs.start(SETUP, "out", *SAVE, faults=(Fault("sleep", "loss", number=4),))
    first.wait_for(lambda: "[fault at" in first.said())
    codes, said = runs.end("one process", "out", "--overwrite")
    assert codes == [2] and f"process {first.processes[0].pid} on" in said and "is training into it" in said, said
    first.kill()
    codes, said = runs.end(SETUP, "out", "--max-train-steps", str(STEPS))
    assert codes == [0, 0] and "resumed from" in said, "the claim ends with its process, however that ends"
