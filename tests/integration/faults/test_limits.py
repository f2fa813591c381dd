"""Bottlenecks and disturbances planted into real ranks, and what the measurement says of them."""

import os

import pytest

from tests.support.limits import LIMITS, NETWORKS, measure_limit
from tests.support.own_package import install

TRIES = 2
MEASURED = [name for name, limit in LIMITS.items() if limit.bottleneck is not None and not limit.is_run]


@pytest.fixture
def measured(make_job, cluster_address, tmp_path):
    """Measures a planted limit."""
    return lambda name: measure_limit(name, make_job, cluster_address, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", MEASURED)
def test_a_planted_limit_is_named(measured, name):
    """Skips where others use the machine: what is measured then says little."""
    for _ in range(TRIES):
        probe, result = measured(name)
        cause = LIMITS[name].bottleneck
        if LIMITS[name].is_named(result.model_dump()):
            assert result.cause == ("contaminated machine" if probe.validity.contaminated else cause)
            return
        if not probe.validity.contaminated:
            pytest.fail(f"{result.bottleneck}: {' '.join(result.diagnosis)}")
    pytest.skip(f"others use this machine: {'; '.join(probe.validity.reasons)}")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, limit in LIMITS.items() if limit.is_run])
def test_arithmetic_and_memory_traffic_are_told_apart(call, tmp_path, name):
    install(tmp_path, "traffic", {"net": NETWORKS}, models={"traffic": "net:Traffic", "layers": "net:Layers"})
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    result = call("run", "digits", "--diagnose", *LIMITS[name].overrides, PYTHONPATH=path)["speedup"]
    if not LIMITS[name].is_named(result) and result["contaminated"]:
        pytest.skip(f"others use this machine: {'; '.join(result['validity']['reasons'])}")
    assert LIMITS[name].is_named(result), (result["verdict"], result["diagnosis"])


@pytest.mark.slow
def test_heat_makes_a_measurement_contaminated(measured):
    probe, result = measured("heat")
    assert probe.validity.throttled == ("thermal",)
    assert LIMITS["heat"].is_named(result.model_dump())
    assert result.contaminated


@pytest.mark.slow
def test_a_neighbour_is_seen_and_the_measurement_repeated_and_marked(measured):
    probe, result = measured("a neighbour")
    assert probe.validity.contaminated
    assert probe.validity.foreign_load > 0.25
    assert probe.num_repeats >= 1 or probe.seconds > 6, "started again where time allowed"
    assert LIMITS["a neighbour"].is_named(result.model_dump())
    assert result.contaminated
