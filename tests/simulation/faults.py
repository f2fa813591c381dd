"""Faults of a history: what can happen, and when it happens by a seed."""

import hashlib
from dataclasses import dataclass

from tests.simulation.kernel import SIGKILL

MAX_SECONDS = 50.0  # until the last fault starts


@dataclass(frozen=True)
class Fault:
    """Something that happens at a time to the process or host with a number, and how long it lasts."""

    at: float
    kind: str
    number: int
    seconds: float

    def __str__(self):
        return f"{self.at:.1f} s: {self.kind} #{self.number} for {self.seconds:.1f} s"


def draw(random, world, among=None):
    """The faults of a history, the first one first. They are of a few kinds only, so that more of a kind meet."""
    kinds = [kind for kind in among or (*KINDS, *FREQUENT) if world.can_happen(kind)]
    kinds = random.sample(kinds, min(len(kinds), random.choice((1, 2, 3, 6))))
    number = random.choice((0, 1, 1, 2, 2, 3, 4, 6))
    faults = [
        Fault(
            random.uniform(1.0, MAX_SECONDS * random.random() + 5.0),
            random.choice(kinds),
            random.randrange(60),
            random.choice((2.0, 8.0, 20.0, 45.0)) * random.uniform(0.5, 1.5),
        )
        for _ in range(number)
    ]
    return sorted(faults, key=lambda fault: fault.at)


def plan(world, fault):
    world.kernel.at(fault.at, _happen, world, fault)


def _happen(world, fault):
    world.kernel.log(f"FAULT {fault.kind} #{fault.number} for {fault.seconds:.1f} s")
    undo = KINDS[fault.kind](world, fault.number)
    world.network.changed()
    if undo is not None:
        world.kernel.at(fault.seconds, _undo, world, fault, undo)


def _undo(world, fault, undo):
    world.kernel.log(f"end of {fault.kind} #{fault.number}")
    undo()
    world.network.changed()


def _pick(things, number):
    things = list(things)
    return things[number % len(things)] if things else None


def _processes(world, *names):
    hosts = world.hosts
    return [each for host in hosts for each in host.processes.values() if each.name.startswith(names)]


def _kill(*names):
    def kill(world, number):
        if (process := _pick(_processes(world, *names), number)) is not None:
            process.end(-SIGKILL)

    return kill


def _stop(*names):
    def stop(world, number):
        process = _pick(_processes(world, *names), number)
        if process is None:
            return None
        process.stop()
        return lambda: process.resume() if process.is_alive else None

    return stop


def interrupt_flow(world, number):
    from paceline.flows.lifecycle.signals import Terminated

    if (flow := _pick(_processes(world, "flow-"), number)) is not None:
        flow.interrupt(Terminated(143))


def freeze_host(world, number):
    host = _pick([each for each in world.hosts if each.is_up], number)
    if host is None:
        return None
    host.freeze()
    return host.thaw


def power_off(world, number):
    host = _pick([each for each in world.hosts if each.is_up], number)
    if host is None:
        return None
    host.lose_power()

    def boot():
        host.is_up = True
        for cluster in dict.fromkeys(world.clusters.values()):
            cluster.boot(host)

    return boot


def cut_link(world, number):
    pairs = [(one, other) for one in world.all_hosts for other in world.all_hosts if one.name < other.name]
    pair = frozenset(pairs[number % len(pairs)])
    world.network.cuts.add(pair)
    return lambda: world.network.cuts.discard(pair)


def isolate_host(world, number):
    host = _pick(world.hosts, number)
    pairs = {frozenset((host, other)) for other in world.all_hosts if other is not host}
    world.network.cuts |= pairs
    world.shared.away.add(host)

    def join():
        world.network.cuts -= pairs
        world.shared.away.discard(host)

    return join


def fill_disk(world, number):
    world.shared.is_full = True

    def free():
        world.shared.is_full = False

    return free


def hang_disk(world, number):
    host = _pick(world.hosts, number)
    world.shared.away.add(host)
    return lambda: world.shared.away.discard(host)


def lose_locks(world, number):
    world.shared.drop_locks(_pick(world.hosts, number))


def stop_server(name):
    def stop(world, number):
        server = getattr(world, name)
        server.is_up = False

        def start():
            server.is_up = True

        return start

    return stop


def damage_checkpoint(world, number):
    runs = world.shared.find(("runs",))
    run_id = _pick(sorted(runs.entries), number) if runs else None
    folder = world.shared.find(("runs", run_id, "checkpoints")) if run_id else None
    names = sorted(name for name in folder.entries if name.endswith(".ckpt")) if folder else []
    if names and len(names) > 1:
        inode = folder.entries[names[-1]]
        inode.content = bytearray(hashlib.sha256(bytes(inode.content)).digest())
        inode.mtime = world.kernel.now
        world.ledger.forget(run_id, int(names[-1].removeprefix("step-").removesuffix(".ckpt")))


def jump_clock(world, number):
    host = _pick(world.hosts, number)
    host.skew = (-1) ** number * 3600.0

    def correct():
        host.skew = 0.0

    return correct


KINDS = {
    "kill a rank": _kill("rank"),
    "kill a worker": _kill("worker"),
    "kill a flow": _kill("flow-"),
    "kill the scheduler": _kill("scheduler"),
    "interrupt a flow": interrupt_flow,
    "stop a rank": _stop("rank"),
    "stop a worker": _stop("worker"),
    "stop a flow": _stop("flow-"),
    "freeze a host": freeze_host,
    "power off": power_off,
    "cut a link": cut_link,
    "isolate a host": isolate_host,
    "fill the disk": fill_disk,
    "hang the disk": hang_disk,
    "lose locks": lose_locks,
    "stop MLflow": stop_server("mlflow"),
    "stop Prefect": stop_server("prefect"),
    "damage a checkpoint": damage_checkpoint,
    "jump a clock": jump_clock,
}
FREQUENT = ("kill a rank", "kill a worker", "stop a worker", "freeze a host", "power off")
