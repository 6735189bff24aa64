"""What a process may use of its machine."""

import os
import subprocess
import sys

from antipode.data.machine import _container_cores, worker_count


def test_a_container_may_have_fewer_cores_than_the_machine(tmp_path):
    for text, cores in (("250000 100000", 3), ("100000 100000", 1)):
        (tmp_path / "cpu.max").write_text(text)
        assert _container_cores(tmp_path) == cores
    (tmp_path / "cpu.max").write_text("max 100000")
    assert _container_cores(tmp_path) > 10_000
    assert _container_cores(tmp_path / "none") > 10_000


def test_processes_started_together_share_the_cores():
    code = "from antipode.data.machine import worker_count; print(worker_count())"
    counts = [
        int(
            subprocess.run(
                [sys.executable, "-c", code], env=os.environ | {"LOCAL_WORLD_SIZE": n}, capture_output=True
            ).stdout
        )
        for n in ("1", "2", "64")
    ]
    assert counts == [worker_count(), max(1, worker_count() // 2), max(1, worker_count() // 64)]
