"""The bytes under which an image enters a pack."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from unitsphere.images.decode import (
    JPEG_MAGIC,
    MAX_PIXELS,
    NPY_MAGIC,
    decode,
    load_npy,
    open_picture,
    picture_array,
)


def packable(
    item: bytes | np.ndarray, size: int | None = None, quality: int = 90, max_pixels: int = MAX_PIXELS
) -> bytes:
    """The image as it was if its bytes can stay, else encoded anew. Raises BrokenImage.

    size: a longer shorter side is shrunk to this. max_pixels: as `decode` takes it.
    """
    if isinstance(item, np.ndarray):
        array = item
    elif item.startswith(NPY_MAGIC):
        array = load_npy(item, max_pixels)
    else:
        # Decoded at twice the size at least, so that the shrinking still has something to average.
        array = picture_array(open_picture(item, 2 * size if size else None, max_pixels))
    decode(array, channels=array.shape[2] if array.ndim == 3 else 1)  # says what is wrong with it, if anything
    shrunk = size is not None and min(array.shape[:2]) > size
    if isinstance(item, bytes) and not shrunk:
        return item
    if shrunk:
        assert size is not None
        array = _shrink(array, size)
    jpeg = isinstance(item, bytes) and item.startswith(JPEG_MAGIC)
    return _encode(array, quality if jpeg else None)


def _shrink(array: np.ndarray, size: int) -> np.ndarray:
    height, width = array.shape[:2]
    scale = size / min(height, width)
    target = (max(1, round(width * scale)), max(1, round(height * scale)))
    if _fits_pillow(array):
        return np.asarray(Image.fromarray(array).resize(target, Image.Resampling.BICUBIC))
    planes = array[:, :, None] if array.ndim == 2 else array
    resized = [
        np.asarray(Image.fromarray(plane.astype(np.float32)).resize(target, Image.Resampling.BICUBIC))
        for plane in np.moveaxis(planes, 2, 0)
    ]
    full = np.iinfo(array.dtype).max if array.dtype.kind == "u" else 1.0
    shrunk = np.clip(np.stack(resized, axis=2), 0, full)  # bicubic overshoots
    shrunk = np.rint(shrunk).astype(array.dtype) if array.dtype.kind == "u" else shrunk
    return shrunk[:, :, 0] if array.ndim == 2 else shrunk


def _encode(array: np.ndarray, jpeg_quality: int | None) -> bytes:
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    out = io.BytesIO()
    if jpeg_quality is not None:
        Image.fromarray(array).save(out, "JPEG", quality=jpeg_quality)
    elif _fits_pillow(array) or (array.dtype == np.uint16 and array.ndim == 2):
        Image.fromarray(array).save(out, "PNG")
    else:
        np.save(out, array, allow_pickle=False)
    return out.getvalue()


def _fits_pillow(array: np.ndarray) -> bool:
    return array.dtype == np.uint8 and (array.ndim == 2 or array.shape[2] in (3, 4))
