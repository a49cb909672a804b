"""tools/: copies of a model with scaled rotary embeddings, and from a GGUF file."""

import importlib
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launching import REPOSITORY
from tiny_models import save_tiny_llama

sys.path.insert(0, str(REPOSITORY / "tools"))


@pytest.mark.parametrize("kind", ["llama3", "yarn", "linear"])
def test_scaled_rope_is_saved_and_leaves_fast_frequencies(tmp_path, kind):
    from tokenizer_styles import tokenizer_of_style
    from transformers import AutoModelForCausalLM

    scale_rope = importlib.import_module("scale_rope")
    model = save_tiny_llama(tmp_path / "model")
    tokenizer_of_style("bytes").save_pretrained(model)
    scale_rope.main([model, str(tmp_path / "out"), "--type", kind, "--factor", "16"])
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (model, tmp_path / "out"))
    ratio = before.model.rotary_emb.inv_freq / after.model.rotary_emb.inv_freq
    if kind != "linear":
        assert ratio[0] == pytest.approx(1.0)
    assert ratio.max() <= 16.001
    assert after.config.max_position_embeddings == 16 * before.config.max_position_embeddings
    for name, weight in before.state_dict().items():
        assert torch.equal(weight, after.state_dict()[name])
    with pytest.raises(ValueError, match="already, plain RoPE"):
        scale_rope.main([str(tmp_path / "out"), str(tmp_path / "again"), "--factor", "2"])
    for taken in (tmp_path / "out", Path(model)):
        with pytest.raises(ValueError, match="is there already: name another folder"):
            scale_rope.main([model, str(taken), "--factor", "2"])
    assert {path.name for path in tmp_path.iterdir()} == {"model", "out"}


@pytest.mark.parametrize("flags,scaling", [([], 0.1 * math.log(16) + 1), (["--attention-factor", "1"], 1.0)])
def test_attention_factor_of_yarn_holds_in_the_reloaded_model(tmp_path, flags, scaling):
    from tokenizer_styles import tokenizer_of_style
    from transformers import AutoModelForCausalLM

    model = save_tiny_llama(tmp_path / "model")
    tokenizer_of_style("bytes").save_pretrained(model)
    importlib.import_module("scale_rope").main(
        [model, str(tmp_path / "out"), "--type", "yarn", "--factor", "16", *flags]
    )
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert reloaded.model.rotary_emb.attention_scaling == pytest.approx(scaling)


def test_tools_check_their_arguments(tmp_path):
    scale_rope, convert = importlib.import_module("scale_rope"), importlib.import_module("convert_gguf")
    with pytest.raises(ValueError, match="--factor 1.0: must be above 1"):
        scale_rope.parse_arguments(["model", "out", "--factor", "1"])
    with pytest.raises(ValueError, match="--attention-factor 1.0: only --type yarn"):
        scale_rope.parse_arguments(["model", "out", "--type", "llama3", "--factor", "2", "--attention-factor", "1"])
    with pytest.raises(ValueError, match="--attention-factor 0.0: must be positive"):
        scale_rope.parse_arguments(["model", "out", "--type", "yarn", "--factor", "2", "--attention-factor", "0"])
    command = [sys.executable, "tools/scale_rope.py", "m", "o", "--factor", "0"]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 1 and result.stderr.startswith("scale_rope.py: --factor 0.0: must be above 1")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        convert.find_gguf(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"no \.gguf file"):
        convert.find_gguf(tmp_path)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    assert convert.find_gguf(tmp_path / "a.gguf") == tmp_path / "a.gguf"
    with pytest.raises(ValueError, match="holds 2 GGUF files"):
        convert.find_gguf(tmp_path)
