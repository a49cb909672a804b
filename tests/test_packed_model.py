"""Hugging Face models on rows of packed documents, against the same plain model on each document by itself."""

import contextlib
import dataclasses
import random
import re

import pytest
import torch
import torch.distributed as dist
from family_models import (
    CHECKPOINTING_SETTINGS,
    FAMILIES,
    StepResult,
    assert_same_step,
    checkpointing,
    family_model,
    gradients_of,
    patched,
    planned,
    random_rows,
)
from packed_rows import Starts, random_starts

import easy_context
from easy_context.kernels.documents import Documents
from easy_context.modes import MODES
from easy_context.packing import find_documents, restarting_positions, targets_within

TOLERANCE = 1e-5
HEADS = {1: (4, 2), 2: (4, 2), 3: (6, 2), 4: (8, 2), 8: (8, 2)}


@dataclasses.dataclass(frozen=True)
class PackedSetting:
    """One way to run a step over packed rows; its text is the repro that a failing test prints."""

    mode: str
    starts: Starts
    length: int
    heads: tuple[int, int] = (4, 2)
    family: str = "llama"
    restart_positions: bool = True
    checkpointed: tuple = ()  # settings of checkpointing; none if empty
    plan: str = ""  # a memory plan
    fused: bool = True

    def model(self):
        heads, kv_heads = self.heads
        return family_model(self.family, "eager", heads=heads, kv_heads=kv_heads)

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        return random_rows(len(self.starts), self.length)

    def expected(self) -> StepResult:
        """Forward and backward of the plain model, one document after the other."""
        model, (ids, targets) = self.model(), self.rows()
        logits, total = torch.zeros(*ids.shape, model.config.vocab_size), torch.zeros((), dtype=torch.int64)
        losses = []
        for row, places in enumerate(self.starts):
            for start, end in zip(places, [*places[1:], self.length], strict=True):
                own = targets[row, start:end].clone()
                own[-1] = -100  # the next document's first token
                part = model(ids[row : row + 1, start:end], use_cache=False).logits[0]
                losses.append(torch.nn.functional.cross_entropy(part, own, reduction="sum"))
                logits[row, start:end], total = part.detach(), total + (own != -100).sum()
        loss = sum(losses) / total
        loss.backward()
        return StepResult(loss.item(), gradients_of(model), logits)


def run_setting(setting: PackedSetting) -> StepResult:
    """The same step on shards, gradients summed over all ranks."""
    with contextlib.ExitStack() as stack:
        mesh = stack.enter_context(patched(setting.mode, setting.family, attn_kernel="cpu"))
        model, (ids, targets) = setting.model(), setting.rows()
        if setting.fused:
            easy_context.apply_fused_loss(model)
        if setting.checkpointed:
            stack.enter_context(checkpointing(model, **dict(setting.checkpointed)))
        if setting.plan:
            stack.enter_context(planned(model, setting.plan))
        rows = slice(mesh.data_rank * len(ids) // mesh.data_size, (mesh.data_rank + 1) * len(ids) // mesh.data_size)
        shard = easy_context.shard_batch(
            setting.mode,
            ids[rows],
            targets[rows],
            mesh,
            "cpu",
            documents=setting.starts[rows],
            restart_positions=setting.restart_positions,
        )
        num_targets = (shard["shift_labels"] != -100).sum()
        if dist.is_initialized():
            dist.all_reduce(num_targets)
        labels = {} if setting.fused else {"labels": shard["shift_labels"]}
        output = model(**shard, **labels, num_items_in_batch=num_targets, use_cache=False)
        output.loss.backward()
        loss, gradients, logits = output.loss.detach().double(), gradients_of(model), output.logits
        if dist.is_initialized():
            for tensor in (loss, *gradients.values()):
                dist.all_reduce(tensor)
        if logits is not None:
            logits = easy_context.gather_seq_parallel_outputs(setting.mode, logits.detach(), length=setting.length)
        return StepResult(loss.item(), gradients, logits)


def run_settings(rank: int, world_size: int, settings: list[PackedSetting]) -> list[StepResult] | None:
    results = [run_setting(setting) for setting in settings]
    return results if rank == 0 else None


def check(pool, settings: list[PackedSetting], world_size: int) -> None:
    results = pool.run(run_settings, world_size, settings, timeout=240)[0]
    for setting, actual in zip(settings, results, strict=True):
        case = f"W={world_size} {setting}"
        assert_same_step(actual, setting.expected(), TOLERANCE, case, logits=not setting.fused)


def starts_of(seed: int, batch: int, length: int, edges: int) -> Starts:
    return random_starts(random.Random(seed), batch, length, edges)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_packed_rows_are_as_documents_apart(pool, world_size):
    """Every mode, with and without checkpointing, positions that start anew and that go on; the length is padded."""
    settings = []
    for seed, mode in enumerate(MODES):
        batch = world_size if mode == "data_parallel" else 2
        starts = starts_of(seed, batch, 53, 2 * world_size)
        plain = PackedSetting(mode, starts, 53, HEADS[world_size], fused=False)
        settings += [
            plain,
            dataclasses.replace(
                plain,
                fused=True,
                restart_positions=False,
                checkpointed=tuple(CHECKPOINTING_SETTINGS[seed % len(CHECKPOINTING_SETTINGS)].items()),
            ),
        ]
    check(pool, settings, world_size)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "llama"])
def test_every_family_takes_packed_rows(pool, family):
    settings = [
        PackedSetting(mode, starts_of(9, 2, 40, 4), 40, family=family) for mode in ("data_parallel", "zigzag_ring_attn")
    ]
    check(pool, settings, 2)


@pytest.mark.parametrize("mode", ["zigzag_ring_attn", "dist_flash_attn", "ulysses_attn"])
def test_every_way_of_checkpointing_keeps_documents_apart(pool, mode):
    """The documents come along when a layer is run again in backward."""
    settings = [
        PackedSetting(mode, starts_of(10, 1, 48, 4), 48, checkpointed=tuple(settings.items()))
        for settings in CHECKPOINTING_SETTINGS
    ]
    plan = "1*input@cpu+projections,1*attention"  # the second layer has the first make its input again
    check(pool, [*settings, PackedSetting(mode, starts_of(11, 2, 48, 4), 48, plan=plan)], 2)


def test_documents_that_count_their_positions_are_told_by_position_ids():
    ids, targets = random_rows(2, 20)
    starts = ((0, 3, 4), (0, 19))
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in ((3, 1, 16), (19, 1))])
    place = 1, 4, "cpu"
    by_positions = easy_context.prepare_seq_parallel_inputs(
        "zigzag_ring_attn", ids, positions, targets, *place, documents="position_ids"
    )
    by_starts = easy_context.prepare_seq_parallel_inputs(
        "zigzag_ring_attn", ids, positions, targets, *place, documents=starts
    )
    assert by_positions["documents"] == by_starts["documents"] == Documents.of_rows(starts, 24)
    assert torch.equal(by_positions["local_target_ids"], by_starts["local_target_ids"])
    whole = [
        easy_context.prepare_seq_parallel_inputs(
            "ulysses_attn", ids, positions, targets, rank, 2, "cpu", documents=starts
        )["local_target_ids"]
        for rank in range(2)
    ]
    expected = targets.clone()
    expected[0, [2, 3, 19]] = expected[1, [18, 19]] = -100
    assert torch.equal(torch.cat(whole, dim=1), expected)


@pytest.mark.parametrize(
    "documents,words",
    [
        (((0,),), "documents tells the starts of 1 rows, but there are 2"),
        (((0, 3), (1,)), "documents of row 1 start at"),
        (((0, 3), (0, 18)), "documents of row 1 start at"),
        ("labels", "documents='labels'.*'position_ids'"),
        ("position_ids", "do not count from 0 by ones"),
    ],
)
def test_documents_that_cannot_be_are_refused(documents, words):
    ids, positions = torch.zeros(2, 18, dtype=torch.int64), torch.arange(18)[None].clone()
    positions[0, 7:] += 1
    with pytest.raises(ValueError, match=f"(?s){words}"):
        easy_context.prepare_seq_parallel_inputs(
            "zigzag_ring_attn", ids, positions, None, 0, 2, "cpu", documents=documents
        )


def test_positions_and_targets_of_documents():
    documents = find_documents([[0, 2], [0]], (2, 4), torch.arange(4)[None])
    assert restarting_positions(documents, "cpu").tolist() == [[0, 1, 0, 1], [0, 1, 2, 3]]
    targets = torch.tensor([[5, 6, 7, 8]] * 2)
    assert targets_within(documents, targets).tolist() == [[5, -100, 7, -100], [5, 6, 7, -100]]
    assert targets.tolist() == [[5, 6, 7, 8]] * 2, "the caller's tensor is left alone"


def refused_documents(rank: int, world_size: int) -> dict[str, str]:
    """What each case says on this rank, where rank 1 alone does something wrong."""
    mode, messages, is_wrong = "zigzag_ring_attn", {}, rank == 1

    def message_of(call) -> str:
        with pytest.raises(ValueError) as error:
            call()
        return str(error.value)

    with patched(mode) as mesh:
        model, (ids, targets) = family_model("llama"), random_rows(1, 16)
        place = mesh.sequence_rank, mesh.sequence_size, "cpu"
        positions = torch.arange(16)[None] % 8

        def shard(starts, positions=positions):
            part = easy_context.prepare_seq_parallel_inputs(
                mode, ids, positions, None, *place, documents=starts, check_rows=False
            )
            inputs = {"input_ids": part["local_input_ids"], "position_ids": part["local_position_ids"]}
            return inputs, part.get("documents")

        inputs, documents = shard(((0, 8),))
        right = model(**inputs, documents=documents, use_cache=False).logits
        going_on, _ = shard(None, torch.arange(16)[None])
        cases = {
            "no documents": None,
            "of other rows": Documents.of_rows(((0, 8),), 18),
            "of another batch": Documents.of_rows(((0, 8), (0, 8)), 16),
        }
        for case, wrong in cases.items():
            given = wrong if is_wrong else documents
            messages[case] = message_of(lambda: model(**inputs, documents=given, use_cache=False))  # noqa: B023
            assert torch.equal(model(**inputs, documents=documents, use_cache=False).logits, right), case
        other = Documents.of_rows(((0, 5 + 2 * rank),), 16)
        messages["of different rows"] = message_of(lambda: model(**going_on, documents=other, use_cache=False))
        messages["of another library"] = message_of(
            lambda: model(**going_on, cu_seq_lens_q=torch.tensor([0, 8, 16]), use_cache=False)
        )
        messages["rows packed differently"] = message_of(
            lambda: easy_context.shard_batch(
                mode, ids, targets, mesh, "cpu", documents=((0, 5 + rank),), restart_positions=False
            )
        )
    return messages


def test_documents_that_differ_between_ranks_are_refused_on_all(pool):
    words = {
        "no documents": "position_ids are not rank 1's shard.*give it documents=",
        "of other rows": "documents are those of 1 rows of 18 tokens, but 1 rows of 16 tokens",
        "of another batch": "documents are those of 2 rows of 16 tokens, but 1 rows",
        "of different rows": "different attention: checksum of documents",
        "of another library": "cu_seq_lens_q cannot be honoured.*documents=",
        "rows packed differently": "different rows.*checksum of documents",
    }
    first, second = pool.run(refused_documents, 2)
    assert first == second and first.keys() == words.keys()
    for case, message in first.items():
        assert re.search(f"(?s){words[case]}", message), f"{case}: {message}"
