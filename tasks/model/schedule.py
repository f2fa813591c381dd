"""The course of the learning rate, as a pure function of the step."""

from __future__ import annotations

import math

from conf.recipe import Recipe


def learning_rate_factor(recipe: Recipe, step: float, steps_per_epoch: int) -> float:
    """Factor on the peak learning rate at a step (0-based), between 0 and 1.

    Args:
        recipe: schedule, warm-up and number of epochs.
        step: global step; between two steps where steps before it were of another size.
        steps_per_epoch: steps of one epoch.

    Linear warm-up as in Goyal et al. (2017); one-cycle as in Smith (2018): linear up, linear down to zero.
    """
    total = recipe.num_epochs * steps_per_epoch
    warmup = min(recipe.warmup_epochs, recipe.num_epochs / 2) * steps_per_epoch  # a short trial of a long recipe
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if recipe.schedule == "piecewise":
        return float(recipe.drop_factor ** (step // (recipe.drop_epochs * steps_per_epoch)))
    if recipe.schedule == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1.0, total - warmup))
    if recipe.schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0 - progress
