"""Noise that follows from a number: normal, without a pattern, and the same wherever it is made."""

import numpy as np
import torch
from scipy import stats

from paceline.tasks.model.noise import gaussian

SHAPE = (1, 20, 20)


def test_it_is_normal():
    values = gaussian(torch.arange(500), SHAPE, seed=1).flatten().numpy()
    assert stats.kstest(values, "norm").pvalue > 1e-3
    assert abs(values.mean()) < 0.01
    assert abs(values.std() - 1) < 0.01
    assert np.isfinite(values).all()


def test_neighbours_in_every_direction_have_nothing_to_do_with_each_other():
    values = gaussian(torch.arange(500), SHAPE, seed=1)[:, 0]
    shifted = [
        (values[1:], values[:-1]),
        (values[:, 1:], values[:, :-1]),
        (values[..., 1:], values[..., :-1]),
        (values[:, :10], values[:, 10:]),
    ]
    shifted.append((values, gaussian(torch.arange(500), SHAPE, seed=2)[:, 0]))
    for one, other in shifted:
        assert abs(np.corrcoef(one.flatten(), other.flatten())[0, 1]) < 0.01


def test_a_sample_has_its_own_whatever_batch_it_is_in():
    draws = torch.tensor([-1, 0, 7, 2**62, 12345678901])
    together = gaussian(draws, (3, 5, 7), seed=2**32 - 1)
    for draw, values in zip(draws, together, strict=True):
        assert torch.equal(gaussian(draw[None], (3, 5, 7), seed=2**32 - 1)[0], values)
    assert len({float(values.sum()) for values in together}) == len(draws)


def test_it_stays_as_it_is():
    """A resumed training goes on with the same noise, also after an upgrade."""
    found = gaussian(torch.tensor([3]), (4,), seed=1)[0]
    np.testing.assert_allclose(found, GOLDEN, atol=1e-6)


GOLDEN = [-0.265118, 0.090886, 0.390800, -0.608722]
