"""The command as a person uses it: real processes, real files, exit statuses, messages."""

import json
import os
import resource
import shutil
import signal
import stat

import numpy as np
import pytest
from conftest import SMALL, command, write_images, write_labelled
from PIL import Image

from unitsphere import __version__

QUICK = [*SMALL, "--epochs", "2"]


def refused(done, *said, status=2):
    """An error on standard error that says these things, without a traceback."""
    assert done.returncode == status, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr
    for part in said:
        assert part in done.stderr, (part, done.stderr)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on a labelled folder, and the folder."""
    root = tmp_path_factory.mktemp("trained")
    write_labelled(root / "data")
    done = command("pretrain", "moco-v2", "--data", root / "data", "--out", root / "run", *QUICK, "--knn-every", "2")
    assert done.returncode == 0, done.stderr
    return root / "run", root / "data", done


def test_a_run_explains_itself(trained):
    run, _, done = trained
    assert {
        "config.json",
        "run.json",
        "metrics.jsonl",
        "events",
        "checkpoints",
        "results.json",
        "neighbours.png",
    } <= set(os.listdir(run))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    needed = {"step", "epoch", "loss", "images_per_second", "log_k", "positive_similarity", "negative_similarity"}
    needed |= {"contrastive_accuracy", "feature_deviation", "effective_rank", "queue_fill", "wait_share", "lr"}
    assert all(needed <= line.keys() for line in lines)
    assert lines[0]["epoch"] == 1 and lines[-1]["epoch"] == 2 and "knn" in lines[-1]
    about = json.loads((run / "run.json").read_text())
    assert about["unitsphere"] == __version__ and about["origins"]["epochs"] == "command line"
    (result,) = json.loads((run / "results.json").read_text())
    assert {"protocol", "data", "value", "epoch", "seed"} <= result.keys()
    assert "a view finds the other view" in done.stderr
    assert json.loads((run / "config.json").read_text())["mean"] is not None


def test_evaluation_gives_numbers_with_their_protocol_and_keeps_them(trained):
    run, data, _ = trained
    for words in (["--protocol", "knn", "--k", "5,10"], ["--protocol", "linear", "--epochs", "5", "--lr", "0.1,1"]):
        done = command("evaluate", run, "--data", data, *words)
        assert done.returncode == 0, done.stderr
        assert "%" in done.stdout
    done = command("evaluate", run, "--data", data, "--protocol", "linear", "--epochs", "2", "--augment")
    assert done.returncode == 0, done.stderr
    knn, linear, augmented = json.loads((run / "results.json").read_text())[1:]
    assert set(knn["value"]) == {"k=5", "k=10"} and knn["constants"]["temperature"] == 0.1
    assert linear["constants"]["lr"] == [0.1, 1.0] and not linear["constants"]["augment"]
    assert augmented["constants"]["augment"] and knn["epoch"] == 2 and knn["seed"] == 0
    assert knn["value"]["k=5"] > 80  # red against blue: any network sees it


def test_any_backbone_can_be_judged(trained, tmp_path):
    run, data, _ = trained
    checkpoint = sorted((run / "checkpoints").iterdir())[-1]
    size = ["--backbone", "resnet-tiny", "--image-size", "16"]
    for what in ("random", checkpoint):
        done = command("evaluate", what, *size, "--data", data, "--protocol", "knn", "--k", "5")
        assert done.returncode == 0 and "k=5" in done.stdout, done.stderr
    refused(command("evaluate", tmp_path / "nothing", "--data", data, "--protocol", "knn"), "nothing", "Allowed")
    refused(command("evaluate", tmp_path, "--data", data, "--protocol", "knn"), "not a run")


def test_embeddings_come_with_file_names_and_neighbours(trained, tmp_path):
    run, data, _ = trained
    out, sheet = tmp_path / "f.npz", tmp_path / "sheet.png"
    shutil.copytree(data, tmp_path / "copy")
    first = sorted((tmp_path / "copy" / "red").iterdir())[0]
    shutil.copy(first, first.with_name("twin.png"))
    done = command(
        "embed", run, "--data", tmp_path / "copy", "--out", out, "--neighbours", sheet, "--duplicates", "0.999999"
    )
    assert done.returncode == 0, done.stderr
    stored = np.load(out)
    assert stored["features"].shape == (81, 64) and "red/twin.png" in stored["names"]
    assert Image.open(sheet).size[0] > 200
    assert any("twin.png" in line and first.name in line for line in done.stdout.splitlines())
    refused(command("embed", run, "--data", data, "--out", tmp_path / "f.csv"), ".npz", ".parquet")
    refused(command("embed", run, "--data", data), "--neighbours")


def test_a_pack_gives_the_same_run_as_its_folder(trained, tmp_path):
    run, data, _ = trained
    packed = tmp_path / "data.pack"
    done = command("pack", "--data", data, "--out", packed, "--quiet")
    assert done.returncode == 0 and "80" in done.stdout, done.stderr
    done = command("pretrain", "moco-v2", "--data", packed, "--out", tmp_path / "run", *QUICK, "--resident", "false")
    assert done.returncode == 0, done.stderr
    losses = [
        [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (run, tmp_path / "run")
    ]
    assert losses[0] == losses[1]


def test_a_flat_folder_needs_nothing_but_its_name(photos, tmp_path):
    done = command(
        "pretrain", "moco-v2", "--data", photos, "--out", tmp_path / "run", "--epochs", "1", "--device", "cpu"
    )
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["image_size"] == 32 and config["batch_size"] == 4 and config["backbone"] == "resnet-tiny"
    assert "sized for 54 images" in done.stdout.replace("\n", " ")
    refused(command("evaluate", tmp_path / "run", "--data", photos, "--protocol", "knn"), "labels")


def test_dry_run_prints_everything_and_writes_nothing(photos, tmp_path):
    done = command("pretrain", "--method", "moco-v1", "--data", photos, "--out", tmp_path / "run", "--dry-run")
    assert done.returncode == 0 and not (tmp_path / "run").exists()
    for part in ("temperature", "0.07", "method moco-v1", "steps"):
        assert part in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["moco-v3", "--data", "shapes"], ["moco-v3", "moco-v2"]),
        (["moco-v2", "--data", "shapes", "--quee-size", "3"], ["--quee-size", "--queue-size"]),
        (["moco-v2", "--data", "shapes", "--temperature", "0"], ["temperature", "greater than 0"]),
        (["moco-v2"], ["data", "must be given"]),
        (["--data", "shapes"], ["method", "must be given"]),
        (["moco-v2", "--data", "no/such/folder"], ["no/such/folder"]),
        (["moco-v2", "--data", "cifar11"], ["cifar11", "cifar10"]),
        (["moco-v2", "--data", "imagenet"], ["imagenet=PATH"]),
        (["moco-v2", "--data", "shapes=100", "--batch-size", "256"], ["batch_size", "256", "100"]),
        (["moco-v2", "--data", "shapes=100", "--batch-size", "16", "--device", "cuda:7"], ["device", "cuda:7"]),
        (["moco-v2", "--data", "shapes=100", "--batch-size", "16", "--backbone", "resnet19"], ["resnet19", "resnet18"]),
        (["moco-v2", "--data", "shapes=100", "--config", "nothing.toml"], ["nothing.toml"]),
        (["moco-v2", "--data", "shapes=100", "--batch-size", "16", "--init", "nowhere"], ["init", "nowhere"]),
    ],
)
def test_mistakes_are_refused_with_status_2_and_nothing_is_left(words, said, tmp_path):
    refused(command("pretrain", *words, "--out", tmp_path / "run"), *said)
    assert not (tmp_path / "run").exists()


def test_empty_folders_and_single_images_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    write_images(tmp_path / "one", 1)
    for name in ("empty", "one"):
        refused(command("pretrain", "moco-v2", "--data", tmp_path / name, "--out", tmp_path / "run"), name)


def test_broken_images_are_named_and_skipped_up_to_a_share(photos, tmp_path):
    for number in range(10, 16):
        (photos / f"00{number}.png").write_bytes(b"not an image")
    arguments = ["pretrain", "moco-v2", "--data", photos, *QUICK]
    refused(command(*arguments, "--out", tmp_path / "strict"), ".png: not in a format", "--max-broken", status=1)
    done = command(*arguments, "--out", tmp_path / "run", "--max-broken", "0.3")
    assert done.returncode == 0, done.stderr
    assert "images could not be read" in done.stderr and "png: not in a format" in done.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_folder_is_refused(tmp_path):
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked").chmod(stat.S_IRUSR | stat.S_IXUSR)
    refused(
        command("pretrain", "moco-v2", "--data", "shapes=100", "--out", tmp_path / "locked" / "run"),
        "cannot be written",
    )


def test_a_place_that_cannot_hold_a_run_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    refused(command("pretrain", "moco-v2", "--data", "shapes=100", *SMALL, "--out", tmp_path / "file" / "run"), "out")


def test_a_full_disk_keeps_the_last_good_checkpoint(tmp_path):
    """A limit on the size of a file makes the next checkpoint fail as a full disk would."""
    out = tmp_path / "run"
    arguments = ["pretrain", "moco-v2", "--data", "shapes=100", *SMALL, "--out", out]
    assert command(*arguments, "--epochs", "1").returncode == 0
    (good,) = (out / "checkpoints").iterdir()
    content = good.read_bytes()

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

    done = command("pretrain", "--out", out, "--resume", "--epochs", "3", preexec_fn=limit)
    refused(done, "cannot be written", good.name, status=1)
    assert good.read_bytes() == content
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == [good.name]
    done = command("pretrain", "--out", out, "--resume")
    assert done.returncode == 0, done.stderr


def test_a_loss_that_is_no_number_stops_the_run_and_says_what_to_do(tmp_path):
    done = command(
        "pretrain",
        "moco-v2",
        "--data",
        "shapes=100",
        *SMALL,
        "--out",
        tmp_path / "run",
        "--lr",
        "1e30",
        "--epochs",
        "3",
    )
    refused(done, "the loss became", "--lr", status=1)


def test_a_dry_run_may_name_an_existing_run_and_refuses_what_the_run_would(trained, tmp_path):
    run, data, _ = trained
    words = ["pretrain", "moco-v2", "--data", data, *QUICK, "--dry-run", "--out"]
    done = command(*words, run, "--hardest", "100")
    assert done.returncode == 0 and "time: about" in done.stdout, done.stderr
    assert "hardest has no effect: nothing is mixed." in done.stdout
    refused(command(*words, tmp_path / "run", "--init", "runs/none"), "init", "runs/none")


def test_a_setting_without_effect_is_noted(tmp_path):
    words = ["--data", "shapes=100", *SMALL, "--epochs", "1", "--mix-in", "key", "--out", tmp_path / "run"]
    assert "mix_in has no effect" in command("pretrain", "moco-v2", *words).stderr


def test_what_is_no_run_is_not_taken_for_one(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "photo.jpg").write_text("")
    (tmp_path / "file").write_text("")
    for name, said in (("folder", "other things"), ("file", "a file")):
        for more in ([], ["--resume"]):
            done = command("pretrain", "moco-v2", "--data", "shapes=100", *QUICK, "--out", tmp_path / name, *more)
            refused(done, "is no run", said)
            assert "--resume" not in done.stderr
    refused(command("pretrain", "--out", tmp_path / "none", "--resume"), "there is no run in", "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["pretrian"], ["'pretrian'", "Did you mean pretrain?"]),
        (["evaluate", "x", "--data", "y", "--protocol", "lin"], ["--protocol", "'lin'", "Did you mean linear?"]),
        (["analyse", "x", "--what", "gradeint"], ["--what", "Did you mean gradient?"]),
        (["pretrain", "moco-v2", "photos", "--out", "x"], ["'photos'", "Did you mean --data photos?"]),
        (["pretrain", "moco-v2", "--data", "shapes"], ["--out: it must be given"]),
        (["embed", "x", "--data", "y", "--batch-size", "ten"], ["--batch-size: 'ten' is not a whole number"]),
        (["embed", "x", "--data", "y", "--batch-size"], ["--batch-size: a value must follow"]),
        (["pretrain", "simclr", "--method", "byol", "--out", "x"], ["method: given are simclr and byol"]),
        (["data", "preview", "shapes", "--images", "0", "--out", "x.png"], ["images: given 0"]),
    ],
)
def test_words_that_are_wrong_are_told_in_a_line_or_two_with_what_is_near(words, said):
    done = command(*words)
    refused(done, *said)
    assert "usage:" not in done.stderr and len(done.stderr.splitlines()) <= 2


def test_help_lists_what_a_field_allows():
    text = command("pretrain", "--help").stdout
    for part in ("--optimizer {sgd,adamw,lars}", "--precision {auto,fp32,bf16,fp16}", "--depth {8,16}",
                 "--crop-scale A,B", "--keep-epochs N,..", "--symmetric [BOOL]", "--epochs N", "--lr X"):  # fmt: skip
        assert part in text


def test_lists_answer_and_help_covers_every_field():
    from unitsphere.methods.catalogue import FIELDS

    for words in (["methods"], ["data"], ["--version"], ["--help"]):
        assert command(*words).returncode == 0
    text = command("pretrain", "--help").stdout
    assert all(f"--{name.replace('_', '-')}" in text for name in FIELDS if name != "method")
    assert __version__ in command("--version").stdout


def test_preview_writes_a_picture(photos, tmp_path):
    done = command(
        "data", "preview", "--data", photos, "--out", tmp_path / "p.png", "--images", "3", "--view-count", "4"
    )
    assert done.returncode == 0, done.stderr
    assert min(Image.open(tmp_path / "p.png").size) > 100
    refused(
        command("data", "preview", "--data", photos, "--out", tmp_path / "p.png", "--views", "moco"),
        "moco",
        "Did you mean",
    )


def test_preview_names_the_images_that_cannot_be_read(photos, tmp_path):
    (photos / "0007.png").write_bytes(b"not an image")
    done = command(
        "data", "preview", "--data", photos, "--out", tmp_path / "p.png", "--images", "60", "--view-count", "1"
    )
    assert done.returncode == 0 and (tmp_path / "p.png").exists()
    assert "1 image could not be read:\n  0007.png: not in a format" in done.stderr


def test_preview_shows_views_that_are_not_made_alike(photos, tmp_path):
    done = command("data", "preview", "--data", photos, "--out", tmp_path / "p.png", "--views", "byol", "--images", "2")
    assert done.returncode == 0, done.stderr
    refused(
        command("data", "preview", "--data", photos, "--out", tmp_path / "p.png", "--views", "byul"),
        "Did you mean byol",
    )
    assert "byol-1 and byol-2" in command("data").stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["study", "run", "eqco/table-5", "--sed", "1"],
            ["--sed", "Did you mean --seed?", "unitsphere study run --help"],
        ),
        (
            ["data", "preview", "x", "--out", "p.png", "--view", "byol"],
            ["--view", "--views", "unitsphere data preview"],
        ),
        (["study", "--sed"], ["--sed", "`unitsphere study --help`"]),
        (["pretrain", "simclr", "--out", "x", "--temprature", "1"], ["Did you mean --temperature?"]),
        (
            ["pretrain", "simclr", "--out", "x", "--wd", "1", "--tau", "1"],
            ["mean --weight-decay?", "mean --temperature?"],
        ),
        (["pretrain", "simclr", "--out", "x", "--zzz", "1"], ["--zzz: there is no such option.\n"]),
    ],
)
def test_an_unknown_option_of_a_command_of_a_command_names_the_nearest(words, said):
    refused(command(*words), *said)


def test_a_traceback_only_with_debug(tmp_path):
    done = command("pretrain", "moco-v2", "--data", "nowhere", "--out", tmp_path / "run", "--debug")
    assert "Traceback" in done.stderr
