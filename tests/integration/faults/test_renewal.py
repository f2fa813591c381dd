"""Certificates that are renewed while a scheduler, its workers and a training run."""

import ssl
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from paceline.tasks.cluster.client import connect, workers
from paceline.tasks.train.launch.coordinator import train_group
from paceline.tasks.train.launch.rank_process import running_ranks
from tests.integration.conftest import SMALL
from tests.support.jobs import new_job, planted
from tests.support.patience import until
from tests.support.scratch_cluster import ScratchCluster

CERTIFICATES = Path(__file__).parents[3] / "infra" / "certificates"


def renew(directory):
    done = subprocess.run([CERTIFICATES, "--renew", directory], capture_output=True, text=True, check=True)
    assert "use it within 10 seconds" in done.stdout
    return (directory / "cert.pem").read_text()


def presents(part, certificate):
    """Whether a part of Dask answers a new connection with a certificate."""
    place = urlsplit(part)
    return ssl.get_server_certificate((place.hostname, place.port), timeout=10) == certificate


async def reach(other, dask_worker):
    """What another part answers over a connection of this worker."""
    return (await dask_worker.rpc(other).identity())["type"]


@pytest.mark.slow
def test_a_training_a_scheduler_and_its_workers_outlive_two_renewals(tmp_path, monkeypatch):
    """After two, a part with the first certificate and a part with the newest one do not accept each other."""
    tls, hold = tmp_path / "tls", tmp_path / "hold"
    subprocess.run([CERTIFICATES, tls, "1"], capture_output=True, check=True)
    monkeypatch.setenv("PACELINE_TLS", str(tls))
    with ScratchCluster(2, tls) as cluster, ThreadPoolExecutor() as pool:
        settings = [*SMALL, "execution.num_devices=2", "recipe.num_epochs=1", "execution.loading=foreground"]
        job = new_job(cluster.address, "digits", settings)
        with connect(cluster.address) as client:
            old = workers(client)
            nannies = [facts["nanny"] for facts in client.scheduler_info()["workers"].values()]
        hold.touch()
        try:
            with planted(cluster.address, None, HOLD=str(hold)):
                training = pool.submit(train_group, job, cluster.address)
                until(lambda: len(running_ranks(job.run_id)) == 2, "ranks")
            for _ in range(2):
                newest = renew(tls)
                for part in (cluster.address, *old, *nannies):
                    until(partial(presents, part, newest), f"new certificate of {part}", 60)
            assert not training.done()
            cluster.start_worker(2)
            with connect(cluster.address) as client:
                until(lambda: len(workers(client)) == 3, "worker that has the newest certificate alone")
                (new,) = set(workers(client)) - set(old)
                for worker in old:
                    for one, other in ((worker, new), (new, worker)):
                        assert client.run(reach, other, workers=[one]) == {one: "Worker"}
        finally:
            hold.unlink()
        result = training.result(120)
    assert result.num_steps > 0
    assert result.restarts == ()
