"""Runs that are cut off and go on: bit for bit those that were not, from the last checkpoint that is whole."""

import shutil
import threading
from pathlib import Path

import pytest
import torch
from faulty_runs import STEPS, assert_same_run, record_of, save_assets, saved_in
from forked_runs import ZERO_3_OFFLOAD, ForkedRun
from launching import run_python, start_python, train_here
from safetensors.torch import load_file


class Killed(Exception):
    """Stands in for a machine that goes away."""


@pytest.fixture(scope="module")
def assets(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("resuming")
    save_assets(folder)
    return folder


def flags_of(assets: Path, output_dir: Path) -> list[str]:
    return [
        *("--model", str(assets / "model"), "--dataset", str(assets / "rows"), "--output-dir", str(output_dir)),
        *("--seq-length", "32", "--max-train-steps", str(STEPS), "--gradient-accumulate-every", "2"),
        *("--learning-rate", "1e-2", "--warmup-steps", "3", "--lr-scheduler", "cosine", "--mixed-precision", "no"),
    ]


@pytest.fixture
def train(assets, tmp_path, monkeypatch):
    """`train(name, flags..., die_at=N)`: run train.main() into a folder; it dies after step N is logged."""
    from easy_context.training.metrics import MetricsLog

    write = MetricsLog.write

    def run(name: str, *flags: str, die_at: int | None = None) -> Path:
        def write_or_die(log, record):
            write(log, record)
            if record["step"] == die_at:
                raise Killed

        monkeypatch.setattr(MetricsLog, "write", write_or_die)
        try:
            train_here(*flags_of(assets, tmp_path / name), *flags)
        finally:
            for thread in threading.enumerate():  # a step is long enough for a checkpoint to be written meanwhile
                if thread.name.startswith("checkpoint-"):
                    thread.join()
        return tmp_path / name

    return run


@pytest.fixture
def cut_off(train, assets, tmp_path):
    """A run that saved after steps 2 and 4 and died in step 5."""
    if not (assets / "cut").exists():  # trained once
        with pytest.raises(Killed):
            train("cut", "--save-every", "2", die_at=5)
        shutil.move(tmp_path / "cut", assets / "cut")
    return shutil.copytree(assets / "cut", tmp_path / "cut")


@pytest.fixture
def whole(train, assets, tmp_path):
    """A run that was not cut off."""
    if not (assets / "whole").exists():
        shutil.move(train("whole"), assets / "whole")
    return assets / "whole"


def test_a_run_that_was_cut_off_twice_is_the_run_that_was_not(train, cut_off, whole):
    assert saved_in(whole) == [], "nothing is saved unasked"
    assert saved_in(cut_off) == ["checkpoint-2", "checkpoint-4"]
    with pytest.raises(Killed):
        train("cut", "--save-every", "3", die_at=6)
    assert [step for step, *_ in record_of(cut_off)] == [1, 2, 3, 4, 5, 6]
    assert saved_in(cut_off) == ["checkpoint-2", "checkpoint-4"], "it died before step 6 was saved"
    assert_same_run(train("cut"), whole)
    assert not list(cut_off.glob("metrics-*.jsonl"))


def test_only_the_last_checkpoints_are_kept(train, tmp_path):
    with pytest.raises(Killed):
        train("few", "--save-every", "1", "--keep-last", "3", die_at=6)
    assert saved_in(tmp_path / "few") == ["checkpoint-3", "checkpoint-4", "checkpoint-5"]


def truncate(folder: Path) -> None:
    file = folder / "rank-00000.pt"
    file.write_bytes(file.read_bytes()[:-100])


def flip(folder: Path) -> None:
    content = bytearray((folder / "rank-00000.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "rank-00000.pt").write_bytes(content)


DAMAGES = {
    "truncated": (truncate, "bytes and should have"),
    "flipped": (flip, "checksum"),
    "without a file": (lambda folder: (folder / "rank-00000.pt").unlink(), "has None bytes"),
    "without a manifest": (lambda folder: (folder / "manifest.json").unlink(), "it holds no manifest.json"),
    "with half a manifest": (lambda folder: (folder / "manifest.json").write_text('{"step": 4'), "cannot be read"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_left_out_for_the_one_before(train, cut_off, caplog, damage):
    spoil, said = DAMAGES[damage]
    spoil(cut_off / "checkpoint-4")
    with pytest.raises(Killed):
        train("cut", die_at=3)
    assert said in caplog.text and "checkpoint-4 is left out" in caplog.text
    assert saved_in(cut_off) == ["checkpoint-2", "earlier-checkpoints-1"], "what is damaged is not removed"
    assert [step for step, *_ in record_of(cut_off)] == [1, 2, 3], "step 3 is trained again"


def test_a_named_checkpoint_must_be_whole(train, cut_off, capsys):
    flip(cut_off / "checkpoint-2")
    with pytest.raises(SystemExit):
        train("cut", "--resume", str(cut_off / "checkpoint-2"))
    assert "cannot be used: rank-00000.pt is damaged" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        train("cut", "--resume", str(cut_off))
    assert "cannot be used: it holds no manifest.json" in capsys.readouterr().err
    truncate(cut_off / "checkpoint-4")
    with pytest.raises(SystemExit):
        train("cut", "--resume", str(cut_off / "checkpoint-4"), "--seed", "-1")
    said = capsys.readouterr().err
    assert "rank-00000.pt has" in said and "--seed -1" in said, "among all problems, before anything loads"
    with pytest.raises(SystemExit):
        train("cut", "--resume", "")
    assert "--resume is empty: give the folder of a checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags,said",
    [
        (["--learning-rate", "2e-2"], "learning_rate was 0.01 and is 0.02"),
        (["--seed", "7"], "seed was 42 and is 7"),
        (["--gradient-accumulate-every", "4"], "rows_per_step was 2 and is 4"),
        (["--max-train-steps", "9"], "max_train_steps was 7 and is 9"),
        (["--respect-documents", "--documents-end-with", "15"], "documents was None and is [None, 15]"),
    ],
)
def test_settings_that_change_the_weights_are_refused(train, cut_off, capsys, flags, said):
    with pytest.raises(SystemExit):
        train("cut", *flags)
    assert said in capsys.readouterr().err
    with pytest.raises(Killed):
        train("cut", *flags, "--resume-anyway", die_at=5)


def test_other_rows_in_the_same_place_are_refused(train, cut_off, assets, tmp_path, capsys):
    """As many, as long, and the first one the same."""
    import datasets

    moved = shutil.copytree(assets / "rows", tmp_path / "kept")
    try:
        rows = datasets.load_from_disk(str(moved))["input_ids"][:]
        rows[-1][7] += 1
        shutil.rmtree(assets / "rows")
        datasets.Dataset.from_dict({"input_ids": rows}).save_to_disk(assets / "rows")
        with pytest.raises(SystemExit):
            train("cut")
    finally:
        shutil.rmtree(assets / "rows")
        shutil.move(moved, assets / "rows")
    assert "some_rows was" in capsys.readouterr().err


def test_how_the_rows_of_a_step_are_made_up_may_change(train, cut_off):
    whole = train("whole", "--batch-size", "2", "--gradient-accumulate-every", "1")
    got = train("cut", "--batch-size", "2", "--gradient-accumulate-every", "1", "--parallel_mode", "data_parallel")
    for (_, loss, norm, _), (_, expected_loss, expected_norm, _) in zip(record_of(got), record_of(whole), strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-5) and norm == pytest.approx(expected_norm, rel=1e-4)


def test_resume_none_starts_anew(train, cut_off, whole):
    assert_same_run(train("cut", "--resume", "none"), whole)


def test_a_new_run_does_not_take_an_earlier_run_s_checkpoints_for_its_own(train, cut_off):
    """Its own, of lower steps, would be removed for those, and a later run would go on from them."""
    with pytest.raises(Killed):
        train("cut", "--resume", "none", "--save-every", "1", die_at=3)
    assert saved_in(cut_off) == ["checkpoint-1", "checkpoint-2", "earlier-checkpoints-1"]
    assert saved_in(cut_off / "earlier-checkpoints-1") == ["checkpoint-2", "checkpoint-4"]


def test_fewer_steps_than_the_checkpoint_has_are_refused(train, cut_off, capsys):
    """Nothing would be trained, and a model of more steps than asked for be saved."""
    flags = ["--max-train-steps", "3", "--resume-anyway"]
    with pytest.raises(SystemExit):
        train("cut", *flags)
    assert "checkpoint-4 was saved after step 4, beyond --max-train-steps 3" in capsys.readouterr().err
    train("cut", *flags, "--resume", str(cut_off / "checkpoint-2"))
    assert [step for step, *_ in record_of(cut_off)] == [1, 2, 3]


@pytest.mark.launch
def test_two_runs_into_one_folder_are_refused(assets, tmp_path):
    """The second would go on from the first one's checkpoints and rewrite its metrics."""
    claim = (
        "import sys, time, pathlib; from easy_context.training.saving import claim; claim(pathlib.Path(sys.argv[1]))"
    )
    first = start_python("-c", f"{claim}; print('claimed', flush=True); time.sleep(100)", str(tmp_path))
    try:
        assert first.stdout.readline() == "claimed\n"
        second = run_python("train.py", *flags_of(assets, tmp_path))
        assert second.returncode == 2
        assert f"process {first.pid} on" in second.stderr and "is training into it" in second.stderr
        assert not (tmp_path / "args.json").exists()
    finally:
        first.kill()
        first.communicate()
    third = run_python("-c", claim, str(tmp_path))
    assert third.returncode == 0, "the claim ends with its process, however that ends"


def test_overwriting_a_finished_run_starts_anew_and_goes_on_with_itself(train):
    finished = train("again", "--save-every", "2")
    expected = record_of(finished)
    with pytest.raises(Killed):
        train("again", "--overwrite", "--save-every", "2", die_at=3)
    assert record_of(finished) == expected[:3], "not from the finished run's checkpoint of step 6"
    assert record_of(train("again", "--overwrite")) == expected
    assert len(list(finished.glob("metrics-*.jsonl"))) == 1, "the second run went on with its metrics"


def test_a_full_disk_costs_the_checkpoint_and_not_the_run(train, whole, tmp_path, monkeypatch, caplog):
    from easy_context.training.checkpoints import background

    write, writes = background.write_state, []

    def write_or_fail(folder, process, state):
        writes.append(folder)
        if len(writes) != 2:
            return write(folder, process, state)
        (folder / "rank-00000.pt").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(background, "write_state", write_or_fail)
    full = train("full", "--save-every", "2", "--keep-last", "9")
    assert "checkpoint of step 4 could not be saved ([Errno 28] No space left" in caplog.text
    assert saved_in(full) == ["checkpoint-2", "checkpoint-6"], "nothing half is left"
    assert_same_run(full, whole)


def launch(assets: Path, output_dir: Path, processes: int, *flags: str) -> str:
    """Train under ZeRO-3 with CPU offload; return what was said."""
    run = ForkedRun(assets / "log", processes, [*flags_of(assets, output_dir), *flags], **ZERO_3_OFFLOAD)
    assert run.wait(300) == [0] * processes, run.said()[-4000:]
    return run.said()


@pytest.mark.launch
def test_zero_3_goes_on_bit_for_bit(assets, tmp_path):
    launch(assets, tmp_path / "whole", 2, "--save-every", "3", "--keep-last", "9")
    cut = tmp_path / "cut"
    for name in ("checkpoint-3", "checkpoint-6"):
        shutil.copytree(tmp_path / "whole" / name, cut / name)
    shutil.copy(tmp_path / "whole" / "metrics.jsonl", cut)
    flip_second = cut / "checkpoint-6" / "rank-00001.pt"  # only one of the processes can see this
    flip_second.write_bytes(flip_second.read_bytes()[:-1] + b"?")
    said = launch(assets, cut, 2)
    assert "checkpoint-6 is left out: rank-00001.pt is damaged" in said and "resumed from" in said
    assert_same_run(cut, tmp_path / "whole")

    # Three processes put their shares together from those of two; sums in another order differ in the last bits.
    for folder in ("earlier-checkpoints-1", "model.safetensors", "config.json"):
        (shutil.rmtree if folder.startswith("earlier") else Path.unlink)(cut / folder)
    assert "resumed from" in launch(assets, cut, 3)
    for got, expected in zip(record_of(cut), record_of(tmp_path / "whole"), strict=True):
        assert got == pytest.approx(expected, rel=1e-4)
    weights, reference = (load_file(folder / "model.safetensors") for folder in (cut, tmp_path / "whole"))
    for name in reference:
        torch.testing.assert_close(weights[name], reference[name], rtol=0, atol=2e-4)
