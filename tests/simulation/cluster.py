"""Network, Dask scheduler and workers of a history, as far as Paceline uses them.

Links are cut between hosts. A connection breaks when its other end closes it, or after `KEEPALIVE_SECONDS` without a
link. A worker whose connection to the scheduler breaks ends, and its nanny starts another one with another address.
"""

from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace

from tests.simulation.kernel import Killed
from tests.simulation.system import kernel, process

KEEPALIVE_SECONDS = 20.0
SLOW_SHARE = 0.15  # of messages that take ten times as long
WORKERS_DELAY = (1.0, 4.0)  # until a nanny or systemd has started something again


class Network:
    """Which hosts reach each other."""

    def __init__(self):
        self.cuts, self.connections, self.num_messages = set(), [], 0

    def links(self, one, other):
        is_up = one.is_up and other.is_up and not (one.is_frozen or other.is_frozen)
        return is_up and (one is other or frozenset((one, other)) not in self.cuts)

    def changed(self):
        """Look at all connections after a fault or its end."""
        for connection in [each for each in self.connections if not each.is_broken]:
            connection.look()
        self.connections = [each for each in self.connections if not each.is_broken]


class Connection:
    """A TCP connection between two processes: in order, reliable, and broken at some time after a fault."""

    def __init__(self, network, one, other):
        self.network, self.ends, self.is_broken = network, (one, other), False
        self.handlers, self._stalled, self._next = {}, [], 0.0
        network.connections.append(self)
        for end in self.ends:
            end.watchers.append(self._on_end)

    def _on_end(self, ended):
        if ended.host.is_up:
            kernel().at(kernel().random.uniform(0.01, 0.2), self._break_if_away)
        else:
            kernel().at(KEEPALIVE_SECONDS, self._break_if_away)

    @property
    def is_linked(self):
        one, other = self.ends
        return self.network.links(one.host, other.host)

    def look(self):
        if not self.is_linked:
            kernel().at(KEEPALIVE_SECONDS * kernel().random.uniform(0.8, 1.2), self._break_if_away)
        else:
            stalled, self._stalled = self._stalled, []
            for message in stalled:
                self.send(*message)

    def send(self, target, function, *arguments):
        """Call a function in the process at the other end, in the order of the calls."""
        self.network.num_messages += 1
        now, random = kernel().now, kernel().random
        slow = 10.0 if random.random() < SLOW_SHARE else 1.0
        self._next = max(self._next, now + slow * random.uniform(0.001, 0.02))
        kernel().at(self._next - now, self._deliver, target, function, *arguments)

    def _deliver(self, target, function, *arguments):
        if self.is_broken:
            return
        if self.is_linked:
            target.call(function, *arguments)
        else:
            self._stalled.append((target, function, *arguments))

    def _break_if_away(self):
        if self.is_broken or (self.is_linked and all(end.is_alive for end in self.ends)):
            return
        self.is_broken = True
        kernel().log(f"connection of {' and '.join(end.name for end in self.ends)} is broken")
        for end in self.ends:
            if (handler := self.handlers.get(end)) is not None:
                end.call(handler)


class Worker:
    """A Dask worker with one thread; `claim_status` and other calls run on its event loop."""

    def __init__(self, cluster, host, slot):
        self.cluster, self.slot = cluster, slot
        self.address = f"tcp://{host.name}:{next(cluster.ports)}"
        self.state = SimpleNamespace(tasks={})
        self.queue, self.waiting, self.connection = [], None, None
        self.process = kernel().spawn(host, f"worker{slot}{cluster.name}", self._main)
        self.process.memory["worker"] = self
        self.process.watchers.append(self._on_end)

    def _on_end(self, ended):
        if ended.host.is_up:
            kernel().at(kernel().random.uniform(*WORKERS_DELAY), self.cluster.start_worker, ended.host, self.slot)

    def _main(self):
        self.process.start(self._join)
        while True:
            while not self.queue:
                self.waiting = kernel().ticket()
                kernel().wait()
            key, function, arguments = self.queue.pop(0)
            if (task := self.state.tasks.get(key)) is None:
                continue
            task.state = "executing"
            self.process.memory["key"] = key
            try:
                outcome = ("finished", function(*arguments))
            except Killed:
                raise
            except Exception as error:  # noqa: BLE001  as Dask takes it
                outcome = ("error", error)
            if self.state.tasks.get(key) is task:
                task.state = "memory"
                self.connection.send(self.cluster.scheduler.process, self.cluster.scheduler.finish, key, *outcome)

    def _join(self):
        while True:
            scheduler = self.cluster.scheduler
            if scheduler.process.is_alive and self.cluster.network.links(self.process.host, scheduler.process.host):
                break
            kernel().wait(1.0)
        self.connection = Connection(self.cluster.network, self.process, scheduler.process)
        self.connection.handlers = {
            self.process: lambda: self.process.start(self._close),
            scheduler.process: lambda: scheduler.remove_worker(self.address),
        }
        self.connection.send(scheduler.process, scheduler.add_worker, self)

    def _close(self):
        kernel().wait(kernel().random.uniform(0.2, 2.0))
        self.process.end(1)

    def take(self, key, function, arguments):
        self.state.tasks[key] = SimpleNamespace(state="ready")
        self.queue.append((key, function, arguments))
        if self.waiting is not None:
            kernel().wake(*self.waiting)
            self.waiting = None

    def release(self, key):
        self.state.tasks.pop(key, None)

    def log_event(self, topic, message):
        scheduler = self.cluster.scheduler
        self.connection.send(scheduler.process, scheduler.forward, topic, message)


class Scheduler:
    """The Dask scheduler; one that is started again knows nothing."""

    def __init__(self, cluster, host):
        self.cluster, self.workers, self.tasks, self.clients = cluster, {}, {}, []
        self.process = kernel().spawn(host, "scheduler", kernel().wait)
        self.process.watchers.append(self._on_end)

    def _on_end(self, ended):
        if ended.host.is_up:
            kernel().at(kernel().random.uniform(*WORKERS_DELAY), self.cluster.start_scheduler)

    def add_worker(self, worker):
        self.workers[worker.address] = worker

    def remove_worker(self, address):
        self.workers.pop(address, None)

    def submit(self, client, key, worker, function, arguments):
        self.tasks[key] = (client, worker)
        if worker in self.workers:  # else it waits for ever, as in Dask
            found = self.workers[worker]
            found.connection.send(found.process, found.take, key, function, arguments)

    def finish(self, key, status, value):
        if key in self.tasks:
            client = self.tasks[key][0]
            client.connection.send(client.process, client.set_status, key, status, value)

    def cancel(self, key):
        _, address = self.tasks.pop(key, (None, None))
        if address in self.workers:
            worker = self.workers[address]
            worker.connection.send(worker.process, worker.release, key)

    def forward(self, topic, message):
        for client in self.clients:
            client.connection.send(client.process, client.take_event, topic, message)


class Future:
    """`distributed.Future`."""

    def __init__(self, client, key, worker):
        self.client, self.key, self.worker, self.status, self.value = client, key, worker, "pending", None

    def done(self):
        return self.status != "pending"

    def exception(self, timeout):
        return self.value


class Client:
    """`distributed.Client`."""

    def __init__(self, cluster):
        self.cluster, self.process, self.futures, self.listeners = cluster, process(), {}, {}
        self.scheduler = scheduler = cluster.scheduler
        self.connection = Connection(cluster.network, self.process, scheduler.process)
        self.connection.handlers = {self.process: self._lose, scheduler.process: self._leave}
        scheduler.clients.append(self)

    @property
    def status(self):
        return "connecting" if self.connection.is_broken else "running"

    def _lose(self):
        for future in self.futures.values():
            future.status = "lost"

    def _leave(self):
        if self in self.scheduler.clients:
            self.scheduler.clients.remove(self)
        for key, (client, _) in list(self.scheduler.tasks.items()):
            if client is self:
                self.scheduler.cancel(key)

    def close(self):
        if not self.connection.is_broken:
            self.connection.send(self.scheduler.process, self._leave)

    def _send(self, function, *arguments):
        if self.connection.is_broken:
            raise OSError("the connection to the scheduler is closed")
        self.connection.send(self.scheduler.process, function, *arguments)

    def submit(self, function, *arguments, workers, key, **_):
        self.futures[key] = future = Future(self, key, workers[0])
        self._send(self.scheduler.submit, self, key, workers[0], function, arguments)
        return future

    def cancel(self, futures, force):
        for future in futures:
            future.status = "cancelled"
            self._send(self.scheduler.cancel, future.key)

    def set_status(self, key, status, value):
        future = self.futures[key]
        if future.status == "pending":
            future.status, future.value = status, value

    def subscribe_topic(self, topic, listener):
        self.listeners[topic] = listener

    def unsubscribe_topic(self, topic):
        self.listeners.pop(topic, None)

    def take_event(self, topic, message):
        if (listener := self.listeners.get(topic)) is not None:
            listener((0.0, message))


class Cluster:
    """Scheduler and workers on hosts."""

    def __init__(self, world, name, num_workers):
        self.world, self.name, self.network, self.ports = world, name, world.network, count(40000)
        scheduler_host, worker_hosts = world.hosts[0], world.worker_hosts
        self.scheduler_host, self.worker_hosts, self.num_workers = scheduler_host, worker_hosts, num_workers
        self.num_calls = 0
        self.scheduler = Scheduler(self, scheduler_host)
        for host in worker_hosts:
            self.boot(host)

    def boot(self, host):
        """Start what belongs on a host."""
        if host is self.scheduler_host:
            self.start_scheduler()
        if host in self.worker_hosts:
            for slot in range(self.num_workers):
                self.start_worker(host, slot)

    def start_scheduler(self):
        host = self.scheduler_host
        if host.is_up and not self.scheduler.process.is_alive:
            self.scheduler = Scheduler(self, host)

    def start_worker(self, host, slot):
        name = f"worker{slot}{self.name}"
        if host.is_up and not any(each.name == name for each in host.processes.values()):
            Worker(self, host, slot)

    @contextmanager
    def connect(self, address):
        """`tasks.cluster.client.connect`."""
        from paceline.tasks.errors import InputError

        kernel().wait(0.05)
        host = self.scheduler.process.host
        if not (self.scheduler.process.runs and self.network.links(process().host, host)):
            kernel().wait(2.0)
            raise InputError(f"cluster.address={address}: no Dask scheduler answers; start it")
        client = Client(self)
        try:
            yield client
        finally:
            client.close()

    def addresses(self, client):
        """`tasks.cluster.client.workers`."""
        kernel().wait(0.01)
        self.num_calls += 1
        scheduler = client.scheduler
        if client.connection.is_broken:
            raise OSError("the connection to the Dask scheduler is closed")
        if not (scheduler.process.runs and client.connection.is_linked):
            kernel().wait(5.0)
            raise TimeoutError("the scheduler does not answer")
        return sorted(scheduler.workers)

    def call(self, client, requests, seconds, batched=False):
        """`tasks.cluster.client.call_workers`: every request reaches its worker or not, and its answer comes or not."""
        random, scheduler = kernel().random, client.scheduler
        self.num_calls += len(requests)
        if not requests:
            return []
        kernel().wait(random.uniform(0.002, 0.02))
        answers, is_late = [], False
        for address, function, arguments in requests:
            answer = self._answer(client, scheduler, address, function, arguments)
            is_late |= answer is None
            answers.append(answer)
        kernel().wait(seconds if is_late else random.uniform(0.002, 0.02))
        lost = not client.connection.is_linked or not scheduler.process.runs
        return [TimeoutError("no answer") if answer is None or lost else answer[0] for answer in answers]

    def fetch(self, client, futures, seconds):
        """`tasks.cluster.client.fetch`: the results of finished tasks are in the memory of their workers."""
        workers = [client.scheduler.workers.get(future.worker) for future in futures]
        if client.connection.is_broken or any(worker is None or not worker.process.runs for worker in workers):
            kernel().wait(seconds)
            raise TimeoutError("a result is not in the memory of a worker")
        kernel().wait(0.01)
        return [future.value for future in futures]

    def _answer(self, client, scheduler, address, function, arguments):
        """What a worker answers, in a tuple; None if nothing comes back."""
        if client.connection.is_broken:
            return (OSError("the connection to the Dask scheduler is closed"),)
        worker = scheduler.workers.get(address)
        if not (scheduler.process.runs and client.connection.is_linked):
            return None
        if worker is None or (worker.process.host.is_up and not worker.process.is_alive):
            return (OSError(f"{address} refuses the connection"),)
        if not self.network.links(scheduler.process.host, worker.process.host) or not worker.process.runs:
            if worker.process.is_alive and worker.process.is_frozen:  # it will do so when it runs again
                worker.process.deferred.append((self._run, (function, arguments)))
            return None
        return (kernel().within(worker.process, self._run, function, arguments),)

    @staticmethod
    def _run(function, arguments):
        try:
            return function(*arguments)
        except Exception as error:  # noqa: BLE001  an answer as well
            return error


def get_worker():
    """`distributed.get_worker`."""
    return process().memory["worker"]


class ThreadState:
    """`distributed.worker.thread_state`."""

    @property
    def key(self):
        return process().memory["key"]
