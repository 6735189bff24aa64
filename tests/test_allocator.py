"""Freed memory stays with the process, where somebody asks for it: counted in page faults, not in seconds."""

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, torch
import unitsphere
from unitsphere.common.allocator import is_fast
if sys.argv[1] == "fast":
    assert unitsphere.fast_cpu() and unitsphere.fast_cpu()
assert is_fast() == (sys.argv[1] == "fast")
def once():
    torch.empty(40 * 2**20, dtype=torch.uint8).fill_(1)
for _ in range(20):  # the heap grows to what is needed
    once()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    once()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc that gives memory back")
def test_large_blocks_are_faulted_in_once_and_an_import_changes_nothing():
    faults = {}
    for how in ("plain", "fast"):
        done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        faults[how] = int(done.stdout)
    # 10 blocks of 40 MiB are 102,400 pages of 4 KiB, or 200 of 2 MiB where the system has large pages.
    assert faults["plain"] >= 100 and faults["fast"] <= faults["plain"] / 10, faults
