"""Pixels read ahead of a device: the same samples in the same batches, few of them at a time."""

import time
from itertools import chain

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from paceline.conf.data import Data
from paceline.conf.model import Model
from paceline.tasks.data.decode.pixels import read_pixels
from paceline.tasks.data.sources import registry as source
from paceline.tasks.errors import RunError
from paceline.tasks.predict import part as prefetch
from paceline.tasks.predict.job import cut, in_folder, key_of
from paceline.tasks.predict.part import predict_part
from paceline.tasks.predict.predictor import Predictor, predictor
from tests.support.pictures import make_pictures
from tests.support.saved_models import save_model

SIZE = 16


@pytest.fixture
def listing(tmp_path):
    damaged = make_pictures(tmp_path / "pictures")
    listing = source.list_samples(
        Data(source="folder", root=str(tmp_path / "pictures"), test_fraction=0, validation_fraction=0)
    )
    assert (len(listing.train), len(damaged)) == (120, 8)
    return listing


@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_batches_do_not_depend_on_blocks_and_threads(listing, num_threads, monkeypatch):
    monkeypatch.setattr(prefetch, "BLOCK_BYTES", 7 * SIZE * SIZE * 3)
    expected = read_pixels(listing.origin, listing.train, SIZE, 3)
    blocks = prefetch.read_ahead(listing.origin, listing.train, SIZE, 3, num_threads)
    progress = prefetch.Progress()
    members, images = zip(*prefetch.cut_batches(blocks, 10, progress), strict=True)
    assert [len(positions) for positions in members] == [10] * 11 + [2]
    assert list(chain.from_iterable(members)) == expected.positions
    assert progress.reasons == expected.reasons
    assert np.array_equal(np.concatenate(images), expected.images_NHWC)


def test_few_blocks_are_read_before_they_are_wanted(listing, monkeypatch):
    monkeypatch.setattr(prefetch, "BLOCK_BYTES", 5 * SIZE * SIZE * 3)
    started = []

    def watched(*arguments):
        started.append(arguments)
        return read_pixels(*arguments)

    monkeypatch.setattr(prefetch, "read_pixels", watched)
    blocks = prefetch.read_ahead(listing.origin, listing.train, SIZE, 3, 2)
    next(blocks)
    time.sleep(0.1)
    assert 1 <= len(started) <= 4, "of 24"
    blocks.close()
    assert len(started) <= 4


def test_an_error_of_a_thread_is_raised_in_its_turn(listing, monkeypatch):
    monkeypatch.setattr(prefetch, "BLOCK_BYTES", 5 * SIZE * SIZE * 3)

    def broken(origin, samples, *arguments):
        if samples[0] == listing.train[10]:
            raise RunError("the source fails")
        return read_pixels(origin, samples, *arguments)

    monkeypatch.setattr(prefetch, "read_pixels", broken)
    blocks = prefetch.read_ahead(listing.origin, listing.train, SIZE, 3, 2)
    assert [next(blocks)[0], next(blocks)[0]] == [0, 5]
    with pytest.raises(RunError):
        next(blocks)


def part_with(settings, root, out):
    images = in_folder(str(root), ("dark", "light"))
    (part,) = cut(images, out, key_of(settings, images), 1)
    return part


def test_a_part_is_the_same_file_with_threads(listing, tmp_path, monkeypatch):
    monkeypatch.setattr(prefetch, "BLOCK_BYTES", 7 * SIZE * SIZE * 3)
    settings = save_model(tmp_path / "model", Model(width=2, depth=1), ("dark", "light"), (SIZE, SIZE, 3))
    settings = settings.model_copy(update={"batch_size": 16})
    files = []
    for num_readers in (0, 3):
        (tmp_path / str(num_readers)).mkdir()
        part = part_with(settings, tmp_path / "pictures", tmp_path / str(num_readers))
        monkeypatch.setattr(predictor(settings), "num_readers", num_readers)
        record = predict_part(part, settings)
        assert (record.num_samples, record.num_rejected) == (112, 8)
        assert record.read_seconds > 0
        assert record.predict_seconds > 0
        table = pq.read_table(part.path).replace_schema_metadata(None)
        files.append((record.model_dump(exclude={"read_seconds", "predict_seconds"}), table))
    assert files[0] == files[1]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=["torch", "cublas"],
)
@pytest.mark.parametrize("largest", [1, 3, 5])
def test_a_batch_that_does_not_fit_is_halved_until_it_does(tmp_path, largest, error):
    """The error is raised where a device would raise it."""
    settings = save_model(tmp_path / "model", Model(width=2, depth=1), ("a", "b"), (SIZE, SIZE, 3))
    model = Predictor(settings.model_copy(update={"batch_size": 16}))
    pixels_NHWC = np.random.default_rng(0).integers(0, 256, (40, SIZE, SIZE, 3), dtype=np.uint8)
    (expected,) = model(pixels_NHWC)
    call, sizes = model._call, []

    def limited(images):
        sizes.append(len(images))
        if len(images) > largest:
            raise error
        return call(images)

    model._call = limited
    (found,) = model(pixels_NHWC)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert sizes[:2] == [16, 8]
    assert max(sizes[5:]) <= largest


def test_one_image_that_does_not_fit_is_an_error(tmp_path):
    settings = save_model(tmp_path / "model", Model(width=2, depth=1), ("a", "b"), (SIZE, SIZE, 3))
    model = Predictor(settings)

    def never(images):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    model._call = never
    with pytest.raises(torch.OutOfMemoryError):
        model(np.zeros((4, SIZE, SIZE, 3), dtype=np.uint8))
