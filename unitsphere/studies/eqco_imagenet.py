"""EqCo's tables on ImageNet (Zhu et al., arXiv 2010.01929): a linear classifier on ResNet-50, 200 epochs.

Its settings are those of the papers that it studies. Where its text leaves one out, its author's released
configuration says it: residual branches begin at zero in MoCo v2, SiMo and SimCLR alike.
"""

from __future__ import annotations

from unitsphere.studies.claims import ROUNDING, above, no_worse
from unitsphere.studies.eqco import PAPER
from unitsphere.studies.pretraining import Pretraining
from unitsphere.studies.study import Cell, Claim, Study, Table

LINEAR = {"protocol": "linear", "recipe": "moco", "augment": True}
QUANTITY = "ImageNet top-1 of a linear classifier, %"
LOOKED_AT = [50, 100, 150]  # Fig. 2 measures checkpoints of the plain run with the whole queue
WORDS = {
    "epochs": "all models are trained on ImageNet for 200 epochs (2.3)",
    "backbone": "We use ResNet-50 as the default network architecture (2.3)",
    "dim": "128-d features are employed for query and key embeddings (2.3)",
    "batch_size": "The number of queries per batch (N) is set to 256 by default (2.3)",
    "bn_groups": "All models are trained with 8 GPUs (2.3); in SiMo we use sync BN (3)",
    "base_lr": "We follow most of the training and evaluation settings recommended in the original papers (2.3)",
    "optimizer": "for SimCLR, we adopt SGD with momentum rather than LARS (2.3)",
    "negatives": "if K < N, the memory bank is composed of K random keys sampled from the previous batch; for SimCLR "
    "K are sampled for each query independently (2.3)",
    "head": "in SiMo we use a BN attached to each of the fully-connected layers (3)",
    "warmup_epochs": "in SiMo we introduce a warm-up stage at the beginning of the training (3)",
}


def judged(method: str, **fields: object) -> Pretraining:
    own = {"epochs": 200, "base_lr": 0.03, "zero_init_residual": True, "keep_epochs": LOOKED_AT, **fields}
    return Pretraining(base={"method": method, "data": "imagenet", **own}, protocol=LINEAR, read="top1")


def needs(runs: int, epochs: int = 200) -> str:
    return f"ImageNet and GPUs: {runs} runs of {epochs} epochs, ResNet-50"


def spread(table: Table) -> tuple[float, str]:
    """How far the values lie apart."""
    values = [value for _, value in table]
    return max(values) - min(values), f"they lie between {min(values):.1f} and {max(values):.1f}"


def within_half(table: Table) -> tuple[float, str]:
    width, evidence = spread(table)
    return 0.5 - width + ROUNDING, evidence


TABLE_1 = Study(
    id="eqco/table-1",
    title="MoCo v2 with more queries in a batch, the learning rate scaled with them",
    paper=PAPER,
    needs=needs(3),
    quantity=QUANTITY,
    columns="n",
    runner=judged("moco-v2"),
    cells=tuple(Cell({"n": n}, paper, {"batch_size": n}) for n, paper in ((256, 67.5), (512, 67.5), (1024, 67.4))),
    claims=(Claim("the accuracies lie within 0.5 of each other", within_half, "0.5"),),
    words=WORDS,
)

SIMO_ROWS = (  # epochs, K, alpha, top-1
    (200, 16, 256, 68.1),
    (200, 256, 256, 68.0),
    (200, 256, 65536, 68.5),
    (800, 256, 256, 71.8),
    (800, 256, 65536, 72.1),
)


def simo(epochs: int, k: int, alpha: int) -> dict[str, object]:
    return {"method": "SiMo", "k": k, "alpha": alpha, "epochs": epochs}


def moco(epochs: int) -> dict[str, object]:
    return {"method": "MoCo v2", "epochs": epochs}


TABLE_2 = Study(
    id="eqco/table-2",
    title="SiMo beside MoCo v2 (the rows of other methods are not ours to run)",
    paper=PAPER,
    needs="ImageNet and GPUs: 4 runs of 200 and 3 of 800 epochs, ResNet-50",
    quantity=QUANTITY,
    columns="epochs",
    runner=judged("simo"),
    cells=(
        *(Cell(moco(e), paper, {"method": "moco-v2", "epochs": e}) for e, paper in ((200, 67.5), (800, 71.1))),
        *(
            # the released code draws K once for all queries
            Cell(simo(e, k, alpha), paper, {"negatives": k, "shared_draw": k < 256, "alpha": alpha, "epochs": e})
            for e, k, alpha, paper in SIMO_ROWS
        ),
    ),
    claims=(
        above("SiMo with 16 negatives outperforms MoCo v2", simo(200, 16, 256), moco(200)),
        above("alpha 65536 increases its accuracy", simo(200, 256, 65536), simo(200, 256, 256)),
        above("after 800 epochs it surpasses MoCo v2", simo(800, 256, 65536), moco(800)),
    ),
    words=WORDS,
)

TABLE_3 = Study(
    id="eqco/table-3",
    title="SiMo with different alpha",
    paper=PAPER,
    needs=needs(5),
    quantity=QUANTITY,
    columns="alpha",
    runner=judged("simo"),
    cells=tuple(
        Cell({"alpha": alpha}, paper)
        for alpha, paper in ((256, 68.0), (1024, 68.1), (4096, 68.1), (16384, 68.4), (65536, 68.5))
    ),
    claims=(above("accuracy improves from alpha 256 to 65536", {"alpha": 65536}, {"alpha": 256}),),
    words=WORDS,
)

TABLE_4_NUMBERS = {256: 67.0, 1024: 67.1, 4096: 67.6, 16384: 67.3, 65536: 67.5}
TABLE_4 = Study(
    id="eqco/table-4",
    title="MoCo v2 with different K",
    paper=PAPER,
    needs=needs(5),
    quantity=QUANTITY,
    columns="k",
    runner=judged("moco-v2"),
    cells=tuple(Cell({"k": k}, paper, {"queue_size": k}) for k, paper in TABLE_4_NUMBERS.items()),
    # The paper's text says that accuracy "descends"; its numbers rise.
    claims=(no_worse("K = 65536 is no worse than K = 256", {"k": 65536}, {"k": 256}),),
    words=WORDS,
)

TABLE_6 = Study(
    id="eqco/table-6",
    title="SiMo with and without a slow copy",
    paper=PAPER,
    needs=needs(2, 100),
    quantity=QUANTITY,
    columns="momentum",
    runner=judged("simo", epochs=100),
    cells=tuple(Cell({"momentum": m}, paper, {"key_momentum": m}) for m, paper in ((0.0, 62.1), (0.999, 64.4))),
    claims=(above("the slow copy is better", {"momentum": 0.999}, {"momentum": 0.0}),),
    words=WORDS,
)

TABLE_7 = Study(
    id="eqco/table-7",
    title="SiMo with shuffled and with synchronised batch norm",
    paper=PAPER,
    needs=needs(2, 100),
    quantity=QUANTITY,
    columns="norm",
    runner=judged("simo", epochs=100),
    cells=(
        Cell({"norm": "shuffled"}, 58.8, {"bn_groups": 8}),
        Cell({"norm": "synchronised"}, 64.4, {"bn_groups": 1}),
    ),
    claims=(above("synchronised batch norm is better", {"norm": "synchronised"}, {"norm": "shuffled"}),),
    words=WORDS,
)

# Table 8, with the rows of Table 2 that its text compares it with. ResNet-50 in every layer so many times as wide.
WIDER = {
    "ResNet-50": ("resnet50", (68.0, 68.5)),
    "ResNet-50 (2x)": ("resnet50x2", (70.2, 70.5)),
    "ResNet-50 (4x)": ("resnet50x4", (71.9, 72.3)),
}


def wide(architecture: str) -> dict[str, object]:
    return {"architecture": architecture, "alpha": 65536}


TABLE_8 = Study(
    id="eqco/table-8",
    title="SiMo with wider networks",
    paper=PAPER,
    needs="ImageNet and GPUs: 6 runs of 200 epochs, ResNet-50, twice and four times as wide",
    quantity=QUANTITY,
    columns="alpha",
    runner=judged("simo"),
    cells=tuple(
        Cell({"architecture": name, "alpha": alpha}, paper, {"backbone": backbone, "alpha": alpha})
        for name, (backbone, papers) in WIDER.items()
        for alpha, paper in zip((256, 65536), papers, strict=True)
    ),
    claims=(
        above("twice the width is better", wide("ResNet-50 (2x)"), wide("ResNet-50")),
        above("four times the width is better still", wide("ResNet-50 (4x)"), wide("ResNet-50 (2x)")),
    ),
    words=WORDS,
)

STUDIES = (TABLE_1, TABLE_2, TABLE_3, TABLE_4, TABLE_6, TABLE_7, TABLE_8)
