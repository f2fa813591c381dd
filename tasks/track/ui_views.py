"""A selection of runs in the MLflow UI, with the columns and charts that matter, opened by its address.

The UI keeps such views in tags of the experiment, in a form that is not documented (read in the web bundle of mlflow
3.17: `viewStateShareKey`, `compareRunCharts`); test_pages.py opens them in a browser. A view has one key for ever, so
that writing it again replaces it.
"""

import base64
import hashlib
import json
import time
import zlib
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from mlflow.tracking import MlflowClient

from paceline.tasks.names import Metric, Tag
from paceline.tasks.records.record import Record
from paceline.tasks.records.training import ScoreName
from paceline.tasks.scores import is_share

VIEW_TAG = "mlflow.sharedViewState."
LOCAL_SERVER = "http://127.0.0.1:5000"  # default address at which `paceline ui` serves a store without a server
AS_CHARTS = "&compareRunsMode=CHART"  # behind a view's address, it opens the charts in place of the columns

ACCURACY: tuple[ScoreName, ...] = ("accuracy",)
REGRESSION = f"tags.`{Tag.REGRESSION}`"
SCORE = f"metrics.`{Metric.SWEEP_SCORE}`"
TRIAL_SECONDS = f"metrics.`{Metric.SWEEP_SECONDS}`"
THROUGHPUT = f"metrics.`{Metric.THROUGHPUT}`"
PRUNED = f"tags.`{Tag.PRUNED}`"
CONTAMINATED = f"tags.`{Tag.CONTAMINATED}`"
SETTINGS = ("params.`execution.num_devices`", "params.`execution.precision`", f"tags.`{Tag.WORKLOAD}`")

LEADING_COLUMNS = ("0", "attributes.`Run Name`", "runDateAndNestInfo", "duration")
"""Which the UI shows always: the checkbox, name, time and duration of a run."""
WIDTHS = {
    "attributes.`Run Name`": 200,
    f"metrics.`{Metric.SPEEDUP}`": 115,
    f"metrics.`{Metric.SPEEDUP_LOW}`": 115,
    f"metrics.`{Metric.SPEEDUP_HIGH}`": 115,
    f"metrics.`{Metric.THROUGHPUT}`": 235,
    f"metrics.`{Metric.DATA_WAIT_FRACTION}`": 185,
    REGRESSION: 260,
}
WIDTH = 150  # of any other column, in pixels: room for a name such as speedup/efficiency

# Each run's interval is a vertical line at its time.
FIXED = {"useGlobalXaxisKey": False, "useGlobalLineSmoothing": False, "displayPoints": True, "lineSmoothness": 0}
ERROR_BARS = {"type": "LINE", "xAxisKey": "time", **FIXED}
MAX_BARS = 60
SECTION = "paceline"
OTHER_SECTIONS = (
    *("compile", "cost", "data", "energy", "machine", "memory", "prediction", "recovery", "speedup", "study", "test"),
    *("throughput", "time", "train", "validation", "Model metrics", "System metrics"),
)
"""Where the UI puts the charts of all other metrics, by the words before their slashes; closed until somebody looks."""


class View(Record):
    """Selected runs, and their columns and charts."""

    subject: str  # subject and identity of the view: the same text gives the same view
    condition: str  # which runs, in MLflow's search syntax
    columns: tuple[str, ...]
    order: str = "attributes.end_time"
    """By what the newest is the first. By their start, the UI would fold the trainings of a study into its row."""
    scores: tuple[str, ...] = ACCURACY  # what the models are judged by
    name: str | None = None
    """Under which the experiment's page lists it; a view without one is found by its address alone."""

    @property
    def key(self) -> str:
        """16 hex digits that name it in its experiment."""
        return hashlib.sha256(self.subject.encode()).hexdigest()[:16]


def charts_of(scores: Sequence[str]) -> list[tuple[str, ...]]:
    """The metrics that matter, those of one chart together; each is a column as well."""
    return [
        (Metric.SPEEDUP, Metric.SPEEDUP_LOW, Metric.SPEEDUP_HIGH),
        (Metric.EFFICIENCY,),
        *((Metric.test(name) if is_share(name) else name,) for name in scores),
        (Metric.THROUGHPUT,),
        (Metric.DATA_WAIT_FRACTION,),
    ]


def figures_of(scores: Sequence[str] = ACCURACY) -> tuple[str, ...]:
    """Their columns."""
    return tuple(f"metrics.`{metric}`" for chart in charts_of(scores) for metric in chart)


def view_of_runs(run_ids: list[str], scores: Sequence[ScoreName] = ACCURACY) -> View:
    """A few runs side by side."""
    quoted = ", ".join(f"'{run_id}'" for run_id in run_ids)
    return View(
        subject=f"runs {quoted}",
        condition=f"attributes.run_id IN ({quoted})",
        columns=(*figures_of(scores), *SETTINGS, REGRESSION, CONTAMINATED),
        scores=tuple(scores),
    )


def view_of_study(run_id: str, scores: Sequence[str] = ACCURACY) -> View:
    """The trainings of a study; of one that was repeated because others disturbed it, the repetition."""
    condition = f"tags.`{Tag.STUDY_RUN_ID}` = '{run_id}' AND tags.`{Tag.SUPERSEDED_BY}` IS NULL"
    columns = (*figures_of(scores), REGRESSION, f"tags.`{Tag.PARITY}`", CONTAMINATED)
    return View(subject=f"study {run_id}", condition=condition, columns=columns, scores=tuple(scores))


def view_of_sweep(run_id: str, settings: Sequence[str]) -> View:
    """The trials of a sweep, the best first."""
    columns = (SCORE, TRIAL_SECONDS, *(f"params.`{setting}`" for setting in settings), PRUNED, THROUGHPUT)
    condition = f"tags.`{Tag.SWEEP_RUN_ID}` = '{run_id}'"
    return View(subject=f"sweep {run_id}", condition=condition, columns=columns, order=SCORE)


def view_of_series(tag: str, value: str, name: str | None = None, scores: Sequence[str] = ACCURACY) -> View:
    """All runs that have a tag in common, night after night."""
    return View(
        subject=f"{tag} {value}",
        condition=f"tags.`{tag}` = '{value}'",
        columns=(*figures_of(scores), REGRESSION, f"tags.`{Tag.DISTURBED}`", CONTAMINATED),
        order="attributes.start_time",  # a run that has not ended comes first too
        scores=tuple(scores),
        name=name,
    )


def view_state(view: View) -> dict[str, Any]:
    """State of a view in the UI: the newest run first, our charts above the automatic ones."""
    sections = [(SECTION, "Paceline", True), *((f"closed-{name}", name, False) for name in OTHER_SECTIONS)]
    return {
        "searchFilter": view.condition,
        "orderByKey": view.order,
        "orderByAsc": False,
        "selectedColumns": list(view.columns),
        "columnOrder": [*LEADING_COLUMNS, *view.columns],  # else by name
        "columnWidths": {name: WIDTH for name in view.columns} | WIDTHS,
        "runsHiddenMode": "FIRST_20_RUNS",
        "isAccordionReordered": True,  # else the UI sorts the sections by name
        "compareRunSections": [
            {"uuid": key, "name": name, "display": is_open, "isReordered": True} for key, name, is_open in sections
        ],
        "compareRunCharts": [_bars((Metric.SPEEDUP_INTERVAL,)) | ERROR_BARS, *map(_bars, charts_of(view.scores))],
    }


def _bars(metrics: tuple[str, ...]) -> dict[str, Any]:
    return {
        "type": "BAR",
        "uuid": f"{SECTION}-{metrics[0]}",
        "metricSectionId": SECTION,
        "metricKey": metrics[0],
        "selectedMetricKeys": list(metrics),
        "runsCountToCompare": MAX_BARS,
        "deleted": False,
        "isGenerated": False,
    }


def view_text(view: View, now: float) -> str:
    """The tag's value, as the UI itself writes it: compressed, and in an envelope where the view has a name."""
    packed = base64.b64encode(zlib.compress(json.dumps(view_state(view)).encode())).decode()
    state = f"deflate;{packed}"
    if view.name is None:
        return state
    milliseconds = int(now * 1000)
    return json.dumps({"name": view.name, "createdAt": milliseconds, "updatedAt": milliseconds, "state": state})


def share_view(tracking_uri: str, experiment_id: str, view: View) -> str:
    """Store a view in an experiment, in place of what it was before; its address, without a server in `paceline ui`."""
    MlflowClient(tracking_uri).set_experiment_tag(experiment_id, VIEW_TAG + view.key, view_text(view, time.time()))
    page = f"#/experiments/{experiment_id}/runs?workflowType=machine_learning&viewStateShareKey={view.key}"
    return f"{server_address(tracking_uri)}/{page}"


def share_runs(tracking_uri: str, run_ids: list[str], scores: Sequence[ScoreName] = ACCURACY) -> str:
    """Store a view of a few runs in the first one's experiment and return its address."""
    experiment_id = MlflowClient(tracking_uri).get_run(run_ids[0]).info.experiment_id
    return share_view(tracking_uri, experiment_id, view_of_runs(run_ids, scores))


def server_address(tracking_uri: str) -> str:
    """Address of the store for a browser, without credentials."""
    parts = urlsplit(tracking_uri)
    if parts.scheme not in ("http", "https"):
        return LOCAL_SERVER
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="")).rstrip("/")
