import pytest

from paceline.tasks.doctor.figures import DeviceFigures, LinkFigures, Measurements, judge_measurements


def device(number, host="a", model="CPU", threads=1, flops=100e9, memory=10e9, **others):
    return DeviceFigures(
        host=host,
        device=f"cpu-{number}",
        model=model,
        num_threads=threads,
        rates={"32-true": flops, "memory": memory, "host_to_device": None},
        **others,
    )


def findings(devices=(), last=None, **measured):
    judged = judge_measurements(Measurements(devices=tuple(devices), **measured), last)
    return {finding.check.removeprefix("measure "): finding for finding in judged}


@pytest.mark.parametrize(
    ("num_peers", "flops", "status"), [(3, 79e9, "warning"), (3, 81e9, "ok"), (2, 10e9, "ok"), (3, 200e9, "ok")]
)
def test_a_device_slower_than_three_peers_is_named(num_peers, flops, status):
    found = findings([device(0, flops=flops), *(device(number) for number in range(1, num_peers + 1))])
    assert found["a cpu-0"].status == status
    assert ("32-true is 0.79 of the median of its peers" in found["a cpu-0"].found) == (status == "warning")
    assert {finding.status for name, finding in found.items() if name != "a cpu-0"} <= {"ok"}


def test_only_devices_of_a_kind_are_peers():
    others = [device(1, model="other"), device(2, threads=2), device(3), device(4), device(5, disturbed=("busy",))]
    assert findings([device(0, flops=1e9), *others])["a cpu-0"].status == "ok"


def test_the_last_measurement_is_compared_by_name_and_kind():
    last = Measurements(devices=(device(0), device(1), device(2, threads=4)))
    found = findings([device(0, memory=5e9), device(1), device(2, flops=1e9)], last)
    assert {name: finding.status for name, finding in found.items()} == {
        "a cpu-0": "warning",
        "a cpu-1": "ok",
        "a cpu-2": "ok",
    }
    assert "memory is 0.50 of the last measurement" in found["a cpu-0"].found
    assert (
        findings([device(0, memory=5e9)], Measurements(devices=(device(0, disturbed=("x",)),)))["a cpu-0"].status
        == "ok"
    )


def test_a_disturbed_measurement_is_compared_with_nothing():
    found = findings([device(0, flops=1.0, disturbed=("1.00 cores busy",))], Measurements(devices=(device(0),)))
    assert found["a cpu-0"].status == "warning"
    assert found["a cpu-0"].found.endswith("; 1.00 cores busy")


def test_a_gpu_is_compared_with_its_data_sheet():
    gpu = DeviceFigures(
        host="a",
        device="GPU-a",
        model="NVIDIA H100 80GB HBM3",
        num_threads=None,
        rates={"bf16-mixed": 700e12, "32-true": 20e12, "memory": 2.9e12, "host_to_device": 50e9},
    )
    found = findings([gpu])["a GPU-a"]
    assert found.status == "warning"
    assert "32-true is 0.30 of the data sheet" in found.found
    assert "bf16-mixed is" not in found.found
    assert "host_to_device 50 GB/s" in found.found


def link(*names, rate):
    return LinkFigures(devices=names, bytes_per_second=rate)


def test_a_slow_link_is_named_among_links_of_its_reach():
    within = [link(f"a {i}", f"a {j}", rate=100e9) for i, j in ((0, 1), (0, 2), (1, 2))]
    slow = link("a 2", "a 3", rate=50e9)
    between = [link("a 0", "b 0", rate=10e9), link(*(f"a {i}" for i in range(4)), rate=40e9)]
    found = findings(links=(*within, slow, *between))["links"]
    assert found.status == "warning"
    assert found.found.endswith("; a 2 - a 3: all-reduce is 0.50 of the median of its peers")
    again = findings(links=tuple(between), last=Measurements(links=(link("a 0", "b 0", rate=20e9),)))["links"]
    assert "a 0 - b 0: all-reduce is 0.50 of the last measurement" in again.found


def test_what_was_skipped_has_its_reason():
    found = findings(skipped={"a cpu-0": "in use by run 7"})["a cpu-0"]
    assert (found.status, found.found) == ("warning", "not measured: in use by run 7")
