import pytest

from conf.load import ConfigError, load

SLURM = ["cluster.kind=slurm", "cluster.cores_per_host=8", "cluster.memory_per_host=32G", "execution.accelerator=cpu"]
SSH = ["cluster.kind=ssh", "cluster.hosts=[node1,node2]"]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["cluster.kind=ssh"], "cluster.hosts=[node1,node2]"),
        ([*SSH, "execution.num_nodes=3"], "num_nodes=3 exceeds the 2 hosts"),
        ([*SSH, "cluster.num_workers=4"], "cluster.num_workers=4 has no use with cluster.kind=ssh"),
        (["cluster.hosts=[a]"], "drop it or choose kind=ssh"),
        (["cluster.interface=eth0"], "choose kind=ssh or slurm"),
        (["cluster.kind=slurm"], "cluster.cores_per_host=16 cluster.memory_per_host=64G"),
        (SLURM[:3], "set execution.accelerator to cpu or gpu"),
        ([*SLURM, "cluster.memory_per_host=64 gigabytes"], "cluster.memory_per_host="),
        ([*SLURM, "cluster.time_limit=soon"], "cluster.time_limit="),
        (["cluster.kind=local_cuda", "execution.accelerator=cpu"], "use cluster.kind=local"),
        (["cluster.kind=address", "cluster.address=tcp://h:1", "cluster.tls=on"], "an address begins with tls://"),
        (["cluster.kind=address", "cluster.address=tls://h:1", "cluster.tls=off"], "does not fit cluster.address"),
    ],
)
def test_settings_that_do_not_fit(overrides, told):
    with pytest.raises(ConfigError) as caught:
        load("digits", overrides)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_settings_that_fit():
    slurm = load("digits", [*SLURM, "cluster.time_limit=2:00:00", "cluster.sbatch=[--constraint=a100]"]).cluster
    assert (slurm.time_limit, slurm.sbatch) == ("2:00:00", ("--constraint=a100",))  # not YAML's 7200
    assert load("digits", SSH).cluster.hosts == ("node1", "node2")
