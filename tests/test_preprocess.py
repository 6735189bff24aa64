"""Test-time preprocessing against torchvision's transforms, and pictures in hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from unitsphere.images.canvas import Canvas
from unitsphere.views.evaluation import Preprocess
from unitsphere.views.policies import Policy
from unitsphere.views.render import Frame, render

# See test_views.py: float32 positions of the resize, here divided by a std of 0.2.
TOLERANCE = 5e-5
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def torchvision_preprocess(image: np.ndarray, p: Preprocess) -> torch.Tensor:
    full = 65535 if image.dtype == np.uint16 else 255
    chain = v2.Compose([v2.Resize(p.resize, antialias=True), v2.CenterCrop(p.size), v2.Normalize(p.mean, p.std)])
    return chain(torch.from_numpy(image.astype(np.float32) / full).permute(2, 0, 1))


@pytest.mark.parametrize(("size", "resize"), [(32, 32), (28, 33), (31, 37), (48, 55)])
def test_equals_torchvision_on_a_ragged_batch(size: int, resize: int) -> None:
    rng = np.random.default_rng(0)
    # Odd and even margins, sides whose resized length is cut, up- and downscaling, elongated, tiny.
    sizes = [(40, 57), (33, 21), (64, 64), (7, 90), (81, 5), (1, 1), (32, 32), (45, 44), (100, 67), (67, 100)]
    images = [rng.integers(0, 256, (h, w, 3), dtype=np.uint8) for h, w in sizes]
    preprocess = Preprocess(size, resize, MEAN, STD)
    found = preprocess(Canvas.of(images))
    assert found.shape == (len(images), 3, size, size) and found.dtype == torch.float32
    for n, image in enumerate(images):
        torch.testing.assert_close(found[n], torchvision_preprocess(image, preprocess), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("channels", [3, 4])
def test_images_of_the_right_size_are_only_normalised(channels: int) -> None:
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (*size, channels), dtype=np.uint8) for size in ((16, 16), (9, 20), (16, 16))]
    mean, std = (0.4, 0.5, 0.6, 0.7)[:channels], (0.2, 0.25, 0.3, 0.35)[:channels]
    preprocess = Preprocess(16, 16, mean, std, channels=channels)
    found = preprocess(Canvas.of(images).select(torch.tensor([2, 0])))
    for ours, image in zip(found, (images[2], images[0]), strict=True):
        expected = torch.from_numpy((image / 255 - mean) / std).movedim(2, 0)
        torch.testing.assert_close(ours.double(), expected, atol=1e-6, rtol=0)  # float32
    ragged = preprocess(Canvas.of(images))
    torch.testing.assert_close(found, ragged[[2, 0]], atol=1e-6, rtol=0)


@pytest.mark.parametrize(("size", "resize"), [(32, 32), (31, 37)])
def test_its_numbers_make_the_views_show_the_same(size: int, resize: int) -> None:
    """What the fused kernels are given, given to their plain form."""
    rng = np.random.default_rng(0)
    canvas = Canvas.of([rng.integers(0, 256, (h, w, 3), dtype=np.uint8) for h, w in ((40, 57), (32, 32), (7, 90))])
    preprocess = Preprocess(size, resize, MEAN, STD)
    frame = Frame(Policy(), size, 40, 90, canvas.full_scale, MEAN, STD)
    torch.testing.assert_close(render(canvas.pixels, preprocess.numbers(canvas), frame), preprocess(canvas))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("channels", [3, 4])
def test_a_card_gives_the_same(channels: int) -> None:
    rng = np.random.default_rng(0)
    sizes = ((40, 57), (32, 32), (7, 90))
    canvas = Canvas.of([rng.integers(0, 256, (h, w, channels), dtype=np.uint8) for h, w in sizes])
    for resize in (32, 37):
        preprocess = Preprocess(32, resize, (0.5,) * channels, (0.2,) * channels, channels=channels)
        for some in (canvas, canvas.select(torch.tensor([1, 1]))):
            found = preprocess(some.to("cuda")).cpu()
            torch.testing.assert_close(found, preprocess(some), atol=2 * TOLERANCE, rtol=0)


def test_five_channels_of_sixteen_bits_equal_torchvision() -> None:
    image = np.random.default_rng(0).integers(0, 65536, (30, 41, 5), dtype=np.uint16)
    preprocess = Preprocess(16, 18, (0.5,) * 5, (0.25,) * 5, channels=5, depth=16)
    expected = torchvision_preprocess(image, preprocess)
    torch.testing.assert_close(preprocess(Canvas.of([image]))[0], expected, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(preprocess.image(image), expected, atol=TOLERANCE, rtol=0)


def test_one_picture_is_the_same_as_array_file_bytes_and_pil(tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 256, (40, 30, 3), dtype=np.uint8)
    path = tmp_path / "picture.png"
    Image.fromarray(array).save(path)
    preprocess = Preprocess(24, 28, MEAN, STD)
    expected = torchvision_preprocess(array, preprocess)
    for picture in (array, path, str(path), path.read_bytes(), Image.open(path)):
        torch.testing.assert_close(preprocess.image(picture), expected, atol=TOLERANCE, rtol=0)


def test_pil_modes_and_orientation_are_those_of_the_file(tmp_path: Path) -> None:
    colour = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8))
    turned = Image.Exif()
    turned[0x0112] = 6
    colour.quantize(16).save(tmp_path / "palette.png")
    colour.convert("CMYK").save(tmp_path / "cmyk.tif")
    colour.convert("L").save(tmp_path / "grey.png")
    colour.save(tmp_path / "turned.jpg", exif=turned)
    preprocess = Preprocess(16, 16, MEAN, STD)
    for path in sorted(tmp_path.iterdir()):
        assert torch.equal(preprocess.image(Image.open(path)), preprocess.image(path)), path.name


def test_sizes_and_statistics_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="resize is 20 and size 24"):
        Preprocess(24, 20, MEAN, STD)
    with pytest.raises(ValueError, match="mean has 1 values for 3 channels"):
        Preprocess(24, 24, (0.5,), STD)
