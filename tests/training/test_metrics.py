"""What a step reports: FLOPs that are true to the model, speed, a line a step, trackers that never wait for people."""

import errno
import json
from types import SimpleNamespace

import pytest
import torch
from tiny_models import tiny_llama
from torch.utils.flop_counter import FlopCounterMode

from easy_context.common.interrupts import Interrupts
from easy_context.kernels.documents import Documents
from easy_context.mesh import Mesh
from easy_context.training import metrics
from easy_context.training.arguments import Arguments
from easy_context.training.flops import count_parameters, flops_per_token, peak_flops
from easy_context.training.metrics import MetricsLog, StepMeter, describe
from easy_context.training.watch.watch import Watch

QUIET = Watch(0, Interrupts())
RECORD = {
    "step": 3,
    "loss": 2.5,
    "learning_rate": 2e-5,
    "grad_norm": 1.25,
    "tokens": 2000,
    "tokens_per_second": 4000.0,
    "tokens_per_second_per_device": 2000.0,
    "mfu": None,
    "peak_memory_bytes": 3 * 2**30,
    "valid_tokens": 1999,
    "time": 1.0,
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("heads, head_dim", [(4, 8), (2, 32)])
def test_flops_are_those_that_pytorch_counts(tied, heads, head_dim):
    """Against the operators of a forward and backward pass, whose attention computes the masked half as well."""
    length = 64
    model = tiny_llama(
        num_attention_heads=heads,
        num_key_value_heads=1,
        head_dim=head_dim,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    ids = torch.randint(0, 258, (1, length))
    with FlopCounterMode(display=False) as counter:
        model(ids, labels=ids).loss.backward()
    masked_half = 6 * 2 * heads * head_dim * length
    expected = counter.get_total_flops() / length - masked_half
    assert flops_per_token(model.config, count_parameters(model), length) == pytest.approx(expected, rel=0.01)


def test_flops_of_attention_are_those_in_the_window():
    """As many as of pairs counted one by one; every second layer has a window."""
    types = ["sliding_attention", "full_attention"]
    settings = {"num_hidden_layers": 2, "num_attention_heads": 3, "head_dim": 8, "tie_word_embeddings": True}
    length, window = 4000, 300
    config = SimpleNamespace(**settings, sliding_window=window, layer_types=types)
    pairs = sum(min(place + 1, window) for place in range(length)) + length * (length + 1) / 2
    assert flops_per_token(config, 0, length) == pytest.approx(12 * 3 * 8 * pairs / length, rel=1e-3)
    config.sliding_window = length
    full = flops_per_token(config, 0, length)
    assert full == pytest.approx(12 * 3 * 8 * (length + 1), rel=1e-3)
    config.sliding_window = None
    assert flops_per_token(config, 0, length) == full


def test_parameters_are_counted_whole_under_zero3():
    model = tiny_llama()
    whole = sum(p.numel() for p in model.parameters())
    for parameter in model.parameters():
        parameter.ds_numel = parameter.numel()
        parameter.data = torch.empty(0)
    assert count_parameters(model) == whole


@pytest.mark.parametrize(
    "name, teraflops",
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA RTX A6000", 155),
        ("NVIDIA A40", 150),
        # Others than their names may suggest.
        ("NVIDIA RTX A4000", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA RTX 6000 Ada Generation", None),
        ("NVIDIA L40", None),
        ("NVIDIA H20", None),
    ],
)
def test_peaks_of_gpus(monkeypatch, name, teraflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda")) == (None if teraflops is None else teraflops * 1e12)
    assert peak_flops(torch.device("cpu")) is None


class FourAlike:
    """What StepMeter uses of an Accelerator, on one of four processes with the same shards."""

    device, num_processes = torch.device("cpu"), 4

    def reduce(self, counts, reduction):
        assert reduction == "sum"
        return 4 * counts


def test_speed_and_utilisation(monkeypatch):
    clock = iter([100.0, 102.0, 110.0, 150.0, 154.0])
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: next(clock), time=lambda: 7.0))
    monkeypatch.setattr(metrics, "peak_flops", lambda device: 1e12)
    monkeypatch.setattr(metrics, "flops_per_token", lambda config, parameters, length, trained: 1e6 * length)
    meter = StepMeter(FourAlike(), Mesh(sequence_size=5), config=None, model=torch.nn.Linear(2, 2))
    shard = {"shift_labels": torch.arange(200).reshape(1, 200)}
    assert meter.count([shard]) == 800
    record = meter.record(1, 2.5, 1e-5, 0.5)  # 2 seconds
    assert record.keys() == RECORD.keys()
    assert record["tokens_per_second"] == 400 and record["tokens_per_second_per_device"] == 100
    assert record["mfu"] == pytest.approx(100 * 1e9 / 1e12)
    assert record["peak_memory_bytes"] > 10 * 2**20
    later = meter.record(2, 2.5, 1e-5, 0.5)
    assert later["tokens_per_second"] == 100, "a step is timed from the end of the one before"
    meter.restart()  # after an evaluation, which is no training time
    assert meter.record(3, 2.5, 1e-5, 0.5)["tokens_per_second"] == 200


class FakeAccelerator:
    """What MetricsLog uses of one, on one of several processes."""

    def __init__(self, main: bool = True) -> None:
        self.is_main_process, self.logged, self.finished, self.settings = main, [], 0, None
        self.trackers = [SimpleNamespace(finish=self._finish)]

    def init_trackers(self, name, config, init_kwargs=None):
        self.settings = (name, config)

    def log(self, values, step):
        self.logged.append((step, values))

    def _finish(self):
        self.finished += 1


def log_arguments(tmp_path, **changes):
    return Arguments(**{"output_dir": str(tmp_path), "report_to": "none", "max_train_steps": 4} | changes)


def test_each_step_is_a_line_and_some_are_reported(tmp_path):
    accelerator = FakeAccelerator()
    log = MetricsLog(accelerator, log_arguments(tmp_path, log_every=2), QUIET)
    for step in range(1, 5):
        log.write({**RECORD, "step": step, **({"eval_loss": 2.0} if step == 3 else {})})
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert len(lines) == step, "a run that is killed leaves every finished step"
    log.close()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    assert json.loads(lines[2])["eval_loss"] == 2.0
    assert [step for step, _ in accelerator.logged] == [2, 3, 4]
    assert accelerator.logged[0][1]["loss"] == 2.5 and "mfu" not in accelerator.logged[0][1]
    assert accelerator.finished == 1


def test_a_loss_that_is_not_finite_is_valid_json(tmp_path):
    log = MetricsLog(FakeAccelerator(), log_arguments(tmp_path), QUIET)
    log.write({**RECORD, "loss": float("nan"), "grad_norm": float("inf")})
    log.close()

    def refuse(constant):
        raise ValueError(constant)

    record = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert record["loss"] is None and record["grad_norm"] is None


def test_lines_that_a_full_disk_does_not_take_follow_later(tmp_path):
    """The run goes on, and in the end the file is whole."""
    log = MetricsLog(FakeAccelerator(), log_arguments(tmp_path), QUIET)
    real, full = log._file, [False, True, True, False]

    def write_some(data: bytes) -> int:
        if full.pop(0):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real.write(data[:100]) if full else real.write(data)

    log._file = SimpleNamespace(write=write_some, close=real.close)
    for step in range(1, 5):
        log.write({**RECORD, "step": step})
    log.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]


def test_other_ranks_write_nothing(tmp_path):
    log = MetricsLog(FakeAccelerator(main=False), log_arguments(tmp_path), QUIET)
    log.write(RECORD)
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_the_line_for_people():
    line = describe({**RECORD, "mfu": 0.4567, "eval_loss": 2.25})
    parts = ["loss 2.5000", "lr 2.00e-05", "grad 1.25", " 4,000 tok/s,", "2,000 tok/s/device", "MFU 45.7%", "3.0 GiB"]
    for part in parts:
        assert part in line
    assert line.endswith("eval 2.2500")
    assert "MFU" not in describe(RECORD)


def test_tokens_are_counted_over_all_ranks_and_rows_at_their_whole_length(monkeypatch):
    """Shards of 3 and of 5 tokens on two ranks a row: rows of 6 and of 10."""
    targets = [torch.tensor([[1, 2, -100], [-100, -100, 3]]), torch.tensor([[4, -100, 5, 6, 7]])]
    lengths = []
    monkeypatch.setattr(metrics, "flops_per_token", lambda config, parameters, length, _: lengths.append(length) or 1.0)
    meter = StepMeter(FourAlike(), Mesh(sequence_size=2), config=None, model=torch.nn.Linear(2, 2))
    assert meter.count([{"shift_labels": each} for each in targets]) == 28
    record = meter.record(1, 2.5, 1e-5, 0.5)
    assert (record["tokens"], record["valid_tokens"]) == (44, 28)
    assert lengths == [pytest.approx((6 * 6 + 5 * 10) / 11, rel=1e-6)]


def test_documents_that_are_kept_apart_count_at_their_own_length(monkeypatch):
    lengths = []
    monkeypatch.setattr(metrics, "flops_per_token", lambda config, parameters, length, _: lengths.append(length) or 1.0)
    meter = StepMeter(FourAlike(), Mesh(sequence_size=2), config=None, model=torch.nn.Linear(2, 2))
    documents = Documents.of_rows([[0, 2, 3], [0]], 8)
    meter.count([{"shift_labels": torch.ones(2, 4, dtype=torch.int64), "documents": documents}])
    meter.record(1, 2.5, 1e-5, 0.5)
    assert lengths == [pytest.approx((2 * 2 + 1 * 1 + 5 * 5 + 8 * 8) / 16)]


def test_a_step_without_targets_is_divided_by_one(monkeypatch):
    monkeypatch.setattr(metrics, "flops_per_token", lambda *_: 1.0)
    meter = StepMeter(FourAlike(), Mesh(), config=None, model=torch.nn.Linear(2, 2))
    assert meter.count([{"shift_labels": torch.full((1, 3), -100)}]) == 1
    assert meter.record(1, 0.0, 1e-5, 0.0)["valid_tokens"] == 0
