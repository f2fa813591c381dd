"""Simulated versions of the modules `time`, `os`, `threading`, `subprocess`, `select`, `psutil` and so on."""

import os as real_os
from types import SimpleNamespace
from typing import ClassVar

import psutil as real_psutil

from tests.simulation import disk
from tests.simulation.disk import SimPath
from tests.simulation.kernel import EPOCH, SIGKILL, SIGTERM, Process, Thread

START_SECONDS = 1000.0  # of the monotonic clock when a history starts


def kernel():
    return disk.KERNEL


def process():
    return disk.KERNEL.current.process


class Time:
    """`time`."""

    @staticmethod
    def monotonic():
        return START_SECONDS + disk.KERNEL.now

    @staticmethod
    def time():
        return EPOCH + disk.KERNEL.now + process().host.skew

    @classmethod
    def time_ns(cls):
        return int(cls.time() * 1e9)

    @staticmethod
    def sleep(seconds):
        disk.KERNEL.wait(seconds)

    perf_counter = monotonic


class OS:
    """`os`: files of the simulated disks and simulated processes."""

    open, close, write, read, fdopen, pipe = map(
        staticmethod, (disk.open_file, disk.close, disk.write, disk.read, disk.fdopen, disk.pipe)
    )
    fsync = fdatasync = staticmethod(disk.fsync)
    pwrite, pread, ftruncate, utime = map(staticmethod, (disk.pwrite, disk.pread, disk.ftruncate, disk.utime))

    def __getattr__(self, name):  # constants
        return getattr(real_os, name)

    @property
    def environ(self):
        return process().environ

    @staticmethod
    def set_blocking(number, blocks):
        pass

    @staticmethod
    def fchmod(number, mode):
        pass

    @staticmethod
    def fstat(number):
        return disk.status(disk.descriptor(number).inode)

    @staticmethod
    def getpid():
        return process().pid

    @staticmethod
    def getppid():
        return 1

    @staticmethod
    def killpg(pid, number):
        if (target := find(pid)) is None:
            raise ProcessLookupError
        if number == SIGKILL:
            target.end(-SIGKILL)
        elif number == SIGTERM and target.runs:
            target.end(-SIGTERM)

    @staticmethod
    def pidfd_open(pid):
        return disk.add_descriptor(SimpleNamespace(pid=pid, count=0, close=lambda: None))


def find(pid):
    return process().host.processes.get(pid)


class Popen:
    """A child process. Its program follows `-m` in its command."""

    programs: ClassVar[dict] = {}

    def __init__(self, command, env, pass_fds, stdout, **_):
        parent = process()
        module, *arguments = command[command.index("-m") + 1 :]
        child = Process(kernel(), parent.host, module.rsplit(".", 2)[-2], parent, dict(env), tuple(command))
        for number in pass_fds:
            child.files[number] = file = parent.files[number]
            file.count += 1
        self.pid, self._child = child.pid, child
        child.start(self.programs[module], *arguments)

    @property
    def returncode(self):
        return self._child.status

    def poll(self):
        return self._child.status

    def wait(self, timeout=None):
        if self._child.status is None:
            self._child.exit_waiters.append(kernel().ticket())
            if not kernel().wait(timeout):
                raise TimeoutExpired
        return self._child.status


class TimeoutExpired(Exception):
    pass


subprocess = SimpleNamespace(Popen=Popen, TimeoutExpired=TimeoutExpired, DEVNULL=-3, STDOUT=-2)


class Poll:
    """`select.poll` of the end of one process."""

    def register(self, number, events):
        self._pid = disk.descriptor(number).pid

    def poll(self, milliseconds):
        if (target := find(self._pid)) is not None:
            target.exit_waiters.append(kernel().ticket())
            kernel().wait(milliseconds / 1000)


select = SimpleNamespace(poll=Poll, POLLIN=1)
socket = SimpleNamespace(gethostname=lambda: process().host.name)


class PsutilProcess:
    def __init__(self, pid):
        self._process = find(pid)
        if self._process is None:
            raise real_psutil.NoSuchProcess(pid)

    def status(self):
        return "stopped" if self._process.is_frozen else "sleeping"


def process_iter(attributes):
    found = process().host.processes.values()
    return [SimpleNamespace(pid=each.pid, info={"cmdline": list(each.command)}) for each in found]


psutil = SimpleNamespace(
    Process=PsutilProcess,
    process_iter=process_iter,
    NoSuchProcess=real_psutil.NoSuchProcess,
    Error=real_psutil.Error,
    net_if_addrs=lambda: {"eth0": [SimpleNamespace(address=process().host.name)]},
)


class Lock:
    """`threading.Lock`, of the current process."""

    def __init__(self):
        self._is_held, self._waiters = False, []

    def __enter__(self):
        while self._is_held:
            self._waiters.append(kernel().ticket())
            kernel().wait()
        self._is_held = True

    def __exit__(self, *_):
        self._is_held = False
        for thread, token in self._waiters:
            kernel().wake(thread, token)
        self._waiters.clear()


class Event:
    """`threading.Event`."""

    def __init__(self):
        self._is_set, self._waiters = False, []

    def is_set(self):
        return self._is_set

    def set(self):
        self._is_set = True
        for thread, token in self._waiters:
            kernel().wake(thread, token)
        self._waiters.clear()

    def wait(self, seconds=None):
        if not self._is_set:
            self._waiters.append(kernel().ticket())
            kernel().wait(seconds)
        return self._is_set


class ThreadHandle:
    """`threading.Thread`."""

    def __init__(self, target, args=(), name="", daemon=None):
        self._target, self._arguments, self._thread = target, args, None

    def start(self):
        self._thread = Thread(process(), self._target, self._arguments)

    def is_alive(self):
        return not self._thread.is_done

    def join(self, seconds=None):
        if not self._thread.is_done:
            self._thread.joiners.append(kernel().ticket())
            kernel().wait(seconds)


class Written:
    """`concurrent.futures.Future`."""

    def __init__(self):
        self._ended, self._error = Event(), None

    def run(self, function):
        try:
            function()
        except Exception as error:  # noqa: BLE001  raised again by the waiting thread
            self._error = error
        self._ended.set()

    def done(self):
        return self._ended.is_set()

    def result(self):
        self._ended.wait()
        if self._error is not None:
            raise self._error


class Executor:
    """`concurrent.futures.ThreadPoolExecutor` of one thread, for one task at a time."""

    def __init__(self, num_threads):
        self._last = None

    def submit(self, function):
        self._last = Written()
        ThreadHandle(self._last.run, (function,)).start()
        return self._last

    def shutdown(self):
        if self._last is not None:
            self._last._ended.wait()


threading = SimpleNamespace(Lock=Lock, Event=Event, Thread=ThreadHandle)


class PerProcess:
    """A global variable of a module, of which each simulated process has its own."""

    def __init__(self, name, make):
        self._name, self._make = name, make

    def _own(self):
        memory = process().memory
        if self._name not in memory:
            memory[self._name] = self._make()
        return memory[self._name]

    def __getattr__(self, name):
        return getattr(self._own(), name)

    def __getitem__(self, key):
        return self._own()[key]

    def __setitem__(self, key, value):
        self._own()[key] = value

    def __delitem__(self, key):
        del self._own()[key]

    def __contains__(self, key):
        return key in self._own()

    def __iter__(self):
        return iter(self._own())

    def __len__(self):
        return len(self._own())

    def __rsub__(self, other):
        return other - self._own()

    def __enter__(self):
        return self._own().__enter__()

    def __exit__(self, *error):
        return self._own().__exit__(*error)


shutil = SimpleNamespace(rmtree=lambda path, ignore_errors=False: SimPath(path).remove_tree())
atexit = SimpleNamespace(register=lambda function, *arguments, **more: process().at_exit.append((function, arguments)))


def deferred_signals():
    """`defer_signals` of the flows."""
    return _Deferred()


class _Deferred:
    def __enter__(self):
        self._outer = process().deferring
        process().deferring = True

    def __exit__(self, *_):
        mine = process()
        mine.deferring = self._outer
        if not mine.deferring and mine.deferred_signal is not None:
            error, mine.deferred_signal = mine.deferred_signal, None
            raise error
