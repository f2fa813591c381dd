"""Simulated hosts, processes and threads on a simulated clock. One seed gives one order of events.

A thread is a greenlet. It runs until it waits, so the code under test needs no changes: its modules get simulated
versions of `time`, `os`, `threading` and so on (`patches`).
"""

import heapq
import traceback
from random import Random

import greenlet

EPOCH = 1_790_000_000.0
SIGKILL, SIGTERM = 9, 15
LOOK_EVENTS = 16  # between two looks whether a history is over


class Killed(BaseException):
    """Raised in the threads of a process that no longer exists, so that nothing of it has an effect."""


class Exit(BaseException):
    """Ends a process with a status."""

    def __init__(self, status):
        super().__init__(status)
        self.status = status


class Host:
    """A machine: reachable or not, with disks by the first folder of a path."""

    def __init__(self, kernel, name):
        self.kernel, self.name, self.disks, self.processes = kernel, name, {}, {}
        self.is_up, self.is_frozen, self.skew = True, False, 0.0

    def freeze(self):
        self.is_frozen = True

    def thaw(self):
        self.is_frozen = False
        for process in list(self.processes.values()):
            process.run_deferred()

    def lose_power(self):
        self.is_up, self.is_frozen = False, False
        for process in list(self.processes.values()):
            process.end(-SIGKILL, is_noticed=False)
        for disk in dict.fromkeys(self.disks.values()):
            disk.lose_power(self)


class Process:
    """A process: threads, open files, memory of its own for the globals of modules."""

    def __init__(self, kernel, host, name, parent=None, environ=None, command=()):
        self.kernel, self.host, self.name, self.parent, self.command = kernel, host, name, parent, command
        self.pid = kernel.next_pid()
        self.environ = environ or {}
        self.files, self.memory, self.threads, self.at_exit, self.watchers, self.exit_waiters = {}, {}, [], [], [], []
        self.status, self.is_frozen, self.deferred = None, False, []
        self.deferring, self.deferred_signal = False, None
        host.processes[self.pid] = self
        kernel.all_processes.append(self)

    @property
    def is_alive(self):
        return self.status is None

    @property
    def runs(self):
        return self.status is None and not self.is_frozen and not self.host.is_frozen

    def start(self, function, *arguments):
        return Thread(self, function, arguments)

    def call(self, function, *arguments):
        """Run a function in this process now, or when it runs again; not at all if it has ended."""
        if self.runs:
            self.kernel.within(self, function, *arguments)
        elif self.is_alive:
            self.deferred.append((function, arguments))

    def stop(self):
        self.is_frozen = True

    def resume(self):
        self.is_frozen = False
        self.run_deferred()

    def run_deferred(self):
        if self.runs:
            deferred, self.deferred = self.deferred, []
            for function, arguments in deferred:
                self.kernel.at(0.0, self.call, function, *arguments)

    def interrupt(self, error):
        """Raise an exception in the first thread, as the handler of a signal does."""
        if self.deferring:
            self.deferred_signal = error
        elif self.is_alive and self.threads:
            thread = self.threads[0]
            thread.error = error
            self.kernel.wake(thread, thread.token)

    def end(self, status, is_noticed=True):
        if self.status is not None:
            return
        self.status = status
        self.kernel.log(f"{self.name} ended with {status}", self)
        del self.host.processes[self.pid]
        for file in list(self.files.values()):
            file.close()
        self.files.clear()
        for child in [each for each in self.host.processes.values() if each.parent is self]:
            child.end(-SIGKILL)  # PR_SET_PDEATHSIG
        if is_noticed:
            for thread, token in self.exit_waiters:
                self.kernel.wake(thread, token)
        for watcher in self.watchers:
            watcher(self)


class Thread:
    """A thread of a process."""

    def __init__(self, process, function, arguments):
        self.process, self.token, self.error, self.is_done, self.joiners = process, 0, None, False, []
        self.kernel = process.kernel
        self.function, self.arguments = function, arguments
        process.threads.append(self)
        self.greenlet = greenlet.greenlet(self._main, self.kernel.hub)
        self.kernel.at(0.0, self.kernel.resume, self, 0, True)

    def _main(self, _):
        try:
            self.function(*self.arguments)
        except (Killed, greenlet.GreenletExit):
            return
        except Exit as ended:
            self._finish()
            self.process.end(ended.status)
            return
        except BaseException:  # noqa: BLE001  no program of the simulation may end so
            if not self.kernel.is_closed:
                self.kernel.fail(f"{self.process.name} crashed: {traceback.format_exc()}")
            return
        self._finish()

    def _finish(self):
        self.is_done = True
        if not self.kernel.is_closed:
            for thread, token in self.joiners:
                self.kernel.wake(thread, token)


class Inline:
    """A call of a worker's event loop, which never waits."""

    greenlet = None

    def __init__(self, process):
        self.process = process


class Kernel:
    """Clock, events and processes of one history."""

    def __init__(self, seed, keep_trace=False):
        self.random = Random(seed)
        self.now, self._events, self._number, self._last_pid = 0.0, [], 0, 100
        self.hub, self.current, self.is_closed = greenlet.getcurrent(), None, False
        self.trace = [] if keep_trace else None
        self.failure = None
        self.all_processes = []
        self.num_events = 0

    def next_pid(self):
        self._last_pid += 1
        return self._last_pid

    def log(self, text, process=None):
        if self.trace is not None:
            process = process or (self.current and self.current.process)
            where = f"{process.host.name}/{process.name}[{process.pid}]" if process else "-"
            self.trace.append(f"{self.now:9.3f} {where:28} {text}")

    def fail(self, text):
        """Note the first violation, at which the history ends."""
        if self.failure is None:
            self.failure = text
            self.log(f"VIOLATION {text}")

    def at(self, seconds, function, *arguments):
        self._number += 1
        heapq.heappush(self._events, (self.now + seconds, self._number, function, arguments))

    def spawn(self, host, name, function, *arguments, **options):
        process = Process(self, host, name, **options)
        process.start(function, *arguments)
        return process

    def within(self, process, function, *arguments):
        """Call a function in the context of a process without a thread."""
        before, self.current = self.current, Inline(process)
        try:
            return function(*arguments)
        finally:
            self.current = before

    def run(self, until, is_over=lambda: False):
        events, pop = self._events, heapq.heappop
        while events and events[0][0] <= until and self.failure is None:
            when, _, function, arguments = pop(events)
            self.now = max(self.now, when)
            self.num_events += 1
            function(*arguments)
            if self.num_events % LOOK_EVENTS == 0 and is_over():
                break

    def resume(self, thread, token, value):
        process = thread.process
        if token != thread.token or process.status is not None:
            return
        if process.is_frozen or process.host.is_frozen:
            process.deferred.append((self.resume_later, (thread, token, value)))
            return
        self.current = thread
        thread.greenlet.switch(value)
        self.current = None

    def resume_later(self, thread, token, value):
        self.at(0.0, self.resume, thread, token, value)

    def wake(self, thread, token, value=True):
        self.at(0.0, self.resume, thread, token, value)

    def ticket(self):
        """The current thread and the token with which to wake it from its next wait."""
        return self.current, self.current.token + 1

    def wait(self, seconds=None):
        """Wait until `wake` of the `ticket`, or so many seconds; whether it was woken."""
        thread = self.current
        if self.is_closed:
            raise Killed
        if thread.greenlet is None:
            return False
        thread.token += 1
        if seconds is not None:
            self.at(max(0.0, seconds), self.resume, thread, thread.token, False)
        value = self.hub.switch()
        thread.token += 1
        if self.is_closed or thread.process.status is not None:
            raise Killed
        if thread.error is not None:
            error, thread.error = thread.error, None
            raise error
        return value

    def close(self):
        """Let all threads end without effect."""
        self.is_closed = True
        for process in self.all_processes:
            for thread in process.threads:
                if thread.greenlet and not thread.greenlet.dead:
                    self.current = thread
                    thread.greenlet.throw(Killed)
        self._events.clear()
