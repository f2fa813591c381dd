"""Some of the classes of a source."""

import numpy as np
import pytest

from paceline.conf.data import Data
from paceline.tasks.data import key
from paceline.tasks.data.sources import digits
from paceline.tasks.data.sources import registry as source
from tests.support.refusals import refused


def listing(*classes):
    return source.list_samples(Data(classes=classes or None))


def drawings(listing):
    return source.spec_of(listing.origin).read(listing.origin, listing.test, 8)


def test_the_samples_of_some_classes_are_those_that_they_are_among_all():
    whole, some = listing(), listing("7", "3")
    assert some.class_names == ("3", "7"), "in the source's order"
    for split in ("train", "validation", "test"):
        expected = [sample._replace(label=sample.label == 7) for sample in whole.split(split) if sample.label in (3, 7)]
        assert list(some.split(split)) == expected
    assert {sample.label for sample in some.test} == {0, 1}


def test_their_images_are_theirs():
    some = listing("3", "7")
    images_NHWC = np.stack([item.picture for item in digits.read_digits(some.origin, some.test, 8)])
    assert images_NHWC.shape == (len(some.test), 8, 8, 1)
    row = next(sample.row for sample in some.test if sample.label == 1)
    assert digits._digits()[1][row] == 7


@pytest.mark.parametrize(("kind", "names"), [("textures", ("stripes", "rings")), ("motions", ("north", "south"))])
def test_drawings_of_some_classes_are_those_that_they_are_among_all(kind, names):
    whole, some = (source.list_samples(Data(source=kind, classes=classes)) for classes in (None, names))
    drawn, expected = (
        {sample.row: item.picture for sample, item in zip(one.test, drawings(one), strict=True)}
        for one in (some, whole)
    )
    assert some.test
    assert all(np.array_equal(expected[row], picture) for row, picture in drawn.items() if row in expected)
    assert drawn.keys() & expected.keys()


def test_other_classes_are_another_set():
    assert len({key.describe(Data(classes=names)).key for names in (None, ("3", "7"), ("3", "8"))}) == 3
    assert key.describe(Data(classes=("3", "7"))).class_names == ("3", "7")


def test_a_class_that_is_not_there():
    with refused("data.classes", "cat", *range(10)):
        listing("3", "cat")
