"""Jobs for tests and benchmarks: a configuration, prepared for real, with an MLflow run of its own."""

import os
from contextlib import contextmanager
from pathlib import Path

from paceline.conf.cluster import Cluster
from paceline.conf.environment import Environment
from paceline.conf.load import load
from paceline.tasks.cluster import hardware
from paceline.tasks.cluster.client import ClusterResources, connect
from paceline.tasks.cluster.kinds import open_cluster
from paceline.tasks.data.prepare import dask_graph as graph
from paceline.tasks.data.sources import registry as source
from paceline.tasks.track import run as tracking
from paceline.tasks.track import store
from paceline.tasks.train.launch.coordinator import TrainJob
from paceline.tasks.train.plan import arm_of, resolve

PLANTED = str(Path(__file__).with_name("planted"))


def new_job(address, preset, overrides):
    """A job on the cluster at `address`; its experiment is `training`."""
    site = Environment()
    config = load(preset, overrides)
    experiment = store.check_store(site.tracking_uri, "training", site.artifact_root)
    handle = tracking.begin(site.tracking_uri, experiment, config, {})
    prepared = graph.prepare(source.list_samples(config.data), config.data, site.root, address)
    return TrainJob(
        config=config,
        plan=resolve(config, hardware.describe(), prepared.num_train),
        prepared=prepared,
        run_id=handle.run_id,
        tracking_uri=site.tracking_uri,
        home=str(site.root),
    )


def planned_arm(job, **changes):
    """The execution that a job's plan has chosen, with changes."""
    return arm_of(job.plan).model_copy(update=changes)


def set_environment(changes):
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def changed(job, **sections):
    """The same job with other settings, such as speedup={"max_seconds": 30}."""
    tree = job.config.model_dump(mode="json")
    for name, settings in sections.items():
        tree[name] |= settings
    return job.model_copy(update={"config": type(job.config).model_validate(tree)})


@contextmanager
def two_workers(tls="auto"):
    """The product's own cluster on this host, with two single-threaded workers; its scheduler's address.

    With tls="off", other processes can join it too.
    """
    with open_cluster(
        Cluster(num_workers=2, tls=tls), ClusterResources(num_hosts=1, workers_per_host=2, gpus=False)
    ) as address:
        yield address


@contextmanager
def planted(address, plant, **more):
    """What the workers hand down to the ranks that they start meanwhile; see tests/support/planted."""
    with connect(address) as client:
        before = next(iter(client.run(os.environ.get, "PYTHONPATH").values()))
        path = os.pathsep.join(filter(None, [PLANTED, before]))
        client.run(set_environment, {"PYTHONPATH": path, "PLANT": plant} | more if plant or more else {})
        try:
            yield
        finally:
            client.run(set_environment, {"PYTHONPATH": before, "PLANT": None} | dict.fromkeys(more))
