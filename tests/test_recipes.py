"""The recipes of JCL and MSBReg, value for value as their supplements state them."""

import pytest
import torch

from unitsphere.common.randomness import generator
from unitsphere.config.images import policies
from unitsphere.config.layers import Layer
from unitsphere.evaluation.recipes import LINEAR_RECIPES
from unitsphere.methods.build import build_learner
from unitsphere.methods.learners.learner import Moment
from unitsphere.methods.resolve import resolve
from unitsphere.studies import find


def config_of(method, data, **fields):
    return resolve(Layer("test", {"method": method, "data": data} | fields)).config


def assert_has(config, wanted):
    assert {name: getattr(config, name) for name in wanted} == wanted


# JCL

# Section 3 of its supplement; head, cosine and temperature are MoCo v2's. bn_groups: ShuffleBN as on MoCo's 8 cards.
JCL = {
    "views": "moco-v2", "image_size": 224, "bn_groups": 8, "negatives_from": "queue", "queue_size": 65536,
    "key_encoder": "slow", "key_momentum": 0.999, "momentum_schedule": "constant", "normalise_mean": False,
    "optimizer": "sgd", "momentum": 0.9, "nesterov": False, "weight_decay": 1e-4, "decays_norms": True,
    "lr_schedule": "cosine", "warmup_epochs": 0, "head": "mlp", "dim": 128, "temperature": 0.2, "alpha": None,
}  # fmt: skip
# On ImageNet-1K the rest is that of the released script: 5 crops are a query and 4 keys.
JCL_IMAGENET = {
    "backbone": "resnet50", "epochs": 200, "batch_size": 256, "learning_rate": pytest.approx(0.03), "keys": 4,
    "variance_weight": 2.0, "variance_ramp": True, "positives": "joint",
}  # fmt: skip
# Section 4 and Table 1: the ablations on ImageNet-100.
ABLATIONS = {"backbone": "resnet18", "epochs": 100, "batch_size": 128, "learning_rate": pytest.approx(0.1), "keys": 5}
JCL_ABLATIONS = {**ABLATIONS, "variance_weight": 4.0, "variance_ramp": True, "positives": "joint"}
VANILLA = {**ABLATIONS, "variance_weight": 0.0, "positives": "each"}


@pytest.mark.parametrize(
    ("method", "data", "wanted"),
    [
        ("jcl", "imagenet", JCL_IMAGENET),
        ("jcl", "imagenet100", JCL_ABLATIONS),
        ("jcl-vanilla", "imagenet100", VANILLA),
    ],
)
def test_jcl_has_its_supplements_settings(method, data, wanted):
    config = config_of(method, f"{data}=x")
    assert_has(config, JCL | wanted)
    (rules,) = policies(config)
    assert rules.describe() == "crop 0.2-1, jitter 0.4/0.4/0.4/0.1 p 0.8, grey p 0.2, blur 0.1-2 p 0.5, flip p 0.5"


def test_jcls_linear_row_is_its_supplements():
    stated = {"lr": (10.0,), "batch_size": 256, "epochs": 100, "drops": (60, 80), "gamma": 0.1}
    moco = {"momentum": 0.9, "nesterov": False, "weight_decay": 0.0}  # not stated: as in MoCo's protocol
    assert_has(LINEAR_RECIPES["jcl-imagenet100"], stated | moco)


def small(**fields):
    usual = {"batch_size": 16, "image_size": 16, "queue_size": 32, "dim": 8, "keys": 3, "variance_weight": 4.0}
    return build_learner(config_of("jcl", "shapes", **(usual | fields)))


@pytest.mark.parametrize(("ramp", "weights"), [(True, [0.4, 2.0, 4.0]), (False, [4.0, 4.0, 4.0])])
def test_the_configuration_says_whether_lambda_grows(ramp, weights):
    method = small(variance_ramp=ramp)
    moments = [Moment(step=epoch, steps=10, epoch=epoch, epochs=10) for epoch in (0, 4, 9)]
    found = [method.inputs(16, moment, generator(0, "t"))["variance_weight"].item() for moment in moments]
    assert found == pytest.approx(weights)


@pytest.mark.parametrize("normalise", [False, True])
def test_the_configuration_says_whether_the_mean_key_enters_the_queue_with_length_1(normalise):
    method = small(normalise_mean=normalise)
    views = torch.randn(4, 16, 3, 16, 16, generator=generator(0, "views")).unbind()
    step = method(views, method.inputs(16, Moment(0, 10, 0, 10), generator(0, "t")))
    lengths = step.keep["keys"].norm(dim=1)
    if normalise:
        assert (lengths - 1).abs().max() < 1e-5
    else:
        assert lengths.max() < 0.9999  # the keys of three pictures of noise differ, so their mean is shorter


# MSBReg

# Sections 1.1 and 1.2 of its supplement, with K, lambda_s and lambda_b of the best of Tables 4 and 5
MSBREG = {
    "optimizer": "lars", "weight_decay": 1e-5, "decays_norms": False, "batch_size": 512, "warmup_epochs": 10,
    "warmup_kind": "before", "lr_schedule": "cosine", "lr_update": "step", "lr_per_view": True, "lr": None,
    "view_count": 4, "singular_weight": 0.004, "uniformity_weight": 0.0, "head": "byol", "norm": "batch",
    "head_norm": "batch", "views": "msbreg",
}  # fmt: skip
MSBREG_18 = {"backbone": "resnet18", "hidden": 512, "dim": 128, "epochs": 320}
MSBREG_50 = {"backbone": "resnet50", "hidden": 2048, "dim": 256, "epochs": 300}


@pytest.mark.parametrize(
    ("data", "wanted", "rate"),
    [
        ("imagenet100", {**MSBREG_18, "base_lr": 0.4, "brownian_weight": 0.5}, 3.2),  # 0.4 x 512 / 256 x 4
        ("stl10", {**MSBREG_18, "base_lr": 0.5, "brownian_weight": 0.05}, 4.0),
        ("imagenet", {**MSBREG_50, "base_lr": 0.15, "brownian_weight": 0.5}, 1.2),
    ],
)
def test_msbreg_has_its_supplements_settings(data, wanted, rate):
    config = config_of("msbreg", f"{data}=x")
    assert_has(config, MSBREG | wanted)
    assert config.learning_rate == pytest.approx(rate)
    (rules,) = policies(config)
    probabilities = {"jitter": 0.8, "grey": 0.2, "blur": 1.0, "solarise": 0.2, "flip": 0.5}
    strengths = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.2, "hue": 0.1}
    assert_has(rules, probabilities | strengths)
    assert rules.crop_scale == (0.08, 1.0) and rules.crop_ratio[0] < 1 < rules.crop_ratio[1]  # BYOL's crop


def numbers(text):
    return [[float(word) for word in line.split()] for line in text.strip().splitlines()]


def test_msbregs_table_3_is_the_supplements():
    """Accuracy, alignment, uniformity; BYOL, BYOL + L_uniform, BYOL + L_b + L_s, ours with K = 4."""
    wanted = numbers("""
        71.9 0.25 -1.52
        72.1 0.27 -2.95
        72.8 0.26 -2.92
        80.4 0.36 -3.8
    """)
    table: dict[str, dict[str, float | None]] = {}
    for cell in find("msbreg/table-3").cells:
        table.setdefault(cell.at["method"], {})[cell.at["judge"]] = cell.paper
    assert list(table) == ["BYOL", "BYOL + L_uniform", "BYOL + L_b + L_s", "MSBReg K=4"]
    assert [[row[judge] for judge in ("linear", "alignment", "uniformity")] for row in table.values()] == wanted


def test_msbregs_table_4_is_the_supplements():
    wanted = [
        ("BYOL", "batch", 256, 0, 89.5),
        ("MSBReg", "batch", 256, 5e-2, 91.4),
        ("BYOL", "layer", 256, 0, 10.6),
        ("BYOL + L_b", "layer", 256, 5e-3, 75.3),
        ("BYOL", "layer", 1024, 0, 10.6),
        ("MSBReg", "layer", 256, 5e-4, 80.7),
        ("MSBReg", "layer", 256, 5e-3, 82.3),
        ("MSBReg", "layer", 256, 5e-2, 78.7),
    ]
    cells = find("msbreg/table-4").cells
    names = ("norm", "batch_size", "brownian_weight")
    assert [(cell.at["method"], *(cell.given[name] for name in names), cell.paper) for cell in cells] == wanted
    assert all(cell.given["head_norm"] == cell.given["norm"] for cell in cells)


# K, lambda_s, lambda_b, accuracy; three times side by side
TABLE_5 = """
    2 0 0 71.9         4 0 0 78.2         8 0 0 79.5
    2 0 0.25 72.3      4 0 0.25 79.1      8 0 0.25 80.1
    2 0 0.5 72.8       4 0 0.5 79.7       8 0 0.5 80.3
    2 0 1.0 72.3       4 0 1.0 79.2       8 0 1.0 80.3
    2 0 2.0 71.9       4 0 2.0 79.0       8 0 2.0 80.2
    2 0.002 0 72.2     4 0.002 0 78.9     8 0.002 0 79.8
    2 0.002 0.25 72.4  4 0.002 0.25 78.8  8 0.002 0.25 80.2
    2 0.002 0.5 72.4   4 0.002 0.5 79.1   8 0.002 0.5 80.9
    2 0.002 1.0 72.1   4 0.002 1.0 79.2   8 0.002 1.0 81.1
    2 0.002 2.0 71.9   4 0.002 2.0 79.2   8 0.002 2.0 80.8
    2 0.004 0 72.8     4 0.004 0 79.7     8 0.004 0 80.0
    2 0.004 0.25 72.8  4 0.004 0.25 80.2  8 0.004 0.25 80.9
    2 0.004 0.5 72.4   4 0.004 0.5 80.4   8 0.004 0.5 81.6
    2 0.004 1.0 72.1   4 0.004 1.0 80.1   8 0.004 1.0 81.5
    2 0.004 2.0 71.2   4 0.004 2.0 79.9   8 0.004 2.0 81.3
    2 0.01 0 71.1      4 0.01 0 79.3      8 0.01 0 79.9
    2 0.01 0.25 71.0   4 0.01 0.25 79.4   8 0.01 0.25 81.2
    2 0.01 0.5 71.0    4 0.01 0.5 79.2    8 0.01 0.5 81.4
    2 0.01 1.0 70.7    4 0.01 1.0 79.2    8 0.01 1.0 81.1
    2 0.01 2.0 70.3    4 0.01 2.0 79.0    8 0.01 2.0 79.8
"""


def test_msbregs_table_5_is_the_supplements():
    wanted = {tuple(row[at : at + 3]): row[at + 3] for row in numbers(TABLE_5) for at in (0, 4, 8)}
    study = find("msbreg/table-5")
    names = ("view_count", "singular_weight", "brownian_weight")
    assert {tuple(cell.given[name] for name in names): cell.paper for cell in study.cells} == wanted
    assert {tuple(cell.at.values()): cell.paper for cell in study.cells} == wanted
    assert len(study.cells) == len(wanted) == 60
    assert study.runner.base["epochs"] == 300  # section 5


def test_baselines_are_like_for_like_by_default():
    """The released codes' choices, the same for a method and its baseline."""

    def of(method, data="imagenet=x", **fields):
        return resolve(Layer("test", {"method": method, "data": data, **fields})).config

    for data in ("imagenet=x", "imagenet100=x", "cifar10=x"):
        assert of("mochi", data).bn_groups == of("moco-v2", data).bn_groups == 8
        assert of("mochi", data).zero_init_residual == of("moco-v2", data).zero_init_residual is False
        assert of("jcl", data).keys == of("jcl-vanilla", data).keys == (5 if data == "imagenet100=x" else 4)
        for method in ("simclr", "byol", "msbreg", "simo"):
            assert of(method, data).zero_init_residual
        assert of("simclr", data).head == of("simo", data).head == "mlp-bn-bn"
        assert of("simo", data).shared_draw
    assert of("eqco", "imagenet100=x").alpha == of("moco-v2", "imagenet100=x").queue_size == 16384
