"""The share of a device's limit of made-up trainings, and what is said of it."""

import pytest

from paceline.tasks.report.summary import summary_table
from paceline.tasks.speedup.data_sheet import SHEETS, sheet_of
from paceline.tasks.speedup.limit_share import SHARES, LimitShare, add_share, format_flops, limit_share
from paceline.tasks.speedup.records import SpeedupResult
from paceline.tasks.speedup.verdict import speedup_result
from tests.support.reports import CANDIDATE, limited, make_probe, make_train

H100 = "NVIDIA H100 80GB HBM3"
WINDOWS = ((0, 10, 21.0), (10, 10, 2.0), (20, 10, 2.0), (30, 10, 2.0))


def share_of(probe=None, **fields):
    return limit_share(make_train(probe or make_probe(noise=0.0), **(limited() | fields)))


def test_the_share_is_that_of_the_probe_s_step_at_its_precision():
    share = share_of()
    assert share.precision == "bf16-mixed"
    assert share.flops_per_second == pytest.approx(3e9 * 750)
    assert share.of_limit == pytest.approx(0.71)
    assert (share.bytes_per_second, share.of_bandwidth) == (pytest.approx(2e9), pytest.approx(0.2))
    assert share.bound is None, "there may be more traffic than the least"
    assert share_of(**limited(0.12, 0.6)).bound == "memory"
    assert (share.mfu, share.why_no_share) == (None, ""), "a CPU has no data sheet here"


def test_a_limit_that_a_busy_machine_has_lowered_below_the_training_is_none():
    limit = limited(1.2)["limit"]
    assert share_of(limit=limit).of_limit == pytest.approx(1.2), "kernels may need fewer operations"
    share = share_of(limit=limit.model_copy(update={"contaminated": True}))
    assert share.of_limit is None
    assert "the machine was busy" in share.why_no_share


def test_without_a_probe_it_is_that_of_the_steady_state():
    plan = {"num_epochs": 1, "steps_per_epoch": 40, "samples_per_epoch": 4000}
    share = limit_share(make_train(None, **(limited() | plan | {"windows": WINDOWS, "plan": share_plan()})))
    assert share.flops_per_second == pytest.approx(3e9 * 500)
    assert share.of_limit == pytest.approx(0.71 * 500 / 750)


def share_plan():
    from tests.support.reports import make_report

    return make_report(None).plan


def test_each_of_several_devices_has_its_part():
    two = CANDIDATE.model_copy(update={"num_devices": 2})
    # A restart on fewer devices keeps the probe of the first attempt.
    share = share_of(make_probe(noise=0.0, candidate=two), world_size=1)
    assert share.flops_per_second == pytest.approx(3e9 * 750 / 2)
    alone = limit_share(make_train(None, **(limited() | {"world_size": 2, "plan": share_plan()})))
    assert alone.flops_per_second == pytest.approx(3e9 * 866 / 2)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"cost": None, "uncounted": "torch does not count mine::op"}, "mine::op"),
        ({"cost": None}, "not counted"),
        ({"limit": None, "uncounted": "no memory"}, "no memory"),
        ({"limit": limited()["limit"].model_copy(update={"flops_per_second": {"32-true": 1e12}})}, "not measured"),
    ],
)
def test_what_is_not_known_is_none_with_a_reason(fields, reason):
    share = share_of(**fields)
    assert (share.of_limit, share.mfu, share.of_bandwidth, share.bound) == (None, None, None, None)
    assert reason in share.why_no_share
    assert (share.flops_per_second is None) == (fields.get("cost", 1) is None)


def test_the_bytes_of_a_step_may_be_unknown():
    share = share_of(**limited(of_bandwidth=None))
    assert (share.of_bandwidth, share.bound, share.bytes_per_second) == (None, None, None)
    assert share.of_limit == pytest.approx(0.71)


def test_mfu_is_the_share_of_the_data_sheet():
    share = share_of(**limited(device_name=H100))
    assert share.mfu == pytest.approx(3e9 * 750 / 989.5e12)


@pytest.mark.parametrize(
    ("device_name", "sheet"),
    [
        (H100, "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("Intel(R) Xeon(R) Processor", None),
        ("Pretended GPU", None),
    ],
)
def test_a_data_sheet_is_found_by_the_name_that_the_driver_gives(device_name, sheet):
    found = sheet_of(device_name)
    assert (found and found.name) == sheet


def test_peaks_fall_with_the_precision():
    for sheet in SHEETS.values():
        assert sheet.flops == sheet.peaks["16-mixed"] == max(sheet.peaks.values())
        assert sheet.peaks["32-true"] < sheet.flops
    assert "bf16-mixed" not in SHEETS["V100"].peaks, "it has no such arithmetic"


def test_the_verdict_quotes_the_share():
    probe = make_probe()
    verdict = speedup_result(probe, make_train(probe, **limited()), num_cores=2).verdict
    assert "the step is probably compute-bound at 71% of what this device does, as no data" in verdict
    memory = make_train(probe, **limited(0.12, 0.6))
    near = speedup_result(probe, memory, num_cores=2).verdict
    assert "at 12% of what this device does, and moves data at 60% of its memory bandwidth or more" in near
    limit = limited()["limit"].model_copy(update={"contaminated": True})
    busy = make_train(probe, **(limited() | {"limit": limit}))
    assert "of what this device does" not in speedup_result(probe, busy, num_cores=2).verdict


def test_the_terminal_shows_rates_and_shares_or_why_there_are_none():
    train = make_train(make_probe(noise=0.0), **limited(device_name=H100))
    assert limit_row(train) == (
        "71% of what this device does in bf16-mixed: 2.25 TFLOP/s of 3.17 TFLOP/s, at least 20% of its memory "
        "bandwidth, MFU 0.2%"
    )
    assert limit_row(make_train(None, uncounted="no products")) == "unknown: no products"


def limit_row(train):
    share = limit_share(train)
    speedup = add_share(SpeedupResult(), share)
    summary = {
        "train": train.model_dump(mode="json") | share.model_dump(include={*SHARES}),
        "speedup": speedup.model_dump(mode="json"),
        "execution": {"precision": "bf16-mixed"},
    }
    return dict(summary_table(summary))["limit"]


def test_an_unknown_share_leaves_the_speedup_as_it_is():
    assert add_share(SpeedupResult(ratio=1.5), LimitShare()) == SpeedupResult(ratio=1.5)


def test_rates_are_written_for_people():
    assert [format_flops(rate) for rate in (1.234e9, 9.9e11, 4.56e12)] == [
        "1.23 GFLOP/s",
        "990 GFLOP/s",
        "4.56 TFLOP/s",
    ]
