"""Decoding of every kind of image, good and bad."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from paceline.tasks.data.decode import transform
from paceline.tasks.data.decode.transform import DecodeError, decode, resize, resize_mask


def encode(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "LA", "P", "1", "CMYK"])
@pytest.mark.parametrize("size", [(16, 16), (40, 30), (7, 90)])
def test_modes_and_sizes(mode: str, size: tuple[int, int]) -> None:
    content = encode(Image.new("RGB", size, (255, 255, 255)).convert(mode), "TIFF" if mode == "CMYK" else "PNG")
    pixels = decode(content, 16)
    assert pixels.shape == (16, 16, 3)
    assert pixels.dtype == np.uint8
    assert pixels.min() >= 250


def test_an_image_of_the_right_size_keeps_its_pixels() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    assert np.array_equal(decode(encode(Image.fromarray(pixels)), 16), pixels)


def test_transparency_lies_on_white() -> None:
    assert (decode(encode(Image.new("RGBA", (8, 8), (255, 0, 0, 0))), 8) == 255).all()
    palette = Image.new("RGB", (8, 8), (255, 0, 0)).convert("P")
    assert (decode(encode(palette, transparency=palette.getpixel((0, 0))), 8) == 255).all()


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_sixteen_bits_are_scaled_not_clipped(dtype: type) -> None:
    values = np.linspace(0, 65_535, 64).reshape(8, 8).astype(dtype)
    pixels = decode(encode(Image.fromarray(values), "TIFF"), 8)
    assert np.array_equal(pixels[..., 0], np.round(values / 257).astype(np.uint8))


def test_values_without_a_range_are_refused() -> None:
    with pytest.raises(DecodeError):
        decode(encode(Image.new("F", (8, 8), 0.5), "TIFF"), 8)
    with pytest.raises(DecodeError, match="70000"):
        decode(encode(Image.fromarray(np.full((8, 8), 70_000, dtype=np.int32)), "TIFF"), 8)


def test_exif_rotation_is_applied() -> None:
    image = Image.new("RGB", (8, 8), (0, 0, 0))
    image.paste((255, 255, 255), (0, 0, 8, 4))  # white above
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise to show
    pixels = decode(encode(image, "JPEG", exif=exif, quality=100), 8)
    assert pixels[:, 5:].min() > 200
    assert pixels[:, :3].max() < 50


def test_the_first_frame_of_an_animation_is_taken() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ((255, 0, 0), (0, 0, 255))]
    content = encode(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert tuple(decode(content, 8)[4, 4]) == (255, 0, 0)


def test_large_jpegs_are_antialiased() -> None:
    checks = np.indices((640, 640)).sum(0) % 2 * 255
    pixels = decode(encode(Image.fromarray(checks.astype(np.uint8)), "JPEG", quality=100), 16)
    assert np.abs(pixels.astype(int) - 127).max() < 12


GOOD = encode(Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)), "JPEG")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty file"),
        (b"plain text, whatever its name says", "not an image"),
        (GOOD[: len(GOOD) // 2], "truncated"),
        (GOOD[:10], "."),
        (encode(Image.new("RGB", (64, 64)))[:60], "."),
    ],
)
def test_bad_files_give_a_reason_on_one_line(content: bytes, reason: str) -> None:
    with pytest.raises(DecodeError, match=reason) as caught:
        decode(content, 16)
    assert "\n" not in str(caught.value)


def test_bombs_are_refused_before_they_go_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transform, "MAX_PIXELS", 100)
    with pytest.raises(DecodeError, match="11 x 10"):
        decode(encode(Image.new("RGB", (11, 10))), 8)


def test_pillows_warnings_do_not_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 3_000)  # 64 x 64 is then worth a warning
    assert decode(GOOD, 8).shape == (8, 8, 3)


@pytest.mark.parametrize("channels", [1, 3])
def test_arrays_are_resized(channels: int) -> None:
    image = np.full((8, 6, channels), 77, dtype=np.uint8)
    assert transform.resize(image[:6], 6).base is image
    assert (transform.resize(image, 12) == 77).all()
    assert transform.resize(image, 12).shape == (12, 12, channels)
    assert transform.resize(image[..., 0], 12).shape == (12, 12, 1)


def decode_by_pillow(content: bytes, image_size: int) -> Any:
    """What Pillow alone makes of a file: pixels, or the reason why not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transform, "_decode_small_jpeg", lambda *_: None)
        return judged(content, image_size)


def judged(content: bytes, image_size: int) -> Any:
    try:
        return decode(content, image_size)
    except DecodeError as error:
        return str(error)


def jpegs() -> list[bytes]:
    """All that changes how a JPEG is coded, on one smooth picture."""
    grid = np.random.default_rng(5).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    image = Image.fromarray(grid).resize((48, 48), Image.Resampling.BICUBIC)
    return [
        encode(image.convert(mode), "JPEG", quality=quality, subsampling=sampling, progressive=progressive, **more)
        for mode in ("RGB", "L", "CMYK")
        for quality, sampling in ((75, 2), (95, 0), (30, 1))
        for progressive in (False, True)
        for more in ({}, {"restart_marker_blocks": 2}, {"comment": b"\xff\xd8 words"})
    ]


def turned(image: Image.Image) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encode(image, "JPEG", exif=exif)


def test_small_jpegs_have_pillows_pixels(cifar10_subset: Path) -> None:
    files = [path.read_bytes() for path in sorted(cifar10_subset.rglob("*.jpg"))[::5]]
    made = jpegs()
    for content, size in [*((file, 32) for file in files), *((file, size) for file in made for size in (48, 31, 8))]:
        assert np.array_equal(decode(content, size), decode_by_pillow(content, size))
    quick = sum(transform._decode_small_jpeg(file, 48) is not None for file in made)
    assert quick == len(made) * 2 // 3  # all but CMYK
    assert all(transform._decode_small_jpeg(file, 32) is not None for file in files)


@pytest.mark.parametrize("size", [(512, 512), (500, 375), (333, 512), (129, 67), (64, 32), (20, 400)])
@pytest.mark.parametrize("image_size", [8, 16, 30, 128])
def test_jpegs_are_decoded_at_pillows_fraction_of_their_size(size: tuple[int, int], image_size: int) -> None:
    grid = np.random.default_rng(8).integers(0, 256, (size[1] // 4, size[0] // 4, 3), dtype=np.uint8)
    content = encode(Image.fromarray(grid).resize(size), "JPEG")
    assert np.array_equal(transform._decode_small_jpeg(content, image_size), decode_by_pillow(content, image_size))


def test_what_only_pillow_understands_is_left_to_it() -> None:
    image = Image.fromarray(np.random.default_rng(6).integers(0, 256, (16, 16, 3), dtype=np.uint8))
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    large = encode(Image.new("RGB", (513, 512), (3, 200, 9)), "JPEG")
    for content in (turned(image), encode(image, "JPEG", xmp=xmp), encode(image), large):
        assert transform._decode_small_jpeg(content, 16) is None
        assert np.array_equal(decode(content, 16), decode_by_pillow(content, 16))


def test_damaged_jpegs_get_pillows_verdict() -> None:
    rng = np.random.default_rng(7)
    verdicts = Counter[str]()
    for content in jpegs() * 12:
        bytes_N = np.frombuffer(content, dtype=np.uint8).copy()
        match rng.integers(4):
            case 0:
                bytes_N = bytes_N[: rng.integers(len(bytes_N))]
            case 1:
                bytes_N[rng.integers(2, len(bytes_N), 2)] = rng.integers(0, 256, 2)
            case 2:
                bytes_N = np.delete(bytes_N, rng.integers(2, len(bytes_N)))
            case _:
                bytes_N = np.insert(bytes_N, rng.integers(2, len(bytes_N)), rng.integers(0, 256))
        damaged = bytes_N.tobytes()
        size = int(rng.choice([48, 20]))
        found, expected = judged(damaged, size), decode_by_pillow(damaged, size)
        assert np.array_equal(found, expected)
        verdicts["rejected" if isinstance(expected, str) else "taken"] += 1
        verdicts["quick"] += transform._decode_small_jpeg(damaged, 48) is not None
    assert min(verdicts[verdict] for verdict in ("rejected", "taken", "quick")) > 50


def test_a_crop_is_the_middle_of_the_whole_at_its_own_scale() -> None:
    rng = np.random.default_rng(0)
    for height, width, kind in ((40, 51, "PNG"), (512, 300, "JPEG"), (16, 16, "JPEG"), (700, 900, "JPEG")):
        buffer = io.BytesIO()
        Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(buffer, kind, quality=90)
        whole = decode(buffer.getvalue(), 16, "whole")
        assert whole.shape == (height, width, 3)
        top, left = (height - 16) // 2, (width - 16) // 2
        middle = whole[top : top + 16, left : left + 16]
        assert np.array_equal(decode(buffer.getvalue(), 16, "crop"), middle)
        assert np.array_equal(resize(whole, 16, "crop"), middle)
        assert np.array_equal(resize_mask(whole[..., 0], 16, "crop"), middle[..., 0] + np.uint8(1))
        assert np.array_equal(resize_mask(whole[..., 0], 16, "whole"), whole[..., 0] + np.uint8(1))
        assert resize(whole, 16, "whole") is whole


@pytest.mark.parametrize("size", [(15, 40), (40, 15)])
def test_what_is_too_small_to_be_cropped_is_told(size: tuple[int, int]) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", size).save(buffer, "PNG")
    with pytest.raises(DecodeError, match=rf"^{size[0]} x {size[1]}.*16"):
        decode(buffer.getvalue(), 16, "crop")


@pytest.mark.parametrize("more", [{}, {"icc_profile": b"\xff\xda\xff\xd8" * 20}])
def test_an_orientation_is_seen_wherever_it_stands_before_the_pixels(more: dict[str, bytes]) -> None:
    """Also behind a colour profile that holds the bytes of other markers."""
    image = Image.fromarray(np.random.default_rng(3).integers(0, 256, (40, 60, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    content = encode(image, "JPEG", exif=exif, **more)
    end = content.index(b"\xff\xdb")  # of the segments before the tables
    moved = content[:2] + _segments_reversed(content[2:end]) + content[end:]
    assert moved != content
    for turned_one in (content, moved):
        assert decode(turned_one, 40, "side").shape == (60, 40, 3)


def _segments_reversed(segments: bytes) -> bytes:
    parts = []
    while segments:
        length = 2 + int.from_bytes(segments[2:4])
        parts.append(segments[:length])
        segments = segments[length:]
    return b"".join(reversed(parts))


@pytest.mark.parametrize(("size", "shape"), [((80, 60), (30, 40)), ((60, 90), (45, 30)), ((900, 20), (30, 120))])
def test_the_shorter_side_is_scaled_and_of_panoramas_the_middle(size: tuple[int, int], shape: tuple[int, int]) -> None:
    pixels = np.zeros((size[1], size[0], 3), np.uint8)
    pixels[:, size[0] // 2 :] = 255
    found = decode(encode(Image.fromarray(pixels)), 30, "side")
    assert found.shape == (*shape, 3)
    assert abs(int(found[:, : shape[1] // 2].mean()) - 255 + int(found[:, shape[1] // 2 :].mean())) < 3, "centred"
    np.testing.assert_array_equal(resize(pixels, 30, "side"), found)


@pytest.mark.parametrize("shape", [(375, 500, 3), (500, 375, 3), (40, 60, 1), (20, 30, 3)])
def test_scaled_bytes_are_pillows_to_within_rounding(shape: tuple[int, int, int]) -> None:
    pixels = np.random.default_rng(5).integers(0, 256, shape, dtype=np.uint8)
    found = resize(pixels, 30, "side")
    picture = Image.fromarray(pixels[..., 0] if shape[2] == 1 else pixels)
    expected = np.asarray(picture.resize(found.shape[1::-1], Image.Resampling.BICUBIC)).reshape(found.shape)
    assert np.abs(found.astype(int) - expected).max() <= 1
