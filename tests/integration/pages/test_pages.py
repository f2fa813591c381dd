"""What the owner of a cluster sees in the morning: the pages of real MLflow and Prefect servers in a real browser."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx
import pytest
from mlflow.tracking import MlflowClient
from prefect.settings import PREFECT_API_URL, temporary_settings

from paceline.conf.load import load
from paceline.flows.deployment import deployment_of, schedule_of
from paceline.tasks.track.ui_views import AS_CHARTS, REGRESSION, figures_of
from tests.support.browser import RunsPage, chromium, new_page, take
from tests.support.deployments import Deployments, Served
from tests.support.jobs import PLANTED
from tests.support.nights import NIGHT, repeat

TINY = [
    "digits",
    "data.image_size=12",
    "model.width=4",
    "model.depth=1",
    "recipe.num_epochs=2",
    "recipe.warmup_epochs=0.5",
    "recipe.batch_scaling=strong",
    "track.experiment=watched",
]
PRESENTABLE = ["digits", "recipe.num_epochs=24", "track.experiment=pictures"]
TWO_DEVICES = ["execution.num_devices=2", "speedup.num_blocks=6", "speedup.max_seconds=6"]
AXIS = ["--axis", "execution.precision=32-true,bf16-mixed", "--repeats", "1"]
CHART_TITLES = [
    "speedup/ratio vs speedup/low vs speedup/high",
    "speedup/efficiency",
    "test/accuracy",
    "throughput/samples_per_second",
    "time/data_wait_fraction",
]


pytestmark = pytest.mark.timeout(1200)  # the first slow test waits for five trainings


class Watched(NamedTuple):
    """Three runs, two of them of one deployment."""

    nights: list[dict[str, Any]]
    by_hand: dict[str, Any]
    deployment: dict[str, Any]


@pytest.fixture(scope="module")
def client(mlflow_server):
    return MlflowClient(mlflow_server.url)


@pytest.fixture(scope="module")
def metrics(client):
    """Of a run, by its id."""
    return lambda run_id: client.get_run(run_id).data.metrics


@pytest.fixture(scope="module")
def tag(client):
    """Of a run, by its summary."""
    return lambda run, name: client.get_run(run["run_id"]).data.tags[name]


@pytest.fixture(scope="module")
def trained(run):
    """A run on two devices, in an experiment of its own."""
    summary, _ = run("run", *TINY, *TWO_DEVICES, "track.experiment=compared")
    return summary


@pytest.fixture(scope="module")
def run(paceline, mlflow_server):
    """Runs a command to its end: its JSON and what it told."""

    def to_the_end(*arguments, **environment):
        process = paceline(*arguments, "--json", MLFLOW_TRACKING_URI=mlflow_server.url, **environment)
        stdout, stderr = process.communicate(timeout=280)
        assert process.returncode == 0, stderr
        return json.loads(stdout.splitlines()[-1]), stderr

    return to_the_end


@pytest.fixture(scope="module")
def watched(run, paceline, mlflow_server, prefect_url, tmp_path_factory):
    client = MlflowClient(mlflow_server.url)
    arguments = ["serve", *TINY, *TWO_DEVICES, "--name", "every-night", "--cron", "0 2 * * *"]
    process = paceline(
        *arguments,
        MLFLOW_TRACKING_URI=mlflow_server.url,
        PREFECT_RUNNER_POLL_FREQUENCY="1",
        PREFECT_LOGGING_LEVEL="ERROR",
    )
    try:
        served = Served(prefect_url, "every-night", process)
        deployment, nights = served.deployment, []
        for _ in range(2):
            flow_run = served.begin_with()
            state = served.end_of(flow_run, seconds=280)
            assert state["type"] == "COMPLETED", state["message"]
            nights.append(summary_of(client, flow_run, tmp_path_factory.mktemp("night")))
    finally:
        process.terminate()
        process.communicate(timeout=60)
    by_hand, _ = run("run", *TINY, *TWO_DEVICES)
    return Watched(nights, by_hand, deployment)


def summary_of(client, flow_run, folder):
    experiment = client.get_experiment_by_name("watched")
    (found,) = client.search_runs([experiment.experiment_id], f"tags.`prefect.flow_run_id` = '{flow_run}'")
    with open(client.download_artifacts(found.info.run_id, "summary.json", str(folder))) as file:  # noqa: PTH123
        return json.load(file)


@pytest.fixture
def pictures(request, tmp_path):
    """Folder of the pictures; with `-m slow --pictures infra/pictures` those of the documents."""
    return request.config.getoption("--pictures") or tmp_path


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser):
    with new_page(browser) as page:
        yield page


def check_figures(shown, metrics):
    """Every figure stands in its column, and where a run has none, a dash; what no run has is no column."""
    known = {name for found in metrics.values() for name in found}
    heads = shown.heads()
    for column in figures_of():
        name = column.split("`")[1]
        assert (name in heads) == (name in known), name
        for run_id, found in metrics.items() if name in known else ():
            text = shown.cell(run_id, column)
            assert text == "-" if name not in found else float(text) == pytest.approx(found[name])


@pytest.mark.slow
def test_a_comparison_shows_ratio_interval_efficiency_and_accuracy(trained, run, client, metrics, page):
    repeat(client, trained["run_id"], 2)
    experiment = client.get_experiment_by_name("compared").experiment_id
    run_ids = [found.info.run_id for found in client.search_runs([experiment], order_by=["start_time ASC"])]
    assert run_ids[0] == trained["run_id"]
    compared, _ = run("compare", *run_ids)
    shown = RunsPage(page, compared["view"])
    assert shown.run_ids() == run_ids[::-1], "the newest is the first"
    heads = shown.heads()
    wanted = ["speedup/ratio", "speedup/low", "speedup/high", "speedup/efficiency", "test/accuracy"]
    assert [head for head in heads if head in wanted] == wanted, heads
    check_figures(shown, {run_id: metrics(run_id) for run_id in run_ids})
    assert {name for run_id in run_ids for name in metrics(run_id)} >= set(wanted), "each column has a figure"


@pytest.mark.slow
def test_the_nights_of_a_deployment_share_a_view_with_columns_and_charts(watched, client, metrics, tag, page):
    *_, older, newer = watched.nights
    assert older["view"] == newer["view"] == tag(newer, "paceline.view")
    assert tag(newer, "prefect.deployment_id") == watched.deployment["id"]
    experiment = client.get_experiment_by_name("watched")
    views = [json.loads(text) for text in experiment.tags.values() if text.startswith("{")]
    assert [view["name"] for view in views if "state" in view] == ["every-night"], "a deployment has one view"

    shown = RunsPage(page, newer["view"])
    assert shown.run_ids() == [night["run_id"] for night in reversed(watched.nights)]
    assert "paceline.regression" in shown.heads()
    check_figures(shown, {run_id: metrics(run_id) for run_id in shown.run_ids()})
    assert shown.cell(newer["run_id"], REGRESSION) == tag(newer, "paceline.regression")
    assert page.get_by_test_id("saved-views-trigger").inner_text() == "every-night", "it is in the page's list of views"

    charts = RunsPage(page, newer["view"] + AS_CHARTS)
    kept = [metrics(night["run_id"]) for night in watched.nights]
    assert charts.points("speedup/interval") == 3 * sum("speedup/interval" in found for found in kept)
    for title in CHART_TITLES:
        assert charts.bars(title) == sum(name in found for found in kept for name in title.split(" vs ")), title


@pytest.mark.slow
def test_a_run_by_hand_has_a_view_of_its_series(watched, tag, page):
    assert watched.by_hand["view"] != watched.nights[0]["view"]
    series = tag(watched.by_hand, "paceline.series")
    alike = [run for run in (*watched.nights, watched.by_hand) if tag(run, "paceline.series") == series]
    shown = RunsPage(page, watched.by_hand["view"])
    assert shown.run_ids() == [run["run_id"] for run in alike][::-1]


@pytest.mark.slow
def test_a_study_has_a_view_of_its_trainings(run, metrics, tag, page):
    study, told = run("study", *TINY, *AXIS)
    assert f"view   {study['view']}" in told
    assert tag(study, "paceline.view") == study["view"]
    trained = {run_id for arm in study["arms"] for run_id in arm["run_ids"]}
    shown = RunsPage(page, study["view"])
    assert set(shown.run_ids()) == trained
    check_figures(shown, {run_id: metrics(run_id) for run_id in trained})
    charts = RunsPage(page, study["view"] + AS_CHARTS)
    assert charts.bars("test/accuracy") == len(trained)


@pytest.mark.slow
def test_the_report_shows_among_the_artifacts_with_its_pictures(trained, client, mlflow_server, page):
    newest = trained["run_id"]
    experiment = client.get_run(newest).info.experiment_id
    page.goto(f"{mlflow_server.url}/#/experiments/{experiment}/runs/{newest}/artifacts/report.html")
    assert page.locator("iframe").get_attribute("sandbox") is not None
    report = page.frame_locator("iframe[sandbox]")
    report.locator("body").get_by_text(newest).first.wait_for()
    pictures = report.locator("svg")
    assert pictures.count() >= 3
    for picture in pictures.all():
        box = picture.bounding_box()
        assert box["width"] > 100
        assert box["height"] > 50
        assert picture.locator("path, rect, line").count() > 5


@pytest.mark.slow
def test_prefect_shows_the_stages_the_summary_and_the_link(trained, tag, prefect_url, page):
    flow_run = tag(trained, "prefect.flow_run_id")
    pages = prefect_url.removesuffix("/api") + "/v2"  # what Prefect opens at its server's address
    page.goto(f"{pages}/runs/flow-run/{flow_run}?tab=TaskRuns")
    for stage in ("prepare", "train", "evaluate", "account"):
        page.get_by_text(f"{stage}-").first.wait_for()
    assert page.get_by_text("Completed").count() >= 4

    page.goto(f"{pages}/runs/flow-run/{flow_run}?tab=Artifacts")
    page.get_by_text("This run among those like it").first.wait_for()
    found = httpx.post(
        f"{prefect_url}/artifacts/filter", json={"artifacts": {"flow_run_id": {"any_": [flow_run]}}}
    ).json()
    by_key = {artifact["key"]: artifact["id"] for artifact in found}
    page.goto(f"{pages}/artifacts/artifact/{by_key['summary']}")
    page.get_by_text(f"{trained['evaluate']['accuracy']:.2%}").first.wait_for()
    page.get_by_text(trained["speedup"]["verdict"]).first.wait_for()
    page.goto(f"{pages}/artifacts/artifact/{by_key['mlflow-view']}")
    assert page.get_by_role("link", name="See it in MLflow").get_attribute("href") == trained["view"]


@pytest.fixture
def deployment(prefect_url):
    """One that nobody serves."""
    config = load("digits", ["recipe.batch_size=96"])

    def deploy():
        with temporary_settings({PREFECT_API_URL: prefect_url}):
            deployment_of(config, "form", schedule_of("0 2 * * *", "Europe/Zurich"), "queue").apply()

    with ThreadPoolExecutor() as beside:  # where the browser's event loop does not run
        beside.submit(deploy).result()
    return Deployments(prefect_url).find("paceline-run/form")


@pytest.mark.slow
def test_the_form_of_a_deployment_helps_and_refuses(deployment, prefect_url, page):
    def num_runs():
        wanted = {
            "deployments": {"id": {"any_": [deployment["id"]]}},
            "flow_runs": {"state": {"name": {"not_any_": ["Scheduled"]}}},
        }
        return httpx.post(f"{prefect_url}/flow_runs/count", json=wanted).json()

    before = num_runs()
    page.goto(f"{prefect_url.removesuffix('/api')}/v2/deployments/deployment/{deployment['id']}/run")
    batch = page.get_by_label("Batch Size (Optional)")
    assert batch.input_value() == "96"
    assert page.get_by_text("Samples per device and step under weak scaling").is_visible()
    share = page.get_by_label("Test Fraction (Optional)")
    share.fill("1.5")
    page.get_by_role("button", name="Submit").click()
    page.get_by_text("1.5 is greater than or equal to the maximum of 1", exact=True).wait_for()
    page.get_by_text("Validation failed for field 'config.data.test_fraction'").wait_for()
    share.fill("0.2")
    batch.fill("0")
    page.get_by_role("button", name="Submit").click()
    assert batch.evaluate("field => field.validationMessage") == "Value must be greater than or equal to 1."
    assert page.url.endswith("/run")
    assert num_runs() == before


@pytest.mark.slow
def test_pictures_of_prefect_are_taken(watched, tag, browser, prefect_url, pictures):
    pages = prefect_url.removesuffix("/api") + "/v2"
    with new_page(browser, {"width": 1400, "height": 900}) as page:
        page.goto(f"{pages}/runs/flow-run/{tag(watched.nights[0], 'prefect.flow_run_id')}?tab=Artifacts")
        page.get_by_text("This run among those like it").first.wait_for()
        take(page, pictures / "flow_run.png")
        page.goto(f"{pages}/deployments/deployment/{watched.deployment['id']}/run")
        share = page.get_by_label("Test Fraction (Optional)")
        share.fill("1.5")
        page.get_by_role("button", name="Submit").click()
        page.get_by_text("Validation failed for field 'config.data.test_fraction'").wait_for()
        share.scroll_into_view_if_needed()
        take(page, pictures / "form.png")
    check_sizes(pictures, "flow_run", "form")


@pytest.mark.slow
def test_pictures_of_results_are_taken(run, client, browser, pictures, tmp_path):
    """On a quiet machine: the top of a report, and how two devices scale."""
    report, _ = run("run", *PRESENTABLE)
    with new_page(browser, {"width": 1100, "height": 760}) as page:
        page.goto(f"file://{client.download_artifacts(report['run_id'], 'report.html', str(tmp_path))}")
        take(page, pictures / "report-top.png")
    one_core = [*PRESENTABLE, "execution.num_threads=1"]
    study, _ = run("study", *one_core, "--axis", "execution.num_devices=1,2", "--repeats", "3")
    chart = client.download_artifacts(study["run_id"], "pictures/scaling-0.png", str(tmp_path))
    shutil.copy(chart, pictures / "scaling.png")
    check_sizes(pictures, "report-top", "scaling")


@pytest.mark.slow
def test_a_picture_of_a_regression_is_taken(run, client, browser, pictures):
    """Fourteen nights: real ones are the first and the eleventh, which is slow and learns nothing."""
    night = [*NIGHT, "recipe.num_epochs=6", "model.width=8", "recipe.batch_size=64"]
    first, _ = run("run", *night)
    rate = first["train"]["samples_per_second"]
    repeat(client, first["run_id"], 9, rate)
    slow, _ = run("run", *night, PYTHONPATH=PLANTED, PLANT="input=0.005", BLIND="yes")
    assert slow["regression"]["verdict"] == "regression", slow["regression"]
    repeat(client, first["run_id"], 3, rate, first_number=12)
    for number, summary in ((1, first), (11, slow)):
        client.set_tag(summary["run_id"], "mlflow.runName", f"night {number}")
    with new_page(browser, {"width": 1400, "height": 700}) as page:
        nights = RunsPage(page, slow["view"] + AS_CHARTS)
        nights.hide_banner()
        assert nights.bars("throughput/samples_per_second") == 14
        take(page, pictures / "regression.png")
    check_sizes(pictures, "regression")


def check_sizes(folder, *names):
    for name in names:
        assert 10_000 < (folder / f"{name}.png").stat().st_size < 300_000, name
