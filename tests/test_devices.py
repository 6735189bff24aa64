"""Which device, and on how many of the host's threads."""

from __future__ import annotations

import os
import time

import pytest
import torch

from unitsphere.common.devices import one_thread, pick_device
from unitsphere.common.errors import UsageError
from unitsphere.common.randomness import generator
from unitsphere.views.draw import draw
from unitsphere.views.policies import POLICIES


@pytest.fixture
def threads():
    """More than there are cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(asked := 4 * (os.cpu_count() or 1))
    yield asked
    torch.set_num_threads(before)


def test_devices_by_name():
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("cpu:0") == torch.device("cpu", 0)
    with pytest.raises(UsageError, match="Allowed: auto, cpu, cuda"):
        pick_device("gpu")
    with pytest.raises(UsageError, match=f"{torch.cuda.device_count()} CUDA devices"):
        pick_device("cuda:99")


def test_several_processes_have_a_card_each(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="cuda:0 to several processes"):
        pick_device("cuda:0")


@pytest.mark.gpu
def test_a_card_that_is_named_becomes_the_current_one():
    assert pick_device("auto") == pick_device("cuda") == torch.device("cuda")
    last = torch.cuda.device_count() - 1
    assert pick_device(f"cuda:{last}").index == torch.cuda.current_device() == last


def test_one_thread_is_for_a_while(threads):
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == threads
    with pytest.raises(ZeroDivisionError), one_thread():
        raise ZeroDivisionError
    assert torch.get_num_threads() == threads


def test_drawing_views_takes_no_more_than_one_core(threads):
    draw(POLICIES["moco-v2"], 256, generator(0, "views"))
    wall, cpu = time.perf_counter(), time.process_time()
    for number in range(300):
        draw(POLICIES["moco-v2"], 256, generator(number, "views"))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    assert cpu < 1.1 * wall
    assert torch.get_num_threads() == threads
