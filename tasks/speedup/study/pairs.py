"""The trainings of a study, paired repeat by repeat.

The two trainings of a pair stand near each other in time and share their seed, so that what slows both leaves their
ratio alone. A contaminated training is never what another is divided by. A pair whose other training is contaminated is
left out while at least three clean pairs remain; else it is used, and the arm is marked.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from paceline.tasks.measure.paired_ratio import FIXED_CONFIDENCE, MIN_INTERVAL_ROUNDS, Floats, Interval, estimate_ratio
from paceline.tasks.speedup.comparability import match
from paceline.tasks.speedup.study.records import ArmRun, MatchVerdict, StudyArm

Rate = Callable[[ArmRun], float | None]
steady: Rate = attrgetter("samples_per_second")  # in steady state
prediction_rate: Rate = attrgetter("prediction_samples_per_second")


def end_to_end(run: ArmRun) -> float | None:
    """Trainings per second, start-up included."""
    return 1 / run.end_to_end_seconds if run.end_to_end_seconds else None


@dataclass(frozen=True)
class StudyRuns:
    """The trainings of a study by arm and repeat."""

    arms: Sequence[StudyArm]
    runs: Sequence[ArmRun]

    def of(self, arm: StudyArm) -> list[ArmRun]:
        """The done ones of an arm, by repeat."""
        done = [run for run in self.runs if run.arm == arm.name and run.status == "done" and not run.is_fresh]
        return sorted(done, key=lambda run: run.repeat)

    def counts(self, arm: StudyArm) -> dict[str, Any]:
        """How an arm's trainings ended, in the fields of its summary."""
        runs = self.of(arm)
        failed = [run for run in self.runs if run.arm == arm.name and run.status == "failed" and not run.is_fresh]
        return {
            "num_done": len(runs),
            "num_failed": len(failed),
            "error": failed[-1].error if failed else None,
            "contaminated": sum(bool(run.contaminated) for run in runs),
            "run_ids": tuple(run.run_id for run in [*runs, *failed] if run.run_id),
        }

    @property
    def fresh(self) -> "StudyRuns":
        """Trainings that measure winners again, as a study of their own."""
        return StudyRuns(self.arms, [run.model_copy(update={"is_fresh": False}) for run in self.runs if run.is_fresh])

    def baseline(self, arm: StudyArm) -> StudyArm:
        """The arm that the others of its group are divided by."""
        return next(other for other in self.arms if other.is_baseline and other.group == arm.group)

    def pairs(self, arm: StudyArm, other: StudyArm) -> list[tuple[ArmRun, ArmRun]]:
        """(run of `other`, run of `arm`) of each repeat that has both and may be divided."""
        by_repeat = {run.repeat: run for run in self.of(other) if not run.contaminated}
        pairs = [(by_repeat[run.repeat], run) for run in self.of(arm) if run.repeat in by_repeat]
        clean = [pair for pair in pairs if not pair[1].contaminated]
        return clean if len(clean) >= MIN_INTERVAL_ROUNDS else pairs

    def verdict(self, arm: StudyArm, other: StudyArm) -> MatchVerdict | None:
        """Whether the two did the same work; None when one of them has no run."""
        runs = {run.repeat: run for run in self.of(other)}
        pair = next(((runs[run.repeat], run) for run in self.of(arm) if run.repeat in runs), None)
        return match(pair[0].facts, pair[1].facts) if pair else None

    def are_comparable(self, arm: StudyArm, other: StudyArm) -> bool:
        """Whether one may be divided by the other: two arms that did the same work."""
        verdict = None if arm == other else self.verdict(arm, other)
        return verdict is not None and verdict.matches

    def logs(self, arm: StudyArm, other: StudyArm, rate: Rate = steady) -> list[float]:
        """Log-ratios of the pairs, the rate of `arm` over that of `other`; none without a match."""
        return log_ratios(self.pairs(arm, other), rate) if self.are_comparable(arm, other) else []

    def ratio(self, arm: StudyArm, other: StudyArm, rate: Rate = steady) -> Interval | None:
        """Rate of `arm` over that of `other`; None without a match."""
        return ratio_of(self.logs(arm, other, rate))


def log_ratios(pairs: Sequence[tuple[ArmRun, ArmRun]], rate: Rate = steady) -> list[float]:
    """Log of the rate of each pair's second run over that of its first; pairs with an unknown rate are left out."""
    rates = ((rate(base), rate(run)) for base, run in pairs)
    return [float(np.log(above / below)) for below, above in rates if below and above]


def ratio_of(logs: Sequence[float] | Floats) -> Interval | None:
    """The ratio behind log-ratios of the repeats; None without any."""
    return estimate_ratio(np.asarray(logs, dtype=np.float64), FIXED_CONFIDENCE)


def figures_of(interval: Interval | None) -> tuple[float | None, float | None, float | None]:
    """Value and ends of an interval; None for each that is not known."""
    return (None, None, None) if interval is None else (interval.value, interval.low, interval.high)
