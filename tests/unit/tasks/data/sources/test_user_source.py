"""Sources of the user's: listing, reading, and every way in which one can be wrong."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from paceline.conf.data import Data
from paceline.tasks.data import key
from paceline.tasks.data.decode.pixels import read_pixels
from paceline.tasks.data.prepare import dask_graph as graph
from paceline.tasks.data.prepare import store
from paceline.tasks.data.prepare.chunks import ChunkPlanner
from paceline.tasks.data.prepare.shard import write_shards
from paceline.tasks.data.sources import registry as source
from paceline.tasks.errors import InputError, OutsideError, PacelineError, RunError, SourceError
from tests.support.own_package import forget, install, on_path
from tests.support.refusals import refused

CODE = """
from pathlib import Path
from uuid import uuid4

import numpy as np

class Rows:
    needs_root = False
    channels = {channels}
    has_masks = {has_masks}
    target_names = {target_names}
    class_names = {class_names}
    content = {content!r}

    def __init__(self, root):
        {init}

    def samples(self):
        {samples}

    def read(self, names, image_size):
        {read}
"""
PLAIN = {
    "channels": 1,
    "has_masks": False,
    "target_names": (),
    "class_names": ("even", "odd"),
    "content": "",
    "init": "pass",
    "samples": "return ((f'row {n}', n % 2) for n in range(40))",
    "read": "return np.stack([np.full((6, 6), int(name[4:]), np.uint8) for name in names])",
}


class Offered:
    """The source `rows` of a package, which can be changed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.data = Data(source="rows", image_size=8, validation_fraction=0.1)

    def be(self, version: str = "1.0", **changes: Any) -> Data:
        """As `PLAIN`, but for changes."""
        forget(["rowspack"])
        install(
            self.directory, "rowspack", {"rows": CODE.format(**PLAIN | changes)}, {"rows": "rows:Rows"}, None, version
        )
        return self.data


@pytest.fixture
def offered(tmp_path: Path) -> Iterator[Offered]:
    (tmp_path / "site").mkdir()
    with on_path(tmp_path / "site"):
        yield Offered(tmp_path / "site")


def pixels(data: Data, channels: int = 1) -> Any:
    listing = source.list_samples(data)
    return read_pixels(listing.origin, listing.train, data.image_size, channels)


def png(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(array).save(stream, "PNG")
    return stream.getvalue()


def test_a_source_is_listed_and_held_out_as_all_are(offered: Offered) -> None:
    listing = source.list_samples(offered.be())
    assert (len(listing.train), len(listing.validation), len(listing.test)) == (28, 4, 8)
    assert listing.class_names == ("even", "odd")
    assert all(sample.label == int(sample.path[4:]) % 2 for sample in [*listing.train, *listing.test])


def test_arrays_are_scaled_and_stay_in_their_places(offered: Offered) -> None:
    found = pixels(offered.be())
    listing = source.list_samples(offered.data)
    assert found.images_NHWC.shape == (28, 8, 8, 1)
    assert [int(image.max()) for image in found.images_NHWC] == [int(sample.path[4:]) for sample in listing.train]
    assert found.reasons == {}


def test_a_source_is_opened_once_for_each_listing(offered: Offered, tmp_path: Path) -> None:
    log = tmp_path / "opened"
    log.mkdir()
    data = offered.be(init=f"(Path({str(log)!r}) / uuid4().hex).mkdir()")
    for night in (1, 2):
        listing = source.list_samples(data)
        for part in (listing.train[:3], listing.train[3:], listing.test):
            read_pixels(listing.origin, part, 8, 1)
        assert len(list(log.iterdir())) == 2 * night, "to list it, and to read it"
    assert key.describe(data).key == key.describe(data).key


def test_a_source_may_have_its_own_splits(offered: Offered) -> None:
    split = "return {'train': [('a', 0), ('b', 1)], 'test': [('c', 0, 'stamped')]}"
    listing = source.list_samples(offered.be(samples=split))
    assert [sample.path for sample in listing.train] == ["a", "b"]
    assert [(sample.path, sample.stamp) for sample in listing.test] == [("c", "stamped")]


def test_files_are_decoded_and_what_cannot_be_is_told(offered: Offered) -> None:
    good = png(np.full((5, 9, 3), 200, np.uint8))
    code = f"return [{good!r}, b'no picture', FileNotFoundError(2, 'gone'), ValueError('torn page')] + [{good!r}] * 24"
    found = pixels(offered.be(channels=3, read=code), 3)
    assert found.reasons == {1: "not an image of a known format", 2: "gone", 3: "torn page"}
    assert found.images_NHWC.shape == (25, 8, 8, 3)
    assert (found.images_NHWC == 200).all()


@pytest.mark.parametrize("form", ["", "[..., None]"])
def test_masks_are_stored_as_those_of_pairs(offered: Offered, form: str) -> None:
    mask = "np.array([[0, 1], [255, 1]], np.uint8).repeat(2, 0).repeat(2, 1)" + form
    read = f"return [(np.zeros((4, 4, 3), np.uint8), {mask})] * len(names)"
    data = offered.be(channels=3, has_masks=True, read=read, samples="return [(str(n), 0) for n in range(9)]")
    found = pixels(data, 4)
    assert np.array_equal(found.images_NHWC[0, ::4, ::4, 3], [[1, 2], [0, 2]])
    listing = source.list_samples(data)
    assert (listing.channels, listing.num_planes) == (3, 1)


def test_targets_come_with_their_images(offered: Offered) -> None:
    read = "return [(np.zeros((8, 8), np.uint8), [int(name[4:]) / 100]) for name in names]"
    data = offered.be(target_names=("angle",), read=read)
    found = pixels(data)
    assert found.targets_NT.dtype == np.float32
    assert found.targets_NT[:3, 0] == pytest.approx(
        [int(sample.path[4:]) / 100 for sample in source.list_samples(data).train[:3]]
    )


def test_a_changed_source_is_another_set(offered: Offered) -> None:
    def found(**changes: Any) -> str:
        return key.describe(offered.be(**changes)).key

    stamped = "return ((f'row {n}', n % 2, 'b' if n == 3 else 'a') for n in range(40))"
    keys = [
        found(),
        found(version="1.1"),
        found(content="revision 7"),
        found(samples=stamped),
        found(samples=stamped.replace("'b'", "'c'")),
        found(read=PLAIN["read"] + "  # otherwise"),
    ]
    assert len(set(keys)) == len(keys)
    assert found() == keys[0]


def test_samples_without_stamps_are_known_by_their_place_too(offered: Offered, tmp_path: Path) -> None:
    """Or those of one name in two folders would be taken for each other."""

    def keys(samples: str) -> set[str]:
        offered.be(init="pass", samples=samples)
        roots = [tmp_path / name for name in ("a", "b")]
        return {key.describe(offered.data.model_copy(update={"root": str(root)})).key for root in roots}

    assert len(keys(PLAIN["samples"])) == 2
    assert len(keys("return ((f'row {n}', n % 2, 'a') for n in range(40))")) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"samples": "return [('a', 0), ('b', 2)]"}, "sample b has the label 2; give whole numbers from 0 to 1"),
        ({"samples": "return [('a', 0), ('b', -1)]"}, "sample b has the label -1"),
        ({"samples": "return [('a', 0), ('b', 1.0)]"}, "sample b has the label 1.0"),
        ({"samples": "return [('a', 0), ('b', 'odd')]"}, "sample b has the label 'odd'"),
        ({"samples": "return [('a', 0), ('a', 1)]"}, "gives the name 'a'; give each sample a text of its own"),
        ({"samples": "return {'train': [('a', 0)], 'test': [('a', 1)]}"}, "gives the name 'a'"),
        ({"samples": "return [(3, 0)]"}, "gives the name 3"),
        ({"samples": "return [('a', 0, 7)]"}, "sample a has the stamp 7; give a text"),
        ({"samples": "return ['a']"}, "gives 'a'; give tuples (name, label)"),
        ({"samples": "return {'training': []}"}, "gives the splits training; give train"),
        ({"samples": "return [('a', 0), ('b', 0)]"}, "no training sample of class odd"),
        ({"samples": "return []"}, "no training sample of class even, odd"),
        ({"samples": "return 1 / 0"}, "its listing raised ZeroDivisionError (division by zero) in "),
        ({"samples": "return None"}, "its listing raised TypeError"),
        ({"class_names": "['a', 'a']"}, "class_names=('a', 'a'); give texts, each once"),
        ({"class_names": "['a']", "samples": "return [('a', 0), ('b', 0)]"}, "found 1 class (a)"),
        ({"class_names": "7"}, "its listing raised TypeError"),
        ({"init": "raise KeyError('user')"}, "opening it raised KeyError ('user') in "),
    ],
)
def test_a_wrong_listing_is_told_before_any_work(offered: Offered, changes: dict[str, str], said: str) -> None:
    with pytest.raises(InputError) as error:
        source.list_samples(offered.be(**changes))
    assert said in str(error.value)
    assert "data.source=rows" in str(error.value)
    assert "\n" not in str(error.value)
    assert not isinstance(error.value, SourceError)


def test_a_server_that_is_away_may_be_tried_again(offered: Offered) -> None:
    with refused("data.source", "ConnectionError", kind=SourceError):
        source.list_samples(offered.be(samples="raise ConnectionError('no route')"))
    with refused("data.source", "TimeoutError", kind=OutsideError):
        pixels(offered.be(read="raise TimeoutError('slow')"))


@pytest.mark.parametrize(
    ("read", "said"),
    [
        ("return [np.zeros((8, 8), np.float32)] * len(names)", "is an array of float32 (8, 8); give the bytes of"),
        ("return [np.zeros((8, 8, 3), np.uint8)] * len(names)", "is an array of uint8 (8, 8, 3); give (H, W) or"),
        ("return [np.zeros((0, 8), np.uint8)] * len(names)", "is an array of uint8 (0, 8)"),
        ("return [[[0]]] * len(names)", "is list [[0]]"[:7]),
        ("return [None] * len(names)", "is NoneType None; give the bytes of an image file or an array of uint8"),
        ("return [b'x'] * len(names)", "is a file, which is decoded to 3 channels, and the source has 1"),
        ("return [np.zeros((8, 8), np.uint8)] * 3", "read() ends after 3 of 28 samples; yield one for each name"),
        ("return [np.zeros((8, 8), np.uint8)] * 29", "read() yields more than the 28 requested samples"),
        ("raise ValueError('bad block')", "read raised ValueError (bad block) in "),
        ("return 3", "read raised TypeError"),
    ],
)
def test_what_is_read_wrongly_is_told_with_the_source(offered: Offered, read: str, said: str) -> None:
    with pytest.raises(RunError) as error:
        pixels(offered.be(read=read))
    assert str(error.value).startswith("data.source=rows (package rowspack 1.0): ")
    assert said in str(error.value)
    assert not isinstance(error.value, OutsideError)


@pytest.mark.parametrize(
    ("read", "said"),
    [
        ("return [np.zeros((8, 8, 3), np.uint8)] * len(names)", "give a pair of an image and its mask or targets"),
        ("return [(np.zeros((8, 8, 3), np.uint8), np.zeros((8, 7), np.uint8))] * 9", "give both one size"),
        ("return [(np.zeros((8, 8, 3), np.uint8), np.zeros((8, 8), int))] * 9", "its mask, is an array of int64"),
        (
            "return [(b'x', np.zeros((8, 8), np.uint8))] * 9",
            "is a file, and its mask an array of uint8 (8, 8); give both in",
        ),
        ("return [(np.zeros((8, 8, 3), np.uint8), b'x')] * 9", "(8, 8, 3), and its mask a file; give both in one form"),
    ],
)
def test_wrong_masks_are_told(offered: Offered, read: str, said: str) -> None:
    data = offered.be(channels=3, has_masks=True, read=read, samples="return [(str(n), 0) for n in range(9)]")
    with refused("data.source", "data.source=rows", kind=RunError) as error:
        pixels(data, 4)
    assert said in str(error.value)


@pytest.mark.parametrize("angles", ["[1, 2]", "[float('nan')]", "'wide'"])
def test_wrong_targets_are_told(offered: Offered, angles: str) -> None:
    read = f"return [(np.zeros((8, 8), np.uint8), {angles})] * len(names)"
    with refused("data.source", "data.source=rows", kind=PacelineError):
        pixels(offered.be(target_names=("angle",), read=read))


def test_its_shards_are_those_of_any_source(offered: Offered, tmp_path: Path) -> None:
    data = offered.be()
    listing = source.list_samples(data)
    with store.temporary(tmp_path, "0" * 64) as directory:
        records = write_shards(list(ChunkPlanner(listing, data, directory).chunks()))
        facts = graph.manifest.build(listing, data, "0" * 64, records, 0)
    assert facts.class_counts["train"] == (14, 14)
    assert facts.provenance["source"] == "rows"
