"""Liger's layers: when they can be used, what they would drop, and which of them are asked for. No CUDA is needed."""

import logging
import sys
from types import ModuleType

import pytest
import torch
from family_models import family_config

from easy_context.model.liger import apply_liger, choose_liger, liger_refusal, liger_unavailable


@pytest.fixture
def stand_in(monkeypatch):
    """A CUDA device and a liger-kernel that notes what it is asked for, as (model type, options)."""
    asked = []
    package, layers = ModuleType("liger_kernel"), ModuleType("liger_kernel.transformers")
    patches = ModuleType("liger_kernel.transformers.monkey_patch")
    patches.MODEL_TYPE_TO_APPLY_LIGER_FN = {
        name: lambda _name=name, **options: asked.append((_name, options)) for name in ("llama", "qwen2", "gemma")
    }
    for module in (package, layers, patches):
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    liger_unavailable.cache_clear()
    yield asked
    liger_unavailable.cache_clear()


def test_without_cuda_or_the_package_the_reason_is_given(monkeypatch):
    liger_unavailable.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert liger_unavailable() == "there is no CUDA device"
    with pytest.raises(ValueError, match="Liger's layers cannot be used: there is no CUDA device"):
        apply_liger(family_config("llama"))
    liger_unavailable.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)  # Python's way to say that a package is not there
    assert "pip install liger-kernel" in liger_unavailable()
    liger_unavailable.cache_clear()


def test_the_layers_but_not_the_loss_are_asked_for(stand_in):
    assert liger_unavailable() is None
    assert logging.getLogger("liger_kernel").level == logging.ERROR
    apply_liger(family_config("qwen2"))
    layers, losses = ("rope", "rms_norm", "swiglu"), ("cross_entropy", "fused_linear_cross_entropy")
    assert stand_in == [("qwen2", dict.fromkeys(layers, True) | dict.fromkeys(losses, False))]


def test_what_liger_would_drop_is_refused(stand_in):
    assert liger_refusal(family_config("llama")) is None
    assert liger_refusal(family_config("llama", hidden_act="swish")) is None
    cases = ({"mlp_bias": True}, "mlp_bias=True"), ({"hidden_act": "gelu"}, "hidden_act='gelu'")
    for settings, words in cases:
        config = family_config("llama", **settings)
        assert words in liger_refusal(config)
        with pytest.raises(ValueError, match=words):
            apply_liger(config)
    config = family_config("llama")
    config.model_type = "gemma"  # Liger has it; this package is not tested with it
    with pytest.raises(ValueError, match="'gemma' is not supported"):
        apply_liger(config)
    assert stand_in == []


def test_liger_is_chosen_where_it_can_be_used_unless_asked_otherwise(stand_in, monkeypatch):
    plain, biased = family_config("llama"), family_config("llama", mlp_bias=True)
    assert [choose_liger(requested, plain) for requested in (None, True, False)] == [True, True, False]
    assert [choose_liger(requested, biased) for requested in (None, False)] == [False, False]
    with pytest.raises(ValueError, match="--liger: .*mlp_bias=True; use --no-liger"):
        choose_liger(True, biased)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    liger_unavailable.cache_clear()
    assert [choose_liger(requested, plain) for requested in (None, False)] == [False, False]
    with pytest.raises(ValueError, match="--liger: there is no CUDA device; use --no-liger"):
        choose_liger(True, plain)
