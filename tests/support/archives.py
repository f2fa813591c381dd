"""WebDataset shards made for a test."""

import io
import tarfile

import numpy as np
from PIL import Image

COLOURS = {"blue": (20, 30, 220), "red": (220, 30, 20)}


def jpeg(colour, seed, size=20):
    noise = np.random.default_rng(seed).integers(-15, 15, (size, size, 3))
    buffer = io.BytesIO()
    Image.fromarray((np.array(colour) + noise).clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


def save_tar(path, members):
    """An archive of (name, content)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def samples_of(numbers, label=lambda name: (".cls", name.encode())):
    """Members of samples, blue and red in turn; `label` gives suffix and content for a class."""
    for number in numbers:
        name = sorted(COLOURS)[number % 2]
        suffix, content = label(name)
        yield f"{number:04d}.jpg", jpeg(COLOURS[name], number, 20 + number % 5)
        yield f"{number:04d}{suffix}", content


def make_shards(root, num_train=24, num_test=8):
    """Two archives for training and one for the test."""
    half = num_train // 2
    save_tar(root / "train-0000.tar", samples_of(range(half)))
    save_tar(root / "train-0001.tar", samples_of(range(half, num_train)))
    save_tar(root / "test-0000.tar", samples_of(range(num_train, num_train + num_test)))
