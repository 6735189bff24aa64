"""k-NN along the way, for those who have labels."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from unitsphere.common.distributed import any_rank, gather, mine, rank, world
from unitsphere.common.errors import UnitsphereError, UsageError
from unitsphere.data.images import evenly, refuse_multi_label
from unitsphere.data.loader import Loader
from unitsphere.features.inputs import usable_rows
from unitsphere.features.knn import knn
from unitsphere.methods.learners.learner import Learner
from unitsphere.training.prepare import Prepared

HELD_OUT_IMAGES = 2000
BANK_IMAGES = 20_000
ONLINE_K = 20


class OnlineKNN:
    """k-NN of the backbone as it is now: training images vote on held-out ones."""

    def __init__(self, prepared: Prepared) -> None:
        held_out, images = prepared.held_out(), prepared.images
        if held_out is None or held_out.labels is None or images.labels is None:
            raise UsageError("knn_every: online k-NN needs labelled training and held-out images; this data has none.")
        refuse_multi_label(images, "knn_every")
        known, judged = (np.flatnonzero(labels >= 0) for labels in (images.labels, held_out.labels))
        if not len(known) or not len(judged):
            raise UsageError("knn_every: none of the training images, or of those held out, has a label.")
        self.prepared = prepared
        self.bank, self.bank_labels = torch.from_numpy(known[evenly(len(known), BANK_IMAGES)]), images.labels
        queries = torch.from_numpy(judged[evenly(len(judged), HELD_OUT_IMAGES)])
        self.truth = held_out.labels[queries.numpy()]
        self.queries = held_out.subset(my_share(queries).numpy())
        self.query_loader: Loader | None = None

    def measure(self, loader: Loader, method: Learner) -> dict[str, float]:
        """loader: of the training images. Each rank makes its share of the features, and the first searches them."""
        failure: Exception | None = None
        try:
            self.query_loader = self.query_loader or self.prepared.loader(self.queries)
            known = self.prepared.features(method.backbone, loader, my_share(self.bank))
            asked = self.prepared.features(method.backbone, self.query_loader, torch.arange(len(self.queries)))
        except (UnitsphereError, torch.OutOfMemoryError) as error:
            failure = error
        (failed,) = any_rank(failure is not None)  # or the others would wait for the features of this one
        if failed:
            raise failure or UnitsphereError("another process could not make its share of the features.")
        known, asked = gather(known)[: len(self.bank)], gather(asked)[: len(self.truth)]
        if rank() > 0:
            return {}
        rows, asked_rows = usable_rows(known), usable_rows(asked)
        labels, truth = self.bank_labels[self.bank[rows].numpy()], self.truth[asked_rows.numpy()]
        k = min(ONLINE_K, len(rows))
        return {"knn": knn(known[rows], labels, asked[asked_rows], truth, k=[k], device=self.prepared.device)[k]}


def my_share(indices: Tensor) -> Tensor:
    """This rank's share of some indices. All shares are as long: the last is filled up from the beginning."""
    share = math.ceil(len(indices) / world())
    return mine(indices[torch.arange(share * world()) % len(indices)])
