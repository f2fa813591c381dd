import jsonschema
import pytest

from paceline.conf.config import Config
from paceline.conf.load import ConfigError, load
from tests.support.refusals import refused

SLURM = ["cluster.kind=slurm", "cluster.cores_per_host=8", "cluster.memory_per_host=32G", "execution.accelerator=cpu"]
SSH = ["cluster.kind=ssh", "cluster.hosts=[node1,node2]"]


@pytest.mark.parametrize(
    ("overrides", "wrong"),
    [
        (["cluster.kind=ssh"], ["cluster.kind", "cluster.hosts=[node1,node2]"]),
        ([*SSH, "execution.num_nodes=3"], ["execution.num_nodes", "cluster.hosts", "execution.num_nodes=2"]),
        ([*SSH, "cluster.num_workers=4"], ["cluster.num_workers", "cluster.kind=ssh", "cluster.kind=local"]),
        (["cluster.hosts=[a]"], ["cluster.hosts", "cluster.kind=ssh"]),
        (["cluster.interface=eth0"], ["cluster.interface", "cluster.kind=ssh", "slurm"]),
        (["cluster.kind=slurm"], ["cluster.kind", "cluster.cores_per_host=16", "cluster.memory_per_host=64G"]),
        (SLURM[:3], ["cluster.kind", "execution.accelerator=gpu", "execution.accelerator=cpu"]),
        ([*SLURM, "cluster.memory_per_host=64 gigabytes"], ["cluster.memory_per_host", "64G"]),
        ([*SLURM, "cluster.time_limit=soon"], ["cluster.time_limit", "soon", "2:00:00"]),
        (["cluster.kind=local_cuda", "execution.accelerator=cpu"], ["cluster.kind", "cluster.kind=local"]),
        (["cluster.kind=address", "cluster.address=tcp://h:1", "cluster.tls=on"], ["cluster.tls", "tls://"]),
        (["cluster.kind=address", "cluster.address=tls://h:1", "cluster.tls=off"], ["cluster.tls", "tcp://"]),
    ],
)
def test_settings_that_do_not_fit(overrides, wrong):
    with refused(*wrong, kind=ConfigError):
        load("digits", overrides)


SSH_KEYS = {"kind": "ssh", "hosts": ["node1"]}
SLURM_KEYS = {"kind": "slurm", "cores_per_host": 8, "memory_per_host": "32G"}
ADDRESS_KEYS = {"kind": "address", "address": "tls://host:8786"}
HOSTILE = [
    "{}\ntouch x",
    "{}\n",
    "{};touch x",
    "{} --wrap=x",
    "$(touch x){}",
    "`touch x`{}",
    "{}'",
    '{}"',
    "{}&x",
    "{}|x",
]
FREE = [
    (ADDRESS_KEYS, "address", "tls://host:8786"),
    (SSH_KEYS, "hosts", "node1"),
    (SSH_KEYS, "interface", "eth0"),
    (SLURM_KEYS, "interface", "eth0"),
    (SLURM_KEYS, "partition", "gpu"),
    (SLURM_KEYS, "account", "vision"),
    (SLURM_KEYS, "time_limit", "2:00:00"),
    (SLURM_KEYS, "memory_per_host", "32G"),
    (SLURM_KEYS, "sbatch", "--comment"),
]


def form_takes(cluster):
    """Whether Prefect's form, and its server, take these settings by the schema."""
    return jsonschema.Draft202012Validator(Config.model_json_schema()).is_valid({"cluster": cluster})


@pytest.mark.parametrize("pattern", HOSTILE)
@pytest.mark.parametrize(("given", "name", "value"), FREE)
def test_no_text_that_leaves_this_host_holds_code(given, name, value, pattern):
    def with_value(text):
        return given | {name: [text] if name in ("hosts", "sbatch") else text}

    assert form_takes(with_value(value))
    Config(cluster=with_value(value), execution={"accelerator": "cpu"})
    hostile = pattern.format(value)
    assert not form_takes(with_value(hostile))
    with pytest.raises(ValueError, match=f"cluster.{name}"):
        Config(cluster=with_value(hostile), execution={"accelerator": "cpu"})


@pytest.mark.parametrize(
    "option", ["--export=ALL,BASH_ENV=/tmp/x", "--exp=LD_PRELOAD=x", "--output=/home/me/.bashrc", "--wrap=id", "-pgpu"]
)
def test_options_of_sbatch_that_bring_code_or_name_files_are_refused(option):
    with refused("cluster.sbatch", option, "jobqueue.yaml", kind=ConfigError):
        load("digits", [*SLURM, f"cluster.sbatch=['{option}']"])


@pytest.mark.parametrize(
    "option", ["--constraint=[a100|h100]&ib*2", "--hold", "--nodelist=n[1-3],m4", "--signal=B:USR1@60"]
)
def test_options_of_sbatch_that_choose_nodes_are_taken(option):
    assert load("digits", [*SLURM, f"cluster.sbatch=['{option}']"]).cluster.sbatch == (option,)


@pytest.mark.parametrize("address", ["127.0.0.1:8786", "tcp://[::1]:8786", "tls://node-1.example.org:8786"])
def test_addresses_of_schedulers(address):
    assert load("digits", ["cluster.kind=address", f"cluster.address={address}"]).cluster.address == address


def test_settings_that_fit():
    slurm = load("digits", [*SLURM, "cluster.time_limit=2:00:00", "cluster.sbatch=[--constraint=a100]"]).cluster
    assert (slurm.time_limit, slurm.sbatch) == ("2:00:00", ("--constraint=a100",))  # not YAML's 7200
    assert load("digits", SSH).cluster.hosts == ("node1", "node2")
