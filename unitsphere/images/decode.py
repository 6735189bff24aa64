"""Encoded bytes or an array in, an (H, W, C) array out, whatever the file was."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
from numpy.lib import format as npy
from PIL import Image, UnidentifiedImageError

from unitsphere.common.errors import UnitsphereError

__all__ = ["BrokenImage", "decode"]

NPY_MAGIC = b"\x93NUMPY"
JPEG_MAGIC = b"\xff\xd8\xff"
APP1 = 0xE1
FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # the markers of a JPEG's frame, of any kind
ORIENTATION = 0x0112
MAX_PIXELS = 100_000_000  # of one image as it is decoded: 300 MB in colour
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# Formats that Pillow only recognises (no pixels), or hands to an outside program.
NOT_PICTURES = {"BUFR", "EPS", "GRIB", "HDF5", "IPTC", "MPEG", "WMF"}


class BrokenImage(UnitsphereError):
    """One image that cannot be used, and why."""


@cache
def formats() -> tuple[str, ...]:
    """The formats that are read, the common ones first because Pillow tries them in turn."""
    Image.init()
    # Above twice this size Pillow refuses, which breaks that image; below, each new size would warn.
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)
    return tuple(sorted(set(Image.ID) - NOT_PICTURES, key=lambda name: (name not in {"JPEG", "PNG"}, name)))


@cache
def suffixes() -> frozenset[str]:
    """The file name suffixes of images, lower case, with the dot."""
    readable = set(formats())
    pictures = {suffix for suffix, name in Image.registered_extensions().items() if name in readable}
    return frozenset(pictures | {".npy"})


def decode(
    item: bytes | np.ndarray,
    *,
    channels: int = 3,
    depth: int = 8,
    reduce_to: int | None = None,
    max_pixels: int = MAX_PIXELS,
) -> np.ndarray:
    """The image as (H, W, channels) uint8, or uint16 for depth 16. Raises BrokenImage.

    item: a file's bytes (any format Pillow reads, or .npy), or an (H, W) or (H, W, C) array of uint8, uint16,
    bool or float in [0, 1].
    channels: 1, 3 and 4 are converted into each other; any other number must be what the image has.
    reduce_to: a large image is decoded at a whole fraction of its size whose shorter side is at least this.
    max_pixels: an encoded image that would take more pixels in memory is broken, before it takes them.
    """
    if isinstance(item, np.ndarray):
        array = item
    elif item.startswith(NPY_MAGIC):
        array = load_npy(item, max_pixels)
    else:
        plain = plain_jpeg(item, reduce_to, max_pixels)
        array = picture_array(open_picture(item, reduce_to, max_pixels)) if plain is None else plain
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or 0 in array.shape:
        raise BrokenImage(f"an array of shape {array.shape} is no image: (H, W) or (H, W, C) is needed")
    array = _with_channels(_with_depth(array, depth), channels)
    return np.ascontiguousarray(_reduced(array, reduce_to))


def plain_jpeg(data: bytes, reduce_to: int | None = None, max_pixels: int = MAX_PIXELS) -> np.ndarray | None:
    """(H, W, 1 or 3) of a JPEG in grey or colour that is decoded at its full size and stays as it lies: the same pixels
    as Pillow's, and quicker (docs/speed.md). None for all else, and for what cannot be decoded: Pillow says why.
    """
    decoder = jpeg_decoder()
    if decoder is None or not data.startswith(JPEG_MAGIC):
        return None
    height, width, components = jpeg_frame(data)
    small = reduce_to is None or min(height, width) < 2 * reduce_to
    if components not in (1, 3) or not small or height * width > max_pixels:
        return None
    try:
        return decoder(data)
    except Exception:  # whatever it is, Pillow is asked next
        return None


@cache
def jpeg_decoder() -> Callable[[bytes], np.ndarray] | None:
    """torchvision's, as long as it has one (since 0.29 it wants to be rid of it). Slow to import."""
    try:
        import torch
        from torchvision.io import decode_jpeg
    except ImportError:
        return None

    def decode_one(data: bytes) -> np.ndarray:
        pixels = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return pixels.permute(1, 2, 0).numpy()

    return decode_one


def jpeg_frame(data: bytes) -> tuple[int, int, int]:
    """Height, width and components of a JPEG, from the header of its frame. Zeros where there is none, or where an
    EXIF or XMP block comes before it, which may say that the picture is to be turned."""
    at = 2
    while at + 10 <= len(data) and data[at] == 0xFF:
        marker, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        if marker == APP1:
            break
        if marker in FRAMES:
            height, width = (int.from_bytes(data[at + n : at + n + 2], "big") for n in (5, 7))
            return height, width, data[at + 9]
        at += 2 + length
    return 0, 0, 0


def open_picture(data: bytes, reduce_to: int | None = None, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decoded by Pillow, turned upright, in one of the modes L, RGB, RGBA, I;16, I or F. Raises BrokenImage."""
    if not data:
        raise BrokenImage("empty file")
    if max_pixels > MAX_PIXELS and max_pixels > (Image.MAX_IMAGE_PIXELS or math.inf):
        Image.MAX_IMAGE_PIXELS = max_pixels  # Pillow has a limit of its own, and the user has asked for more
    try:
        picture: Image.Image = Image.open(io.BytesIO(data), formats=formats())
        whole = picture.size
        if reduce_to:
            picture.draft(None, (reduce_to, reduce_to))  # JPEG decodes at 1/2, 1/4, 1/8
        # A progressive JPEG has the coefficients of all of its pixels in memory, whatever the scale.
        refuse_large(whole if picture.info.get("progressive") else picture.size, max_pixels)
        picture.load()
        turn = UPRIGHT.get(_orientation(picture))
        picture = plain_mode(picture)
    except BrokenImage:
        raise
    except UnidentifiedImageError:
        raise BrokenImage("not in a format that Pillow reads") from None
    except Exception as problem:  # on garbage, Pillow's plugins raise whatever they stumble over
        raise BrokenImage(f"{type(problem).__name__}: {problem}".removesuffix(": ")) from problem
    factor = min(picture.size) // reduce_to if reduce_to else 1
    if factor > 1:
        picture = (picture.convert("I") if picture.mode.startswith("I;16") else picture).reduce(factor)
    return picture if turn is None else picture.transpose(turn)


def picture_array(picture: Image.Image) -> np.ndarray:
    """The pixels of what open_picture gave: (H, W) or (H, W, C), uint8, uint16 or float32."""
    array = np.asarray(picture)
    if picture.mode != "I":
        return array.astype(array.dtype.newbyteorder("="), copy=False)
    if array.min() < 0 or array.max() > 65535:
        raise BrokenImage(f"32-bit values from {array.min()} to {array.max()}: 0 to 65535 can be used")
    return array.astype(np.uint16)


def plain_mode(picture: Image.Image) -> Image.Image:
    """In one of the modes that picture_array takes: palettes, CMYK and the rest become RGB or RGBA."""
    mode = picture.mode
    if mode in {"L", "RGB", "RGBA", "I", "F"} or mode.startswith("I;16"):
        return picture
    if mode == "1":
        return picture.convert("L")
    if mode == "P" and picture.palette is not None and "transparency" not in picture.info:
        return picture.convert("RGBA" if picture.palette.mode == "RGBA" else "RGB")
    return picture.convert("RGBA" if mode in {"P", "PA", "LA", "La", "RGBa"} else "RGB")


def refuse_large(size: Sequence[int], max_pixels: int) -> None:
    """Raise BrokenImage where width times height is above the limit."""
    if math.prod(size) > max_pixels:
        shown = " x ".join(f"{side:,}" for side in size)
        raise BrokenImage(f"{shown} pixels to decode; up to {max_pixels:,} are (--max-pixels, max_pixels)")


def _orientation(picture: Image.Image) -> int:
    try:
        return picture.getexif().get(ORIENTATION, 1)
    except Exception:  # a damaged EXIF block does not make the picture useless
        return 1


def load_npy(data: bytes, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """The array of a .npy file; objects are refused, for reading them could run code. Raises BrokenImage.

    The header is looked at first: numpy would allocate whatever it promises.
    """
    file = io.BytesIO(data)
    try:
        version = npy.read_magic(file)
        shape, _, dtype = npy.read_array_header_1_0(file) if version == (1, 0) else npy.read_array_header_2_0(file)
        promised, there = math.prod(shape) * dtype.itemsize, len(data) - file.tell()
        if promised > there:
            raise BrokenImage(f"its header promises {promised:,} bytes, and {there:,} follow")
        refuse_large(shape[1::-1] if len(shape) > 1 else shape, max_pixels)
        return np.load(io.BytesIO(data), allow_pickle=False)
    except BrokenImage:
        raise
    except Exception as problem:  # on garbage, numpy's reader raises whatever it stumbles over
        raise BrokenImage(f"not a usable .npy file: {problem}") from problem


def _with_depth(array: np.ndarray, depth: int) -> np.ndarray:
    full, dtype = (255, np.uint8) if depth == 8 else (65535, np.uint16)
    if array.dtype == dtype:
        return array
    if array.dtype == np.uint16:
        return (array >> 8).astype(np.uint8)
    if array.dtype == np.uint8:
        return array * np.uint16(257)
    if array.dtype == np.bool_:
        return array * dtype(full)
    if array.dtype.kind != "f":
        raise BrokenImage(f"pixels of type {array.dtype}: uint8, uint16, bool or float in [0, 1] can be used")
    low, high = float(array.min()), float(array.max())
    if not (low >= 0 and high <= 1):
        raise BrokenImage(f"float pixels from {low:g} to {high:g}: they must lie in [0, 1], not normalised")
    return np.rint(array.astype(np.float32) * full).astype(dtype)


def _with_channels(array: np.ndarray, channels: int) -> np.ndarray:
    have = array.shape[2]
    if have == channels:
        return array
    if not {have, channels} <= {1, 3, 4}:
        raise BrokenImage(f"{have} channels where {channels} are asked for")
    colour = array[:, :, :3]
    if channels == 1:  # ITU-R 601 luma in Pillow's fixed point, for 16 bit too
        luma = colour.astype(np.uint32) @ np.array([19595, 38470, 7471], np.uint32) + np.uint32(0x8000)
        return (luma >> 16).astype(array.dtype)[:, :, None]
    if have == 1:
        colour = np.repeat(colour, 3, axis=2)
    if channels == 3:
        return colour
    opaque = np.full((*array.shape[:2], 1), np.iinfo(array.dtype).max, array.dtype)
    return np.concatenate([colour, opaque], axis=2)


def _reduced(array: np.ndarray, reduce_to: int | None) -> np.ndarray:
    """What Image.reduce does, for arrays that Pillow has no mode for: channel by channel."""
    factor = min(array.shape[:2]) // reduce_to if reduce_to else 1
    if factor <= 1:
        return array
    wide = array.astype(np.int32) if array.dtype == np.uint16 else array
    planes = [Image.fromarray(np.ascontiguousarray(plane)).reduce(factor) for plane in np.moveaxis(wide, 2, 0)]
    return np.stack([np.asarray(plane).astype(array.dtype) for plane in planes], axis=2)
