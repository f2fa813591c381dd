"""Series of nights as a simulation makes them: hosts of different speed, a machine that drifts, heavy tails."""

import numpy as np

from paceline.tasks.speedup.nights.regression import RunMetrics, judge

HOST_SD = 0.08
"""Of the hosts' speeds; a series changes to any of `NUM_HOSTS` hosts every week."""
NUM_HOSTS = 5
DRIFT_SD, DRIFT_LAG = 0.05, 0.9  # autocorrelated noise of the machine
BURST_SD = 0.03  # of the machine, Student's t with 3 degrees of freedom
MEMORY = 140
"""Nights given to `judge`, which looks at fewer; for speed."""


def ordinary_series(rng, num_nights, own_sd=0.01, heavy=False, host_ratio_sd=0.0):
    """Nights whose baseline shares everything but the run's own noise.

    Args:
        rng: of numpy.
        num_nights: of the series.
        own_sd: noise of the ratio of both, which no control removes.
        heavy: Student's t with 5 degrees of freedom instead of normal noise.
        host_ratio_sd: how much the ratio itself differs from host to host.
    """
    week = np.arange(num_nights) // 7
    host = rng.integers(NUM_HOSTS, size=week[-1] + 1)[week]
    drift = [rng.normal(0, DRIFT_SD)]
    for _ in range(num_nights - 1):
        drift.append(DRIFT_LAG * drift[-1] + rng.normal(0, DRIFT_SD * np.sqrt(1 - DRIFT_LAG**2)))
    bursts = BURST_SD * rng.standard_t(3, num_nights) / np.sqrt(3)
    machine = rng.normal(0, HOST_SD, NUM_HOSTS)[host] + np.array(drift) + bursts
    own = rng.standard_t(5, num_nights) * np.sqrt(3 / 5) if heavy else rng.standard_normal(num_nights)
    ratio = rng.normal(0, host_ratio_sd, NUM_HOSTS)[host] + own_sd * own
    return [
        RunMetrics(
            run_id=str(number),
            host=f"host{host[number]}",
            throughput=2000 * float(np.exp(machine[number] + ratio[number])),
            baseline_throughput=1000 * float(np.exp(machine[number])),
        )
        for number in range(num_nights)
    ]


def slowed(runs, first, loss):
    """The series with a loss from a night on."""
    return [
        run.model_copy(update={"throughput": run.throughput * (1 - loss)}) if number >= first else run
        for number, run in enumerate(runs)
    ]


def alarms(runs, first=0):
    """Nights from the first on that are called a regression, found as they happen."""
    runs, nights = list(runs), []
    for night in range(first, len(runs)):
        if judge(runs[max(0, night + 1 - MEMORY) : night + 1]).verdict == "regression":
            nights.append(night)
            runs[night] = runs[night].model_copy(update={"regressed": True})
    return nights
