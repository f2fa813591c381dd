"""What clusters do: workers, nannies, schedulers and flows that die, on a cluster as an operator starts it."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from paceline.conf.load import load
from paceline.tasks.data.prepare import dask_graph as graph
from paceline.tasks.data.sources import registry as source
from paceline.tasks.errors import LostError
from paceline.tasks.train.launch import coordinator as coordinate
from paceline.tasks.train.launch import recovery
from paceline.tasks.train.launch.coordinator import TrainJob, train_group
from paceline.tasks.train.launch.rank_process import running_ranks, supervisors_of
from tests.integration.conftest import SMALL
from tests.integration.faults.test_recovery import FAR, LONG, check_nothing_is_lost, happening, newest_step
from tests.support.jobs import new_job
from tests.support.patience import until
from tests.support.scratch_cluster import ScratchCluster

FLOW = """
import sys
from pathlib import Path
from paceline.tasks.train.launch.coordinator import TrainJob, train_group
train_group(TrainJob.model_validate_json(Path(sys.argv[1]).read_text()), sys.argv[2])
"""


@pytest.fixture
def cluster():
    with ScratchCluster(2) as started:
        yield started


@pytest.fixture
def job(cluster):
    return new_job(cluster.address, "digits", [*SMALL, *LONG])


@pytest.fixture(scope="module")
def whole(make_job, cluster_address):
    """Two ranks that nothing happens to."""
    return train_group(make_job(*LONG), cluster_address)


@pytest.mark.slow
def test_a_killed_dask_worker_costs_a_restart_and_no_result(whole, job, cluster):
    with happening(job, lambda job: cluster.kill(cluster.worker_pid(1))):
        result = train_group(job, cluster.address)
    restart = check_nothing_is_lost(job, result, whole)
    assert "Dask worker" in restart.cause or "supervisor of rank" in restart.cause


@pytest.mark.slow
def test_a_worker_that_stops_with_its_rank_is_named_as_the_cause(whole, job, cluster):
    def stop_for_a_while(job):
        worker = cluster.worker_pid(1)
        os.kill(worker, signal.SIGSTOP)
        (rank,) = (pid for pid in running_ranks(job.run_id) if supervisors_of([pid]) == [worker])
        os.kill(rank, signal.SIGKILL)  # the other one notices only a closed connection
        time.sleep(8)
        os.kill(worker, signal.SIGCONT)

    with happening(job, stop_for_a_while):
        result = train_group(job, cluster.address)
    restart = check_nothing_is_lost(job, result, whole)
    assert "does not answer" in restart.cause


@pytest.mark.slow
def test_a_scheduler_that_comes_back_with_its_workers_costs_a_restart(whole, job, cluster):
    def restart_all(job):
        cluster.kill(cluster.scheduler.pid)
        cluster.stop()
        cluster.start()

    with happening(job, restart_all):
        result = train_group(job, cluster.address)
    check_nothing_is_lost(job, result, whole)


@pytest.mark.slow
def test_a_nanny_that_is_killed_takes_its_worker_along_and_is_missed(job, cluster, monkeypatch):
    monkeypatch.setattr(recovery, "WAIT_SECONDS", 5.0)
    with (
        happening(job, lambda job: cluster.kill(cluster.nannies[1].pid)),
        pytest.raises(LostError) as error,
    ):
        train_group(job, cluster.address)
    assert error.value.final
    assert running_ranks(job.run_id) == []
    assert newest_step(job) >= FAR, "what was trained is there"


@pytest.mark.slow
@pytest.mark.parametrize("scaling", ["weak", "strong"])
def test_a_group_goes_on_with_fewer_and_grows_back(cluster, monkeypatch, caplog, scaling):
    monkeypatch.setattr(recovery, "REJOIN_SECONDS", 1.0)
    monkeypatch.setattr(coordinate, "LOOK_SECONDS", 0.5)
    longer = [*LONG, "recipe.num_epochs=150", "recipe.schedule=constant", "recipe.learning_rate=0.01"]
    elastic = new_job(
        cluster.address, "digits", [*SMALL, *longer, "cluster.min_workers=1", f"recipe.batch_scaling={scaling}"]
    )

    def lose_one_for_a_while(job):
        cluster.kill(cluster.nannies[1].pid)
        while newest_step(job) < 2 * FAR:
            time.sleep(0.1)
        cluster.start_worker(2)

    with happening(elastic, lose_one_for_a_while):
        result = train_group(elastic, cluster.address)
    lost, grown = result.restarts
    assert (lost.num_ranks, grown.num_ranks, result.world_size) == (2, 1, 2)
    rule = {"weak": "of 64 samples instead of 128, at 1/2 of the learning rate", "strong": "on the same batches"}
    assert any("with 1 of 2 ranks" in line and rule[scaling] in line for line in caplog.messages)
    assert grown.cause == "more workers are available"
    assert grown.first_step > 2 * FAR
    if scaling == "strong":
        assert result.num_steps == 150 * 21, "the batches are the same"
    else:
        assert 150 * 11 < result.num_steps < 150 * 21, "smaller ones for a while"
    assert len(result.validation_scores) == 150
    assert result.validation_scores[-1] > 0.8


@pytest.mark.slow
def test_a_killed_flow_leaves_no_rank_and_no_lease_and_its_training_goes_on(whole, job, cluster, tmp_path):
    path = tmp_path / "job.json"
    path.write_text(job.model_dump_json())
    flow = subprocess.Popen([sys.executable, "-c", FLOW, path, cluster.address])
    while newest_step(job) < FAR:
        assert flow.poll() is None
        time.sleep(0.05)
    os.kill(flow.pid, signal.SIGKILL)
    flow.wait()
    # 10 s without a question, and what a busy machine takes
    until(lambda: not running_ranks(job.run_id), "end of ranks without a flow", seconds=20)
    again = TrainJob.model_validate(job.model_dump() | {"resume": True})
    result = train_group(again, cluster.address)
    assert result.first_step >= FAR - 20
    assert result.losses == whole.losses
    assert result.restarts == ()


@pytest.mark.slow
def test_two_trainings_and_a_preparation_share_a_cluster_without_sharing_a_device(cluster, tmp_path):
    short = [*SMALL, *LONG, "recipe.num_epochs=4"]
    jobs = [new_job(cluster.address, "digits", [*short, f"seed={seed}"]) for seed in (1, 2)]
    with ThreadPoolExecutor() as pool:
        trained = [pool.submit(train_group, job, cluster.address) for job in jobs]
        data = load("digits", ["data.image_size=20"]).data
        prepared = pool.submit(graph.prepare, source.list_samples(data), data, tmp_path, cluster.address)
        assert all(future.result().num_steps == 84 for future in trained)
        assert prepared.result().num_train > 1000
    first, second = sorted(map(times_of_ranks, jobs))
    assert first[1] <= second[0], "the second began when the first had ended"


def times_of_ranks(job):
    """When the first of a job's ranks was started and the last one ended."""
    ranks = list(job.directory.glob("attempt-0/rank-*"))
    assert len(ranks) == 2
    started = min((rank / "spec.json").stat().st_mtime for rank in ranks)
    return started, max((rank / "result.json").stat().st_mtime for rank in ranks)
