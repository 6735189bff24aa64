"""Every kind of file becomes the (H, W, C) array that it shows."""

import contextlib
import io

import numpy as np
import pytest
from PIL import Image, ImageOps

from unitsphere.images import decode as decode_module
from unitsphere.images.decode import BrokenImage, decode, plain_jpeg, suffixes

RNG = np.random.default_rng(0)
RGB = RNG.integers(0, 256, (13, 17, 3), np.uint8)
DEEP = RNG.integers(0, 65536, (13, 17), np.uint16)


def encoded(picture: Image.Image, kind: str = "PNG", **options) -> bytes:
    out = io.BytesIO()
    picture.save(out, kind, **options)
    return out.getvalue()


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM", "WEBP", "GIF", "JPEG"])
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_common_formats_decode_as_pillow_shows_them(kind, mode):
    data = encoded(Image.fromarray(RGB).convert(mode), kind, **({"lossless": True} if kind == "WEBP" else {}))
    shown = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert np.array_equal(decode(data), shown)
    grey = np.asarray(Image.open(io.BytesIO(data)).convert("RGB").convert("L"))
    assert np.array_equal(decode(data, channels=1), grey[:, :, None])  # the luma is Pillow's, bit for bit


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_jpegs_are_bit_for_bit_what_pillow_gives(mode, progressive, subsampling):
    rng = np.random.default_rng(0)
    for quality in (20, 75, 98):
        size = tuple(rng.integers(1, 90, 2).tolist())
        rough = Image.fromarray(rng.integers(0, 256, (7, 9, 3), np.uint8)).resize(size, Image.Resampling.BICUBIC)
        data = encoded(rough.convert(mode), "JPEG", quality=quality, progressive=progressive, subsampling=subsampling)
        shown = np.asarray(Image.open(io.BytesIO(data)))
        quick = plain_jpeg(data)
        assert quick is not None
        assert np.array_equal(quick, shown.reshape(*shown.shape[:2], -1))


def test_jpegs_that_only_pillow_reads_right_are_left_to_it():
    large = encoded(Image.fromarray(RGB).resize((200, 100)), "JPEG")
    assert plain_jpeg(large, reduce_to=51) is not None
    assert plain_jpeg(large, reduce_to=50) is None  # decoded at half its size
    assert plain_jpeg(encoded(Image.fromarray(RGB).convert("CMYK"), "JPEG")) is None
    assert plain_jpeg(large[:-40]) is None and plain_jpeg(large[:30]) is None and plain_jpeg(b"\xff\xd8\xff") is None
    assert plain_jpeg(encoded(Image.fromarray(RGB))) is None
    exif = Image.Exif()
    exif[0x0112] = 6
    assert plain_jpeg(encoded(Image.fromarray(RGB), "JPEG", exif=exif)) is None  # to be turned
    xmp = b"http://ns.adobe.com/xap/1.0/\0<x:xmpmeta tiff:Orientation='6'/>"
    assert plain_jpeg(encoded(Image.fromarray(RGB), "JPEG", xmp=xmp)) is None


def test_without_the_quick_decoder_jpegs_are_the_same(monkeypatch):
    data = encoded(Image.fromarray(RGB), "JPEG")
    quick = decode(data)
    monkeypatch.setattr(decode_module, "jpeg_decoder", lambda: None)
    assert plain_jpeg(data) is None and np.array_equal(decode(data), quick)


def test_cmyk_and_one_bit_pictures_become_rgb():
    for picture, kind in [(Image.fromarray(RGB).convert("CMYK"), "JPEG"), (Image.fromarray(RGB).convert("1"), "PNG")]:
        data = encoded(picture, kind)
        assert np.array_equal(decode(data), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


def test_alpha_is_dropped_unless_four_channels_are_asked_for():
    rgba = RNG.integers(0, 256, (6, 5, 4), np.uint8)
    data = encoded(Image.fromarray(rgba))
    assert np.array_equal(decode(data), rgba[:, :, :3])
    assert np.array_equal(decode(data, channels=4), rgba)
    opaque = decode(encoded(Image.fromarray(RGB)), channels=4)
    assert np.array_equal(opaque[:, :, :3], RGB) and (opaque[:, :, 3] == 255).all()
    grey_alpha = Image.fromarray(rgba).convert("LA")
    assert np.array_equal(decode(encoded(grey_alpha), channels=1)[:, :, 0], np.asarray(grey_alpha)[:, :, 0])


def test_palettes_with_and_without_transparency(recwarn):
    palette = Image.fromarray(RGB).quantize(16)
    shown = np.asarray(palette.convert("RGB"))
    assert np.array_equal(decode(encoded(palette)), shown)
    transparent = encoded(palette, transparency=bytes(range(0, 256, 16)))
    assert np.array_equal(decode(transparent), shown)
    assert np.array_equal(
        decode(transparent, channels=4), np.asarray(Image.open(io.BytesIO(transparent)).convert("RGBA"))
    )
    assert not recwarn.list


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_sixteen_bit_grey_keeps_its_depth_when_asked(kind):
    data = encoded(Image.fromarray(DEEP), kind)
    deep = decode(data, channels=1, depth=16)
    assert deep.dtype == np.uint16 and np.array_equal(deep[:, :, 0], DEEP)
    assert np.array_equal(decode(data, channels=1)[:, :, 0], (DEEP >> 8).astype(np.uint8))
    assert np.array_equal(decode(data, channels=3, depth=16), np.repeat(DEEP[:, :, None], 3, 2))


def test_eight_bit_fills_the_range_of_sixteen():
    deep = decode(encoded(Image.fromarray(RGB)), depth=16)
    assert deep.dtype == np.uint16 and np.array_equal(deep, RGB.astype(np.uint16) * 257)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_exif_orientation_is_applied_once(kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(Image.fromarray(RGB), kind, exif=exif)
    assert np.array_equal(decode(data), np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data)))))


def test_npy_holds_any_number_of_channels():
    many = RNG.integers(0, 65536, (5, 4, 7), np.uint16)
    assert np.array_equal(decode(npy(many), channels=7, depth=16), many)
    assert np.array_equal(decode(npy(many), channels=7), (many >> 8).astype(np.uint8))
    with pytest.raises(BrokenImage, match="7 channels where 3 are asked for"):
        decode(npy(many))
    with pytest.raises(BrokenImage, match="npy"):
        decode(npy(np.array([{"code": 1}], dtype=object)))
    with pytest.raises(BrokenImage):
        decode(npy(many)[:100], channels=7)


def test_arrays_pass_through():
    assert np.array_equal(decode(RGB), RGB)
    assert np.array_equal(decode(RGB[:, :, 0], channels=1), RGB[:, :, :1])
    unit = RGB.astype(np.float64) / 255
    assert np.array_equal(decode(unit), RGB)
    assert np.array_equal(decode(unit, depth=16), RGB.astype(np.uint16) * 257)
    for bad, reason in [
        (unit * 2, r"\[0, 1\]"),
        (np.full((2, 2), np.nan), r"\[0, 1\]"),
        (RGB.astype(np.int64), "int64"),
        (np.zeros((0, 4), np.uint8), "shape"),
        (np.zeros(4, np.uint8), "shape"),
    ]:
        with pytest.raises(BrokenImage, match=reason):
            decode(bad)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_large_pictures_are_decoded_small_but_not_below_what_is_asked(kind):
    y, x = np.mgrid[0:700, 0:1000]
    smooth = np.stack([x / 1000 * 255, y / 700 * 255, (x + y) / 1700 * 255], 2).astype(np.uint8)
    data = encoded(Image.fromarray(smooth), kind, **({"quality": 95} if kind == "JPEG" else {}))
    small = decode(data, reduce_to=100)
    assert 100 <= min(small.shape[:2]) < 200
    assert small.shape[1] / small.shape[0] == pytest.approx(1000 / 700, rel=0.02)
    exact = np.asarray(Image.fromarray(smooth).resize(small.shape[1::-1], Image.Resampling.BOX)).astype(int)
    assert np.abs(small - exact).max() <= 6  # JPEG at quality 95 and rounding: a few grey levels
    assert decode(data, reduce_to=2000).shape == (700, 1000, 3)


def test_deep_and_many_channelled_pictures_are_reduced_by_averaging():
    tall = RNG.integers(0, 65536, (40, 60), np.uint16)
    mean = tall.reshape(10, 4, 15, 4).mean((1, 3))
    assert np.abs(decode(encoded(Image.fromarray(tall)), channels=1, depth=16, reduce_to=10)[:, :, 0] - mean).max() <= 1
    many = RNG.integers(0, 256, (40, 60, 5), np.uint8)
    mean = many.reshape(10, 4, 15, 4, 5).mean((1, 3))
    assert np.abs(decode(many, channels=5, reduce_to=10) - mean).max() <= 1


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_truncated_and_garbled_files_are_broken_and_nothing_else(kind):
    whole = encoded(Image.fromarray(RNG.integers(0, 256, (64, 64, 3), np.uint8)), kind)
    with pytest.raises(BrokenImage):
        decode(whole[: len(whole) // 2])
    for trial in range(60):  # whatever the damage, it is decoded or called broken
        damaged = bytearray(whole)
        for place in np.random.default_rng(trial).integers(0, len(whole), 8):
            damaged[place] ^= 0xFF
        with contextlib.suppress(BrokenImage):
            assert decode(bytes(damaged)).dtype == np.uint8


def test_what_is_no_picture_is_broken_with_a_reason():
    with pytest.raises(BrokenImage, match="empty"):
        decode(b"")
    with pytest.raises(BrokenImage, match="format"):
        decode(b"hello, this is text")
    with pytest.raises(BrokenImage, match="format"):  # would be handed to Ghostscript
        decode(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n")


def test_decompression_bombs_are_broken_without_warnings(monkeypatch, recwarn):
    data = encoded(Image.new("RGB", (300, 300)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 300 * 300 // 3)  # beyond twice this, Pillow refuses
    with pytest.raises(BrokenImage, match="DecompressionBomb"):
        decode(data)
    assert not recwarn.list


def test_suffixes_are_those_of_pictures():
    assert {".jpg", ".jpeg", ".png", ".tif", ".webp", ".bmp", ".gif", ".npy"} <= suffixes()
    assert not {".pdf", ".mpg", ".eps", ".h5", ".txt"} & suffixes()
