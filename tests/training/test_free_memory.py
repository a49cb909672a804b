"""The memory that is free, of the machine and of the container."""

from types import SimpleNamespace

import torch

from easy_context.training import free_memory
from easy_context.training.free_memory import free_host_memory, least_free


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(str(text))


def test_a_container_s_limit_counts_and_its_file_cache_does_not(tmp_path):
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    write(proc, meminfo="MemTotal: 900 kB\nMemAvailable: 800 kB\n")
    assert free_host_memory(proc, cgroups) == 800 * 1024, "no control groups"
    write(proc / "self", cgroup="0::/job/step\n")
    write(cgroups / "job" / "step", memory__max="max", memory__current=7)
    write(cgroups / "job", memory__max=500_000, memory__current=300_000, memory__stat="anon 1\ninactive_file 50000\n")
    assert free_host_memory(proc, cgroups) == 250_000, "the limit of the group above"
    write(cgroups, memory__max=100_000, memory__current=150_000)  # as a container sees its own group
    assert free_host_memory(proc, cgroups) == 0
    write(proc / "self", cgroup="3:cpu:/x\n4:memory:/pod\n0::/\n")
    write(cgroups, memory__max="max")
    write(cgroups / "memory" / "pod", **{"memory__limit_in_bytes": 600_000, "memory__usage_in_bytes": 200_000})
    assert free_host_memory(proc, cgroups) == 400_000, "version 1"


def test_this_machine_has_memory_left():
    assert 2**20 < free_host_memory() < 2**50


def test_processes_of_a_machine_share_its_memory(monkeypatch):
    monkeypatch.setattr(free_memory, "free_host_memory", lambda: 800)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    without_gpu = SimpleNamespace(device=torch.device("cpu"), num_processes=4)
    free = least_free(without_gpu)
    assert (free.gpu, free.host) == (200, 0), "the host's memory stands in the GPU's place"
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70, 80))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    free = least_free(SimpleNamespace(device=torch.device("cuda"), num_processes=4))
    assert (free.gpu, free.host) == (70, 400)
