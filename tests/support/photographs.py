"""Photographs that are generated: as much detail at each scale as photographs have, and files as large as theirs."""

import numpy as np
from PIL import Image

from paceline.conf.data import Data
from paceline.tasks.data.key import preparation_key
from paceline.tasks.data.prepare import manifest, store
from paceline.tasks.data.prepare.chunks import ChunkPlanner
from paceline.tasks.data.prepare.shard import write_shards
from paceline.tasks.data.sources import registry as source


def photograph(rng, height=375, width=500, falloff=1.1):
    """Pixels (H, W, 3) whose amplitudes fall with their frequency, as those of photographs do (Field 1987)."""
    rows, columns = np.fft.fftfreq(height)[:, np.newaxis], np.fft.rfftfreq(width)
    frequency = np.hypot(rows, columns)
    frequency[0, 0] = np.inf
    grey, *tints = (
        np.fft.irfft2(np.fft.rfft2(rng.normal(size=(height, width))) / frequency**falloff, (height, width))
        for _ in range(4)
    )
    pixels = np.stack([0.85 * grey + 0.15 * tint for tint in tints], axis=-1)
    return (128 + 55 * pixels / pixels.std()).clip(0, 255).astype(np.uint8)


def save_photographs(root, number=24, sizes=((60, 80), (90, 60), (64, 64)), quality=90, **more):
    """Two classes of JPEG files with these heights and widths by turns."""
    rng = np.random.default_rng(4)
    for index in range(number):
        folder = root / ("a", "b")[index % 2]
        folder.mkdir(parents=True, exist_ok=True)
        height, width = sizes[index % len(sizes)]
        Image.fromarray(photograph(rng, height, width, **more)).save(folder / f"{index:05}.jpg", quality=quality)
    return root


def prepare_here(data: Data, home):
    """Prepare a set in this process, as the workers would."""
    listing = source.list_samples(data)
    key = preparation_key(listing, data)
    with store.temporary(home, key) as directory:
        records = write_shards(list(ChunkPlanner(listing, data, directory).chunks()))
        facts = manifest.build(listing, data, key, records, 0)
        path = store.publish(home, directory, facts, [])
    return facts.to_prepared_set(path, reused=False, seconds=0.0)
