import os
import shlex

import dask
import distributed  # noqa: F401  its defaults
from dask.config import collect_env
from dask.config import get as setting

from paceline.conf.cluster import Cluster
from paceline.tasks.cluster.client import ClusterResources, connect
from paceline.tasks.cluster.dask_config import ENVIRON, exports, low_overhead_config
from paceline.tasks.cluster.kinds import open_cluster

KEPT = {"MALLOC_TRIM_THRESHOLD_": "268435456", "MALLOC_MMAP_THRESHOLD_": "33554432"}


def test_every_setting_is_one_that_dask_knows_and_has_otherwise():
    shipped = dask.config.merge(*dask.config.defaults)  # whatever this process has set
    for name, value in low_overhead_config().items():
        known = setting(name, config=shipped, **({"default": None} if name.startswith(ENVIRON) else {}))
        assert known != value, name


def test_a_batch_system_hands_the_same_on():
    variables = dict(shlex.split(line)[1].split("=", 1) for line in exports())
    with dask.config.set(collect_env(variables)):
        for name, value in low_overhead_config().items():
            if name.startswith(ENVIRON):
                assert variables[name.removeprefix(ENVIRON)] == str(value)
            else:
                assert setting(name) == value


def test_workers_keep_memory_between_batches(monkeypatch):
    for name in KEPT:
        monkeypatch.delenv(name, raising=False)
    one = ClusterResources(num_hosts=1, workers_per_host=1, gpus=False)
    with open_cluster(Cluster(num_workers=1), one) as address, connect(address) as client:
        (found,) = client.run(lambda: {name: os.environ.get(name) for name in KEPT}).values()
    assert found == KEPT
