import pytest

from paceline.conf.lightning import FIXED
from paceline.conf.load import load, validate
from paceline.tasks.records.hardware import Gpu, Hardware
from paceline.tasks.speedup.comparability import comparison_facts, differences, explain, match, module_facts
from paceline.tasks.train.plan import resolve


def facts(*overrides, data="d0", code="c0", versions=None, device="EPYC"):
    config = load("digits", list(overrides))
    hardware = Hardware(host="host", cpu_name=device, num_cores=2, memory_bytes=2**33, cpu_bf16=True)
    return comparison_facts(config, data, code, versions or {"torch": "2.13.0"}, resolve(config, hardware, 1293))


def breaking(first, second):
    return {field.field for field in match(first, second).breaking}


@pytest.mark.parametrize(
    "override",
    [
        "execution.precision=bf16-mixed",
        "execution.loading=streaming",
        "execution.compile=step",
        "cluster.num_workers=2",
    ],
)
def test_execution_may_differ(override):
    verdict = match(facts(), facts(override))
    assert verdict.matches
    assert verdict.scaling == "none"


@pytest.mark.parametrize(
    ("second", "field"),
    [
        (facts("seed=2"), "seed"),
        (facts("model.width=8"), "model.width"),
        (facts("recipe.num_epochs=3"), "recipe.num_epochs"),
        (facts("recipe.learning_rate=0.2"), "recipe.learning_rate"),
        (facts("data.image_size=16"), "data.image_size"),
        (facts(data="d1"), "data"),
        (facts(code="c1"), "code"),
        (facts(versions={"torch": "2.12.0"}), "versions"),
        (facts(device="H200"), "device"),
    ],
)
def test_what_is_learned_and_with_what_must_not(second, field):
    assert field in breaking(facts(), second)
    assert field in explain(match(facts(), second))


def test_another_batch_size_breaks_through_the_global_batch_too():
    assert breaking(facts(), facts("recipe.batch_size=64")) == {"recipe.batch_size", "global_batch_size"}


def test_weak_scaling_lets_the_global_batch_follow_the_devices_and_is_labelled():
    verdict = match(facts(), facts("execution.num_devices=2"))
    assert verdict.matches
    assert verdict.scaling == "weak"


def test_strong_scaling_keeps_the_global_batch_and_is_labelled():
    strong = "recipe.batch_scaling=strong"
    verdict = match(facts(strong), facts(strong, "execution.num_devices=2"))
    assert verdict.matches
    assert verdict.scaling == "strong"


def test_strong_against_weak_is_no_comparison():
    verdict = match(facts("recipe.batch_scaling=strong"), facts("execution.num_devices=2"))
    assert not verdict.matches


def test_unknown_facts_never_match():
    known = facts()
    assert not match({}, {}).matches
    assert breaking({key: value for key, value in known.items() if key != "code"}, known) == {"code"}
    assert "nothing is known" in explain(match({}, known))


GPU = Gpu(uuid="GPU-0", name="H100", memory_bytes=2**33, compute_capability=(9, 0))


def gpu_facts(*overrides):
    config = load("digits", list(overrides))
    hardware = Hardware(host="host", cpu_name="EPYC", num_cores=2, memory_bytes=2**33, cpu_bf16=True, gpus=(GPU,))
    return comparison_facts(config, "d0", "c0", {"torch": "2.13.0"}, resolve(config, hardware, 1293))


def test_the_arithmetic_of_a_gpu_follows_its_precision_and_what_else_changes_it_breaks():
    ieee, tf32 = (gpu_facts(f"execution.precision={precision}") for precision in ("32-true", "tf32"))
    assert (ieee["arithmetic"], tf32["arithmetic"]) == ("ieee fp32, cudnn benchmark", "tf32, cudnn benchmark")
    verdict = match(ieee, tf32)
    assert verdict.matches
    assert "arithmetic ieee fp32, cudnn benchmark against tf32, cudnn benchmark" in explain(verdict)
    assert breaking(ieee, ieee | {"arithmetic": "tf32 convolutions"}) == {"arithmetic"}


def test_a_gpu_run_of_unknown_arithmetic_is_not_comparable_and_a_cpu_run_is():
    """Runs that were recorded before the arithmetic was."""
    new = gpu_facts("execution.precision=32-true")
    old = {name: value for name, value in new.items() if name != "arithmetic"}
    assert breaking(old, new) == breaking(old, old) == {"arithmetic"}
    bf16 = gpu_facts("execution.precision=bf16-mixed")
    assert breaking(old, bf16) == {"arithmetic"}, "nobody knows what the old fp32 was"
    assert "arithmetic unknown against ieee fp32" in explain(match(old, new))
    assert "arithmetic" not in facts()
    assert match(facts(), facts()).matches


def test_data_elsewhere_are_the_same_data():
    first, second = facts(), facts() | {"data.root": "/elsewhere"}
    assert match(first, second).matches


def test_what_has_changed_between_two_runs_is_named_package_by_package():
    before = {"data": "a", "code": "1", "versions": "numpy 2.4, torch 2.13", "data.root": "/x"}
    now = {"data": "a", "code": "2", "versions": "numpy 2.4, torch 2.14", "data.root": "/y"}
    assert differences(before, now) == ["code 1 -> 2", "versions torch 2.13 -> torch 2.14"]
    assert differences(before, before) == []


def own_facts(*, num_workers=0, width=8, packages=("directory (code 0123)",), first=None, same_work=(), **execution):
    settings = {
        "seed_everything": 1,
        "model": {"class_path": "acme.Tagger", "init_args": {"width": width}},
        "data": {"class_path": "acme.Notes", "init_args": {"num_workers": num_workers}},
    }
    own = {"settings": settings, "packages": packages, "ckpt_sha256": first}
    tree = {"lightning": own, "speedup": FIXED["speedup"]}
    config = validate(tree | {"execution": FIXED["execution"] | {"precision": "32-true"} | execution})
    hardware = Hardware(host="host", cpu_name="EPYC", num_cores=2, memory_bytes=2**33, cpu_bf16=True)
    return module_facts(config, "c0", {"torch": "2.13.0"}, resolve(config, hardware, 0), same_work)


@pytest.mark.parametrize(
    ("second", "broken"),
    [
        (own_facts(num_workers=2, precision="bf16-mixed"), set()),
        (own_facts(width=16), {"model.init_args.width"}),
        (own_facts(packages=("directory (code 4567)",)), {"packages"}),
        (own_facts(first="a" * 64), {"weights"}),
    ],
)
def test_own_code_does_the_same_work_if_its_settings_and_its_files_are_the_same(second, broken):
    assert breaking(own_facts(), second) == broken


def test_own_code_scales_with_its_devices_and_has_settings_that_its_author_calls_the_same_work():
    verdict = match(own_facts(), own_facts(num_devices=2))
    assert (verdict.matches, verdict.scaling) == (True, "weak")
    widths = [own_facts(width=width, same_work=["model.init_args.width"]) for width in (8, 16)]
    assert match(*widths).matches
