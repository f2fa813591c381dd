"""Own Lightning code: the losses of `python main.py fit`, names in MLflow, a killed rank, and what is refused."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from mlflow.tracking import MlflowClient

from paceline.conf.environment import Environment
from paceline.tasks.cluster.client import connect
from paceline.tasks.train.launch.device_lock import LockHolder
from tests.support.jobs import PLANTED
from tests.support.outputs import told_by
from tests.support.own_lightning import (
    PACKAGE,
    SMALL,
    ranks_of,
    values_of_run,
    values_of_script,
    wait_for_checkpoint,
)
from tests.support.own_package import install
from tests.support.scratch_cluster import ScratchCluster

pytest.importorskip("jsonargparse", reason="LightningCLI needs it; infra/install brings it")

NUM_BATCHES = {1: 2 * 18, 2: 2 * 9}
NO_PROBE = "speedup.baseline=none"
PROBE = ["speedup.baseline=probe", "speedup.max_seconds=8"]
DDP = ["trainer.devices=2", "trainer.strategy=ddp"]


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    """A copy of the directory of the package, as its author has it."""
    directory = tmp_path_factory.mktemp("text") / "prose"
    shutil.copytree(PACKAGE, directory)
    return directory


def train_plainly(code, directory, *overrides):
    """Losses and validation losses of the plain script, by step."""
    data = f"data.init_args.directory={directory / 'data'}"
    values = values_of_script(code, "config.yaml", directory, *SMALL, data, *overrides)
    return {name: values[name] for name in ("train_loss", "val_loss")}


def worker_of_rank(run_id, number):
    """Process id of the Dask worker of a rank, by the lock of its device."""
    holders = (LockHolder.model_validate_json(path.read_text()) for path in Environment().leases.glob("*.lease"))
    (pid,) = (holder.pid for holder in holders if (holder.run_id, holder.rank) == (run_id, number))
    return pid


def curves(run_id):
    return values_of_run(run_id, ("train_loss", "val_loss", "lr-AdamW"))


@pytest.fixture
def run(paceline, code, tmp_path):
    """Starts the program on the package's own file."""

    def start(*overrides, config="config.yaml"):
        data = f"data.init_args.directory={tmp_path / 'data'}"
        quiet = [*SMALL, data, NO_PROBE]
        return paceline("run", str(code / config), "--code", str(code), "--json", *quiet, *overrides)

    return start


def summary_of(process):
    out, said = process.communicate(timeout=200)
    assert process.returncode == 0, said
    return told_by(process.args[3], out)


@pytest.mark.slow
def test_one_rank_has_the_losses_of_the_script_and_an_account_of_its_time(run, code, tmp_path):
    plain = train_plainly(code, tmp_path)
    process = run()
    out, said = process.communicate(timeout=200)
    assert process.returncode == 0, said
    summary = told_by(process.args[3], out)
    lines = re.findall(r"Epoch (\d+): .*val_loss (\S+)", said)
    assert lines
    for epoch, loss in lines:
        assert float(loss) == float(f"{plain['val_loss'][int(epoch) - 1]:.4g}"), f"epoch {epoch}"
    own = curves(summary["run_id"])
    assert own["train_loss"] == plain["train_loss"]
    assert own["val_loss"] == plain["val_loss"]
    assert len(own["train_loss"]) == NUM_BATCHES[1] == len(own["lr-AdamW"])
    budget = summary["time_budget"]
    assert {"data_wait", "forward", "backward", "optimizer", "validation", "checkpoint"} <= budget.keys()
    assert abs(summary["train"]["clock_difference"]) < 0.05
    assert summary["train"]["units_per_second"]["tokens"] > 10 * summary["train"]["samples_per_second"] > 0
    assert summary["packages"][0].startswith("directory (code ")
    assert summary["speedup"]["verdict"] == "not measured: the run had no probe"


@pytest.mark.slow
def test_a_diagnosis_names_the_precision_and_leaves_the_losses_as_they_are(run, code, tmp_path):
    plain = train_plainly(code, tmp_path)
    summary = summary_of(run(*PROBE, "speedup.diagnose=true"))
    own = curves(summary["run_id"])
    assert own["train_loss"] == plain["train_loss"]
    assert own["val_loss"] == plain["val_loss"]
    speedup, budget = summary["speedup"], summary["time_budget"]
    assert speedup["cause"] is not None
    assert speedup["candidate_samples_per_second"] > 0
    assert {"input", "update", "overhead", "compute"} == speedup["shares"].keys()
    assert speedup["headline"] == "naive"
    assert speedup["ratios"]["competent"]["meaning"].endswith("no such loop for own Lightning code")
    assert sum(budget.values()) == pytest.approx(summary["train"]["wall_seconds"], rel=0.05)
    assert budget["probe"] > budget["forward"]
    stored = MlflowClient(Environment().tracking_uri).get_run(summary["run_id"]).data
    assert stored.metrics["speedup/ratio"] == speedup["ratio"]
    assert stored.metrics["speedup/share_input"] == speedup["shares"]["input"][0]
    assert stored.tags["paceline.verdict"] == speedup["verdict"]
    assert stored.tags["paceline.baseline"].startswith("1 device, 32-true")


@pytest.mark.slow
def test_a_compiled_module_in_the_faster_precision_learns_as_the_script(run, paceline, code, tmp_path):
    plain = train_plainly(code, tmp_path)
    keep = ("trainer.callbacks+=ModelCheckpoint", "trainer.callbacks.every_n_train_steps=4")
    summary = summary_of(run("execution.precision=auto", "execution.compile=step", *keep))
    own = curves(summary["run_id"])["train_loss"]
    assert own == pytest.approx(plain["train_loss"], rel=0.05)
    assert summary["train"]["compile"]["num_graphs"] > 0
    assert summary["time_budget"]["search"] > 0
    precision = summary["execution"]["precision"]
    assert precision in ("32-true", "bf16-mixed")
    assert summary["execution"]["reasons"]["precision"]["value"] == precision
    (best,) = summary["train"]["best_models"]
    settings = (f"ckpt_path={best['path']}", "trainer.limit_predict_batches=1")
    shutil.rmtree(Environment().root / "runs" / summary["run_id"] / "checkpoints")
    predicted = summary_of(paceline("predict", summary["run_id"], *settings, "--json"))
    assert predicted["execution"]["precision"] == precision
    assert predicted["checkpoint"] == best["path"] != summary["train"]["checkpoint"]


@pytest.mark.slow
def test_two_ranks_are_compared_with_one_and_have_the_losses_of_ddp(run, code, tmp_path):
    plain = train_plainly(code, tmp_path, *DDP)
    summary = summary_of(run("execution.num_devices=2", *PROBE))
    own = curves(summary["run_id"])
    assert own["train_loss"] == plain["train_loss"]
    assert own["val_loss"] == plain["val_loss"]
    speedup = summary["speedup"]
    assert speedup["efficiency"] > 0
    assert speedup["equal_hardware"]["value"] > 0
    assert speedup["candidate"].startswith("2 devices")
    assert speedup["baseline"].startswith("1 device,")


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rank", "worker", "fork server"])
def test_two_ranks_have_the_losses_of_ddp_though_one_is_killed(run, code, tmp_path, victim):
    plain = train_plainly(code, tmp_path, *DDP)
    process = run("execution.num_devices=2", "execution.checkpoint_steps=4", "trainer.max_epochs=2")
    run_id = wait_for_checkpoint(process, "step-0000000004.ckpt")
    rank = ranks_of(process)[-1]
    found = {"rank": rank.pid, "worker": worker_of_rank(run_id, 1), "fork server": rank.ppid()}
    assert "paceline.tasks.train.launch.fork_server" in rank.cmdline()
    os.kill(found[victim], signal.SIGKILL)
    summary = summary_of(process)
    own = curves(summary["run_id"])
    assert len(summary["train"]["restarts"]) == 1
    assert own["train_loss"] == plain["train_loss"]
    assert len(own["train_loss"]) == NUM_BATCHES[2]
    assert own["val_loss"] == plain["val_loss"]


@pytest.mark.slow
def test_two_ranks_that_share_the_weights_learn_as_ddp_though_one_is_killed(run, code, tmp_path):
    wide = "model.init_args.width=192"  # a block has enough weights to be shared by itself
    plain = train_plainly(code, tmp_path, *DDP, wide)
    process = run("execution.num_devices=2", "execution.strategy=fsdp", "execution.checkpoint_steps=4", wide)
    wait_for_checkpoint(process, "step-0000000004.ckpt")
    ranks_of(process)[-1].send_signal(signal.SIGKILL)
    summary = summary_of(process)
    own = curves(summary["run_id"])
    assert len(summary["train"]["restarts"]) == 1
    assert own["train_loss"] == pytest.approx(plain["train_loss"], rel=1e-4)
    assert own["val_loss"] == pytest.approx(plain["val_loss"], rel=1e-4)
    options = [f"ckpt_path={summary['train']['checkpoint']}", "weights_only=true", "trainer.max_epochs=3", wide]
    assert len(train_plainly(code, tmp_path / "then", *options)["train_loss"]) == NUM_BATCHES[1] // 2


@pytest.mark.slow
def test_a_rank_killed_between_checkpoints_of_the_computed_interval_leaves_the_losses_of_ddp(
    run, code, tmp_path, monkeypatch
):
    plain = train_plainly(code, tmp_path, *DDP)
    planted = {
        "PYTHONPATH": f"{PLANTED}{os.pathsep}{os.environ['PYTHONPATH']}",
        "SAVE_SECONDS": "0",
        "SAVE_SHARE": "99",
    }
    for name, value in planted.items():
        monkeypatch.setenv(name, value)
    process = run("execution.num_devices=2", "trainer.max_epochs=2")
    wait_for_checkpoint(process, "step-*.ckpt")
    ranks_of(process)[-1].send_signal(signal.SIGKILL)
    out, said = process.communicate(timeout=200)
    assert process.returncode == 0, said
    summary = told_by("run", out)
    (restart,) = summary["train"]["restarts"]
    assert 0 < restart["first_step"] < NUM_BATCHES[2]
    assert curves(summary["run_id"])["train_loss"] == plain["train_loss"]
    assert "execution.checkpoint_steps=by cost: measured with the first checkpoint" in said
    assert "Young's interval is" in summary["execution"]["reasons"]["checkpoint_steps"]["reason"]
    assert "assumed); Young's interval is" in said


@pytest.mark.slow
def test_a_killed_flow_resumes_with_the_losses_of_the_script(run, paceline, code, tmp_path):
    plain = train_plainly(code, tmp_path)
    process = run("execution.checkpoint_steps=4")
    run_id = wait_for_checkpoint(process, "step-0000000004.ckpt")
    ranks = ranks_of(process)
    process.kill()
    process.communicate()
    assert not psutil.wait_procs(ranks, timeout=30)[1], "the ranks end with their flow"
    summary = summary_of(paceline("run", "--resume", run_id, "--json"))
    own = curves(run_id)
    assert summary["run_id"] == run_id
    assert summary["train"]["resumed_from"] is not None
    assert len(own["train_loss"]) == NUM_BATCHES[1]
    assert (own["train_loss"], own["val_loss"]) == (plain["train_loss"], plain["val_loss"])


@pytest.mark.slow
def test_a_plain_script_resumes_from_its_checkpoint(run, code, tmp_path):
    half = summary_of(run("trainer.max_epochs=1"))
    options = [f"ckpt_path={half['train']['checkpoint']}", "weights_only=true", "trainer.max_epochs=2"]
    resumed = train_plainly(code, tmp_path, *options)
    assert len(resumed["train_loss"]) == NUM_BATCHES[1] // 2


@pytest.mark.slow
def test_a_run_starts_from_the_checkpoint_of_a_plain_script(run, code, tmp_path):
    train_plainly(code, tmp_path / "first", "trainer.max_epochs=1")
    checkpoint = next((tmp_path / "first").rglob("*.ckpt"))
    plain = train_plainly(code, tmp_path / "then", f"ckpt_path={checkpoint}", "weights_only=true")
    summary = summary_of(run(f"ckpt_path={checkpoint}"))
    own = curves(summary["run_id"])
    assert len(own["train_loss"]) == NUM_BATCHES[1] // 2
    assert (own["train_loss"], own["val_loss"]) == (plain["train_loss"], plain["val_loss"])


ENDLESS = """
class Windows(torch.utils.data.IterableDataset):
    def __init__(self, *text):
        pass

    def __iter__(self):
        while True:
            yield {"bytes": torch.ones(64, dtype=torch.long), "next": torch.ones(64, dtype=torch.long)}
"""
STUCK = """
class Stuck(dict):
    def to(self, device, **how):
        raise RuntimeError("no such device")


def stuck(samples):
    return Stuck(torch.utils.data.default_collate(samples))
"""
LINES = """
class Lines:
    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return iter(self.loader)
"""
OLD = {"windows": "class Windows(Dataset)", "loader": ", num_workers=workers)"}


TRAINING = "return DataLoader(self.train, batch_size=size, shuffle=True, num_workers=workers)"
NO_ORDER = (", shuffle=True", "")


def refused(process):
    """The fault and the hint of a command that has refused its input."""
    out, said = process.communicate(timeout=120)
    assert process.returncode == 2, out + said
    fault, hint = (line for line in said.splitlines() if line.startswith(("error: ", "hint: ")))
    return fault, hint


@pytest.fixture
def change_code(tmp_path):
    """Makes a copy of the package with changes: by file, what is replaced by what."""

    def change(*changes):
        copied = tmp_path / "changed"
        shutil.copytree(PACKAGE, copied)
        for name, before, after in changes:
            text = (copied / name).read_text()
            assert before in text
            (copied / name).write_text(text.replace(before, after))
        return copied

    return change


def test_settings_of_presets_and_a_directory_without_code_are_refused_at_once(program, tmp_path):
    fault, hint = refused(program("run", str(PACKAGE / "config.yaml"), "--code", str(PACKAGE), "recipe.num_epochs=2"))
    assert "recipe.num_epochs is not a setting of your own" in fault
    assert "trainer.max_epochs" in hint
    fault, _ = refused(program("run", str(PACKAGE / "config.yaml"), "--code", str(tmp_path)))
    assert "holds no Python file" in fault


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "fault", "hint"),
    [
        (["model.class_path=prose.gpt.GTP"], "prose.gpt.GTP cannot be imported", "model.class_path=prose.gpt.GPT"),
        (["model.class_path=prosa.gpt.GPT"], "prosa.gpt.GPT cannot be imported", "check its name"),
        (["model.class_path=prose.gptt.GPT"], "prose.gptt.GPT cannot be imported", "check its name"),
        (["model.init_args.widht=8"], "model.init_args.widht is not an argument of prose.gpt.GPT", "width"),
        (["model.init_args.width=wide"], "model.init_args.width=wide must be of type int", "another value"),
        (["trainer.epochs=2"], "trainer.epochs", "trainer.epochs"),
        (["trainer.devices=2", "execution.num_devices=1"], "trainer.devices=2 conflicts with", "trainer.devices"),
        (["trainer.strategy=fsdp"], "trainer.strategy=fsdp cannot be used", "trainer.strategy=ddp"),
        (["track.on_regression=confirm"], "track.on_regression=confirm cannot be used", "track.on_regression=mark"),
        (["ckpt_path=none.ckpt"], "ckpt_path=none.ckpt is not a file", "ckpt_path=checkpoints/last.ckpt"),
        (
            [f"ckpt_path={PACKAGE / 'main.py'}"],
            "main.py is damaged, or no checkpoint",
            "Lightning's Trainer saved",
        ),
        (["speedup.starts=2"], "speedup.starts=2 cannot be used", "speedup.starts=0"),
    ],
)
def test_wrong_settings_are_refused_before_any_work(program, tmp_path, overrides, fault, hint):
    data = f"data.init_args.directory={tmp_path / 'data'}"
    process = program("run", str(PACKAGE / "config.yaml"), "--code", str(PACKAGE), *SMALL, data, *overrides)
    said = refused(process)
    assert fault in said[0]
    assert hint in said[1]
    assert not (tmp_path / "data").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "fault", "hint"),
    [
        ([("prose/gpt.py", 'return {"loss": loss}', "return None")], "training_step of GPT returned None", "loss"),
        (
            [
                ("prose/corpus.py", OLD["windows"], f"{ENDLESS}\n\nclass Before(Dataset)"),
                ("prose/corpus.py", *NO_ORDER),
            ],
            "the training loader has no length",
            "trainer.max_steps",
        ),
        (
            [
                ("prose/corpus.py", OLD["windows"], f"{LINES}\n\n{OLD['windows']}"),
                ("prose/corpus.py", TRAINING, f"return Lines({TRAINING.removeprefix('return ')})"),
            ],
            "the training loader has no length",
            "trainer.limit_train_batches",
        ),
        (
            [
                ("prose/corpus.py", OLD["windows"], f"{STUCK}\n\n{OLD['windows']}"),
                ("prose/corpus.py", OLD["loader"], f"{OLD['loader'][:-1]}, collate_fn=stuck)"),
            ],
            "a batch of type Stuck cannot be moved to cpu",
            "transfer_batch_to_device",
        ),
    ],
)
@pytest.mark.parametrize("speedup", [NO_PROBE, "speedup.max_seconds=100"], ids=["training", "probe"])
def test_code_that_cannot_be_trained_is_refused(paceline, change_code, tmp_path, changes, fault, hint, speedup):
    code, data = change_code(*changes), f"data.init_args.directory={tmp_path / 'data'}"
    process = paceline("run", str(code / "config.yaml"), "--code", str(code), *SMALL, data, speedup)
    said = refused(process)  # in less time than the measured rounds of a probe would take
    assert fault in said[0]
    assert hint in said[1]


@pytest.mark.slow
def test_data_are_prepared_once_and_again_after_a_restart(paceline, change_code, tmp_path):
    before = "part.replace(self.path)"
    code = change_code(("prose/corpus.py", before, f"{before}; self.path.with_suffix('.log').open('a').write('x')"))
    settings = [*SMALL, f"data.init_args.directory={tmp_path}", NO_PROBE, "execution.checkpoint_steps=4"]
    process = paceline("run", str(code / "config.yaml"), "--code", str(code), "--json", *settings)
    wait_for_checkpoint(process, "step-0000000004.ckpt")
    prepared = tmp_path / "topics.log"
    assert prepared.read_text() == "x"
    ranks_of(process)[-1].send_signal(signal.SIGKILL)
    assert len(summary_of(process)["train"]["restarts"]) == 1
    assert prepared.read_text() == "xx", "the host may have lost its files"


@pytest.mark.slow
def test_a_module_without_a_step_is_refused_before_any_work(program, change_code):
    code = change_code(("prose/gpt.py", "def training_step", "def train_step"))
    fault, hint = refused(program("run", str(code / "config.yaml"), "--code", str(code), *SMALL))
    assert "model.class_path=prose.gpt.GPT has no training_step" in fault
    assert "define training_step" in hint


@pytest.mark.slow
def test_code_that_differs_between_workers_is_refused_before_any_work(program, tmp_path, monkeypatch):
    for place in ("here", "there"):
        shutil.copytree(PACKAGE / "prose", tmp_path / place / "tomes")
    with (tmp_path / "there" / "tomes" / "gpt.py").open("a") as file:
        file.write("# another version\n")
    paths = os.environ["PYTHONPATH"]

    def import_from(place):
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path / place}{os.pathsep}{paths}")

    import_from("here")
    with ScratchCluster(1) as cluster:
        import_from("there")
        cluster.start_worker(1)
        with connect(cluster.address) as client:
            client.wait_for_workers(2, timeout=60)
        import_from("here")
        classes = ["model.class_path=tomes.gpt.GPT", "data.class_path=tomes.corpus.Corpus"]
        data = f"data.init_args.directory={tmp_path / 'data'}"
        address = ["cluster.kind=address", f"cluster.address={cluster.address}", "cluster.tls=off"]
        fault, hint = refused(program("run", "lightning", *classes, data, *address, "execution.num_devices=2"))
    assert "worker tcp://127.0.0.1:" in fault
    assert "has tomes (code " in fault
    assert "install the same on every host" in hint
    assert not (tmp_path / "data").exists()


@pytest.mark.slow
def test_classes_on_the_command_line_need_no_file(paceline, code, tmp_path):
    settings = yaml.safe_load((code / "config.yaml").read_text())
    overrides = [f"model.class_path={settings['model']['class_path']}", "data.class_path=prose.corpus.Corpus"]
    data = f"data.init_args.directory={tmp_path / 'data'}"
    small = [*SMALL, data, NO_PROBE, "trainer.max_steps=2", "trainer.limit_val_batches=0"]
    process = paceline("run", "lightning", "--code", str(code), "--json", *overrides, *small)
    assert summary_of(process)["train"]["num_batches"] == 2


def rows_of(summary):
    return [row for path in sorted(Path(summary["out"]).glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


@pytest.mark.slow
def test_a_package_is_registered_and_its_champion_continues_texts(paceline, tmp_path, monkeypatch):
    modules = {path.stem: path.read_text() for path in (PACKAGE / "prose").glob("*.py")}
    install(tmp_path / "site", "prose", modules)
    (tmp_path / "site" / "prose-1.0.dist-info" / "top_level.txt").write_text("prose\n")  # as setuptools writes it
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}{os.pathsep}{os.environ['PYTHONPATH']}")
    small = [*SMALL, f"data.init_args.directory={tmp_path / 'data'}", NO_PROBE, "trainer.max_epochs=1"]
    trained = summary_of(paceline("run", str(PACKAGE / "config.yaml"), "--json", *small, "track.register=prose"))
    run_id = trained["run_id"]
    assert trained["registered"]["version"] == "1"
    assert trained["packages"][0].startswith("prose 1.0 (code ")
    client = MlflowClient(Environment().tracking_uri)
    model = Path(client.download_artifacts(run_id, "model", str(tmp_path)))
    assert torch.load(model / "weights.pt", weights_only=True)["embed.weight"].shape == (256, 16)
    facts = json.loads((model / "model.json").read_text())
    assert facts["settings"]["model"]["class_path"] == "prose.gpt.GPT"
    assert facts["packages"] == trained["packages"]

    told = summary_of(paceline("predict", run_id, "--json"))
    assert told["columns"].keys() == {"prompt", "continuation", "probability"}
    assert told["num_samples"] == len(rows_of(told)) == 61
    assert told["checkpoint"].endswith("step-0000000018.ckpt")
    stored = client.get_run(told["run_id"]).data.metrics
    assert stored["throughput/prediction_samples_per_second"] == told["samples_per_second"] > 0
    champion = summary_of(paceline("predict", "models:/prose@champion", "--json", "--out", str(tmp_path / "out")))
    assert champion["model_digest"] is not None
    assert rows_of(champion) == rows_of(told)
    assert json.loads((tmp_path / "out" / "predictions.json").read_text())["is_complete"]

    prompts = ["data.class_path=prose.corpus.Prompts", "model.init_args.num_new_bytes=5"]
    asked = summary_of(paceline("predict", run_id, *prompts, "--json"))
    assert [(row["prompt"], len(row["probability"])) for row in rows_of(asked)] == [
        ("The import statement", 5),
        ("A class definition", 5),
    ]
    fault, _ = refused(paceline("predict", run_id, "model.init_args.depth=1", "--out", str(tmp_path / "out")))
    assert "--out" in fault


@pytest.mark.slow
def test_a_directory_of_code_predicts_by_its_copy_and_is_not_registered(run, paceline, code, tmp_path):
    fault, hint = refused(run("track.register=prose"))
    assert f"track.register=prose cannot be used with --code {code}" in fault
    assert "install your code as a package" in hint
    trained = summary_of(run("trainer.max_steps=2", "trainer.limit_val_batches=0"))
    assert trained["registered"] is None
    assert trained["packages"][0].startswith("directory (code ")
    (code / "prose" / "gpt.py").rename(code / "prose" / "moved.py")
    try:
        told = summary_of(paceline("predict", trained["run_id"], "trainer.limit_predict_batches=1", "--json"))
    finally:
        (code / "prose" / "moved.py").rename(code / "prose" / "gpt.py")
    assert told["num_samples"] == len(rows_of(told)) == 32

    module = Environment().root / "runs" / trained["run_id"] / "code" / "prose" / "gpt.py"
    failing = "def predict_step(self, *args):\n        raise KeyError(3)\n\n    def tell"
    module.write_text(module.read_text().replace("def predict_step", failing))
    with paceline("predict", trained["run_id"], "--out", str(tmp_path / "out")) as failed:
        assert "KeyError" in failed.communicate()[1]
    assert failed.returncode == 1
    assert json.loads((tmp_path / "out" / "predictions.json").read_text())["is_complete"] is False
    module.write_text(module.read_text().replace("def predict_step", "def fail"))
    fault, hint = refused(paceline("predict", trained["run_id"]))
    assert "model.class_path=prose.gpt.GPT has no predict_step" in fault
    assert "define predict_step" in hint
