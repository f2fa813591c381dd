"""Decodes image files and masks to uint8 pixels, and scales or crops them.

`TRANSFORM_VERSION` or `PHOTOGRAPH_VERSION` must grow with every change of a pixel: they are part of the key of prepared
sets.
"""

import io
import warnings
from typing import Literal

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.Image import Resampling

from paceline.tasks.data.samples import Extent
from paceline.tasks.errors import one_line

TRANSFORM_VERSION = 1
PHOTOGRAPH_VERSION = 2  # the same for images that keep their aspect ratio
MAX_PIXELS = 178_956_970
"""Larger pictures are taken for decompression bombs: twice Pillow's own warning level, where it too gives up."""
MAX_ASPECT = 4  # of an image that keeps its aspect ratio, the middle of so many times its shorter side is stored
_SIXTEEN_BIT, _SIXTEEN_BIT_MAX = ("I", "I;16", "I;16L", "I;16B", "I;16N"), 65_535
SMALL_PIXELS = 512 * 512  # pictures of more pixels take Pillow as long as any other library, or less
_SCALED: tuple[Extent, ...] = ("scale", "side")
_JPEG = b"\xff\xd8\xff"
_MARKER, _APP1, _SCAN = 0xFF, 0xE1, 0xDA
"""The byte before a marker, and the markers of a segment with an orientation (Exif, XMP) and of coded pixels."""

UInt8s = npt.NDArray[np.uint8]


class DecodeError(Exception):
    """An image cannot be decoded; the message is the reason, on one line."""


class UnreadError(DecodeError):
    """Its bytes could not be had from here; another time they may be."""


def decode(content: bytes, image_size: int, fit: Extent = "scale") -> UInt8s:
    """Decode an image file: upright, on white, RGB, and brought to (image_size, image_size, 3) by `fit`.

    With `whole` and `side` it is (H, W, 3). Of an animation the first frame is taken. A grey image becomes
    three equal channels. DecodeError if the file is empty, truncated, no image, too large, too small to be cropped, or
    of a kind that has no meaning in 8 bits.
    """
    if not content:
        raise DecodeError("empty file")
    pixels_HWC = _decode_small_jpeg(content, image_size, fit)
    if pixels_HWC is not None:
        return pixels_HWC
    try:
        # Pillow warns about faults that it corrects (odd EXIF, palettes), and raises the others.
        with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(content)) as image:
            if image.width * image.height > MAX_PIXELS:
                raise DecodeError(f"{image.width} x {image.height} pixels; more than {MAX_PIXELS} look like a bomb")
            if image.format == "JPEG" and fit in _SCALED:
                # At a fraction of the size where twice the requested size remains: faster, and still antialiased.
                image.draft(None, (2 * image_size, 2 * image_size))
            ImageOps.exif_transpose(image, in_place=True)  # else what is upright already is copied
            picture = to_rgb(image)
            if fit == "side":
                return _scale_shorter_side(np.asarray(picture), image_size)
            return _fit(picture, image_size, fit)
    except DecodeError:
        raise
    except UnidentifiedImageError:
        raise DecodeError("not an image of a known format") from None
    except Exception as error:  # Pillow's plugins raise anything on hostile bytes, struct.error included
        raise DecodeError(one_line(error)) from error


def _decode_small_jpeg(content: bytes, image_size: int, fit: Extent = "scale") -> UInt8s | None:
    """Decode a small, sound, upright JPEG; None for all other files, which Pillow decodes.

    Both use libjpeg-turbo with the same settings, so the pixels are the same. Around the decoder Pillow spends 50 to 80
    microseconds, five sixths of a CIFAR image's time (infra/LOG.md, 2026-11-21).
    """
    if not content.startswith(_JPEG) or _may_need_rotation(content):
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(content)
        if height * width > SMALL_PIXELS or colours not in ("YCbCr", "Gray"):
            return None
        # As Pillow's draft mode chooses.
        scales = (8, 4, 2, 1) if fit in _SCALED else (1,)
        scale = next(scale for scale in scales if scale == 1 or min(height, width) >= 2 * image_size * scale)
        rows, columns = -(-height // scale), -(-width // scale)
        pixels_HWC: UInt8s = simplejpeg.decode_jpeg(content, min_height=rows, min_width=columns)
    except ValueError:  # strict: also where libjpeg merely warns
        return None
    return resize(pixels_HWC, image_size, fit)


def _may_need_rotation(content: bytes) -> bool:
    """Whether a JPEG may have an orientation before its pixels; a search of all bytes would add 3 % to a photograph."""
    place = 2
    while place + 4 <= len(content) and content[place] == _MARKER and content[place + 1] != _APP1:
        if content[place + 1] == _SCAN:
            return False
        place += 2 + int.from_bytes(content[place + 2 : place + 4])
    return True


def _fit(picture: Image.Image, image_size: int, fit: Extent, method: Resampling = Resampling.BICUBIC) -> UInt8s:
    size, (width, height) = (image_size, image_size), picture.size
    if fit == "crop" and min(picture.size) < image_size:
        raise DecodeError(f"{width} x {height} pixels, too few to be cropped to {image_size} a side (data.fit)")
    if fit == "whole" or picture.size == size:
        return np.asarray(picture)
    if fit == "crop":
        left, top = ((side - image_size) // 2 for side in picture.size)
        return np.asarray(picture.crop((left, top, left + image_size, top + image_size)))
    return np.asarray(ImageOps.fit(picture, size, method=method))


def _scale_shorter_side(pixels_HWC: UInt8s, image_size: int) -> UInt8s:
    """Scale a photograph's shorter side to `image_size`, bicubically; change of a pixel: raise `PHOTOGRAPH_VERSION`."""
    height, width, _ = pixels_HWC.shape
    short = min(height, width)
    tall, wide = (min(side, MAX_ASPECT * short) for side in (height, width))
    top, left = (height - tall) // 2, (width - wide) // 2
    size = (round(tall * image_size / short), round(wide * image_size / short))
    return scale_bytes(pixels_HWC[top : top + tall, left : left + wide], size, "bicubic")


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert any mode to RGB: transparency onto white, 16 bits to 8 by value, the rest by Pillow's rules.

    DecodeError if the pixels have no defined range (floating point, or 32-bit values outside of 16 bits).
    """
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode in _SIXTEEN_BIT:
        # Image.convert("L") would clip at 255, which turns nearly every 16-bit picture white.
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > _SIXTEEN_BIT_MAX:
            raise DecodeError(
                f"32-bit values from {values.min()} to {values.max()}; only 0 to {_SIXTEEN_BIT_MAX} is understood"
            )
        return Image.fromarray(((values + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise DecodeError("floating-point pixels have no defined range; store the image with 8 or 16 bits")
    if image.has_transparency_data:
        coloured = image.convert("RGBA")
        white = Image.new("RGBA", coloured.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, coloured).convert("RGB")
    return image.convert("RGB")


def decode_mask(content: bytes, image: bytes, image_size: int, fit: Extent = "scale") -> UInt8s:
    """Decode a mask for `resize_mask`; DecodeError if it is not a picture of single values of its image's size."""
    mask_file, image_file = io.BytesIO(content), io.BytesIO(image)
    try:
        with warnings.catch_warnings(action="ignore"), Image.open(mask_file) as mask, Image.open(image_file) as picture:
            # As its image lies in its file, or as that is shown.
            upright = ImageOps.exif_transpose(picture)
            if mask.size not in (picture.size, upright.size):
                raise DecodeError(f"its mask has {mask.size} pixels, and the image {picture.size}")
            if mask.mode not in ("L", "P", "1"):
                raise DecodeError(f"its mask is of mode {mask.mode}; give 8 bits of grey or of a palette")
            if mask.size != upright.size:
                mask.getexif().update(picture.getexif())
                ImageOps.exif_transpose(mask, in_place=True)
            values = np.asarray(mask, dtype=np.uint8)
    except DecodeError:
        raise
    except Exception as error:
        raise DecodeError(f"its mask: {one_line(error)}") from error
    return resize_mask(values, image_size, fit)


def resize_mask(values_HW: UInt8s, image_size: int, fit: Extent = "scale") -> UInt8s:
    """Bring a mask to the size of its image by `fit`, by nearest pixels; 1 for the first class, 0 for 255 (none)."""
    if values_HW.shape != (image_size, image_size):
        values_HW = _fit(Image.fromarray(values_HW), image_size, fit, Resampling.NEAREST)
    return values_HW + np.uint8(1)  # 255 becomes 0


def resize(image: UInt8s, image_size: int, fit: Extent = "scale") -> UInt8s:
    """Bring the pixels (H, W, C), or (H, W), of an RGB or grey image to their size; those of the size stay."""
    pixels_HWC = image if image.ndim > 2 else image[..., np.newaxis]  # noqa: PLR2004
    if fit == "whole" or pixels_HWC.shape[:2] == (image_size, image_size):
        return pixels_HWC
    if fit == "side":
        return _scale_shorter_side(pixels_HWC, image_size)
    channels = pixels_HWC.shape[2]
    fitted = _fit(Image.fromarray(pixels_HWC[..., 0] if channels == 1 else pixels_HWC), image_size, fit)
    return fitted.reshape(*fitted.shape[:2], channels)


def scale_bytes(pixels_HWC: UInt8s, size: tuple[int, int], mode: Literal["bilinear", "bicubic"]) -> UInt8s:
    """Scale pixels to (height, width), antialiased, by torch's kernels for bytes: a fifth of Pillow's time."""
    if pixels_HWC.shape[:2] == size:
        return pixels_HWC
    import torch  # a second or two, which workers that scale nothing by it need not wait for
    from torch.nn import functional

    # numpy makes the copy that the kernel needs: torch would start threads for that.
    pixels_1HWC = torch.from_numpy(np.require(pixels_HWC, requirements=["C", "W"])).unsqueeze(0)
    # Only with the strides of channels last, that of the batch included, is the result in them, without a copy.
    scaled_1CHW = functional.interpolate(pixels_1HWC.permute(0, 3, 1, 2), size, mode=mode, antialias=True)
    return np.asarray(scaled_1CHW.permute(0, 2, 3, 1)[0].numpy())
