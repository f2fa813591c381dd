"""Kinds of noise of a machine: logarithms of the times of blocks over the true ones, in the order in which they run."""

import numpy as np


def normal(rng, shape, deviation):
    return rng.normal(0, deviation, shape)


def autoregressive(rng, shape, correlation, deviation=0.03):
    noise = normal(rng, shape, deviation)
    for block in range(1, shape[1]):
        noise[:, block] = correlation * noise[:, block - 1] + np.sqrt(1 - correlation**2) * noise[:, block]
    return noise


def bursts(rng, shape, length=3, share=0.08):
    """Slowness of 30 to 100 % that starts in a share of the blocks and lasts `length` blocks on average."""
    slowness, left, size = np.zeros(shape), np.zeros(shape[0], int), np.zeros(shape[0])
    for block in range(shape[1]):
        begins = (left == 0) & (rng.random(shape[0]) < share)
        left = np.where(begins, rng.geometric(1 / length, shape[0]), left)
        size = np.where(begins, np.log1p(rng.uniform(0.3, 1.0, shape[0])), size)
        slowness[:, block] = np.where(left > 0, size, 0)
        left = np.maximum(left - 1, 0)
    return normal(rng, shape, 0.01) + slowness


def _periodic(rng, shape):
    phase = rng.uniform(0, 2 * np.pi, (shape[0], 1))
    return normal(rng, shape, 0.01) + 0.03 * np.sin(2 * np.pi * np.arange(shape[1]) / 7 + phase)


NOISE = {
    "gaussian": lambda rng, shape: normal(rng, shape, 0.02),
    "uniform": lambda rng, shape: rng.uniform(-0.04, 0.04, shape),
    "Laplace": lambda rng, shape: rng.laplace(0, 0.015, shape),
    "student 2": lambda rng, shape: 0.02 * rng.standard_t(2, shape),
    "student 3": lambda rng, shape: 0.02 * rng.standard_t(3, shape),
    "exponential": lambda rng, shape: rng.exponential(0.03, shape),
    "lognormal": lambda rng, shape: 0.03 * np.exp(rng.normal(0, 1, shape)),
    "drift": lambda rng, shape: normal(rng, shape, 0.015) + np.linspace(0, 0.3, shape[1]),
    "falling drift": lambda rng, shape: normal(rng, shape, 0.015) - np.linspace(0, 0.3, shape[1]),
    "walk": lambda rng, shape: normal(rng, shape, 0.01) + np.cumsum(normal(rng, shape, 0.015), axis=1),
    "autocorrelated": lambda rng, shape: autoregressive(rng, shape, 0.5),
    "bursts": bursts,
    "long bursts": lambda rng, shape: bursts(rng, shape, length=8, share=0.04),
    "periodic": _periodic,
}


def log_ratios_of(blocks):
    """Log-ratios of identical arms, trials x rounds, from blocks in the order A B | B A | ..."""
    pairs = blocks.reshape(len(blocks), -1, 2)
    log_ratios = pairs[:, :, 0] - pairs[:, :, 1]
    log_ratios[:, 1::2] *= -1
    return log_ratios
