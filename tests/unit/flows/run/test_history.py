"""Metrics of a run of a series, as its store has them."""

from paceline.flows.run.history import run_metrics

METRICS = {"throughput/steady_samples_per_second": 900.0, "throughput/baseline_samples_per_second": 450.0}


def test_the_control_counts_only_where_its_probe_was_undisturbed():
    clean = run_metrics("a", METRICS, {"paceline.contaminated": "False", "paceline.hosts": "n1, n2"}, 5.0)
    assert (clean.baseline_throughput, clean.host, clean.start_time) == (450.0, "n1, n2", 5.0)
    disturbed = run_metrics("a", METRICS, {"paceline.contaminated": "True"}, 5.0)
    assert (disturbed.throughput, disturbed.baseline_throughput) == (900.0, None)


def test_a_run_from_before_hosts_were_recorded_counts_as_of_the_commands_host():
    assert run_metrics("a", METRICS, {"paceline.host": "laptop"}, 5.0).host == "laptop"
    assert run_metrics("a", METRICS, {}, 5.0).host == ""
