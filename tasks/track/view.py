"""A comparison in the MLflow UI that can be opened by its address.

The UI keeps such views in tags of the experiment, in a form that is not documented (mlflow 3.17); a test opens one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from mlflow.tracking import MlflowClient

from tasks.redact import redact

VIEW_TAG = "mlflow.sharedViewState."
LOCAL_SERVER = "http://127.0.0.1:5000"
"""Where `paceline ui` serves a store that has no server, unless told otherwise."""


def share_view(tracking_uri: str, run_ids: Sequence[str], columns: Sequence[str]) -> str:
    """Store a view of runs in the first one's experiment and return its address.

    Args:
        tracking_uri: Of the store; a view is stored in any, and shown by a server.
        run_ids: The runs to show.
        columns: Such as "metrics.`speedup/ratio`".

    Returns:
        An address; for a store without a server that of the UI which `paceline ui` opens.
    """
    client = MlflowClient(tracking_uri)
    experiment_id = client.get_run(run_ids[0]).info.experiment_id
    quoted = ", ".join(f"'{run_id}'" for run_id in run_ids)
    state = {
        "searchFilter": f"attributes.run_id IN ({quoted})",
        "orderByKey": "attributes.start_time",
        "orderByAsc": True,
        "selectedColumns": list(columns),
        "compareRunCharts": None,
    }
    text = json.dumps(state)
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    client.set_experiment_tag(experiment_id, VIEW_TAG + key, text)
    page = f"#/experiments/{experiment_id}/runs?workflowType=machine_learning&viewStateShareKey={key}"
    server = redact(tracking_uri).rstrip("/") if tracking_uri.startswith("http") else LOCAL_SERVER
    return f"{server}/{page}"
