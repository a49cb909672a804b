"""Unmodified Hugging Face models, their rows spread over processes, against the same model on one with plain attention.

Logits, loss and every gradient agree within 1e-5 relative norm in float32.
"""

import copy
import dataclasses

import pytest
import torch
import torch.distributed as dist
from family_models import (
    FAMILIES,
    StepResult,
    assert_same_step,
    family_model,
    patched,
    plain_step,
    random_rows,
    sharded_step,
)
from plain_attention import relative_error

import easy_context
from easy_context.modes import MODES

TOLERANCE = 1e-5
SPLITTING_MODES = tuple(name for name in MODES if name != "data_parallel")
HEADS = {1: (4, 2), 2: (4, 2), 3: (6, 2), 4: (8, 2), 8: (8, 2)}  # ulysses repeats key heads at 3, 4 and 8 ranks
EQUAL_HEADS = {world_size: (heads, heads) for world_size, (heads, _) in HEADS.items()}


@dataclasses.dataclass(frozen=True)
class Setting:
    """One way to run a step; its text is the repro that a failing test prints."""

    mode: str
    family: str = "llama"
    heads: tuple[int, int] = (4, 2)
    length: int = 53  # pads in every mode that splits
    batch: int = 2
    attn_implementation: str = "sdpa"
    load_before_patch: bool = False
    sequence_parallel_size: int | None = None
    fused: bool = False
    last_valid: int | None = None
    config: tuple = ()

    def model(self, attn_implementation: str):
        heads, kv_heads = self.heads
        return family_model(self.family, attn_implementation, heads=heads, kv_heads=kv_heads, **dict(self.config))

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        ids, targets = random_rows(self.batch, self.length)
        if self.last_valid is not None:
            targets[:, self.last_valid :] = -100
        return ids, targets

    def expected(self) -> StepResult:
        return plain_step(self.model("eager"), *self.rows())


def run_setting(setting: Setting) -> StepResult:
    model = setting.model(setting.attn_implementation) if setting.load_before_patch else None
    with patched(
        setting.mode, setting.family, sequence_parallel_size=setting.sequence_parallel_size, attn_kernel="cpu"
    ) as mesh:
        model = model or setting.model(setting.attn_implementation)
        if setting.fused:
            easy_context.apply_fused_loss(model)
        return sharded_step(setting.mode, mesh, model, *setting.rows(), fused=setting.fused)


def run_settings(rank: int, world_size: int, settings: list[Setting]) -> list[StepResult] | None:
    results = [run_setting(setting) for setting in settings]
    return results if rank == 0 else None


def check_result(setting: Setting, actual: StepResult, expected: StepResult, world_size: int) -> None:
    assert_same_step(actual, expected, TOLERANCE, f"W={world_size} {setting}", logits=not setting.fused)


def check(pool, settings: list[Setting], world_size: int) -> None:
    """Runs all settings in one call of the pool."""
    results = pool.run(run_settings, world_size, settings, timeout=240)[0]
    for setting, actual in zip(settings, results, strict=True):
        check_result(setting, actual, setting.expected(), world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_every_mode_matches_the_plain_model(pool, world_size):
    settings = [Setting(mode, heads=HEADS[world_size]) for mode in SPLITTING_MODES]
    settings += [
        Setting(mode, heads=EQUAL_HEADS[world_size], length=64, batch=1, fused=True) for mode in SPLITTING_MODES
    ]
    settings += [Setting("data_parallel", batch=2 * world_size), Setting("data_parallel", batch=world_size, fused=True)]
    check(pool, settings, world_size)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "llama"])
def test_every_family_matches_the_plain_model(pool, family, world_size):
    check(pool, [Setting(mode, family, HEADS[world_size], batch=world_size) for mode in MODES], world_size)


@pytest.mark.parametrize("mode", MODES)
def test_a_layers_own_scaling_is_honoured(mode):
    """As Granite's attention multiplier or a config's query_pre_attn_scalar sets it."""
    model, (ids, targets) = family_model("llama"), random_rows(2, 30)
    usual = plain_step(model, ids, targets)
    for layer, scaling in zip(model.model.layers, (0.9, 0.05), strict=True):
        layer.self_attn.scaling = scaling
    expected = plain_step(model, ids, targets)
    assert relative_error(usual.logits, expected.logits) > 0.01
    with patched(mode) as mesh:
        actual = sharded_step(mode, mesh, model, ids, targets)
    assert relative_error(actual.logits, expected.logits) < TOLERANCE
    for name, gradient in expected.gradients.items():
        assert relative_error(actual.gradients[name], gradient) < TOLERANCE, name


def test_any_attn_implementation_loaded_before_or_after_the_patch(pool):
    """Under sdpa and eager Hugging Face would take zigzag's jumping positions for packed documents."""
    settings = [
        Setting(mode, family, attn_implementation=implementation, load_before_patch=before)
        for mode in ("zigzag_ring_attn", "ulysses_attn")
        for family in ("llama", "qwen3")
        for implementation in ("eager", "sdpa")
        for before in (False, True)
    ]
    check(pool, settings, 2)


@pytest.mark.parametrize("mode", MODES)
def test_a_model_loads_by_the_name_of_the_applied_mode_and_by_easy_context(mode):
    """transformers takes every name with "flash" for a FlashAttention package: there the second one must serve."""
    if "flash" in mode:
        with patched(mode), pytest.raises((ValueError, ImportError), match="(?i)flash"):
            family_model("llama", mode)
    for name in ("easy_context",) if "flash" in mode else ("easy_context", mode):
        setting = Setting(mode, attn_implementation=name)
        check_result(setting, run_setting(setting), setting.expected(), 1)


@pytest.mark.parametrize("mode", MODES)
def test_a_loaded_model_can_be_set_to_easy_context(mode):
    model = family_model("llama", "sdpa")
    with patched(mode):
        model.set_attn_implementation("easy_context")
        assert model.config._attn_implementation == "easy_context"


def test_a_shard_without_any_target(pool):
    """Targets only at the very front: all contiguous shards but the first, and some of zigzag's, have none."""
    settings = [
        Setting(mode, heads=(4, 4), last_valid=4, fused=fused) for mode in SPLITTING_MODES for fused in (False, True)
    ]
    check(pool, settings, 4)


def test_data_and_sequence_parallel_ranks_mix(pool):
    """Four rows: one process, dp4, dp2 x sp2 and sp4 give the same loss and gradients."""
    settings = [Setting("data_parallel", batch=4, fused=True)]
    for mode in SPLITTING_MODES:
        for size in (1, 2, 4):
            settings.append(Setting(mode, batch=4, sequence_parallel_size=size, fused=size == 2))
    check(pool, settings, 4)


def weights_after_three_steps(rank: int, world_size: int, mode: str, size: int | None):
    """Plain SGD shows a wrong gradient scale, which Adam would hide."""
    with patched(mode, sequence_parallel_size=size) as mesh:
        model = easy_context.apply_fused_loss(family_model("llama"))
        losses = train_three_steps(
            model, lambda ids, targets: sharded_step(mode, mesh, model, ids, targets, fused=True)
        )
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def train_three_steps(model, step) -> list[float]:
    losses = []
    for seed in range(3):
        result = step(*random_rows(4, 40, seed))
        losses.append(result.loss)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= 0.1 * result.gradients[name]
    return losses


def test_all_grids_reach_the_same_weights(pool):
    model = family_model("llama")
    expected = train_three_steps(model, lambda ids, targets: plain_step(model, ids, targets))
    for mode, size in (("data_parallel", None), ("zigzag_ring_attn", 2), ("dist_flash_attn", 4), ("ulysses_attn", 2)):
        for losses, weights in pool.run(weights_after_three_steps, 4, mode, size):
            assert losses == pytest.approx(expected, rel=1e-5), (mode, size)
            for name, parameter in model.named_parameters():
                assert relative_error(weights[name], parameter.detach()) < TOLERANCE, (mode, size, name)


@pytest.mark.parametrize("mode", MODES)
def test_without_torch_distributed_it_is_the_plain_model(mode):
    assert not dist.is_initialized()
    for family in ("llama", "mistral"):
        setting = Setting(mode, family, attn_implementation="eager")
        check_result(setting, run_setting(setting), setting.expected(), 1)


def test_rope_scaling_that_needs_no_global_length_is_kept(pool):
    """llama3, linear and yarn scaling depend on the config alone."""
    scalings = (
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
        {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 32},
    )
    settings = [
        Setting(mode, config=(("rope_parameters", scaling),)) for mode in SPLITTING_MODES for scaling in scalings
    ]
    check(pool, settings, 2)


def evaluate_as_documented(rank: int, world_size: int, mode: str, ids: torch.Tensor) -> torch.Tensor:
    """Token losses of whole rows, from a sharded forward pass without gradients."""
    from easy_context.loss import next_token_targets, token_losses

    with patched(mode) as mesh, torch.no_grad():
        model = family_model("llama").eval()
        positions, targets = torch.arange(ids.shape[1])[None], next_token_targets(ids)
        part = easy_context.prepare_seq_parallel_inputs(
            mode, ids, positions, targets, mesh.sequence_rank, mesh.sequence_size, "cpu"
        )
        inputs = {"input_ids": part["local_input_ids"], "position_ids": part["local_position_ids"]}
        hidden = model.model(**inputs, use_cache=False).last_hidden_state
        losses = token_losses(hidden, model.lm_head.weight, part["local_target_ids"])
        return easy_context.gather_seq_parallel_outputs(mode, losses, dim=1, length=ids.shape[1])


def test_a_sharded_evaluation_gives_the_loss_of_every_token(pool):
    ids, _ = random_rows(2, 41)
    with torch.no_grad():
        logits = family_model("llama").eval()(ids).logits
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    for mode in SPLITTING_MODES:
        for losses in pool.run(evaluate_as_documented, 2, mode, ids):
            assert losses.shape == ids.shape and (losses[:, -1] == 0).all()
            assert relative_error(losses[:, :-1].flatten(), expected) < TOLERANCE, mode


def step_with_late_process_group(rank: int, world_size: int, mode: str, size: int | None, folder: str):
    """The original README's order: the patch, the model, and only then the process group; twice."""
    dist.destroy_process_group()
    setting = Setting(mode, batch=4, fused=True, sequence_parallel_size=size)
    with patched(mode, sequence_parallel_size=size) as mesh:
        model = easy_context.apply_fused_loss(setting.model("sdpa"))
        results = []
        for number in range(2):
            dist.init_process_group("gloo", init_method=f"file://{folder}/{number}", rank=rank, world_size=world_size)
            results.append(sharded_step(mode, mesh, model, *setting.rows(), fused=True))
            dist.destroy_process_group()
    return results


@pytest.mark.parametrize("mode", MODES)
def test_the_patch_may_come_before_the_process_group(pool, mode, tmp_path):
    sizes = (None, 2) if mode in SPLITTING_MODES else (None,)
    for size in sizes:
        folder = tmp_path / str(size)
        folder.mkdir()
        setting = Setting(mode, batch=4, fused=True)
        for results in pool.run(step_with_late_process_group, 4, mode, size, str(folder)):
            for result in results:
                check_result(setting, result, setting.expected(), 4)


def steps_in_worlds_of_another_size(rank: int, world_size: int, mode: str, folder: str) -> list[StepResult]:
    """One patch and one model, in a group of all ranks, then of two, then alone."""
    setting = Setting(mode, fused=True)
    results = []
    with patched(mode) as mesh:
        model = easy_context.apply_fused_loss(setting.model("sdpa"))
        results.append(sharded_step(mode, mesh, model, *setting.rows(), fused=True))
        dist.destroy_process_group()
        if rank < 2:
            dist.init_process_group("gloo", init_method=f"file://{folder}/two", rank=rank, world_size=2)
            results.append(sharded_step(mode, mesh, model, *setting.rows(), fused=True))
            dist.destroy_process_group()
        results.append(sharded_step(mode, mesh, model, *setting.rows(), fused=True))
    return results


def test_a_process_group_of_another_size_is_followed(pool, tmp_path):
    setting = Setting("zigzag_ring_attn", fused=True)
    for results in pool.run(steps_in_worlds_of_another_size, 4, setting.mode, str(tmp_path)):
        for result in results:
            check_result(setting, result, setting.expected(), len(results))


def test_a_launched_process_that_forgot_the_process_group_is_refused(monkeypatch):
    """It would attend within its shard. The message says what to call."""
    model, (ids, _) = family_model("llama"), random_rows(1, 16)
    with patched("dist_flash_attn") as mesh:
        monkeypatch.setenv("WORLD_SIZE", "2")
        for call in (
            lambda: model(ids[:, :8], use_cache=False),
            lambda: mesh.sequence_rank,
            lambda: easy_context.prepare_seq_parallel_inputs(
                "dist_flash_attn", ids, torch.arange(16)[None], None, 1, 2, "cpu"
            ),
        ):
            with pytest.raises(RuntimeError, match="(?s)WORLD_SIZE=2.*init_process_group"):
                call()


def test_a_size_that_does_not_divide_the_launched_processes_is_refused_at_once(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="sequence_parallel_size 3.*4"):
        easy_context.apply_seq_parallel_monkey_patch("zigzag_ring_attn", sequence_parallel_size=3)


def step_without_a_count(rank: int, world_size: int, mode: str, fused: bool, last_valid: int | None) -> StepResult:
    setting = Setting(mode, last_valid=last_valid)
    ids, targets = setting.rows()
    with patched(mode) as mesh:
        model = setting.model("sdpa")
        if fused:
            easy_context.apply_fused_loss(model)
        return sharded_step(mode, mesh, model, ids, targets, fused=fused, counted=False)


@pytest.mark.parametrize("fused", [True, False])
def test_without_a_count_the_loss_is_the_mean_over_the_group(pool, fused):
    """Each rank used to divide by its own count; a rank without targets (last_valid=4) then changed all gradients."""
    for mode in SPLITTING_MODES:
        for last_valid in (None, 4, 0):
            setting = Setting(mode, last_valid=last_valid, fused=True)  # no logits to compare
            expected = plain_step(setting.model("eager"), *setting.rows()) if last_valid != 0 else None
            for result in pool.run(step_without_a_count, 2, mode, fused, last_valid):
                if expected is not None:
                    check_result(setting, result, expected, 2)
                else:
                    assert result.loss == 0 and all((gradient == 0).all() for gradient in result.gradients.values())


def test_a_copy_of_a_model_with_the_fused_loss_runs_on_its_own_weights():
    ids, targets = random_rows(2, 20)
    model = easy_context.apply_fused_loss(family_model("llama"))
    copied = copy.deepcopy(model)
    other = easy_context.apply_fused_loss(family_model("llama", seed=5))
    copied.load_state_dict(other.state_dict())
    assert torch.equal(copied(ids).logits, other(ids).logits)
    assert torch.equal(copied(ids, shift_labels=targets).loss, other(ids, shift_labels=targets).loss)
