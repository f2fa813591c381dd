"""Two hosts on one machine: a Dask scheduler and a worker on `a`, a worker on `b`, and cables that can be pulled.

A host is a set of namespaces: a network with an address of its own, a host name, and processes that see no others. The
file system is shared, as a cluster shares PACELINE_HOME. `a` holds the switch; `b` and this process are plugged in.
A host lives while the pipe to its first process is open. When this process ends, by kill -9 even, the kernel ends every
process of both hosts and takes their networks down, so that a crashed run leaves nothing to remove.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path

import psutil
import pytest

from paceline.tasks.cluster.client import connect, workers

ROOT = Path(__file__).parents[2]
PORT = 8786  # the hosts' networks are new: each of their ports is free
ADDRESSES = ip_address("198.18.0.0")  # and 2^17 on, set aside for tests of networks (RFC 2544)
ISOLATED = ["unshare", "--net", "--uts", "--pid", "--mount-proc", "--fork", "--kill-child", "sh", "-c"]
# PID 1 of its host, with which all of it ends. `true` keeps the shell there, which reaps orphans.
FIRST_PROCESS = 'echo "$0" >/proc/sys/kernel/hostname && ip link set lo up && echo ready && cat; true'
TRIAL = "echo trial >/proc/sys/kernel/hostname && ip link add type bridge && ip link add type veth"
# Until a connection that no longer answers counts as dead. Dask's default is 30 s, the least that it takes 11 s.
DASK_SETTINGS = {"DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP": "11s"}
START_SECONDS = 120.0


class Host:
    """Namespaces with a first process.

    Args:
        name: Its host name.
    """

    def __init__(self, name):
        self.address = None
        self._started = []
        self._unshare = subprocess.Popen(
            [*ISOLATED, FIRST_PROCESS, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._unshare.stdout.readline() == "ready\n", f"{name} did not start"
        self.pid = psutil.Process(self._unshare.pid).children()[0].pid

    def start(self, command, log, settings):
        """Start a command here, in the repository's root.

        Args:
            command: The words.
            log: File for what it prints.
            settings: Environment variables beside those of this process.
        """
        enter = ["nsenter", f"--target={self.pid}", "--net", "--uts", "--pid", "--mount", "env", f"--chdir={ROOT}"]
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*enter, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | settings,
            )
        self._started.append(process)
        return process

    def ip(self, words):
        """Run the program `ip` on this host's network; process ids in it are those of this process's world."""
        _run(["nsenter", f"--target={self.pid}", "--net", "ip", *words.split()])

    def processes(self):
        """All that live here, as seen from outside."""
        return [process for process in psutil.process_iter() if self._holds(process)]

    def _holds(self, process):
        try:
            space, own = (Path(f"/proc/{pid}/ns/pid").readlink() for pid in (process.pid, self.pid))
            return space == own and process.status() != psutil.STATUS_ZOMBIE
        except (OSError, psutil.Error):  # ended meanwhile
            return False

    def end(self):
        """End all that lives here; the network goes with it."""
        self._unshare.stdin.close()
        self._unshare.stdout.close()
        for process in self._started:
            process.send_signal(signal.SIGCONT)  # nsenter stops with its program, and does not continue with it
        for process in (self._unshare, *self._started):
            process.wait(60)  # the kernel ends all of its processes first


class TwoHosts:
    """Dask on two hosts.

    Args:
        a: Where the scheduler and the switch are.
        b: The other.
        directory: For logs and the workers' own files.
        settings: Further environment variables of Dask's parts.
    """

    def __init__(self, a, b, directory, settings=None):
        self.hosts = {"a": a, "b": b}
        self.address = f"tcp://{a.address}:{PORT}"
        self._directory = directory
        self._workers = {}
        self._settings = DASK_SETTINGS | (settings or {})
        self.restart()

    def restart(self):
        """Start the scheduler and a worker on each host, after killing those that may still run."""
        for process in [process for host in self.hosts.values() for process in host.processes()]:
            with suppress(psutil.NoSuchProcess):
                if sys.executable in process.cmdline():  # not the first process of the host
                    process.kill()
        a = self.hosts["a"].address
        self._wait_for(self._start("a", "scheduler", f"--host {a} --port {PORT}"), self._answers)
        for letter in self.hosts:
            self.restart_worker(letter)

    @property
    def scheduler(self):
        """The scheduler's process; None after its end."""
        found = (process for process in self.processes("a") if "distributed.cli.dask_scheduler" in process.cmdline())
        return next(found, None)

    def cut(self, end):
        """Cut the link from host a to `b`, or to this process, `here`. Connections over it do not notice at once."""
        self.hosts["a"].ip(f"link set to-{end} down")

    def restore(self, end):
        """Restore the link."""
        self.hosts["a"].ip(f"link set to-{end} up")

    def processes(self, letter):
        """All that live on a host, as seen from here."""
        return self.hosts[letter].processes()

    def has_joined(self, letter):
        """Whether the scheduler has a worker on a host."""
        with connect(self.address) as client:
            return any(f"//{self.hosts[letter].address}:" in worker for worker in workers(client))

    def worker_runs(self, letter):
        """Whether a host's Dask worker, nanny included, still runs."""
        return letter in self._workers and self._workers[letter].poll() is None

    def restart_worker(self, letter):
        """Start a host's Dask worker, after killing the one that may still run, and wait until it has joined."""
        if self.worker_runs(letter):
            for process in psutil.Process(self._workers[letter].pid).children(recursive=True):
                process.kill()
            self._workers[letter].wait(10)
        host = self.hosts[letter].address
        with connect(self.address) as client:
            before = set(workers(client))
            settings = f"--host {host} --nthreads 1 --local-directory {self._directory / letter}"
            worker = self._workers[letter] = self._start(letter, "worker", f"{self.address} {settings}")
            self._wait_for(worker, lambda: any(f"//{host}:" in new for new in set(workers(client)) - before))

    def _start(self, letter, part, settings):
        command = [sys.executable, "-m", f"distributed.cli.dask_{part}", "--no-dashboard", *settings.split()]
        return self.hosts[letter].start(command, self._directory / f"{part}-{letter}.log", self._settings)

    def _answers(self):
        try:
            socket.create_connection((self.hosts["a"].address, PORT), timeout=1).close()
        except OSError:
            return False
        return True

    def _wait_for(self, process, done):
        deadline = time.monotonic() + START_SECONDS
        while not done():
            if process.poll() is not None or time.monotonic() > deadline:
                logs = "\n".join(log.read_text() for log in self._directory.glob("*.log"))
                pytest.fail(f"Dask did not start within {START_SECONDS} s; its logs:\n{logs}")
            time.sleep(0.1)


@contextmanager
def two_hosts(directory, settings=None):
    """Two hosts with Dask on them; skips the test where the system does not permit them.

    Args:
        directory: Existing, for logs and the workers' own files.
        settings: Further environment variables of Dask's parts.
    """
    skip_unless_permitted()
    with lan() as (a, b):
        yield TwoHosts(a, b, directory, settings)


@contextmanager
def lan():
    """Two hosts, `host-a` and `host-b`, that reach each other and this process; nothing runs on them yet."""
    with ExitStack() as stack:
        a, b = (_enter(stack, Host(name)) for name in ("host-a", "host-b"))
        # A living process's id is this run's alone, and so is what is made of it. Of its 8 addresses those that have as
        # many digits as each other: `a` sorts before `b`, so rank 0 sits there.
        link = f"paceline{a.pid}"
        here, a.address, b.address = (str(ADDRESSES + 8 * (a.pid % 2**14) + number) for number in (1, 2, 3))
        a.ip("link add name lan0 type bridge")
        a.ip(f"link add name to-b type veth peer name lan0 netns {b.pid}")
        _run(f"ip link add name {link} type veth peer name to-here netns {a.pid}".split())
        stack.callback(_run, f"ip link delete {link}".split())
        for port in ("to-b", "to-here"):
            a.ip(f"link set {port} master lan0 up")
        for host in (a, b):
            host.ip(f"address add {host.address}/29 dev lan0")
            host.ip("link set lan0 up")
        _run(f"ip address add {here}/29 dev {link}".split())
        _run(f"ip link set {link} up".split())
        yield a, b


def skip_unless_permitted():
    """Skip the test, with the reason, where hosts cannot be made."""
    missing = [program for program in ("ip", "nsenter", "unshare") if shutil.which(program) is None]
    if missing:
        pytest.skip(f"hosts need {', '.join(missing)}; on Debian, as root: apt-get install iproute2 util-linux")
    if os.geteuid() != 0:
        pytest.skip("hosts are made of namespaces and a network link to them, which only root may make; run as root")
    trial = subprocess.run([*ISOLATED, TRIAL], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if trial.returncode != 0:
        pytest.skip(f"this system permits no namespaces with bridges and veth pairs: {trial.stderr.strip()}")


def _enter(stack, host):
    stack.callback(host.end)
    return host


def _run(command):
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"
