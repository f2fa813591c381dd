"""What must hold in every history. The ledger sees all that happens, and notes the first violation."""

import json

from paceline.tasks.errors import SupersededError
from tests.simulation.kernel import SIGKILL
from tests.simulation.system import process

RECOVERABLE = {"kill a rank", "kill a worker", "stop a rank", "stop Prefect", "damage a checkpoint"}
MAX_RECOVERED = 3  # faults of these kinds that a flow survives, whatever their times; `execution.max_restarts`
SETTLE_SECONDS = 60.0  # until a group that has lost a rank must be gone
STATUS_SECONDS = 60.0  # after the kill of a flow, until its statuses are true
HIDES_APIS = {
    "stop MLflow",
    "stop Prefect",
    "cut a link",
    "isolate a host",
    "freeze a host",
    "power off",
    "hang the disk",
}
START_SECONDS = 200.0  # until all ranks of a group have started, or none is left


class Ledger:
    """The invariants of one history."""

    def __init__(self, world):
        self.world, self.kernel = world, world.kernel
        self._devices, self._groups, self._saved, self._attempts, self._run_ids = {}, {}, {}, {}, {}
        self._damaged = set()
        self.num_published = 0

    # All ranks or none, and one owner of each device

    def start_rank(self, spec, attempt, rank):
        device = (rank.host, spec.devices[spec.local_rank])
        owner = self._devices.get(device)
        if owner is not None and owner.is_alive:
            self.kernel.fail(
                f"device: {device[1]} on {rank.host.name} serves {owner.name}[{owner.pid}] and another rank"
            )
        self._devices[device] = rank
        group = self._groups.setdefault(str(attempt), {})
        if not group:
            self.kernel.at(START_SECONDS, self._check_start, str(attempt), spec.world_size)
            self._check_newest(spec, attempt)
            # A full disk may have kept its flow from making the directory.
            self._attempts[str(attempt)] = next(flow for flow in self.world.flows if flow.pid == spec.coordinator[1])
        group[spec.rank] = rank
        rank.watchers.append(lambda ended: self._end_rank(str(attempt), ended))

    def _check_start(self, attempt, world_size):
        group = self._groups[attempt]
        if len(group) < world_size and any(rank.runs for rank in group.values()):
            self.kernel.fail(f"all or none: {len(group)} of {world_size} ranks of {attempt} have started")

    def _end_rank(self, attempt, ended):
        if ended.status != 0:
            self.kernel.at(SETTLE_SECONDS, self._check_group, attempt)

    def _check_group(self, attempt):
        left = [rank for rank in self._groups[attempt].values() if rank.is_alive]
        if any(not rank.runs for rank in left):
            self.kernel.at(SETTLE_SECONDS, self._check_group, attempt)  # a stopped process cannot end
        elif left:
            names = ", ".join(f"{rank.host.name}/{rank.pid}" for rank in left)
            self.kernel.fail(f"all or none: ranks {names} of {attempt} run without the others")

    # Checkpoints and results

    def acknowledge(self, run_id, step):
        """A rank has been told that its checkpoint is safe; the step."""
        if (run_id, step) not in self._damaged:
            self._saved.setdefault(run_id, []).append(step)
        return step

    def forget(self, run_id, step):
        """A fault has damaged a checkpoint, perhaps before its rank heard that it is safe."""
        self._damaged.add((run_id, step))
        self._saved[run_id] = [each for each in self._saved.get(run_id, []) if each != step]

    def _check_newest(self, spec, attempt):
        first_step = int(spec.resume_from.rpartition("step-")[2].split(".")[0]) if spec.resume_from else 0
        newest = max(self._saved.get(spec.run_id, [0]), default=0)
        if first_step < newest:
            self.kernel.fail(f"newest: {attempt} resumes from step {first_step} although {newest} was saved")

    def note_directory(self, path):
        if path.name.startswith("attempt-"):
            self._attempts[str(path)] = process()
            self._groups.pop(str(path), None)  # its number is free again after a loss of power

    def note_rename(self, target):
        """A file gets its name: a checkpoint or a result is published."""
        mine = process()
        if target.name.endswith(".ckpt"):
            self._damaged.discard((target.parent.parent.name, int(target.stem.removeprefix("step-"))))
            self._check_fence(target, mine.memory["attempt"])
        elif target.name == "trained.json":
            mine_too = [path for path, owner in self._attempts.items() if owner is mine]
            if mine_too:
                self._check_fence(target, type(target)(mine_too[-1]))

    def _check_fence(self, target, attempt):
        number = int(attempt.name.removeprefix("attempt-"))
        started = [path for path in self._groups if path.startswith(f"{attempt.parent}/attempt-")]
        newest = max((int(path.rpartition("-")[2]) for path in started), default=number)
        if newest > number:
            self.kernel.fail(f"fencing: {attempt} publishes {target.name} although attempt-{newest} has started")

    def _check_result(self, name, run_id):
        self.num_published += 1
        path = self.world.shared.find(("runs", run_id, "trained.json"))
        if path is None:
            self.kernel.fail(f"result: what training {name} has published is gone")
            return
        losses = json.loads(json.loads(path.content)["result"])["losses"]
        if losses != [float(step) for step in range(self.world.num_steps)]:
            self.kernel.fail(f"result: training {name} has the losses {losses}")
        logged = sorted(step for step, _, _ in self.world.mlflow.runs[run_id].metrics.get("train/loss", ()))
        if logged != list(range(1, self.world.num_steps + 1)):
            self.kernel.fail(f"result: training {name} has metrics of the steps {logged}")

    # Statuses

    def begin(self, run_id, name, flow):
        self._run_ids[name] = run_id
        flow.memory["run_id"] = run_id

    def run_id(self, name):
        return self._run_ids.get(name)

    def is_finished(self, name):
        run = self.world.mlflow.runs.get(self._run_ids.get(name))
        return run is not None and run.status == "FINISHED"

    def end_flow(self, flow):
        """A flow has ended; after a kill its guardian sets the statuses, without another command."""
        if flow.status == -SIGKILL and HIDES_APIS.isdisjoint(fault.kind for fault in self.world.faults):
            self.kernel.at(STATUS_SECONDS, self._check_killed, flow)

    def _check_killed(self, flow):
        state = self.world.prefect.states[flow.memory["flow_run_id"]]
        run_id = flow.memory.get("run_id")
        is_resumed = any(each.is_alive and each.memory.get("run_id") == run_id for each in self.world.flows)
        if state == "RUNNING" or (run_id and not is_resumed and self.world.mlflow.runs[run_id].status == "RUNNING"):
            self.kernel.fail(f"status: {flow.name} is not CRASHED and KILLED {STATUS_SECONDS:g} s after it was killed")

    def check_end(self):
        """At the end, when all that runs has ended and others have looked at what it left."""
        self._check_mlflow()
        self._check_prefect()

    def check_flow(self, run_id, flow, error):
        """A flow has ended with an error."""
        owners = [owner for path, owner in self._attempts.items() if f"/{run_id}/" in path]
        if isinstance(error, SupersededError) and (not owners or owners[-1] is flow):
            self.kernel.fail(f"gives up: {flow.name} was not superseded, and says: {error}")
        kinds, is_alone = [fault.kind for fault in self.world.faults], not self.world.site.is_impatient
        # The same error of a rank twice without a checkpoint in between ends a training.
        if is_alone and len(set(kinds)) == len(kinds) <= MAX_RECOVERED and RECOVERABLE.issuperset(kinds):
            self.kernel.fail(f"gives up: {flow.name} ends although it could restart: {error}")

    def _check_mlflow(self):
        for name, run_id in self._run_ids.items():
            if not self.is_finished(name):
                self.kernel.fail(f"status: MLflow run {run_id} is not FINISHED")
            else:
                self._check_result(name, run_id)
        for run in self.world.mlflow.runs.values():
            if run.status == "RUNNING":
                self.kernel.fail(f"status: MLflow run {run.id} is RUNNING, and no process has it")
            for _, status, flow in run.changes:
                if status == "FINISHED" and not flow.memory.get("has_published"):
                    self.kernel.fail(f"status: MLflow run {run.id} is FINISHED without a result")

    def _check_prefect(self):
        for flow_run_id, state in self.world.prefect.states.items():
            flow = self.world.prefect.owners.get(flow_run_id)
            # PENDING: it had no time to say more, and `set_slots_right` ends it after a while.
            if flow is None or flow.memory.get("has_no_record") or state == "PENDING":
                continue
            # A signal may meet a process that has reported its end, and waits for the answer.
            is_done = state == "COMPLETED" and flow.status < 0 and flow.memory.get("has_published")
            if state == "RUNNING" or ((flow.status == 0) != (state == "COMPLETED") and not is_done):
                fault = f"flow run {flow_run_id.int} is {state}, its process ended with {flow.status}"
                self.kernel.fail(f"status: {fault}")
