"""Views of the MLflow UI as data: what they show, and that each has one key for ever."""

import base64
import json
import zlib

import pytest
from mlflow.tracking import MlflowClient
from mlflow.utils.validation import MAX_EXPERIMENT_TAG_VAL_LENGTH

from paceline.tasks.track.ui_views import (
    LOCAL_SERVER,
    VIEW_TAG,
    server_address,
    share_view,
    view_of_runs,
    view_of_series,
    view_of_study,
    view_state,
    view_text,
)

RUN = "0123456789abcdef0123456789abcdef"
VIEWS = [
    view_of_runs([RUN]),
    view_of_study(RUN),
    view_of_series("paceline.series", "1a2b3c4d"),
    view_of_series("prefect.deployment_id", "1a2b3c4d", "nightly"),
]
WANTED = [
    "metrics.`speedup/ratio`",
    "metrics.`speedup/low`",
    "metrics.`speedup/high`",
    "metrics.`speedup/efficiency`",
    "metrics.`test/accuracy`",
    "metrics.`throughput/samples_per_second`",
    "metrics.`time/data_wait_fraction`",
    "tags.`paceline.regression`",
]


def unpacked(state):
    packed = state.removeprefix("deflate;")
    assert packed != state
    return json.loads(zlib.decompress(base64.b64decode(packed)))


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.subject)
def test_a_view_has_the_columns_that_matter_the_newest_run_first_and_charts(view):
    state = view_state(view)
    assert [column for column in state["selectedColumns"] if column in WANTED] == WANTED
    assert state["columnOrder"][-len(view.columns) :] == state["selectedColumns"]
    order = "attributes.start_time" if view in VIEWS[2:] else "attributes.end_time"
    assert (state["orderByKey"], state["orderByAsc"]) == (order, False)
    shown = {metric for chart in state["compareRunCharts"] for metric in chart["selectedMetricKeys"]}
    assert shown == {"speedup/interval", *(column.split("`")[1] for column in WANTED if column.startswith("metrics."))}
    interval = state["compareRunCharts"][0]
    assert (interval["type"], interval["metricKey"], interval["xAxisKey"]) == ("LINE", "speedup/interval", "time")
    first, *others = state["compareRunSections"]
    assert {chart["metricSectionId"] for chart in state["compareRunCharts"]} == {first["uuid"]}
    assert first["display"]
    assert not any(section["display"] for section in others)
    assert len({chart["uuid"] for chart in state["compareRunCharts"]}) == len(state["compareRunCharts"])


def test_a_view_shows_the_scores_that_its_runs_have():
    view = view_of_study(RUN, ["mean_iou", "ssim"])
    state = view_state(view)
    shown = {metric for chart in state["compareRunCharts"] for metric in chart["selectedMetricKeys"]}
    for metric, is_there in (("test/mean_iou", True), ("test/ssim", True), ("test/accuracy", False)):
        assert (metric in shown) == (f"metrics.`{metric}`" in view.columns) == is_there
    assert view.key == VIEWS[1].key, "the same view, brought up to date"


def test_the_key_is_the_subjects_alone():
    assert len({view.key for view in VIEWS}) == len(VIEWS)
    renamed = view_of_series("prefect.deployment_id", "1a2b3c4d", "every night")
    assert renamed.key == VIEWS[3].key
    assert renamed.model_copy(update={"columns": ()}).key == VIEWS[3].key
    assert VIEWS[2].key == "bda56f6e43a0b17a", "another key would make a second view beside those that are stored"


def test_a_view_with_a_name_is_listed_and_one_without_is_not():
    assert unpacked(view_text(VIEWS[2], 5.0)) == view_state(VIEWS[2])
    named = json.loads(view_text(VIEWS[3], 5.0))
    assert (named["name"], named["createdAt"]) == ("nightly", 5000)
    assert unpacked(named["state"]) == view_state(VIEWS[3])


def test_a_view_of_many_runs_fits_into_a_tag():
    runs = [f"{number:032x}" for number in range(100, 200)]
    assert len(view_text(view_of_runs(runs), 0.0)) < MAX_EXPERIMENT_TAG_VAL_LENGTH


@pytest.mark.parametrize(
    ("uri", "address"),
    [
        ("http://127.0.0.1:5005", "http://127.0.0.1:5005"),
        ("https://me:hunter2@mlflow.site/behind/?a=1", "https://mlflow.site/behind"),
        ("sqlite:////home/me/mlflow.db", LOCAL_SERVER),
        ("postgresql://me:hunter2@db/mlflow", LOCAL_SERVER),
    ],
)
def test_the_address_is_a_browsers_and_holds_no_credential(uri, address):
    assert server_address(uri) == address


def test_sharing_again_replaces(tmp_path):
    store = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(store)
    experiment = client.create_experiment("shared", str(tmp_path))
    first, again = (share_view(store, experiment, VIEWS[3]) for _ in range(2))
    assert first == again
    tags = client.get_experiment(experiment).tags
    (key,) = [name for name in tags if name.startswith(VIEW_TAG)]
    assert first.endswith(f"viewStateShareKey={key.removeprefix(VIEW_TAG)}")
    assert first.startswith(f"{LOCAL_SERVER}/#/experiments/{experiment}/runs?")
