"""The measured search for an execution, in real ranks: before a training long enough to afford it, and kept."""

from pathlib import Path

import pytest

from tasks.cluster import hardware
from tasks.train.coordinate import train_group
from tasks.train.searches import SearchStore
from tests.jobs import changed

TWO = ("execution.num_devices=2", "recipe.batch_scaling=strong", "recipe.batch_size=32", "model.width=2")
LONG = 60  # epochs of 40 steps, of which a twentieth is 120 steps: two arms beside the rules' own
SMALL = ("data.image_size=8", "model.depth=1", "speedup.baseline=none")


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
    store = SearchStore(Path(job.home), job.config, here, job.prepared)
    assert store.find() is None
    store.keep(found.model_copy(update={"validity": found.validity.model_copy(update={"contaminated": False})}))
    kept = store.find()
    assert kept.probes == found.probes
    assert SearchStore(Path(job.home), changed(job, model={"width": 4}).config, here, job.prepared).find() is None

    brief = changed(job, recipe={"num_epochs": 1}).model_copy(update={"search": kept})
    again = train_group(brief, cluster_address)
    assert again.search == kept, "too short to search, but what is known is gone by"
    assert again.plan.reasons == result.plan.reasons or kept.validity != found.validity
