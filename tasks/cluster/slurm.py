"""A Dask cluster whose workers are Slurm jobs, one job per host, for the time of one run.

The scheduler runs in this process, on the host that submits. What is submitted is text that can be printed first.
"""

import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.conf.cluster import Cluster
from paceline.tasks.cluster import renewal
from paceline.tasks.cluster.client import ClusterResources, wait_for_workers
from paceline.tasks.cluster.dask_config import exports
from paceline.tasks.cluster.gpu_workers import PRELOAD
from paceline.tasks.cluster.local import QUIET_HTTP
from paceline.tasks.cluster.tls import Certificates
from paceline.tasks.errors import InputError, RunError
from paceline.tasks.records.hardware import Gpu, Hardware

ANSWER_SECONDS, SUBMIT_SECONDS, DEATH_SECONDS = 30, 20, 60
WAITING = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED")
UNITS = {"M": 2**20, "G": 2**30, "T": 2**40}
LOG_LINES = 3


def slurm_arguments(
    settings: Cluster, demand: ClusterResources, certificates: Certificates | None, logs: Path
) -> dict[str, Any]:
    """Arguments of dask-jobqueue's `SLURMCluster`, less the number of jobs, of which there is one per host.

    Raises InputError: a path would not enter the job script as one word, as dask-jobqueue quotes none.
    """
    paths = {"PACELINE_HOME": str(logs)} | ({"PACELINE_TLS": certificates.authority} if certificates else {})
    for variable, path in paths.items():
        if shlex.quote(path) != path:
            fault = f"{variable}: {path!r} enters the job script of Slurm"
            raise InputError(f"{fault}; use a path of letters, digits and _ @ % + = : , . / - alone")
    directives = ["--nodes=1", f"--output={logs}/%j.log"]
    if demand.gpus:
        directives.append(f"--gres=gpu:{demand.workers_per_host}")
    if demand.num_hosts > 1:
        directives.append("--exclusive")  # or Slurm may put two jobs on one host, and ranks would share its cores
    preloads = ["--preload-nanny", *(PRELOAD["preload_nanny"] if demand.gpus else [renewal.__name__])]
    return {
        "queue": settings.partition and shlex.quote(settings.partition),
        "account": settings.account and shlex.quote(settings.account),
        "walltime": settings.time_limit,
        # Without a walltime dask-jobqueue asks for half an hour; the partition's own limit is what is meant.
        "job_directives_skip": [] if settings.time_limit else ["#SBATCH -t "],
        "job_cpu": settings.cores_per_host,
        "job_mem": settings.memory_per_host,
        "job_name": "paceline",
        "job_extra_directives": [*directives, *settings.sbatch],
        "job_script_prologue": [*_lines_of_the_site(), *exports()],
        "python": shlex.quote(sys.executable),
        "worker_command": "distributed.cli.dask_worker",
        "processes": demand.workers_per_host,
        "cores": demand.workers_per_host,  # threads; each worker has one
        "memory": memory_bytes(settings),
        "worker_extra_args": ["--no-dashboard", "--dashboard-address", "127.0.0.1:0", *preloads],
        "death_timeout": DEATH_SECONDS,
        "interface": settings.interface and shlex.quote(settings.interface),  # of the command; the scheduler's is below
        "protocol": "tls://" if certificates else "tcp://",
        "security": certificates.security() if certificates else None,
        "scheduler_options": dict(QUIET_HTTP) | ({"interface": settings.interface} if settings.interface else {}),
    }


def _lines_of_the_site() -> list[str]:
    """The site's prologue of every job (jobqueue.yaml, under the new or the old name), which an argument replaces."""
    import dask
    import dask_jobqueue  # noqa: F401  brings its settings

    names = ("jobqueue.slurm.job-script-prologue", "jobqueue.slurm.env-extra")
    return next((list(lines) for name in names if (lines := dask.config.get(name, None))), [])


def memory_bytes(settings: Cluster) -> int:
    """`cluster.memory_per_host` in bytes; Slurm's G is 2**30."""
    assert settings.memory_per_host is not None
    return int(settings.memory_per_host[:-1]) * UNITS[settings.memory_per_host[-1]]


def job_script(settings: Cluster, demand: ClusterResources, certificates: Certificates | None, logs: Path) -> str:
    """The script of a job, as text; only the scheduler's address and the worker's name are not known yet."""
    from dask_jobqueue.slurm import SLURMJob

    arguments = slurm_arguments(settings, demand, certificates, logs)
    del arguments["scheduler_options"]
    text: str = SLURMJob(scheduler=f"{arguments['protocol']}SCHEDULER:PORT", name="WORKER", **arguments).job_script()
    return text


@contextmanager
def open_slurm(
    settings: Cluster, demand: ClusterResources, certificates: Certificates | None, logs: Path
) -> Iterator[str]:
    """Submit one job per host, wait until their workers have come, and yield the scheduler's address; end all after.

    Raises RunError: a job ended, or the workers did not come in time.
    """
    from dask_jobqueue.slurm import SLURMCluster

    logs.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with SLURMCluster(**slurm_arguments(settings, demand, certificates, logs), silence_logs="error") as cluster:
        cluster.scale(jobs=demand.num_hosts)

        def check() -> str:
            submitted = [job.job_id for job in cluster.workers.values() if job.job_id]
            if not submitted and time.monotonic() > started + SUBMIT_SECONDS:
                remedy = "print it with --show and submit it by hand to see why: sbatch --test-only"
                raise RunError(f"sbatch took no job; {remedy}")
            return _job_states(submitted, logs)

        wait_for_workers(cluster.scheduler_address, demand, settings.wait_seconds, check)
        yield cluster.scheduler_address


def _job_states(jobs: list[str], logs: Path) -> str:
    """State of the jobs, for people. Raises RunError: one of them has ended."""
    if not jobs:
        return "no job was submitted yet"
    answer = _ask(["squeue", "--noheader", "--states=all", f"--jobs={','.join(jobs)}", "--format=%i %T %r"])
    states = [line.split(maxsplit=2) for line in answer.stdout.splitlines()]
    for job, state, reason in states:
        if state not in WAITING:
            raise RunError(f"Slurm job {job} ended as {state} ({reason}): {_log_tail(logs / f'{job}.log')}")
    return "; ".join(f"Slurm job {job} is {state} ({reason})" for job, state, reason in states)


def _log_tail(log: Path) -> str:
    if not log.exists():
        return f"it left no log at {log}; the directory must be one that the nodes can write to"
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return f"{' / '.join(lines[-LOG_LINES:])[-500:]}; its log is {log}"


def check_slurm(settings: Cluster, script: str) -> None:
    """Have Slurm judge the job script without submitting it. Raises InputError: it is not here, or refuses the job."""
    if shutil.which("sbatch") is None:
        fault = "cluster.kind=slurm needs sbatch, and there is no sbatch on this host's PATH"
        raise InputError(fault, hint="run paceline on a host that submits jobs to Slurm", setting="cluster.kind")
    answer = _ask(["sbatch", "--test-only"], script)
    if answer.returncode != 0:
        reason = answer.stderr.strip().splitlines() or ["no reason given"]
        refusal = reason[-1].removeprefix("allocation failure: ")
        fault = f"cluster.partition={settings.partition}: Slurm does not take the job ({refusal})"
        raise InputError(f"{fault}; see it with --show, and what there is with sinfo")


def _ask(command: list[str], text: str | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, input=text, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise RunError(f"{command[0]} does not answer within {ANSWER_SECONDS} s; is slurmctld running?") from error


def requested_host(settings: Cluster, demand: ClusterResources) -> Hardware:
    """The host as requested; the kinds of its processor and GPU are known on the node only."""
    unknown = Gpu(uuid="", name="GPU", memory_bytes=memory_bytes(settings), compute_capability=(99, 0))
    assert settings.cores_per_host is not None
    return Hardware(
        host=f"a node of {settings.partition or 'the default partition'}",
        cpu_name="CPU",
        num_cores=settings.cores_per_host,
        memory_bytes=memory_bytes(settings),
        cpu_bf16=True,
        gpus=(unknown,) * demand.workers_per_host if demand.gpus else (),
    )
