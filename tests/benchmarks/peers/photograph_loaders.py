"""Other loaders of photographs: random-resized crops of 224 pixels, flips, and normalisation, in batches of float32.

Each is as its documentation has it for images, on two processes or threads. Each transforms by Pillow or by its own
means, and yields one epoch of (N, 3, 224, 224).
"""

import io
import math
import random
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

SIZE, BATCH, NUM_WORKERS = 224, 64, 2
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
MEAN, STD = (torch.tensor(values).view(3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))


def crop_of(width, height):
    """As torchvision's RandomResizedCrop: left, top, width and height."""
    for _ in range(10):
        area = width * height * random.uniform(*SCALE)
        ratio = math.exp(random.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        wide, tall = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < tall <= height:
            return random.randint(0, width - wide), random.randint(0, height - tall), wide, tall
    side = min(width, height)
    return (width - side) // 2, (height - side) // 2, side, side


def transform(content):
    """The transforms of torchvision's reference training, by Pillow."""
    image = Image.open(io.BytesIO(content)).convert("RGB")
    left, top, wide, tall = crop_of(*image.size)
    image = image.crop((left, top, left + wide, top + tall)).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div(255)
    return pixels.sub_(MEAN).div_(STD)


class Files(Dataset):
    def __init__(self, paths):
        self.paths = paths

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return transform(Path(self.paths[index]).read_bytes()), index % 2


def by_dataloader(paths, directory):
    loader = DataLoader(Files(paths), BATCH, shuffle=True, num_workers=NUM_WORKERS, persistent_workers=True)
    return lambda: (images for images, _ in loader)


def sample_of(path):
    """For litdata's writer."""
    return {"image": Path(path).read_bytes(), "label": 0}


def transform_sample(sample):
    """For litdata's reader."""
    return transform(sample["image"]), sample["label"]


def by_litdata(paths, directory):
    import litdata

    target = str(directory / "litdata")
    litdata.optimize(sample_of, [str(path) for path in paths], target, chunk_bytes="64MB", num_workers=1, verbose=False)

    data = litdata.StreamingDataset(target, shuffle=True, transform=transform_sample)
    loader = litdata.StreamingDataLoader(data, batch_size=BATCH, num_workers=NUM_WORKERS, persistent_workers=True)
    return lambda: (images for images, _ in loader)


def by_spdl(paths, directory):
    import spdl.io
    from spdl.pipeline import PipelineBuilder

    spdl.io.demux_image(Path(paths[0]).read_bytes())  # fails here where FFmpeg's libraries are missing

    def decode(path):
        packets = spdl.io.demux_image(str(path))
        left, top, wide, tall = crop_of(packets.width, packets.height)
        flip = ",hflip" if random.random() < 0.5 else ""
        chain = f"crop={wide}:{tall}:{left}:{top},scale={SIZE}:{SIZE}:flags=bilinear{flip},format=pix_fmts=rgb24"
        return spdl.io.decode_packets(packets, filter_desc=chain)

    def batch(frames):
        images = torch.from_numpy(spdl.io.to_numpy(spdl.io.convert_frames(frames)))
        return images.permute(0, 3, 1, 2).contiguous().float().div(255).sub_(MEAN).div_(STD)

    def epoch():
        pipeline = (
            PipelineBuilder()
            .add_source(iter(random.sample(list(paths), len(paths))))
            .pipe(decode, concurrency=NUM_WORKERS)
            .aggregate(BATCH)
            .pipe(batch)
            .add_sink(2)
            .build(num_threads=NUM_WORKERS)
        )
        with pipeline.auto_stop():
            yield from pipeline.get_iterator(timeout=60)

    return epoch


PEERS = {"DataLoader with Pillow": by_dataloader, "litdata": by_litdata, "SPDL": by_spdl}
