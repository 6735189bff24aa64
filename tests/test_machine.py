"""What a process may use of its machine."""

import os
import subprocess
import sys

import pytest
import torch

from unitsphere.common.machine import _container_cores, free_memory, worker_count


def test_a_container_may_have_fewer_cores_than_the_machine(tmp_path):
    for text, cores in (("250000 100000", 3), ("100000 100000", 1)):
        (tmp_path / "cpu.max").write_text(text)
        assert _container_cores(tmp_path) == cores
    (tmp_path / "cpu.max").write_text("max 100000")
    assert _container_cores(tmp_path) > 10_000
    assert _container_cores(tmp_path / "none") > 10_000


def asked_together(expression, processes):
    """What one of so many processes would print."""
    code = f"import torch; from unitsphere.common.machine import *; print({expression})"
    environment = os.environ | {"LOCAL_WORLD_SIZE": str(processes)}
    return int(subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True).stdout)


def test_processes_started_together_share_the_memory():
    free = asked_together("free_memory(torch.device('cpu'))", 64)
    # others may take and give memory meanwhile
    assert 64 * free == pytest.approx(free_memory(torch.device("cpu")), rel=0.5)


def test_processes_started_together_share_the_cores():
    counts = [asked_together("worker_count()", processes) for processes in (1, 2, 64)]
    assert counts == [worker_count(), max(1, worker_count() // 2), max(1, worker_count() // 64)]
