"""Saving: a plain Hugging Face checkpoint, whole or not there at all."""

import dataclasses
import json
import os

import pytest
import torch
from tiny_models import save_tiny_llama, tiny_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

from easy_context import apply_fused_loss
from easy_context.model.tokenizer import load_tokenizer
from easy_context.training.arguments import Arguments
from easy_context.training.saving import is_finished, prepare_metrics, prepare_output_dir, save_model


class OneProcess:
    """The part of accelerate.Accelerator that saving uses, without its process-wide state."""

    is_main_process = True

    def get_state_dict(self, model):
        return model.state_dict()

    def unwrap_model(self, model):
        return model

    def wait_for_everyone(self):
        pass


class OtherRank(OneProcess):
    """Off rank 0, where ZeRO-3 gives no weights."""

    is_main_process = False

    def get_state_dict(self, model):
        return None


def assert_reloads(folder, model) -> None:
    again, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for (name, expected), (again_name, value) in zip(
        model.state_dict().items(), again.state_dict().items(), strict=True
    ):
        assert name == again_name and torch.equal(value, expected), name


@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_model_reloads_with_every_key(tmp_path, tied):
    model = apply_fused_loss(tiny_llama(tie_word_embeddings=tied))
    save_model(OneProcess(), model, str(tmp_path / "out"))
    assert is_finished(tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    assert_reloads(tmp_path / "out", model)


def test_the_tokenizer_is_saved_with_the_model(tmp_path, capsys):
    name = save_tiny_llama(tmp_path / "start")
    save_model(OneProcess(), tiny_llama(), str(tmp_path / "out"), tokenizer_of=name)
    text = "The pass-key is 7."
    assert AutoTokenizer.from_pretrained(tmp_path / "out")(text) == AutoTokenizer.from_pretrained(name)(text)
    assert capsys.readouterr().out == ""


def test_a_model_without_a_tokenizer_is_saved_and_that_is_said(tmp_path, capsys):
    tiny_llama().save_pretrained(tmp_path / "start")
    assert load_tokenizer(str(tmp_path / "start"), required=False) is None
    assert "no tokenizer is saved" in capsys.readouterr().out


def test_generation_settings_that_contradict_each_other_do_not_lose_the_model(tmp_path):
    """Llama-2's own: a temperature without sampling, which transformers refuses to save once it was changed."""
    tiny_llama().save_pretrained(tmp_path / "start")
    settings = tmp_path / "start" / "generation_config.json"
    contradiction = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "bos_token_id": 1, "eos_token_id": 2}
    settings.write_text(json.dumps(contradiction))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "start")
    save_model(OneProcess(), model, str(tmp_path / "out"))
    assert_reloads(tmp_path / "out", model)
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["temperature"] == 0.6


def test_shards_of_an_earlier_model_do_not_stay(tmp_path):
    tiny_llama().save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    model = tiny_llama(seed=1)
    save_model(OneProcess(), model, str(tmp_path))
    assert [path.name for path in tmp_path.glob("model*")] == ["model.safetensors"]
    assert_reloads(tmp_path, model)


def test_saving_over_an_earlier_model_twice(tmp_path):
    name = save_tiny_llama(tmp_path / "start")
    for seed in (1, 2):
        model = tiny_llama(seed=seed)
        save_model(OneProcess(), model, str(tmp_path / "out"), tokenizer_of=name)
        assert_reloads(tmp_path / "out", model)


def test_a_save_that_fails_leaves_the_earlier_model(tmp_path, monkeypatch):
    earlier = tiny_llama()
    save_model(OneProcess(), earlier, str(tmp_path))
    model = tiny_llama(seed=1)

    def full_disk(folder, **options):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(model, "save_pretrained", full_disk)
    with pytest.raises(SystemExit, match="could not be saved in .*No space left on device.*No checkpoint"):
        save_model(OneProcess(), model, str(tmp_path))
    assert_reloads(tmp_path, earlier)
    monkeypatch.undo()
    save_model(OneProcess(), model, str(tmp_path))  # what the failure left is no obstacle
    assert_reloads(tmp_path, model)
    assert not (tmp_path / ".saving-model").exists()


def test_a_save_that_is_cut_off_while_renaming_is_not_taken_for_a_model(tmp_path, monkeypatch):
    save_model(OneProcess(), tiny_llama(), str(tmp_path))
    monkeypatch.setattr("os.replace", lambda source, target: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        save_model(OneProcess(), tiny_llama(seed=1), str(tmp_path))
    assert not is_finished(tmp_path)


def test_the_model_counts_as_saved_only_when_its_last_file_is_in_place(tmp_path, monkeypatch):
    name = save_tiny_llama(tmp_path / "start")
    moved = []
    replace = os.replace

    def replace_some(source, target):
        if len(moved) == allowed:
            raise KeyboardInterrupt
        moved.append(os.path.basename(target))
        replace(source, target)

    monkeypatch.setattr("os.replace", replace_some)
    allowed = None
    save_model(OneProcess(), tiny_llama(), str(tmp_path / "out"), tokenizer_of=name)
    files = list(moved)
    assert files[-1] == "config.json" and "model.safetensors" in files
    for allowed in range(len(files)):
        moved.clear()
        with pytest.raises(KeyboardInterrupt):
            save_model(OneProcess(), tiny_llama(seed=1), str(tmp_path / "out"), tokenizer_of=name)
        assert not is_finished(tmp_path / "out"), files[:allowed]
        (tmp_path / "out" / "config.json").write_text("{}")  # an earlier model, for the next try


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_every_file_has_the_mode_of_the_umask(tmp_path, umask):
    name = save_tiny_llama(tmp_path / "start")
    before = os.umask(umask)
    try:
        save_model(OneProcess(), tiny_llama(), str(tmp_path / "out"), tokenizer_of=name)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert "model.safetensors" in modes
    assert set(modes.values()) == {0o666 & ~umask}, modes


def test_files_of_others_in_the_folder_stay(tmp_path):
    (tmp_path / "saving").mkdir()
    mine = [tmp_path / name for name in ("model_backup.safetensors", "saving/notes.txt", "model-best.safetensors")]
    for path in mine:
        path.write_text("keep")
    for seed in (1, 2):
        save_model(OneProcess(), tiny_llama(seed=seed), str(tmp_path))
    assert all(path.read_text() == "keep" for path in mine)


def test_other_ranks_write_nothing(tmp_path):
    save_model(OtherRank(), tiny_llama(), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_output_folder_gets_the_arguments_and_keeps_earlier_metrics(tmp_path, capsys):
    output_dir = tmp_path / "deep" / "out"
    args = Arguments(output_dir=str(output_dir), seq_length=32)
    for run in range(3):
        prepare_output_dir(OneProcess(), args)
        prepare_metrics(output_dir, step=0)
        assert not (output_dir / "metrics.jsonl").exists()
        (output_dir / "metrics.jsonl").write_text(f"run {run}")
    assert json.loads((output_dir / "args.json").read_text()) == dataclasses.asdict(args)
    assert (output_dir / "metrics-1.jsonl").read_text() == "run 0"
    assert (output_dir / "metrics-2.jsonl").read_text() == "run 1"
    assert capsys.readouterr().out.count("of an earlier run") == 2
    assert not is_finished(output_dir)
