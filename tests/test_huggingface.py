"""What is read from a model's config. (Rebinding: test_sequence_parallel.py. What is refused: test_refusals.py.)"""

from types import SimpleNamespace

import pytest
import torch
from family_models import patched

from easy_context.huggingface import (
    head_dim,
    layer_windows,
    modeling_module,
    refuse_layer_features,
    refuse_model_features,
)


def test_a_heads_width_is_the_configs_own_or_follows_from_the_hidden_size():
    assert head_dim(SimpleNamespace(hidden_size=64, num_attention_heads=4)) == 16
    assert head_dim(SimpleNamespace(hidden_size=64, num_attention_heads=4, head_dim=None)) == 16
    assert head_dim(SimpleNamespace(hidden_size=64, num_attention_heads=4, head_dim=32)) == 32


@pytest.mark.parametrize("option", ["softcap", "s_aux", "head_mask"])
def test_an_option_that_changes_attention_is_refused_and_its_neutral_value_is_not(option):
    layer = SimpleNamespace(is_causal=True)
    refuse_layer_features(layer, 0.0, {option: None, "is_causal": True, "position_ids": torch.zeros(1)})
    with pytest.raises(ValueError, match=f"{option}=0.5 of SimpleNamespace"):
        refuse_layer_features(layer, 0.0, {option: 0.5})


def test_a_layer_that_is_not_causal_is_refused():
    for layer, options in ((SimpleNamespace(is_causal=False), {}), (SimpleNamespace(), {"is_causal": False})):
        with pytest.raises(ValueError, match="SimpleNamespace"):
            refuse_layer_features(layer, 0.0, options)
    refuse_layer_features(SimpleNamespace(), 0.0, {})


def test_a_config_without_window_and_rope_settings_is_accepted():
    """Configs of older versions lack both."""
    refuse_model_features(SimpleNamespace(), 4)
    refuse_model_features(SimpleNamespace(rope_parameters=None, sliding_window=None), 4)
    refuse_model_features(SimpleNamespace(rope_parameters={"rope_type": "yarn"}), 4)
    refuse_model_features(SimpleNamespace(rope_parameters={"rope_type": "dynamic"}), 1)
    with pytest.raises(ValueError, match="'dynamic'.* 2 ranks"):
        refuse_model_features(SimpleNamespace(rope_parameters={"rope_type": "dynamic"}), 2)


def test_which_layers_have_a_window():
    """A config that names no layer types has its window in every layer."""
    assert layer_windows(SimpleNamespace(num_hidden_layers=2)) == [None, None]
    assert layer_windows(SimpleNamespace(num_hidden_layers=2, sliding_window=9)) == [9, 9]
    types = ["full_attention", "sliding_attention"]
    assert layer_windows(SimpleNamespace(num_hidden_layers=2, sliding_window=9, layer_types=types)) == [None, 9]


def test_keys_of_another_number_than_queries_are_refused_by_the_layer_itself():
    """A cache that the model's own mask builder never saw, as some generation loops pass it."""
    with patched("data_parallel"):
        attention = modeling_module("llama").ALL_ATTENTION_FUNCTIONS["sdpa"]
        q, k = torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 5, 8)
        with pytest.raises(ValueError, match="5 keys for 3 queries"):
            attention(SimpleNamespace(is_causal=True), q, k, k, None)
