"""The steady state of a training: what is left when start-up, compile and warm-up are over."""

import statistics

from paceline.tasks.records.training import TrainResult


def steady_rate(trained: TrainResult) -> float | None:
    """Samples per second over all devices: the median over the windows after warm-up.

    The first epoch is warm-up; of a single epoch, its first window. The median is not moved by a burst of other
    work that hits fewer than half of the windows.

    Returns:
        None when no window is left.
    """
    steps_per_epoch = trained.steps_per_epoch
    if not trained.windows or not steps_per_epoch:
        return None
    warm_up = steps_per_epoch if trained.num_epochs > 1 else trained.windows[0][1]
    begin = trained.first_step + warm_up
    rates = [count / seconds for first, count, seconds in trained.windows if first >= begin and seconds > 0]
    if not rates or trained.samples_per_epoch is None:
        return None
    return statistics.median(rates) * trained.samples_per_epoch / steps_per_epoch
