"""Coverage of the interval over processes, simulated: python -m tests.benchmarks.simulate_starts; about ten seconds.

Rounds have noise of 2 %, starts differ by 0 to 3 %; the first process has more rounds than the others. Prints the
coverage of the true ratio and the mean half-width: of one process alone with a known variance, of Student's t over
processes (the product's), of the same with Satterthwaite's degrees of freedom (1946), and of weighted means by Hartung
and Knapp (2001).
"""

import numpy as np
from scipy import stats

SEED, TRIALS = 5, 20_000
ROUND_SD = 0.02
PROCESS_SDS = (0.0, 0.005, 0.01, 0.02, 0.03)
ROUNDS = ((12, 4, 4), (12, 4, 4, 4), (24, 6, 6, 6, 6, 6), (12, 8, 8, 8))


def intervals(rng, process_sd, rounds):
    """(error of the centre, half-width) of each method, for all trials."""
    count, rounds_P = len(rounds), np.asarray(rounds)
    values_TP = rng.normal(0, process_sd, (TRIALS, count)) + rng.normal(0, ROUND_SD, (TRIALS, count)) / rounds_P**0.5
    freedom_P = rounds_P - 1
    squares_T = (rng.chisquare(freedom_P, (TRIALS, count)) * ROUND_SD**2).sum(1) / freedom_P.sum()
    noise_TP = squares_T[:, None] / rounds_P
    scatter_T = values_TP.var(1, ddof=1)
    variances_TP = np.maximum(0, scatter_T - noise_TP.mean(1))[:, None] + noise_TP
    total_T = variances_TP.sum(1)
    trace_T = (1 - 1 / count) * total_T
    matched_T = trace_T**2 / ((variances_TP**2).sum(1) * (1 - 2 / count) + (total_T / count) ** 2)
    centre_T, error_T = values_TP.mean(1), np.sqrt(scatter_T / count)
    weights_TP = 1 / variances_TP
    weighted_T = (weights_TP * values_TP).sum(1) / weights_TP.sum(1)
    spread_T = (weights_TP * (values_TP - weighted_T[:, None]) ** 2).sum(1) / (count - 1)
    student = stats.t.ppf(0.975, count - 1)
    return {
        "one process": (values_TP[:, 0], np.full(TRIALS, stats.norm.ppf(0.975) * ROUND_SD / rounds[0] ** 0.5)),
        "Student": (centre_T, student * error_T),
        "Satterthwaite": (centre_T, stats.t.ppf(0.975, matched_T) * error_T),
        "Hartung and Knapp": (weighted_T, student * np.sqrt(spread_T / weights_TP.sum(1))),
    }


def main():
    rng = np.random.default_rng(SEED)
    for rounds in ROUNDS:
        for process_sd in PROCESS_SDS:
            cells = [
                f"{method} {np.mean(np.abs(error) <= reach):.3f} +- {np.mean(reach):.2%}"
                for method, (error, reach) in intervals(rng, process_sd, rounds).items()
            ]
            print(f"rounds {rounds}, starts differ by {process_sd:.1%}: {'; '.join(cells)}")


if __name__ == "__main__":
    main()
