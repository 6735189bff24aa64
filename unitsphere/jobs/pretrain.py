"""`unitsphere pretrain` and `unitsphere.pretrain`: from what was asked to a finished run."""

from __future__ import annotations

import gc
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unitsphere.common.devices import memory_errors as out_of_memory
from unitsphere.common.distributed import any_rank, barrier, process_group, rank
from unitsphere.common.errors import UnitsphereError, UsageError
from unitsphere.common.stopping import stop_on_request
from unitsphere.common.terminal import Terminal, bars
from unitsphere.config.layers import Layer, read_file
from unitsphere.data.broken import describe
from unitsphere.jobs.summary import summarise
from unitsphere.methods.learners.learner import Learner
from unitsphere.modules.names import CUSTOM
from unitsphere.runs.loading import initialise
from unitsphere.runs.run import Run
from unitsphere.training.hooks import Hook
from unitsphere.training.loop import Training
from unitsphere.training.make_views import make_views_of, try_view
from unitsphere.training.online import OnlineKNN
from unitsphere.training.prepare import Prepared, prepare
from unitsphere.training.speed import choose_speed
from unitsphere.training.step import compile_networks
from unitsphere.views.views import CustomView

__all__ = ["pretrain"]


@dataclass(frozen=True)
class FromPython:
    """What a user gives as objects, and not by name.

    data: an array of images or a torch Dataset. backbone: a module. views: one image to one view. on_step, on_epoch:
    hooks (training/hooks.py).
    """

    data: Any = None
    backbone: nn.Module | None = None
    views: CustomView | None = None
    on_step: Hook | None = None
    on_epoch: Hook | None = None


NOTHING = FromPython()


def pretrain(
    method: str | None = None,
    *,
    data: Any = None,
    out: str | os.PathLike[str],
    config: str | os.PathLike[str] | None = None,
    resume: bool = False,
    backbone: str | nn.Module | None = None,
    views: str | CustomView | None = None,
    on_step: Hook | None = None,
    on_epoch: Hook | None = None,
    verbose: bool = True,
    **fields: Any,
) -> Run:
    """Pre-train without labels and return the run.

    method: a name (`unitsphere methods`), or `package.module:Class` for one from outside. data: a name, name=path, a
    path, an array of images or a torch Dataset. out: the folder of the run. config: a TOML or JSON file of fields.
    resume: continue the run in `out`. backbone: a name or a module. views: a policy's name, or a callable that turns
    one (C, H, W) uint8 image into a (C, S, S) float view. on_step, on_epoch: called with the record of a step, and of
    an epoch's last line; each may return numbers for the metrics, and may stop the run (`unitsphere.StopTraining`).
    verbose: show progress. Every other field of the configuration is a keyword by its own name
    (`unitsphere pretrain --help` lists them).

    Example: `run = unitsphere.pretrain("moco-v2", data="./photos", out="runs/photos", epochs=200)`
    """
    given = {"method": method, "data": data, "backbone": backbone, "views": views}
    given = {name: value for name, value in given.items() if value is not None} | fields
    may_be_objects = {name: given[name] for name in ("data", "backbone", "views") if name in given}
    objects = {name: value for name, value in may_be_objects.items() if not isinstance(value, str | os.PathLike)}
    given |= dict.fromkeys(objects, CUSTOM)
    for name in ("data", "init"):
        if isinstance(given.get(name), os.PathLike):
            given[name] = os.fspath(given[name])
    file = Layer(f"file {config}", read_file(config)) if config is not None else None
    run, own = Run(Path(out)), FromPython(**objects, on_step=on_step, on_epoch=on_epoch)
    with process_group():
        prepared = prepare(run, Layer("given", given), file, resume, own.data)
        return train(prepared, run, own, verbose=verbose)


def train(prepared: Prepared, run: Run, own: FromPython = NOTHING, *, verbose: bool = True) -> Run:
    """Do everything from the open data to the last word of the run, under the lock of its folder.

    What can be refused is refused before the images are read. Of several ranks the first writes and speaks.
    """
    refuse_absent_views(prepared, own.views)
    gc.collect()  # a compiled network refers to itself: that of an earlier run in this process may still lie on the GPU
    barrier()  # all have seen the folder as it was before the first writes to it
    with memory_errors(prepared):
        method = build(prepared, own.backbone)
        online = OnlineKNN(prepared) if prepared.config.knn_every else None
        with run.lock() if rank() == 0 else nullcontext():
            refuse_changed(prepared, run)
            learn(prepared, run, method, online, own, verbose and rank() == 0)
    return run


def learn(
    prepared: Prepared, run: Run, method: Learner, online: OnlineKNN | None, own: FromPython, verbose: bool
) -> None:
    """Train from where the run stands to its end."""
    # The images are read, and with them the last two fields are known: mean and deviation.
    with bars(verbose) as progress:
        loader = prepared.loader(prepared.images, progress("reading images", len(prepared.images)))
    prepared.settle_statistics(loader)
    config = prepared.config
    if own.views is not None:
        try_view(own.views, loader, config)

    # A run that was begun goes on from its latest checkpoint; a finished one only says what it learnt, if it has not.
    training = Training(run, config, method, prepared.plan, prepared.device, prepared.precision, prepared.fingerprint())
    terminal = Terminal(prepared.plan.steps, config.epochs, quiet=not verbose)
    if run.checkpoints():
        training.resume()
        terminal.say(f"resuming after step {training.step} of {prepared.plan.steps}")
        if training.step == prepared.plan.steps:
            terminal.say(f"{run.path} is finished; --epochs continues it for longer.")
            if not run.is_summarised(config.epochs):
                say_what_was_learnt(prepared, run, method, terminal, own)
            return

    # From here on the folder is written.
    if rank() == 0:
        run.create(prepared.resolved, prepared.record, resumes=prepared.done is not None)
        run.set_aside(after=training.step)
    for note in prepared.resolved.notes:
        terminal.say(note)
    fast = choose_speed(prepared, prepared.plan.steps - training.step, custom=own.backbone is not None)
    training.record, training.compiles = fast.record, fast.compile
    if fast.compile:
        compile_networks(method)
        terminal.say("compiling: the first step takes a minute or two, less where the cache knows it")
    make_views = make_views_of(config, method.views, own.views, compiled=fast.compile and loader.one_size)
    look = None if online is None else partial(online.measure, loader, method)
    here = [prepared.device] if prepared.device.type == "cuda" else []
    with terminal, stop_on_request() as should_stop, torch.random.fork_rng(here):  # steps seed it
        hooks = {"on_step": own.on_step, "on_epoch": own.on_epoch}
        training.train(loader, make_views, terminal, should_stop, look, **hooks)
    if rank() == 0:
        for line in describe(loader.broken):
            terminal.say(line)
    say_what_was_learnt(prepared, run, method, terminal, own)


def refuse_changed(prepared: Prepared, run: Run) -> None:
    """The folder was looked at before it was locked: refuse it if another process has trained there since. Nothing has
    been written yet."""
    (changed,) = any_rank(run.state() != prepared.seen)
    if changed:
        raise UsageError(
            f"out: another process has trained in {run.path} while this one was preparing. Nothing of it was touched. "
            "Continue that run with --resume (resume=True in Python), or take another place for a new one."
        )


def say_what_was_learnt(prepared: Prepared, run: Run, method: Learner, terminal: Terminal, own: FromPython) -> None:
    """Judge the backbone without labels, and say how good it is."""
    if rank() > 0:
        return
    try:
        before = None if own.backbone is not None else untrained(prepared)
        make_views = make_views_of(prepared.config, 2, own.views)
        summarise(run, prepared, method.backbone, before, make_views, terminal)
    except (UnitsphereError, OSError, torch.OutOfMemoryError) as error:  # the run itself is whole
        terminal.warn(f"summary: it could not be made: {error}")


def build(prepared: Prepared, backbone: nn.Module | None = None) -> Learner:
    """The method on its device, from its seed, or from the weights of --init unless a checkpoint will replace them."""
    config = prepared.config
    method = prepared.build(backbone=backbone)
    if config.init and not prepared.done:
        initialise(method.backbone, config.init, config.channels)
        if method.slow is not None:
            method.slow.load_state_dict(method.online.state_dict())
    return method.to(device=prepared.device, memory_format=torch.channels_last)  # type: ignore[call-overload]


def untrained(prepared: Prepared) -> nn.Module | None:
    """The backbone as the run began with it; None where the weights of --init are there no longer."""
    try:
        return build(replace(prepared, done=None)).backbone
    except (UnitsphereError, OSError):
        return None


def check(prepared: Prepared) -> None:
    """Refuse what `train` would refuse before it reads the images."""
    refuse_absent_views(prepared, None)
    with memory_errors(prepared):
        build(prepared)
        if prepared.config.knn_every:
            OnlineKNN(prepared)


def refuse_absent_views(prepared: Prepared, views: CustomView | None) -> None:
    if prepared.config.views == CUSTOM and views is None:
        raise UsageError("views: custom views are a function: give it from Python, unitsphere.pretrain(views=...).")


def memory_errors(prepared: Prepared) -> AbstractContextManager[None]:
    config = prepared.config
    fields = [f"--{name.replace('_', '-')} (now {value})" for name, value in config.memory_advice.items()]
    return out_of_memory(
        f"Lower {', '.join(fields[:-1])} or {fields[-1]}, or use a smaller --backbone (now {config.backbone}); "
        "--accumulate 2 computes a step in two parts where that means the same; with --resident false the images "
        "stay on the disk."
    )
