"""Nights that follow each other: what they run, and earlier ones made from one real night."""

import json
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np

from tests.support.documents import ROOT

NIGHT = [
    "digits",
    "name=nights",
    "data.image_size=16",
    "model.width=4",
    "model.depth=1",
    "recipe.num_epochs=2",
    "recipe.warmup_epochs=0.5",
    "speedup.baseline=none",
    "execution.loading=foreground",
    "execution.memory_format=contiguous",  # `auto` may choose another one on a busy machine, which is a change
    "track.experiment=nights",
    "track.register=digits-nights",
    "track.min_accuracy=0.05",
]
QUIET_RATE = 4000.0
"""Samples per second; those of the real night, beside other tests, may be anything below."""


def repeat(client, run_id, num_nights, rate=QUIET_RATE, first_number=2):
    """Nights with the figures of a real one, as a quiet machine would have made them.

    Args:
        client: of the MLflow store.
        run_id: of the real night.
        num_nights: to be made.
        rate: samples per second that a night usually has.
        first_number: of the nights, which are named by it.
    """
    found = client.get_run(run_id)
    rng = np.random.default_rng(1)
    tags = {name: value for name, value in found.data.tags.items() if name.startswith("paceline.")}
    tags["paceline.disturbed"] = "False"
    facts = client.download_artifacts(run_id, "facts.json")
    for number in range(first_number, first_number + num_nights):
        copy = client.create_run(found.info.experiment_id, tags=tags, run_name=f"night {number}")
        for name, value in found.data.metrics.items():
            usual = rate if name.startswith("throughput/") else value
            client.log_metric(copy.info.run_id, name, usual * np.exp(rng.normal(0, 0.01)))
        client.log_artifact(copy.info.run_id, facts)
        client.set_terminated(copy.info.run_id)


def set_alarm(address, **environment):
    """Send regressions and nights that did not run well to a web hook from now on; what `infra/alarm` prints."""
    environment = os.environ | {"PACELINE_ALARM_URL": address, "PYTHON": sys.executable} | environment
    done = subprocess.run([ROOT / "infra" / "alarm"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@contextmanager
def web_hook():
    """The address of a web hook that answers while the body runs, and what has been sent to it."""
    received = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self):
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    server = HTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/secret-path", received
    finally:
        server.shutdown()
        server.server_close()
