"""Images in tables: the same pixels whatever the file, bounded reading, and what is refused before any work."""

import bz2
import gzip
import io
import json
import pickle
import tracemalloc
import zipfile
import zlib

import fsspec
import google_crc32c
import numcodecs
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr
from PIL import Image
from zarr.codecs import BloscCodec, GzipCodec, ZstdCodec

from paceline.conf.data import Data
from paceline.tasks.data.decode.pixels import read_pixels
from paceline.tasks.data.decode.transform import DecodeError
from paceline.tasks.data.key import describe
from paceline.tasks.data.prepare.chunks import deal
from paceline.tasks.data.samples import Sample, Samples
from paceline.tasks.data.sources import arrays, zarr_rows
from paceline.tasks.data.sources import registry as source
from paceline.tasks.errors import InputError
from tests.support.refusals import refused
from tests.support.shards import shards_of

NUM = 90
RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (NUM, 12, 12), dtype=np.uint8)
IMAGES[:, 0, 0] = np.arange(NUM)  # says which it is
LABELS = np.arange(NUM) % 3


def png(pixels):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def save_parquet(path, images, labels, rows=20, **more):
    pq.write_table(pa.table({"image": images, "label": labels}), path, row_group_size=rows, **more)


def data_of(root, **changes):
    return Data(source="arrays", root=str(root), image_size=12, test_fraction=0.2, validation_fraction=0.1, **changes)


def save_zarr(path, images=IMAGES, labels=LABELS, chunks=7, **how):
    """A group with a chunk of some images, or an attribute `class_names`."""
    names = how.pop("class_names", None)
    group = zarr.open_group(path, mode="a", zarr_format=how.pop("zarr_format", 3))
    stored = group.create_array(
        "images", shape=images.shape, dtype=images.dtype, chunks=(chunks, *images.shape[1:]), **how
    )
    stored[:] = images
    group.create_array("labels", data=np.asarray(labels))
    if names is not None:
        group.attrs["class_names"] = names
    return group


FORMS = {
    "stored": lambda root: np.savez(root / "all.npz", images=IMAGES, labels=LABELS),
    "compressed": lambda root: np.savez_compressed(root / "all.npz", images=IMAGES, labels=LABELS),
    "with a channel": lambda root: np.savez(root / "all.npz", images=IMAGES[..., np.newaxis], labels=LABELS),
    "16 bits": lambda root: np.savez(root / "all.npz", images=IMAGES.astype(np.uint16) * 257, labels=LABELS),
    "lists": lambda root: save_parquet(root / "all.parquet", IMAGES.tolist(), LABELS),
    "files": lambda root: save_parquet(root / "all.parquet", [png(image) for image in IMAGES], LABELS),
    "the Hub's": lambda root: save_parquet(
        root / "all.parquet", [{"bytes": png(image), "path": None} for image in IMAGES], LABELS
    ),
    "Zarr 3": lambda root: save_zarr(root / "all.zarr"),
    "Zarr 3 in shards": lambda root: save_zarr(root / "all.zarr", shards=(28, 12, 12)),
    "Zarr 2": lambda root: save_zarr(root / "all.zarr", zarr_format=2),
    "Zarr of 16 bits": lambda root: save_zarr(root / "all.zarr", IMAGES.astype(np.uint16) * 257),
    "coloured": lambda root: np.savez(root / "all.npz", images=np.repeat(IMAGES[..., None], 3, 3), labels=LABELS),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_file", [True, False])
def test_every_form_gives_the_same_pixels_and_classes(tmp_path, form, is_file):
    FORMS[form](tmp_path)
    (path,) = tmp_path.iterdir()
    listing = source.list_samples(data_of(path if is_file else tmp_path))
    assert listing.class_names == ("0", "1", "2")
    assert (len(listing.train), len(listing.validation), len(listing.test)) == (66, 6, 18)
    for split in (listing.train, listing.test):
        found = read_pixels(listing.origin, split, 12, listing.channels)
        assert found.reasons == {}
        for image, sample in zip(found.images_NHWC, split, strict=True):
            assert np.array_equal(image, np.broadcast_to(IMAGES[sample.row][..., None], image.shape))
            assert sample.label == LABELS[sample.row]


def test_images_of_any_size_are_scaled_as_those_of_folders(tmp_path):
    rows = [RNG.integers(0, 256, (20 + number, 30, 3), dtype=np.uint8) for number in range(8)]
    save_parquet(tmp_path / "a.parquet", [png(image) for image in rows], ["cat", "dog"] * 4)
    listing = source.list_samples(data_of(tmp_path))
    assert listing.class_names == ("cat", "dog")
    for number, image in enumerate(rows):
        (tmp_path / "folder" / "cat").mkdir(parents=True, exist_ok=True)
        (tmp_path / "folder" / "dog").mkdir(parents=True, exist_ok=True)
        (tmp_path / "folder" / ("cat", "dog")[number % 2] / f"{number}.png").write_bytes(png(image))
    ours = read_pixels(listing.origin, listing.train, 12, 3).images_NHWC
    folder = source.list_samples(Data(source="folder", root=str(tmp_path / "folder"), test_fraction=0))
    files = {sample.path: sample for sample in folder.train}
    same = Samples.of(files[f"{listing.class_names[sample.label]}/{sample.row}.png"] for sample in listing.train)
    assert np.array_equal(ours, read_pixels(folder.origin, same, 12, 3).images_NHWC)


def test_names_of_files_and_folders_say_the_split(tmp_path):
    np.savez(tmp_path / "train-00000-of-00002.npz", images=IMAGES[:30], labels=LABELS[:30])
    np.savez(tmp_path / "train-00001-of-00002.npz", images=IMAGES[30:60], labels=LABELS[30:60])
    (tmp_path / "test").mkdir()
    np.savez(tmp_path / "test" / "0.npz", images=IMAGES[60:], labels=LABELS[60:])
    listing = source.list_samples(data_of(tmp_path))
    assert (len(listing.train), len(listing.validation), len(listing.test)) == (54, 6, 30)
    assert {sample.path for sample in listing.test} == {"test/0.npz"}
    np.savez(tmp_path / "training_notes.npz", images=IMAGES[60:], labels=LABELS[60:])
    with refused("data.root", "training_notes.npz"):
        source.list_samples(data_of(tmp_path))


def test_names_of_classes_are_those_in_the_file(tmp_path):
    np.savez(tmp_path / "a.npz", images=IMAGES, labels=LABELS, class_names=np.array(["x", "y", "z"]))
    assert source.list_samples(data_of(tmp_path)).class_names == ("x", "y", "z")
    (tmp_path / "a.npz").unlink()
    features = {"info": {"features": {"label": {"names": ["u", "v", "w"], "_type": "ClassLabel"}}}}
    table = pa.table({"image": IMAGES.tolist(), "label": LABELS})
    pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps(features)}), tmp_path / "b.parquet")
    assert source.list_samples(data_of(tmp_path)).class_names == ("u", "v", "w")


def test_groups_of_a_store_are_splits_and_its_attributes_name_the_classes(tmp_path):
    store = tmp_path / "all.zarr"
    for split, part in (("train", slice(60)), ("test", slice(60, None))):
        save_zarr(store / split, IMAGES[part], LABELS[part])
    zarr.open_group(store, mode="a").attrs["class_names"] = ["x", "y", "z"]
    listing = source.list_samples(data_of(f"{store}/"))
    assert (len(listing.train), len(listing.validation), len(listing.test)) == (54, 6, 30)
    assert listing.class_names == ("x", "y", "z")
    assert {sample.path for sample in listing.test} == {"all.zarr/test"}
    found = read_pixels(listing.origin, listing.test, 12, 1)
    assert np.array_equal(found.images_NHWC[..., 0], IMAGES[60:])


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_words_as_labels_of_zarr(tmp_path, zarr_format):
    words = np.array(["cat", "dog", "wolf"])[LABELS]
    group = save_zarr(tmp_path / "a.zarr", zarr_format=zarr_format)
    del group["labels"]
    group.create_array("labels", shape=words.shape, dtype=str)[:] = words.astype(object)
    assert source.list_samples(data_of(tmp_path)).class_names == ("cat", "dog", "wolf")


def test_zarr_on_another_file_system_is_read_alike(tmp_path):
    save_zarr(tmp_path / "a.zarr")
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "a.zarr"), "/zarr_test/a.zarr", recursive=True)
    try:
        here = source.list_samples(data_of(tmp_path))
        there = source.list_samples(data_of("memory://zarr_test"))
        assert list(there.train.names()) == list(here.train.names())
        pixels = [read_pixels(found.origin, found.train, 12, 1).images_NHWC for found in (here, there)]
        assert np.array_equal(*pixels)
    finally:
        memory.rm("/zarr_test", recursive=True)


def watched_reads(monkeypatch):
    """What is read of arrays of Zarr from now on."""
    read = []
    whole = zarr.Array.__getitem__

    def watched(self, selection):
        read.append(selection)
        return whole(self, selection)

    monkeypatch.setattr(zarr.Array, "__getitem__", watched)
    return read


def test_of_zarr_one_chunk_is_decoded_at_a_time(tmp_path, monkeypatch):
    save_zarr(tmp_path / "a.zarr", chunks=10)
    read = watched_reads(monkeypatch)
    rows = Samples.of(Sample("a.zarr", 0, row=row) for row in (11, 13, 55, 89))
    found = list(arrays.read_rows(str(tmp_path), rows))
    assert [int(image[0, 0, 0]) for image in found] == [11, 13, 55, 89]
    assert read == [slice(11, 14), slice(55, 56), slice(89, 90)]


def test_of_zarr_in_many_chunks_an_image_few_rows_are_read_at_a_time(tmp_path, monkeypatch):
    """Reading a row takes all chunks that it lies in."""
    group = save_zarr(tmp_path / "a.zarr")
    del group["images"]
    group.create_array("images", shape=IMAGES.shape, dtype=IMAGES.dtype, chunks=(10, 4, 4))[:] = IMAGES
    monkeypatch.setattr(zarr_rows, "MAX_CHUNK_BYTES", 4 * IMAGES[0].nbytes)
    read = watched_reads(monkeypatch)
    rows = Samples.of(Sample("a.zarr", 0, row=row) for row in range(8, 30))
    found = list(arrays.read_rows(str(tmp_path), rows))
    assert np.array_equal(np.stack(found)[..., 0], IMAGES[8:30])
    assert [one.start for one in read] == [8, 10, 14, 18, 20, 24, 28]
    assert [one.stop for one in read] == [10, 14, 18, 20, 24, 28, 30]


def test_a_chunk_that_is_gone_is_not_taken_for_black_images(tmp_path):
    save_zarr(tmp_path / "a.zarr", chunks=10)
    before = describe(data_of(tmp_path)).key
    (tmp_path / "a.zarr" / "images" / "c" / "3" / "0" / "0").unlink()
    assert describe(data_of(tmp_path)).key != before
    rows = Samples.of(Sample("a.zarr", 0, row=row) for row in range(NUM))
    found = list(arrays.read_rows(str(tmp_path), rows))
    assert [row for row in range(NUM) if isinstance(found[row], DecodeError)] == list(range(30, 40))
    assert "fill value 0" in str(found[30])


def test_a_chunk_that_is_damaged_is_told_by_its_store(tmp_path):
    save_zarr(tmp_path / "a.zarr", chunks=10)
    listing = source.list_samples(data_of(tmp_path))
    chunk = tmp_path / "a.zarr" / "images" / "c" / "3" / "0" / "0"
    chunk.write_bytes(b"no chunk")
    with refused(None, "a.zarr", "images"):
        list(source.spec_of(listing.origin).read(listing.origin, listing.train, 8))


class Planted:
    def __reduce__(self):
        return (exec, ("raise RuntimeError('code in the data ran')",))


CODECS = {"compressor": None, "filters": [{"id": "vlen-utf8"}, {"id": "pickle", "protocol": 5}]}


def test_a_codec_that_runs_what_the_data_says_is_refused(tmp_path, monkeypatch):
    """Whoever writes the data writes the metadata too, which names what decodes it."""
    save_zarr(tmp_path / "a.zarr", zarr_format=2)
    about = tmp_path / "a.zarr" / "labels" / ".zarray"
    metadata = json.loads(about.read_text())
    about.write_text(json.dumps(metadata | {"dtype": "|O", "fill_value": ""} | CODECS))
    (tmp_path / "a.zarr" / "labels" / "0").write_bytes(pickle.dumps(Planted()))
    with refused("data.root", tmp_path, "a.zarr", "pickle"):
        source.list_samples(data_of(tmp_path))
    monkeypatch.setattr(zarr_rows, "CODECS", (*zarr_rows.CODECS, "pickle"))
    with refused("data.root", tmp_path, "a.zarr", "Pickle.decode"):
        source.list_samples(data_of(tmp_path))
    monkeypatch.setattr("numcodecs.pickles.ALLOW_UNSAFE_PICKLE_DECODE", True)
    with refused("data.root", "a.zarr") as caught:
        source.list_samples(data_of(tmp_path))
    assert "code in the data ran" in str(caught.value), "what that keeps away"


BOMB = bytes(2**24)
"""What a chunk of 1,008 bytes is replaced by."""
PACKED = {
    "zlib": (2, numcodecs.Zlib, lambda: zlib.compress(BOMB)),
    "gzip": (2, numcodecs.GZip, lambda: gzip.compress(BOMB)),
    "bz2": (2, numcodecs.BZ2, lambda: bz2.compress(BOMB)),
    "lz4": (2, numcodecs.LZ4, lambda: numcodecs.LZ4().encode(BOMB)),
    "zstd": (2, numcodecs.Zstd, lambda: numcodecs.Zstd().encode(BOMB)),
    "blosc": (2, numcodecs.Blosc, lambda: numcodecs.Blosc().encode(BOMB)),
    "gzip 3": (3, GzipCodec, lambda: gzip.compress(BOMB)),
    "zstd 3": (3, ZstdCodec, lambda: numcodecs.Zstd().encode(BOMB)),
    "zstd 3 without a size": (3, ZstdCodec, lambda: stream_zstd(BOMB)),
    "twice 3": (3, lambda: [GzipCodec(), GzipCodec()], lambda: gzip.compress(gzip.compress(BOMB))),
    "blosc 3": (3, BloscCodec, lambda: numcodecs.Blosc().encode(BOMB)),
    "shards 3": (3, GzipCodec, lambda: gzip.compress(BOMB)),
}


def stream_zstd(content):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("array", ["images", "labels"])
def test_a_bomb_in_a_chunk_is_refused_and_never_in_memory(tmp_path, kind, array):
    """The chunks declare about a kilobyte, and the bytes of one decompress to 16 MiB."""
    zarr_format, compressor, pack = PACKED[kind]
    shards = {"shards": (7, 12, 12)} if kind == "shards 3" else {}
    group = save_zarr(tmp_path / "a.zarr", zarr_format=zarr_format, compressors=compressor(), **shards)
    del group["labels"]
    group.create_array(
        "labels", data=LABELS, compressors=compressor(), chunks=(NUM,), **({"shards": (NUM,)} if shards else {})
    )
    listing = source.list_samples(data_of(tmp_path))
    sound = [image.copy() for image in arrays.read_rows(str(tmp_path), listing.train)]
    assert len(sound) == len(listing.train)
    first = {"images": "0.0.0", "labels": "0"}[array]
    chunk = tmp_path / "a.zarr" / array / (first if zarr_format == 2 else f"c/{first.replace('.', '/')}")
    bomb = pack()
    if shards:  # one chunk, and the index: its offset, its number of bytes and their checksum
        index = np.array([0, len(bomb)], dtype="<u8").tobytes()
        bomb += index + google_crc32c.value(index).to_bytes(4, "little")
    chunk.write_bytes(bomb)
    tracemalloc.start()
    try:
        with refused("data.root" if array == "labels" else None, "a.zarr"):
            source.list_samples(data_of(tmp_path))
            list(arrays.read_rows(str(tmp_path), listing.train))
        assert tracemalloc.get_traced_memory()[1] < len(BOMB) / 2
    finally:
        tracemalloc.stop()


def test_a_codec_without_a_bound_is_refused_when_it_is_listed(tmp_path):
    save_zarr(tmp_path / "a.zarr", zarr_format=2, filters=[numcodecs.AsType("u1", "u1")])
    with refused("data.root", "a.zarr", "astype", "zstd"):
        source.list_samples(data_of(tmp_path))


def test_numbers_are_in_their_order_and_not_in_that_of_words(tmp_path):
    np.savez(tmp_path / "a.npz", images=IMAGES, labels=np.array([2, 10, 300])[LABELS])
    assert source.list_samples(data_of(tmp_path)).class_names == ("2", "10", "300")


def test_a_changed_file_is_another_set(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, images=IMAGES, labels=LABELS)
    before = describe(data_of(path)).key
    assert describe(data_of(path)).key == before
    np.savez(path, images=IMAGES, labels=(LABELS + 1) % 3)
    assert describe(data_of(path)).key != before


def test_rows_that_are_no_image_are_listed_with_the_reason(tmp_path):
    images = [png(image) for image in IMAGES]
    images[3], images[7], images[8] = None, b"", images[8][:40]
    save_parquet(tmp_path / "train.parquet", images, LABELS)
    listing = source.list_samples(data_of(tmp_path))
    records = shards_of(listing, data_of(tmp_path), tmp_path / "set")
    reasons = {entry.path: entry.reason for record in records for entry in record.rejected}
    assert set(reasons) == {"train.parquet#3", "train.parquet#7", "train.parquet#8"}
    assert reasons["train.parquet#3"] == "no image in this row"
    assert reasons["train.parquet#7"] == "empty file"
    assert sum(record.num_samples for record in records) == NUM - 3


@pytest.mark.parametrize("bad", [[[1, 2], [3]], [[1, 300]], [[-1, 2]], [[]]])
def test_lists_that_are_no_image_are_rejected(tmp_path, bad):
    save_parquet(tmp_path / "a.parquet", [bad, *IMAGES[1:].tolist()], LABELS)
    listing = source.list_samples(data_of(tmp_path))
    rows = Samples.of([Sample("a.parquet", 0, row=0), Sample("a.parquet", 1, row=1)])
    found = read_pixels(listing.origin, rows, 12, 1)
    assert list(found.reasons) == [0]
    assert np.array_equal(found.images_NHWC[0, ..., 0], IMAGES[1])


def test_of_parquet_only_the_groups_are_read_that_hold_the_rows(tmp_path, monkeypatch):
    save_parquet(tmp_path / "a.parquet", IMAGES.tolist(), LABELS, rows=10)
    read = []
    whole = pq.ParquetFile.iter_batches

    def watched(self, *arguments, **options):
        read.append(options["row_groups"])
        return whole(self, *arguments, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", watched)
    rows = Samples.of(Sample("a.parquet", 0, row=row) for row in (11, 13, 55))
    found = list(arrays.read_rows(str(tmp_path), rows))
    assert [int(image[0, 0, 0]) for image in found] == [11, 13, 55]
    assert read == [[1], [5]]


def test_of_a_group_as_large_as_the_file_little_is_in_memory(tmp_path):
    blob = RNG.bytes(20_000_000)
    save_parquet(
        tmp_path / "a.parquet", [blob[at : at + 1_000] for at in range(0, len(blob), 1_000)], [0, 1] * 10_000, 20_000
    )
    pool = pa.default_memory_pool()
    before, most = pool.bytes_allocated(), 0
    rows = Samples.of(Sample("a.parquet", 0, row=row) for row in (5, 15_000, 15_001, 19_999))
    for found, row in zip(arrays.read_rows(str(tmp_path), rows), rows, strict=True):
        assert found == blob[row.row * 1_000 : (row.row + 1) * 1_000]
        most = max(most, pool.bytes_allocated() - before)
    assert most < 8_000_000, "a few pages of the 20 MB"


def test_of_an_npz_only_the_rows_are_read(tmp_path):
    np.savez(tmp_path / "a.npz", images=IMAGES, labels=LABELS)
    content = bytearray((tmp_path / "a.npz").read_bytes())
    at = content.index(IMAGES[50].tobytes())
    content[at] = 201  # what the archive's checksum would find, if all of it were read
    (tmp_path / "a.npz").write_bytes(content)
    rows = Samples.of(Sample("a.npz", 0, row=row) for row in (0, 49, 50, 89))
    assert [int(image[0, 0, 0]) for image in arrays.read_rows(str(tmp_path), rows)] == [0, 49, 201, 89]


@pytest.mark.parametrize(("num", "chunks", "run"), [(1_000, 1, 256), (1_000, 7, 256), (100_000, 13, 256), (30, 10, 9)])
def test_runs_are_dealt_to_chunks_of_nearly_equal_size(num, chunks, run):
    samples = Samples.of(Sample("a", 0, row=row) for row in range(num))
    parts = [deal(samples, number, chunks, run) for number in range(chunks)]
    assert sorted(sample.row for part in parts for sample in part) == list(range(num))
    assert max(map(len, parts)) <= 1.26 * num / chunks
    assert all(np.all(np.diff(part.rows) > 0) for part in parts)
    if num > 10_000:
        assert np.mean([(np.diff(part.rows) == 1).mean() for part in parts]) > 0.99, "neighbours stay together"


def objects(root):
    np.savez(root / "a.npz", images=np.array([{"a": 1}] * 3, dtype=object), labels=np.arange(3))


def pickled_labels(root):
    np.savez(root / "a.npz", images=IMAGES, labels=np.array([{"a": 1}] * NUM, dtype=object))


def lying(root):
    """An archive whose array is shorter than its header says."""
    buffer = io.BytesIO()
    np.save(buffer, IMAGES)
    labels = io.BytesIO()
    np.save(labels, LABELS)
    with zipfile.ZipFile(root / "a.npz", "w") as archive:
        archive.writestr("images.npy", buffer.getvalue()[:-100])
        archive.writestr("labels.npy", labels.getvalue())


def cut_off(root):
    np.savez(root / "a.npz", images=IMAGES, labels=LABELS)
    (root / "a.npz").write_bytes((root / "a.npz").read_bytes()[:3_000])


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (objects, "images has the shape"),
        (pickled_labels, "allow_pickle=False"),
        (lying, "has 12860 bytes; write the file again"),
        (cut_off, "cannot be read"),
        (lambda root: (root / "a.parquet").write_bytes(b"PAR1 no more"), "cannot be read"),
        (lambda root: (root / "a.txt").write_text("x"), "0 files .npz and 0 files .parquet; it needs some"),
        (lambda root: (FORMS["stored"](root), FORMS["lists"](root)), "1 files .npz and 1 files .parquet"),
        (
            lambda root: np.savez(root / "a.npz", pictures=IMAGES),
            "holds pictures; it needs the arrays images and labels",
        ),
        (
            lambda root: np.savez(root / "a.npz", images=IMAGES / 255, labels=LABELS),
            "float64, whose range is not defined",
        ),
        (
            lambda root: np.savez(root / "a.npz", images=IMAGES[:, None], labels=LABELS),
            "(images, height, width, 1 or 3)",
        ),
        (lambda root: np.savez(root / "a.npz", images=np.asfortranarray(IMAGES), labels=LABELS), "Fortran"),
        (lambda root: np.savez(root / "a.npz", images=IMAGES, labels=LABELS[:5]), "has 90 images and 5 labels"),
        (lambda root: np.savez(root / "a.npz", images=IMAGES, labels=LABELS / 2), "labels are float64"),
        (
            lambda root: np.savez(root / "a.npz", images=IMAGES, labels=LABELS, class_names=["a", "b"]),
            "label 2 is none",
        ),
        (lambda root: np.savez(root / "a.npz", images=IMAGES, labels=LABELS * 0), "found 1 class"),
        (lambda root: (root / "a.zarr").mkdir(), "a.zarr: is not a Zarr group"),
        (lambda root: (root / "a.zarr").write_bytes(b"PK"), "a.zarr: is not a Zarr group"),
        (lambda root: zarr.open_group(root / "a.zarr", mode="w"), "a.zarr: holds nothing; it needs the arrays images"),
        (lambda root: save_zarr(root / "a.zarr", IMAGES / 255), "float64, whose range is not defined"),
        (lambda root: save_zarr(root / "a.zarr", IMAGES[:, None]), "(images, height, width, 1 or 3)"),
        (lambda root: save_zarr(root / "a.zarr", labels=LABELS[:5]), "has 90 images and labels (5,)"),
        (lambda root: save_zarr(root / "a.zarr", labels=LABELS / 2), "labels are float64"),
        (lambda root: save_zarr(root / "a.zarr", class_names="xyz"), "class_names is 'xyz'; give a list of words"),
        (lambda root: (FORMS["stored"](root), FORMS["Zarr 3"](root)), "holds all.zarr and all.npz; it needs tables of"),
        (lambda root: np.savez(root / "test.npz", images=IMAGES, labels=LABELS), "no file of the training split"),
        (lambda root: pq.write_table(pa.table({"x": [1]}), root / "a.parquet"), "has the columns x; it needs image"),
        (lambda root: save_parquet(root / "a.parquet", [1.0, 2.0], [0, 1]), "image holds double in 0 lists"),
        (lambda root: save_parquet(root / "a.parquet", [[[0.5]], [[0.5]]], [0, 1]), "image holds double in 2 lists"),
        (lambda root: save_parquet(root / "a.parquet", [b"", b""], [0, None]), "1 of 2 images have no label"),
        (lambda root: save_parquet(root / "a.parquet", [b"", b""], [0.5, 1.0]), "label holds double"),
        (
            lambda root: (
                np.savez(root / "train.npz", images=IMAGES, labels=LABELS),
                np.savez(root / "test.npz", images=np.repeat(IMAGES[..., None], 3, 3), labels=LABELS),
            ),
            "some files hold grey images and others coloured ones",
        ),
        (
            lambda root: (
                np.savez(root / "train.npz", images=IMAGES, labels=LABELS),
                np.savez(root / "test.npz", images=IMAGES, labels=LABELS.astype(str)),
            ),
            "some labels are numbers and others words",
        ),
        (
            lambda root: [
                np.savez(root / f"{split}.npz", images=IMAGES, labels=LABELS, class_names=np.array(names))
                for split, names in (("train", ["x", "y", "z"]), ("test", ["y", "x", "z"]))
            ],
            "files name different classes, or in another order",
        ),
    ],
)
def test_what_is_wrong_is_told_in_one_line_before_any_work(tmp_path, make, told):
    make(tmp_path)
    with pytest.raises(InputError) as caught:
        source.list_samples(data_of(tmp_path))
    assert told in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_cut_off_later_is_told_by_its_name(tmp_path):
    for form, name in (("compressed", "all.npz"), ("files", "all.parquet")):
        FORMS[form](tmp_path)
        listing = source.list_samples(data_of(tmp_path / name))
        content = bytearray((tmp_path / name).read_bytes())
        content[100:1_000] = bytes(900)
        (tmp_path / name).write_bytes(content)
        with pytest.raises((InputError, OSError), match=name):
            list(source.spec_of(listing.origin).read(listing.origin, listing.train, 8))


def test_what_the_store_says_is_not_taken_for_a_damaged_file(tmp_path, monkeypatch):
    """Such errors are told by `paceline.tasks.data.storage.s3`, which knows what to do about each."""
    exceptions = pytest.importorskip("botocore.exceptions")
    np.savez(tmp_path / "all.npz", images=IMAGES, labels=LABELS)
    said = exceptions.EndpointConnectionError(endpoint_url="http://127.0.0.1:9")

    def unreachable(base, path):
        raise said

    monkeypatch.setattr(arrays, "_npz_table", unreachable)
    with pytest.raises(exceptions.EndpointConnectionError):
        arrays._open("s3://bucket/set", str(tmp_path), "all.npz")
