"""How far a model as it is executed may be from the plain one."""

import pytest

from paceline.tasks.predict.job import Parity
from paceline.tasks.predict.prefect_tasks import _agrees


@pytest.mark.parametrize(
    ("num_samples", "num_other", "agrees"),
    [
        (1, 0, True),
        (1, 1, False),
        (2, 1, True),
        (2, 2, False),
        (20, 1, True),
        (20, 2, False),
        (256, 2, True),
        (256, 3, False),
    ],
)
def test_one_of_few_samples_may_differ_and_one_in_a_hundred_of_many(num_samples, num_other, agrees):
    found = Parity(num_samples=num_samples, agreement=1 - num_other / num_samples, max_difference=0.5)
    assert _agrees(found) == agrees


def test_of_pixels_one_in_a_hundred_may_differ_however_few_the_images_are():
    assert not _agrees(Parity(num_samples=2, unit="pixels", agreement=0.98, max_difference=0.5))
    assert _agrees(Parity(num_samples=2, unit="pixels", agreement=0.991, max_difference=0.5))
