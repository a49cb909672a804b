"""A checkpoint has all tensors of the right shapes, or the model is refused; where possible, before it loads.

What may be loaded is Transformers' affair (tied heads, checkpoints of the base model); nothing of that is refused.
"""

import json
import logging
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_llama
from transformers import AutoConfig, AutoModelForCausalLM

from easy_context.common import notes
from easy_context.model.weights import check_weights, load_whole
from easy_context.training.accelerator import compile_nothing_on_cpu

UP_PROJ = "model.layers.1.mlp.up_proj.weight"


def without(*fragments):
    return lambda tensors: {key: value for key, value in tensors.items() if not any(f in key for f in fragments)}


def prefixed(prefix):
    return lambda tensors: {prefix + key: value for key, value in tensors.items()}


def of_the_base_model(tensors):
    """As `LlamaModel.save_pretrained` names them."""
    return {key.removeprefix("model."): value for key, value in tensors.items()}


def with_extra(**extra):
    return lambda tensors: {**tensors, **{key.replace("__", "."): torch.ones(2) for key in extra}}


def chain(*changes):
    def change(tensors):
        for one in changes:
            tensors = one(tensors)
        return tensors

    return change


TIED = {"tie_word_embeddings": True}
WHOLE = {
    "as saved": (lambda tensors: tensors, {}),
    "tied": (lambda tensors: tensors, TIED),
    "tied, with its head": (lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"].clone()}, TIED),
    "tied, only its head": (lambda t: {k.replace("model.embed_tokens", "lm_head"): v for k, v in t.items()}, TIED),
    "tied, of the base model": (of_the_base_model, TIED),
    "of the base model, with a head": (of_the_base_model, {}),
    "with old buffers": (with_extra(model__layers__0__self_attn__rotary_emb__inv_freq=True), {}),
}
INCOMPLETE = {
    "no head": (without("lm_head"), {}, "lack lm_head.weight, which would be random"),
    "no MLP": (without("layers.1.mlp"), {}, r"lack model.layers.1.mlp.down_proj.weight, .*up_proj.weight, which would"),
    "torch.compile": (prefixed("_orig_mod."), {}, "lack lm_head.* and 18 more, .* without the prefix _orig_mod."),
    "DDP, tied": (prefixed("module."), TIED, "lack lm_head.* and 18 more, .* without the prefix module."),
    "base model, untied": (chain(without("lm_head"), of_the_base_model), {}, "lack lm_head.weight, which would"),
    "nothing": (lambda tensors: {}, {}, "lack lm_head.weight, .* and 18 more"),
}


def save(folder: Path, change, settings: dict, form: str = "safetensors") -> str:
    """A tiny model whose tensors `change` has changed, as safetensors, as a pickle, or in many shards."""
    model = tiny_llama(**settings)
    model.save_pretrained(folder)
    tensors = change(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    if form == "pickle":
        torch.save(tensors, folder / "pytorch_model.bin")
    elif form == "safetensors":
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        places = {key: f"model-{1 + number % 3:05}-of-00003.safetensors" for number, key in enumerate(sorted(tensors))}
        for shard in set(places.values()):
            own = {key: value for key, value in tensors.items() if places[key] == shard}
            save_file(own, folder / shard, metadata={"format": "pt"})
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return str(folder)


def load(name: str):
    return load_whole(name, AutoConfig.from_pretrained(name), torch.float32)


@pytest.mark.parametrize("form", ["safetensors", "shards", "pickle"])
@pytest.mark.parametrize("case", WHOLE)
def test_whole_checkpoints_load_with_their_own_values(tmp_path, case, form):
    change, settings = WHOLE[case]
    name = save(tmp_path / "model", change, settings, form)
    check_weights(name, AutoConfig.from_pretrained(name))
    expected = tiny_llama(**settings).state_dict()
    for key, value in load(name).state_dict().items():
        assert torch.equal(value, expected[key]), key


@pytest.mark.parametrize("case", INCOMPLETE)
def test_a_tensor_that_is_missing_is_named_before_the_model_loads(tmp_path, case):
    change, settings, message = INCOMPLETE[case]
    name = save(tmp_path / "model", change, settings)
    with pytest.raises(ValueError, match=f"--model {name}: its weights {message}"):
        check_weights(name, AutoConfig.from_pretrained(name))
    with pytest.raises(ValueError, match=f"--model {name}: its weights {message}"):
        load(name)


def test_what_has_no_header_is_checked_while_it_loads(tmp_path):
    name = save(tmp_path / "model", without("layers.1.mlp"), {}, "pickle")
    check_weights(name, AutoConfig.from_pretrained(name))
    with pytest.raises(ValueError, match="its weights lack model.layers.1.mlp.down_proj.weight"):
        load(name)


def test_a_failure_to_load_is_one_line_but_full_memory_stays_what_it_is(tmp_path, monkeypatch):
    """train.py and the evaluation have advice of their own for full memory."""
    name = save(tmp_path / "model", lambda tensors: tensors, {})

    def fail(error):
        def from_pretrained(*args, **kwargs):
            raise error

        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)

    for error in (OSError("no\nroom"), RuntimeError("no\nroom"), KeyError("no\nroom"), EOFError("no\nroom")):
        fail(error)
        with pytest.raises(ValueError, match=rf"--model {name}: cannot be loaded \(.*no.*\)$"):
            load(name)
    fail(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        load(name)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_every_shard_is_looked_at(tmp_path, number):
    name = save(tmp_path / "model", lambda tensors: tensors, {}, "shards")
    config = AutoConfig.from_pretrained(name)
    shard = tmp_path / "model" / f"model-{number:05}-of-00003.safetensors"
    tensors = load_file(shard)
    key, value = next(iter(sorted(tensors.items())))

    save_file({**tensors, key: value[:-1].clone()}, shard, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"{key} has shape \[{len(value) - 1}.* asks for \[{len(value)}"):
        check_weights(name, config)
    save_file({other: own for other, own in tensors.items() if other != key}, shard, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"its weights lack {key}"):
        check_weights(name, config)
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"{shard.name} is damaged or cut off"):
        check_weights(name, config)
    shard.unlink()
    with pytest.raises(ValueError, match=f"{shard.name} of model.safetensors.index.json is missing"):
        check_weights(name, config)


def test_shapes_of_a_checkpoint_of_the_base_model_are_compared_too(tmp_path):
    name = save(tmp_path / "model", of_the_base_model, {})
    config = AutoConfig.from_pretrained(name)
    config.intermediate_size = 48
    with pytest.raises(ValueError, match=r"down_proj.weight has shape \[32, 64\] .* asks for \[32, 48\]"):
        check_weights(name, config)


@pytest.mark.parametrize("bars", [True, False])
def test_looking_changes_neither_the_config_nor_what_transformers_says(tmp_path, bars):
    from transformers.utils import logging as transformers_logging

    name = save(tmp_path / "model", with_extra(value_head__weight=True), {})
    config = AutoConfig.from_pretrained(name)
    if not bars:
        transformers_logging.disable_progress_bar()
    try:
        before = config.to_dict(), transformers_logging.get_verbosity()
        check_weights(name, config)
        assert (config.to_dict(), transformers_logging.get_verbosity()) == before
        assert transformers_logging.is_progress_bar_enabled() == bars
    finally:
        transformers_logging.enable_progress_bar()


def test_packed_weights_are_not_compared(tmp_path):
    """Of another number and shape than the config's; the quantiser knows them."""
    name = save(tmp_path / "model", without("layers.1"), {})
    config = AutoConfig.from_pretrained(name)
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    check_weights(name, config)


def test_tensors_without_a_place_are_named_once_on_the_first_process(tmp_path, monkeypatch, caplog):
    extra = with_extra(value_head__weight=True, model__layers__7__mlp__up_proj__weight=True)
    for rank, expected in (("1", 0), ("0", 1)):
        monkeypatch.setenv("RANK", rank)
        name = save(tmp_path / rank, extra, {})
        caplog.clear()
        check_weights(name, AutoConfig.from_pretrained(name))
        load(name)
        records = [record for record in caplog.records if record.name == notes.__name__]
        assert len(records) == expected
    assert records[0].levelno == logging.WARNING
    assert records[0].message == (
        f"--model {name}: its weights also hold model.layers.7.mlp.up_proj.weight, value_head.weight, for which this "
        "model has no place; they are not used"
    )


def _load_under_zero3(rank: int, world_size: int, folder: Path, cases: list[str]) -> dict[str, str]:
    """Load each case where DeepSpeed splits every parameter over ranks: what was said, or which values are wrong."""
    os.environ |= {"LOCAL_RANK": str(rank), "DS_ACCELERATOR": "cpu"}
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig, unset_hf_deepspeed_config

    compile_nothing_on_cpu()
    whole = {case: dict(tiny_llama(**settings).named_parameters()) for case, (_, settings) in WHOLE.items()}
    # From here on every model that is built is split over the ranks.
    keep = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1})
    found = {}
    try:
        for case in cases:
            try:
                model = load(str(folder / case))
            except ValueError as error:
                found[case] = str(error)
                continue
            expected = whole[case]
            with deepspeed.zero.GatheredParameters(list(model.parameters())):
                wrong = [key for key, value in model.named_parameters() if not torch.equal(value, expected[key])]
            found[case] = ", ".join(wrong)
    finally:
        unset_hf_deepspeed_config()
        del keep, os.environ["LOCAL_RANK"], os.environ["DS_ACCELERATOR"]
    return found


def test_under_zero3_the_same_is_loaded_and_refused_on_every_rank(pool, tmp_path):
    """Transformers reads the checkpoint in a loop of its own there."""
    cases = {**WHOLE, **INCOMPLETE}
    for case, (change, settings, *_) in cases.items():
        save(tmp_path / case, change, settings)
    for found in pool.run(_load_under_zero3, 2, tmp_path, list(cases)):
        for case in WHOLE:
            assert found[case] == "", case
        for case in INCOMPLETE:
            assert re.search(INCOMPLETE[case][2].split(" .*")[0], found[case]), case


@pytest.mark.parametrize("setting", [{"vocab_size": -1}, {"rope_parameters": {"rope_type": "odd", "rope_theta": 1e4}}])
def test_a_config_that_makes_no_model_is_one_line(tmp_path, setting):
    name = save(tmp_path / "model", lambda tensors: tensors, {})
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | setting))
    with pytest.raises(ValueError, match=f"--model {name}: no model can be built from its config.json .*$"):
        check_weights(name, AutoConfig.from_pretrained(name))
