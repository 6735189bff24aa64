"""The contrastive family: a query, its keys, and a set of negatives.

Where the keys come from (a slow copy or the network itself), how many there are, where the negatives come from (a
queue or the batch), how many of them a query meets: each is one part, and they combine. MoCo is a slow copy and a
queue; SiMo a slow copy and the batch; SimCLR the network itself and the batch; EqCo is alpha; JCL is several keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from unitsphere.common.devices import on_side_stream
from unitsphere.common.distributed import gather, gather_with_gradient, mine, world
from unitsphere.methods.learners.comparison import HEALTH_QUERIES, Comparison, drawn, rows_of, signs_of_health
from unitsphere.methods.learners.dispersion import Dispersion
from unitsphere.methods.learners.learner import Inputs, Learner, Moment, StepOutput
from unitsphere.modules.encoder import Encoder
from unitsphere.modules.norms import groups_of, one_by_one, refuse_shared_statistics, split_groups
from unitsphere.modules.queue import KeyQueue
from unitsphere.modules.slow_copy import follow, momentum_at, slow_copy
from unitsphere.objectives import info_nce
from unitsphere.objectives.mixing import Mixing, Synthetic, synthesise


class ContrastiveLearner(Learner):
    """One step of the family; `methods/build.py` has the named points.

    encoder: images to unit vectors. key_momentum: how slowly the key encoder follows, with the cosine schedule ever
    more so; None: the network encodes the keys itself, with gradient (SimCLR). queue: where negatives wait; None: they
    are the keys of the other images of the batch, over all ranks. negatives: how many of those at hand a query meets,
    drawn for each query, or with shared_draw once a step for all; None: all. both_views: in-batch negatives are of
    both views (2N - 2) and not of the key's alone (N - 1). dispersion: forces that spread the queries.
    keys: M', keys of an image. variance_weight: JCL's lambda, with ramp growing to its full value over the run.
    positives: joint (JCL's limit of infinitely many), each (the mean of a term for each key), or repeated (the same as
    an M' times larger batch, as JCL's supplement reckons its memory). key_chunks: passes in which keys are encoded.
    symmetric: each view is query once and key once, and the two losses add.
    bn_groups: over how many parts of the batch the norms inside are computed; with more than one the keys are encoded
    in permuted order, so that a query and its key do not share batch statistics (ShuffleBN). together: the norms have
    twice as many groups, so both directions go through the networks in one pass, which is the quicker.
    mixing: MoCHi's synthetic negatives, from epoch mixing_warmup on. oracle: negatives of the query's own class, which
    only labels can tell, do not count.
    """

    def __init__(
        self,
        encoder: Encoder,
        *,
        temperature: float,
        key_momentum: float | None,
        queue: KeyQueue | None = None,
        negatives: int | None = None,
        shared_draw: bool = False,
        both_views: bool = False,
        alpha: float | None = None,
        alpha_on: str = "all",
        keys: int = 1,
        variance_weight: float = 0.0,
        ramp: bool = False,
        normalise_mean: bool = False,
        positives: str = "joint",
        key_chunks: int = 1,
        symmetric: bool = False,
        bn_groups: int = 1,
        together: bool = False,
        momentum_schedule: str = "constant",
        dispersion: Dispersion | None = None,
        mixing: Mixing | None = None,
        mixing_warmup: int = 0,
        oracle: bool = False,
    ) -> None:
        super().__init__()
        self.online = encoder
        self.slow = None if key_momentum is None else slow_copy(encoder)
        if self.slow is not None and key_chunks > 1:
            split_groups(self.slow, key_chunks, batches=2 if together else 1)
        self.queue = queue
        self.temperature, self.alpha, self.alpha_on = temperature, alpha, alpha_on
        self.key_momentum, self.momentum_schedule = key_momentum, momentum_schedule
        self.dispersion = dispersion or Dispersion()
        self.drawn, self.shared_draw, self.both_views = negatives, shared_draw, both_views
        self.keys, self.variance_weight, self.ramp, self.normalise_mean = keys, variance_weight, ramp, normalise_mean
        self.positives, self.key_chunks = positives, key_chunks
        self.symmetric = symmetric
        self.bn_groups, self.together = bn_groups, together
        self.mixing, self.mixing_warmup = mixing, mixing_warmup
        self.labels = oracle
        self.views = 1 + keys

    @property
    def shuffles(self) -> bool:
        return self.bn_groups > 1 and self.slow is not None

    def inputs(self, n: int, moment: Moment, generator: torch.Generator) -> dict[str, Tensor]:
        """order (directions, N M): in which order the keys are encoded; lot (directions,): decides which negatives are
        drawn; variance_weight: lambda now; mixing (directions,): decides what is mixed."""
        directions, given = 2 if self.symmetric or self.slow is None else 1, {}
        if self.shuffles:
            given["order"] = torch.stack(
                [torch.randperm(n * self.keys, generator=generator) for _ in range(directions)]
            )
        if self.drawn is not None:
            given["lot"] = torch.randint(2**62, (directions,), generator=generator)
        if self.variance_weight:
            share = (moment.epoch + 1) / moment.epochs if self.ramp else 1.0
            given["variance_weight"] = torch.tensor(share * self.variance_weight)
        if self.key_momentum is not None and self.momentum_schedule != "constant":
            momentum = momentum_at(moment.step, moment.steps, self.key_momentum, self.momentum_schedule)
            given["key_momentum"] = torch.tensor(momentum)
        given |= self.dispersion.inputs(generator)
        if self.phase(moment):  # last, so that all else is drawn as without mixing
            given["mixing"] = torch.randint(2**62, (directions,), generator=generator)
        return given

    def phase(self, moment: Moment) -> int:
        """1 from the epoch on in which negatives are mixed."""
        return int(self.mixing is not None and moment.epoch >= self.mixing_warmup)

    def split(self, parts: int) -> None:
        """The keys, which take no gradient, are encoded for the whole batch in passes of their own, as large as a part
        where the groups allow it."""
        assert self.slow is not None
        batches = 2 if self.together else 1
        refuse_shared_statistics(self.online, parts, batches=batches)
        split_groups(self.online, parts, batches=batches)
        passes = math.gcd(parts, *(groups // batches for groups in groups_of(self.slow)))
        split_groups(self.slow, passes, batches=batches)
        self.key_chunks *= passes
        self.parts = parts

    def of_the_whole(self, views: Sequence[Tensor], inputs: Inputs) -> dict[str, Tensor]:
        """keys (directions, N, M, D); key_labels (N,), with the oracle."""
        labels = {"key_labels": gather(inputs["labels"])} if self.labels else {}
        return {"keys": torch.stack(self.slow_keys(views, inputs)), **labels}

    def forward(self, views: Sequence[Tensor], inputs: Inputs | None = None) -> StepOutput:
        inputs = inputs or {}
        queries = self.queries(views)
        once = slice(None, None, self.keys if self.positives == "repeated" else 1)  # of repeated queries one each
        embeddings = torch.stack([query[once] for query in queries], dim=1)
        with on_side_stream(embeddings.device) as wait:  # many small products, while the slow copy fills the card
            forces = self.dispersion(embeddings, inputs)
        comparisons, entering = self.compare(queries, views, inputs)
        mixed = [self.mixed(comparison) for comparison in comparisons]
        losses = [self.loss(each, inputs, synthetic) for each, synthetic in zip(comparisons, mixed, strict=True)]
        loss = torch.stack(losses).sum()
        health = self.health(comparisons[0], inputs, mixed[0])
        health["loss"] = loss.detach() / len(losses)
        wait()
        if forces:
            loss = torch.stack([loss, *forces.values()]).sum()
            health |= {name: value.detach() for name, value in {**forces, "total_loss": loss}.items()}
        return StepOutput(loss, health, embeddings[:, 0].detach(), {"keys": entering} | self.labels_of(inputs))

    def queries(self, views: Sequence[Tensor]) -> Sequence[Tensor]:
        """The queries of each direction (N, D); without a slow copy they are each other's keys. SimCLR: both views in
        one forward pass, so in one set of batch statistics, as in its released code."""
        if self.slow is None:
            return self.online(torch.cat(list(views))).chunk(2)
        first, second, *_ = views
        if self.positives == "repeated":
            first = first.repeat_interleave(self.keys, dim=0)
        return self.encode(self.online, [first, second] if self.symmetric else [first])

    def compare(
        self, queries: Sequence[Tensor], views: Sequence[Tensor], inputs: Inputs
    ) -> tuple[list[Comparison], Tensor]:
        """What each direction's queries meet, and the keys (N, D) that enter the queue when the step is over, so that
        no query meets its own key there."""
        if self.slow is None:
            return self.compare_views(queries, inputs), torch.empty(0)
        return self.compare_with_slow_keys(queries, views, inputs)

    def mixed(self, comparison: Comparison) -> Synthetic | None:
        """The synthetic negatives of each query, or None while there are none."""
        if self.mixing is None or comparison.lot is None:
            return None
        return synthesise(
            comparison.query,
            comparison.negatives,
            self.mixing,
            temperature=self.temperature,
            lot=comparison.lot,
            rows=comparison.rows,
            key=self.mean_key(comparison.keys),
            allowed=comparison.allowed,
        )

    def loss(self, comparison: Comparison, inputs: Inputs, mixed: Synthetic | None = None) -> Tensor:
        return info_nce(
            comparison.query,
            comparison.keys,
            comparison.negatives,
            temperature=self.temperature,
            alpha=self.alpha,
            alpha_on=self.alpha_on,
            variance_weight=inputs.get("variance_weight", 0.0),
            extra_scores=None if mixed is None else mixed.scores,
            mask=comparison.allowed,
            each=self.positives == "each",
        )

    def compare_with_slow_keys(
        self, queries: Sequence[Tensor], views: Sequence[Tensor], inputs: Inputs
    ) -> tuple[list[Comparison], Tensor]:
        """MoCo's order: after the queries' forward, without gradient, the slow copy moves and encodes the keys."""
        keys = inputs["keys"] if "keys" in inputs else self.slow_keys(views, inputs)
        means = [self.mean_key(each) for each in keys]
        comparisons = []
        for direction, (query, key, mean) in enumerate(zip(queries, keys, means, strict=True)):
            negatives = mean if self.queue is None else self.queue.keys
            if self.positives == "repeated":
                key = key.flatten(0, 1)[:, None]
            rows = rows_of(query, inputs)
            allowed = self.allowed(rows, negatives, inputs, direction)
            comparisons.append(Comparison(query, key[rows], negatives, allowed, rows, self.lot(inputs, direction)))
        return comparisons, torch.cat(means)

    @torch.no_grad()
    def slow_keys(self, views: Sequence[Tensor], inputs: Inputs) -> list[Tensor]:
        """The slow copy moves and encodes the keys: for each direction (N, M, D), as `encode_keys`."""
        assert self.slow is not None and self.key_momentum is not None
        follow(self.slow, self.online, inputs.get("key_momentum", self.key_momentum))
        first, *rest = views
        return self.encode_keys([rest, [first]] if self.symmetric else [rest], inputs.get("order"))

    def compare_views(self, queries: Sequence[Tensor], inputs: Inputs) -> list[Comparison]:
        """SimCLR: each view is query once and key once, and the gradient flows through both."""
        first, second = queries
        all_first, all_second = gather_with_gradient(first), gather_with_gradient(second)
        comparisons = []
        for direction, (query, key, own, other) in enumerate(
            ((first, second, all_first, all_second), (second, first, all_second, all_first))
        ):
            negatives = torch.cat([other, own]) if self.both_views else other
            rows = rows_of(query, inputs)
            allowed = self.allowed(rows, negatives, inputs, direction)
            comparisons.append(Comparison(query, key[:, None], negatives, allowed, rows, self.lot(inputs, direction)))
        return comparisons

    def encode(self, network: nn.Module, batches: Sequence[Tensor]) -> Sequence[Tensor]:
        """Each batch through the network: one by one, or together where the norms keep their groups apart."""
        if self.together and len(batches) > 1:
            return network(torch.cat(list(batches))).chunk(len(batches))
        return [network(batch) for batch in batches]

    def encode_keys(self, answered: Sequence[Sequence[Tensor]], order: Tensor | None) -> list[Tensor]:
        """For each direction (N, M, D): the keys of the whole batch over all ranks. answered: for each direction M
        views (n, C, H, W) of this rank's images.

        Images are taken in order i, then m, so that gathering ranks gives what one rank would have. With an order
        each rank encodes its part of the permuted batch, and the keys are put back."""
        assert self.slow is not None
        orders = [None] * len(answered) if order is None else order.unbind()
        passes = list(zip(*map(self.key_passes, answered, orders), strict=True))
        encoded = [
            self.encode(self.slow, [images_at(*images) for images in each]) for each in one_by_one(self.slow, passes)
        ]
        keys = [gather(torch.cat(parts)) for parts in zip(*encoded, strict=True)]
        if order is not None:
            keys = [part[torch.argsort(places)] for part, places in zip(keys, order, strict=True)]
        return [part.unflatten(0, (-1, self.keys)) for part in keys]

    def key_passes(self, views: Sequence[Tensor], order: Tensor | None) -> list[tuple[Sequence[Tensor], Tensor | None]]:
        """For each pass of this rank's keys what `images_at` makes its images of, so that no copy of them all is held.
        Only of several ranks, each of which may need any image, all of a rank's are copied."""
        if order is not None and world() > 1:
            views, order = [images_at(views, mine(order), of_all_ranks=True)], None
        if order is None:
            if len(views) == 1:
                return [([part], None) for part in views[0].chunk(self.key_chunks)]
            order = torch.arange(len(views) * len(views[0]), device=views[0].device)
        return [(views, places) for places in order.chunk(self.key_chunks)]

    def mean_key(self, keys: Tensor) -> Tensor:
        """(N, D): what stands for an image among the negatives. JCL's mean is not normalised again unless asked."""
        if keys.shape[1] == 1:
            return keys[:, 0]
        mean = keys.mean(dim=1)
        return nn.functional.normalize(mean, dim=1) if self.normalise_mean else mean

    def allowed(self, rows: Tensor, negatives: Tensor, inputs: Inputs, direction: int) -> Tensor | None:
        """(n, K): which negatives count for each of this rank's queries; rows (n,): their numbers in the batch. Of the
        batch never the image's own; with the oracle none of its class; and of those left only the drawn ones."""
        candidates = at_hand = len(negatives)
        allowed = None
        if self.queue is None:
            views = 2 if self.both_views else 1
            allowed = torch.arange(candidates, device=rows.device) % (candidates // views) != rows[:, None]
            at_hand -= views
        if self.labels:
            labels = inputs["labels"].repeat_interleave(len(rows) // len(inputs["labels"]))  # of repeated queries too
            others = self.labels_of_negatives(inputs, candidates) != labels[:, None]
            allowed = others if allowed is None else allowed & others
        if self.drawn is None or self.drawn >= at_hand:
            return allowed
        return drawn(inputs["lot"][direction], rows, self.drawn, candidates, allowed, self.shared_draw)

    def labels_of_negatives(self, inputs: Inputs, candidates: int) -> Tensor:
        """(K,): the classes of the negatives, in the queue or in the batch over all ranks."""
        if self.queue is not None:
            return self.queue.labels
        labels = gather(inputs["labels"])
        return labels.repeat(candidates // len(labels))

    def labels_of(self, inputs: Inputs) -> dict[str, Tensor]:
        """The classes that enter the queue with the keys."""
        if not self.labels or self.queue is None:
            return {}
        labels = inputs["key_labels"] if "key_labels" in inputs else gather(inputs["labels"])
        return {"labels": labels.repeat(2 if self.symmetric else 1)}

    def lot(self, inputs: Inputs, direction: int) -> Tensor | None:
        """What decides the mixtures, while there are any."""
        return inputs["mixing"][direction] if "mixing" in inputs else None

    def finish(self, step: StepOutput) -> None:
        """The keys enter the queue. (The backward pass has read it by now: no copy needed.)"""
        if self.queue is not None:
            self.queue.push(step.keep["keys"], step.keep.get("labels"))

    def health(self, comparison: Comparison, inputs: Inputs, mixed: Synthetic | None = None) -> dict[str, Tensor]:
        signs = signs_of_health(
            comparison.first(HEALTH_QUERIES),
            lambda few: self.loss(few, inputs),
            mixed,
            temperature=self.temperature,
            alpha=self.alpha,
            alpha_on=self.alpha_on,
        )
        if self.labels:  # the oracle's negatives depend on the query: no bound
            del signs["mutual_information_bound"]
        return signs if self.queue is None else signs | {"queue_fill": self.queue.fill}


def images_at(views: Sequence[Tensor], places: Tensor | None, *, of_all_ranks: bool = False) -> Tensor:
    """(P, C, H, W): the images at places (P,) among N M of them, in order i, then m. views: M views (N, C, H, W), or
    this rank's part of them. Without places: all of a single view.

    Of several views each is written to the rows that it has in the result, and what has none to one row more, which is
    left out: shapes do not depend on the places, and nothing else is copied."""
    first = views[0]
    if places is None:
        return first
    if len(views) == 1:
        return (gather(first) if of_all_ranks else first)[places]
    size, total = len(places), len(views) * len(first) * (world() if of_all_ranks else 1)
    rows = torch.full((total,), size, device=places.device)
    rows[places] = torch.arange(size, device=places.device)
    channels_last = first.is_contiguous(memory_format=torch.channels_last) and not first.is_contiguous()
    images = torch.empty(
        (size + 1, *first.shape[1:]),
        dtype=first.dtype,
        device=first.device,
        memory_format=torch.channels_last if channels_last else torch.contiguous_format,
    )
    for m, view in enumerate(views):
        images.index_copy_(0, rows[m :: len(views)], gather(view) if of_all_ranks else view)
    return images[:-1]
