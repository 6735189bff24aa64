"""Steps of training that are rehearsed and not taken: fresh views through the networks of a checkpoint as training
would send them (batch statistics, groups, permuted keys), compared with its negatives, and nothing moves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unitsphere.analysis.request import AnalysisRequest
from unitsphere.common.devices import pick_precision, send
from unitsphere.common.errors import UsageError
from unitsphere.common.randomness import generator
from unitsphere.config.layers import Layer
from unitsphere.data.loader import Loader
from unitsphere.methods.build import build_learner
from unitsphere.methods.catalogue import find_method
from unitsphere.methods.contrastive import ContrastiveConfig
from unitsphere.methods.learners.contrastive import ContrastiveLearner
from unitsphere.methods.learners.learner import Moment
from unitsphere.methods.learners.negatives import Comparison
from unitsphere.methods.resolve import Resolved, resolve
from unitsphere.modules.names import CUSTOM
from unitsphere.runs.run import Run
from unitsphere.training.loop import Plan
from unitsphere.training.prepare import Prepared, labelled
from unitsphere.views.views import MakeViews
from unitsphere.weights.files import load_tensors
from unitsphere.weights.names import part


def contrastive(run: Run) -> ContrastiveConfig:
    """The configuration of a run that has negatives."""
    config = run.config
    if not isinstance(config, ContrastiveConfig):
        raise UsageError(f"{run.path}: {config.method} has no negatives; this analysis is of contrastive runs.")
    if config.backbone == CUSTOM:
        raise UsageError(f"{run.path} was trained with a module given from Python, which it cannot rebuild.")
    return config


@dataclass(frozen=True)
class Snapshot:
    """A method as a checkpoint left it. data: what tells the images it was trained on from others."""

    method: ContrastiveLearner
    epoch: int
    step: int
    data: dict[str, Any]
    moment: Moment  # of the step after it; of the last one, of the step before

    @classmethod
    def of(cls, checkpoint: Path, device: torch.device) -> Snapshot:
        tensors, meta = load_tensors(checkpoint)
        config = resolve(Layer(str(checkpoint), meta["config"])).config
        method = build_learner(config)
        assert isinstance(method, ContrastiveLearner)
        method.load_state_dict(part(tensors, "method."))
        plan = Plan(meta["data"]["images"], config.batch_size, config.epochs, config.seed)
        next_one = min(meta["step"], plan.steps - 1)
        moment = Moment(next_one, plan.steps, next_one // plan.steps_per_epoch, plan.epochs)
        return cls(method.to(device).train(), meta["epoch"], meta["step"], meta["data"], moment)

    def stop_following(self) -> None:
        """From now on the slow copy stays where it is."""
        if self.method.key_encoder is not None:
            self.method.key_encoder = replace(self.method.key_encoder, momentum=1.0, schedule="constant")


@dataclass
class Replay:
    """Training images in random batches of the run's own size: as many as there are whole batches in `queries`, but
    one at least.

    chosen: (n,), which images these are. labels: (N,) on the device, of all training images, -1 for one without; None
    where an image has no single class.
    """

    run: Run
    ask: AnalysisRequest
    queries: int
    prepared: Prepared = field(init=False)
    chosen: Tensor = field(init=False)
    loader: Loader = field(init=False)
    make_views: MakeViews = field(init=False)
    labels: Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        config, ask = contrastive(self.run), self.ask
        images = ask.images(self.run, "train")
        images = labelled(images) if config.needs_labels else images
        plan = Plan(len(images), config.batch_size, config.epochs, config.seed)
        precision = pick_precision(config.precision, ask.device)
        self.make_views = ask.views(config, 1 + config.keys)
        self.prepared = Prepared(
            Resolved(find_method(config.method, None), config, {}), images, ask.data, None, ask.device, precision, plan
        )
        batches = max(1, min(self.queries, len(images)) // plan.batch_size)
        order = torch.randperm(len(images), generator=generator(ask.seed, "analysis-order"))
        self.chosen = order[: batches * plan.batch_size]
        asked = images.subset(self.chosen.numpy())
        self.loader = self.prepared.loader(asked, ask.progress("reading images", len(asked)))
        one_each = images.labels is not None and images.labels.ndim == 1
        self.labels = torch.as_tensor(images.labels, device=ask.device) if one_each else None

    @torch.no_grad()
    def comparisons(self, snapshot: Snapshot) -> Iterator[tuple[Tensor, Comparison]]:
        """For each batch which images the queries are of, (n,) on the device, and what they are compared with.

        The slow copy makes the move of the step that would be next, and no other."""
        method, device = snapshot.method, self.ask.device
        seed, plan = self.ask.seed, self.prepared.plan
        batches = torch.arange(len(self.chosen)).split(plan.batch_size)
        done = self.ask.progress(f"{self.run.path.name}, epoch {snapshot.epoch}", len(batches))
        bf16 = self.prepared.precision == "bf16"
        for number, (places, canvas) in enumerate(self.loader.batches(batches)):
            images = self.chosen[places].to(device)
            drawn = method.inputs(len(images), snapshot.moment, generator(seed, "analysis-step", number))
            inputs = {name: send(tensor, device) for name, tensor in drawn.items()}
            if method.labels:
                assert self.labels is not None  # or it could not have been trained
                inputs["labels"] = self.labels[images]
            views = self.make_views(canvas, "analysis", number)
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                queries = method.queries(views)
                compared, _ = method.compare(queries, method.slow_keys(views, inputs), inputs)
            snapshot.stop_following()
            found = compared[0]
            yield images.repeat_interleave(len(found.query) // len(images)), found  # of repeated queries too
            done(number + 1)

    def queue_images(self, snapshot: Snapshot) -> Tensor | None:
        """(queue size,) on the device: which training image each key of the queue is of, -1 for random vectors; None
        where the images at hand are not those of the training.

        The order of training is a function of the seed and the step, so what lies in the queue need not be kept. In
        place of a broken image training took another: its key has the wrong one here."""
        queue, plan = snapshot.method.queue, self.prepared.plan
        if queue is None or snapshot.data != self.prepared.fingerprint():
            return None
        directions = snapshot.method.directions  # which enter the queue one after the other
        steps = min(snapshot.step, -(-len(queue) // (directions * plan.batch_size)))
        entered = [torch.cat([batch] * directions) for batch in islice(plan.batches(snapshot.step - steps), steps)]
        nobody = torch.empty(0, dtype=torch.int64)  # before the first step
        latest = torch.cat([nobody, *entered])[-len(queue) :]
        owners = torch.full((len(queue),), -1)
        owners[(int(queue.pushed) - len(latest) + torch.arange(len(latest))) % len(queue)] = latest
        return owners.to(self.ask.device)
