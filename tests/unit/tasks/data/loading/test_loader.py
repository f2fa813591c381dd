"""The three training loaders deliver the same batches; evaluation covers each sample once."""

from __future__ import annotations

import itertools
import mmap
import threading
import time
from pathlib import Path
from typing import Any, get_args

import numpy as np
import psutil
import pytest
import torch

from paceline.conf.execution import Loading
from paceline.conf.recipe import FLIPPING, Augment
from paceline.tasks.data.loading import resident
from paceline.tasks.data.loading.batch import Normalise, gather_windows, pad, window_numbers, windows
from paceline.tasks.data.loading.loader import EvaluationLoader, make_loader
from paceline.tasks.data.loading.sampling import BatchPlan, Shuffle, StepSchedule, epoch_augmentation, epoch_order
from paceline.tasks.data.loading.streaming import mirrors
from paceline.tasks.data.loading.train_loader import LoaderConfig, TrainLoader
from paceline.tasks.data.split import Split
from paceline.tasks.model.batch import Batch

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
KINDS: tuple[Loading, ...] = ("resident", "streaming", "foreground")
FLIPS = sorted(FLIPPING)
FILL = np.round(np.array(MEAN) * 255).astype(np.uint8)
CPU = torch.device("cpu")
SHUFFLE = Shuffle.of(11 * 9 * 3, 1)


def make_split(directory: Path, sizes: tuple[int, ...] = (40, 1, 62), channels: int = 3, targets: bool = True) -> Split:
    rng = np.random.default_rng(5)
    images = []
    for number, size in enumerate(sizes):
        path = directory / f"{number}.npy"
        np.save(path, rng.integers(0, 256, (size, 11, 9, channels), dtype=np.uint8))
        images.append(np.load(path, mmap_mode="r"))
    num = sum(sizes)
    return Split(
        name="train",
        images=images,
        labels_N=rng.integers(0, 10, num),
        targets_NT=rng.random((num, 2), dtype=np.float32) if targets else None,
        image_shape=(11, 9, channels),
    )


@pytest.fixture
def split(tmp_path: Path) -> Split:
    return make_split(tmp_path)


def loader_of(split: Split, loading: Loading, **changes: Any) -> TrainLoader:
    world = changes.pop("world", 1)
    channels = split.image_shape[2]
    settings: dict[str, Any] = {
        "plan": BatchPlan(split.num_samples, changes.pop("batch", 16), world),
        "rank": 0,
        "seed": 3,
        "augment": "flip_shift",
        "shift_pixels": 2,
        "shuffle_mib": 1,
        "device": CPU,
        "channels_last": False,
        **changes,
    }
    in_background = settings.pop("in_background", None)
    first_step = settings.pop("first_step", 0)
    loader = make_loader(loading, LoaderConfig(split, MEAN[:channels], STD[:channels], **settings))
    loader.seek(first_step)
    if in_background is not None:
        loader.in_background = in_background
    return loader


@pytest.mark.parametrize("channels", [1, 3])
def test_both_ways_to_flip_give_the_same_pixels(channels: int) -> None:
    images_NHWC = np.random.default_rng(1).integers(0, 256, (5, 11, 9, channels), dtype=np.uint8)
    for mirror in mirrors((11, 9, channels)):
        np.testing.assert_array_equal(mirror(images_NHWC), images_NHWC[:, :, ::-1])
        assert mirror(images_NHWC[:0]).shape == (0, 11, 9, channels)


def assert_equal(first: list[Batch], second: list[Batch]) -> None:
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.images_NCHW, b.images_NCHW)
        assert torch.equal(a.labels_N, b.labels_N)
        assert (a.targets_NT is None) == (b.targets_NT is None)
        if a.targets_NT is not None and b.targets_NT is not None:
            assert torch.equal(a.targets_NT, b.targets_NT)
        assert a.weight == b.weight


@pytest.mark.parametrize("augment", get_args(Augment))
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("channels", [1, 3])
def test_loaders_are_equal_bit_for_bit(tmp_path: Path, augment: Augment, channels_last: bool, channels: int) -> None:
    split = make_split(tmp_path, channels=channels, targets=channels == 1)
    found = {}
    for name in (*KINDS, "thread"):
        kind = "streaming" if name == "thread" else name
        loader = loader_of(split, kind, augment=augment, channels_last=channels_last)
        if kind == "streaming":
            loader.in_background = name == "thread"
        found[name] = [batch for _ in range(2) for batch in loader]
        assert loader.next_step == 2 * len(loader)
        loader.close()
    assert_equal(found["resident"], found["streaming"])
    assert_equal(found["resident"], found["foreground"])
    assert_equal(found["resident"], found["thread"])
    layout = torch.channels_last if channels_last else torch.contiguous_format
    for batches in found.values():
        assert all(batch.images_NCHW.is_contiguous(memory_format=layout) for batch in batches)
        assert all(batch.images_NCHW.dtype == torch.float32 for batch in batches)
        assert {_strides(batch) for batch in batches} == {_strides(found["resident"][0])}, "convolutions go by them"


def _strides(batch: Batch) -> tuple[int, ...]:
    """Within an image, in the order N, C, H, W; of one channel too."""
    return batch.images_NCHW.stride()


@pytest.mark.parametrize("augment", FLIPS)
def test_batches_are_what_the_order_says(split: Split, augment: Augment) -> None:
    order = epoch_order(split.num_samples, 3, 0, SHUFFLE)
    flip, dy, dx = epoch_augmentation(order, 3, 0, augment, 2)
    batch = next(iter(loader_of(split, "resident", batch=32, augment=augment)))
    everything = np.concatenate([np.asarray(shard) for shard in split.images])
    for position in range(32):
        image = everything[order[position]]
        image = image[:, ::-1] if flip[position] else image
        padded = pad(image, 2, FILL)
        window = padded[dy[position] : dy[position] + 11, dx[position] : dx[position] + 9]
        expected = (window / 255 - np.array(MEAN)) / np.array(STD)
        assert np.allclose(batch.images_NCHW[position].permute(1, 2, 0).numpy(), expected, atol=1e-5)
    assert np.array_equal(batch.labels_N.numpy(), split.labels_N[order[:32]])


@pytest.mark.parametrize("augment", FLIPS)
def test_without_room_for_the_mirror_the_batches_are_the_same(
    split: Split, monkeypatch: pytest.MonkeyPatch, augment: Augment
) -> None:
    roomy = loader_of(split, "resident", augment=augment)
    assert len(roomy._windows) > 2 * split.num_samples * 11 * 9, "a mirrored copy is made"
    expected = list(roomy)
    del roomy  # loaders share what is on a device
    monkeypatch.setattr(resident, "free_bytes", lambda device: 0)
    narrow = loader_of(split, "resident", augment=augment)
    assert len(narrow._windows) < 2 * split.num_samples * 11 * 9
    assert loader_of(split, "resident", augment=augment)._padded_NHWC is narrow._padded_NHWC
    assert_equal(expected, list(narrow))


@pytest.mark.parametrize("augment", FLIPS)
@pytest.mark.parametrize("kind", KINDS)
def test_resume_in_the_middle(split: Split, kind: Loading, augment: Augment) -> None:
    whole = loader_of(split, kind, augment=augment)
    batches = [batch for _ in range(3) for batch in whole]
    first = len(whole) + 2
    resumed = loader_of(split, kind, first_step=first, augment=augment)
    assert_equal(batches[first : 2 * len(whole)], list(resumed))
    assert_equal(batches[2 * len(whole) :], list(resumed))
    resumed.seek(1)
    assert_equal(batches[1 : len(whole)], list(resumed))
    for loader in (whole, resumed):
        loader.close()


@pytest.mark.parametrize("augment", FLIPS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_each_global_batch(split: Split, kind: Loading, world: int, augment: Augment) -> None:
    alone = list(loader_of(split, kind, batch=30, augment=augment))
    plan = BatchPlan(split.num_samples, 30, world)
    ranks = [list(loader_of(split, kind, plan=plan, rank=rank, augment=augment)) for rank in range(world)]
    check_shared(alone, split, plan, ranks)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, 2, 5])
def test_a_group_takes_up_what_another_has_begun(split: Split, kind: Loading, world: int) -> None:
    """Its rest of the epoch ends with a larger batch than a whole epoch, or with fewer samples than ranks."""
    num = split.num_samples
    for seen in range(1, num, 7):
        plan = BatchPlan(num, 8 * world, world)
        course = StepSchedule(plan, 3, 1, seen)
        positions = []
        for rank in range(world):
            loader = loader_of(split, kind, plan=plan, rank=rank)
            loader.follow(course)
            parts = [batch.labels_N for batch in loader]
            loader.close()
            epoch, rest, _ = course.locate(3)
            assert len(parts) == rest.steps_per_epoch
            for step, labels in enumerate(parts):
                here = epoch_order(num, 3, epoch, SHUFFLE)[
                    rest.local(step, rank, epoch_order(num, 3, epoch, SHUFFLE), split.shards_of)
                ]
                assert labels.tolist() == split.labels_N[here].tolist()
                positions += rest.local(step, rank, epoch_order(num, 3, epoch, SHUFFLE), split.shards_of).tolist()
        assert set(positions) == set(range(seen, num))


def check_shared(alone: list[Batch], split: Split, plan: BatchPlan, ranks: list[list[Batch]]) -> None:
    order = epoch_order(split.num_samples, 3, 0, SHUFFLE)
    for step, batch in enumerate(alone):
        parts = [of_rank[step] for of_rank in ranks]
        positions = np.concatenate([plan.local(step, rank, order, split.shards_of) for rank in range(len(ranks))])
        images = torch.cat([part.images_NCHW for part in parts])
        assert torch.equal(images[np.argsort(positions)], batch.images_NCHW)
        mean = sum(part.labels_N.double().mean() * part.weight for part in parts) / len(ranks)
        assert mean == pytest.approx(batch.labels_N.double().mean())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loads", [(1.0, 5.0), (5.0, 1.0)])
def test_unequal_ranks_share_each_global_batch(split: Split, kind: Loading, loads: tuple[float, ...]) -> None:
    alone = list(loader_of(split, kind, batch=30))
    plan = BatchPlan(split.num_samples, 30, 2, loads)
    ranks = [list(loader_of(split, kind, plan=plan, rank=rank)) for rank in range(2)]
    assert {len(part.labels_N) for part in ranks[0][:-1]} == {5 if loads[0] == 1 else 25}
    check_shared(alone, split, plan, ranks)


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_samples_than_ranks_go_to_each_of_them(tmp_path: Path, kind: Loading) -> None:
    split = make_split(tmp_path, sizes=(2,))
    (batch,) = list(loader_of(split, kind, world=3, rank=2))
    assert batch.images_NCHW.shape == (2, 3, 11, 9)
    assert batch.weight == 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_iterators_are_lazy(split: Split, kind: Loading) -> None:
    threads = threading.active_count()
    loader = loader_of(split, kind)
    unused = [iter(loader) for _ in range(3)]
    assert threading.active_count() == threads
    used = iter(loader)
    next(used)
    assert loader.next_step == 1
    del unused
    assert len(list(used)) == len(loader) - 1
    loader.close()


def streaming_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "paceline-streaming"]


def test_streaming_threads_end_on_close_and_on_abandonment(split: Split) -> None:
    loader = loader_of(split, "streaming", batch=4, in_background=True)
    iterator = iter(loader)
    next(iterator)
    assert streaming_threads()
    loader.close()
    assert not streaming_threads()
    abandoned = iter(loader)
    next(abandoned)
    del abandoned
    assert not streaming_threads()
    assert loader.next_step == 2
    list(loader)
    assert not streaming_threads()


def test_a_paused_thread_reads_nothing_until_the_next_batch_is_taken(
    split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather, may_read, read = Split.gather_by_shard, threading.Semaphore(2), list[int]()

    def count(self: Split, *args: Any) -> Any:
        may_read.acquire()
        read.append(1)
        return gather(self, *args)

    monkeypatch.setattr(Split, "gather_by_shard", count)
    loader = loader_of(split, "streaming", batch=2, in_background=True)
    batches = iter(loader)
    next(batches)
    loader.pause()
    may_read.release(100)
    time.sleep(0.3)  # in which a thread that is not paused reads six
    assert len(read) <= 3, "the third may have been under way"
    assert len(list(batches)) == len(loader) - 1
    loader.close()


def test_errors_of_the_thread_reach_the_consumer(split: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(Split, "gather_by_shard", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        list(loader_of(split, "streaming", in_background=True))
    assert not streaming_threads()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Split:
    """96 MiB in two shards."""
    directory = tmp_path_factory.mktemp("large")
    images = []
    for number in range(2):
        path = directory / f"{number}.npy"
        np.save(path, np.random.default_rng(number).integers(0, 256, (16_384, 32, 32, 3), dtype=np.uint8))
        images.append(np.load(path, mmap_mode="r"))
    return Split("train", images, np.zeros(32_768, dtype=np.int64), None, (32, 32, 3))


@pytest.mark.parametrize("in_background", [False, True])
def test_streaming_holds_two_windows_and_not_the_set(large: Split, in_background: bool) -> None:
    def mapped_mib() -> float:
        return sum(each.rss for each in psutil.Process().memory_maps() if each.path.endswith(".npy")) / 2**20

    for start in range(0, large.num_samples, 16_384):
        large.advise(start, start + 16_384, mmap.MADV_DONTNEED)
    loader = loader_of(large, "streaming", batch=256, shuffle_mib=8, in_background=in_background)
    most, seen = 0.0, 0
    for batch in loader:
        seen += len(batch.labels_N)
        if loader.next_step % 32 == 0:
            most = max(most, mapped_mib())
    loader.close()
    assert seen == large.num_samples
    assert 4 < most < 3 * 8, "two windows, and the kernel maps a little around what is touched"
    assert_equal(
        list(itertools.islice(loader_of(large, "foreground", batch=256, shuffle_mib=8), 4)),
        list(itertools.islice(loader_of(large, "streaming", batch=256, shuffle_mib=8), 4)),
    )


@pytest.mark.parametrize("world", range(1, 6))
@pytest.mark.parametrize("num", [1, 3, 103])
def test_evaluation_covers_each_sample_once(tmp_path: Path, world: int, num: int) -> None:
    split = make_split(tmp_path, sizes=(num,))
    normalise = Normalise(MEAN, STD, split.image_shape)
    seen = []
    for rank in range(world):
        for indices, batch in EvaluationLoader(split, MEAN, STD, CPU, True).batches(7, rank, world):
            assert len(indices) == len(batch.images_NCHW) <= 7
            assert np.array_equal(batch.labels_N.numpy(), split.labels_N[indices])
            pixels = torch.from_numpy(split.gather(indices))
            assert torch.equal(batch.images_NCHW, normalise(pixels, channels_last=False))
            seen += indices.tolist()
    assert seen == list(range(num))


def test_evaluation_of_an_empty_split_yields_nothing(tmp_path: Path) -> None:
    split = make_split(tmp_path, sizes=(0,))
    assert list(EvaluationLoader(split, MEAN, STD, CPU, False).batches(7)) == []


def test_gather_across_shards(split: Split) -> None:
    everything = np.concatenate([np.asarray(shard) for shard in split.images])
    indices = np.random.default_rng(0).integers(0, split.num_samples, 300)
    assert np.array_equal(split.gather(indices), everything[indices])
    assert all(np.array_equal(split.image(int(index)), everything[index]) for index in (0, 39, 40, 41, 102))
    for bad in (-1, split.num_samples):
        with pytest.raises(IndexError):
            split.gather(np.array([bad]))


def test_padding_normalises_to_about_nothing() -> None:
    padded = pad(np.zeros((2, 4, 5, 3), dtype=np.uint8), 3, FILL)
    assert padded.shape == (2, 10, 11, 3)
    assert (padded[:, 3:-3, 3:-3] == 0).all()
    border = torch.from_numpy(np.ascontiguousarray(padded[:, :3, :5]))
    assert Normalise(MEAN, STD, (3, 5, 3))(border, channels_last=True).abs().max() < 0.02
    image = np.zeros((4, 5, 3), dtype=np.uint8)
    assert pad(image, 0, FILL) is image


def test_windows_are_views_of_every_shift() -> None:
    padded = torch.arange(2 * 5 * 6 * 3, dtype=torch.uint8).view(2, 5, 6, 3)
    view = windows(padded, 3, 4)
    assert view.data_ptr() == padded.data_ptr()
    for image, dy, dx in itertools.product(range(2), range(3), range(3)):
        numbers = window_numbers(np.array([image]), np.array([dy]), np.array([dx]), padded)
        expected = padded[image, dy : dy + 3, dx : dx + 4]
        assert torch.equal(gather_windows(view, torch.from_numpy(numbers)).view(3, 4, 3), expected)
        assert torch.equal(view[torch.from_numpy(numbers)].view(3, 4, 3), expected)  # as on other devices


def test_a_constant_channel_is_not_divided_by_zero() -> None:
    values = Normalise((0.0,), (0.0,), (2, 2, 1))(torch.zeros(1, 2, 2, 1, dtype=torch.uint8), channels_last=False)
    assert torch.equal(values, torch.zeros(1, 1, 2, 2))


def test_a_plan_of_another_split_is_refused(split: Split) -> None:
    with pytest.raises(ValueError, match="plan of 5"):
        loader_of(split, "resident", plan=BatchPlan(5, 2))
