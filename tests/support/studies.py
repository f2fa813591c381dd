"""Trainings of made-up studies with known figures."""

from paceline.conf.load import load
from paceline.tasks.records.hardware import Hardware
from paceline.tasks.speedup.comparability import comparison_facts
from paceline.tasks.speedup.study.analysis import budget_differences, ladder, scalings, summarise_arms
from paceline.tasks.speedup.study.design import expand, parse_axes
from paceline.tasks.speedup.study.pairs import StudyRuns
from paceline.tasks.speedup.study.records import ArmRun, StudyResult
from paceline.tasks.train.plan import resolve

PRECISION = "execution.precision=32-true,bf16-mixed"

HARDWARE = Hardware(host="host", cpu_name="device", num_cores=64, memory_bytes=2**33, cpu_bf16=True)


def arms_of(*axes, ladder=False, base=()):
    return expand(lambda overrides: load("digits", [*base, *overrides]), parse_axes(list(axes)), ladder=ladder)


def training(arm, repeat, rate, base=(), **fields):
    config = load("digits", [*base, *arm.overrides, f"seed={repeat}"])
    return ArmRun(
        **{
            "arm": arm.name,
            "repeat": repeat,
            "position": 0,
            "run_id": f"{arm.name}-{repeat}",
            "facts": comparison_facts(config, "data", "code", {}, resolve(config, HARDWARE, 1293)),
            "world_size": config.execution.world_size,
            "num_epochs": 4,
            "samples_per_second": rate,
            "epoch_seconds": 1000 / rate,
            "first_epoch_seconds": 1000 / rate + 1,
            "startup_seconds": 5.0,
            "end_to_end_seconds": 6 + 4 * 1000 / rate,
            "accuracy": 0.9,
            "num_test": 1000,
            "num_gained": 0,
            "num_lost": 0,
            "validation": ((8.0, 0.5), (10.0, 0.9)),
            "time_budget": {"startup": 5.0, "forward": 4 * 1000 / rate, "loop": 1.0},
        }
        | fields
    )


def result_of(arms, runs, **fields):
    """What a study of these trainings finds."""
    trainings = StudyRuns(arms, runs)
    rungs, interaction = ladder(trainings)
    return StudyResult(
        **{
            "run_id": "0123456789abcdef",
            "experiment": "paceline",
            "preset": "digits",
            "kind": "ladder" if rungs else "grid",
            "num_repeats": len({run.repeat for run in runs}),
            "arms": summarise_arms(trainings),
            "rungs": rungs,
            "interaction": interaction,
            "differences": budget_differences(trainings),
            "scalings": scalings(trainings),
            "hardware": "host: 2 cores",
        }
        | fields
    )
