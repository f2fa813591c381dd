"""Files of LightningCLI: what is one, what of it becomes Paceline's execution, what is refused."""

import hashlib
import json
from argparse import Namespace
from contextlib import suppress

import pytest

from paceline.conf.environment import Environment
from paceline.conf.hints import HintedError
from paceline.conf.lightning import Lightning
from paceline.conf.load import ConfigError, is_lightning, load, preset_names, validate
from paceline.flows.checks import lightning
from paceline.flows.commands.prefect_session import take_code
from paceline.flows.predict.request import PredictRequest, check_out, write_facts
from paceline.flows.study.flow import check_study
from paceline.flows.study.trainings import StudyRequest
from paceline.tasks.errors import InputError
from paceline.tasks.fingerprint import lightning_fingerprint
from tests.support.refusals import refused


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("model: {class_path: acme.Tagger}", True),
        ("fit: {model: {class_path: acme.Tagger}}", True),
        ("model: {width: 3}\ntrainer: {max_epochs: 1}", True),
        ("model: {name: resnet18}", False),
        ("- a list", False),
        ("{", False),
    ],
)
def test_a_file_of_lightning_is_known_by_its_sections(tmp_path, text, is_one):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    assert is_lightning(str(path)) is is_one


def test_the_word_is_one_and_presets_are_none():
    assert is_lightning("lightning")
    assert not any(map(is_lightning, [*preset_names(), "nothing-of-that-name"]))


@pytest.mark.parametrize(
    ("trainer", "given", "expected"),
    [
        ({}, {}, {"precision": "32-true"}),
        ({"devices": "auto", "accelerator": "auto"}, {}, {"precision": "32-true"}),
        ({"devices": 2, "precision": "bf16"}, {}, {"num_devices": 2, "precision": "bf16-mixed"}),
        ({"devices": [0, 1], "accelerator": "cuda"}, {}, {"num_devices": 2, "accelerator": "gpu"}),
        ({"devices": 2}, {"num_devices": 2}, {"num_devices": 2}),
        ({"precision": 32}, {}, {"precision": "32-true"}),
        ({"devices": -1}, {"num_devices": 2}, {"num_devices": 2}),
        ({"devices": [1, 3]}, {"num_devices": 2}, {"num_devices": 2}),
    ],
)
def test_keys_of_the_trainer_become_the_execution(trainer, given, expected):
    execution = lightning.execution_of(trainer, given)
    assert trainer == {}
    assert execution == {"precision": "32-true"} | expected


def test_a_key_that_contradicts_a_setting_is_named_with_it():
    with pytest.raises(InputError, match=r"trainer\.devices=2 conflicts with execution\.num_devices=4") as refusal:
        lightning.execution_of({"devices": 2}, {"num_devices": 4})
    assert "remove trainer.devices" in refusal.value.hint


@pytest.mark.parametrize(("half", "mixed"), [("bf16-true", "bf16-mixed"), ("16-true", "16-mixed")])
def test_weights_in_16_bits_are_refused(half, mixed):
    for trainer, given in (({"precision": half}, {}), ({}, {"precision": half})):
        with pytest.raises(InputError, match=f"precision={half} keeps the weights in 16 bits") as refusal:
            lightning.execution_of(trainer, given)
        assert refusal.value.hint == f"use execution.precision={mixed}"


@pytest.mark.parametrize("number", [-1, "-1"])
def test_all_devices_of_a_host_need_a_number(number):
    with pytest.raises(InputError, match=r"trainer\.devices=-1 leaves the number") as refusal:
        lightning.execution_of({"devices": number}, {})
    assert "execution.num_devices=2" in refusal.value.hint


@pytest.mark.parametrize(("devices", "given"), [([1, 3], {}), ([1], {}), ([1, 0], {}), ([1, 3], {"num_devices": 1})])
def test_chosen_devices_of_a_host_are_refused_without_their_number(devices, given):
    with refused("trainer.devices") as refusal:
        lightning.execution_of({"devices": devices}, given)
    visible = ",".join(map(str, devices))
    assert refusal.value.hint == f"use execution.num_devices={len(devices)} and set CUDA_VISIBLE_DEVICES={visible}"


@pytest.mark.parametrize(
    "trainer",
    [
        {"logger": {"class_path": "lightning.pytorch.loggers.CSVLogger"}},
        {"strategy": "fsdp"},
        {"fast_dev_run": True},
        {"plugins": ["x"]},
        {"model_registry": "tagger"},
    ],
)
def test_what_paceline_decides_is_refused(trainer):
    (key,) = trainer
    with pytest.raises(InputError, match=rf"trainer\.{key}=.* cannot be used") as refusal:
        lightning.check_trainer(trainer)
    assert refusal.value.hint


def test_a_logger_of_its_own_is_left_to_paceline():
    trainer = {"logger": True, "enable_checkpointing": False, "max_epochs": 3}
    lightning.check_trainer(trainer)
    assert trainer == {"max_epochs": 3}


def own(**sections):
    settings = {"model": {"class_path": "acme.Tagger"}}
    tree = {"lightning": {"settings": settings}, "execution": {"precision": "32-true"} | lightning.FIXED["execution"]}
    return tree | {"speedup": lightning.FIXED["speedup"]} | sections


def test_a_seed_is_also_that_of_lightning():
    seeded = validate(own()).with_seed(5)
    assert (seeded.seed, seeded.lightning.settings["seed_everything"]) == (5, 5)
    assert "seed_everything" not in load("digits").with_seed(5).lightning.settings


def test_other_commands_refuse_own_code(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("model: {class_path: acme.Tagger}")
    for preset in (str(path), "lightning"):
        with pytest.raises(ConfigError, match="your own Lightning code, which cannot be used here") as refusal:
            load(preset)
        assert "paceline run" in refusal.value.hint


@pytest.mark.parametrize(
    ("fields", "setting"),
    [
        ({"target": 0.5}, "--target"),
        ({"axes": {}, "arms": {"from scratch": {}}}, "--plan"),
        ({"same_work": ["model.init_args.width"]}, "--same-work"),
    ],
)
def test_what_a_study_of_own_code_cannot_have_is_refused(fields, setting):
    request = {"preset": "config.yaml", "config": own(), "axes": {"execution.num_devices": ["1", "2"]}} | fields
    with refused(setting):
        check_study(StudyRequest.model_validate(request), Environment())


def test_options_of_own_code_have_no_meaning_for_presets():
    axes = {"execution.num_devices": ["1", "2"]}
    objective = {"name": "val_loss", "goal": "minimize"}
    request = {"preset": "digits", "config": load("digits"), "axes": axes, "objective": objective}
    with refused("--minimize"):
        check_study(StudyRequest.model_validate(request), Environment())


def test_settings_of_presets_have_no_meaning_for_own_code():
    validate(own())
    with pytest.raises(ConfigError, match="recipe: these settings are for presets"):
        validate(own(recipe={"num_epochs": 3}))
    with pytest.raises(ConfigError, match=r"execution\.compile=graph cannot be used.*; use execution\.compile=step"):
        validate(own(execution=own()["execution"] | {"compile": "graph"}))
    with pytest.raises(
        ConfigError, match=r"track\.on_regression=confirm cannot be used.*; use track\.on_regression=mark"
    ):
        validate(own(track={"on_regression": "confirm"}))
    with pytest.raises(ConfigError, match="minimize=val_loss and maximize=accuracy are given"):
        validate(own(track={"minimize": "val_loss", "maximize": "accuracy"}))
    with pytest.raises(ConfigError, match=r"track\.maximize=accuracy is for your own Lightning code"):
        load("digits", ["track.maximize=accuracy"])
    with pytest.raises(ConfigError, match=r"cluster\.min_workers=1 cannot be used"):
        validate(own(cluster={"min_workers": 1}))
    with pytest.raises(ConfigError, match=r"track\.min_accuracy=0\.9 cannot be used"):
        validate(own(track={"min_accuracy": 0.9}))


@pytest.fixture
def load_with(tmp_path):
    """Load own code with callbacks of its own."""
    code = """
from lightning.pytorch import callbacks
from lightning.pytorch.demos.boring_classes import BoringModel
class WeightAveragingReport(callbacks.Callback): pass
class Smooth(callbacks.EMAWeightAveraging): pass
"""
    (tmp_path / "acme.py").write_text(code)

    def load_callback(path, *settings):
        callbacks = [f"trainer.callbacks+={each}" for each in ("acme.WeightAveragingReport", path)]
        model = "model.class_path=acme.BoringModel"
        return lightning.load_lightning("lightning", [model, *callbacks, *settings], str(tmp_path))

    return load_callback


SHARDS = ("execution.strategy=fsdp", "execution.num_devices=2")


@pytest.mark.parametrize("path", ["acme.Smooth", "EMAWeightAveraging", "StochasticWeightAveraging"])
def test_callbacks_that_average_weights_are_refused_with_shards_by_their_class(load_with, path):
    settings = ("trainer.callbacks.swa_lrs=0.1",) if path == "StochasticWeightAveraging" else ()
    config = load_with(path, *settings)
    with refused(None, path.rpartition(".")[2], SHARDS[0]):
        lightning.configure(config, [SHARDS])


@pytest.mark.parametrize("strategy", ["ddp", {"class_path": "lightning.pytorch.strategies.DDPStrategy"}])
def test_a_strategy_of_the_file_is_refused_next_to_shards_also_in_a_study(strategy):
    tree = own()
    tree["lightning"]["settings"]["trainer"] = {"strategy": strategy}
    config = validate(tree)
    shown = strategy if isinstance(strategy, str) else strategy["class_path"]
    with pytest.raises(ConfigError, match=rf"trainer\.strategy={shown} cannot be used next to") as refusal:
        lightning.configure(config, [SHARDS])
    assert "remove trainer.strategy" in str(refusal.value)
    assert lightning.configure(config, [("execution.num_devices=2",)])[0].execution.num_devices == 2


def test_a_callback_with_the_word_in_its_name_averages_nothing(load_with):
    config = load_with("acme.WeightAveragingReport", *SHARDS)
    assert config.execution.strategy == "fsdp"


def test_a_file_that_does_not_exist_is_reported():
    with refused("file", "missing.yaml"):
        lightning.load_lightning("missing.yaml", [], None)


def test_a_model_is_registered_with_its_package_only():
    tree = own(track={"register": "tagger"})
    tree["lightning"] |= {"packages": ["tagger 1.2 (code 0123456789ab)"]}
    assert validate(tree).track.register == "tagger"
    with pytest.raises(ConfigError, match=r"track\.register=tagger cannot be used with tagger, which has no version"):
        validate(tree | {"lightning": tree["lightning"] | {"packages": ["tagger (code 0123456789ab)"]}})
    tree["lightning"] |= {"code": "/home/me/tagger"}
    with pytest.raises(
        ConfigError, match=r"track\.register=tagger cannot be used with --code /home/me/tagger"
    ) as refusal:
        validate(tree)
    assert "install your code as a package" in str(refusal.value)


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("trainer.max_epochs=3", "trainer.max_epochs is not a setting of a prediction"),
        ("speedup.baseline=none", "speedup.baseline is not a setting of a prediction"),
    ],
)
def test_a_prediction_has_few_settings(override, fault):
    trained = Lightning(settings={"model": {"class_path": "acme.Tagger"}}, packages=("acme 1.2 (code 0123456789ab)",))
    with pytest.raises(InputError, match=fault):
        lightning.load_prediction(trained, "32-true", [override])
    with pytest.raises(InputError, match="needs the package acme, which is not installed") as refusal:
        lightning.load_prediction(trained, "32-true", [])
    assert refusal.value.hint == "install acme 1.2"


def test_the_fingerprint_follows_settings_and_code_but_not_the_place_of_the_code():
    first = validate(own()).lightning
    moved = first.model_copy(update={"code": "/elsewhere"})
    changed = first.model_copy(update={"packages": ("directory (code 0123456789ab)",)})
    assert lightning_fingerprint(first) == lightning_fingerprint(moved) != lightning_fingerprint(changed)
    begun = [first.model_copy(update={"ckpt_path": name, "ckpt_sha256": name * 64}) for name in "ab"]
    assert len({lightning_fingerprint(one) for one in (first, *begun)}) == 3
    before = {"settings": first.settings, "prepares_data": False, "packages": []}
    stored = hashlib.sha256(json.dumps(before, sort_keys=True).encode()).hexdigest()[:8]
    assert lightning_fingerprint(first) == stored, "runs from before resume"


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Requests to the child that reads settings, which answers that a run starts from a checkpoint."""
    requests = []
    (tmp_path / "first.ckpt").write_bytes(b"first")

    def ask(request, meanwhile=None, server=None):
        assert server is None
        requests.append(request)
        if meanwhile is not None:
            meanwhile()
        parsed = {"settings": {"model": {"class_path": "acme.Tagger"}}, "packages": [], "prepares_data": False}
        return {"variants": [parsed] * len(request.variants), "ckpt_path": str(tmp_path / "first.ckpt")}

    monkeypatch.setattr(lightning.child, "ask", ask)
    monkeypatch.setattr(lightning, "start_fork_server", lambda *_: None)
    return requests


def test_trials_are_read_with_the_copy_of_their_sweep(asked, tmp_path):
    config = validate(own(lightning=own()["lightning"] | {"code": "/home/me/tagger"}))
    (trial,) = lightning.configure(config, [["model.init_args.width=8"]], tmp_path)
    lightning.configure(config, [["model.init_args.width=8"]])
    assert [request.code for request in asked] == [str(tmp_path / "code"), "/home/me/tagger"]
    assert trial.lightning.code == "/home/me/tagger"


def test_a_night_reads_what_its_author_gave_with_the_code_of_then(asked, tmp_path):
    written, copied = tmp_path / "tagger", tmp_path / "run" / "code"
    given = {"model": {"class_path": "acme.Tagger", "init_args": {"depth": 2}}, "trainer": {"devices": 1}}
    config = validate(own(lightning={"settings": given, "code": str(written)}))
    with refused("--code", str(written)):
        lightning.read_again(config, None, Environment())
    for directory, run in ((written, None), (copied, tmp_path / "run")):
        directory.mkdir(parents=True)
        (directory / "tagger.py").touch()
        night = lightning.read_again(config, run, Environment()).lightning
        assert (asked[-1].code, asked[-1].settings, night.code) == (str(directory), given, str(directory))
        assert night.settings == {"model": {"class_path": "acme.Tagger"}}, "as LightningCLI reads them now"
        assert night.given == {"model": given["model"], "trainer": {}}


def test_a_command_line_in_the_file_may_have_sections_of_its_own(asked, tmp_path):
    path = tmp_path / "own.yaml"
    for text in ("cli: acme.TaggerCLI\ntrainer: {}", "fit: {cli: acme.TaggerCLI}"):
        path.write_text(text)
        lightning.load_lightning(str(path), ["note=x", "ckpt_path="], None)
        assert asked[-1].variants == (("note=x",),)
    for text in ("trainer: {}", "fit:"):
        path.write_text(text)
        with refused("note"):
            lightning.load_lightning(str(path), ["note=x"], None)


@pytest.mark.parametrize(
    ("text", "overrides", "num_devices"),
    [
        ("trainer: {devices: 2, max_epochs: 1}", ["cluster.num_workers=3"], 2),
        ("fit: {trainer: {devices: 2}}", ["execution.num_devices=2", "trainer.callbacks+=acme.Stop"], 2),
        ("fit:", ["trainer.devices=[0, 1]", "execution.precision=bf16-mixed"], 2),
        ("trainer: {devices: [1, 3]}", ["execution.num_devices=2"], 2),
        ("trainer:", [], 1),
        ("trainer: {devices: 2}", ["execution.num_devices=1"], None),
        ("trainer: [devices, 2]", [], None),
        ("trainer: {}", ["trainer.devices=[0"], None),
        ("trainer: {}", ["cluster.kind=ssh"], None),
    ],
)
def test_what_is_known_while_the_code_is_imported(asked, tmp_path, text, overrides, num_devices):
    path, known = tmp_path / "own.yaml", []
    path.write_text(text)
    with suppress(HintedError):  # of what LightningCLI would report
        lightning.load_lightning(str(path), ["ckpt_path=", *overrides], None, known.append)
    [config] = known
    assert (config and config.execution.num_devices) == num_devices
    if config is not None:
        assert config.lightning.settings
        given = dict(override.split("=") for override in overrides)
        assert str(config.cluster.num_workers) == given.get("cluster.num_workers", "auto")
        assert config.execution.precision == given.get("execution.precision", "32-true")


def test_a_checkpoint_to_start_from_is_known_by_its_digest(asked, tmp_path):
    found = lightning.load_lightning("lightning", ["ckpt_path="], None).lightning
    assert asked[0].ckpt_path == ""
    assert found.ckpt_path == str(tmp_path / "first.ckpt")
    assert found.ckpt_sha256 == hashlib.sha256(b"first").hexdigest()


def test_what_is_stored_names_neither_a_directory_nor_a_foreign_package(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    tree, options = own(), Namespace(resume="0123")
    tree["lightning"] |= {"code": "/home/other/tagger", "settings": {"model": {"class_path": "local.Tagger"}}}
    with refused("--resume"):
        take_code(tree, options)
    copied = tmp_path / "runs" / "0123" / "code"
    copied.mkdir(parents=True)
    with refused("class_path", "class_path=local.Tagger"):
        take_code(tree, options)
    (copied / "local.py").touch()
    take_code(tree, options)
    assert tree["lightning"]["code"] == str(copied)
    take_code({}, options)  # of a preset
    for path, setting in (("os.system", "MODEL"), ("numpy.load", "class_path")):
        trained = Lightning(settings={"model": {"class_path": path}}, packages=("acme 1.2 (code 0123456789ab)",))
        with refused(setting):
            lightning.load_prediction(trained, "32-true", [])


def test_a_second_prediction_with_own_code_needs_another_place(tmp_path):
    request = PredictRequest(model="0123", out=str(tmp_path))
    write_facts(tmp_path, {"key": "a run"}, is_complete=False)
    check_out(request, tmp_path, "")
    (tmp_path / "part-0.parquet").touch()
    with pytest.raises(InputError, match="holds predictions already, which own Lightning code never reuses"):
        check_out(request, tmp_path, "")
