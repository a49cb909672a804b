"""wandb and TensorBoard: they never wait for people, and a run that goes on continues its own curves."""

import os

import pytest

from easy_context.training.arguments import Arguments
from easy_context.training.trackers import WANDB_ID, start_trackers


class FakeAccelerator:
    """What start_trackers uses of one."""

    is_main_process = True

    def init_trackers(self, name, config, init_kwargs):
        self.settings, self.options = (name, config), init_kwargs


def arguments_of(tmp_path, **changes) -> Arguments:
    return Arguments(**{"output_dir": str(tmp_path), "max_train_steps": 4} | changes)


@pytest.mark.parametrize("key", [None, "variable", "mode", "netrc"])
def test_wandb_without_a_key_goes_offline_and_says_so(tmp_path, monkeypatch, capsys, key):
    for variable in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    if key == "variable":
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    elif key == "mode":
        monkeypatch.setenv("WANDB_MODE", "disabled")
    elif key == "netrc":
        (tmp_path / "netrc").write_text("machine api.wandb.ai login user password 0000\n")
    accelerator = FakeAccelerator()
    arguments = arguments_of(tmp_path, report_to="wandb", wandb="long context", adam_betas=[0.9, 0.95])
    start_trackers(accelerator, arguments, 0)
    assert (os.environ.get("WANDB_MODE") == "offline") == (key is None)
    assert ("offline" in capsys.readouterr().out) == (key is None)
    name, settings = accelerator.settings
    assert name == "long context"
    assert settings["adam_betas"] == "[0.9, 0.95]" and settings["max_train_steps"] == 4, "trackers take no lists"
    monkeypatch.delenv("WANDB_MODE", raising=False)


def test_a_run_that_goes_on_continues_its_own_wandb_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    accelerator, arguments, ids = FakeAccelerator(), arguments_of(tmp_path, report_to="all", wandb="project"), []
    for step in (0, 7, 9, 0):
        start_trackers(accelerator, arguments, step)
        ids.append(accelerator.options["wandb"]["id"])
        assert accelerator.options["wandb"]["resume"] == "allow"
        assert accelerator.options["tensorboard"] == ({"purge_step": step + 1} if step else {})
    assert ids[0] == ids[1] == ids[2] != ids[3]
    (tmp_path / WANDB_ID).unlink()
    start_trackers(accelerator, arguments, 7)
    assert accelerator.options["wandb"]["id"] not in ids, "the run before this one logged to no wandb run"
