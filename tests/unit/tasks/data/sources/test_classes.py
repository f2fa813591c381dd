"""Some of the classes of a source."""

import numpy as np

from paceline.conf.data import Data
from paceline.tasks.data import key
from paceline.tasks.data.sources import digits
from paceline.tasks.data.sources import registry as source
from tests.support.refusals import refused


def listing(*classes):
    return source.list_samples(Data(classes=classes or None))


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


def test_other_classes_are_another_set():
    assert len({key.describe(Data(classes=names)).key for names in (None, ("3", "7"), ("3", "8"))}) == 3
    assert key.describe(Data(classes=("3", "7"))).class_names == ("3", "7")


def test_a_class_that_is_not_there():
    with refused("data.classes", "cat", *range(10)):
        listing("3", "cat")
