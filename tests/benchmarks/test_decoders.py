"""Which library decodes fastest, and what each makes of odd and damaged files.

infra/test -m benchmark tests/benchmarks/test_decoders.py -s          about a minute on a quiet core

Only Pillow and simplejpeg are ours. The others take part where they are found, such as in a folder of their own:

.venv/bin/python -m pip install --no-deps --target DIR opencv-python-headless imagecodecs "PyTurboJPEG<2"
PYTHONPATH=DIR TURBOJPEG=/usr/lib/x86_64-linux-gnu/libturbojpeg.so.0 infra/test -m benchmark ... -s

pillow-simd takes the place of Pillow, and has no wheels; torchvision has none for a CPU build of torch here.
"""

import importlib
import io
import os
import time
from dataclasses import replace

import numpy as np
import pytest
import simplejpeg
from PIL import Image, ImageOps

from paceline.conf.data import Data
from paceline.tasks.data.decode import transform
from paceline.tasks.data.listing import SPLITS
from paceline.tasks.data.prepare.chunks import ChunkPlanner
from paceline.tasks.data.prepare.shard import write_shards
from paceline.tasks.data.sources import registry as source
from paceline.tasks.measure.paired_ratio import estimate_ratio
from tests.benchmarks.conftest import at_most, tell

NUM_ROUNDS = 8
VISIT_SECONDS = 0.08
NUM_FILES = 200


def fitted(pixels, size):
    if pixels.shape[:2] == (size, size):
        return pixels
    return np.asarray(ImageOps.fit(Image.fromarray(pixels), (size, size), method=Image.Resampling.BICUBIC))


def scale_of(width, height, size):
    """The power of two by which a JPEG can be decoded smaller and still have twice the wanted size."""
    return next(scale for scale in (8, 4, 2, 1) if scale == 1 or min(width, height) >= 2 * size * scale)


def by_pillow(content, size):
    quick, transform._decode_small_jpeg = transform._decode_small_jpeg, lambda content, size, fit: None
    try:
        return transform.decode(content, size)
    finally:
        transform._decode_small_jpeg = quick


def by_simplejpeg(content, size):
    height, width, _, _ = simplejpeg.decode_jpeg_header(content)
    scale = scale_of(width, height, size)
    smaller = {"min_height": -(-height // scale), "min_width": -(-width // scale)} if scale > 1 else {}
    return fitted(simplejpeg.decode_jpeg(content, **smaller), size)


def by_opencv(cv2):
    flags = {
        1: cv2.IMREAD_COLOR_RGB,
        2: cv2.IMREAD_REDUCED_COLOR_2,
        4: cv2.IMREAD_REDUCED_COLOR_4,
        8: cv2.IMREAD_REDUCED_COLOR_8,
    }
    cv2.setNumThreads(1)

    def decode(content, size):
        # It has no way to ask for the size of an image in memory, so the benchmark's own reader of headers helps out.
        scale = 1
        if content.startswith(b"\xff\xd8"):
            height, width, _, _ = simplejpeg.decode_jpeg_header(content)
            scale = scale_of(width, height, size)
        pixels = cv2.imdecode(np.frombuffer(content, np.uint8), flags[scale])
        if pixels is None:
            raise ValueError("None, without a reason")
        pixels = pixels if scale == 1 else pixels[..., ::-1]
        if pixels.shape[:2] == (size, size):
            return np.ascontiguousarray(pixels)
        side = min(pixels.shape[:2])
        top, left = (pixels.shape[0] - side) // 2, (pixels.shape[1] - side) // 2
        square = np.ascontiguousarray(pixels[top : top + side, left : left + side])
        return cv2.resize(square, (size, size), interpolation=cv2.INTER_AREA)

    return decode


def by_imagecodecs(imagecodecs):
    def decode(content, size):
        png = content.startswith(b"\x89PNG")
        pixels = imagecodecs.png_decode(content) if png else imagecodecs.jpeg8_decode(content)
        return fitted(np.atleast_3d(pixels), size)

    return decode


def by_turbojpeg(turbojpeg):
    library = turbojpeg.TurboJPEG(os.environ.get("TURBOJPEG"))

    def decode(content, size):
        width, height, _, _ = library.decode_header(content)
        scale = scale_of(width, height, size)
        return fitted(library.decode(content, pixel_format=turbojpeg.TJPF_RGB, scaling_factor=(1, scale)), size)

    return decode


def libraries():
    """Every way to decode that is found here, Pillow's first."""
    found = {"Pillow": by_pillow, "ours": transform.decode, "simplejpeg": by_simplejpeg}
    for name, module, build in (
        ("OpenCV", "cv2", by_opencv),
        ("imagecodecs", "imagecodecs", by_imagecodecs),
        ("PyTurboJPEG", "turbojpeg", by_turbojpeg),
    ):
        try:
            found[name] = build(importlib.import_module(module))
        except (ImportError, RuntimeError) as error:
            print(f"{name} is left out: {' '.join(str(error).split())[:90]}")
    return found


def photograph(width, height, seed):
    """Smooth, with some noise: about as many bytes as a real one."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (height // 24 + 2, width // 24 + 2, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(np.int16)
    return Image.fromarray(np.clip(smooth + rng.integers(-6, 7, (height, width, 3)), 0, 255).astype(np.uint8))


def encoded(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def contents_of(kind, width, height, files):
    if kind == "CIFAR-10":
        return files
    options = {"quality": 85} if kind == "JPEG" else {}
    return [encoded(photograph(width, height, seed), kind, **options) for seed in range(4)]


def seconds_per_image(decode, contents, size):
    """At least a visit's worth of passes over the files."""
    num_images, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < VISIT_SECONDS:
        for content in contents[num_images % len(contents) :][:20]:
            decode(content, size)
            num_images += 1
    return elapsed / num_images


def compare(arms):
    """Median seconds of each arm, and its ratio to the first, from rounds in alternating order."""
    rounds = []
    for number in range(NUM_ROUNDS + 1):
        names = list(arms) if number % 2 else list(reversed(arms))
        rounds.append({name: arms[name]() for name in names})
    rounds = rounds[1:]  # the first one warms up
    first = next(iter(arms))
    return {
        name: (
            float(np.median([one[name] for one in rounds])),
            estimate_ratio(np.log([one[name] / one[first] for one in rounds])),
        )
        for name in arms
    }


@pytest.fixture(scope="module")
def cifar10_files(cifar10_jpeg_root):
    return [path.read_bytes() for path in sorted(cifar10_jpeg_root.rglob("*.jpg"))[:: 60_000 // NUM_FILES]]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "width", "height", "size"),
    [
        ("CIFAR-10", 32, 32, 32),
        ("JPEG", 96, 96, 96),
        ("JPEG", 96, 96, 64),
        ("JPEG", 500, 375, 64),
        ("JPEG", 500, 375, 224),
        ("JPEG", 1920, 1080, 64),
        ("JPEG", 1920, 1080, 224),
        ("PNG", 32, 32, 32),
        ("PNG", 500, 375, 224),
    ],
)
def test_time_to_decode_and_resize(kind, width, height, size, cifar10_files):
    contents = contents_of(kind, width, height, cifar10_files)
    expected = by_pillow(contents[0], size).astype(int)
    arms = {}
    for name, decode in libraries().items():
        try:
            difference = np.abs(decode(contents[0], size).astype(int) - expected).max()
        except Exception as error:  # noqa: BLE001 - each library has its own
            print(f"{name}: {error}")
            continue
        print(f"{name}: largest difference to Pillow {difference}")
        arms[name] = lambda decode=decode: seconds_per_image(decode, contents, size)
    for name, (seconds, ratio) in compare(arms).items():
        tell(
            f"{kind} {width}x{height} to {size}: time of {name} / Pillow",
            f"{ratio.value:.3f} ({1e6 * seconds:.0f} microseconds an image)",
            f"{ratio.low:.3f} to {ratio.high:.3f}",
            "",
        )


@pytest.mark.timeout(900)
def test_a_whole_chunk_of_cifar10(cifar10_jpeg_root, tmp_path):
    """Read, decode, check, write and synchronise 1,024 files, with the quick way for small JPEGs or without."""
    data = Data(source="cifar10", root=str(cifar10_jpeg_root), image_size=32)
    chunks = ChunkPlanner(source.list_samples(data), data, tmp_path).chunks()
    for split in SPLITS:
        (tmp_path / split).mkdir()
    chunk = next(chunks)
    written = set()

    def seconds(quick):
        usual = transform._decode_small_jpeg
        if not quick:
            transform._decode_small_jpeg = lambda content, size: None
        started = time.perf_counter()
        try:
            record = write_shards([replace(chunk, number=len(written))])[0]
        finally:
            transform._decode_small_jpeg = usual
        elapsed = time.perf_counter() - started
        written.add(record.files[0].sha256)
        return elapsed / record.num_samples

    found = compare({"Pillow": lambda: seconds(False), "ours": lambda: seconds(True)})
    assert len(written) == 1
    seconds_of_ours, ratio = found["ours"]
    tell(
        "a chunk of CIFAR-10, with simplejpeg for small JPEGs / with Pillow alone, <= 0.8",
        f"{ratio.value:.3f} ({1e6 * seconds_of_ours:.0f} microseconds a file)",
        f"{ratio.low:.3f} to {ratio.high:.3f}",
        at_most(ratio.low, ratio.high, 0.8),
    )


def odd_files():
    """Kinds that real sets hold, and a decoder gets wrong quietly."""
    image = photograph(32, 32, 1)
    exif = Image.Exif()
    exif[0x0112] = 6
    sixteen = Image.fromarray(np.asarray(image)[..., 0].astype(np.uint16) * 257)
    clear = image.convert("RGBA")
    clear.putalpha(64)
    jpeg, png = encoded(image, "JPEG", quality=90), encoded(image, "PNG")
    flipped = bytearray(jpeg)
    flipped[len(jpeg) * 2 // 3] ^= 0x55
    flipped_png = bytearray(png)
    flipped_png[len(png) // 2] ^= 0x55
    return {
        "JPEG": jpeg,
        "JPEG, progressive": encoded(image, "JPEG", progressive=True),
        "JPEG, grey": encoded(image.convert("L"), "JPEG"),
        "JPEG, CMYK": encoded(image.convert("CMYK"), "JPEG"),
        "JPEG, turned by Exif": encoded(image, "JPEG", exif=exif),
        "JPEG, truncated": jpeg[: len(jpeg) * 2 // 3],
        "JPEG, without its end": jpeg[:-2],
        "JPEG, a byte flipped": bytes(flipped),
        "JPEG, empty": b"",
        "PNG": png,
        "PNG, 16 bits": encoded(sixteen, "PNG"),
        "PNG, palette": encoded(image.quantize(16), "PNG"),
        "PNG, alpha": encoded(clear, "PNG"),
        "PNG, truncated": png[: len(png) * 2 // 3],
        "PNG, a byte flipped": bytes(flipped_png),
    }


def verdict_on(decode, content):
    try:
        return decode(content, 32)
    except Exception as error:  # noqa: BLE001 - each library has its own
        return f"{type(error).__name__}: {' '.join(str(error).split())[:60]}"


def test_odd_and_damaged_files():
    found = libraries()
    for kind, content in odd_files().items():
        expected = verdict_on(by_pillow, content)
        print(f"\n{kind}: Pillow: {expected if isinstance(expected, str) else 'pixels'}")
        assert np.array_equal(verdict_on(transform.decode, content), expected), kind
        for name, decode in found.items():
            outcome = verdict_on(decode, content)
            if isinstance(outcome, np.ndarray):
                comparable = isinstance(expected, np.ndarray) and outcome.shape == expected.shape
                difference = np.abs(outcome.astype(int) - expected).max() if comparable else None
                outcome = f"pixels {outcome.dtype} {outcome.shape}, largest difference {difference}"
            if name not in ("Pillow", "ours"):
                print(f"    {name}: {outcome}")
