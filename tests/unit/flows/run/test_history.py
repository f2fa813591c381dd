"""Metrics of a run of a series, as its store has them."""

from paceline.flows.run.history import _parse, run_metrics
from paceline.tasks.speedup.forecast.records import Check
from paceline.tasks.speedup.nights.regression import judge

METRICS = {"throughput/steady_samples_per_second": 900.0, "throughput/baseline_samples_per_second": 450.0}


def test_the_control_counts_only_where_its_probe_was_undisturbed():
    clean = run_metrics("a", METRICS, {"paceline.contaminated": "False", "paceline.hosts": "n1, n2"}, 5.0)
    assert (clean.baseline_throughput, clean.host, clean.start_time) == (450.0, "n1, n2", 5.0)
    disturbed = run_metrics("a", METRICS, {"paceline.contaminated": "True"}, 5.0)
    assert (disturbed.throughput, disturbed.baseline_throughput) == (900.0, None)


def test_a_run_from_before_hosts_were_recorded_counts_as_of_the_commands_host():
    assert run_metrics("a", METRICS, {"paceline.host": "laptop"}, 5.0).host == "laptop"
    assert run_metrics("a", METRICS, {}, 5.0).host == ""


def test_a_slower_gpu_is_named_as_what_grew_and_its_waits_for_data_stay_unknown():
    """The host launches as fast as before, and waits longer for the device."""

    def night(device_seconds, rate):
        seconds = {"forward": 2.0, "backward": 3.0, "data_wait": 0.1, "device": device_seconds, "startup": 9.0}
        metrics = {f"time/{item}_seconds": value for item, value in seconds.items()}
        rates = METRICS | {"throughput/samples_per_second": rate, "throughput/steady_samples_per_second": rate}
        return run_metrics("night", metrics | rates, {"paceline.contaminated": "False"}, 0.0)

    judged = judge([*[night(5.0, 1000.0)] * 8, night(15.0, 500.0)])
    assert judged.verdict == "regression"
    assert judged.grew == "device"
    assert [change.name for change in judged.changes] == ["throughput"]
    assert night(5.0, 1000.0).data_wait is None


def test_a_document_of_another_version_is_as_if_it_were_not_there():
    assert _parse(Check, None) is None
    assert _parse(Check, {"predicted": 1.9, "whatever": True}) is None
