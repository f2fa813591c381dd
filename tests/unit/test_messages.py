"""The wording of errors: the form of all, and the text of those that users meet most."""

import json
import re
import shlex

import pytest

from paceline.conf.load import field_paths
from paceline.flows import cli
from tests.unit.test_prose import BANNED

REPRS = re.compile(r"(?<!\w)'[\w.=/,-]+'(?!\w)|\b(None|True|False|NoneType)\b|<\w|\w+Error\b|[Ii]nput should")
"""How Python writes words and values, and what pydantic says."""
SETTINGS = {*field_paths(), "preset", "command", "MODEL", "SOURCE", "TRAIN", "TEST", "RUN_ID", "PATTERN"}

RUN = """
recipe.num_epoch=2
recipe.num_epochs=many
recipe.num_epochs=0
recipe.num_epochs
recipe=3
seed=-1
name=https://me:hunter2@host
data.root=/x
data.source=a-b
data.fit=crop
data.classes=[cat]
data.image_size=4000
data.num_frames=4
model.name=twohead
model.name=whitened data.image_size=8
model.name=unet model.test_views=3
model.test_views=3
model.freeze=backbone
model.freeze=1.features
recipe.batch_scaling=strong recipe.batch_size=100 execution.num_devices=3
recipe.optimizer=adm
recipe.learning_rate=.nan
recipe.vary.crop_scale=[1,0.5]
recipe.vary.saturation=0.2
recipe.backbone_rate=0.1 recipe.optimizer=muon
execution.precision=fp8
execution.worker_load=fast
execution.worker_load=[1,0] execution.num_devices=2
execution.accelerator=cpu execution.precision=16-mixed
execution.strategy=fsdp execution.compile=step
execution.strategy=fsdp recipe.optimizer=muon
cluster.kind=ssh
cluster.kind=slurm
cluster.kind=ssh cluster.hosts=[a,b] execution.num_nodes=3
cluster.hosts=[a]
cluster.tls=off cluster.kind=address cluster.address=tls://h:1
limits.train_seconds=2h
speedup.baseline=yesterday
--shw
--epochs=3
"""
COMMANDS = """
rnu
run
run digts
run folder
run folder data.root=/does/not/exist
run digits data.classes=[cat,dog]
run digits data.test_fraction=0
run digits recipe.batch_size=100000
run digits model.pretrained=nowhere.pt
sweep
sweep digits
sweep digits --sampler rndom
sweep digits --param recipe.learning_rate
sweep digits --param recipe.learning_rat=log(1,2)
sweep digits --param recipe.learning_rate=log(0,1)
sweep digits --param recipe.learning_rate=lin(2,1)
sweep digits --param model.width=int(8,20,8)
sweep digits --param recipe.optimizer=[sgd]
sweep digits --param data.image_size=[8,16]
sweep digits --param recipe.learning_rate=log(1e-3,1) --trials 0
study
study digits
study digits --plan nonsense
study digits --axis seed=1,2
study digits --axis execution.precision=32-true
study digits --axis execution.precison=32-true,bf16-mixed
study digits --axis execution.precision=32-true,bf16-mixed --target 1.5
advise digits --devices 1
advise digits --devices one
advise digits --deadline 0
advise digits --deadline soon
advise digits --link given
advise digits --latency 1e-6
hardware --price 4.5
compare a b --last 3
compare --last 1
no-gpu digits
no-gpu digits --pretrained nowhere.pt --repeats 0
no-gpu digits --pretrained nowhere.pt --gpu G80
no-gpu digits --pretrained nowhere.pt --target 1.5
no-gpu digits --pretrained nowhere.pt execution.accelerator=gpu
predict
predict nowhere digits
features nowhere digits
classify nowhere elsewhere
serve digits
settings recipe.learnign_rate
"""
WRONG = [f"run digits {line}" for line in RUN.split("\n") if line] + [line for line in COMMANDS.split("\n") if line]


@pytest.fixture
def refuse(capsys, monkeypatch, tmp_path):
    """Runs a command that is refused; fault, hint and setting."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    raised = []
    say_error = cli.say_error
    monkeypatch.setattr(cli, "say_error", lambda error, **options: (raised.append(error), say_error(error, **options)))

    def run(line):
        assert cli.main(shlex.split(line)) == 2
        lines = capsys.readouterr().err.splitlines()
        assert [one.partition(": ")[0] for one in lines] == ["error", "hint"], lines
        return *(one.partition(": ")[2] for one in lines), raised.pop().setting

    return run


@pytest.mark.parametrize("line", WRONG)
def test_an_error_is_a_fault_and_a_hint_in_plain_words(line, refuse):
    fault, hint, setting = refuse(line)
    assert fault
    assert hint
    assert setting in SETTINGS or setting.startswith(("--", "PREFECT_", "MLFLOW_", "PACELINE_")) or setting in line
    assert "hunter2" not in fault + hint
    value = re.search(rf"{re.escape(setting)}[ =](\S+)", line)
    if value and (setting in field_paths() or setting.startswith("--")) and "hunter2" not in line:
        words = re.findall(r"[\w.-]+", value[1].partition("=")[0])
        assert [word for word in words if word not in fault] == [], "the value as typed"
    typed = set(re.findall(r"[\w']+", line))
    assert [found[0] for found in REPRS.finditer(f"{fault} {hint}") if found[0] not in typed] == []
    assert [word for word in BANNED if re.search(rf"(?<![\w-])({word})(?![\w-])", f"{fault} {hint}", re.I)] == []
    assert not fault.endswith((".", ";", ":"))


TEXTS = [
    ("rnu", "unknown command rnu", "did you mean run?"),
    (
        "run digts",
        "no preset or file is called digts",
        "did you mean digits? Else list the presets with: paceline presets",
    ),
    (
        "run digits execution.precision=fp8",
        "execution.precision=fp8 is not valid",
        "choices: auto, 32-true, 64-true, tf32, bf16-mixed, 16-mixed",
    ),
    (
        "run digits recipe.num_epochs=2.5",
        "recipe.num_epochs must be a whole number, got 2.5",
        "look it up with: paceline settings recipe.num_epochs",
    ),
    (
        "run digits limits.train_seconds=2h",
        "limits.train_seconds must be a number of seconds, got 2h",
        "2h is limits.train_seconds=7200",
    ),
    ("run digits execution.gpus=2", "execution.gpus is not a setting", "did you mean execution.num_devices?"),
    ("run digits recipe.lr=0.1", "recipe.lr is not a setting", "did you mean recipe.learning_rate?"),
    (
        "run digits cluster.kind=address",
        "cluster.kind=address needs cluster.address",
        "for example cluster.address=tcp://host:8786",
    ),
    (
        "advise digits --link given",
        "--link given needs --latency and --bandwidth",
        "for example --latency 30e-6 --bandwidth 10",
    ),
    ("advise digits --devices 1", "--devices must be numbers of 2 or more, got 1", "for example --devices 2,4,8"),
    ("predict", "paceline predict needs MODEL", "for example: paceline predict RUN_ID DIR"),
    ("run digits --shw", "paceline run has no argument --shw", "did you mean --show?"),
    (
        "study digits --axis execution.precision=32-true,bf16-mixed --target 1.5",
        "--target must be above 0 and at most 1, got 1.5",
        "for example --target 0.9",
    ),
    (
        "no-gpu digits --pretrained w.pt execution.accelerator=gpu",
        "execution.accelerator=gpu cannot be used with paceline no-gpu, which measures on CPUs",
        "remove execution.accelerator=gpu",
    ),
]
"""The worst messages of old, as they are now. This is the one place for their words."""


@pytest.mark.parametrize(("line", "fault", "hint"), TEXTS, ids=[text[0] for text in TEXTS])
def test_the_words_of_what_users_meet_most(line, fault, hint, refuse):
    assert refuse(line)[:2] == (fault, hint)


def test_slurm_without_its_program(refuse, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    asked = "cluster.cores_per_host=1 cluster.memory_per_host=1G execution.accelerator=cpu cluster.tls=off"
    assert refuse(f"run digits cluster.kind=slurm {asked}")[:2] == (
        "cluster.kind=slurm needs sbatch, and there is no sbatch on this host's PATH",
        "run paceline on a host that submits jobs to Slurm",
    )


def test_json_has_the_three_parts(refuse, capsys):
    assert cli.main(["run", "digits", "recipe.lr=0.1", "--json"]) == 2
    assert json.loads(capsys.readouterr().out) == {
        "error": "recipe.lr is not a setting",
        "hint": "did you mean recipe.learning_rate?",
        "setting": "recipe.lr",
    }
