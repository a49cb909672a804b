"""Models that cannot be evaluated are refused by name before anything is loaded; finished results are never lost."""

import csv
import json
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_llama
from transformers import AutoConfig

import eval_needle
import eval_ppl
from easy_context.common.files import check_writable, write_whole
from easy_context.evaluation import loading
from easy_context.evaluation.loading import check_output_layer, check_parallelism, load_scorer
from easy_context.model.config import load_config


@pytest.fixture
def broken(model_folder, tmp_path):
    """A copy of the model whose weights a test then spoils."""
    return Path(shutil.copytree(model_folder, tmp_path / "broken"))


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "haystack" / "a.txt"
    file.parent.mkdir()
    file.write_text("All happy families are alike. " * 30)
    return str(file)


def remove(folder):
    (folder / "model.safetensors").unlink()


def cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def garble(folder):
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n" * 3)


def reshape(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))


def lose_a_shard(folder):
    remove(folder)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def garble_index(folder):
    remove(folder)
    (folder / "model.safetensors.index.json").write_text("{}")


def lose_a_tensor(folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})


def lose_a_tensor_of_a_pickle(folder):
    """A file without a header, of which nothing is known before it is loaded."""
    lose_a_tensor(folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    remove(folder)


every_fault = pytest.mark.parametrize(
    "spoil, message",
    [
        (remove, "--model .*broken: the folder holds no weights"),
        (cut, "--model .*broken: model.safetensors is damaged or cut off"),
        (garble, "--model .*broken: model.safetensors is damaged or cut off"),
        (reshape, r"--model .*broken: model.layers.0.mlp.down_proj.weight has shape \[32, 64\] .* asks for \[32, 48\]"),
        (lose_a_shard, "--model .*broken: model-00001-of-00002.safetensors of model.safetensors.index.json is missing"),
        (lose_a_tensor, "--model .*broken: its weights lack model.layers.1.mlp.up_proj.weight, which would be random"),
        (garble_index, "--model .*broken: model.safetensors.index.json is damaged"),
    ],
)


def never(*args, **options):
    raise AssertionError("a model was loaded")


@every_fault
def test_every_model_is_checked_before_one_is_loaded(model_folder, broken, text, tmp_path, monkeypatch, spoil, message):
    spoil(broken)
    monkeypatch.setattr(loading, "load_whole", never)
    output = tmp_path / "two.csv"
    arguments = ["-m", model_folder, "-m", str(broken), "--text", text, "--output-file", str(output)]
    with pytest.raises(SystemExit, match=message):
        eval_ppl.main(arguments)
    assert not output.exists()
    output.write_text("of an earlier run")
    with pytest.raises(SystemExit, match=message):
        eval_ppl.main(arguments)
    assert output.read_text() == "of an earlier run"
    with pytest.raises(SystemExit, match=message):
        eval_needle.main(["--model", str(broken), "--output_dir", str(tmp_path / "n")])
    assert not (tmp_path / "n").exists()


def test_what_shows_only_while_loading_is_one_line_and_loses_no_finished_model(model_folder, broken, text, tmp_path):
    lose_a_tensor_of_a_pickle(broken)
    output = tmp_path / "two.csv"
    lengths = ["--min-tokens", "32", "--max-tokens", "64", "--output-file", str(output)]
    message = "--model .*broken: its weights lack model.layers.1.mlp.up_proj.weight, which would be random.*"
    with pytest.raises(SystemExit, match=message):
        eval_ppl.main(["-m", model_folder, "-m", str(broken), "--text", text, *lengths])
    with output.open(newline="") as file:
        assert [(row["model"], row["length"]) for row in csv.DictReader(file)] == [
            (model_folder, "32"),
            (model_folder, "64"),
        ]
    assert list(json.loads(output.with_suffix(".json").read_text())["models"]) == [model_folder]
    results = ["two.csv", "two.json", "two.png", "two.unfinished.jsonl"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["broken", "haystack", *results]
    arguments = ["--model", str(broken), "--output_dir", str(tmp_path / "n"), "--haystack_dir", str(Path(text).parent)]
    with pytest.raises(SystemExit, match=message):
        eval_needle.main(arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="these kernels may run on a GPU")
@pytest.mark.parametrize("kernel", ["cudnn", "flash_attn", "flash_attn_4", "torch_flash"])
def test_a_kernel_that_cannot_run_here_is_refused_at_the_start(model_folder, text, tmp_path, monkeypatch, kernel):
    monkeypatch.setattr(loading, "load_whole", never)
    message = f"--attn-kernel {kernel} cannot be used here: "
    with pytest.raises(SystemExit, match=message):
        eval_ppl.main(["-m", model_folder, "--text", text, "--attn-kernel", kernel, "--output-file", f"{tmp_path}/o"])
    with pytest.raises(SystemExit, match=message):
        eval_needle.main(["--model", model_folder, "--attn-kernel", kernel, "--output_dir", str(tmp_path / "n")])


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    file = tmp_path / "deep" / "f.csv"
    check_writable(file, "--f")
    assert not file.parent.exists()
    write_whole(file, "old\r\n")
    with pytest.raises(UnicodeEncodeError):
        write_whole(file, "new \ud800")
    assert file.read_bytes() == b"old\r\n" and list(file.parent.iterdir()) == [file]
    check_writable(file, "--f")
    assert file.read_bytes() == b"old\r\n"
    with pytest.raises(ValueError, match="--f .*deep: cannot be written .it is a folder.; name another file"):
        check_writable(file.parent, "--f")


def flags(**changes):
    model_flags = {"parallel_mode": None, "sequence_parallel_size": None, "attn_kernel": "auto", "dtype": "auto"}
    return Namespace(**{**model_flags, **changes})


@pytest.mark.parametrize(
    "overrides, arguments, message",
    [
        (
            {"num_attention_heads": 3, "num_key_value_heads": 3},
            {"parallel_mode": "ulysses_attn"},
            "--parallel_mode ulysses_attn cannot split 3 query",
        ),
        ({"model_type": "gpt2"}, {}, "--model name: model type 'gpt2' is not supported"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            {},
            "--model name: rope_type 'dynamic'",
        ),
        ({}, {"sequence_parallel_size": 3}, "--sequence-parallel-size 3 must divide the number of processes, 2"),
    ],
)
def test_what_processes_cannot_share_is_refused_before_loading(
    model_folder, monkeypatch, overrides, arguments, message
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = load_config(model_folder)
    for key, value in overrides.items():
        setattr(config, key, value)
    with pytest.raises(ValueError, match=message):
        check_parallelism("name", config, flags(**arguments), 200)


def test_a_family_of_its_own_attention_takes_no_kernel():
    config = AutoConfig.for_model("gpt2")
    check_parallelism("name", config, flags(), 200)
    with pytest.raises(ValueError, match="--attn-kernel cpu: model type 'gpt2' runs its own attention; leave the flag"):
        check_parallelism("name", config, flags(attn_kernel="cpu"), 200)


@pytest.mark.parametrize("frugal, chunk", [(False, 1024), (True, 256)])
def test_a_frugal_scorer_has_smaller_loss_chunks(model_folder, frugal, chunk):
    with load_scorer(model_folder, load_config(model_folder), flags(), torch.device("cpu"), frugal) as scorer:
        assert (scorer.loss_chunk, scorer.frugal) == (chunk, frugal)


def test_an_output_layer_that_does_more_is_refused():
    model = tiny_llama()
    check_output_layer(model, "m")
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match="final_logit_softcapping, which is not supported"):
        check_output_layer(model, "m")
