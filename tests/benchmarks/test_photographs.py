"""Goal 19: loading and preparing photographs of 500 x 375, next to other loaders and to a bare loop, on two cores.

infra/test -m benchmark tests/benchmarks/test_photographs.py -s          about 25 minutes on two quiet cores
NUM_PHOTOGRAPHS=500 infra/test -m benchmark ... -s          about 2 minutes, to try it

The photographs are generated, and their files are as large as those of ImageNet; FALLOFF=1.6 makes them a third of
that. DataLoader reads the files. litdata and SPDL take part where they are found, such as in a folder of their own:

python -m pip install --no-deps --target DIR litdata spdl spdl-core spdl-io          SPDL needs libraries of FFmpeg
PYTHONPATH=DIR infra/test -m benchmark tests/benchmarks/test_photographs.py -s
"""

import multiprocessing
import os
import shutil
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image

from paceline.conf.data import Data
from paceline.conf.recipe import Vary
from paceline.tasks.data.decode import transform
from paceline.tasks.data.decode.transform import scale_bytes
from paceline.tasks.data.loading.loader import make_loader
from paceline.tasks.data.loading.sampling import BatchPlan
from paceline.tasks.data.loading.split_reader import open_split
from paceline.tasks.data.loading.train_loader import LoaderConfig
from paceline.tasks.data.prepare import dask_graph as graph
from paceline.tasks.data.prepare import moments
from paceline.tasks.data.prepare.photographs import encode
from paceline.tasks.data.sources import registry as source
from paceline.tasks.measure.paired_ratio import estimate_ratio
from tests.benchmarks.conftest import at_least, at_most, tell
from tests.benchmarks.peers.photograph_loaders import BATCH, NUM_WORKERS, PEERS, SCALE, SIZE
from tests.support.photographs import photograph

NUM_PHOTOGRAPHS = int(os.environ.get("NUM_PHOTOGRAPHS", "10000"))
FALLOFF = float(os.environ.get("FALLOFF", "1.1"))
NUM_BLOCKS = 3
STORED = 258
RATE = 857  # images/s per core: the highest published rate of decoding ImageNet's photographs (simplejpeg, EPYC)

pytestmark = pytest.mark.timeout(7200)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Windows of a few large pictures: generating each one alone would take ten minutes."""
    directory = tmp_path_factory.mktemp("photographs")
    rng = np.random.default_rng(7)
    scenes = [photograph(rng, 1024, 1536, FALLOFF) for _ in range(6)]
    for index in range(NUM_PHOTOGRAPHS):
        folder = directory / "train" / ("a", "b")[index % 2]
        folder.mkdir(parents=True, exist_ok=True)
        top, left = rng.integers(0, 1024 - 375), rng.integers(0, 1536 - 500)
        pixels = np.ascontiguousarray(scenes[index % 6][top : top + 375, left : left + 500])
        (folder / f"{index:06}.jpg").write_bytes(simplejpeg.encode_jpeg(pixels, 92, "RGB", "420"))
    for folder in ("a", "b"):
        (directory / "test" / folder).mkdir(parents=True)
        (directory / "test" / folder / "0.jpg").write_bytes((directory / "train" / "a" / "000000.jpg").read_bytes())
    return directory


@pytest.fixture(scope="module")
def paths(root):
    found = sorted((root / "train").rglob("*.jpg"))
    sizes = [path.stat().st_size for path in found]
    print(f"\n{len(found)} photographs of 500 x 375, {np.mean(sizes) / 1000:.0f} kB each")
    return found


def settings(root, stored_size):
    folder = {"source": "folder", "root": str(root), "image_size": SIZE, "validation_fraction": 0.0}
    return Data(**folder, stored_size=stored_size, storage="jpeg")


def by_paceline(prepared):
    split = open_split(prepared, "train")
    config = LoaderConfig(
        split,
        prepared.mean,
        prepared.std,
        plan=BatchPlan(split.num_samples, BATCH),
        rank=0,
        seed=1,
        augment="flip_shift",
        shift_pixels=0,
        shuffle_mib=256,
        device=torch.device("cpu"),
        channels_last=False,
        vary=Vary(crop_scale=SCALE),
    )
    loader = make_loader("streaming", config)
    return lambda: (batch.images_NCHW for batch in loader)


def seconds_of(epoch):
    number, started = 0, time.perf_counter()
    for images_NCHW in epoch():
        assert images_NCHW.shape[1:] == (3, SIZE, SIZE)
        number += len(images_NCHW)
    assert number >= NUM_PHOTOGRAPHS * 0.95, number
    return (time.perf_counter() - started) / number


def compare(ours, theirs):
    """Times of theirs over ours in blocks of A B B A, and seconds per image of both."""
    ratios, times = [], {ours: [], theirs: []}
    for _ in range(NUM_BLOCKS):
        block = [(epoch, seconds_of(epoch)) for epoch in (ours, theirs, theirs, ours)]
        for epoch, seconds in block:
            times[epoch].append(seconds)
        (_, a), (_, b), (_, c), (_, d) = block
        ratios.append((b + c) / (a + d))
    return estimate_ratio(np.log(ratios)), np.median(times[ours]), np.median(times[theirs])


@pytest.mark.parametrize("stored_size", [STORED, 375])
def test_loading_next_to_other_loaders(root, paths, tmp_path, cluster_address, stored_size):
    """At 258 as `auto` stores them; at 375 all loaders decode as many pixels."""
    torch.set_num_threads(NUM_WORKERS)
    data = settings(root, stored_size)
    prepared = graph.prepare(source.list_samples(data), data, tmp_path / "home", cluster_address)
    ours = by_paceline(prepared)
    seconds_of(ours)
    for name, make in PEERS.items():
        try:
            theirs = make(paths, tmp_path)
            seconds_of(theirs)
        except (ImportError, RuntimeError) as error:
            print(f"{name} does not take part: {str(error).splitlines()[0][:200]}")
            continue
        found, mine, other = compare(ours, theirs)
        tell(
            f"goal 19: images/s from jpeg storage at {stored_size} pixels over those of {name} > 1",
            f"{found.value:.2f} ({1 / mine / NUM_WORKERS:,.0f} and {1 / other / NUM_WORKERS:,.0f} images/s per core, "
            f"{NUM_BLOCKS} blocks of A B B A)",
            f"{found.low:.2f} to {found.high:.2f}",
            at_least(found.low, found.high, 1.0),
        )


def by_pillow(pixels, height, width):
    return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC))


def by_torch(pixels, height, width):
    return scale_bytes(pixels, (height, width), "bicubic")


def stored_shape(pixels):
    return (round(side * STORED / min(pixels.shape[:2])) for side in pixels.shape[:2])


def bare_loop(work, scale):
    """Read, decode, scale, encode and write some files; no checks, no checksums, no Dask."""
    paths, target = work
    torch.set_num_threads(1)
    with Path(target).open("wb") as stream:
        for path in paths:
            pixels = simplejpeg.decode_jpeg(Path(path).read_bytes())
            stream.write(simplejpeg.encode_jpeg(scale(pixels, *stored_shape(pixels)), 90, "RGB", "420"))
        stream.flush()
        os.fsync(stream.fileno())


def decode_only(work):
    """What the published rate is of."""
    for path in work[0]:
        simplejpeg.decode_jpeg(Path(path).read_bytes())


BARE_LOOPS = {
    "decoding, Pillow's scaling and encoding": partial(bare_loop, scale=by_pillow),
    "decoding, the same scaling and encoding": partial(bare_loop, scale=by_torch),
    "decoding alone": decode_only,
}


@pytest.mark.parametrize("name", BARE_LOOPS)
def test_preparing_next_to_a_bare_loop(root, paths, tmp_path, cluster_address, name):
    data = settings(root, STORED)
    listing = source.list_samples(data)
    parts = [(paths[number::8], str(tmp_path / f"{number}.bin")) for number in range(8)]

    def on_dask():
        graph.prepare(replace(listing), data, tmp_path / "home", cluster_address)  # a listing remembers its hash

    def in_a_pool():
        list(pool.map(BARE_LOOPS[name], parts))

    def seconds(prepare):
        started = time.monotonic()
        prepare()
        seconds = time.monotonic() - started
        shutil.rmtree(tmp_path / "home", ignore_errors=True)
        return seconds

    ratios, ours, theirs = [], [], []
    with ProcessPoolExecutor(NUM_WORKERS, multiprocessing.get_context("spawn")) as pool:
        for prepare in (on_dask, in_a_pool):
            seconds(prepare)
        for _ in range(NUM_BLOCKS):
            first, second, third, fourth = map(seconds, (on_dask, in_a_pool, in_a_pool, on_dask))
            ratios.append((first + fourth) / (second + third))
            ours += [first, fourth]
            theirs += [second, third]
            print(f"Paceline {first:.2f}, {fourth:.2f} s; {name} {second:.2f}, {third:.2f} s")
    found = estimate_ratio(np.log(ratios))
    if name == "decoding alone":
        rates = NUM_PHOTOGRAPHS / np.array(ours) / NUM_WORKERS
        tell(f"goal 19: photographs prepared per second and core >= {RATE}", f"{np.median(rates):,.0f}",
             f"{rates.min():,.0f} to {rates.max():,.0f}", at_least(rates.min(), rates.max(), RATE))  # fmt: skip
        decoded = NUM_PHOTOGRAPHS / np.array(theirs) / NUM_WORKERS
        print(f"decoding alone: {np.median(decoded):,.0f} per second and core, {found.value:.2f} times as many")
        return
    tell(
        f"goal 19: time of preparation / of a bare loop on two processes ({name}) <= 1.05",
        f"{found.value:.3f} ({NUM_BLOCKS} blocks of A B B A)",
        f"{found.low:.3f} to {found.high:.3f}",
        at_most(found.low, found.high, 1.05),
    )


def test_time_and_detail_of_scaling(paths):
    """CPU time of each stage of a photograph on one thread, and how far its pixels are from those of Pillow."""
    torch.set_num_threads(1)
    files = [path.read_bytes() for path in paths[:: max(1, len(paths) // 100)]]
    whole = [simplejpeg.decode_jpeg(content) for content in files]
    scaled = {
        scale.__name__: [scale(pixels, *stored_shape(pixels)) for pixels in whole] for scale in (by_pillow, by_torch)
    }
    stages = {
        "decode": (simplejpeg.decode_jpeg, files),
        "scale by Pillow": (lambda pixels: by_pillow(pixels, *stored_shape(pixels)), whole),
        "scale by torch": (lambda pixels: by_torch(pixels, *stored_shape(pixels)), whole),
        "encode": (lambda pixels: encode(pixels, 90), scaled["by_torch"]),
        "sum": (moments.sum_pixels, scaled["by_torch"]),
        "all of preparation": (lambda content: encode(transform.decode(content, STORED, "side"), 90), files),
    }
    for name, (work, inputs) in stages.items():
        times = []
        for _ in range(12):
            started = time.thread_time()
            for each in inputs:
                work(each)
            times.append((time.thread_time() - started) / len(inputs))
        print(f"{name}: {1000 * min(times):.3f} ms of CPU time")
    ours, theirs = (np.stack(scaled[name]).astype(float) for name in ("by_torch", "by_pillow"))
    stored = np.stack([simplejpeg.decode_jpeg(encode(pixels, 90)) for pixels in scaled["by_torch"]]).astype(float)
    detail = [float((np.diff(images, axis=2) ** 2).mean()) for images in (ours, theirs)]
    print(
        f"PSNR of the scaled pixels to Pillow's {psnr(ours, theirs):.1f} dB (largest difference "
        f"{np.abs(ours - theirs).max():.0f}), of the stored JPEG to its pixels {psnr(stored, ours):.1f} dB; "
        f"energy of differences between neighbours {detail[0] / detail[1]:.4f} times Pillow's"
    )


def psnr(one, other):
    return 10 * np.log10(255**2 / ((one - other) ** 2).mean())
