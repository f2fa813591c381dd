"""The clean-up of a real home: what goes, what stays and why, and what faults in the middle leave."""

import hashlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from mlflow.tracking import MlflowClient
from PIL import Image

from paceline.conf.data import Data
from paceline.conf.environment import Environment
from paceline.conf.load import load
from paceline.flows import cli
from paceline.flows.checks.space import _checkpoint_bytes, check_space, require_space_for_rest
from paceline.flows.predict.request import require_room
from paceline.flows.study.flow import check_study
from paceline.flows.study.trainings import StudyContext, StudyRequest, _require_space
from paceline.tasks import files
from paceline.tasks.clean.removal import clean_home, remove
from paceline.tasks.clean.survey import LOG_END, LONG_LOG, survey
from paceline.tasks.data.key import describe
from paceline.tasks.data.prepare import manifest, store
from paceline.tasks.data.prepare.chunks import ChunkPlanner
from paceline.tasks.data.prepare.shard import write_shards
from paceline.tasks.data.sources import registry as source
from paceline.tasks.disk_space import require_space
from paceline.tasks.doctor.host import examine_host
from paceline.tasks.errors import RunError
from paceline.tasks.files import hold
from paceline.tasks.names import Tag
from paceline.tasks.records.record import Choice
from paceline.tasks.speedup.study.ledger import Ledger
from paceline.tasks.speedup.study.records import ArmRun
from paceline.tasks.track import run as tracking
from paceline.tasks.track.garbage import remove_deleted_runs
from paceline.tasks.track.queries import take_inventory
from paceline.tasks.track.store import check_store
from paceline.tasks.train.launch.run_lock import run_lock
from paceline.tasks.train.rank.checkpoint import checkpoint_path, newest_valid_checkpoint
from paceline.tasks.train.rank.checkpoint_io import write_with_digest
from paceline.tasks.train.rank.file_logger import FileLogger
from tests.support.deployments import SHORT, Deployments
from tests.support.disk_use import disk_use
from tests.support.outputs import told_by
from tests.support.patience import until
from tests.support.refusals import refused
from tests.support.saved_models import save_model
from tests.support.small_disk import fill, small_disk

RUN_SBATCH = Path(__file__).parents[3] / "infra" / "slurm" / "run.sbatch"
CHOICE = Choice(value=2, reason="the fastest")
HOLDER = """
import sys, time
from pathlib import Path
from paceline.tasks.data.prepare import store
assert store.find(Path(sys.argv[1]), sys.argv[2])
print("held", flush=True)
time.sleep(600)
"""


class Home:
    """A home with sets, runs and models, written by the functions that runs call."""

    def __init__(self, root):
        self.root = root
        self.uri = f"sqlite:///{root}/mlflow.db"
        self.experiment = check_store(self.uri, "paceline", (root / "artifacts").as_uri())
        self.client = MlflowClient(self.uri, self.uri)

    def add_set(self, letter):
        """A prepared set whose key is one digit."""
        key, data = letter * 64, Data(source="digits", image_size=8)
        with store.temporary(self.root, key) as directory:
            records = write_shards(list(ChunkPlanner(source.list_samples(data), data, directory).chunks()))
            facts = manifest.build(source.list_samples(data), data, key, records, 0)
            return self.let_go(store.publish(self.root, directory, facts, []), manifest.MANIFEST)

    def let_go(self, path, name=None):
        """End the hold of this process, which published it."""
        while files._held:
            os.close(files._held.popitem()[1])
        return path

    def add_run(self, prepared, status="FINISHED", role="run", pretrained=None, kind="prepared", **tags):
        """A run of MLflow with the files of a training on a prepared set; its directory."""
        config = load("digits", [] if pretrained is None else [f"model.pretrained={pretrained}"])
        handle = tracking.begin(self.uri, self.experiment, config, {Tag.ROLE: role, **tags})
        tracking.log_config(handle, config)
        directory = self.root / "runs" / handle.run_id
        rank = directory / "attempt-0" / "rank-0"
        rank.mkdir(parents=True)
        (directory / "checkpoints").mkdir()
        spec = {kind: {"path": str(prepared)}, "pretrained": pretrained and {"path": str(pretrained)}}
        (rank / "spec.json").write_text(json.dumps(spec))
        (rank / "log.txt").write_text("epoch 1\n")
        (rank / "weights.pt").write_bytes(bytes(5000))
        for step in (10, 20):
            write_with_digest(checkpoint_path(directory / "checkpoints", step), {"step": step}, directory / "attempt-0")
        with run_lock(directory):
            pass
        if status != "RUNNING":
            tracking.finish(handle, status)
        return directory

    def add_model(self, text):
        """A cached model; its directory is named by its digest."""
        directory = self.root / "models" / hashlib.sha256(text.encode()).hexdigest()
        directory.mkdir(parents=True)
        for name in ("model.json", "weights.pt"):
            (directory / name).write_text(text)
        return directory

    def register(self, directory, digest, alias=None):
        """Make a run's model a version of `digits`."""
        if not self.client.search_registered_models("name = 'digits'"):
            self.client.create_registered_model("digits")
        self.client.set_tag(directory.name, Tag.MODEL_DIGEST, digest)
        version = self.client.create_model_version("digits", f"runs:/{directory.name}/model", directory.name)
        if alias:
            self.client.set_registered_model_alias("digits", alias, version.version)
        return version.version

    def survey(self, keep=0, older_than=0.0):
        return survey(self.root, take_inventory(self.uri), keep, older_than)

    def clean(self, **options):
        """Clean up; for each path that stays the reason."""
        done = clean_home(self.root, self.uri, **{"keep": 0, "older_than": 0.0} | options)
        return {item.path: item.stays for item in done.items if item.stays}


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A home with an empty store, which takes a second to make."""
    return Home(tmp_path_factory.mktemp("template")).root


@pytest.fixture
def home(template, tmp_path, monkeypatch):
    root = tmp_path / "home"
    shutil.copytree(template, root)
    monkeypatch.setenv("PACELINE_HOME", str(root))
    return Home(root)


def left(directory):
    return sorted(path.name for path in directory.iterdir()) if directory.exists() else []


def test_what_nothing_needs_is_removed_and_all_else_stays_with_its_reason(home):
    old, new, spare = (home.add_set(letter) for letter in "abc")
    finished = home.add_run(old)
    champion = home.add_run(old, champion="yes")
    home.register(champion, "f" * 64, alias="champion")
    unfinished, stranger = home.add_run(new, "FAILED"), home.root / "runs" / ("e" * 32)
    deleted, newest = home.add_run(spare), home.add_run(new)
    shutil.copytree(finished, stranger)
    home.client.delete_run(deleted.name)
    registered, unused = home.add_model("registered"), home.add_model("unused")
    home.register(newest, registered.name)
    (home.root / "compiled" / "torch-1.0").mkdir(parents=True)
    (home.root / "prepared" / ".damaged-x").mkdir()
    damaged = unfinished / "checkpoints" / "step-5.ckpt.damaged"
    damaged.write_bytes(bytes(9000))

    planned = home.clean(keep=1)
    assert (not spare.exists(), deleted.exists(), finished.exists(), unused.exists(), damaged.exists()) == (True,) + (
        False,
    ) * 4
    assert left(home.root / "prepared") == [old.name, new.name]
    assert left(home.root / "compiled") == []
    assert left(newest) == ["attempt-0", "lock"], "checkpoints of a finished run go, what can be read stays"
    assert newest_valid_checkpoint(unfinished / "checkpoints").name == "step-0000000020.ckpt"
    assert planned[str(newest)] == "one of the 1 newest runs needs it"
    assert planned[str(champion)] == planned[str(champion / "checkpoints")] == "models:/digits@champion needs it"
    assert planned[str(unfinished / "checkpoints")] == "an unfinished run needs it"
    assert planned[str(stranger)] == "a run that MLflow does not know needs it"
    assert planned[str(registered)] == "models:/digits/2 needs it"
    assert planned[str(old)] in {"models:/digits@champion needs it", "a run that MLflow does not know needs it"}
    assert store.verify(old) == store.verify(new) == ()


def test_the_files_of_a_model_checkpoint_stay_until_their_run_is_deleted(home):
    def add():
        run = home.add_run("none")
        best = run / FileLogger(None, run, run.name).name / run.name / "checkpoints" / "best.ckpt"
        best.parent.mkdir(parents=True)
        best.write_bytes(bytes(70_000))
        (run / "code").mkdir()
        (run / "code" / "lit.py").write_text("import lightning")
        for folder in (run / "code", best.parent):
            for name in ("weights.pt", "old.damaged"):  # names that are Paceline's own elsewhere in the run
                (folder / name).write_bytes(bytes(9000))
        return run, best

    (run, best), (deleted, _) = add(), add()
    home.client.delete_run(deleted.name)
    sizes = disk_use(run)
    items = [item for item in home.survey() if Path(item.path).is_relative_to(run)]
    assert sum(item.num_bytes for item in items) == sizes.total()
    reasons = home.clean()
    expected = {"paceline": "a ModelCheckpoint of yours saved it", "code": "a kept model needs it"}
    assert reasons == {str(run / name): reason for name, reason in expected.items()}
    assert best.stat().st_size == 70_000
    assert left(best.parent) == ["best.ckpt", "old.damaged", "weights.pt"]
    assert left(run / "code") == ["lit.py", "old.damaged", "weights.pt"]
    assert left(run) == ["code", "lock", "paceline"]
    assert not deleted.exists()
    assert {(item.kind, item.num_bytes) for item in home.survey()} == {
        ("checkpoints", sizes["paceline"]),
        ("logs", sizes["code"]),
    }
    assert home.clean() == reasons


def test_a_dry_run_removes_nothing_and_an_age_spares_what_is_new(home, capfd):
    path, run = home.add_set("a"), home.add_run("none")
    assert cli.main(["clean", "--dry-run", "--keep", "0", "--json"]) == 0
    planned = told_by("clean", capfd.readouterr().out)
    assert planned["dry_run"]
    assert planned["freed_bytes"] > 0
    assert path.exists()
    assert (run / "checkpoints").exists()
    assert home.clean(older_than=1.0)[str(path)] == "it changed in the last 1 days"
    long_ago = time.time() - 2 * 24 * 3600
    os.utime(path / manifest.MANIFEST, (long_ago, long_ago))
    for file in (path, *path.rglob("*")):
        os.utime(file, (long_ago, long_ago))
    assert str(path) not in home.clean(older_than=1.0)
    assert not path.exists()


def test_the_result_of_a_search_stays_while_runs_use_it(home):
    used, unused = (files.MeasurementCache(home.root, {"device": name}, Choice) for name in ("this", "another"))
    long_ago = time.time() - 40 * 24 * 3600
    for cache in (used, unused):
        cache.keep(CHOICE)
    for path in (home.root / "searches").iterdir():
        os.utime(path, (long_ago, long_ago))
    assert used.find() == CHOICE
    assert set(home.clean().values()) == {"it changed in the last 30 days"}
    assert (used.find(), unused.find()) == (CHOICE, None)


def test_a_set_a_run_and_a_copy_that_processes_use_stay_until_they_end(home):
    path, run, copy = home.add_set("a"), home.add_run("none"), home.root / "pretrained" / "0.pt"
    copy.parent.mkdir()
    copy.write_bytes(b"weights")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(home.root), "a" * 64], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "held\n"
        assert hold(copy)
        with run_lock(run):
            reasons = home.clean()
        held = {str(path), str(copy), str(run), str(run / "checkpoints")}
        assert held <= {name for name, reason in reasons.items() if reason == "a running process needs it"}
        assert store.verify(path) == ()
    finally:
        holder.kill()
        holder.communicate()
    home.let_go(copy)
    assert home.clean() == {}
    assert not path.exists()
    assert not run.exists()
    assert not copy.exists()


def test_the_code_and_the_checkpoints_that_a_prediction_reads_stay_until_it_ends(home):
    study = home.add_run("none", role="study")
    runs = [home.add_run("none"), home.add_run("none", role="arm", **{Tag.PARENT: study.name})]
    predictions = [home.add_run("none", role="predict", **{Tag.MODEL: run.name}) for run in runs]
    for run in runs:
        (run / "code").mkdir()
        (run / "code" / "lit.py").write_text("import lightning")
    with run_lock(predictions[0]), run_lock(predictions[1]):
        home.clean()
    for run in runs:
        assert left(run / "code") == ["lit.py"]
        assert newest_valid_checkpoint(run / "checkpoints") is not None
    assert home.clean() == {}
    assert left(home.root / "runs") == []


def test_the_partitions_of_an_unfinished_run_stay(home):
    path, unused = home.add_set("a"), home.add_set("b")
    home.add_run(path, "FAILED", kind="partitions")
    assert home.clean()[str(path)] == "an unfinished run needs it"
    assert (path.exists(), unused.exists()) == (True, False)


def test_a_file_of_the_user_may_have_the_name_of_a_specification(home):
    path = home.add_set("a")
    run = home.add_run(path, "FAILED")
    contents = ("[1]", '{"prepared": true}', '{"prepared": {"path": 1}}', '{"prepared": {"name": "a"}}')
    for folder in ("code", "paceline", "attempt-0"):
        for number, content in enumerate(contents):
            place = run / folder / str(number) / "spec.json"
            place.parent.mkdir(parents=True)
            place.write_text(content)
    assert home.clean()[str(path)] == "an unfinished run needs it"


def test_a_set_that_goes_while_it_is_looked_for_is_not_used(home):
    path = home.add_set("a")
    (item,) = [item for item in home.survey() if item.path == str(path)]
    assert store.find(home.root, "a" * 64) is not None
    assert remove([item])[0].stays == "a running process needs it"
    home.let_go(path)
    assert remove([item])[0].stays is None
    assert store.find(home.root, "a" * 64) is None
    assert not hold(path / manifest.MANIFEST)


def test_checkpoints_that_an_unfinished_run_starts_from_stay(home):
    source = home.add_run("none")
    checkpoint = newest_valid_checkpoint(source / "checkpoints")
    home.add_run("none", "KILLED", pretrained=checkpoint)
    home.clean()
    assert checkpoint.exists()


def test_the_arms_of_a_study_share_its_fate(home):
    study = home.add_run("none", "KILLED", role="study")
    arm = home.add_run("none", role="arm", **{Tag.PARENT: study.name})
    home.clean()
    assert newest_valid_checkpoint(arm / "checkpoints") is not None
    home.client.set_terminated(study.name, "FINISHED")
    assert home.clean() == {}
    assert left(home.root / "runs") == []


def in_a_child(work, at_each=lambda number: None):
    """Call a function in a forked process, and another one before each change of a file; the exit status."""
    pid = os.fork()
    if pid == 0:
        number, busy = 0, False

        def hook(event, _):
            nonlocal number, busy
            if not busy and event in ("os.rename", "os.remove", "os.rmdir", "os.truncate"):
                busy, number = True, number + 1
                at_each(number)
                busy = False

        sys.addaudithook(hook)
        try:
            work()
        finally:
            os._exit(0 if sys.exc_info()[0] is None else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def check_sound(home):
    """All sets are complete or absent, and all checkpoints can be resumed from, or are absent."""
    for path in (home.root / "prepared").glob("[!.]*"):
        assert store.verify(path) == (), path
    for run in (home.root / "runs").glob("[!.]*"):
        directory = run / "checkpoints"
        assert not directory.exists() or newest_valid_checkpoint(directory).name == "step-0000000020.ckpt"


def test_a_kill_at_any_point_leaves_valid_stores(home):
    home.add_run(home.add_set("a"))
    home.add_model("unused")
    inventory, num_kills = take_inventory(home.uri), 0

    def die(number):
        if number == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    while in_a_child(lambda: remove(survey(home.root, inventory, 0, 0.0)), die) == -signal.SIGKILL:
        num_kills += 1
        assert num_kills < 200, "a clean-up comes no further"
        check_sound(home)
    assert num_kills > 10
    assert [left(home.root / name) for name in ("prepared", "runs", "models")] == [[], [], []]


def test_a_disk_that_is_full_and_fills_up_again_is_cleaned_up(template, tmp_path, monkeypatch):
    with small_disk(tmp_path / "home", megabytes=40) as filler:
        shutil.copytree(template, tmp_path / "home", dirs_exist_ok=True)
        home = Home(tmp_path / "home")
        kept = home.add_set("a")
        home.add_run(kept, "FAILED")
        gone = [home.add_set("b"), home.add_run("none")]
        log = home.root / "services" / "logs" / "mlflow.log"
        log.parent.mkdir(parents=True)
        log.write_bytes(bytes(LONG_LOG) + b"end")
        fill(filler)
        others = iter(range(10**6))
        status = in_a_child(home.clean, lambda _: fill(tmp_path / "home" / f"filler-{next(others)}"))
        assert status == 0
        assert [path.exists() for path in gone] == [False, False]
        assert log.stat().st_size > LONG_LOG, "its end could not be saved"
        check_sound(home)
        assert store.verify(kept) == ()
        for file in home.root.glob("filler*"):
            file.unlink()
        home.clean()
        assert log.stat().st_size == 0
        end = log.with_suffix(".log.1").read_bytes()
        assert (len(end), end[-3:]) == (LOG_END, b"end")


@pytest.mark.parametrize(
    ("arguments", "setting", "value"),
    [(["--keep", "-1"], "--keep", "-1"), (["--older-than", "nan"], "--older-than", "nan")],
)
def test_a_number_that_makes_no_sense_is_refused(home, capfd, arguments, setting, value):
    path = home.add_set("a")
    assert cli.main(["clean", *arguments, "--json"]) == 2
    said = told_by("clean", capfd.readouterr().out)
    assert said["setting"] == setting
    assert value in said["error"]
    assert said["hint"].startswith(f"use {setting} ")
    assert path.exists()


def test_without_mlflow_nothing_is_removed(home, monkeypatch):
    path = home.add_set("a")
    with refused("MLFLOW_TRACKING_URI", "http://127.0.0.1:9"):
        clean_home(home.root, "http://127.0.0.1:9", 0, 0.0)
    assert path.exists()


@pytest.mark.slow
def test_deleted_runs_leave_mlflow_after_a_month(home):
    old, young = home.add_run("none"), home.add_run("none")
    for run in (old, young):
        home.client.log_text(run.name, "text", "note.txt")
        home.client.delete_run(run.name)
    with closing(sqlite3.connect(home.root / "mlflow.db")) as connection:
        change = "UPDATE runs SET deleted_time = deleted_time - 31 * 86400000 WHERE run_uuid = ?"
        connection.execute(change, (old.name,))
        connection.commit()
    assert remove_deleted_runs(home.uri, None).startswith("removed 1 deleted runs; 1 of the last 30 days stay")
    assert take_inventory(home.uri).deleted == {young.name}
    assert not list((home.root / "artifacts").glob(f"**/{old.name}/**/note.txt"))
    assert remove_deleted_runs("http://127.0.0.1:9", None).startswith("skipped: set MLFLOW_BACKEND_STORE_URI")


def test_a_deleted_run_with_a_registered_model_stays_in_mlflow(home):
    kept = home.add_run("none")
    home.register(kept, "0" * 64)
    home.client.delete_run(kept.name)
    assert f"the deleted run {kept.name} has the model models:/digits/1" in remove_deleted_runs(home.uri, None)


def test_a_champion_whose_run_was_deleted_stays(home):
    champion = home.add_run("none")
    copy = home.add_model("champion")
    home.register(champion, copy.name, "champion")
    home.client.delete_run(champion.name)
    stays = home.clean()
    assert {stays[str(path)] for path in (copy, champion)} == {"models:/digits@champion needs it"}
    assert (copy / "weights.pt").exists()


def test_a_registered_model_stays_though_an_older_run_has_the_same_weights(home):
    older, registered = home.add_run("none"), home.add_run("none")
    copy = home.add_model("the same")
    home.client.set_tag(older.name, Tag.MODEL_DIGEST, copy.name)
    home.register(registered, copy.name)
    assert home.clean()[str(copy)] == "models:/digits/1 needs it"
    assert (copy / "weights.pt").exists()


def test_the_directory_of_a_slurm_job_stays_until_the_job_ends(home):
    job, ended = (home.root / "slurm" / number for number in ("17", "16"))
    for directory in (job, ended):
        (directory / "tls").mkdir(parents=True)
        (directory / "tls" / "key.pem").write_text("key")
    locks = next(line for line in RUN_SBATCH.read_text().splitlines() if "flock" in line)
    with subprocess.Popen(
        ["bash", "-c", f"state=$0\n{locks}\necho ready; read", job],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "ready\n"
        assert home.clean()[str(job)] == "a running process needs it"
        assert not ended.exists()
        process.stdin.close()
    home.clean()
    assert not job.exists()


def test_a_run_that_would_fill_the_disk_is_refused_before_any_work(home, capfd):
    (home.root / "mlflow.db").unlink()
    assert cli.main(["run", "digits", "limits.min_free_gib=1000000", "--json"]) == 2
    said = told_by("clean", capfd.readouterr().out)
    assert (said["setting"], said["hint"]) == ("limits.min_free_gib", "free space with: paceline clean")
    assert "prepared set 0.00" in said["error"]
    assert not (home.root / "prepared").exists()


MANY = {
    "study": ["--axis", "recipe.learning_rate=0.1,0.2", "--repeats", "1000000"],
    "sweep": ["--param", "recipe.learning_rate=log(0.01,1)", "--trials", "1000000"],
}


@pytest.mark.parametrize("command", MANY)
def test_trainings_that_would_fill_the_disk_together_are_refused_before_any_work(home, capfd, command):
    assert cli.main([command, "digits", *MANY[command], "model.width=160", "limits.min_free_gib=0", "--json"]) == 2
    said = told_by(command, capfd.readouterr().out)
    assert said["setting"] == "limits.min_free_gib"
    assert "(checkpoints of all tr" in said["error"]
    assert not (home.root / "prepared").exists()


def test_a_resumed_study_has_some_of_its_checkpoints_already(home):
    config = load("digits", ["model.width=160", "limits.min_free_gib=0"])
    axes = {"recipe.learning_rate": ["0.1", "0.2"]}
    request = StudyRequest(preset="digits", config=config, axes=axes, repeats=10**6)
    assert len(check_study(request, Environment(), resume="one")) == 2
    with refused("limits.min_free_gib"):
        check_study(request, Environment())


def test_a_prediction_onto_a_full_disk_is_refused_before_any_work(home, capfd):
    save_model(home.root / "model", load("digits").model, tuple("0123456789"), (8, 8, 1))
    out = home.root / "out"
    full = ["limits.min_free_gib=1000000", "--out", str(out), "--json"]
    assert cli.main(["predict", str(home.root / "model"), "digits", *full]) == 2
    assert told_by("predict", capfd.readouterr().out)["setting"] == "limits.min_free_gib"
    assert not out.exists()


def test_a_full_disk_of_out_alone_is_not_to_be_cleaned_up(home, tmp_path):
    with small_disk(tmp_path / "small", megabytes=16) as filler, refused("limits.min_free_gib") as error:
        require_room(load("digits", ["limits.min_free_gib=0.1"]), filler.parent / "out", Environment())
    assert f"--out={filler.parent}/out has 0.02 GiB free" in str(error.value)
    assert error.value.hint == (
        f"delete files on the disk of {filler.parent}/out, or give a directory on another disk with --out DIR"
    )


def test_the_trainings_that_are_left_are_as_large_as_those_before(home):
    config, site = load("digits", ["limits.min_free_gib=0"]), Environment()
    (home.root / "runs" / "one").mkdir(parents=True)
    (home.root / "runs" / "one" / "weights.pt").write_bytes(bytes(10**6))
    require_space_for_rest(config, site, [(["one", None], 3)])
    with refused("limits.min_free_gib", kind=RunError):
        require_space_for_rest(config, site, [(["one", None], 10**7)])
    with refused("limits.min_free_gib", kind=RunError):  # as many are of unknown size
        require_space_for_rest(config, site, [(["one", None], 10**7), ([], 10**7)])
    full = load("digits", ["limits.min_free_gib=1000000"])
    require_space_for_rest(full, site, [(["one", None], 0)])
    with refused("limits.min_free_gib", kind=RunError) as unknown:
        require_space_for_rest(full, site, [([None], 5)])
    assert "needs space (5 further trainings of unknown size)" in str(unknown.value)
    with refused("limits.min_free_gib", kind=RunError) as some:
        require_space_for_rest(full, site, [(["one", None], 3), ([], 5)])
    assert "about 0.00 GiB (3 further trainings 0.00, 5 further trainings of unknown size)" in str(some.value)


def test_the_trainings_that_are_left_of_a_small_arm_are_small(home):
    request = StudyRequest(preset="digits", config=load("digits", ["limits.min_free_gib=0"]), repeats=2)
    work = StudyContext(request, Environment(), "", None, {}, Ledger(home.root / "arms.jsonl"))
    for name, num_bytes in (("small", 10**6), ("large", 10**13)):  # sparse
        (home.root / "runs" / name).mkdir(parents=True)
        with (home.root / "runs" / name / "weights.pt").open("wb") as file:
            file.truncate(num_bytes)
        work.ledger.add(ArmRun(arm=name, repeat=0, position=0, run_id=name))
    with refused("limits.min_free_gib", kind=RunError):
        _require_space(work, ["small", "large"])
    work.ledger.add(ArmRun(arm="large", repeat=1, position=1, run_id="large"))
    _require_space(work, ["small", "large"])


def test_the_need_of_a_run_is_its_set_and_its_checkpoints(template, tmp_path, monkeypatch):
    with small_disk(tmp_path / "home", megabytes=64) as filler:
        monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
        site = Environment()
        small, large = (load("digits", ["limits.min_free_gib=0.01", f"model.width={width}"]) for width in (4, 128))
        listing = describe(small.stored_data)
        checkpoints = check_space(small, listing, site)
        assert 0 < sum(checkpoints) < 10**6
        assert checkpoints.kept > 2 * checkpoints.written
        with refused("limits.min_free_gib", "limits.min_free_gib=0.01"):
            check_space(large, listing, site)
        huge = listing.model_copy(update={"sizes": {listing.key: 10**9}})
        with refused("limits.min_free_gib"):
            check_space(small, huge, site)
        store.directory_of(site.root, listing.key).mkdir(parents=True)
        assert check_space(small, huge, site) == checkpoints, "a set that is prepared takes no more space"
        assert "checkpoints 0.00" in require_space(small.limits, site.root, {"checkpoints": sum(checkpoints)})
        fill(filler)
        with refused("limits.min_free_gib"):
            require_space(small.limits, site.root, {"checkpoints": sum(checkpoints)})
        with refused("limits.min_free_gib", kind=RunError):
            require_space(small.limits, site.root, {}, RunError)


def test_the_doctor_reports_that_runs_are_refused(tmp_path):
    (state,) = [found for found in examine_host(tmp_path, tmp_path, 1e6) if found.check == "state"]
    assert (state.status, state.remedy) == ("error", "paceline clean")
    assert "limits.min_free_gib=1e+06" in state.found


@pytest.mark.slow
def test_a_clean_up_during_a_run_takes_nothing_from_it(program, tmp_path):
    """Also the estimates of the space that a run needs are compared with what it takes."""
    settings = [*SHORT, "speedup.baseline=none", "recipe.num_epochs=3"]
    environment = {"PACELINE_HOME": str(tmp_path / "home"), "PREFECT_HOME": str(tmp_path / "prefect")}
    clean = ("clean", "--keep", "0", "--json")
    process = program("run", "digits", *settings, "--json", **environment)
    until(lambda: list(tmp_path.glob("home/prepared/[!.]*")), "prepared set", process=process)
    num_cleaned, reasons = 0, set()
    while process.poll() is None:
        out, said = program(*clean, **environment).communicate(timeout=120)
        assert out, said
        reasons |= {item["stays"] for item in told_by("clean", out)["items"]}
        num_cleaned += 1
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert num_cleaned > 1
    assert "a running process needs it" in reasons
    summary = told_by("run", stdout)
    out, _ = program(*clean, **environment).communicate(timeout=120)
    assert left(tmp_path / "home" / "prepared") == left(tmp_path / "home" / "runs") == []
    again = program("run", "digits", *settings, "--json", **environment)
    stdout, stderr = again.communicate(timeout=240)
    assert again.returncode == 0, stderr
    assert told_by("run", stdout)["dataset"]["fingerprint"] == summary["dataset"]["fingerprint"]
    (checkpoints,) = tmp_path.glob("home/runs/*/checkpoints")
    (prepared,) = tmp_path.glob("home/prepared/[!.]*")
    config = load("digits", settings)
    listing = describe(config.stored_data)
    num_bytes = sum(path.stat().st_size for path in prepared.rglob("*.npy"))
    assert next(iter(listing.sizes.values())) == pytest.approx(num_bytes, rel=0.2)
    largest = max(path.stat().st_size for path in checkpoints.glob("*.ckpt"))
    assert 2 * largest < sum(_checkpoint_bytes(config, listing)) < 6 * largest


@pytest.mark.slow
def test_the_clean_up_is_a_deployment_of_its_own(paceline, prefect_url, home):
    path = home.add_set("a")
    served = paceline("serve", "--clean", PREFECT_RUNNER_POLL_FREQUENCY="1", PACELINE_HOME=str(home.root))
    try:
        api = Deployments(prefect_url)
        name = f"paceline-clean/{os.uname().nodename}"
        deployment = until(lambda: api.find(name), "deployment", process=served)
        assert deployment["schedules"][0]["schedule"]["cron"] == "0 6 * * 0"
        run = api.begin(deployment, {"keep": 0})
        assert api.end_of(run)["type"] == "COMPLETED", api.state(run)
        assert not path.exists()
    finally:
        served.terminate()
        served.communicate(timeout=60)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_thirty_growing_data_sets_leave_what_the_newest_runs_need(program, tmp_path):
    """A data set that grows every night, and a clean-up after each run."""
    environment = {"PACELINE_HOME": str(tmp_path / "home"), "PREFECT_HOME": str(tmp_path / "prefect")}
    settings = [*SHORT, "speedup.baseline=none", "recipe.batch_size=8", f"data.root={tmp_path}/images"]
    home, of_mlflow = tmp_path / "home", {"mlflow.db", "mlflow.db.lock", "mlartifacts"}
    prepared, used, sizes = home / "prepared", [], []
    random = np.random.default_rng(0)
    for night in range(30):
        for number in range(20):
            path = tmp_path / "images" / ("a", "b")[number % 2] / f"{night}-{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(random.integers(0, 256, (16, 16, 3), np.uint8)).save(path)
        for command in (["run", "folder", *settings], ["clean", "--keep", "2"]):
            process = program(*command, **environment)
            said = process.communicate(timeout=120)
            assert process.returncode == 0, said
        (newest,) = {path.name for path in prepared.iterdir()} - set(used)
        used.append(newest)
        assert set(left(prepared)) == set(used[-2:])
        assert len(left(home / "runs")) <= 2, "logs of the newest runs"
        assert list(tmp_path.glob("home/runs/*/checkpoints")) == [], "checkpoints of finished runs"
        assert len(left(home / "searches")) <= night + 2, "one of the device, one of each data set"
        sizes.append(disk_use(home))
        sys.stdout.write(f"night {night}: {sizes[-1].total()} bytes: {dict(sizes[-1])}\n")
        assert sizes[-1].keys() <= {*of_mlflow, "prepared", "runs", "searches"}, "all else is cleaned up"
    for place, most in (("prepared", 2.5), ("runs", 3)):  # twice as many images; with or without a search
        middle, last = (max(size[place] for size in part) for part in (sizes[5:15], sizes[20:]))
        assert last < most * middle, (place, sizes)
