"""Prediction throughput of trained networks: plain and as executed, in turn, and on a GPU if present.

A program for a fresh process. Images come from a prepared test split and are in memory, as in the evaluation of a run.
"""

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt

from paceline.tasks.data.loading.split_reader import open_split
from paceline.tasks.measure.paired_ratio import MIN_ROUNDS, estimate_ratio
from paceline.tasks.measure.validity import ValidityWatch
from paceline.tasks.model.flops import count_cost
from paceline.tasks.model.pretrained import load_trained_model
from paceline.tasks.predict.job import Settings
from paceline.tasks.predict.linear_eval import pictures
from paceline.tasks.predict.predictor import Predictor
from paceline.tasks.predict.subprocess_job import subprocess_main
from paceline.tasks.records.cost import Cost
from paceline.tasks.records.data import PreparedSet
from paceline.tasks.records.hardware import Gpu
from paceline.tasks.records.measurement import Validity
from paceline.tasks.records.record import Record
from paceline.tasks.speedup.study.records import PredictionThroughput

BLOCK_SECONDS = 0.15
MAX_ROUNDS = 24
MAX_ATTEMPTS = 2  # attempts while other work disturbs the machine; the last one counts, and is marked
MAX_BATCHES = 16  # of a block
EAGER, EXECUTED, ON_GPU = "eager", "executed", "gpu"

Images = npt.NDArray[np.uint8]
Arm = tuple[str, str]  # a way, and how it is executed


class ThroughputJob(Record):
    """Networks to time, and the time limit."""

    ways: dict[str, Settings]  # by name
    prepared: PreparedSet
    directory: str
    num_threads: int
    gpus: tuple[Gpu, ...] = ()  # of the host; the first one is timed too
    seconds: float  # for each way, after warming up; at least six rounds of all
    own_pids: tuple[int, ...]  # processes of the run on this host, whose load is not foreign


class PredictionThroughputs(Record):
    """Throughputs of all networks."""

    paces: dict[str, PredictionThroughput]
    gpu_name: str | None
    cost: Cost | None  # of the first one's network; None where it cannot be counted
    validity: Validity  # of the machine meanwhile


def time_networks(job: ThroughputJob) -> PredictionThroughputs:
    """Time all networks in turn, so that they may be compared; once more where other work disturbed it."""
    ways = {name: _ready(settings, job) for name, settings in job.ways.items()}
    blocks = {
        (name, kind): partial(_seconds, arm, block)
        for name, (arms, block) in ways.items()
        for kind, arm in arms.items()
    }
    num_attempts = 0
    while True:
        num_attempts += 1
        watch = ValidityWatch((os.getpid(), os.getppid(), *job.own_pids), gpu_uuids=[gpu.uuid for gpu in job.gpus[:1]])
        seconds = _rounds(blocks, job.seconds * len(job.ways))
        validity = watch.stop()
        if not validity.contaminated or num_attempts == MAX_ATTEMPTS:
            break
    paces = {}
    for name, (arms, block) in ways.items():
        rates = {kind: len(block) / median(seconds[name, kind]) for kind in arms}
        ratio = estimate_ratio(np.log(seconds[name, EAGER]) - np.log(seconds[name, EXECUTED]))
        eager, executed, gpu = rates[EAGER], rates[EXECUTED], rates.get(ON_GPU)
        paces[name] = PredictionThroughput(eager=eager, executed=executed, ratio=ratio, gpu=gpu)
    first = next(iter(job.ways.values()))
    network, facts = load_trained_model(Path(first.model_directory), first.model_digest)
    cost, gpu_name = count_cost(network, facts.image_shape)[0], job.gpus[0].name if job.gpus else None
    return PredictionThroughputs(paces=paces, gpu_name=gpu_name, cost=cost, validity=validity)


def _ready(settings: Settings, job: ThroughputJob) -> tuple[dict[str, Predictor], Images]:
    """Its arms, warmed up, and as many images for each round as its eager one takes the time of a block for."""
    arms = {EAGER: Predictor(settings, plain=True), EXECUTED: Predictor(settings)}
    if job.gpus:
        arms[ON_GPU] = Predictor(settings.model_copy(update={"gpu": True}))
    test = open_split(job.prepared, "test")
    num_images = min(test.num_samples, MAX_BATCHES * settings.batch_size)
    images = pictures(arms[EAGER], test, np.arange(num_images))
    for arm in arms.values():
        arm(images[: settings.batch_size])
    batch = _seconds(arms[EAGER], images[: settings.batch_size])
    return arms, images[: max(1, round(BLOCK_SECONDS / batch)) * settings.batch_size]


def _seconds(arm: Predictor, images: Images) -> float:
    started = time.perf_counter()
    arm(images)  # its answers are on the host when it returns
    return time.perf_counter() - started


def _rounds(arms: Mapping[Arm, Callable[[], float]], seconds: float) -> dict[Arm, list[float]]:
    """Seconds of each arm in each round; every second round the other way about, so that a drift falls on all."""
    seconds_of: dict[Arm, list[float]] = {name: [] for name in arms}
    end = time.perf_counter() + seconds
    for number in range(MAX_ROUNDS):
        if number >= MIN_ROUNDS and time.perf_counter() > end:
            break
        for name in list(arms)[:: 1 if number % 2 == 0 else -1]:
            seconds_of[name].append(arms[name]())
    return seconds_of


if __name__ == "__main__":
    subprocess_main(ThroughputJob, time_networks)
