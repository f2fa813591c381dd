"""The measured search for an execution, in real ranks: before a training long enough to afford it, and kept."""

from pathlib import Path

import pytest

from paceline.tasks.cluster import hardware
from paceline.tasks.records.measurement import AutotuneResult
from paceline.tasks.train.autotune.cache import AutotuneCache
from paceline.tasks.train.launch.coordinator import train_group
from paceline.tasks.train.plan import resolve
from tests.support.jobs import changed, planted

TWO = ("execution.num_devices=2", "recipe.batch_scaling=strong", "recipe.batch_size=32", "model.width=2")
LONG = 60  # epochs of 40 steps, of which a twentieth is 120 steps: two arms beside the rules' own
SMALL = ("data.image_size=8", "model.depth=1", "speedup.baseline=none")


OPEN = ("execution.precision=auto", "recipe.num_epochs=1", "data.image_size=8", "execution.num_threads=1")
SLOW_SAMPLE = 0.002
"""Seconds: several times what a sample of these networks takes, so that a busy machine changes nothing."""


def bf16_job(make_job, *overrides):
    """A short training, as the rules plan it on a CPU whose flags name bf16."""
    job = make_job(*OPEN, *overrides)
    host = hardware.describe().model_copy(update={"cpu_bf16": True})
    job = job.model_copy(update={"may_search": True, "plan": resolve(job.config, host, job.prepared.num_train)})
    assert job.plan.precision == "bf16-mixed"
    return job


@pytest.mark.parametrize(
    ("slow", "precision"), [("bf16", "32-true"), pytest.param("fp32", "bf16-mixed", marks=pytest.mark.slow)]
)
def test_a_short_training_computes_in_what_is_faster_here(make_job, cluster_address, slow, precision):
    job = bf16_job(make_job, "speedup.baseline=none")
    with planted(cluster_address, "input=0", SLOW_ARITHMETIC=f"{slow}={SLOW_SAMPLE}"):
        result = train_group(job, cluster_address)
    assert result.plan.precision == precision
    assert " x " in result.plan.reasons["precision"].reason, "the figures are quoted"
    assert result.search.probes[0].candidate.variant == "synthetic_input"


@pytest.mark.slow
def test_an_execution_that_its_probe_finds_slower_is_switched_before_the_first_step(make_job, cluster_address):
    """What an earlier search has found no longer holds here."""
    job = bf16_job(
        make_job,
        "speedup.baseline=probe",
        "speedup.max_seconds=3",
        "execution.memory_format=contiguous",
        "recipe.batch_size=64",
    )
    job = job.model_copy(update={"search": AutotuneResult(probes=(), budget_seconds=2.0, seconds=2.0)})
    with planted(cluster_address, "input=0", SLOW_ARITHMETIC=f"bf16={SLOW_SAMPLE}"):
        result = train_group(job, cluster_address)
    assert result.plan.precision == result.probe.candidate.precision == "32-true"
    assert result.plan.reasons["precision"].reason.startswith(
        "switched before the first step: the probe timed 1 device"
    )


@pytest.mark.slow
def test_two_ranks_search_agree_and_a_restart_goes_by_what_was_found(make_job, cluster_address):
    job = make_job(*TWO, *SMALL, f"recipe.num_epochs={LONG}").model_copy(update={"may_search": True})
    result = train_group(job, cluster_address)
    found = result.search
    assert found is not None
    assert found.seconds <= result.time_budget["search"]
    assert [probe.candidate.num_devices for probe in found.probes] == [2] * len(found.probes)
    assert found.probes or found.slower
    assert result.plan.world_size == 2
    if not found.validity.contaminated:
        timed = [choice.reason for choice in result.plan.reasons.values() if "timed" in choice.reason]
        assert timed or found.slower

    here = hardware.describe()
    store = AutotuneCache(Path(job.home), job.config, here, job.prepared)
    assert store.find() is None
    store.keep(found.model_copy(update={"validity": found.validity.model_copy(update={"contaminated": False})}))
    kept = store.find()
    assert kept.probes == found.probes
    assert AutotuneCache(Path(job.home), changed(job, model={"width": 4}).config, here, job.prepared).find() is None

    brief = changed(job, recipe={"num_epochs": 1}).model_copy(update={"search": kept})
    again = train_group(brief, cluster_address)
    assert again.search == kept, "too short to search, but what is known is gone by"
    assert again.plan.reasons == result.plan.reasons or kept.validity != found.validity
