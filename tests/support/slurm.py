"""A real Slurm with munge: on this host, or on the hosts of `tests.support.hosts`, with a `slurmd` on each of them."""

import os
import shutil
import socket
import subprocess
from contextlib import ExitStack, contextmanager

import pytest

from infra.services.home import free_port
from tests.support.patience import until

SBIN = f"{os.environ['PATH']}:/usr/sbin:/sbin"


def program(name):
    """Path of a program that belongs to the system; the test is skipped without it, or without being root."""
    found = shutil.which(name, path=SBIN)
    if found is None or os.getuid() != 0:
        pytest.skip(f"needs {name}, and to be root; infra/test installs it when called by root on Debian")
    return found


def run(*command):
    """What a program prints; it must succeed."""
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=True).stdout


def write_slurm_conf(root, nodes, num_cpus):
    """The slurm.conf of nodes, given as addresses by host name; slurmctld runs on the first one."""
    name, address = next(iter(nodes.items()))
    settings = {
        "ClusterName": "paceline",
        "SlurmctldHost": f"{name}({address})",
        "SlurmctldPort": free_port(),
        "SlurmdPort": free_port(),
        "SlurmUser": "root",
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={root}/munge.socket",
        "StateSaveLocation": f"{root}/state",
        "SlurmdSpoolDir": f"{root}/spool-%n",
        "SlurmctldPidFile": f"{root}/slurmctld.pid",
        "SlurmdPidFile": f"{root}/slurmd-%n.pid",
        "SlurmctldLogFile": f"{root}/slurmctld.log",
        "SlurmdLogFile": f"{root}/slurmd-%n.log",
        "ProctrackType": "proctrack/linuxproc",  # no cgroups: they are not to be had in every container
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "MpiDefault": "none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "ReturnToService": 2,
        "SlurmdTimeout": 10,
        "KillWait": 2,
    }
    places = [f"NodeName={name} NodeAddr={address}" for name, address in nodes.items()]
    places = [f"{place} CPUs={num_cpus} RealMemory=2048 State=UNKNOWN" for place in places]
    partition = f"PartitionName=short Nodes={','.join(nodes)} Default=YES MaxTime=30 State=UP"
    conf = root / "slurm.conf"
    conf.write_text("\n".join([*(f"{key}={value}" for key, value in settings.items()), *places, partition, ""]))
    return conf


@contextmanager
def slurm_on(root, hosts=()):
    """Yield the slurm.conf of a running Slurm; one CPU on each of the hosts, or all of this host without any.

    Args:
        root: Existing, for its files.
        hosts: Those of `tests.support.hosts.lan`, by name.
    """
    munged, slurmctld, slurmd = map(program, ("munged", "slurmctld", "slurmd"))
    nodes = {name: host.address for name, host in dict(hosts).items()}
    conf = write_slurm_conf(
        root, nodes or {socket.gethostname().split(".")[0]: "127.0.0.1"}, 1 if nodes else os.cpu_count()
    )
    (root / "state").mkdir()
    (root / "munge.key").write_bytes(os.urandom(128))
    (root / "munge.key").chmod(0o600)
    environment = {"SLURM_CONF": str(conf)}
    files = [f"--{kind}-file={root}/munge.{kind}" for kind in ("key", "pid", "log", "seed")]
    sinfo = ["sinfo", "--noheader", "--Node", "--format=%T"]

    def are_idle():
        done = subprocess.run(sinfo, env=os.environ | environment, capture_output=True, text=True, check=False)
        return done.stdout.split() == ["idle"] * max(1, len(nodes))

    with ExitStack() as stack:

        def start(*command):
            silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            process = subprocess.Popen([*map(str, command)], env=os.environ | environment, **silent)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            return process

        munge = start(munged, "--foreground", "--force", f"--socket={root}/munge.socket", *files)
        until((root / "munge.socket").exists, "munge", process=munge)
        daemons = [*dict(hosts).values()] or [None]
        for command, host in [(slurmctld, daemons[0]), *((slurmd, host) for host in daemons)]:
            if host is None:
                process = start(command, "-D", "-f", conf)
            else:
                process = host.start([command, "-D", "-f", str(conf)], root / "daemons.log", environment)
        until(are_idle, "idle nodes", process=process)
        yield conf


def no_job():
    """Whether no job waits or runs."""
    return run("squeue", "-h", "--states=PENDING,RUNNING,COMPLETING") == ""
