"""The public functions: splitting and gathering rows, patching and unpatching. (What is refused: test_refusals.py.)"""

import pytest
import torch
from family_models import FAMILIES, family_model, patched, random_rows
from tensor_sizes import LargestTensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

import easy_context
from easy_context.huggingface import modeling_module
from easy_context.loss import next_token_targets
from easy_context.mesh import Mesh
from easy_context.modes import MODES, build_mode
from easy_context.row_checks import checksum

WORLD_SIZES = (1, 2, 3, 4, 8)
SPLITTING_MODES = tuple(name for name in MODES if name != "data_parallel")


def split(mode: str, ids, positions, targets, world_size: int) -> list[dict]:
    return [
        easy_context.prepare_seq_parallel_inputs(mode, ids, positions, targets, rank, world_size, "cpu")
        for rank in range(world_size)
    ]


def joined(mode: str, parts: list[dict], key: str) -> torch.Tensor:
    return build_mode(mode, Mesh(sequence_size=len(parts))).unshard([part[key] for part in parts])


@pytest.mark.parametrize("mode", SPLITTING_MODES)
def test_split_pads_every_length_and_loses_no_target(mode):
    for world_size in WORLD_SIZES:
        for length in range(1, 41):
            ids = torch.randint(1, 1000, (2, length), generator=torch.Generator().manual_seed(length))
            positions = torch.arange(length).expand(2, -1) + 5
            parts = split(mode, ids, positions, next_token_targets(ids), world_size)
            whole = joined(mode, parts, "local_input_ids")
            assert torch.equal(whole[:, :length], ids)
            assert whole.shape[1] - length < build_mode(mode, Mesh(sequence_size=world_size)).multiple_of
            assert len({part["local_input_ids"].shape for part in parts}) == 1
            assert torch.equal(
                joined(mode, parts, "local_position_ids"), torch.arange(whole.shape[1]).expand(2, -1) + 5
            )
            targets = joined(mode, parts, "local_target_ids")
            assert torch.equal(targets[:, : length - 1], ids[:, 1:])
            assert (targets[:, length - 1 :] == -100).all()
            assert (targets != -100).sum() == 2 * (length - 1), f"W={world_size} {length=}"


@pytest.mark.parametrize("mode", MODES)
def test_split_without_targets_and_with_shared_positions(mode):
    ids, _ = random_rows(3, 23)
    parts = split(mode, ids, torch.arange(23)[None], None, 2)
    for part in parts:
        assert part["local_target_ids"] is None
        assert part["local_position_ids"].shape == (1, part["local_input_ids"].shape[1])


def test_data_parallel_splits_nothing():
    ids, targets = random_rows(2, 13)
    positions = torch.arange(13).expand(2, -1)
    for part in split("data_parallel", ids, positions, targets, 4):
        assert torch.equal(part["local_input_ids"], ids)
        assert torch.equal(part["local_position_ids"], positions)
        assert torch.equal(part["local_target_ids"], targets)


def test_the_split_is_a_copy_that_leaves_the_batch_alone():
    ids, targets = random_rows(1, 7)
    copies = ids.clone(), targets.clone()
    parts = split("zigzag_ring_attn", ids, torch.arange(7)[None], targets, 2)
    assert torch.equal(ids, copies[0]) and torch.equal(targets, copies[1])
    assert all(part["local_input_ids"].is_contiguous() for part in parts)


def gather_everything(rank: int, world_size: int, mode: str, size: int | None) -> None:
    """Split and gather give back a row of any length, along any dimension, in any dtype."""
    with patched(mode, sequence_parallel_size=size) as mesh:
        generator = torch.Generator().manual_seed(mesh.data_rank)  # each group gathers rows of its own
        for length in (1, 2, 7, 16, 33):
            ids = torch.randint(1, 1000, (2, length), generator=generator)
            part = easy_context.prepare_seq_parallel_inputs(
                mode, ids, torch.arange(length)[None], None, mesh.sequence_rank, mesh.sequence_size, "cpu"
            )
            local = part["local_input_ids"]
            assert torch.equal(easy_context.gather_seq_parallel_outputs(mode, local, length=length), ids)
            padded = easy_context.gather_seq_parallel_outputs(mode, local)
            assert padded.shape[1] == local.shape[1] * mesh.sequence_size and torch.equal(padded[:, :length], ids)
            for dtype in (torch.float32, torch.bfloat16):
                states = torch.stack([local, -local], dim=-1).to(dtype)  # [batch, shard, 2]
                expected = torch.stack([ids, -ids], dim=-1).to(dtype)
                gathered = easy_context.gather_seq_parallel_outputs(mode, states, dim=-2, length=length)
                assert gathered.dtype == dtype and torch.equal(gathered, expected)
                flat = states[0].t()  # [2, shard], not contiguous
                gathered = easy_context.gather_seq_parallel_outputs(mode, flat, dim=1, length=length)
                assert torch.equal(gathered, expected[0].t())
                gathered = easy_context.gather_seq_parallel_outputs(mode, states[0], dim=0, length=length)
                assert torch.equal(gathered, expected[0])


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_gather_is_the_inverse_of_split_on_every_rank(pool, world_size):
    for mode in MODES:
        pool.run(gather_everything, world_size, mode, None)


def test_gather_stays_inside_the_group(pool):
    for mode in SPLITTING_MODES:
        pool.run(gather_everything, 4, mode, 2)


def test_gather_without_a_patch_says_what_to_call():
    with pytest.raises(RuntimeError, match="apply_seq_parallel_monkey_patch"):
        easy_context.gather_seq_parallel_outputs("zigzag_ring_attn", torch.zeros(1, 4))


def state_of_transformers() -> dict:
    """Everything that a patch may touch."""
    state = {("registered", name): fn for name, fn in AttentionInterface._global_mapping.items()}
    state |= {("available", name): fn for name, fn in ALL_ATTENTION_FUNCTIONS.items()}
    for family in FAMILIES:
        module = modeling_module(family)
        state |= {(family, name): value for name, value in vars(module).items()}
        base = next(value for name, value in vars(module).items() if name == f"{family.title()}PreTrainedModel")
        state |= {(family, "base", name): value for name, value in vars(base).items()}
    return state


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_removing_the_patch_restores_transformers_exactly(mode, family):
    before = state_of_transformers()
    model = family_model(family, "sdpa")
    ids, _ = random_rows(2, 20)
    expected = model(ids).logits
    with patched(mode, family):
        assert {key for key, value in state_of_transformers().items() if before.get(key) is not value}
        untouched = [key for key in before if key[0] in FAMILIES and key[0] != family]
        assert all(state_of_transformers()[key] is before[key] for key in untouched)
        torch.testing.assert_close(model(ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)
    after = state_of_transformers()
    assert after.keys() == before.keys()
    assert all(after[key] is before[key] for key in before)
    assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize("mode", MODES)
def test_one_process_takes_rows_of_any_length(mode):
    """There the patched model is the plain model, and nothing asks for padding."""
    model = family_model("llama", "sdpa")
    for length in (1, 2, 19):
        ids, _ = random_rows(2, length)
        expected = model(ids).logits
        with patched(mode):
            torch.testing.assert_close(model(ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)


def test_a_function_that_was_registered_under_a_modes_name_comes_back(monkeypatch):
    def earlier(*args, **kwargs):
        raise NotImplementedError

    monkeypatch.setitem(AttentionInterface._global_mapping, "ulysses_attn", earlier)
    with patched("ulysses_attn"):
        assert ALL_ATTENTION_FUNCTIONS["ulysses_attn"] is not earlier
    assert ALL_ATTENTION_FUNCTIONS["ulysses_attn"] is earlier


def test_a_second_patch_replaces_the_first():
    before = state_of_transformers()
    easy_context.apply_seq_parallel_monkey_patch("zigzag_ring_attn", "llama")
    easy_context.apply_seq_parallel_monkey_patch("ulysses_attn", "mistral")
    assert modeling_module("llama").ALL_ATTENTION_FUNCTIONS is ALL_ATTENTION_FUNCTIONS
    assert "zigzag_ring_attn" not in ALL_ATTENTION_FUNCTIONS and "ulysses_attn" in ALL_ATTENTION_FUNCTIONS
    easy_context.remove_seq_parallel_monkey_patch()
    easy_context.remove_seq_parallel_monkey_patch()  # nothing left to do
    assert all(value is before[key] for key, value in state_of_transformers().items())


def test_a_refused_patch_leaves_the_applied_one_in_place():
    with patched("ulysses_attn", "llama"):
        applied = state_of_transformers()
        for arguments in (("no_such_mode", "llama"), ("zigzag_ring_attn", "gpt2")):
            with pytest.raises(ValueError):
                easy_context.apply_seq_parallel_monkey_patch(*arguments)
        with pytest.raises(ValueError):
            easy_context.apply_seq_parallel_monkey_patch("zigzag_ring_attn", attn_kernel="no_such_kernel")
        assert all(value is applied[key] for key, value in state_of_transformers().items())


def test_the_patch_returns_the_mesh():
    with patched("zigzag_ring_attn") as mesh:
        assert (mesh.sequence_group, mesh.sequence_rank, mesh.sequence_size) == (None, 0, 1)
        assert (mesh.data_rank, mesh.data_size) == (0, 1)


def test_no_mask_of_the_size_of_the_row_squared_is_built():
    length = 600
    ids, _ = random_rows(1, length)
    for implementation in ("eager", "sdpa"):
        model = family_model("llama", implementation, layers=1)
        with patched("zigzag_ring_attn", attn_kernel="cpu"), LargestTensor() as seen:
            model.model(ids, use_cache=False)
        assert 0 < seen.largest < length * length


def other_rows(rank: int, world_size: int, mode: str, case: str) -> tuple[str, bool]:
    """What a batch that differs on rank 1 says, and whether the next, right batch is split."""
    ids, targets = random_rows(2, 40)
    positions = torch.arange(40)[None]
    right = {"input_ids": ids, "position_ids": positions, "target_ids": targets}
    wrong = dict(right)
    if rank == 1:
        wrong |= {
            "token": {"input_ids": ids + (torch.arange(40) == 17)},
            "order of rows": {"input_ids": ids.flip(0), "target_ids": targets.flip(0)},
            "order of tokens": {"input_ids": ids.roll(1, dims=1)},
            "length": {name: tensor[:, :33] for name, tensor in right.items()},
            "batch": {"input_ids": ids[:1], "target_ids": targets[:1]},
            "target": {"target_ids": targets.index_fill(1, torch.tensor([39]), 1)},
            "no targets": {"target_ids": None},
            "positions": {"position_ids": positions + 1},
        }[case]
    with patched(mode) as mesh:
        place = mesh.sequence_rank, mesh.sequence_size, "cpu"
        with pytest.raises(ValueError) as error:
            easy_context.prepare_seq_parallel_inputs(mode, **wrong, **dict(zip(PLACE, place, strict=True)))
        unchecked = dict(zip(PLACE, place, strict=True)) | {"check_rows": False}
        easy_context.prepare_seq_parallel_inputs(mode, **wrong, **unchecked)
        part = easy_context.prepare_seq_parallel_inputs(mode, ids, positions, targets, *place)
        whole = easy_context.gather_seq_parallel_outputs(mode, part["local_input_ids"], length=40)
    return str(error.value), torch.equal(whole, ids)


PLACE = ("rank", "world_size", "device")
DIFFERENCES = {
    "token": "checksum of input_ids",
    "order of rows": "checksum of input_ids",
    "order of tokens": "checksum of input_ids",
    "length": "shape of input_ids (2, 40) on rank 0, 2, (2, 33) on rank 1",
    "batch": "shape of input_ids (2, 40) on rank 0, 2, (1, 40) on rank 1",
    "target": "checksum of target_ids",
    "no targets": "None on rank 1",
    "positions": "checksum of position_ids",
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_rows_that_differ_within_a_group_are_noticed_on_every_rank(pool, case):
    """They would be mixed into one, or end gloo with "Connection reset" where their lengths differ."""
    for mode in SPLITTING_MODES:
        answers = pool.run(other_rows, 3, mode, case)
        assert all(answer == answers[0] for answer in answers)
        message, next_is_right = answers[0]
        assert next_is_right and DIFFERENCES[case] in message and "prepare_dataloader" in message, message


def split_as_one_likes(rank: int, world_size: int) -> None:
    """No collective where the patch does not split so: one rank alone may do this, and rows may differ."""
    ids, _ = random_rows(1, 24, seed=rank)
    positions = torch.arange(24)[None]
    if rank == 0:
        split("zigzag_ring_attn", ids, positions, None, 8)  # nothing is applied
    for mode, size in (("zigzag_ring_attn", None), ("zigzag_ring_attn", 1), ("data_parallel", None)):
        with patched(mode, sequence_parallel_size=size) as mesh:
            if rank == 0:
                split("ulysses_attn", ids, positions, None, world_size)
                split("zigzag_ring_attn", ids, positions, None, 5)
            if mesh.sequence_size == 1:
                part = easy_context.prepare_seq_parallel_inputs(mode, ids, positions, None, 0, 1, "cpu")
                assert torch.equal(part["local_input_ids"], ids)
            else:
                easy_context.prepare_seq_parallel_inputs(mode, ids, positions, None, 1 - rank, 2, "cpu")


def test_other_splits_than_the_patchs_ask_no_other_rank(pool):
    pool.run(split_as_one_likes, 2)


def test_checksums_tell_rows_apart():
    generator = torch.Generator().manual_seed(0)
    for length in (1, 2, 1000, 40_000, 70_000):
        ids = torch.randint(0, 50_000, (2, length), generator=generator)
        seen = {checksum(ids)}
        for place in range(0, length, max(1, length // 50)):
            changed = ids.clone()
            changed[1, place] += 1
            seen.add(checksum(changed))
            if place:
                changed = ids.clone()
                changed[:, [0, place]] = ids[:, [place, 0]]
                seen.add(checksum(changed))
        places = len(range(0, length, max(1, length // 50)))
        assert len(seen) == 2 * places
        assert checksum(ids.to(torch.int32)) == checksum(ids.clone()) == checksum(ids.t().contiguous().t())


def test_gathering_for_another_mode_is_refused():
    with patched("ulysses_attn"), pytest.raises(ValueError, match="(?s)zigzag_ring_attn.*ulysses_attn is applied"):
        easy_context.gather_seq_parallel_outputs("zigzag_ring_attn", torch.zeros(1, 4))


def test_the_original_packages_names_do_what_they_did():
    ids, targets = random_rows(1, 16)
    positions = torch.arange(16)[None]
    for mode in SPLITTING_MODES:
        prepare = getattr(easy_context, f"prepare_{mode}_inputs")
        for rank in range(2):
            degrees = (1, 2) if mode == "usp_attn" else ()
            actual = prepare(ids, positions, targets, rank, 2, "cpu", *degrees)
            expected = easy_context.prepare_seq_parallel_inputs(mode, ids, positions, targets, rank, 2, "cpu", 1)
            assert actual.keys() == expected.keys()
            assert all(torch.equal(actual[name], expected[name]) for name in expected)
        for family in ("llama", "mistral") if mode == "zigzag_ring_attn" else ("llama",):
            before = modeling_module(family).ALL_ATTENTION_FUNCTIONS
            getattr(easy_context, f"apply_{mode}_monkey_patch_{family}")()
            assert modeling_module(family).ALL_ATTENTION_FUNCTIONS is not before and mode in ALL_ATTENTION_FUNCTIONS
            easy_context.remove_seq_parallel_monkey_patch()
    for mode in MODES:
        easy_context.prepare_seq_parallel_inputs(mode, ids, positions, targets, 0, 1, "cpu", ring_degree=1)


def run_as_the_original_did(rank: int, world_size: int, ring_degree: int) -> bool:
    """A patch that knows no degrees, and degrees that come with the rows: do the logits come out right?"""
    ids, targets = random_rows(2, 21)
    model = family_model("llama", "sdpa")
    expected = model(ids).logits
    easy_context.apply_usp_attn_monkey_patch_llama()
    try:
        for _ in range(2):
            place = rank, world_size, "cpu", ring_degree, world_size // ring_degree
            part = easy_context.prepare_usp_attn_inputs(ids, torch.arange(21)[None], targets, *place)
            logits = model(part["local_input_ids"], position_ids=part["local_position_ids"], use_cache=False).logits
            whole = easy_context.gather_seq_parallel_outputs("usp_attn", logits.detach(), length=21)
            torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-4)
    finally:
        easy_context.remove_seq_parallel_monkey_patch()
    return True


def test_the_originals_usp_takes_its_degrees_with_the_rows(pool):
    for ring_degree in (1, 2, 4):
        assert all(pool.run(run_as_the_original_did, 4, ring_degree))
    with pytest.raises(ValueError, match="ring_degree 2 x ulysses_degree 3 must be 4 ranks"):
        easy_context.prepare_usp_attn_inputs(None, None, None, 0, 4, "cpu", 2, 3)


def split_by_the_patch(rank: int, world_size: int) -> None:
    """Without a ring_degree the applied patch's counts; with another one the rows are split in another way."""
    ids, _ = random_rows(1, 24)
    args = ids, torch.arange(24)[None], None, rank, world_size, "cpu"
    with patched("usp_attn", ring_degree=2):
        given, as_patched, other = (
            easy_context.prepare_seq_parallel_inputs("usp_attn", *args, degree)["local_input_ids"]
            for degree in (2, None, 4)
        )
    assert torch.equal(given, as_patched)
    assert not torch.equal(given, other) or rank in (0, 3)


def test_rows_are_split_by_the_patchs_ring_degree(pool):
    pool.run(split_by_the_patch, 4)


def test_every_public_name_is_there():
    for name in easy_context.__all__:
        assert callable(getattr(easy_context, name)), name
    assert easy_context.__all__ == sorted(easy_context.__all__)
