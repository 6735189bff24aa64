"""One configuration for file, command line and Python; refused with the reason when wrong."""

import json
import subprocess
import sys

import pytest

from unitsphere.common.errors import UsageError
from unitsphere.config.images import policies
from unitsphere.config.layers import Layer, merge, read_file
from unitsphere.config.recipes import RECIPES
from unitsphere.config.sizing import Facts, sized
from unitsphere.methods.catalogue import FIELDS, METHODS, SECTIONS
from unitsphere.methods.resolve import resolve


def given(**values):
    return Layer("test", {"method": "moco-v2", "data": "cifar10"} | values)


def test_layers_win_in_order_and_every_value_knows_its_origin():
    resolved = resolve(given(epochs=7), file=Layer("file", {"epochs": 5, "batch_size": 64}))
    assert (resolved.config.epochs, resolved.origins["epochs"]) == (7, "test")
    assert (resolved.config.batch_size, resolved.origins["batch_size"]) == (64, "file")
    assert (resolved.config.queue_size, resolved.origins["queue_size"]) == (4096, "recipe cifar10")
    assert (resolved.config.momentum, resolved.origins["momentum"]) == (0.9, "default")
    assert resolve(given(data="x")).origins["temperature"] == "method moco-v2"


def test_text_from_the_command_line_means_what_python_values_mean():
    words = resolve(
        given(
            lr="0.1",
            symmetric="true",
            crop_scale="0.3,0.9",
            keep_epochs="5,10",
            mean="0.5,0.5,0.5",
            std="1,1,1",
        )
    )
    values = resolve(
        given(lr=0.1, symmetric=True, crop_scale=(0.3, 0.9), keep_epochs=[5, 10], mean=[0.5] * 3, std=[1] * 3)
    )
    assert words.config == values.config


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"nesterov": True, "optimizer": "lars"}, ["nesterov", "sgd"]),
        ({"quee_size": 3}, ["quee_size", "no such field", "queue_size"]),
        ({"out": "runs/x"}, ["no such field", "--out is an option of the command alone"]),
        ({"temperature": -1}, ["temperature", "-1", "greater than 0"]),
        ({"optimizer": "adam"}, ["optimizer", "'adam'", "'adamw' or 'lars'"]),
        ({"epochs": "many"}, ["epochs", "'many'", "a whole number"]),
        ({"epochs": 2.5}, ["epochs", "2.5", "a whole number"]),
        ({"method": "moco-v3"}, ["method", "moco-v3", "Did you mean moco-v2"]),
        ({"recipe": "cifar"}, ["recipe", "Did you mean cifar10"]),
        ({"views": "moco2"}, ["views", "Did you mean moco-v2"]),
        ({"normalise": "imagnet"}, ["normalise", "Did you mean imagenet"]),
        ({"lr": 1, "base_lr": 1}, ["lr and base_lr", "test"]),
        ({"bn_groups": 300}, ["bn_groups", "300", "512"]),
        ({"crop_scale": (0.9, 0.2)}, ["crop_scale"]),
        ({"mean": [0.5]}, ["mean"]),
        ({"mean": [0.5], "std": [0.5]}, ["mean", "3 channels"]),
        ({"warmup_epochs": 200}, ["warmup_epochs", "below epochs"]),
        ({"lr": float("nan")}, ["lr", "finite"]),
        ({"device": "gpu"}, ["device", "'gpu'; allowed: auto, cpu, cuda or cuda:N"]),
        ({"lr": "fast"}, ["lr", "'fast'; it should be a number"]),
        ({"symmetric": "perhaps"}, ["symmetric", "true or false"]),
        ({"crop_scale": "0.2"}, ["crop_scale: given '0.2'; two numbers are needed, such as 0.2,1"]),
        ({"crop_scale": (0.1, 0.2, 1)}, ["crop_scale", "two numbers are needed"]),
        ({"crop_scale": 0.2}, ["crop_scale", "two numbers are needed"]),
    ],
)
def test_a_wrong_field_is_refused_with_name_value_and_what_is_allowed(wrong, said):
    with pytest.raises(UsageError) as refused:
        resolve(given(**wrong))
    for part in said:
        assert part in str(refused.value)


def test_all_mistakes_are_told_at_once():
    with pytest.raises(UsageError) as refused:
        resolve(given(temperature=0, epochs=0, colour="red"))
    assert {line.partition(":")[0] for line in str(refused.value).splitlines()} == {
        "temperature",
        "epochs",
        "colour",
    }


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_method_resolves_on_every_recipe_and_its_saved_form_gives_the_same(method, recipe, tmp_path):
    config = resolve(given(method=method, data=f"{recipe}=somewhere")).config
    assert config.recipe == recipe
    saved = tmp_path / "config.json"
    saved.write_text(json.dumps(config.model_dump(mode="json")))
    assert resolve(Layer("saved", read_file(saved))).config == config


def test_the_papers_settings_are_the_defaults():
    v1, v2 = (resolve(given(method=m, data="imagenet=x")).config for m in ("moco-v1", "moco-v2"))
    for config in (v1, v2):
        assert (config.learning_rate, config.batch_size, config.queue_size, config.key_momentum) == (
            0.03,
            256,
            65536,
            0.999,
        )
        assert (config.momentum, config.weight_decay, config.epochs, config.dim) == (0.9, 1e-4, 200, 128)
        assert (config.backbone, config.image_size, config.lr_update) == ("resnet50", 224, "epoch")
    assert (v1.temperature, v1.head, v1.lr_schedule, v1.lr_drops) == (0.07, "linear", "step", (0.6, 0.8))
    assert (v2.temperature, v2.head, v2.lr_schedule) == (0.2, "mlp", "cosine")
    cifar = resolve(given()).config
    assert (cifar.learning_rate, cifar.batch_size, cifar.weight_decay, cifar.temperature) == (
        0.06,
        512,
        5e-4,
        0.1,
    )
    assert resolve(given(data="imagenet100=x")).config.learning_rate == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("epochs", "expected"),
    [(40, (0.45, 1e-6, 0.97)), (100, (0.45, 1e-6, 0.99)), (300, (0.3, 1e-6, 0.99)), (1000, (0.2, 1.5e-6, 0.996))],
)
def test_byol_has_its_settings_by_length_on_imagenet(epochs, expected):
    given = {"method": "byol", "data": "imagenet", "epochs": epochs}
    found = resolve(Layer("test", given))
    assert (found.config.base_lr, found.config.weight_decay, found.config.key_momentum) == expected
    assert found.origins["base_lr"] == f"byol for {epochs} epochs"
    assert resolve(Layer("test", given | {"base_lr": 1.0, "epochs": 500})).config.base_lr == 1.0


def test_the_learning_rate_follows_the_images_of_a_step_unless_it_is_given():
    assert resolve(given(batch_size=1024)).config.learning_rate == pytest.approx(0.12)
    assert resolve(given(batch_size=1024, lr=0.5)).config.learning_rate == 0.5
    assert resolve(given(queue_size=128)).config.learning_rate == pytest.approx(0.06)


def test_a_later_rate_replaces_an_earlier_one_whichever_way_it_is_said():
    values, _ = merge([Layer("a", {"base_lr": 0.1}), Layer("b", {"lr": 0.2})])
    assert values == {"base_lr": None, "lr": 0.2}
    values, _ = merge([Layer("a", {"lr": 0.1}), Layer("b", {"base_lr": 0.2})])
    assert values == {"base_lr": 0.2, "lr": None}


@pytest.mark.parametrize("count", [2, 3, 10, 500, 5_000, 50_000, 5_000_000])
@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("side", [20, 32, 64, 100, 300, 3000])
def test_sizes_fit_the_data_whatever_it_is(count, cuda, side):
    config = resolve(given(data="./photos"), facts=Facts(count, side, cuda)).config
    assert config.batch_size <= count and config.image_size <= max(32, side)
    assert config.queue_size <= max(count, config.batch_size)
    assert config.stem == ("small" if config.image_size <= 64 else "imagenet")
    if not cuda:
        assert config.epochs * count <= max(200_000, 5 * count)


def test_sizes_give_way_to_what_was_asked():
    config = resolve(given(data="./photos", batch_size=32, epochs=3), facts=Facts(1000, 300, True)).config
    assert (config.batch_size, config.epochs) == (32, 3)


def test_what_is_mixed_is_a_part_of_the_queue():
    for count, wanted in ((40, (16, 4, 4, 2)), (2_000, (512, 128, 128, 16)), (50_000, (16384, 1024, 1024, 128))):
        config = resolve(given(method="mochi", data="./photos"), facts=Facts(count, 300, True)).config
        assert (config.queue_size, config.hardest, config.pairs, config.with_query) == wanted
    short = resolve(given(method="mochi", data="./photos", epochs=20, pairs=99), facts=Facts(2_000, 300, True)).config
    assert (short.mixing_warmup, short.pairs) == (2, 99)


def test_sized_names_only_real_fields():
    assert set(sized(Facts(100, 100, True), {"views": "moco-v2"}, {})) <= set(FIELDS)


def test_a_policy_can_be_changed_in_any_parameter():
    (rules,) = policies(resolve(given(views="moco-v2", blur=1.0, hue=0.2)).config)
    assert (rules.blur, rules.hue, rules.grey) == (1.0, 0.2, 0.2)


@pytest.mark.parametrize(
    ("method", "field", "said"),
    [
        ("byol", "temperature", "temperature: it is a field of contrastive methods; byol is a regression method."),
        ("moco-v2", "view_count", "view_count: it is a field of regression methods; moco-v2 is a contrastive method."),
        ("supervised", "head", "head: it is a field of contrastive and regression methods; supervised is a super"),
        ("supervised", "heads", "heads: there is no such field."),
    ],
)
def test_a_field_of_another_family_is_refused_with_both_named(method, field, said):
    with pytest.raises(UsageError) as refused:
        resolve(given(method=method, **{field: 2}))
    assert str(refused.value).startswith(said)


def test_methods_of_different_families_do_not_combine():
    assert resolve(given(method="jcl+eqco", data="imagenet=x")).config.alpha == 65536
    with pytest.raises(UsageError, match="byol is a regression method, and eqco a contrastive one"):
        resolve(given(method="byol+eqco"))


@pytest.mark.parametrize(("method", "data"), [("simclr", "cifar10"), ("simo", "shapes"), ("byol", "imagenet=x"),
                                               ("msbreg", "cifar10"), ("supervised", "cifar10")])  # fmt: skip
def test_a_warm_up_that_nobody_asked_for_fits_a_short_trial(method, data):
    resolved = resolve(given(method=method, data=data, epochs="2"))
    assert resolved.config.warmup_epochs == pytest.approx(0.2)
    assert resolved.origins["warmup_epochs"] == "shortened to fit 2 epochs"
    usual = resolve(given(method=method, data=data))
    assert usual.config.warmup_epochs >= 2 and "shortened" not in usual.origins["warmup_epochs"]
    for asked, file in (({"warmup_epochs": 10}, {}), ({}, {"warmup_epochs": 10})):
        with pytest.raises(UsageError, match="warmup_epochs"):
            resolve(given(method=method, data=data, epochs=2, **asked), file=Layer("file", file))


def test_a_short_trial_of_mochi_has_mixtures():
    assert resolve(given(method="mochi", data="imagenet=x", epochs=15)).config.mixing_warmup == 1
    assert resolve(given(method="mochi", data="imagenet=x", epochs=16)).config.mixing_warmup == 15
    never = resolve(given(method="mochi", epochs=5, mixing_warmup=5))
    assert never.config.mixing_warmup == 5 and any("nothing is mixed before epoch 6" in note for note in never.notes)
    facts = Facts(1000, 100, False)
    assert resolve(given(method="mochi", data="./photos", epochs=3), facts=facts).config.mixing_warmup == 0


def test_what_the_parts_of_a_method_differ_in_is_told_whole_and_settled_by_what_is_given():
    with pytest.raises(UsageError) as refused:
        resolve(given(method="simclr+mochi", data="imagenet=x"))
    said = str(refused.value).splitlines()[1:]
    assert said[0].strip() == "head (simclr: mlp-bn-bn, mochi: mlp): give --head"
    assert [line.split()[0] for line in said] == ["head", "temperature", "views"]
    with pytest.raises(UsageError, match="temperature") as refused:
        resolve(given(method="simclr+mochi", data="imagenet=x", head="mlp"))
    assert "--head" not in str(refused.value)
    with pytest.raises(UsageError) as refused:  # each with the recipe laid over the method, as it would be alone
        resolve(given(method="simo+mochi", data="cifar10"))
    said = [line.strip() for line in str(refused.value).splitlines()[1:]]
    assert said == [
        "head (simo: mlp-bn-bn, mochi: linear): give --head",
        "temperature (simo: 0.2, mochi: 0.1): give --temperature",
        "bn_groups (simo: 1, mochi: 8): give --bn-groups",
    ]
    settled = {"head": "mlp", "temperature": 0.2, "bn_groups": 1}
    config = resolve(given(method="simo+mochi", **settled), file=Layer("file", {"views": "moco-v2"})).config
    assert (config.head, config.negatives_from, config.mixes) == ("mlp", "batch", True)
    resolve(given(method="moco-v1+mochi", data="cifar10", views="moco-v2-small"))  # there they differ in nothing else
    with pytest.raises(UsageError, match="bn_groups"):
        resolve(given(method="simclr+eqco", data="cifar10", head="mlp", temperature=0.2, views="simclr", base_lr=0.1))
    with pytest.raises(UsageError, match="positives"):
        resolve(given(method="jcl+jcl-vanilla", keys=3))
    resolve(given(method="byol+msbreg", data="imagenet=x", lr=1, hidden=8, views="byol", weight_decay=0, batch_size=64))


def test_every_combination_that_the_readme_names_works_as_it_is():
    for data in ("./photos", *(f"{recipe}=x" for recipe in RECIPES)):
        told = (
            {"backbone": "resnet18", "base_lr": 0.1, "queue_size": 100} if data == "imagenet100=x" else {}
        )  # JCL has its own
        for joint in ("jcl", "jcl-vanilla"):
            config = resolve(given(method=f"eqco+{joint}+mochi", data=data, **told)).config
            assert config.alpha and config.keys > 1 and config.mixes


@pytest.mark.parametrize(
    ("fields", "idle"),
    [
        ({"hardest": 100}, ["hardest"]),
        ({"method": "mochi", "hardest": 100}, []),
        ({"keys": 1, "variance_weight": 2}, ["variance_weight"]),
        ({"mix_in": "key", "mixing_warmup": 3}, ["mix_in", "mixing_warmup"]),
        ({"method": "mochi", "with_query": 0, "mix_in": "key"}, ["mix_in"]),
        ({"method": "simclr", "queue_size": 10, "key_momentum": 0.5}, ["key_momentum", "queue_size"]),
        ({"method": "byol", "key_momentum": 0.5, "lr_drops": "0.5"}, ["lr_drops"]),
        ({"head": "linear", "hidden": 10}, ["hidden"]),
        ({"method": "supervised", "epochs": 10}, []),
        ({"method": "jcl-vanilla", "variance_weight": 2}, ["variance_weight"]),
        ({"brownian_weight": 1, "brownian_per_view": True}, ["brownian_per_view"]),
        ({"brownian_weight": 1, "brownian_per_view": True, "symmetric": True}, []),
        ({"method": "msbreg", "lr": 0.1, "lr_per_view": False}, ["lr_per_view"]),
        ({"blur": 0, "blur_sigma": "0.1,2"}, ["blur_sigma"]),
        ({"backbone": "resnet-tiny", "stem": "imagenet"}, ["stem"]),
        ({"normalise": "half", "mean": "0,0,0", "std": "1,1,1"}, ["normalise"]),
        ({"head": "mlp", "head_norm": "layer"}, ["head_norm"]),
        ({"method": "byol", "joint_statistics": True}, []),
        ({"method": "byol", "joint_statistics": True, "norm": "layer"}, ["joint_statistics"]),
        ({"method": "byol", "joint_statistics": True, "norm": "layer", "head_norm": "batch"}, []),
    ],
)
def test_a_setting_that_has_no_effect_is_noted_if_the_user_gave_it(fields, idle):
    notes = [note.partition(" has no effect: ")[0] for note in resolve(given(**fields)).notes if "no effect" in note]
    assert notes == idle
    from_file = resolve(given(method=fields.get("method", "moco-v2")), file=Layer("f", fields)).notes
    assert not [note for note in from_file if "no effect" in note]


def test_rules_about_settings_without_effect_name_real_fields():
    for method in METHODS:
        resolved = resolve(given(method=method))
        for rule in resolved.method.unused:
            assert set(rule.fields) <= {*FIELDS, "grey_first", "solarise_threshold"}
            rule.when(resolved.config)  # no rule asks for what a method does not have


def test_every_field_belongs_to_a_family_and_is_listed_once():
    assert set(FIELDS) == {name for method in METHODS.values() for name in method.Config.model_fields}
    assert len(FIELDS) == sum(len(section.model_fields) for section in SECTIONS)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("count", [12, 5_000, 500_000])
def test_every_method_fits_data_without_a_recipe(method, count):
    config = resolve(given(method=method, data="./photos"), facts=Facts(count, 100, True)).config
    assert config.warmup_epochs < config.epochs and config.batch_size <= count
    assert all(policies(config))


def test_published_recipes_of_the_other_families():
    byol, simclr, supervised = (
        resolve(given(method=m, data="imagenet=x")).config for m in ("byol", "simclr", "supervised")
    )
    assert (byol.hidden, byol.dim, byol.key_momentum, byol.momentum_schedule) == (4096, 256, 0.99, "cosine")
    assert (byol.optimizer, byol.weight_decay, byol.warmup_epochs, byol.epochs) == ("lars", 1e-6, 10, 300)
    assert (simclr.optimizer, simclr.learning_rate, simclr.weight_decay) == ("lars", pytest.approx(4.8), 1e-6)
    assert (supervised.learning_rate, supervised.epochs, supervised.weight_decay) == (0.1, 90, 1e-4)


def test_files_are_toml_or_json_and_broken_ones_are_named(tmp_path):
    (tmp_path / "a.toml").write_text('method = "moco-v1"\nlr_drops = [0.5]\n')
    assert read_file(tmp_path / "a.toml") == {"method": "moco-v1", "lr_drops": [0.5]}
    (tmp_path / "b.json").write_text("{")
    for name in ("b.json", "missing.toml"):
        with pytest.raises(UsageError, match=name):
            read_file(tmp_path / name)


def test_configuration_does_not_import_torch():
    code = (
        "import sys, unitsphere.methods.resolve, unitsphere.cli; unitsphere.cli.build_parser(); "
        "print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def test_a_choice_between_numbers_is_taken_as_text():
    assert resolve(given(depth="16")).config.depth == 16
    with pytest.raises(UsageError, match="8 or 16"):
        resolve(given(depth="12"))


@pytest.mark.parametrize(
    ("fields", "note"),
    [
        ({"method": "simo", "batch_size": 32, "negatives": 500}, "negatives: 500 asked for, and all 31 at hand"),
        ({"negatives": 2000, "queue_size": 100, "batch_size": 32}, "negatives: 2000 asked for, and all 100 at hand"),
        ({"method": "simclr", "batch_size": 32, "negatives": 63}, "negatives: 63 asked for, and all 62 at hand"),
        ({"method": "eqco+mochi", "data": "shapes"}, "hardest is 256, but a query has 64 negatives"),
    ],
)
def test_more_negatives_than_there_are_is_said(fields, note):
    assert any(said.startswith(note) for said in resolve(given(**fields)).notes)


@pytest.mark.parametrize(
    ("fields", "losses"),
    [
        ({"method": "byol"}, []),
        ({"method": "msbreg", "view_count": 2, "singular_weight": 0, "brownian_weight": 0}, []),
        ({"method": "msbreg"}, ["centroids", "singular_loss", "brownian_loss"]),
        ({"method": "moco-v2", "brownian_weight": 0.1, "uniformity_weight": 1}, ["brownian_loss"]),
        ({"method": "supervised"}, []),
    ],
)
def test_a_run_says_of_what_the_formula_is_reconstructed(fields, losses):
    resolved = resolve(given(**fields))
    assert resolved.config.reconstructed == losses
    told = [note for note in resolved.notes if "reconstructed from MSBReg's supplement" in note]
    assert told == ([f"{', '.join(losses)}: {told[0].partition(': ')[2]}"] if losses else [])


def test_heads_have_the_norm_of_the_backbone_unless_they_are_given_one():
    for method in ("byol", "simo"):
        resolved = resolve(given(method=method, norm="layer"))
        assert resolved.config.head_norm == "layer" and resolved.origins["head_norm"] == "norm layer"
        assert resolve(given(method=method, norm="layer", head_norm="batch")).config.head_norm == "batch"
        assert resolve(given(method=method, head_norm="layer")).config.norm == "batch"
    assert resolve(given(method="supervised", norm="layer")).config.norm == "layer"


def test_msbregs_heads_are_as_wide_as_the_supplement_says_for_the_backbone():
    def heads(count, **fields):
        config = resolve(given(method="msbreg", data="./photos", **fields), facts=Facts(count, 300, True)).config
        return config.backbone, config.hidden, config.dim

    assert heads(2_000) == ("resnet18", 512, 128) and heads(100_000) == ("resnet50", 2048, 256)
    assert heads(100_000, backbone="resnet18") == ("resnet18", 512, 128)
    assert heads(2_000, backbone="resnet50", dim=64) == ("resnet50", 2048, 64)


def test_few_images_have_few_negatives_that_weigh_as_their_queue():
    config = resolve(given(method="eqco", data="./photos"), facts=Facts(36, 100, False)).config
    assert (config.negatives, config.alpha, config.queue_size) == (16, 16, 16)
    large = resolve(given(method="eqco", data="./photos"), facts=Facts(1_000_000, 300, True)).config
    assert (large.negatives, large.alpha) == (256, 65536)


def test_a_start_validates_the_request_and_the_configuration_once_each(tmp_path, monkeypatch):
    """What the data tells is a fact that is filled in, and no further resolution of what was resolved."""
    from unitsphere.methods import resolve as module
    from unitsphere.runs.run import Run
    from unitsphere.training.prepare import prepare

    validated = []
    original = module.validate

    def noting(method, values, provisional=False):
        validated.append("request" if provisional else "configuration")
        return original(method, values, provisional)

    monkeypatch.setattr(module, "validate", noting)
    layer = Layer(
        "test",
        {"method": "supervised", "data": "shapes=64x16", "device": "cpu", "normalise": "computed", "batch_size": 8},
    )
    prepared = prepare(Run(tmp_path / "run"), layer, None, resume=False)
    prepared.settle_statistics(prepared.loader(prepared.images))
    assert prepared.config.class_count == 12 and len(prepared.config.mean) == 3
    assert prepared.resolved.origins["class_count"] == "the data's labels"
    assert validated == ["request", "configuration"]


def test_the_plan_leaves_out_what_has_no_effect(tmp_path, capsys):
    from unitsphere.cli import main

    words = [
        "--data",
        "shapes=64x16",
        "--out",
        str(tmp_path / "run"),
        "--device",
        "cpu",
        "--hardest",
        "5",
        "--batch-size",
        "8",
    ]
    assert main(["pretrain", "moco-v2", *words, "--dry-run"]) == 0
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert "pairs" in rows and "hardest" in rows  # what the user gave is shown, and a note says that it does nothing
    assert not {"mix_in", "mix_weigh", "lr_drops", "variance_ramp", "normalise_mean"} & set(rows)
