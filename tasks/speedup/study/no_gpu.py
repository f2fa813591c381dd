"""The study "no GPU?": what training from scratch, fine-tuning and features with a classifier give on a CPU.

The ways do different work on purpose, so no throughput is divided. What is divided is the time to the same score on the
same validation split, from trainings of one repeat, which share seed, data and machine.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.tasks.measure.paired_ratio import Interval
from paceline.tasks.records.cost import Cost
from paceline.tasks.records.record import Record
from paceline.tasks.speedup.data_sheet import DataSheet, max_prediction_throughput, max_training_throughput
from paceline.tasks.speedup.hardware_table import HardwareRow
from paceline.tasks.speedup.study.analysis import median_known
from paceline.tasks.speedup.study.inference import provable_margin, run_parity
from paceline.tasks.speedup.study.pairs import StudyRuns, end_to_end, log_ratios, ratio_of
from paceline.tasks.speedup.study.records import ArmRun, Parity, PredictionThroughput, StudyArm

SCRATCH, TUNED, FEATURES = "from scratch", "fine-tuned", "features"
WAYS = (SCRATCH, TUNED, FEATURES)
TRAINED = (SCRATCH, TUNED)
NO_COUNTER = "neither NVML nor RAPL can be read"
NO_BASIS = "no basis"


class ReportedValue(Record):
    """A figure, and how it is known."""

    kind: Literal["measured", "about", "at most", "at least", "never", "not measured"]
    """`about` follows from measurements of other runs; `at most` and `at least` are bounds."""
    value: float | None = None
    basis: str = ""  # of what is not measured here: what it rests on, or why there is nothing


def reported(value: float | None, why_not: str = NO_BASIS) -> ReportedValue:
    """A measured value, or the reason for none."""
    kind: Literal["measured", "not measured"] = "not measured" if value is None else "measured"
    return ReportedValue(kind=kind, value=value, basis=why_not if value is None else "")


class Approach(Record):
    """One row of the table: a way to a model, on a device."""

    name: str
    device: str
    is_measured: bool  # here; else it is an estimate
    basis: str  # what its figures rest on, in words
    num_done: int = 0
    num_failed: int = 0
    contaminated: int = 0  # trainings that were marked
    error: str | None = None  # of its last failed training
    run_ids: tuple[str, ...] = ()
    score: float | None = None  # accuracy on the test split, mean over repeats
    least_score: float | None = None
    best_score: float | None = None
    difference: Interval | None = None  # of the score, less that of training from scratch, as studies have it
    parity: Parity = "unknown"
    parity_margin: float | None = None  # smallest margin, as a fraction, within which the data prove it to be on par
    num_judged: int = 0  # repeats that have a target
    num_reached: int = 0  # of those, how many were ever as good
    target_seconds: ReportedValue
    """From the first sample to the target, median over the repeats that reached it; of undisturbed ones where there
    are any, and so are the other times and the energy."""
    whole_seconds: ReportedValue  # from the start of the process to the end of training, median over repeats
    joules: ReportedValue  # mean over repeats
    target_ratio: Interval | None = None
    """Time of training from scratch to the target, over this way's; None unless each repeat of both reached it."""
    whole_ratio: Interval | None = None  # the same of the whole training
    num_pairs: int = 0  # repeats that may be divided
    eager: ReportedValue  # this and the next: prediction, samples per second
    executed: ReportedValue


class NoGpuResult(Record):
    """Everything that the study found."""

    run_id: str
    experiment: str
    preset: str
    pretrained: str  # what the network began with, in words
    layer: str
    num_repeats: int
    target: float | None  # as requested; None for the final score of training from scratch in the same repeat
    targets: tuple[float, ...]  # of the repeats
    ways: tuple[Approach, ...]
    prediction_ratio: Interval | None = None  # of the network from scratch, executed over eager
    prediction_disturbed: tuple[str, ...] = ()  # what other work disturbed the machine while predictions were timed
    cost: Cost | None = None
    sheet: DataSheet  # of the GPU whose bounds are shown
    choice: str = ""
    verdict: str = ""
    notes: tuple[str, ...] = ()
    hardware: str
    seconds: float

    def way(self, name: str) -> Approach:
        """As measured here."""
        return next(way for way in self.ways if way.name == name and way.is_measured)


@dataclass(frozen=True)
class TargetScore:
    """The score on the validation split to which the time is taken."""

    trainings: StudyRuns
    given: float | None

    def of(self, repeat: int) -> float | None:
        """In one repeat; None where training from scratch has no score."""
        if self.given is not None:
            return self.given
        ends = {run.repeat: run.validation[-1][1] for run in self._scratch() if run.validation}
        return ends.get(repeat)

    def all(self) -> tuple[float, ...]:
        """Of all repeats."""
        targets = (self.of(run.repeat) for run in self._scratch())
        return tuple(target for target in targets if target is not None)

    def place(self, run: ArmRun) -> int | None:
        """Index of its first score that reaches the target; None without one."""
        if (target := self.of(run.repeat)) is None:
            return None
        return next((place for place, (_, score) in enumerate(run.validation) if score >= target), None)

    def seconds(self, run: ArmRun) -> float | None:
        """From the first sample to that score; None where it is never reached."""
        place = self.place(run)
        return None if place is None else run.validation[place][0] - (run.startup_seconds or 0.0)

    def rate(self, run: ArmRun) -> float | None:
        """Of what `seconds` counts, per second."""
        seconds = self.seconds(run)
        return 1 / seconds if seconds else None

    def _scratch(self) -> list[ArmRun]:
        return self.trainings.of(next(arm for arm in self.trainings.arms if arm.name == SCRATCH))


def measured_way(arm: StudyArm, goal: TargetScore, rates: PredictionThroughput | None) -> Approach:
    """The row of an arm as it was measured here."""
    trainings, runs, counts = goal.trainings, goal.trainings.of(arm), goal.trainings.counts(arm)
    scores = [run.score for run in runs if run.score is not None]
    judged = [run for run in runs if goal.of(run.repeat) is not None]
    reached = [run for run in judged if goal.seconds(run) is not None]
    clean, contaminated = _clean_runs(runs), counts["contaminated"]
    joules = [run.energy_joules for run in clean if run.energy_joules is not None]
    if judged:
        median_seconds = median_known([goal.seconds(run) for run in _clean_runs(reached)])
        to_target_seconds = ReportedValue(kind="never" if median_seconds is None else "measured", value=median_seconds)
    else:
        to_target_seconds = reported(None, "no training was done, or there is no target")
    difference, verdict = run_parity([] if arm.is_baseline else runs)
    return Approach(
        name=arm.name,
        device=next((run.facts.get("device", "CPU") for run in runs), "CPU"),
        is_measured=True,
        basis=f"measured, {len(runs)} training{'' if len(runs) == 1 else 's'}"
        + (f", {contaminated} disturbed" if contaminated else ""),
        **counts,
        score=statistics.fmean(scores) if scores else None,
        least_score=min(scores, default=None),
        best_score=max(scores, default=None),
        difference=difference,
        parity=verdict,
        parity_margin=provable_margin(difference),
        num_judged=len(judged),
        num_reached=len(reached),
        target_seconds=to_target_seconds,
        whole_seconds=reported(median_known([run.end_to_end_seconds for run in clean]), "no training was done"),
        joules=reported(statistics.fmean(joules) if joules else None, NO_COUNTER),
        target_ratio=_ratio(trainings, arm, goal.rate) if len(reached) == len(judged) else None,
        whole_ratio=_ratio(trainings, arm, end_to_end),
        num_pairs=0 if arm.is_baseline else len(trainings.pairs(arm, trainings.baseline(arm))),
        eager=reported(rates.eager if rates else None),
        executed=reported(rates.executed if rates else None),
    )


def _clean_runs(runs: Sequence[ArmRun]) -> Sequence[ArmRun]:
    """The uncontaminated runs, whose times are shown; all runs if every one is contaminated."""
    return [run for run in runs if not run.contaminated] or runs


def _ratio(trainings: StudyRuns, arm: StudyArm, rate: Callable[[ArmRun], float | None]) -> Interval | None:
    """Rate of a way over that of training from scratch; none unless all that may be divided have one."""
    pairs = [] if arm.is_baseline else trainings.pairs(arm, trainings.baseline(arm))
    logs = log_ratios(pairs, rate)
    return ratio_of(logs) if len(logs) == len(pairs) else None


@dataclass(frozen=True)
class Gpu:
    """Knowledge of GPUs without training on one here."""

    sheet: DataSheet
    rows: Mapping[str, Sequence[HardwareRow]]
    """By way: what GPUs made of exactly the same work in other runs, as the hardware table has them."""
    rates: Mapping[str, PredictionThroughput]  # of prediction, by way
    name: str | None  # of this host's GPU, on which predictions were timed; None without one
    cost: Cost | None
    num_train: int
    batch_size: int


def way_on_gpu(arm: StudyArm, goal: TargetScore, gpu: Gpu) -> Approach:
    """The row of an arm on a GPU, each figure with what it rests on."""
    runs, rows = goal.trainings.of(arm), gpu.rows.get(arm.name, ())
    row = max(rows, key=lambda hardware_row: hardware_row.samples_per_second, default=None)
    if arm.name not in TRAINED:
        to_target = total = reported(None, "no basis: where the classifier is fitted was not tried")
    else:
        to_target, total = _training_cells(runs, goal, gpu, row)
    if row is not None:
        basis = f"estimate: {row.num_runs} matched runs in the store"
    elif gpu.cost is not None:
        basis = f"estimate: bound by data sheet ({gpu.sheet.source})"
    else:
        basis = f"not measured, {NO_BASIS}"
    epochs, joules = median_known([float(run.num_epochs) for run in runs]), reported(None)
    if row is not None and row.joules_per_sample is not None and epochs is not None:
        spent, why = epochs * gpu.num_train * row.joules_per_sample, f"as many samples as here, by runs on {row.label}"
        joules = ReportedValue(kind="about", value=spent, basis=why)
    executed = _prediction_rate(arm.name, gpu, row)
    # Training and prediction may be known of two devices: what was timed here is never reported for another.
    measured_here = f"; prediction measured {executed.basis}" if executed.kind == "measured" else ""
    return Approach(
        name=arm.name,
        device=row.label if row else gpu.sheet.name,
        is_measured=False,
        basis=basis + measured_here,
        target_seconds=to_target,
        whole_seconds=total,
        joules=joules,
        eager=reported(None),
        executed=executed,
    )


def _training_cells(
    runs: Sequence[ArmRun], goal: TargetScore, gpu: Gpu, row: HardwareRow | None
) -> tuple[ReportedValue, ReportedValue]:
    """Seconds to the target and of the whole training: as many samples as here, at the rate that is known or bounds."""
    places = [goal.place(run) for run in runs]
    to_target = median_known([None if place is None else place + 1.0 for place in places])
    kind: Literal["about", "at least"] = "about"
    if row is not None:
        rate, fixed = row.samples_per_second, row.fixed_seconds or 0.0
        basis = f"as many samples as here at {rate:,.0f} samples/s on {row.label}"
    elif gpu.cost is not None:
        kind, rate, fixed = "at least", max_training_throughput(gpu.sheet, gpu.cost, gpu.batch_size), 0.0
        basis = f"as many samples as here at no more than {rate:,.0f} samples/s, by the data sheet of {gpu.sheet.name}"
    else:
        return reported(None), reported(None)

    def cell(num_epochs: float | None, start: float) -> ReportedValue:
        if num_epochs is None:
            return reported(None, "never reached here")
        return ReportedValue(kind=kind, value=num_epochs * gpu.num_train / rate + start, basis=basis)

    return cell(to_target, 0.0), cell(median_known([float(run.num_epochs) for run in runs]), fixed)


def _prediction_rate(name: str, gpu: Gpu, row: HardwareRow | None) -> ReportedValue:
    rates = gpu.rates.get(name)
    if rates is not None and rates.gpu is not None:
        return ReportedValue(kind="measured", value=rates.gpu, basis=f"on this host's {gpu.name}")
    if row is not None and row.prediction_samples_per_second is not None:
        basis = f"median of {row.num_runs} matched runs on {row.label}"
        return ReportedValue(kind="about", value=row.prediction_samples_per_second, basis=basis)
    if gpu.cost is None:
        return reported(None)
    value = max_prediction_throughput(gpu.sheet, gpu.cost)
    flops = gpu.cost.forward_flops / 1e6
    return ReportedValue(kind="at most", value=value, basis=f"{flops:.3g} Mflop a sample; {gpu.sheet.source}")
