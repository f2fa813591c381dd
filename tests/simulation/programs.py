"""The processes of a history: ranks, flows, and the operator who resumes what has not finished.

A rank trains by the clock instead of computing. It talks to its supervisor, its peers and the disk as a real one does,
through the real modules for heartbeat, checkpoints and metrics.
"""

import json
from contextlib import suppress
from types import SimpleNamespace
from uuid import UUID

from paceline.flows.lifecycle import flow_run_lock, guardian, mlflow_run, signals
from paceline.tasks.errors import InputError, PacelineError
from paceline.tasks.metrics_file import FILE, MetricsFile
from paceline.tasks.names import Metric
from paceline.tasks.track import run as tracking
from paceline.tasks.train import prefect_tasks
from paceline.tasks.train.launch.coordinator import TrainJob
from paceline.tasks.train.launch.heartbeat import Heartbeat
from paceline.tasks.train.rank.checkpoint import checkpoint_path
from paceline.tasks.train.rank.checkpoint_io import AtomicCheckpointIO, load_full
from tests.simulation.disk import SimPath
from tests.simulation.kernel import SIGTERM, Exit, Killed
from tests.simulation.system import kernel, process

GROUP_SECONDS = 60.0  # until a collective operation of torch gives up
ADDRESS = "tcp://scheduler:8786"


class Group:
    """What `torch.distributed` does: a rendezvous, and steps that all ranks finish together."""

    def __init__(self, world_size):
        self.world_size, self.members, self.arrived, self.round, self.is_broken = world_size, {}, {}, 0, False

    def join(self, rank):
        mine = process()
        self.members[rank] = mine
        mine.watchers.append(self._on_end)
        self.meet(rank)

    def _on_end(self, ended):
        """Peers notice a process that has ended, unless its host is gone."""
        if ended.host.is_up:
            kernel().at(kernel().random.uniform(0.02, 0.3), self._reset)

    def _reset(self):
        self.is_broken = True
        for thread, token in self.arrived.values():
            kernel().wake(thread, token, "reset")

    def meet(self, rank):
        """Wait for all ranks. Raises RuntimeError: one of them is gone, or does not answer."""
        if self.is_broken:
            raise RuntimeError("Connection reset by peer")
        self.arrived[rank] = kernel().ticket()
        if len(self.arrived) == self.world_size:
            self.round += 1
            hosts = {member.host for member in self.members.values()}
            network = process().memory["world"].network
            if all(network.links(one, other) for one in hosts for other in hosts):
                arrived, self.arrived = self.arrived, {}
                for number, (thread, token) in arrived.items():
                    if number != rank:
                        kernel().wake(thread, token)
                return
        answer = kernel().wait(GROUP_SECONDS)
        if answer == "reset":
            raise RuntimeError("Connection reset by peer")
        if not answer:
            self.is_broken = True
            raise RuntimeError("Timed out waiting for a collective operation")


def rank_main(spec_path):
    """`paceline.tasks.train.rank.main`."""
    mine = process()
    world = mine.memory["world"] = mine.parent.memory["worker"].cluster.world
    kernel().wait(world.seconds("imports"))
    heartbeat = Heartbeat()
    spec = SimpleNamespace(**json.loads(SimPath(spec_path).read_text()))
    attempt = SimPath(spec.directory).parent
    mine.memory["attempt"] = attempt
    world.ledger.start_rank(spec, attempt, mine)
    try:
        train(world, spec, attempt, heartbeat)
    except Killed:
        raise
    except Exception as error:  # noqa: BLE001  as the real one does
        kernel().log(f"rank {spec.rank} of {attempt}: {error!r}")
        causes = {"final": isinstance(error, PacelineError)}
        facts = {"message": f"{type(error).__name__}: {error}", "traceback": "", "time": kernel().now, "causes": causes}
        heartbeat.final_error(facts)
        raise Exit(1) from None
    raise Exit(0)


def train(world, spec, attempt, heartbeat):
    """Do the steps from the checkpoint on, and write the result."""
    group = world.groups.setdefault((spec.master_address, spec.master_port, str(attempt)), Group(spec.world_size))
    group.join(spec.rank)
    steps = load_full(SimPath(spec.resume_from))["steps"] if spec.resume_from else []
    first_step, directory = len(steps), SimPath(spec.directory)
    writes = spec.rank == 0
    metrics = MetricsFile(directory / FILE) if writes else None
    saving, saved, plugin = 0, 0, AtomicCheckpointIO(attempt)
    heartbeat.count_steps = lambda: len(steps)
    while len(steps) < world.num_steps:
        kernel().wait(world.step_seconds * kernel().random.uniform(0.9, 1.1))
        group.meet(spec.rank)
        steps.append(len(steps))
        step = len(steps)
        if not writes:
            continue
        metrics.log({"train/loss": float(step)}, step)
        if saved < saving and plugin.is_idle():
            saved = world.ledger.acknowledge(spec.run_id, saving)
        if step % world.checkpoint_steps == 0 or step == world.num_steps:
            plugin.save_checkpoint({"steps": steps}, checkpoint_path(SimPath(spec.checkpoint_directory), step))
            saving = step
        write_progress(world, directory, step, saved // world.steps_per_epoch)
    if writes:
        plugin.teardown()
        world.ledger.acknowledge(spec.run_id, saving)
        metrics.close()
        (directory / "weights.pt").write_bytes(b"weights")
    predictions = directory / "predictions.npz"
    predictions.write_bytes(b"predictions")
    group.meet(spec.rank)
    result = world.result | {
        "world_size": spec.world_size,
        "num_steps": len(steps),
        "losses": [float(step) for step in steps],
        "first_step": first_step,
        "resumed_from": spec.resume_from,
        "checkpoint": str(checkpoint_path(SimPath(spec.checkpoint_directory), len(steps))),
        "predictions": [str(predictions)],
        "weights": str(directory / "weights.pt") if writes else None,
    }
    (directory / "result.json").write_text(json.dumps(result))


def write_progress(world, directory, step, saved):
    facts = {
        "step": step,
        "num_steps": world.num_steps,
        "epoch": (step - 1) // world.steps_per_epoch,
        "num_epochs": world.num_steps // world.steps_per_epoch,
        "epochs_kept": saved,
        "validation_score": None,
        "validation_scores": [],
        "score_name": "accuracy",
        "choices": {},
        Metric.TRAIN_LOSS: 1.0,
        Metric.TRAIN_THROUGHPUT: 1.0,
    }
    with suppress(OSError):
        temporary = directory / ".progress.json.tmp0"
        temporary.write_text(json.dumps(facts))
        temporary.replace(directory / "progress.json")


def flow_main(world, name, flow_run_id: UUID, resume):
    """A flow run: what Prefect's engine and `run_pipeline` do around the training."""
    try:
        _flow(world, name, flow_run_id, resume)
    except signals.Terminated:  # before the flow's body or behind it
        raise Exit(-SIGTERM) from None


def _flow(world, name, flow_run_id, resume):
    mine = process()
    mine.memory["flow_run_id"] = flow_run_id
    world.prefect.owners[flow_run_id] = mine
    kernel().wait(1.0 if world.site.start_together else world.seconds("imports"))
    try:
        record = flow_run_lock.flow_run_lock(world.environment, flow_run_id)
        kernel().spawn(mine.host, "guardian", guardian_main, mine, record)
        mine.watchers.append(world.ledger.end_flow)
    except OSError:  # as `outage._own`: nobody can see that it has ended
        mine.memory["has_no_record"] = True
    world.prefect.set(flow_run_id, "RUNNING")
    state = "FAILED"
    try:
        flow_run_lock.end_lost_runs(world.environment)
        options = (world.config, world.environment, "1", "workload", resume)
        with mlflow_run.open_run("run", *options) as handle:
            world.ledger.begin(handle.run_id, name, mine)
            job = TrainJob(
                config=world.config,
                plan=world.plan,
                prepared=world.prepared,
                run_id=handle.run_id,
                home="/home",
                tracking_uri="simulated",
                resume=resume is not None,
            )
            result = prefect_tasks._train_once(job, ADDRESS)
            kernel().wait(world.seconds("evaluation"))
            tracking.log_facts(handle, {"test/accuracy": result.final_loss}, {})
            mine.memory["has_published"] = True
        state = "COMPLETED"
    except Killed:
        raise
    except signals.Terminated:
        state = "CRASHED"
    except InputError as error:
        kernel().log(f"refused: {error}")
    except Exception as error:  # noqa: BLE001  the flow's end as Prefect tells it
        kernel().log(f"flow ends with {type(error).__name__}: {error}")
        world.ledger.check_flow(mine.memory.get("run_id"), mine, error)
    world.prefect.set(flow_run_id, state)
    for function, arguments in reversed(mine.at_exit):
        function(*arguments)
    raise Exit(0 if state == "COMPLETED" else 1)


def guardian_main(flow, record):
    """`guardian.main`, which reads until the process of the flow has ended."""
    while flow.is_alive:
        kernel().wait(1.0)
    guardian.end_runs([record])
    raise Exit(0)


def operator_main(world, name):
    """Start a training, and resume it until it has finished; in a hurry, also while it may still be running."""
    kernel().wait(world.seconds_before())
    host = world.flow_hosts[0]
    while not world.ledger.is_finished(name):
        while not host.is_up or host.is_frozen:
            kernel().wait(2.0)
        flow = start_flow(world, host, name)
        give_up = kernel().now + (world.patience() or 1e9)
        while flow.is_alive and kernel().now < give_up:
            kernel().wait(1.0)
        if not world.ledger.is_finished(name):
            kernel().wait(world.seconds("before resume"))
            host = kernel().random.choice(world.flow_hosts)
    raise Exit(0)


def start_flow(world, host, name):
    flow_run_id = UUID(int=len(world.prefect.states) + 1)
    flow = kernel().spawn(host, f"flow-{name}", flow_main, world, name, flow_run_id, world.ledger.run_id(name))
    flow.memory |= {"world": world, "cluster": world.clusters[name]}
    world.prefect.states[flow_run_id] = "PENDING"
    world.flows.append(flow)
    return flow


def janitor_main(world):
    """What the next flow on a host does first: it ends what others have left."""
    flow_run_lock.end_lost_runs(world.environment)
    mlflow_run.close_abandoned_runs(world.environment, "simulated")
    raise Exit(0)
