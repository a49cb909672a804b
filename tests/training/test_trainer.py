"""The Hugging Face Trainer on split rows against the plain one on one process: losses, norms and weights to 1e-5."""

import contextlib
import dataclasses
import os
import tempfile

import pytest
import torch
from family_models import VOCABULARY, family_model, patched
from launching import free_port, launched
from plain_attention import relative_error
from worker_pool import WorkerPool

import easy_context
from easy_context.loss import IGNORE_INDEX, next_token_targets
from easy_context.training.trainer import SequenceParallelTrainerMixin, _refuse_settings, split_batch

TOLERANCE = 1e-5
PADDING_TOKEN = 7  # also a token of the rows, as where the end-of-text token pads


@dataclasses.dataclass(frozen=True)
class Case:
    """A short training; its text is the repro that a failing test prints."""

    mode: str
    world_size: int
    sequence_size: int
    rows: int
    batch_size: int  # of a data-parallel group
    eval_rows: int
    checkpointing: bool = False
    sampling: str = "random"
    logging_steps: int = 1

    @property
    def groups(self) -> int:
        return self.world_size // self.sequence_size


# The last accumulation window of an epoch is incomplete in each: 5 micro-batches, 2 a step.
CASES = (
    Case("zigzag_ring_attn", 2, 2, rows=9, batch_size=2, eval_rows=5),
    Case("ulysses_attn", 2, 2, rows=9, batch_size=2, eval_rows=4, checkpointing=True, sampling="sequential"),
    Case("data_parallel", 2, 1, rows=10, batch_size=1, eval_rows=5),
    Case("zigzag_ring_attn", 4, 2, rows=10, batch_size=1, eval_rows=7, logging_steps=4),
    Case("dist_flash_attn", 4, 2, rows=20, batch_size=2, eval_rows=1),
)


def make_rows(count: int, seed: int = 3) -> list[dict]:
    """Rows of 5 to 40 tokens with labels, about a third of them -100, and a column that no model takes."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(count):
        length = int(torch.randint(5, 41, (), generator=generator))
        ids = torch.randint(0, VOCABULARY, (length,), generator=generator)
        labels = ids.masked_fill(torch.rand(length, generator=generator) < 0.3, IGNORE_INDEX)
        rows.append({"input_ids": ids.tolist(), "labels": labels.tolist(), "note": f"row {index}"})
    return rows


def pad_right(rows: list[dict]) -> dict[str, torch.Tensor]:
    """A collator that pads at the right end, with an attention_mask."""
    longest = max(len(row["input_ids"]) for row in rows)
    batch = {"input_ids": [], "labels": [], "attention_mask": []}
    for row in rows:
        real, padding = len(row["input_ids"]), longest - len(row["input_ids"])
        batch["input_ids"].append(list(row["input_ids"]) + [PADDING_TOKEN] * padding)
        batch["labels"].append(list(row["labels"]) + [IGNORE_INDEX] * padding)
        batch["attention_mask"].append([1] * real + [0] * padding)
    return {name: torch.tensor(values) for name, values in batch.items()}


def make_trainer(folder: str, *bases: type, model=None, rows=9, eval_rows=None, collator=pad_right, **settings):
    """A Trainer of these base classes on a tiny model in float32."""
    import datasets
    from transformers import Trainer, TrainingArguments

    defaults = {
        "output_dir": folder,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "num_train_epochs": 2,
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "optim": "sgd",  # whose steps, unlike AdamW's, scale with the gradients
        "learning_rate": 0.3,
        "lr_scheduler_type": "constant",
        "include_num_input_tokens_seen": "non_padding",
    }
    of_trainer = ("compute_metrics", "compute_loss_func", "preprocess_logits_for_metrics", "train_dataset")
    arguments = {name: settings.pop(name) for name in of_trainer if name in settings}
    arguments.setdefault("train_dataset", datasets.Dataset.from_list(make_rows(rows)))
    return type("TrainerUnderTest", (*bases, Trainer), {})(
        args=TrainingArguments(**{**defaults, **settings}),
        model=model or family_model("llama"),
        eval_dataset=datasets.Dataset.from_list(make_rows(eval_rows, seed=5)) if eval_rows else None,
        data_collator=collator,
        **arguments,
    )


def make_split_trainer(folder: str, model=None, **settings):
    return make_trainer(
        folder,
        SequenceParallelTrainerMixin,
        model=easy_context.apply_fused_loss(model or family_model("llama")),
        **settings,
    )


def train(trainer) -> tuple[list[dict], dict[str, torch.Tensor]]:
    """Train, evaluate, and ask for the loss of a batch: what was logged, with that loss at the end, and the weights."""
    trainer.train()
    trainer.evaluate()
    with torch.no_grad():
        loss = trainer.compute_loss(trainer.model_wrapped, pad_right(make_rows(3)))
    logs = [*trainer.state.log_history, {"loss": trainer.accelerator.reduce(loss, reduction="mean").item()}]
    return logs, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def train_plainly(rank: int, world_size: int, case: Case):
    """The plain Trainer on one process, with the rows of all groups in a batch."""
    with launched(0, 1, ""), tempfile.TemporaryDirectory() as folder:
        return train(
            make_trainer(
                folder,
                rows=case.rows,
                eval_rows=case.eval_rows,
                per_device_train_batch_size=case.batch_size * case.groups,
                train_sampling_strategy=case.sampling,
                logging_steps=case.logging_steps,
            )
        )


def train_split(rank: int, world_size: int, case: Case, port: str):
    torch.manual_seed(rank)  # the user's own random numbers, which need not agree
    with (
        launched(rank, world_size, port),
        tempfile.TemporaryDirectory() as folder,
        patched(case.mode, sequence_parallel_size=case.sequence_size) as mesh,
    ):
        assert (mesh.data_size, mesh.sequence_size) == (case.groups, case.sequence_size)
        if case.checkpointing:
            easy_context.apply_unsloth_offloaded_gradient_checkpoint_monkey_patch()
        try:
            trainer = make_split_trainer(
                folder,
                rows=case.rows,
                eval_rows=case.eval_rows,
                per_device_train_batch_size=case.batch_size,
                train_sampling_strategy=case.sampling,
                logging_steps=case.logging_steps,
                gradient_checkpointing=case.checkpointing,
            )
            torch.manual_seed(rank)
            return train(trainer)
        finally:
            easy_context.remove_unsloth_offloaded_gradient_checkpoint_monkey_patch()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.mode}-{case.groups}x{case.sequence_size}")
def test_losses_norms_and_weights_are_those_of_the_plain_trainer_on_one_process(pool, case):
    expected = pool.run(train_plainly, 1, case, timeout=300)[0]
    compare(pool.run(train_split, case.world_size, case, free_port(), timeout=300), expected, case)


def compare(results: list, expected: tuple, case: Case) -> None:
    """The logs and weights of every rank against the plain Trainer's on one process."""
    expected_logs, expected_weights = expected
    for rank, (logs, weights) in enumerate(results):
        # Three steps an epoch, the summaries of train and evaluate, and a batch.
        assert len(logs) == len(expected_logs) == 6 // case.logging_steps + 3, case
        for entry, expected in zip(logs, expected_logs, strict=True):
            for name in {"loss", "grad_norm", "train_loss", "eval_loss", "epoch", "learning_rate"} & expected.keys():
                assert entry[name] == pytest.approx(expected[name], rel=TOLERANCE), (case, rank, name, entry)
            assert entry.get("num_input_tokens_seen") == expected.get("num_input_tokens_seen"), (case, rank)
        for name, weight in expected_weights.items():
            error = relative_error(weights[name], weight)
            assert error < TOLERANCE, f"{name} is off by {error:.2e} on rank {rank}: {case}"


def train_under_deepspeed(rank: int, world_size: int, case: Case, folder: str, port: str, stage: int):
    """DeepSpeed on CPUs needs gloo by name and a saved checkpoint, which it would otherwise initialise differently."""
    import deepspeed
    from accelerate import PartialState
    from transformers import AutoModelForCausalLM

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled at first use, and not needed
    start = PartialState.__init__
    PartialState.__init__ = lambda self, *args, **kwargs: start(self, *args, **{"backend": "gloo", **kwargs})
    automatic = (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    )
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    config = {"zero_optimization": zero, "zero_allow_untested_optimizer": True}
    config |= dict.fromkeys(automatic, "auto")
    with launched(rank, world_size, port), patched(case.mode, sequence_parallel_size=case.sequence_size):
        os.environ |= {"ACCELERATE_USE_CPU": "false", "DS_ACCELERATOR": "cpu"}
        trainer = make_split_trainer(
            folder,
            model=AutoModelForCausalLM.from_pretrained(folder),
            rows=case.rows,
            eval_rows=case.eval_rows,
            per_device_train_batch_size=case.batch_size,
            use_cpu=False,
            deepspeed=config,
        )
        logs, _ = train(trainer)
        state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        assert trainer.model_wrapped.zero_optimization_stage() == stage
        return logs, {name: tensor.clone() for name, tensor in state.items()} if rank == 0 else {}


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_gives_the_same(pool, tmp_path, stage):
    case = CASES[0]
    family_model("llama").save_pretrained(tmp_path)
    expected = pool.run(train_plainly, 1, case, timeout=300)[0]
    workers = WorkerPool()  # of its own, as DeepSpeed leaves its settings behind in a process
    try:
        results = workers.run(train_under_deepspeed, 2, case, str(tmp_path), free_port(), stage, timeout=300)
    finally:
        workers.close()
    compare(results[:1], expected, case)


def test_a_checkpoint_loads_and_training_resumes_from_it(pool, tmp_path):
    """Steps 2 and 4 lie within the first and the second epoch."""
    case = CASES[3]
    whole, *resumed = pool.run(train_and_resume, 4, case, str(tmp_path), free_port(), timeout=300)[0]
    for step, weights in zip((2, 4), resumed, strict=True):
        for name, weight in whole.items():
            assert relative_error(weights[name], weight) < TOLERANCE, (step, name)
    from transformers import AutoModelForCausalLM

    last = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-6").named_parameters())
    assert all(torch.equal(last[name], weight) for name, weight in whole.items())


def train_and_resume(rank: int, world_size: int, case: Case, folder: str, port: str) -> list[dict]:
    """The weights after a whole training, and after the same resumed from steps 2 and 4."""
    results = []
    with launched(rank, world_size, port), patched(case.mode, sequence_parallel_size=case.sequence_size):
        for checkpoint in (None, f"{folder}/checkpoint-2", f"{folder}/checkpoint-4"):
            trainer = make_split_trainer(folder, rows=case.rows, save_strategy="steps", save_steps=2)
            trainer.train(resume_from_checkpoint=checkpoint)
            results.append({name: p.detach().clone() for name, p in trainer.model.named_parameters()})
    return results


class Numbers(torch.utils.data.IterableDataset):
    """Rows that are read in order."""

    def __init__(self, count: int):
        self.count = count

    def __iter__(self):
        return ({"input_ids": [row] * 4, "labels": [row] * 4} for row in range(self.count))


def rows_of_rank(rank: int, world_size: int, folder: str, port: str, sequence_size: int):
    """The first tokens of the rows that a rank trains on in two epochs, and the rows of a step, for each kind of data.

    Several groups also refuse what they cannot share.
    """
    import datasets

    numbers = datasets.Dataset.from_list([{"input_ids": [row] * (4 + row % 3)} for row in range(16)])
    numbers = numbers.map(lambda row: {"labels": row["input_ids"]})
    seen, rows_of_step = [], []
    with launched(rank, world_size, port), patched("zigzag_ring_attn", sequence_parallel_size=sequence_size) as mesh:
        for data, sampling in ((numbers, "random"), (numbers, "group_by_length"), (Numbers(16), "random")):
            trainer = make_split_trainer(
                folder,
                train_dataset=data,
                train_sampling_strategy=sampling,
                accelerator_config={"use_seedable_sampler": sampling == "random"},
                max_steps=16,
                per_device_train_batch_size=2,
            )
            torch.manual_seed(rank)
            loader = trainer.get_train_dataloader()
            seen.append([batch["input_ids"][:, 0].tolist() for _ in range(2) for batch in loader])
            rows_of_step.append(trainer.get_total_train_batch_size(trainer.args))
        if mesh.data_size == 1:
            return mesh.data_rank, seen, rows_of_step
        uneven = numbers.select(range(5)).to_iterable_dataset(num_shards=2)  # 3 rows and 2
        with pytest.raises(ValueError, match=r"\[3, 3, 2, 2\] batches left"):
            make_split_trainer(folder, train_dataset=uneven, max_steps=3, gradient_accumulation_steps=4).train()
        with pytest.raises(ValueError, match="IterableDataset cannot be evaluated"):
            trainer.evaluate(Numbers(5))
    return mesh.data_rank, seen, rows_of_step


@pytest.mark.parametrize("sequence_size", [2, 4])
def test_ranks_of_a_group_get_the_same_rows_and_other_groups_others(pool, tmp_path, sequence_size):
    groups = 4 // sequence_size
    results = pool.run(rows_of_rank, 4, str(tmp_path), free_port(), sequence_size, timeout=300)
    for kind in range(3):
        of_group = {}
        for group, seen, rows_of_step in results:
            assert of_group.setdefault(group, seen[kind]) == seen[kind], (kind, group)
            assert rows_of_step[kind] == 2 * 2 * groups  # rows of a batch, batches
        assert len(of_group) == groups
        batches = 8 // groups  # of an epoch
        for epoch in (slice(batches), slice(batches, 2 * batches)):
            rows = sorted(row for seen in of_group.values() for batch in seen[epoch] for row in batch)
            assert rows == list(range(16)), kind


def collate_by_chance(rows: list[dict]) -> dict[str, torch.Tensor]:
    """A collator that cuts rows anywhere, by this process's random state."""
    start = int(torch.randint(0, 4, ()))
    return pad_right([{name: row[name][start:] for name in ("input_ids", "labels")} for row in rows])


def train_on_rows_that_differ(rank: int, world_size: int, folder: str, port: str):
    with launched(rank, world_size, port), patched("zigzag_ring_attn"):
        trainer = make_split_trainer(folder, collator=collate_by_chance)
        torch.manual_seed(rank)
        with pytest.raises(ValueError, match="different rows"):
            trainer.train()


def test_a_collator_that_gives_the_ranks_of_a_group_other_rows_is_noticed(pool, tmp_path):
    pool.run(train_on_rows_that_differ, 2, str(tmp_path), free_port(), timeout=300)


def train_plain_trainer_under_a_patch(rank: int, world_size: int, folder: str, port: str):
    with launched(rank, world_size, port), patched("zigzag_ring_attn"):
        trainer = make_trainer(folder)
        with pytest.raises(ValueError, match="prepare_seq_parallel_inputs|shift_labels"):
            trainer.train()


def test_a_plain_trainer_is_refused_on_every_rank(pool, tmp_path):
    pool.run(train_plain_trainer_under_a_patch, 2, str(tmp_path), free_port(), timeout=300)


def test_without_the_right_mode_or_the_fused_loss_it_says_what_to_call(tmp_path):
    with launched(0, 1, ""):
        with patched("zigzag_ring_attn", "mistral"), pytest.raises(ValueError, match="the model: .*'llama'"):
            make_split_trainer(str(tmp_path))
        with pytest.raises(RuntimeError, match="apply_seq_parallel_monkey_patch"):
            make_split_trainer(str(tmp_path))
        with patched("zigzag_ring_attn"), pytest.raises(ValueError, match="apply_fused_loss"):
            make_trainer(str(tmp_path), SequenceParallelTrainerMixin).train()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({"compute_loss_func": max}, "compute_loss_func"),
        ({"compute_metrics": len}, "compute_metrics"),
        ({"preprocess_logits_for_metrics": max}, "preprocess_logits_for_metrics"),
        ({"neftune_noise_alpha": 5}, "neftune_noise_alpha"),
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches"),
        ({"accelerator_config": {"even_batches": False}}, "even_batches"),
        ({"accelerator_config": {"split_batches": True}}, "split_batches"),
        ({"train_sampling_strategy": "batch_rebalance"}, "batch_rebalance"),
    ],
)
def test_arguments_that_split_rows_cannot_honour_are_refused(tmp_path, settings, message):
    with launched(0, 1, ""), patched("zigzag_ring_attn"), pytest.raises(ValueError, match=f"(?s)split rows.*{message}"):
        make_split_trainer(str(tmp_path), **settings)


def test_all_refused_arguments_are_listed_at_once(tmp_path, monkeypatch):
    with launched(0, 1, ""), patched("zigzag_ring_attn"):
        trainer = make_split_trainer(str(tmp_path))
        trainer.args.use_liger_kernel = trainer.is_fsdp_enabled = True  # what the Trainer itself needs more for here
        trainer.args._n_gpu = 2
        trainer.args.average_tokens_across_devices = False
        monkeypatch.setattr(type(trainer.args), "world_size", 2)
        trainer.accelerator.state.parallelism_config = object()
        names = ("use_liger_kernel", "average_tokens_across_devices", "parallelism_config", "fsdp", "2 GPUs")
        with pytest.raises(ValueError, match="(?s)" + ".*".join(names)):
            _refuse_settings(trainer)


def test_columns_that_would_be_removed_although_they_have_a_meaning_are_refused(tmp_path):
    import datasets

    rows = make_rows(3)
    for name, values in (("segment_ids", range(100)), ("loss_mask", [0] * 100), ("token_type_ids", [0] * 100)):
        for row in rows:
            row[name] = list(values)[: len(row["input_ids"])]
        data = datasets.Dataset.from_list(rows)
        with launched(0, 1, ""), patched("zigzag_ring_attn"):
            trainer = make_split_trainer(
                str(tmp_path), train_dataset=data.select_columns(["input_ids", "labels", name])
            )
            with contextlib.nullcontext() if name == "token_type_ids" else pytest.raises(ValueError, match=name):
                trainer.get_train_dataloader()


def test_a_window_without_a_target_changes_nothing(tmp_path):
    import datasets

    rows = [{**row, "labels": [IGNORE_INDEX] * len(row["labels"])} for row in make_rows(2)]
    with launched(0, 1, ""), patched("zigzag_ring_attn"):
        trainer = make_split_trainer(str(tmp_path), train_dataset=datasets.Dataset.from_list(rows), num_train_epochs=1)
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        trainer.train()
        assert trainer.state.log_history[0]["loss"] == 0
        assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())


def test_predictions_are_refused(tmp_path):
    with launched(0, 1, ""), patched("zigzag_ring_attn"):
        trainer = make_split_trainer(str(tmp_path), eval_rows=2)
        with pytest.raises(ValueError, match="prediction_loss_only"):
            trainer.predict(trainer.eval_dataset)


BATCH = {"input_ids": torch.arange(1, 9).view(2, 4), "labels": torch.arange(1, 9).view(2, 4)}


def test_padding_becomes_targets_that_are_ignored():
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    with patched("zigzag_ring_attn"):
        part = split_batch({**BATCH, "attention_mask": mask, "position_ids": None}, "cpu")
        assert part["shift_labels"].tolist() == [[2, -100, -100, -100], [6, 7, 8, -100]]
        assert torch.equal(part["attention_mask"], mask)
        whole = split_batch(BATCH, "cpu")
    assert torch.equal(whole["shift_labels"], next_token_targets(BATCH["labels"]))
    assert torch.equal(BATCH["labels"], torch.arange(1, 9).view(2, 4))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])}, "pad on the right"),
        ({"attention_mask": torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]])}, "pad on the right"),
        ({"attention_mask": torch.ones(2, 1, 4, 4)}, "attention_mask"),
        ({"position_ids": torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]])}, "packed documents"),
        ({"labels": None}, "must give input_ids and labels"),
        ({"segment_ids": torch.zeros(2, 4)}, r"\['input_ids', 'labels', 'segment_ids'\].*nothing else"),
    ],
)
def test_batches_that_split_rows_cannot_honour_are_refused(columns, message):
    with patched("zigzag_ring_attn"), pytest.raises(ValueError, match=message):
        split_batch({**BATCH, **columns}, "cpu")


def test_the_mixin_must_stand_before_trainer():
    from transformers import Trainer

    with pytest.raises(TypeError, match="put SequenceParallelTrainerMixin before Trainer"):
        type("Reversed", (Trainer, SequenceParallelTrainerMixin), {})
    type("Right", (SequenceParallelTrainerMixin, Trainer), {})
