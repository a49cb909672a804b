"""LoRA and --train-only: gradients in every mode against peft on one process, what is saved, and real runs."""

import json
from pathlib import Path

import pytest
import torch
from family_models import FAMILIES, family_model, patched, plain_step, random_rows, sharded_step
from forked_runs import ZERO_3_OFFLOAD, ForkedRun
from launching import read_metrics
from tiny_models import VOCABULARY, save_tiny_llama, tiny_llama

from easy_context import apply_fused_loss
from easy_context.memory.plan import parse_memory_plan
from easy_context.memory.recompute import apply_memory_plan
from easy_context.model.adapters import (
    adapter_problems,
    add_adapters,
    merged,
    save_adapter,
    trained_parameters,
    trained_share,
)
from easy_context.modes import MODES
from easy_context.training.arguments import parse_arguments
from easy_context.training.checkpoints.settings import differences
from easy_context.training.flops import count_parameters, count_trained, flops_per_token

LAYERS = 3
WAYS = {
    "attention": ["--lora-r", "3"],
    "all-linear": ["--lora-r", "3", "--lora-targets", "all-linear", "--train-norms", "--train-embeddings"],
    "only the last MLP": ["--train-only", r"layers\.2\.mlp"],
}
PLANS = ("all", "input@cpu+attention", "input+attention+projections", "1*input,2*nothing")
TOLERANCE = 1e-5  # of the largest gradient


def adapted(family: str = "llama", *flags: str, **settings):
    """A model with what the flags add; LoRA's second matrices, which begin at 0, are random."""
    model = add_adapters(family_model(family, "sdpa", layers=LAYERS, **settings), parse_arguments(list(flags)))
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def assert_close(actual: dict, expected: dict, case: str) -> None:
    assert actual.keys() == expected.keys(), case
    for name, gradient in expected.items():
        scale = gradient.abs().max().clamp(min=1e-3)
        assert (actual[name] - gradient).abs().max() <= TOLERANCE * scale, f"{name}: {case}"


def compare_with_one_process(rank: int, world_size: int, mode: str, family: str, tied: bool) -> None:
    settings = {"heads": 8 if world_size == 4 else 4, "tie_word_embeddings": tied}
    for way, flags in WAYS.items():
        plain = adapted(family, *flags, **settings)
        with patched(mode, family, attn_kernel="cpu") as mesh:
            rows = random_rows(2 * mesh.data_size, 45)
            model = apply_fused_loss(adapted(family, *flags, **settings))
            results = []
            for plan, tile in [*((plan, 0) for plan in PLANS), ("input+attention", 7)]:
                apply_memory_plan(model, parse_memory_plan(plan, LAYERS), mlp_tile_size=tile)
                results.append((f"{way}, {plan}, tile {tile}", sharded_step(mode, mesh, model, *rows, fused=True)))
        expected = plain_step(plain, *rows)
        trained = {name for name, p in plain.named_parameters() if p.requires_grad}
        assert expected.gradients.keys() == trained
        assert all(gradient.any() for gradient in expected.gradients.values()), way
        for case, result in results:
            case = f"{case}: {mode}, {family}, W={world_size}"
            assert result.loss == pytest.approx(expected.loss, rel=TOLERANCE), case
            assert_close(result.gradients, expected.gradients, case)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_are_those_of_one_process(pool, mode, world_size):
    pool.run(compare_with_one_process, world_size, mode, "llama", False)


def test_gradients_on_four_processes_with_tied_embeddings(pool):
    pool.run(compare_with_one_process, 4, "zigzag_ring_attn", "llama", True)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "llama"])
def test_gradients_of_other_families(pool, family):
    pool.run(compare_with_one_process, 1, "data_parallel", family, False)


def test_kept_projections_are_one_tensor_for_each_linear_layer():
    """What LoRA adds is thin to compute again: its products are not kept beside those of the base."""
    from easy_context.memory import projections

    lengths = []
    with patched("data_parallel", attn_kernel="cpu") as mesh:
        model = apply_fused_loss(adapted("llama", *WAYS["all-linear"]))
        apply_memory_plan(model, parse_memory_plan("input+attention+projections", LAYERS))
        known = projections._known_output
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(projections, "_known_output", lambda *given: lengths.append(1) or known(*given))
            sharded_step("data_parallel", mesh, model, *random_rows(1, 20), fused=True)
    assert len(lengths) == LAYERS * 7  # q, k, v, o, gate and up, and down, which is not computed


@pytest.fixture
def model_folder(tmp_path, request) -> str:
    folder = tmp_path / "model"
    tiny_llama(tie_word_embeddings=getattr(request, "param", False)).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("model_folder", [False, True], indirect=True, ids=["untied", "tied"])
@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--train-embeddings", "--train-norms"],
        ["--lora-targets", "all-linear", "--lora-alpha", "2.5"],
        ["--lora-targets", r".*\.[01]\..*(v_proj|down_proj)"],
    ],
    ids=["attention", "embeddings and norms", "all-linear", "expression"],
)
def test_peft_loads_what_is_saved_and_a_merged_model_gives_the_same_logits(tmp_path, model_folder, flags):
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model_folder)
    config.rope_parameters["rope_theta"] = 12345.0
    model = AutoModelForCausalLM.from_pretrained(model_folder, config=config)
    model = add_adapters(model, parse_arguments(["--model", model_folder, "--lora-r", "2", *flags]))
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.arange(20)[None]
    expected = model(ids).logits
    save_adapter(model, tmp_path / "adapter", model.state_dict())
    merged(model, model.state_dict()).save_pretrained(tmp_path / "merged")

    own_config = AutoConfig.from_pretrained(tmp_path / "adapter")
    assert own_config.rope_parameters["rope_theta"] == 12345.0
    base = AutoModelForCausalLM.from_pretrained(model_folder, config=own_config)
    torch.testing.assert_close(PeftModel.from_pretrained(base, tmp_path / "adapter")(ids).logits, expected)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert plain.config.rope_parameters["rope_theta"] == 12345.0
    torch.testing.assert_close(plain(ids).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--lora-alpha", "8"], "--lora-alpha 8.0 without --lora-r"),
        (["--train-norms", "--merge"], "--train-norms, --merge without --lora-r"),
        (["--lora-targets", "q_proj", "v_proj"], "--lora-targets q_proj v_proj without --lora-r"),
        (["--lora-r", "4", "--train-only", "mlp"], "--train-only mlp and --lora-r 4 exclude each other"),
        (["--train-only", "["], "--train-only [ is no regular expression"),
        (["--train-only", "self_atn"], "--train-only self_atn is found in no parameter's name"),
        (["--lora-r", "4", "--lora-targets", "("], "--lora-targets ( is no regular expression"),
        (["--lora-r", "4", "--lora-targets", "q_proj", "w_proj"], "--lora-targets w_proj fits no layer"),
        (["--lora-r", "4", "--lora-targets", "q_pro.*"], "--lora-targets q_pro.* fits no layer"),
        (["--lora-r", "4", "--lora-targets", "lm_head"], "takes in lm_head"),
        (["--lora-r", "4", "--lora-targets", ".*"], "--lora-targets .* takes in lm_head"),
        (["--lora-r", "4", "--lora-targets", "embed_tokens"], "takes in model.embed_tokens"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_the_config_alone(flags, words):
    (problem,) = adapter_problems(parse_arguments(flags), tiny_llama().config)
    assert words in problem and len(problem.splitlines()) == 1


@pytest.mark.parametrize("flags", [[], *WAYS.values()])
def test_what_can_be_trained_is_not_refused(flags):
    assert adapter_problems(parse_arguments(flags), family_model("llama", layers=LAYERS).config) == []


@pytest.mark.parametrize("flags", WAYS.values(), ids=WAYS)
def test_frozen_weights_have_no_gradients_to_count(flags):
    """Against the operators of a forward and backward pass, whose attention computes the masked half as well."""
    from torch.utils.flop_counter import FlopCounterMode

    length = 64
    flags = [flag.replace("layers", "").replace(r"\.2\.", "") for flag in flags]  # in every layer, see the docstring
    model = add_adapters(tiny_llama(attn_implementation="eager"), parse_arguments(flags))
    config, ids = model.config, torch.randint(0, VOCABULARY, (1, length))
    model.get_input_embeddings().register_forward_hook(lambda _, __, out: out.requires_grad_())
    with FlopCounterMode(display=False) as counter:
        model(ids, labels=ids).loss.backward()
    masked_half = 6 * config.num_hidden_layers * config.hidden_size * length
    expected = counter.get_total_flops() / length - masked_half
    got = flops_per_token(config, count_parameters(model), length, count_trained(model, config))
    assert got == pytest.approx(expected, rel=0.01)


def test_the_share_of_trained_parameters_needs_no_weights():
    model = family_model("llama", layers=LAYERS)
    args = parse_arguments(WAYS["only the last MLP"])
    in_mlp, in_all = (sum(p.numel() for p in part.parameters()) for part in (model.model.layers[2].mlp, model))
    assert trained_share(args, model.config) == pytest.approx(in_mlp / in_all, rel=1e-9)
    assert trained_share(parse_arguments([]), model.config) == 1.0


# --- Runs of train.py. ---

LORA = ["--lora-r", "4", "--lora-targets", "all-linear", "--train-norms", "--train-embeddings"]
STEPS = 4
RUNS = {
    "one": (1, {}, ["--gradient-accumulate-every", "2"]),
    "ddp": (2, {}, ["--gradient-accumulate-every", "2"]),
    "zero3": (
        2,
        ZERO_3_OFFLOAD,
        ["--gradient-accumulate-every", "2", "--memory-plan", "input+attention,projections"],
    ),
}


@pytest.fixture(scope="module")
def assets(tmp_path_factory) -> Path:
    import datasets

    folder = tmp_path_factory.mktemp("adapters")
    save_tiny_llama(folder / "model")
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, VOCABULARY, (6, 40), generator=generator)
    datasets.Dataset.from_dict({"input_ids": rows.tolist()}).save_to_disk(folder / "rows")
    return folder


@pytest.fixture(scope="module")
def train(assets):
    """`train(launch, name, *flags)`: the output folder of a run, which has ended well."""

    def run(launch: str, name: str, *flags: str) -> Path:
        processes, variables, own = RUNS[launch]
        words = [
            *("--model", str(assets / "model"), "--dataset", str(assets / "rows"), "--seq-length", "40"),
            *("--rope-theta", "50000", "--mixed-precision", "no", "--learning-rate", "1e-2", "--weight-decay", "0.1"),
            *("--max-train-steps", str(STEPS), "--output-dir", str(assets / name), *own, *flags),
        ]
        forked = ForkedRun(assets / f"{name}.log", processes, words, **variables)
        assert forked.wait(300) == [0] * processes, forked.said()[-6000:]
        return assets / name

    return run


def logits_of_adapter(folder: Path, base: Path) -> torch.Tensor:
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    assert config.rope_parameters["rope_theta"] == 50000.0
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, config=config), folder)
    return model(torch.arange(30)[None]).logits


@pytest.mark.launch
@pytest.mark.parametrize("launch", [pytest.param("ddp", marks=pytest.mark.slow), "zero3"])
def test_runs_train_alike_save_an_adapter_or_a_plain_model_and_resume(train, assets, launch):
    from transformers import AutoModelForCausalLM

    one = train("one", f"one-for-{launch}", *LORA)
    whole = train(launch, launch, *LORA, "--save-every", "2")
    expected, got = read_metrics(one), read_metrics(whole)
    for key in ("loss", "grad_norm"):
        assert [r[key] for r in got] == pytest.approx([r[key] for r in expected], rel=1e-4), key
    assert expected[0]["loss"] != pytest.approx(expected[-1]["loss"], rel=1e-3)
    logits = logits_of_adapter(whole, assets / "model")
    torch.testing.assert_close(logits, logits_of_adapter(one, assets / "model"), rtol=1e-2, atol=1e-2)

    checkpoint = whole / "checkpoint-2"
    saved = sum(file.stat().st_size for file in checkpoint.glob("rank-*.pt"))
    trained = 12 * trained_parameters(add_adapters(tiny_llama(), parse_arguments(LORA)))[0]  # weights and two moments
    assert trained < saved < trained + 100_000 * len(list(checkpoint.glob("rank-*.pt")))
    again = train(launch, f"{launch}-again", *LORA, "--resume", str(checkpoint), "--merge")
    assert [r["loss"] for r in read_metrics(again)] == [r["loss"] for r in got[2:]]
    assert not (again / "adapter_config.json").exists()
    plain = AutoModelForCausalLM.from_pretrained(again)
    assert plain.config.rope_parameters["rope_theta"] == 50000.0
    torch.testing.assert_close(plain(torch.arange(30)[None]).logits, logits, rtol=1e-4, atol=1e-4)

    manifest = json.loads((checkpoint / "manifest.json").read_text())
    assert manifest["settings"]["lora"] == [4, 8.0, ["all-linear"], True, True]
    assert differences({"lora": None}, {"lora": [4]}) and not differences({}, {"lora": None, "train_only": None})
