"""The contrastive family: a query, its keys, and a set of negatives.

Where the keys come from (a slow copy or the network itself), how many there are, where the negatives come from (a
queue or the batch), how many of them a query meets: each is one part, and they combine. MoCo is a slow copy and a
queue; SiMo a slow copy and the batch; SimCLR the network itself and the batch; EqCo is alpha; JCL is several keys;
MoCHi is the mixing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unitsphere.common.devices import on_side_stream
from unitsphere.common.distributed import gather, gather_with_gradient, rank
from unitsphere.methods.learners.dispersion import Dispersion
from unitsphere.methods.learners.health import signs_of_health
from unitsphere.methods.learners.key_encoder import KeyEncoder
from unitsphere.methods.learners.learner import Inputs, Learner, Moment, StepOutput
from unitsphere.methods.learners.negatives import Comparison, NegativeSource
from unitsphere.modules.encoder import Encoder
from unitsphere.modules.norms import refuse_shared_statistics, split_groups
from unitsphere.modules.queue import KeyQueue
from unitsphere.modules.slow_copy import momentum_at
from unitsphere.objectives.contrastive import info_nce
from unitsphere.objectives.mixing import Mixing, synthesise

__all__ = ["ContrastiveLearner", "LossSettings"]


@dataclass(frozen=True)
class LossSettings:
    """Settings of the loss; the formula is in objectives/contrastive.py.

    alpha, alpha_on: EqCo's. variance_weight: JCL's lambda, with variance_ramp growing to its full value over the run.
    positives: joint (JCL's limit of infinitely many keys), each (the mean of a term for each key), or repeated (the
    same as a batch M times as large, as JCL's supplement reckons its memory).
    symmetric: each view is query once and key once, and the two losses add.
    """

    temperature: float
    alpha: float | None = None
    alpha_on: str = "all"
    variance_weight: float = 0.0
    variance_ramp: bool = False
    positives: str = "joint"
    symmetric: bool = False


class ContrastiveLearner(Learner):
    """One step of the family; methods/ has its named points (moco.py, simclr.py, jcl.py and so on).

    encoder: images to unit vectors. loss, key_encoder, negatives, mixing, dispersion: settings of the parts.
    key_encoder: None: the network encodes the keys itself, with gradient (SimCLR). queue: where negatives wait; None:
    they are the keys of the other images of the batch, over all ranks. mixing: MoCHi's synthetic negatives, from epoch
    mixing_warmup on. dispersion: forces that spread the queries.
    """

    def __init__(
        self,
        encoder: Encoder,
        loss: LossSettings,
        key_encoder: KeyEncoder | None,
        negatives: NegativeSource,
        queue: KeyQueue | None = None,
        mixing: Mixing | None = None,
        mixing_warmup: int = 0,
        dispersion: Dispersion | None = None,
    ) -> None:
        super().__init__()
        self.online = encoder
        self.slow = None if key_encoder is None else key_encoder.copy_of(encoder)
        self.queue = queue
        self.loss, self.key_encoder, self.negatives = loss, key_encoder, negatives
        self.mixing, self.mixing_warmup = mixing, mixing_warmup
        self.dispersion = dispersion or None
        self.labels = negatives.oracle
        self.keys = 1 if key_encoder is None else key_encoder.keys
        self.views = 1 + self.keys
        self.directions = 2 if loss.symmetric or key_encoder is None else 1
        self.rank = rank()

    def forward(self, views: Sequence[Tensor], inputs: Inputs | None = None) -> StepOutput:
        inputs = inputs or {}
        # Encode the queries of each direction. Where an image has several equal ones, one of them stands for it.
        queries = self.queries(views)
        repeats = self.keys if self.loss.positives == "repeated" else 1
        embeddings = torch.stack([query[::repeats] for query in queries], dim=1)
        forces = {}
        if self.dispersion is not None:
            with on_side_stream(embeddings.device) as wait:  # many small products, while the slow copy fills the card
                forces = self.dispersion(embeddings, inputs)

        # MoCo's order: then the slow copy moves and encodes the keys, without gradient.
        keys = self.slow_keys(views, inputs)

        # Compare each query with its keys and its negatives.
        comparisons, entering = self.compare(queries, keys, inputs)

        # The loss of each direction, with the synthetic negatives of MoCHi among the others.
        how: dict[str, Any] = {
            "temperature": self.loss.temperature,
            "alpha": self.loss.alpha,
            "alpha_on": self.loss.alpha_on,
            "variance_weight": inputs.get("variance_weight", 0.0),
            "each": self.loss.positives == "each",
        }
        losses, mixed = [], []
        for query, positives, negatives, mask, rows, mixing_seed in comparisons:
            synthetic = None
            if self.mixing is not None and mixing_seed is not None:
                synthetic = synthesise(
                    query,
                    negatives,
                    self.mixing,
                    temperature=self.loss.temperature,
                    draw_seed=mixing_seed,
                    rows=rows,
                    key=self.negatives.mean_key(positives),
                    mask=mask,
                )
            extra_scores = None if synthetic is None else synthetic.scores
            with torch.autocast(query.device.type, enabled=False):
                losses.append(self.objective(query, positives, negatives, extra_scores=extra_scores, mask=mask, **how))
            mixed.append(synthetic)
        loss = torch.stack(losses).sum()

        # Signs of health, of the first direction. The oracle's negatives depend on the query: there is no bound.
        health = signs_of_health(comparisons[0], mixed[0], **how)
        if self.labels:
            del health["mutual_information_bound"]
        if self.queue is not None:
            health["queue_fill"] = self.queue.fill
        health["loss"] = loss.detach() / len(losses)
        if forces:
            wait()
            loss = torch.stack([loss, *forces.values()]).sum()
            health |= {name: value.detach() for name, value in {**forces, "total_loss": loss}.items()}

        # The keys enter the queue when the step is over (`finish`), so that no query meets its own key there.
        return StepOutput(loss, health, embeddings[:, 0].detach(), entering)

    def objective(self, query: Tensor, keys: Tensor, negatives: Tensor, **how: Any) -> Tensor:
        """Compute the mean loss of n queries. Arguments and settings as of `info_nce`; a subclass may override it."""
        return info_nce(query, keys, negatives, **how)

    def queries(self, views: Sequence[Tensor]) -> Sequence[Tensor]:
        """Encode the queries of each direction (N, D).

        Without a slow copy they are each other's keys, and both views go through in one forward pass, so in one set of
        batch statistics, as in SimCLR's released code."""
        first, second, *_ = views
        if self.loss.positives == "repeated":
            first = first.repeat_interleave(self.keys, dim=0)
        if self.directions == 2 and (self.key_encoder is None or self.key_encoder.at_once):
            return self.online(torch.cat([first, second])).chunk(2)
        return [self.online(view) for view in (first, second)[: self.directions]]

    def slow_keys(self, views: Sequence[Tensor], inputs: Inputs) -> Sequence[Tensor] | None:
        """Move the slow copy, and encode for each direction the keys (N, M, D) of the whole batch over all ranks.

        None without a slow copy. Of a batch in parts they are encoded once, and lie in the inputs."""
        if "keys" in inputs:
            return inputs["keys"].unbind()
        if self.slow is None or self.key_encoder is None:
            return None
        first, *rest = views
        return self.key_encoder(self.slow, self.online, [rest, [first]][: self.directions], inputs)

    def compare(
        self, queries: Sequence[Tensor], keys: Sequence[Tensor] | None, inputs: Inputs
    ) -> tuple[list[Comparison], dict[str, Tensor]]:
        """Give each direction's queries (n, D) their keys and negatives. keys: of `slow_keys`.

        Returns the comparisons, and what enters the queue: keys (N, D) and, with the oracle, their labels (N,)."""
        if keys is None:  # SimCLR: each view is the other's keys, and the gradient flows through both
            all_keys = [gather_with_gradient(query) for query in queries]
            batches, entering = [all_keys[::-1], all_keys], {}
        else:
            means = [self.negatives.mean_key(each) for each in keys]
            batches, entering = [[mean] for mean in means], {"keys": torch.cat(means)}
            if self.loss.positives == "repeated":
                keys = [each.flatten(0, 1)[:, None] for each in keys]
        labels = None
        if self.labels:
            labels = inputs["labels"], inputs["key_labels"] if "key_labels" in inputs else gather(inputs["labels"])
            if self.queue is not None:
                entering["labels"] = labels[1].repeat(self.directions)

        # The queries are this rank's part of the whole batch, or a part of that.
        count, place = len(queries[0]), inputs.get("place", self.rank)
        rows = place * count + torch.arange(count, device=queries[0].device)
        draw_seeds, mixing_seeds = inputs.get("draw_seed"), inputs.get("mixing_seed")
        comparisons = []
        for direction, query in enumerate(queries):
            draw_seed = None if draw_seeds is None else draw_seeds[direction]
            mixing_seed = None if mixing_seeds is None else mixing_seeds[direction]
            negatives, mask = self.negatives(rows, self.queue, batches[direction], labels=labels, draw_seed=draw_seed)
            own = queries[1 - direction][:, None] if keys is None else keys[direction][rows]
            comparisons.append(Comparison(query, own, negatives, mask, rows, mixing_seed))
        return comparisons, entering

    def finish(self, step: StepOutput) -> None:
        """Push the keys into the queue. (The backward pass has read it by now: no copy is needed.)"""
        if self.queue is not None:
            self.queue.push(step.keep["keys"], step.keep.get("labels"))

    def inputs(self, n: int, moment: Moment, generator: torch.Generator) -> dict[str, Tensor]:
        """Draw what a step needs: order (directions, N M), in which the keys are encoded; draw_seed (directions,),
        which decides what negatives are drawn; variance_weight: lambda now; key_momentum: now, where it changes;
        mixing_seed (directions,), which decides what is mixed; and what the dispersion needs."""
        given, encoder = {}, self.key_encoder
        if encoder is not None and encoder.shuffles:
            orders = [torch.randperm(n * self.keys, generator=generator) for _ in range(self.directions)]
            given["order"] = torch.stack(orders)
        if self.negatives.count is not None:
            given["draw_seed"] = torch.randint(2**62, (self.directions,), generator=generator)
        if self.loss.variance_weight:
            share = (moment.epoch + 1) / moment.epochs if self.loss.variance_ramp else 1.0
            given["variance_weight"] = torch.tensor(share * self.loss.variance_weight)
        if encoder is not None and encoder.schedule != "constant":
            momentum = momentum_at(moment.step, moment.steps, encoder.momentum, encoder.schedule)
            given["key_momentum"] = torch.tensor(momentum)
        if self.dispersion is not None:
            given |= self.dispersion.inputs(generator)
        if self.phase(moment):  # last, so that all else is drawn as without mixing
            given["mixing_seed"] = torch.randint(2**62, (self.directions,), generator=generator)
        return given

    def phase(self, moment: Moment) -> int:
        """Give 1 from the epoch on in which negatives are mixed, before it 0."""
        return int(self.mixing is not None and moment.epoch >= self.mixing_warmup)

    def split(self, parts: int) -> None:
        """Accept batches that come in so many parts. The keys, which take no gradient, are encoded for the whole batch
        in passes of their own."""
        assert self.slow is not None and self.key_encoder is not None
        batches = 1 + self.key_encoder.at_once
        refuse_shared_statistics(self.online, parts, batches=batches)
        split_groups(self.online, parts, batches=batches)
        self.key_encoder = self.key_encoder.split(self.slow, parts)
        self.parts = parts

    def of_the_whole(self, views: Sequence[Tensor], inputs: Inputs) -> dict[str, Tensor]:
        """Encode keys (directions, N, M, D), which each part of a batch needs; with the oracle also key_labels (N,)."""
        keys = self.slow_keys(views, inputs)
        assert keys is not None
        labels = {"key_labels": gather(inputs["labels"])} if self.labels else {}
        return {"keys": torch.stack(list(keys)), **labels}
