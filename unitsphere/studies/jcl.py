"""JCL on ImageNet-100 (Cai et al., supplement): the ablations of Fig. M.2, the likeness of Fig. M.3, memory.

Only the supplement is at hand. It says what is held fixed (M' 5, lambda 4, tau 0.2; ResNet-18, 100 epochs at 0.1 with
batches of 128), and neither the values on the axes nor any result: the grids are ours, and the claims say only that
what the authors fixed is no worse than the ends of each axis. Whether lambda is ramped is not stated either: it is, as
in the released code.

Fig. M.3 compares Fig. M.2a's runs with 1 key, which is MoCo v2, and with 9; `unitsphere analyse --what similarity`
draws its histograms. Section 2 has no table: at equal memory the vanilla form has one key (its batch is as many times
as large as it has keys), and for equal accuracy it takes more memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from unitsphere.studies.claims import above, no_worse
from unitsphere.studies.pretraining import Pretraining
from unitsphere.studies.study import Cell, Claim, Study, Table

PAPER = "JCL, Cai et al., NeurIPS 2020, supplement"
QUANTITY = "ImageNet-100 top-1 of a linear classifier, %"
WORDS = {
    "backbone": "we adopt ResNet-18 as the backbone (4)",
    "epochs": "all models are trained for 100 epochs with a batch size of N = 128 (4)",
    "base_lr": "The learning rate is set to lr = 0.1 and is gradually annealed following a cosine decay schedule (4)",
    "queue_size": "the queue size is 65,536 (3)",
    "key_momentum": "The momentum value for updating the key encoder is 0.999 (3)",
    "weight_decay": "SGD with 0.9 momentum and 0.0001 weight decay (3)",
    "keys": "number of positive keys 5 (Table 1); 9 for the visualisation (5)",
    "variance_weight": "strength of augmentation 4.0 (Table 1)",
    "temperature": "temperature for softmax 0.2 (Table 1)",
    "views": "in the same way as in MoCo v2 (3)",
    "evaluate.lr": "trained for 100 epochs with a learning rate of lr = 10.0, decreased by 0.1 at 60th and 80th (4)",
    "evaluate.batch_size": "and the batch size is N = 256 (4)",
    "evaluate.images": "we sample 32,768 images (5)",
    "evaluate.augmentations": "we randomly generate 32 augmented images (5)",
}
LINEAR = {"protocol": "linear", "recipe": "jcl-imagenet100", "augment": True}
BASE = {"method": "jcl", "data": "imagenet100"}  # the recipe is that of these ablations
RUNNER = Pretraining(base=BASE, protocol=LINEAR, read="top1")
NEEDS = "ImageNet and a GPU: {} runs of 100 epochs on 100 classes, ResNet-18"


def ablation(letter: str, title: str, columns: str, cells: Sequence[Cell], claims: Sequence[Claim]) -> Study:
    return Study(
        id=f"jcl/figure-2{letter}",
        title=title,
        paper=PAPER,
        needs=NEEDS.format(len(cells)),
        quantity=QUANTITY,
        columns=columns,
        runner=RUNNER,
        cells=tuple(cells),
        claims=tuple(claims),
        over=columns,
        words=WORDS,
    )


def of_jcl(keys: int) -> dict[str, object]:
    return {"method": "JCL", "keys": keys}


FIGURE_2A = ablation(
    "a",
    "JCL with different numbers of keys M', beside the vanilla form with as many (M' = 1 is MoCo v2)",
    "keys",
    [
        *(Cell(of_jcl(keys), None, {"keys": keys}) for keys in (1, 2, 3, 5, 7, 9)),
        *(
            Cell({"method": "vanilla", "keys": keys}, None, {"method": "jcl-vanilla", "keys": keys})
            for keys in (2, 3, 5, 7, 9)
        ),
    ],
    [
        no_worse("5 keys are no worse than one (MoCo v2)", of_jcl(5), of_jcl(1)),
        no_worse("9 keys are no worse than 2", of_jcl(9), of_jcl(2)),
        # Not the supplement's comparison, whose vanilla form is a batch so many times as large: jcl/memory has that.
        no_worse("JCL with 5 keys is no worse than vanilla with 5", of_jcl(5), {"method": "vanilla", "keys": 5}),
    ],
)

FIGURE_2B = ablation(
    "b",
    "JCL with different weights lambda of the variance, 5 keys",
    "lambda",
    [Cell({"lambda": weight}, None, {"variance_weight": weight}) for weight in (0.0, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0)],
    [
        no_worse("lambda 4 is no worse than none", {"lambda": 4.0}, {"lambda": 0.0}),
        no_worse("lambda 4 is no worse than 10", {"lambda": 4.0}, {"lambda": 10.0}),
    ],
)

FIGURE_2C = ablation(
    "c",
    "JCL at different temperatures, 5 keys",
    "tau",
    [Cell({"tau": tau}, None, {"temperature": tau}) for tau in (0.05, 0.1, 0.15, 0.2, 0.3, 0.5)],
    [
        no_worse("tau 0.2 is no worse than 0.05", {"tau": 0.2}, {"tau": 0.05}),
        no_worse("tau 0.2 is no worse than 0.5", {"tau": 0.2}, {"tau": 0.5}),
    ],
)


def likeness(method: str, what: str) -> dict[str, object]:
    return {"method": method, "what": what}


SIMILARITY, VARIANCE = "similarity", "variance"
FIGURE_3 = Study(
    id="jcl/figure-3",
    title="how alike the features of an image's augmentations are: JCL with 9 keys beside MoCo v2",
    paper=PAPER,
    needs=NEEDS.format(2),
    quantity="the mean over images: of the cosines of 32 x 32 pairs, and of the variance of a feature",
    columns="what",
    runner=Pretraining(
        base=BASE, protocol={"protocol": "similarity", "images": 32_768, "augmentations": 32}, read="similarity.mean"
    ),
    cells=tuple(
        Cell(likeness(name, what), None, {"keys": keys, "evaluate.read": f"{what}.mean"})
        for name, keys in (("MoCo v2", 1), ("JCL", 9))
        for what in (SIMILARITY, VARIANCE)
    ),
    claims=(
        above("an image's features are more alike", likeness("JCL", SIMILARITY), likeness("MoCo v2", SIMILARITY)),
        above("their variance is smaller", likeness("MoCo v2", VARIANCE), likeness("JCL", VARIANCE)),
    ),
    words=WORDS,
)  # fmt: skip

ACCURACY, MEMORY = "top-1", "memory"
LITERAL = "vanilla as a batch so many times as large"
FORMS: dict[tuple[str, int], dict[str, object]] = {
    ("vanilla", 1): {"keys": 1},  # MoCo v2
    **{(LITERAL, keys): {"method": "jcl-vanilla", "keys": keys, "positives": "repeated"} for keys in (2, 3, 5)},
    **{("JCL", keys): {"keys": keys} for keys in (2, 5, 9)},
}


def in_memory(form: tuple[str, int], what: str) -> dict[str, object]:
    return {"method": form[0], "keys": form[1], "what": what}


def cheaper(table: Table) -> tuple[float, str]:
    """JCL with 5 keys beside the vanilla form that is as accurate and takes least; without one, beside the most
    accurate."""
    accuracy, memory = ({form: table.row(**in_memory(form, what))[0] for form in FORMS} for what in (ACCURACY, MEMORY))
    jcl = ("JCL", 5)
    vanilla = [form for form in FORMS if form[0] != "JCL"]
    equal = [form for form in vanilla if accuracy[form] >= accuracy[jcl]]
    beside = min(equal, key=lambda form: memory[form]) if equal else max(vanilla, key=lambda form: accuracy[form])
    told = "" if equal else ", and none is as accurate"
    return memory[beside] - memory[jcl], f"{memory[jcl]:.0f} MiB; vanilla with {beside[1]} {memory[beside]:.0f}{told}"


MEMORIES = Study(
    id="jcl/memory",
    title="JCL beside the vanilla form as its supplement counts it: accuracy and the memory that it takes",
    paper=f"{PAPER}, section 2",
    needs=NEEDS.format(len(FORMS)) + "; memory is measured on a card alone",
    quantity="ImageNet-100 top-1 of a linear classifier, %; the most memory of the run, MiB",
    columns="what",
    runner=Pretraining(base=BASE, protocol={}, read="top1"),
    cells=tuple(
        Cell(in_memory(form, what), None, {**fields, **judging})
        for form, fields in FORMS.items()
        for what, judging in (
            (ACCURACY, {**{f"evaluate.{name}": value for name, value in LINEAR.items()}, "evaluate.read": "top1"}),
            (MEMORY, {"evaluate.protocol": "training", "evaluate.read": "memory_mib"}),
        )
    ),
    claims=(
        above(
            "at similar memory, where vanilla has one key, JCL with 5 is better",
            in_memory(("JCL", 5), ACCURACY),
            in_memory(("vanilla", 1), ACCURACY),
        ),
        Claim("when they achieve the same performance JCL takes less memory", cheaper),
        above(
            "with as many keys vanilla takes more memory",
            in_memory((LITERAL, 5), MEMORY),
            in_memory(("JCL", 5), MEMORY),
        ),
    ),
    words=WORDS,
)

STUDIES = (FIGURE_2A, FIGURE_2B, FIGURE_2C, FIGURE_3, MEMORIES)
