"""The warm pool of this user as a command sees it: whether it fits, how it takes a command, and how it is ended.

A pool is the process of the next run, started ahead, with its temporary API, Dask workers and ranks. `pool_keeper`
waits for the command, and `flows.pool_process` becomes the run. This module imports the standard library alone, because
`paceline` imports it before it knows whether it needs anything else. See decision 0039.
"""

import hashlib
import json
import os
import resource
import signal
import socket
import stat
import struct
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

VARIABLE, OFF, SESSION, DEFAULT_MINUTES = "PACELINE_WARM", "off", "session", "15"
PROGRAM = Path(__file__).resolve().parents[2]
FOLDERS = ("conf", "flows", "tasks")
VOLATILE = ("_", "SHLVL", "OLDPWD")
"""Variables that a shell changes from call to call, and that no run depends on."""
STATUS = tuple(b"Uid Gid Groups Umask NoNewPrivs Seccomp Cap Cpus_ Mems_ SigIgn SigBlk THP_enabled".split())
"""First letters of the lines of /proc/self/status that a process inherits."""
LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
OPTIONS = ("--json", "--diagnose", "--resume", "--code")
"""Options of a command that a pool takes. `--show` needs none of it; the others change how the engines log, which is
fixed when they are imported."""
MEASURING = {"run", "sweep", "study", "no-gpu", "watch", "judge", "bisect", "advise", "--measure"}
"""Words of commands that a pool which still starts would disturb; `--measure` is an option of `doctor`."""
ANSWERING = {"--show", "--help", "-h"}
"""Options with which a command measures nothing."""
PEER = struct.Struct("3i")
MAX_BYTES, NUM_DESCRIPTORS = 2**20, 3  # of a message: the environment of a process; stdin, stdout and stderr
END = b"end"
ANSWER_SECONDS, START_SECONDS = 2.0, 30.0
"""A keeper answers within milliseconds, and a pool starts in seconds; after these, a command starts cold."""

environment = dict(os.environ)
"""Variables of this process as its user has started it."""
session = os.getsid(0)
"""Process id of the leader of the session that this command belongs to: the shell of a terminal."""


def waiting_time(given: str) -> str:
    """How long a pool is to wait for the next run: minutes, `session` or `off`. By default only in a terminal."""
    is_interactive = os.isatty(2) and not os.environ.get("CI")
    return given or (DEFAULT_MINUTES if is_interactive else OFF)


def hand_over(arguments: list[str]) -> int | None:
    """Let the pool run a command; its status as of `subprocess`. None without a pool that fits: nothing was done."""
    if waiting_time(os.environ.get(VARIABLE, "")) == OFF or not _is_for_pool(arguments[1:]):
        return None
    interrupt, pid = signal.getsignal(signal.SIGINT), 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        with suppress(OSError):  # no pool exists, it has ended, or it does not answer
            if interrupt is not signal.SIG_IGN:
                signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while this waits
            pid = _order(connection, arguments)
        if not pid:
            signal.signal(signal.SIGINT, interrupt)
            return None
        _forward_signals(pid)
        with suppress(OSError):
            return int(connection.recv(MAX_BYTES) or -signal.SIGKILL)
        return -signal.SIGKILL  # of the keeper, with which the run ends


def _order(connection: socket.socket, arguments: list[str]) -> int:
    """Process id of the run, which a pool starts; 0 if the pool does not fit. Raises OSError: it does not answer."""
    if _connect(connection) is None:
        return 0
    order = {"arguments": arguments, "environment": environment, "session": session, "digest": digest()}
    socket.send_fds(connection, [json.dumps(order).encode()], [0, 1, 2])
    if not connection.recv(MAX_BYTES):
        return 0
    connection.settimeout(START_SECONDS)  # the pool may still start
    pid = int(connection.recv(MAX_BYTES) or 0)
    connection.settimeout(None)
    return pid


def end_before_measuring(words: list[str]) -> None:
    """End the pool before a command that starts cold, and measures: a pool that still starts takes a core."""
    if MEASURING.intersection(words) and not ANSWERING.intersection(words):
        end_pool()


def _is_for_pool(words: list[str]) -> bool:
    """Whether a command is a run that a pool takes: with known options, and no path of this process's own files."""
    options = {word.partition("=")[0] for word in words if word.startswith("-")}
    own_files = any(place in f"={word}" for word in words for place in ("=/dev/", "=/proc/"))
    is_text = environment.get("PACELINE_LOG_FORMAT", "text") == "text"  # engines log in the format of their import
    return words[:1] == ["run"] and options <= set(OPTIONS) and not own_files and is_text


def _forward_signals(pid: int) -> None:
    """Pass on to the run what a terminal sends to this process alone. Other signals end it, and the run with it."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    def suspend(number: int, frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)  # until the shell continues it
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGCONT)

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, pass_on)
    signal.signal(signal.SIGTSTP, suspend)


def leave(status: int) -> NoReturn:
    """Exit with the status of a run as `subprocess` gives it: below 0, this process ends by the same signal."""
    if status < 0:
        with suppress(OSError):  # that of SIGKILL cannot be set
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def digest() -> str:
    """Digest of all that a process inherits from its shell, of the installed code, and of the engines' settings.

    A pool takes the place of a new process only if both have the same.
    """
    flags = str(sys.flags).replace("safe_path=True", "safe_path=False")  # a keeper has it
    facts: list[Any] = [sys.executable, flags, str(Path.cwd()), _identity(Path()), os.nice(0), os.sched_getscheduler(0)]
    facts.append({name: value for name, value in environment.items() if name not in VOLATILE})
    facts.append([resource.getrlimit(limit) for limit in LIMITS])
    status = Path("/proc/self/status").read_bytes().splitlines()
    facts.append([line.decode() for line in status if line.startswith(STATUS)])
    facts += [Path("/proc/self", name).read_text(encoding="utf-8") for name in ("cgroup", "oom_score_adj")]
    facts += [str(link.readlink()) for link in sorted(Path("/proc/self/ns").iterdir())]
    facts += [_numa_policy(), _program_files(), packages_time(), _settings_files()]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _identity(path: Path) -> list[int] | None:
    """Device and number of a file or folder, which a new one of its name does not have; None if it is not there."""
    with suppress(OSError):
        facts = path.stat()
        return [facts.st_dev, facts.st_ino]
    return None


def _numa_policy() -> str:
    """Where this process gets memory, as `numactl` sets it; empty on a kernel without such policies."""
    with suppress(OSError), Path("/proc/self/numa_maps").open(encoding="utf-8") as lines:
        return "".join(lines.readline().split()[1:2])
    return ""


def _program_files() -> list[Any]:
    files = [path for folder in FOLDERS for path in (PROGRAM / folder).rglob("*") if path.suffix in (".py", ".yaml")]
    return sorted(map(stamp, files))


def packages_time() -> int:
    """Time of the folder of packages, which an installation changes. Raises OSError: it is gone."""
    return Path(sysconfig.get_path("purelib")).stat().st_mtime_ns


def _settings_files() -> list[Any]:
    """Files that Prefect and Dask read when they are imported, and the database that Prefect's API has opened."""
    home = Path(environment.get("PREFECT_HOME") or Path.home() / ".prefect")
    files = [home / "profiles.toml", *map(Path, (".env", "prefect.toml", "pyproject.toml"))]
    for place in (environment.get("DASK_CONFIG") or Path.home() / ".config/dask", "/etc/dask"):
        files += [Path(place), *sorted(Path(place).glob("*.y*ml"))]
    return [*(stamp(path) for path in files if path.exists()), _identity(home / "prefect.db")]


def stamp(path: Path) -> tuple[str, int, int]:
    """Name, size and time of a file, which change with its content."""
    facts = path.stat()
    return str(path), facts.st_size, facts.st_mtime_ns


def socket_path() -> Path:
    """Where the pool of this user listens, in a directory of this user, see `make_socket_directory`."""
    given = environment.get("XDG_RUNTIME_DIR", "")
    place = given if os.access(given, os.W_OK) else environment.get("TMPDIR") or "/tmp"
    return Path(place, f"paceline-{os.geteuid()}", "pool.socket")


def make_socket_directory() -> bool:
    """Make the directory of the socket; whether it is this user's, and others have no access to it."""
    directory = socket_path().parent
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    facts = directory.lstat()
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not stat.S_IMODE(facts.st_mode) & 0o077


def _connect(connection: socket.socket) -> int | None:
    """Connect to the pool, and return the process id of its keeper; None if that is another user's.

    Raises OSError: no pool listens.
    """
    connection.settimeout(ANSWER_SECONDS)
    connection.connect(str(socket_path()))
    pid, user = peer(connection)
    return pid if user == os.geteuid() else None


def peer(connection: socket.socket) -> tuple[int, int]:
    """Process id and user of the other end of a connection."""
    pid, user, _ = PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))
    return pid, user


def end_pool(*, dry_run: bool = False) -> int | None:
    """End the pool of this user, unless it is a dry run; the process id of its keeper, None without a pool."""
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        pid = _connect(connection)
        if pid is not None and not dry_run:
            connection.send(END)
            try:
                connection.recv(1)  # until it has ended
            except TimeoutError:  # somebody has stopped it; its pool ends with it
                os.kill(pid, signal.SIGKILL)
        return pid
    return None
