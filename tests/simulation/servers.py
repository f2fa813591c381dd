"""Simulated servers of MLflow and Prefect: what they hold, and when they do not answer."""

from pathlib import Path
from types import SimpleNamespace
from uuid import UUID

from mlflow.exceptions import MlflowException
from prefect.client.schemas.objects import StateType

from paceline.flows.lifecycle.mlflow_run import FLOW_RUN_TAG
from tests.simulation.kernel import EPOCH
from tests.simulation.system import kernel, process

RETRY_SECONDS = 10.0  # of MLflow's client


class Server:
    """A server with a data base that survives it; `answer` waits for a reply."""

    def __init__(self, network, host):
        self.network, self.host, self.is_up = network, host, True

    def is_reachable(self):
        return self.is_up and self.network.links(process().host, self.host)

    def reply(self):
        kernel().wait(kernel().random.uniform(0.003, 0.03))


class Mlflow(Server):
    """The tracking server."""

    def __init__(self, network, host):
        super().__init__(network, host)
        self.runs = {}

    def ask(self, change):
        """Do something in the server; it may happen although no answer comes back."""
        if not self.is_reachable():
            kernel().wait(RETRY_SECONDS)
            if not self.is_reachable():
                raise MlflowException("API request failed: Connection refused")
        answer = change()
        self.reply()
        return answer


class MlflowClient:
    """`mlflow.MlflowClient`, as far as Paceline uses it; it speaks with the server of the current history."""

    server: Mlflow

    def __init__(self, uri=None):
        self._ask = self.server.ask

    def create_run(self, experiment_id, run_name, tags):
        def create():
            run_id = f"{len(self.server.runs):032x}"
            self.server.runs[run_id] = SimpleNamespace(
                id=run_id, status="RUNNING", tags=dict(tags), metrics={}, start=EPOCH + kernel().now, changes=[]
            )
            return self._run(run_id)

        return self._ask(create)

    def _run(self, run_id):
        run = self.server.runs[run_id]
        info = SimpleNamespace(run_id=run_id, status=run.status, experiment_id="1")
        return SimpleNamespace(info=info, data=SimpleNamespace(tags=run.tags))

    def get_run(self, run_id):
        return self._ask(lambda: self._run(run_id))

    def get_experiment(self, experiment_id):
        return SimpleNamespace(name="simulated")

    def download_artifacts(self, run_id, name, directory):
        path = Path(directory) / name
        path.write_text("{}")
        return str(path)

    def _set(self, run_id, status):
        run = self.server.runs[run_id]
        kernel().log(f"MLflow run {run_id[-2:]} is {status}")
        run.status = status
        run.changes.append((kernel().now, status, process()))

    def update_run(self, run_id, status):
        self._ask(lambda: self._set(run_id, status))

    def set_terminated(self, run_id, status):
        self._ask(lambda: self._set(run_id, status))

    def set_tag(self, run_id, key, value):
        self._ask(lambda: self.server.runs[run_id].tags.__setitem__(key, value))

    def log_batch(self, run_id, metrics=(), params=(), tags=(), synchronous=True):
        def log():
            run = self.server.runs[run_id]
            for metric in metrics:
                entries = run.metrics.setdefault(metric.key, [])
                entry = (metric.step, metric.value, metric.timestamp)
                if entry not in entries:  # a primary key of MLflow's store
                    entries.append(entry)
            run.tags.update({tag.key: tag.value for tag in tags})

        self._ask(log)

    def log_artifact(self, run_id, path, folder=None):
        self._ask(lambda: None)

    def get_metric_history(self, run_id, name):
        entries = self._ask(lambda: list(self.server.runs[run_id].metrics.get(name, ())))
        return [SimpleNamespace(step=step, value=value, timestamp=when) for step, value, when in entries]

    def find_runs(self, uri, experiment, condition=""):
        """`tasks.track.queries.find_runs` for RUNNING runs of this host."""

        def find():
            return [
                SimpleNamespace(run_id=run.id, start_time=run.start, tags=dict(run.tags))
                for run in self.server.runs.values()
                if run.status == "RUNNING"
                and run.tags.get("paceline.host") == process().host.name
                and ("flow_run" not in condition or f"'{run.tags.get(FLOW_RUN_TAG)}'" in condition)
            ]

        return self._ask(find)


class Prefect(Server):
    """The API with the states of flow runs."""

    def __init__(self, network, host):
        super().__init__(network, host)
        self.states, self.owners = {}, {}

    def set(self, flow_run_id, state):
        """Report a state, however long it takes."""
        while not self.is_reachable():
            kernel().wait(2.0)
        self.states[flow_run_id] = state
        kernel().log(f"flow run {flow_run_id.int} is {state}")
        self.reply()


class PrefectClient:
    """`SyncPrefectClient`, as far as lost runs need it."""

    def __init__(self, server):
        self._server = server

    def read_flow_run(self, flow_run_id: UUID):
        state = SimpleNamespace(type=StateType[self._server.states[flow_run_id]])
        return SimpleNamespace(id=flow_run_id, name=str(flow_run_id.int), state=state)

    def set_flow_run_state(self, flow_run_id, state):
        self._server.set(flow_run_id, state.type.name)
