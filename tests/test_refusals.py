"""What sequence-parallel attention cannot honour is refused with a message that names it, never dropped silently."""

import pytest
import torch
from family_models import family_model, patched, random_rows

import easy_context
from easy_context.modes import MODES

LENGTH = 24


def run_forward(model, **inputs):
    ids, _ = random_rows(2, LENGTH)
    return model(ids, **{"use_cache": False, **inputs})


def test_an_unknown_family_is_named_with_the_supported_ones():
    with pytest.raises(ValueError, match="(?s)gemma2.*llama.*mistral.*qwen2.*qwen3"):
        easy_context.apply_seq_parallel_monkey_patch("zigzag_ring_attn", "gemma2")


def test_an_unknown_mode_is_named_with_the_valid_ones():
    for call in (
        lambda: easy_context.apply_seq_parallel_monkey_patch("zigzag"),
        lambda: easy_context.prepare_seq_parallel_inputs("zigzag", torch.zeros(1, 4), None, None, 0, 1, "cpu"),
    ):
        with pytest.raises(ValueError, match="(?s)'zigzag'.*zigzag_ring_attn.*ulysses_attn"):
            call()


def test_an_unknown_kernel_is_named_with_the_valid_ones():
    with pytest.raises(ValueError, match="(?s)flash_attn_9.*cudnn.*reference"):
        easy_context.apply_seq_parallel_monkey_patch("zigzag_ring_attn", attn_kernel="flash_attn_9")


def test_a_kernel_that_cannot_serve_says_why():
    model = family_model("llama")
    with patched("zigzag_ring_attn", attn_kernel="cudnn"), pytest.raises(ValueError, match="(?s)cudnn.*CUDA"):
        run_forward(model)


def test_a_group_size_with_data_parallel_is_refused():
    with pytest.raises(ValueError, match="(?s)--sequence-parallel-size 2.*data_parallel"):
        easy_context.apply_seq_parallel_monkey_patch("data_parallel", sequence_parallel_size=2)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_a_sliding_window_shorter_than_the_row_is_refused(family):
    settings = {} if family == "mistral" else {"use_sliding_window": True, "max_window_layers": 1}
    short = family_model(family, sliding_window=LENGTH - 1, **settings)
    exact = family_model(family, sliding_window=LENGTH, **settings)
    with patched("zigzag_ring_attn", family):
        with pytest.raises(ValueError, match=f"sliding_window={LENGTH - 1}.*{LENGTH} tokens"):
            run_forward(short)
        run_forward(exact)


def test_a_sliding_window_that_is_switched_off_is_no_obstacle():
    model = family_model("qwen2", sliding_window=4, use_sliding_window=False)
    with patched("zigzag_ring_attn", "qwen2"):
        run_forward(model)


def test_a_soft_cap_is_refused():
    with patched("zigzag_ring_attn"), pytest.raises(ValueError, match="softcap=30"):
        run_forward(family_model("llama"), softcap=30.0)


def test_attention_dropout_is_refused_in_training_only():
    model = family_model("llama", attention_dropout=0.1)
    with patched("zigzag_ring_attn"):
        with pytest.raises(ValueError, match="attention dropout 0.1"):
            run_forward(model.train())
        run_forward(model.eval())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_padding_mask_is_refused_and_one_that_hides_nothing_is_not(mode, implementation):
    model = family_model("llama", implementation)
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    with patched(mode):
        expected = run_forward(model).logits
        assert torch.equal(run_forward(model, attention_mask=mask).logits, expected)
        assert torch.equal(run_forward(model, attention_mask=mask.bool()).logits, expected)
        mask[1, -3:] = 0
        for hiding in (mask, mask.bool(), mask.float(), torch.ones(2, 1, LENGTH, LENGTH).tril()):
            with pytest.raises(ValueError, match="attention_mask"):
                run_forward(model, attention_mask=hiding)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")  # its new name is unknown to older transformers
def test_decoding_with_a_cache_is_refused():
    """Each rank would cache only its shard. The first forward fills an empty cache, which does no harm."""
    model = family_model("llama").eval()
    ids, _ = random_rows(1, 8)
    with patched("zigzag_ring_attn"), torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        with pytest.raises(ValueError, match="(?s)cache.*8 tokens"):
            model(ids[:, :1], past_key_values=cache, use_cache=True)
        with pytest.raises(ValueError, match="cache"):
            model.generate(ids, max_new_tokens=2, do_sample=False)
    model.generate(ids, max_new_tokens=2, do_sample=False)


def test_packed_documents_are_refused():
    """Restarting positions mean documents that must not see each other, which nothing here would enforce."""
    positions = torch.cat([torch.arange(10), torch.arange(LENGTH - 10)]).expand(2, -1)
    with patched("data_parallel"), pytest.raises(ValueError, match="position_ids"):
        run_forward(family_model("llama"), position_ids=positions)


def test_positions_may_start_anywhere_on_one_process():
    with patched("data_parallel"):
        run_forward(family_model("llama"), position_ids=torch.arange(LENGTH)[None] + 7)


@pytest.mark.parametrize("mode", MODES)
def test_shards_of_other_rows_are_refused(mode):
    ids = torch.zeros(2, 8, dtype=torch.int64)
    positions = torch.arange(8)[None]
    with pytest.raises(ValueError, match="rank 2"):
        easy_context.prepare_seq_parallel_inputs(mode, ids, positions, None, 2, 2, "cpu")
    with pytest.raises(ValueError, match="(?s)target_ids has 7 columns.*8"):
        easy_context.prepare_seq_parallel_inputs(mode, ids, positions, ids[:, 1:], 0, 2, "cpu")
    with pytest.raises(ValueError, match="(?s)position_ids has 9 columns.*8"):
        easy_context.prepare_seq_parallel_inputs(mode, ids, torch.arange(9)[None], None, 0, 2, "cpu")


def message_of(call) -> str:
    """The text of the ValueError that `call` must raise."""
    with pytest.raises(ValueError) as error:
        call()
    return str(error.value)


def own_shard(mode: str, rank: int, world_size: int) -> dict[str, torch.Tensor]:
    ids, _ = random_rows(1, LENGTH)
    part = easy_context.prepare_seq_parallel_inputs(
        mode, ids, torch.arange(LENGTH)[None], None, rank, world_size, "cpu"
    )
    return {"input_ids": part["local_input_ids"], "position_ids": part["local_position_ids"], "use_cache": False}


def refused_shards(rank: int, world_size: int, mode: str) -> dict[str, str]:
    """Shards that do not belong to this rank and mode, each refused here and on every other rank."""
    messages = {}
    another_mode = "dist_flash_attn" if mode == "zigzag_ring_attn" else "zigzag_ring_attn"
    with patched(mode):
        model = family_model("llama")
        shard = own_shard(mode, rank, world_size)
        later = {**shard, "position_ids": shard["position_ids"] + 7}
        other_row = {**shard, "position_ids": shard["position_ids"] + (8 if rank else 1)}
        messages["a row that starts later"] = message_of(lambda: model(**later))
        messages["shards of different rows"] = message_of(lambda: model(**other_row))
        messages["another rank's shard"] = message_of(
            lambda: model(**own_shard(mode, world_size - 1 - rank, world_size))
        )
        messages["another mode's shard"] = message_of(lambda: model(**own_shard(another_mode, rank, world_size)))
        packed = {**shard, "position_ids": shard["position_ids"] % (shard["position_ids"].shape[1] - 1)}
        messages["packed documents"] = message_of(lambda: model(**packed))
        if rank > 0 or mode == "zigzag_ring_attn":  # rank 0's contiguous shard does count from 0
            messages["no positions"] = message_of(lambda: model(shard["input_ids"], use_cache=False))
        if mode == "zigzag_ring_attn":
            messages["odd shard"] = message_of(lambda: model(shard["input_ids"][:, 1:], use_cache=False))
    return messages


def refused_models(rank: int, world_size: int) -> dict[str, str]:
    """Models that work on one process and not on a shard."""
    messages = {}
    longrope = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 16}
    with patched("zigzag_ring_attn"):
        for rope_type, settings in {"dynamic": {}, "longrope": longrope}.items():
            rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 2.0, **settings}
            model = family_model("llama", rope_parameters=rope)
            messages[rope_type] = message_of(lambda: model(**own_shard("zigzag_ring_attn", rank, world_size)))  # noqa: B023
    with patched("zigzag_ring_attn", "mistral"):
        model = family_model("mistral", sliding_window=16)  # longer than a shard, shorter than the row
        messages["window"] = message_of(lambda: model(**own_shard("zigzag_ring_attn", rank, world_size)))
    with patched("ulysses_attn"):
        model = family_model("llama", heads=3, kv_heads=3)
        messages["heads"] = message_of(lambda: model(**own_shard("ulysses_attn", rank, world_size)))
        messages["group size"] = message_of(
            lambda: easy_context.apply_seq_parallel_monkey_patch("ulysses_attn", sequence_parallel_size=3)
        )
    return messages


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "data_parallel"])
def test_shards_that_are_not_this_ranks_are_refused_on_every_rank(pool, mode):
    """One rank that went on alone would wait in a collective for those that raised."""
    for rank, messages in enumerate(pool.run(refused_shards, 2, mode)):
        assert "prepare_seq_parallel_inputs" in messages.pop("odd shard", "prepare_seq_parallel_inputs")
        for case, message in messages.items():
            assert "position_ids" in message and mode in message, f"rank {rank}, {case}: {message}"


def test_models_that_only_one_process_can_run_are_refused_on_every_rank(pool):
    expected = {
        "dynamic": "rope_type 'dynamic'",
        "longrope": "rope_type 'longrope'",
        "window": "sliding_window=16 is shorter than the row of 24 tokens",
        "heads": "zigzag_ring_attn or dist_flash_attn",
        "group size": "--sequence-parallel-size 3",
    }
    for rank, messages in enumerate(pool.run(refused_models, 2)):
        assert messages.keys() == expected.keys()
        for case, text in expected.items():
            assert text in messages[case], f"rank {rank}, {case}: {messages[case]}"


def test_rope_that_looks_at_the_longest_position_works_on_one_process():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = family_model("llama", rope_parameters=rope, max_position_embeddings=16)
    expected = run_forward(model).logits
    with patched("zigzag_ring_attn"):
        torch.testing.assert_close(run_forward(model).logits, expected, rtol=1e-4, atol=1e-4)
