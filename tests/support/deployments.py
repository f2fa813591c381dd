"""Deployments of a real Prefect server, and their runs."""

import httpx

from tests.support.patience import SECONDS, until

SHORT = ["data.image_size=16", "model.width=4", "model.depth=1", "recipe.num_epochs=1", "recipe.warmup_epochs=0"]
LONG = {
    "recipe": {"num_epochs": 100_000, "schedule": "constant"},
    "execution": {
        "precision": "32-true",
        "memory_format": "contiguous",
        "loading": "resident",
        "num_threads": 1,
        "compile": "off",
    },
}
"""Endless, with nothing of the execution left open: else it would first search for minutes."""
ENDS = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


class Deployments:
    """Those of a Prefect server."""

    def __init__(self, url):
        self._url = url

    def find(self, name):
        """The deployment FLOW/NAME; None where there is none."""
        answer = httpx.get(f"{self._url}/deployments/name/{name}")
        return answer.json() if answer.status_code == 200 else None

    def begin(self, deployment, parameters, due=None):
        """A run now, or due at a moment; its id."""
        place = f"{self._url}/deployments/{deployment['id']}/create_flow_run"
        body = {"parameters": parameters}
        if due is not None:
            body["state"] = {"type": "SCHEDULED", "state_details": {"scheduled_time": due.isoformat()}}
        # 503: its sqlite is locked for the moment; Prefect's own client asks again too.
        answer = until(lambda: found if (found := httpx.post(place, json=body)).status_code != 503 else None, "answer")
        answer.raise_for_status()
        return answer.json()["id"]

    def state(self, run):
        """The state of a run now."""
        return httpx.get(f"{self._url}/flow_runs/{run}").json()["state"]

    def end_of(self, run, seconds=SECONDS):
        """The state of a run at its end."""
        return until(lambda: now if (now := self.state(run))["type"] in ENDS else None, f"end of {run}", seconds)

    def wait_until_running(self, run):
        """Until a run runs."""
        now = until(lambda: now if (now := self.state(run))["type"] in ("RUNNING", *ENDS) else None, f"start of {run}")
        assert now["type"] == "RUNNING", now

    def runs(self, deployment, state):
        """A deployment's runs in a state."""
        body = {
            "deployments": {"id": {"any_": [deployment["id"]]}},
            "flow_runs": {"state": {"type": {"any_": [state]}}},
        }
        return httpx.post(f"{self._url}/flow_runs/filter", json=body).json()


class Served(Deployments):
    """A deployment that `paceline serve` serves.

    Args:
        url: of the API.
        name: of the deployment.
        process: of the command.
        flow: of the deployment.
    """

    def __init__(self, url, name, process, flow="paceline-run"):
        super().__init__(url)
        self.process = process
        self._name = f"{flow}/{name}"
        until(lambda: self.deployment, "deployment", process=process)

    @property
    def deployment(self):
        """It, as Prefect has it."""
        return self.find(self._name)

    def begin_with(self, **sections):
        """A run now, with other settings; its id."""
        deployment = self.deployment
        config = dict(deployment["parameters"]["config"])
        for name, settings in sections.items():
            config[name] = config[name] | settings
        return self.begin(deployment, {"config": config})
