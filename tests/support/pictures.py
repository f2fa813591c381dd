"""Folders of real image files, made for a test."""

import random

import numpy as np
from PIL import Image


def make_pictures(root, seed=3):
    """Two classes told apart by brightness: mixed sizes and modes, some damaged; the names of the damaged."""
    chance = random.Random(seed)
    noise = np.random.default_rng(seed)
    damaged = set()
    for label, name in enumerate(("dark", "light")):
        (root / name).mkdir(parents=True)
        for index in range(60):
            width, height = chance.randint(20, 90), chance.randint(20, 90)
            mode = chance.choice(["RGB", "L", "RGBA", "P", "CMYK"])
            pixels = noise.integers(90 * label, 90 * label + 120, (height, width, 3), dtype=np.uint8)
            picture = Image.fromarray(pixels).convert(mode)
            suffix = "jpg" if mode in ("RGB", "L", "CMYK") else "png"
            path = root / name / f"{index:03d}.{suffix}"
            picture.save(path)
            if index % 15 == 7:
                whole = path.read_bytes()
                path.write_bytes(chance.choice([b"", whole[: len(whole) // 2], b"not a picture"]))
                damaged.add(f"{name}/{path.name}")
    (root / "dark" / "notes.txt").write_text("not a sample")
    return damaged
