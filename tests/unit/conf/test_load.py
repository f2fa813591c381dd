from typing import Literal, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel

from paceline.conf.config import Config
from paceline.conf.hints import ALIASES
from paceline.conf.load import (
    ConfigError,
    field_paths,
    flatten,
    load,
    load_plan,
    plan_names,
    preset_names,
    split_values,
)
from paceline.tasks.speedup.study.design import expand, parse_axes
from tests.support.refusals import refused


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_loads_and_says_what_it_is(name):
    config = load(name)
    assert config.name == name


def choices(model, prefix=""):
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from choices(field.annotation, f"{prefix}{name}.")
        elif get_origin(field.annotation) is Literal:
            yield from ((f"{prefix}{name}", value) for value in get_args(field.annotation))


FREE = [choice for choice in choices(Config) if choice[0].split(".")[0] in ("recipe", "execution", "speedup")]


@pytest.mark.parametrize(("key", "value"), FREE)
def test_every_named_value_can_be_given_on_the_command_line_and_in_a_preset(key, value, tmp_path):
    assert flatten(load("digits", [f"{key}={value}"]))[key] == value
    section, name = key.split(".")
    preset = tmp_path / "preset.yaml"
    preset.write_text(f"{section}:\n  {name}: {value}\n")
    assert flatten(load(str(preset)))[key] == value


def optional(schema, definitions, prefix=""):
    """Settings that may be null, by the schema that Prefect's form shows."""
    for name, field in schema["properties"].items():
        if "$ref" in field:
            yield from optional(definitions[field["$ref"].rpartition("/")[2]], definitions, f"{prefix}{name}.")
        elif {"type": "null"} in field.get("anyOf", ()):
            yield f"{prefix}{name}", "string" in {kind.get("type") for kind in field["anyOf"]}


SCHEMA = Config.model_json_schema()
OPTIONAL = dict(optional(SCHEMA, SCHEMA["$defs"]))


def test_the_optional_texts_are_known():
    assert {name for name, is_text in OPTIONAL.items() if is_text} == {
        *("data.root", "model.pretrained", "track.register", "track.minimize", "track.maximize"),
        *(f"cluster.{name}" for name in ("address", "interface", "partition", "account", "time_limit")),
        *("cluster.memory_per_host", "execution.checkpoint_steps", "lightning.code"),
        *("lightning.ckpt_path", "lightning.ckpt_sha256", "lightning.averages"),
    }


@pytest.mark.parametrize("word", ["null", "None", "none", "NONE", "~", ""])
@pytest.mark.parametrize("key", OPTIONAL)
def test_a_word_for_nothing_leaves_an_optional_setting_unset(key, word, tmp_path):
    assert flatten(load("digits", [f"{key}={word}"]))[key] is None
    *sections, name = key.split(".")
    tree = {name: word}
    for section in reversed(sections):
        tree = {section: tree}
    preset = tmp_path / "preset.yaml"
    preset.write_text(yaml.safe_dump(tree))  # as a text, in quotes where YAML would read null
    assert flatten(load(str(preset)))[key] is None


def test_a_word_for_nothing_is_a_value_where_a_setting_has_it():
    config = load("digits", ["model.freeze=none", "speedup.baseline=none", "name=none", "track.experiment=None"])
    assert (config.model.freeze, config.speedup.baseline) == ("none", "none")
    assert (config.name, config.track.experiment) == ("none", "None")


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("track.register", "2024"),
        ("model.pretrained", "12345678901234567890123456789012"),
        ("speedup.baseline", "1" * 32),
    ],
)
def test_a_text_of_digits_stays_one(key, text):
    assert flatten(load("digits", [f"{key}={text}"]))[key] == text


def test_overrides_win_and_keep_their_types():
    config = load("digits", ["recipe.num_epochs=3", "execution.precision=32-true", "recipe.learning_rate=1e-2"])
    assert (config.recipe.num_epochs, config.execution.precision) == (3, "32-true")
    assert config.recipe.learning_rate == pytest.approx(0.01)


@pytest.mark.parametrize("text", ["[node1,node2]", "node1,node2", "(node1,node2)"])
def test_a_list_needs_no_brackets(text):
    assert load("digits", ["cluster.kind=ssh", f"cluster.hosts={text}"]).cluster.hosts == ("node1", "node2")
    assert load("digits", ["cluster.kind=ssh", "cluster.hosts=node1"]).cluster.hosts == ("node1",)
    assert load("digits", ["recipe.vary.crop_scale=(0.08,1)"]).recipe.vary.crop_scale == (0.08, 1)


@pytest.mark.parametrize(
    ("word", "value"), [("bf16", "bf16-mixed"), ("fp32", "32-true"), ("fp16", "16-mixed"), ("tf32", "tf32")]
)
def test_precisions_of_other_tools_are_taken(word, value, tmp_path):
    assert load("digits", [f"execution.precision={word}"]).execution.precision == value
    preset = tmp_path / "preset.yaml"
    preset.write_text(f"execution: {{precision: {word}}}\n")
    assert load(str(preset)).execution.precision == value


@pytest.mark.parametrize(
    ("word", "setting"),
    [
        *(("lr", "recipe.learning_rate"), ("recipe.lr", "recipe.learning_rate"), ("epochs", "recipe.num_epochs")),
        *(("execution.gpus", "execution.num_devices"), ("devices", "execution.num_devices"), ("random_seed", "seed")),
        *(("nodes", "execution.num_nodes"), ("workers", "cluster.num_workers"), ("amp", "execution.precision")),
        *(("batch_size", "recipe.batch_size"), ("recipe.num_epoch", "recipe.num_epochs"), ("recipe.xyz", None)),
    ],
)
def test_a_wrong_name_leads_to_the_setting_that_is_meant(word, setting):
    with pytest.raises(ConfigError) as error:
        load("digits", [f"{word}=1"])
    assert error.value.setting == word
    assert error.value.hint == (f"did you mean {setting}?" if setting else "list the settings with: paceline settings")


def test_every_alias_leads_to_a_setting():
    assert set(ALIASES.values()) <= set(field_paths())


def test_a_root_stays_text():
    assert load("folder", ["data.root=2024"]).data.root == "2024"


def test_a_preset_may_be_a_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("data: {source: digits}\nrecipe: {num_epochs: 1}\n")
    assert load(str(path)).name == "mine"


@pytest.mark.parametrize(
    ("overrides", "wrong", "data"),
    [
        (["recipe.num_epoch=2"], "recipe.num_epoch", ["recipe.num_epochs"]),
        (["recipe.num_epochs=many"], "recipe.num_epochs", ["many"]),
        (["recipe.num_epochs=0"], "recipe.num_epochs", [1, 0]),
        (["execution.precision=fp8"], "execution.precision", ["fp8", "auto", "32-true"]),
        (["recipe.num_epochs"], "recipe.num_epochs", ["SETTING=VALUE", "recipe.num_epochs=VALUE"]),
        (["data.root=/x"], "data.root", ["/x", "data.source=digits", "data.source=folder"]),
        (["data.source=folder", "data.root=s3://me:hunter2@bucket/x"], "data.root", ["AWS_PROFILE"]),
        (["model.name=twohead"], "model.name", ["data.source=digits", "data.source=rotated_digits"]),
        (["data.fit=crop"], "data.fit", ["data.fit=crop", "data.source=digits"]),
        (["recipe.batch_scaling=strong", "recipe.batch_size=100", "execution.num_devices=3"], "recipe.batch_size", [3]),
        (
            ["execution.accelerator=cpu", "execution.precision=16-mixed"],
            "execution.precision",
            ["execution.accelerator=cpu", "execution.precision=bf16-mixed"],
        ),
        (
            ["execution.worker_load=[1,2,3]", "execution.num_devices=2"],
            "execution.worker_load",
            ["execution.worker_load=[1,2,3]", 2],
        ),
        (
            ["execution.worker_load=[1,0]", "execution.num_devices=2"],
            "execution.worker_load",
            ["execution.worker_load=[1,0]", "execution.worker_load=equal"],
        ),
        (["execution.worker_load=[1,-.inf]", "execution.num_devices=2"], "execution.worker_load", ["-.inf"]),
        (["execution.worker_load=fast"], "execution.worker_load", ["equal", "measured", "fast"]),
        (["execution.gradient_compression=fp16"], "execution.gradient_compression", ["fp16", "off", "bf16"]),
        (
            ["execution.strategy=fsdp", "execution.gradient_compression=bf16"],
            "execution.gradient_compression",
            ["gradient_compression=off", "execution.strategy=ddp"],
        ),
        (["execution.strategy=fsdp", "execution.precision=64-true"], "execution.precision", ["execution.strategy=ddp"]),
        (["execution.strategy=fsdp", "execution.precision=16-mixed"], "execution.precision", ["precision=auto"]),
        (["execution.strategy=fsdp", "execution.compile=step"], "execution.compile", ["compile=auto"]),
        (["execution.strategy=fsdp", "recipe.optimizer=muon"], "recipe.optimizer", ["execution.strategy=fsdp", "ddp"]),
        (["model.name=whitened", "data.image_size=8"], "data.image_size", ["model.name=whitened", 9, "convblocks"]),
        (
            ["model.name=twohead", "data.source=rotated_digits", "model.test_views=2"],
            "model.test_views",
            ["model.name=twohead", "model.test_views=1"],
        ),
        (["model.test_views=3"], "model.test_views", ["model.test_views=3", 1, 2, 6]),
        (["cluster.kind=address"], "cluster.kind", ["cluster.address=tcp://host:8786"]),
        (["cluster.address=tls://host:8786"], "cluster.address", ["cluster.kind=local", "cluster.kind=address"]),
        (["recipe.num_epochs=2.5"], "recipe.num_epochs", [2.5]),
        (["limits.train_seconds=2h"], "limits.train_seconds", ["2h", "limits.train_seconds=7200"]),
        (["recipe.optimizer=adm"], "recipe.optimizer", ["adm", "adam", "sgd"]),
        (["data.image_size=4000"], "data.image_size", [1024, 4000]),
        (["recipe.learning_rate=.nan"], "recipe.learning_rate", [".nan"]),
    ],
)
def test_a_wrong_setting_is_refused_with_a_hint(overrides, wrong, data):
    with refused(wrong, *data, kind=ConfigError) as error:
        load("digits", overrides)
    assert error.value.hint


@pytest.mark.parametrize("text", ["[1, 2]", "data: [", "\x00"])
def test_a_broken_preset_is_refused_on_one_line(tmp_path, text):
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with refused("preset", path, kind=ConfigError):
        load(str(path))


@pytest.mark.parametrize("name", ["nonsense", "n" * 300, "nonsense/digits.yaml"])
def test_an_unknown_preset_names_the_known(name):
    with refused("preset", name, kind=ConfigError) as error:
        load(name)
    assert error.value.hint.endswith("paceline presets")


def test_every_setting_has_a_help_text():
    described = Config.model_json_schema()
    for section in described["$defs"].values():
        for name, field in section.get("properties", {}).items():
            assert field.get("description"), name
    assert set(flatten(Config())) == set(field_paths())


def test_batch_scaling_is_linear_when_weak_and_constant_when_strong():
    weak = load("digits", ["execution.num_devices=4", "recipe.batch_size=32"])
    strong = load("digits", ["execution.num_devices=4", "recipe.batch_size=32", "recipe.batch_scaling=strong"])
    assert (weak.global_batch_size, strong.global_batch_size) == (128, 32)
    assert weak.learning_rate_over(4) == pytest.approx(4 * strong.learning_rate_over(4))


def test_the_contract_of_settings_is_frozen():
    """Scripts and schedules rely on these names: adding is fine, removing or renaming is not."""
    promised = {
        "data": "source root image_size test_fraction validation_fraction max_rejected_fraction",
        "model": "name width depth",
        "recipe": "optimizer learning_rate batch_size batch_scaling num_epochs weight_decay schedule augment",
        "execution": "accelerator num_nodes num_devices precision compile memory_format loading strategy",
        "cluster": "kind num_workers address",
        "speedup": "baseline num_blocks steps_per_block",
        "track": "experiment",
    }
    paths = {f"{section}.{name}" for section, names in promised.items() for name in names.split()} | {"seed", "name"}
    assert paths <= set(field_paths())


@pytest.mark.parametrize("name", [name for name in plan_names() if load_plan(name).axes])
def test_shipped_plans_make_arms(name):
    plan = load_plan(name)
    axes = parse_axes([f"{field}={','.join(values)}" for field, values in plan.axes.items()])
    arms = expand(lambda overrides: load(plan.preset, [*plan.overrides, *overrides]), axes, ladder=plan.ladder)
    assert len(arms) >= 2
    assert any(arm.is_baseline for arm in arms)


def test_a_plan_may_be_a_file_of_ones_own(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("preset: digits\naxes: {execution.num_threads: [1, 2]}\nrepeats: 6\n")
    assert load_plan(str(path)).axes == {"execution.num_threads": ["1", "2"]}


@pytest.mark.parametrize("text", ["- a", "preset: digits", "preset: digits\naxes: 3", "preset: [", "axes: {}\nx: 1"])
def test_what_is_no_plan_is_refused(tmp_path, text):
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with refused("--plan", path, kind=ConfigError):
        load_plan(str(path))


@pytest.mark.parametrize("name", ["nonsense", "n" * 300])
def test_an_unknown_plan_names_the_known(name):
    with refused("--plan", *plan_names(), kind=ConfigError):
        load_plan(name)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("[2,1],[1,1]", ["[2,1]", "[1,1]"]),
        ("[1,2]", ["1", "2"]),
        ('{"a":1,"b":2},{"a":2}', ['{"a":1,"b":2}', '{"a":2}']),
        ("[{a: 1, b: 2}, {a: 2}]", ["{a: 1, b: 2}", "{a: 2}"]),
    ],
)
def test_a_comma_inside_of_a_value_does_not_end_it(text, values):
    assert split_values(text) == values
