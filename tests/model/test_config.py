"""The RoPE base must hold in the loaded model, in what is saved, and in a reload; configs that do not load say why."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from easy_context.model.config import load_config, model_problems, set_rope_theta

HEAD_DIM = 16
SMALL = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
SCALINGS = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn without original window": {"factor": 4.0},
}


def saved_model(folder, config) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def inverse_frequencies(model) -> torch.Tensor:
    return model.model.rotary_emb.inv_freq.double()


@pytest.mark.parametrize("family", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config])
def test_the_base_holds_after_load_save_and_reload(tmp_path, family):
    name = saved_model(tmp_path / "start", family(**SMALL, head_dim=HEAD_DIM))
    config = AutoConfig.from_pretrained(name)
    set_rope_theta(config, 5e6, 4096)
    expected = 5e6 ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)

    model = AutoModelForCausalLM.from_pretrained(name, config=config)
    torch.testing.assert_close(inverse_frequencies(model), expected, rtol=1e-6, atol=0)
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(inverse_frequencies(again), expected, rtol=1e-6, atol=0)
    assert again.config.rope_parameters["rope_theta"] == 5e6
    assert again.config.max_position_embeddings == 4096


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("theta", [None, 5e5])
def test_other_scaling_is_kept(tmp_path, name, theta):
    """As if the model had been made with that base: what the window is raised to does not change the scaling."""
    scaling = {"rope_type": name.split()[0], **SCALINGS[name]}
    start = saved_model(tmp_path / "start", LlamaConfig(**SMALL, rope_parameters={**scaling, "rope_theta": 1e4}))
    config = AutoConfig.from_pretrained(start)
    set_rope_theta(config, theta, 1024)
    stretched = AutoModelForCausalLM.from_pretrained(start, config=config)
    direct = AutoModelForCausalLM.from_config(
        LlamaConfig(**SMALL, rope_parameters={**scaling, "rope_theta": theta or 1e4})
    )

    torch.testing.assert_close(inverse_frequencies(stretched), inverse_frequencies(direct), rtol=1e-6, atol=0)
    assert stretched.model.rotary_emb.attention_scaling == direct.model.rotary_emb.attention_scaling
    for key, value in scaling.items():
        assert stretched.config.rope_parameters[key] == value
    assert stretched.config.max_position_embeddings == 1024


def test_the_window_is_never_lowered():
    config = LlamaConfig(**SMALL)
    set_rope_theta(config, None, 16)
    assert config.max_position_embeddings == 64
    set_rope_theta(config, 1e6, None)
    assert config.max_position_embeddings == 64


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_scaling_that_depends_on_the_window_is_not_changed_by_raising_it(rope_type):
    """Its cosines are computed from max_position_embeddings, so that another window would be another model."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8} if rope_type == "longrope" else {"factor": 2.0}
    config = LlamaConfig(**SMALL, rope_parameters={"rope_type": rope_type, "rope_theta": 1e4, **factors})
    with pytest.raises(ValueError, match=f"(?s){rope_type}.*64.*seq_length"):
        set_rope_theta(config, None, 128)
    set_rope_theta(config, 1e5, 64)
    assert config.max_position_embeddings == 64


@pytest.mark.parametrize("theta", [0.5, 1.0, 1e4, 1e12])
def test_every_positive_base_can_be_set(theta):
    config = LlamaConfig(**SMALL)
    set_rope_theta(config, theta, None)
    assert config.rope_parameters["rope_theta"] == theta


@pytest.mark.parametrize("theta", [0, -1e4, float("nan"), float("inf")])
def test_bases_that_cannot_be_set_are_refused(theta):
    with pytest.raises(ValueError, match=f"rope_theta {theta} must be positive and finite"):
        set_rope_theta(LlamaConfig(**SMALL), theta, None)


def test_one_base_cannot_replace_a_base_for_each_layer_type():
    config = LlamaConfig(**SMALL)
    config.rope_parameters = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    with pytest.raises(ValueError, match="(?s)rope_theta.*full_attention"):
        set_rope_theta(config, 1e6, None)


def test_a_config_loads_from_its_folder(tmp_path):
    LlamaConfig(**SMALL).save_pretrained(tmp_path / "model")
    assert load_config(str(tmp_path / "model")).to_dict() == AutoConfig.from_pretrained(tmp_path / "model").to_dict()


@pytest.mark.parametrize(
    "content, reason",
    [
        (None, "holds no config.json"),
        ("{", "not a valid JSON file"),
        ("\0", "not a valid JSON file"),
        ("3", "has no config that loads"),
        ("[]", "Unrecognized model"),
        ('{"model_type": "no-such-type"}', "no-such-type"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "Validation error for field 'hidden_size': .*expected int"),
        ('{"model_type": "llama", "num_attention_heads": 0}', "has no config that loads"),
        ('{"model_type": "llama", "dtype": "wide"}', "has no config that loads"),
    ],
)
def test_a_config_that_does_not_load_is_one_line_with_the_reason(tmp_path, content, reason):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=f"^--model {tmp_path}.*{reason}.*$") as error:
        load_config(str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["/no/such/folder", "./absent", "a/b/c", __file__])
def test_what_can_only_be_a_folder_is_not_looked_up_on_the_hub(name):
    with pytest.raises(ValueError, match=f"--model {name}: no such folder; give a hub name"):
        load_config(name)


def problems(config, **changes) -> list[str]:
    where = {"mode": "ulysses_attn", "size": 2, "seq_length": 64, "kernel": "auto"}
    where |= {"device": torch.device("cpu"), "dtype": torch.float32}
    return list(model_problems("name", config, **(where | changes)))


def test_all_that_a_model_cannot_do_is_listed_and_the_config_left_alone():
    config = MistralConfig(
        **{**SMALL, "num_attention_heads": 3, "num_key_value_heads": 3}, head_dim=16, sliding_window=32
    )
    config.rope_parameters["rope_type"] = "dynamic"
    before = config.to_dict()
    heads, rope, kernel = problems(config, kernel="cudnn")
    assert heads.startswith("--parallel_mode ulysses_attn cannot split 3 query heads")
    assert rope.startswith("--model name: rope_type 'dynamic' looks at the longest position")
    assert kernel.startswith("--attn-kernel cudnn cannot be used here")
    assert config.to_dict() == before
    assert problems(config) == [heads, rope]
    config.rope_parameters["rope_type"] = "default"
    assert problems(config, size=3) == []


def test_a_window_is_refused_where_a_library_computes_attention():
    config = MistralConfig(**SMALL, sliding_window=32)
    assert problems(config, engine="library", device=None, seq_length=32) == []
    (window,) = problems(config, engine="library", device=None, seq_length=33)
    assert "sliding_window=32" in window and "--attn-engine easy_context" in window


def test_another_family_is_the_only_problem_named():
    """Its config may lack what the other checks read."""
    assert [problem.partition(" is not")[0] for problem in problems(AutoConfig.for_model("gpt2"))] == [
        "--model name: model type 'gpt2'"
    ]
