"""The source and the model of guides/extend.md, installed as a user does it: trained, predicted with, and missed."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from paceline.conf.environment import Environment
from paceline.conf.load import load
from paceline.conf.plugins import embedded
from paceline.tasks.cluster.client import connect
from paceline.tasks.cluster.user_packages import require_packages
from paceline.tasks.data.prepare import dask_graph as graph
from paceline.tasks.data.sources import registry as source
from paceline.tasks.errors import RunError
from tests.support.jobs import two_workers
from tests.support.own_package import forget, install, on_path, write_example_package
from tests.support.pictures import make_pictures
from tests.support.refusals import refused

SMALL = ["data.image_size=16", "model.width=8", "model.depth=1", "recipe.num_epochs=6", "recipe.batch_size=16"]
PLAIN = ["recipe.warmup_epochs=0.5", "speedup.baseline=none", "execution.precision=32-true"]
MISSED = f"is not one of {', '.join(embedded('model'))}"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Where pip has installed the package of guides/extend.md."""
    directory = tmp_path_factory.mktemp("site")
    folder = write_example_package(tmp_path_factory.mktemp("source"))
    assert all(len(path.read_text().splitlines()) < 30 for path in folder.rglob("*.py"))
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--quiet"]
    done = subprocess.run([*pip, "--target", directory, folder], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return directory


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Pictures that a table names, and the names of the damaged ones."""
    root = tmp_path_factory.mktemp("pictures")
    damaged = make_pictures(root)
    names = [f"{path.parent.name}/{path.name}" for path in sorted(root.glob("*/*")) if path.suffix != ".txt"]
    rows = [f"{name},{name.partition('/')[0]}" for name in names]
    (root / "labels.csv").write_text("\n".join(["file,label", *rows]) + "\n")
    return root, damaged


@pytest.fixture(scope="module")
def call(paceline, site):
    """Calls the program with the package, or without; its status, the JSON on its stdout, its stderr."""

    def to_the_end(*arguments, package=True):
        path = os.pathsep.join(filter(None, [str(site) if package else "", os.environ.get("PYTHONPATH")]))
        process = paceline(*map(str, arguments), "--json", PYTHONPATH=path)
        out, said = process.communicate(timeout=240)
        return process.returncode, json.loads(out.splitlines()[-1]) if out else None, said

    return to_the_end


@pytest.fixture(scope="module")
def own(pictures):
    return ["folder", "data.source=table", f"data.root={pictures[0]}", "model.name=mixer", *SMALL, *PLAIN]


@pytest.fixture(scope="module")
def learned(call, own):
    status, summary, said = call("run", *own)
    assert status == 0, said
    return summary


@pytest.fixture(scope="module")
def bare_cluster():
    """Two workers without the package."""
    with two_workers(tls="off") as address:
        yield address


@pytest.mark.slow
def test_a_run_learns_and_records_the_package(learned, pictures, tmp_path):
    assert learned["evaluate"]["accuracy"] > 0.8
    client = MlflowClient(Environment().tracking_uri)

    def artifact(name):
        return Path(client.download_artifacts(learned["run_id"], name, str(tmp_path))).read_text()

    rejected = {json.loads(line)["path"] for line in artifact("rejected.jsonl").splitlines()}
    assert rejected == pictures[1]
    package = json.loads(artifact("model/model.json"))["package"]
    assert (package["package"], package["version"], package["entry"]) == ("acme", "1.0", "acme.mixer:Mixer")
    identities = json.loads(artifact("environment.json"))["packages"]
    assert [one.partition(", code")[0] for one in identities] == [
        "acme 1.0 (acme.table:Table",
        "acme 1.0 (acme.mixer:Mixer",
    ]


@pytest.mark.slow
def test_it_predicts_its_test_split_to_the_same_accuracy(learned, call, own, tmp_path):
    preset = tmp_path / "mine.yaml"
    preset.write_text(f"data: {{source: table, root: {own[2].partition('=')[2]}, image_size: 16}}\n")
    status, summary, said = call(
        "predict", learned["run_id"], preset, "--out", tmp_path / "out", "execution.precision=32-true"
    )
    assert status == 0, said
    assert summary["accuracy"] == learned["evaluate"]["accuracy"]
    assert summary["num_samples"] == learned["dataset"]["num_test"]


@pytest.mark.slow
def test_without_the_package_nothing_starts(learned, call, own, pictures):
    status, _, said = call("run", *own, package=False)
    assert status == 2
    assert "data.source=table is not one of digits, rotated_digits" in said
    status, _, said = call("predict", learned["run_id"], pictures[0], package=False)
    assert status == 2
    assert f"model.name=mixer {MISSED}" in said
    assert said.strip().endswith("hint: install acme 1.0, which it was trained with")


@pytest.mark.slow
def test_a_rank_without_the_package_says_so(learned, tmp_path):
    said = replayed(learned, tmp_path, {})
    assert said.startswith("paceline.tasks.errors.InputError: on host "), "which is not tried again"
    assert "install the package that offers it" in said


@pytest.mark.slow
def test_a_rank_with_another_version_of_the_package_says_so(learned, site, tmp_path):
    said = replayed(learned, tmp_path, {"PYTHONPATH": str(site)}, ("acme 1.0", "acme 1.1"))
    assert said.startswith("paceline.tasks.errors.RunError: this rank has acme 1.0 (acme.table:Table, code ")
    assert ", the coordinator acme 1.1 (" in said


def replayed(learned, tmp_path, environment, other=None):
    """The last line of a rank that fails, given its spec again, with something put in place of something in it."""
    (spec,) = (Environment().root / "runs" / learned["run_id"]).rglob("spec.json")
    tree = json.loads(spec.read_text()) | dict.fromkeys(("directory", "checkpoint_directory"), str(tmp_path / "replay"))
    if other:
        tree["packages"] = [one.replace(*other) for one in tree["packages"]]
    (tmp_path / "replay").mkdir()
    (tmp_path / "spec.json").write_text(json.dumps(tree))
    rank = [sys.executable, "-m", "paceline.tasks.train.rank.main", tmp_path / "spec.json"]
    done = subprocess.run(rank, env=os.environ | environment, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1]


def test_a_worker_without_the_package_is_named_before_anything_starts(call, own, bare_cluster):
    there = ["cluster.kind=address", f"cluster.address={bare_cluster}"]
    status, summary, said = call("run", *own, *there)
    assert status == 2, said
    assert summary["error"].startswith("worker tcp://127.0.0.1:")
    assert "lacks a package: data.source=table needs acme 1.0 (acme.table:Table, code" in summary["error"]


@pytest.mark.slow
def test_the_doctor_lists_packages_and_names_the_worker_that_lacks_one(call, own, bare_cluster):
    there = ["cluster.kind=address", f"cluster.address={bare_cluster}"]
    for named, wanted in ((own[1:4], "error"), ([], "warning")):
        status, summary, said = call("doctor", *named, *there)
        found = {finding["check"]: finding for finding in summary["findings"]}
        assert status == (wanted == "error"), said
        assert found["own packages"]["found"] == "source table of acme 1.0; model mixer of acme 1.0"
        assert found["own on workers"]["status"] == wanted
        assert "lacks a package: data.source=table needs acme 1.0" in found["own on workers"]["found"]


@pytest.mark.slow
def test_workers_with_the_package_read_and_tell_what_is_wrong(tmp_path, bare_cluster):
    code = (
        "class Odd:\n    needs_root = False\n    class_names = 'ab'\n"
        "    def __init__(self, root): ...\n"
        "    def samples(self): return [(str(n), n % 2) for n in range(30)]\n"
        "    def read(self, names, image_size): raise ValueError('torn page')\n"
    )
    install(tmp_path, "oddpack", {"odd": code}, {"odd": "odd:Odd"})
    with on_path(tmp_path), connect(bare_cluster) as client:
        config = load("digits", ["data.source=odd"])
        with refused("data.source", "data.source=odd", "oddpack", "1.0"):
            require_packages(bare_cluster, config.packages)
        client.run(_put_on_path, str(tmp_path))
        require_packages(bare_cluster, config.packages)
        listing = source.list_samples(config.data)
        with pytest.raises(RunError, match=r"data\.source=odd\b.*\boddpack 1\.0\b.*\bValueError\b.*\btorn page\b"):
            graph.prepare(listing, config.data, tmp_path / "home", bare_cluster)
        install(tmp_path, "oddpack", {"odd": code}, {"odd": "odd:Odd"}, version="1.1")
        forget(["oddpack"])
        with refused("data.source", "data.source=odd", "oddpack", "1.0", "1.1"):
            require_packages(bare_cluster, load("digits", ["data.source=odd"]).packages)


def _put_on_path(directory):
    sys.path.insert(0, directory)
    importlib.invalidate_caches()


DROPS = """
from torch import nn


class Drops(nn.Module):
    def __init__(self, image_shape, num_classes, width, depth):
        super().__init__()
        height, columns, channels = image_shape
        inner = [nn.Linear(height * columns * channels, 8 * width), nn.ReLU(), nn.Dropout(0.5)]
        self.layers = nn.Sequential(nn.Flatten(), *inner, nn.Linear(8 * width, num_classes))

    def forward(self, images):
        return self.layers(images)
"""


@pytest.mark.slow
def test_what_a_network_drops_is_by_seed_step_and_rank(paceline, tmp_path):
    """Whatever was timed before, and where a resume begins; on two ranks of a network that has no statistics."""
    install(tmp_path, "drops", {"net": DROPS}, models={"drops": "net:Drops"})
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))

    def losses(*overrides):
        settings = ["model.name=drops", "execution.num_devices=2", "recipe.num_epochs=3", *PLAIN, *overrides]
        process = paceline("run", "digits", *settings, "--json", PYTHONPATH=path)
        out, said = process.communicate(timeout=240)
        assert process.returncode == 0, said
        summary = json.loads(out.splitlines()[-1])
        history = MlflowClient(Environment().tracking_uri).get_metric_history(summary["run_id"], "train/loss")
        return summary["train"]["final_loss"], [metric.value for metric in history]

    plain = losses()
    assert losses("speedup.baseline=probe", "speedup.max_seconds=1") == plain
    assert losses("seed=5") != plain
