"""Wrong input: exit status 2, the fault and a hint on two lines, and nothing left behind."""

from pathlib import Path

import psutil
import pytest
from mlflow.tracking import MlflowClient
from PIL import Image

from infra.services.home import free_port
from paceline.conf.environment import Environment
from paceline.flows import cli
from paceline.flows.cli import main
from paceline.tasks.cluster.hardware import torch_has_cuda
from tests.support.refusals import check_refusal


@pytest.fixture
def refused(capsys, monkeypatch, tmp_path):
    """Runs a command that must be refused, for a setting, in two lines that hold the data; it leaves nothing."""
    home = tmp_path / "home"
    monkeypatch.setenv("PACELINE_HOME", str(home))

    raised = []
    say_error = cli.say_error
    monkeypatch.setattr(cli, "say_error", lambda error, **options: (raised.append(error), say_error(error, **options)))

    def run(setting, *data, arguments):
        before = children()
        status = main([*arguments])
        assert children() <= before, "processes are left behind"
        told = capsys.readouterr().err.strip()
        assert status == 2, told
        fault, _, hint = told.partition("\n")
        assert fault.startswith("error: ")
        assert hint.startswith("hint: ")
        assert "\n" not in hint
        store = home / "mlflow.db"
        if store.exists():
            client = MlflowClient(Environment().tracking_uri)
            assert client.search_runs([e.experiment_id for e in client.search_experiments()]) == []
        assert not list(home.glob("prepared/*")) if home.is_dir() else True
        check_refusal(raised.pop(), setting, *data)

    return run


def children():
    """What this process has started, but for Python's own watch over shared memory, which stays."""
    found = psutil.Process().children(recursive=True)
    living = [process for process in found if process.status() != psutil.STATUS_ZOMBIE]
    return {process for process in living if not any("resource_tracker" in part for part in process.cmdline())}


def make_folder(root: Path, classes: dict[str, int], damaged: int = 0) -> Path:
    for label, (name, count) in enumerate(classes.items()):
        (root / name).mkdir(parents=True)
        for index in range(count):
            Image.new("RGB", (20, 20), (40 * label, index % 255, 9)).save(root / name / f"{index}.png")
        for index in range(damaged):
            (root / name / f"damaged{index}.png").write_bytes(b"no picture")
    return root


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (["digits", "recipe.num_epoch=1"], ["recipe.num_epoch", "recipe.num_epochs"]),
        (["digits", "recipe.num_epochs=one"], ["recipe.num_epochs", "one"]),
        (["digits", "model.name=twohead"], ["model.name", "data.source=digits"]),
        (["nonsense"], ["preset", "nonsense"]),
        (["folder"], ["data.root", "data.root=DIR"]),
        (["folder", "data.root=/does/not/exist"], ["data.root", "/does/not/exist"]),
        (["digits", "recipe.batch_size=100000"], ["recipe.batch_size", "recipe.batch_size=100000", 1293]),
        (["digits", "data.test_fraction=0"], ["data.test_fraction"]),
        (["digits", "execution.num_devices=999"], ["execution.num_devices", "execution.num_devices=999"]),
        (["digits", "execution.num_nodes=2"], ["execution.num_nodes", "execution.num_nodes=2"]),
        (
            ["digits", "execution.precision=16-mixed", "execution.accelerator=cpu"],
            ["execution.precision", "execution.accelerator=cpu", "execution.precision=bf16-mixed"],
        ),
        (["digits", "cluster.num_workers=1", "execution.num_devices=2"], ["cluster.num_workers", 1]),
        (["digits", "data.classes=[cat,dog]"], ["data.classes", "cat", "dog", *range(10)]),
        (["digits", "model.name=resnet18", "recipe.batch_size=76"], ["recipe.batch_size", 76, 1293]),
        (["digits", "model.pretrained=/does/not/exist.pt"], ["model.pretrained", "/does/not/exist.pt"]),
        (["digits", f"model.pretrained={'0123456789abcdef' * 2}"], ["model.pretrained", "0123456789abcdef" * 2]),
        (["digits", f"speedup.baseline={'0123456789abcdef' * 2}"], ["speedup.baseline"]),
        (["digits", "speedup.baseline=yesterday"], ["speedup.baseline", "yesterday", "probe", "matched", "none"]),
        (["digits", f"model.pretrained={__file__}"], ["model.pretrained", __file__]),
        (["textures", "recipe.backbone_rate=0.5"], ["recipe.backbone_rate", "dncnn"]),
        (["--resume", "0123456789abcdef"], ["--resume", "0123456789abcdef"]),
        ([], ["preset"]),
    ],
)
def test_wrong_settings(refused, arguments, wrong):
    refused(*wrong, arguments=["run", *arguments])


@pytest.mark.skipif(torch_has_cuda(), reason="this torch is built for GPUs")
def test_a_gpu_without_a_gpu(refused):
    arguments = ["run", "digits", "execution.accelerator=gpu", "execution.num_devices=99"]
    refused("execution.accelerator", "execution.accelerator=gpu", arguments=arguments)


RATES = ("--param", "recipe.learning_rate=log(1e-3,1)")


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (["digits"], ["--param", "recipe.learning_rate=log(1e-3,1)"]),
        ([*RATES], ["preset"]),
        (["digits", "--param", "recipe.learning_rat=log(1,2)"], ["--param", "recipe.learning_rate"]),
        (["digits", "--param", "recipe.learning_rate=log(1,2"], ["--param", "log(a,b)"]),
        (["digits", "--param", "recipe.momentum=lin(0.5,2)"], ["--param", "recipe.momentum", 2]),
        (["digits", "--param", "recipe.batch_size=log(16,64)"], ["--param", "recipe.batch_size"]),
        (["digits", "--param", "recipe.batch_size=int(64,4096,64)"], ["--param", "recipe.batch_size", 1293]),
        (["digits", "--param", "recipe.optimizer=[sgd,adagrad]"], ["--param", "recipe.optimizer=adagrad"]),
        (["digits", "--param", "execution.num_devices=[1,2]"], ["--param", "execution.num_devices", "study"]),
        (["digits", *RATES, "--sampler", "grid"], ["--param", "--sampler", "grid"]),
        (["digits", *RATES, "--sampler", "cmaes"], ["--sampler", "cmaes", "grid", "tpe"]),
        (["digits", *RATES, "--trials", "0"], ["--trials", 0]),
        (["digits", *RATES, "--at-once", "999"], ["--at-once", 999]),
        (["digits", *RATES, "data.validation_fraction=0"], ["data.validation_fraction"]),
        (["--resume", "0123456789abcdef"], ["--resume", "0123456789abcdef"]),
        (["digits", "--resume", "0123456789abcdef"], ["--resume", "cluster.*"]),
    ],
)
def test_wrong_sweeps(refused, arguments, wrong):
    refused(*wrong, arguments=["sweep", *arguments])


@pytest.mark.parametrize("price", ["4.5", "=4.5", "H200=", "H200=-1", "H200=nan", "H200=inf"])
def test_a_price_that_is_none(refused, price):
    refused("--price", price, "DEVICE=PRICE", arguments=["hardware", "--price", price])


def test_a_table_of_nothing(refused):
    refused("MLFLOW_TRACKING_URI", arguments=["hardware", "--experiment", "never"])


def test_an_empty_root(refused, tmp_path):
    (tmp_path / "empty").mkdir()
    refused("data.root", tmp_path / "empty", arguments=["run", "folder", f"data.root={tmp_path / 'empty'}"])


def test_a_single_class(refused, tmp_path):
    root = make_folder(tmp_path / "data", {"only": 12})
    refused("data.root", root, 1, "(only", arguments=["run", "folder", f"data.root={root}"])


def test_a_batch_larger_than_the_training_set(refused, tmp_path):
    root = make_folder(tmp_path / "data", {"a": 12, "b": 12})
    refused("recipe.batch_size", 64, arguments=["run", "folder", f"data.root={root}", "recipe.batch_size=64"])


def test_a_home_that_cannot_be_written(refused, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "file" / "home"))
    refused("PACELINE_HOME", arguments=["run", "digits"])


@pytest.mark.parametrize("uri", ["sqlite:////proc/nothing/mlflow.db", "file:///tmp/mlruns", "gopher://x"])
def test_a_store_that_cannot_be_written(refused, monkeypatch, uri):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    refused("MLFLOW_TRACKING_URI", uri, arguments=["run", "digits"])


def test_an_mlflow_server_that_is_away(refused, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    refused("MLFLOW_TRACKING_URI", arguments=["run", "digits"])


def test_a_prefect_server_that_is_away(refused, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{free_port()}/api")
    refused("PREFECT_API_URL", arguments=["run", "digits"])


def test_a_dask_scheduler_that_is_away(refused, monkeypatch):
    monkeypatch.setattr("paceline.tasks.cluster.client.CONNECT_SECONDS", 1)
    address = f"cluster.address=tcp://127.0.0.1:{free_port()}"
    refused("cluster.address", address, arguments=["run", "digits", "cluster.kind=address", address])


SSH = ["cluster.kind=ssh", "cluster.hosts=[127.0.0.1]"]
SLURM = ["cluster.kind=slurm", "cluster.cores_per_host=1", "cluster.memory_per_host=1G", "execution.accelerator=cpu"]


@pytest.mark.parametrize("kind", [SSH, SLURM, ["cluster.kind=address", "cluster.address=tls://127.0.0.1:1"]])
def test_tls_without_certificates(refused, kind):
    refused("PACELINE_TLS", "infra/certificates", arguments=["run", "digits", *kind])


def test_a_scheduler_beyond_this_host_without_tls(refused):
    arguments = ["run", "digits", "cluster.kind=address", "cluster.address=tcp://192.0.2.1:8786"]
    refused("cluster.address", "tcp://192.0.2.1:8786", "cluster.tls=off", arguments=arguments)


def test_slurm_where_there_is_none(refused, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    refused("cluster.kind", "cluster.kind=slurm", "sbatch", arguments=["run", "digits", *SLURM, "cluster.tls=off"])


def test_a_host_that_ssh_cannot_reach(refused, monkeypatch, tmp_path):
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text(f"Host 127.0.0.1\n Port {free_port()}\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    refused("cluster.hosts", "127.0.0.1", "ssh", arguments=["run", "digits", *SSH, "cluster.tls=off"])


@pytest.mark.skipif(torch_has_cuda(), reason="this torch is built for GPUs")
def test_dask_cuda_without_a_gpu(refused):
    refused("cluster.kind", "cluster.kind=local", arguments=["run", "digits", "cluster.kind=local_cuda"])


def test_help_and_show_start_nothing(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    assert main(["run", "--help"]) == 0
    helped = capsys.readouterr().out
    assert main(["run", "twohead", "--show", "execution.num_devices=2"]) == 0
    shown = capsys.readouterr().out
    for preset in ("folder", "cifar10"):  # a preset can be read before one's data are there
        assert main(["run", preset, "--show"]) == 0
        assert "once data.root is given" in capsys.readouterr().out
    assert "recipe.learning_rate" in helped
    assert "Peak learning rate of one device" in helped
    assert "execution.num_threads" not in helped, "one of the settings that few people need"
    assert "num_threads: auto" in shown
    assert " -> " in shown
    assert not (tmp_path / "home").exists()
