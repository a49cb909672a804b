"""Nothing that a run reads is executed, and nothing that it must not tell is written."""

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from launching import train_here
from tiny_models import VOCABULARY, save_tiny_llama

SECRETS = {"HF_TOKEN": "hf_thisMustNotBeTold", "WANDB_API_KEY": "thisMustNotBeToldEither"}


class Bomb:
    """Makes a folder where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.fixture
def flags(tmp_path) -> list[str]:
    import datasets

    save_tiny_llama(tmp_path / "model")
    rows = torch.randint(0, VOCABULARY, (5, 32), generator=torch.Generator().manual_seed(0)).tolist()
    datasets.Dataset.from_dict({"input_ids": rows}).save_to_disk(tmp_path / "rows")
    return [
        *("--model", str(tmp_path / "model"), "--dataset", str(tmp_path / "rows"), "--seq-length", "32"),
        *("--output-dir", str(tmp_path / "out"), "--max-train-steps", "2", "--gradient-accumulate-every", "1"),
        *("--mixed-precision", "no", "--save-every", "1"),
    ]


def test_a_checkpoint_is_read_without_running_what_is_in_it(flags, tmp_path, capsys):
    """Its checksum is right: whoever writes a file can write the manifest, too."""
    train_here(*flags)
    folder = tmp_path / "out" / "checkpoint-1"
    file, manifest = folder / "rank-00000.pt", json.loads((folder / "manifest.json").read_text())
    torch.save(torch.load(file, weights_only=True) | {"more": Bomb(tmp_path / "exploded")}, file)
    manifest["files"][file.name] = {
        "size": file.stat().st_size,
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(SystemExit) as stop:
        train_here(*flags, "--overwrite", "--resume", str(folder))
    said = capsys.readouterr().err
    assert stop.value.code == 2 and f"{folder} cannot be used: " in said and "Weights only load failed" in said
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("family", ["llama", "own_family"])
def test_code_beside_a_model_is_not_run_and_nobody_is_asked(flags, tmp_path, capsys, monkeypatch, family):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question"))
    model = tmp_path / "model"
    config = json.loads((model / "config.json").read_text())
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel", "AutoTokenizer": ["own.T", None]}
    (model / "config.json").write_text(json.dumps(config | {"model_type": family, "auto_map": own}))
    (model / "own.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'exploded')!r})\n")
    if family == "llama":
        train_here(*flags)
    else:
        with pytest.raises(SystemExit):
            train_here(*flags)
        assert f"--model {model}" in capsys.readouterr().err
    assert not (tmp_path / "exploded").exists()


def test_weights_are_read_without_running_what_is_in_them(flags, tmp_path, capsys):
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Bomb(tmp_path / "exploded")}, tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(SystemExit):
        train_here(*flags)
    assert f"--model {tmp_path / 'model'}: cannot be loaded (Weights only load failed" in capsys.readouterr().err
    assert not (tmp_path / "exploded").exists()


def test_weights_are_written_as_safetensors_alone_and_no_secret_is_told(flags, tmp_path, monkeypatch, capfd):
    for name, secret in SECRETS.items():
        monkeypatch.setenv(name, secret)
    monkeypatch.setenv("WANDB_MODE", "offline")
    train_here(*flags, "--report-to", "tensorboard")
    out = tmp_path / "out"
    assert [path.name for path in out.iterdir() if path.suffix in (".bin", ".pt", ".safetensors")] == [
        "model.safetensors"
    ]
    told = "".join(capfd.readouterr()).encode()
    for path in (path for path in out.rglob("*") if path.is_file()):
        told += path.read_bytes()
    assert b"learning_rate" in told, "the settings are told"
    assert not any(secret.encode() in told for secret in SECRETS.values())


def test_an_address_with_a_password_is_refused_before_it_is_written_down(flags, tmp_path, capsys):
    with pytest.raises(SystemExit):
        train_here(*flags, "--dataset", "https://me:thisMustNotBeTold@example.org/rows.parquet")
    assert not (tmp_path / "out").exists()
