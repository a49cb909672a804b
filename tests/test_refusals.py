"""What sequence-parallel attention cannot honour is refused with a message that names it, never dropped silently."""

import inspect

import pytest
import torch
import torch.distributed as dist
from family_models import family_config, family_model, patched, random_rows
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import LlamaModel

import easy_context
from easy_context.common.errors import name_flags
from easy_context.kernels import check_kernel
from easy_context.mesh import Mesh
from easy_context.modes import MODES, build_mode, find_mode
from easy_context.modes.ulysses_attn import check_query_heads

LENGTH = 24
CACHE = "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"


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
    with pytest.raises(ValueError, match="(?s)sequence_parallel_size 2.*data_parallel"):
        easy_context.apply_seq_parallel_monkey_patch("data_parallel", sequence_parallel_size=2)


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
    another_mode = "dist_flash_attn" if mode in ("zigzag_ring_attn", "usp_attn") else "zigzag_ring_attn"
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
        # Rank 0's contiguous shard does count from 0, and is refused with the others.
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


def wrong_on_one_rank(rank: int, world_size: int, mode: str, wrong_rank: int) -> dict[str, str]:
    """What each case says on this rank, where one rank alone does something wrong; right forwards follow each case."""
    messages, is_wrong = {}, rank == wrong_rank
    with patched(mode) as mesh:
        model = family_model("llama", attention_dropout=0.1).eval()
        shard = own_shard(mode, mesh.sequence_rank, mesh.sequence_size)
        ids, positions = shard["input_ids"], shard["position_ids"]
        expected = model(**shard).logits
        ones = torch.ones_like(ids)
        cache = DynamicCache(config=model.config)
        cache.update(torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 8), 0)
        cases = {
            "later positions": {"position_ids": positions + 3},
            "positions of another length": {"position_ids": positions[:, 1:]},
            "positions of no batch": {"position_ids": positions[0]},
            "padding mask": {"attention_mask": ones.index_fill(1, torch.tensor([0]), 0)},
            "cache": {CACHE: cache, "use_cache": True},
            "shorter shard": {"input_ids": ids[:, :-2], "position_ids": positions[:, :-2]},
            "other batch": {"input_ids": ids.expand(2, -1)},
            "other dtype": {"input_ids": None, "inputs_embeds": model.model.embed_tokens(ids).double()},
            "soft cap": {"softcap": 30.0},
        }
        for case, change in cases.items():
            messages[case] = message_of(lambda: model(**{**shard, **(change if is_wrong else {})}))  # noqa: B023
            assert torch.equal(model(**shard).logits, expected), case
        model.train(is_wrong)
        messages["dropout"] = message_of(lambda: model(**shard))
        messages["columns"] = message_of(
            lambda: easy_context.prepare_seq_parallel_inputs(
                mode, ids, positions[:, int(is_wrong) :], None, mesh.sequence_rank, mesh.sequence_size, "cpu"
            )
        )
        messages["gathered shape"] = message_of(
            lambda: easy_context.gather_seq_parallel_outputs(mode, ids[:, int(is_wrong) :])
        )
    return messages


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "data_parallel"])
def test_what_is_wrong_on_one_rank_is_refused_on_all_with_the_same_words(pool, mode):
    """The others would wait in a collective for the one that raised, or die of what it sends."""
    words = {
        "later positions": "position_ids are not rank",
        "positions of another length": "position_ids of shape (1, 11)",
        "positions of no batch": "position_ids of shape (12,)",
        "padding mask": "attention_mask",
        "cache": "key-value cache of 4 tokens",
        "shorter shard": "rank",
        "other batch": "different shards: batch size",
        "other dtype": "dtype torch.float",
        "soft cap": "softcap=30",
        "dropout": "attention dropout 0.1",
        "columns": "position_ids has 11 columns",
        "gathered shape": "gather different shards: shape (1, 1",
    }
    for wrong_rank in (0, 1):
        per_rank = pool.run(wrong_on_one_rank, 2, mode, wrong_rank)
        assert all(messages == per_rank[0] for messages in per_rank)
        assert per_rank[0].keys() == words.keys()
        for case, message in per_rank[0].items():
            assert words[case] in message and f"rank {wrong_rank}" in message, f"{case}: {message}"


def test_one_group_that_refuses_leaves_the_others_alone(pool):
    """Four ranks in two groups: rank 3 is wrong, so ranks 2 and 3 raise and ranks 0 and 1 get their result."""
    assert pool.run(wrong_in_the_second_group, 4) == ["right", "right", "rank 1", "rank 1"]


def wrong_in_the_second_group(rank: int, world_size: int) -> str:
    with patched("zigzag_ring_attn", sequence_parallel_size=2) as mesh:
        shard = own_shard("zigzag_ring_attn", mesh.sequence_rank, 2)
        shard["position_ids"] = shard["position_ids"] + int(rank == 3)
        try:
            family_model("llama")(**shard)
        except ValueError as error:
            return "rank 1" if "found on rank 1 of 2" in str(error) else str(error)
    return "right"


def collectives_of_checks(rank: int, world_size: int, checkpointed: str) -> list[int]:
    """All-reduces of a forward pass and of its backward pass."""
    counts, original = [0], dist.all_reduce

    def counting(*args, **options):
        counts[-1] += 1
        return original(*args, **options)

    with patched("zigzag_ring_attn") as mesh:
        model = family_model("llama", layers=3)
        shard = own_shard("zigzag_ring_attn", mesh.sequence_rank, mesh.sequence_size)
        if checkpointed == "ours":
            easy_context.apply_unsloth_offloaded_gradient_checkpoint_monkey_patch(keep_attention="none")
        if checkpointed != "no":
            model.gradient_checkpointing_enable()
        easy_context.remove_unsloth_offloaded_gradient_checkpoint_monkey_patch()
        dist.all_reduce = counting
        try:
            logits = model(**shard).logits
            counts.append(0)
            logits.sum().backward()
        finally:
            dist.all_reduce = original
    return counts


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
@pytest.mark.parametrize("checkpointed", ["no", "ours", "Hugging Face's"])
def test_checks_cost_two_small_collectives_a_forward_and_none_in_recomputed_layers(pool, checkpointed):
    assert pool.run(collectives_of_checks, 2, checkpointed) == [[2, 0], [2, 0]]
    assert pool.run(collectives_of_checks, 1, checkpointed) == [[0, 0]]


def losses_refused(rank: int, world_size: int, mode: str, fused: bool) -> str:
    """Hugging Face's `labels` on a shard, from a model loaded and prepared before the patch."""
    model = family_model("llama")
    if fused:
        easy_context.apply_fused_loss(model)
    with patched(mode) as mesh:
        shard = own_shard(mode, mesh.sequence_rank, mesh.sequence_size)
        return message_of(lambda: model(**shard, labels=shard["input_ids"]))


@pytest.mark.parametrize("fused", [False, True])
def test_labels_of_a_shard_are_refused(pool, fused):
    """They would be shifted inside of the shard, where the last token's target is lost."""
    for mode in MODES[:3]:
        for message in pool.run(losses_refused, 2, mode, fused):
            assert "labels=" in message and "shift_labels=" in message


def test_labels_of_whole_rows_are_not_refused(pool):
    model = family_model("llama")
    ids, _ = random_rows(2, LENGTH)
    expected = model(ids, labels=ids, use_cache=False).loss
    for mode in MODES:
        with patched(mode):
            torch.testing.assert_close(run_forward(model, labels=ids).loss, expected, rtol=1e-5, atol=0)
    pool.run(whole_rows_with_labels, 2)


def whole_rows_with_labels(rank: int, world_size: int) -> None:
    ids, _ = random_rows(2, LENGTH, seed=rank)
    model = family_model("llama")
    expected = model(ids, labels=ids, use_cache=False).loss
    for options in ({"mode": "data_parallel"}, {"mode": "zigzag_ring_attn", "sequence_parallel_size": 1}):
        with patched(**options):
            torch.testing.assert_close(model(ids, labels=ids, use_cache=False).loss, expected, rtol=1e-5, atol=0)


def test_models_that_only_one_process_can_run_are_refused_on_every_rank(pool):
    expected = {
        "dynamic": "rope_type 'dynamic'",
        "longrope": "rope_type 'longrope'",
        "heads": "zigzag_ring_attn or dist_flash_attn",
        "group size": "sequence_parallel_size 3",
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


def test_errors_name_arguments_and_scripts_put_their_flags_in_place():
    """A caller from Python has no flags; a user of the scripts has no arguments."""
    calls = {
        "seq_algo 'zigzag'": lambda: easy_context.apply_seq_parallel_monkey_patch("zigzag"),
        "attn_kernel 'fast'": lambda: easy_context.apply_seq_parallel_monkey_patch("data_parallel", attn_kernel="fast"),
        "attn_engine 'fast'": lambda: easy_context.apply_seq_parallel_monkey_patch("data_parallel", attn_engine="fast"),
        "attn_engine library": lambda: find_mode("data_parallel", "library"),
        "sequence_parallel_size 2": lambda: easy_context.apply_seq_parallel_monkey_patch(
            "data_parallel", sequence_parallel_size=2
        ),
        "attn_kernel cudnn": lambda: check_kernel("cudnn", torch.device("cpu"), torch.float32, 64),
        "seq_algo ulysses_attn": lambda: check_query_heads(3, 2),
        "seq_length 3": lambda: build_mode("zigzag_ring_attn", Mesh(sequence_size=2)).check(None, 3),
        "rope_theta 0": lambda: easy_context.set_rope_theta(family_config("llama"), 0, None),
        "keep_attention 'tape'": lambda: easy_context.apply_unsloth_offloaded_gradient_checkpoint_monkey_patch(
            keep_attention="tape"
        ),
    }
    for start, call in calls.items():
        message = message_of(call)
        assert message.startswith(start) and "--" not in message
        argument, value = start.split()
        flag = "--parallel_mode" if argument == "seq_algo" else f"--{argument.replace('_', '-')}"
        assert name_flags(message).startswith(f"{flag} {value}")
    assert name_flags("/data/seq_length/--seq-length my_seq_length") == "/data/seq_length/--seq-length my_seq_length"
