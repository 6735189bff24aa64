"""MoCHi's claims on CIFAR-10 with a ResNet-18: a grid of ours."""

from __future__ import annotations

from unitsphere.studies.cifar10 import ACCURACIES, EPOCHS, HARMLESS, QUANTITY, cells, judged, needs
from unitsphere.studies.claims import above
from unitsphere.studies.mochi import BEST, Mix, mixing, place
from unitsphere.studies.study import Cell, Claim, Study

HALF = EPOCHS // 2
WARM_UP = max(1, EPOCHS // 20)  # as much of the run as the paper's 10 epochs are of 200
MIXES: tuple[Mix, ...] = (BEST, (1024, 128, 256), (1024, 0, 512), (64, 64, 0))
# Beyond accuracy: how fast it learns, what else it is good for, how evenly it spreads images (Fig. 3c), and the proxy
# task (Fig. 2b).
UNIFORMITY: dict[str, object] = {
    "evaluate.protocol": "geometry",
    "evaluate.positives": "class",
    "evaluate.read": "uniformity",
}
# Transfer, as far as it can be had without more data: a linear classifier of drawn shapes.
TRANSFER = {**ACCURACIES["linear"], "evaluate.data": "shapes"}
PROXY = {"evaluate.protocol": "hardness", "evaluate.images": 4096}
GEOMETRY: dict[str, dict[str, object]] = {
    **ACCURACIES,
    "k-NN half-way": {**ACCURACIES["k-NN"], "evaluate.epoch": HALF},
    "linear on shapes": TRANSFER,
    "uniformity": UNIFORMITY,
}
HIGHEST = {"pair": "highest_pair", "real": "highest_negative", "with query": "highest_with_query"}


def judges_of(mix: Mix | None) -> dict[str, dict[str, object]]:
    """The proxy task is measured with the mixtures that the run was trained with."""
    if mix is None:
        return {**GEOMETRY, "proxy": {**PROXY, "evaluate.read": "proxy"}}
    mixed = {**PROXY, "evaluate.mixing": list(mix)}
    found = {**GEOMETRY, "proxy": {**mixed, "evaluate.read": "proxy_synthetic"}}
    if mix == BEST:  # both kinds of mixtures
        found |= {f"highest {kind}": {**mixed, "evaluate.read": name} for kind, name in HIGHEST.items()}
    return found


def grid() -> tuple[Cell, ...]:
    found: list[Cell] = []
    for mix in (None, *MIXES):
        method = {"method": "moco-v2"} if mix is None else {"method": "mochi", **mixing(mix), "mixing_warmup": WARM_UP}
        found += cells(place(mix, oracle=False), method, judges_of(mix))
        if mix in (None, BEST):
            found += cells(place(mix, oracle=True), {**method, "oracle": True})
    return tuple(found)


def claims(judge: str) -> tuple[Claim, ...]:
    def at(mix: Mix | None, oracle: bool = False) -> dict[str, object]:
        return place(mix, oracle=oracle, judge=judge)

    return (
        *(above(f"MoCHi {mix} is above MoCo v2 ({judge})", at(mix), at(None)) for mix in MIXES[:-1]),
        above(f"MoCHi {MIXES[-1]} is below MoCo v2: too small an N hurts ({judge})", at(None), at(MIXES[-1])),
        above(f"the oracle raises MoCo v2 ({judge})", at(None, oracle=True), at(None)),
        above(f"MoCHi raises the oracle ({judge})", at(BEST, oracle=True), at(None, oracle=True)),
    )


def seen(mix: Mix | None, judge: str) -> dict[str, object]:
    return place(mix, oracle=False, judge=judge)


CIFAR10 = Study(
    id="mochi/cifar10",
    title="MoCHi on CIFAR-10, with and without the class oracle",
    paper="a grid of unitsphere's own, after MoCHi's Tables 1 and 3 and Figures 2 and 3",
    needs=needs(7),
    quantity=QUANTITY,
    columns="judge",
    harmless=HARMLESS,
    runner=judged(),
    cells=grid(),
    claims=(
        *(claim for judge in ACCURACIES for claim in claims(judge)),
        above(f"after {HALF} epochs MoCHi is above MoCo v2", seen(BEST, "k-NN half-way"), seen(None, "k-NN half-way")),
        above("MoCHi transfers better than MoCo v2", seen(BEST, "linear on shapes"), seen(None, "linear on shapes")),
        # the lower, the more even
        above("MoCHi spreads images more evenly than MoCo v2", seen(None, "uniformity"), seen(BEST, "uniformity")),
        above("mixtures with the query make the proxy task harder", seen(None, "proxy"), seen((1024, 0, 512), "proxy")),
        above("the hardest pair is below the hardest key", seen(BEST, "highest real"), seen(BEST, "highest pair")),
        above(
            "the hardest mixture with the query is above the hardest key",
            seen(BEST, "highest with query"),
            seen(BEST, "highest real"),
        ),
    ),
)
