"""The program of the archive gives the product's own figures, in all kinds of results."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from paceline.tasks.measure.probe import MIN_STEPS_TO_DROP_FIRST
from paceline.tasks.measure.warm_up import num_warm_up
from paceline.tasks.records.execution import BASELINE, ladder_arms
from paceline.tasks.records.measurement import Block
from paceline.tasks.speedup.evidence import recompute
from tests.support.evidence import BUSY, QUIET, SimulatedProbe, evidence_of
from tests.support.reports import CANDIDATE, limited

TWO_ARMS = {"baseline": 0.1, "candidate": 0.06}
EFFICIENCY = TWO_ARMS | {"single": 0.055}
DIAGNOSIS = EFFICIENCY | {"half_batch": 0.04, "no_sync": 0.05, "synthetic_input": 0.052, "alone": 0.055}
UPDATE = DIAGNOSIS | {"no_update": 0.055}
COMPILED = {"compile": "step", "num_threads": 1}
LADDER = TWO_ARMS | {
    role: 0.09 + 0.01 * number
    for number, role in enumerate(ladder_arms(BASELINE, CANDIDATE.model_copy(update=COMPILED)))
}
EARLIER = (1.6, 1.72, 1.65, 1.58, 1.69)


def started(number, num_devices=1, steps=3, **machine):
    """Probes of further processes, each a little faster or slower, with their step times."""
    random = np.random.default_rng(number)
    probes = []
    for seed in range(number):
        seconds = {"baseline": 0.1, "candidate": 0.06 * np.exp(random.normal(0, 0.03))}
        simulated = SimulatedProbe(seconds, seed=100 + seed, num_devices=num_devices, **machine)
        probes.append(simulated.measure(num_blocks=4 + 2 * seed, steps_per_block=steps, max_seconds=5))
    return tuple(probes)


CASES = {
    "plain": (TWO_ARMS, {}, {}, {}),
    "two rounds": (TWO_ARMS, {}, {"max_seconds": 0.9}, {}),
    **{f"{number} rounds": (TWO_ARMS, {}, {"num_blocks": number}, {}) for number in (3, 4, 5, 6, 7, 8, 24, 60)},
    **{f"{number} steps": (TWO_ARMS, {}, {"steps_per_block": number}, {}) for number in (1, 2, 3)},
    "alike": (TWO_ARMS, {"alike": 0.9}, {"num_blocks": 24}, {}),
    "warm-up": (TWO_ARMS, {"slow_seconds": 3.0}, {"num_blocks": 16}, {}),
    "carry-over": (TWO_ARMS, {"carried": 0.2, "noise": 0.005}, {"num_blocks": 16}, {}),
    "spikes": (TWO_ARMS, {"spikes": {"baseline": 0.3}}, {"steps_per_block": 9}, {}),
    "slower": ({"baseline": 0.06, "candidate": 0.1}, {}, {}, {}),
    "equal": ({"baseline": 0.1, "candidate": 0.1}, {"noise": 0.0}, {}, {}),
    "stopped early": (TWO_ARMS, {}, {"target_half_width": 0.5}, {}),
    **{f"{number} starts": (TWO_ARMS, {}, {}, {"earlier": EARLIER[:number]}) for number in (3, 4, 5)},
    "40 starts": (TWO_ARMS, {}, {}, {"earlier": 8 * EARLIER}),
    "narrow starts": (TWO_ARMS, {}, {}, {"earlier": (1.65, 1.651, 1.652, 1.65)}),
    **{f"{number} processes": (TWO_ARMS, {}, {}, {"starts": started(number)}) for number in (1, 2, 5)},
    "processes of steps that are a mean": (TWO_ARMS, {}, {"steps_per_block": 1}, {"starts": started(3, steps=1)}),
    "a disturbed process": (TWO_ARMS, {}, {}, {"starts": (*started(2), *started(1, validities=9 * (BUSY,)))}),
    "processes and starts": (EFFICIENCY, {"num_devices": 2}, {}, {"starts": started(2, 2), "earlier": EARLIER}),
    "one round": (TWO_ARMS, {}, {"max_seconds": 0.1}, {}),
    "starts without an interval": (TWO_ARMS, {}, {"max_seconds": 0.9}, {"earlier": EARLIER}),
    "measured again": (TWO_ARMS, {"validities": (BUSY, BUSY, QUIET)}, {"max_seconds": 12}, {}),
    "two devices": (EFFICIENCY, {"num_devices": 2}, {}, {"world_size": 2}),
    "diagnosis": (DIAGNOSIS, {"num_devices": 2}, {}, {"world_size": 2}),
    "diagnosis of two rounds": (DIAGNOSIS, {"num_devices": 2}, {"max_seconds": 0.9}, {}),
    "update": (UPDATE, {"num_devices": 2}, {}, {"world_size": 2}),
    "slow rank": (UPDATE, {"num_devices": 2, "slow_rank": 1.3}, {}, {"world_size": 2}),
    "slow rank of two rounds": (UPDATE, {"num_devices": 2, "slow_rank": 1.3}, {"max_seconds": 0.9}, {}),
    "ladder": (LADDER, {"changes": COMPILED}, {}, {}),
    "compiled": (TWO_ARMS | {"uncompiled": 0.08}, {}, {}, {}),
    "not counted": (TWO_ARMS, {}, {}, {"cost": None}),
    "no limit": (TWO_ARMS, {}, {}, {"limit": None}),
    "no bound of the traffic": (TWO_ARMS, {}, {}, limited(of_bandwidth=None)),
    "data sheet": (TWO_ARMS, {}, {}, limited(device_name="NVIDIA H100 80GB HBM3")),
    "no window": (TWO_ARMS, {}, {}, {"windows": (), "window_samples": ()}),
}


@pytest.fixture(params=CASES, scope="module")
def case(request):
    """Summary, files of evidence."""
    step_seconds, machine, settings, fields = CASES[request.param]
    return evidence_of(*SimulatedProbe(step_seconds, **machine).measure(**settings), **fields)


def numbers(tree, path=""):
    """Paths of all numbers, truth values and unknown values in a tree, without the state of the machine."""
    if isinstance(tree, dict):
        return set().union(*(numbers(tree[name], f"{path}.{name}") for name in tree if name != "validity"))
    if isinstance(tree, (list, tuple)):
        return set().union(*(numbers(value, f"{path}.{number}") for number, value in enumerate(tree)))
    return set() if isinstance(tree, str) else {path[1:]}


TEXTS = {
    f"speedup.{name}" for name in ("baseline_arithmetic", "candidate_arithmetic", "bound", "contaminated", "starts")
}
TEXTS |= {"speedup.headline", "speedup.equal_hardware"}  # without the arms that they need


def test_every_number_of_the_summary_is_recomputed(case):
    summary, files = case
    figures, differ = recompute.check(files)
    assert differ == []
    assert numbers({name: summary[name] for name in ("speedup", "train")}) - TEXTS - set(figures) == set()


@pytest.mark.parametrize(("slow_seconds", "num_warm_up"), [(0.0, 0), (3.0, 2), (13.0, 10)])
def test_arms_that_leave_early_or_have_all_cores_are_recomputed_too(slow_seconds, num_warm_up):
    """The slow loop leaves the rounds: what is left is faster, which is no warm-up."""
    arms = TWO_ARMS | {"competent": 0.5, "all_cores": 0.07}
    probe, raw = SimulatedProbe(arms, slow_seconds=slow_seconds, num_devices=2).measure(num_blocks=24)
    assert len(probe.warm_up) == num_warm_up
    summary, files = evidence_of(probe, raw, world_size=2)
    figures, differ = recompute.check(files)
    assert differ == []
    assert summary["speedup"]["ratios"]["competent"]["value"] == pytest.approx(0.5 / 0.06, rel=0.1)
    assert {"speedup.ratios.competent.low", "speedup.equal_hardware.value"} <= figures.keys()


def test_the_numbers_are_those_of_the_product(case):
    """Independent of what the archive holds as printed."""
    summary, files = case
    figures, _ = recompute.check(files)
    for name, value in figures.items():
        printed = summary
        for part in name.split("."):
            printed = printed[int(part)] if isinstance(printed, (list, tuple)) else printed[part]
        assert value == (None if printed is None else pytest.approx(printed, rel=1e-9, abs=1e-12)), name


def test_kinds_of_results_are_all_there():
    """Cases without an interval, with a widened one, of one and of further starts, and with each share known once."""
    known = {}
    for step_seconds, machine, settings, fields in CASES.values():
        figures, _ = recompute.check(
            evidence_of(*SimulatedProbe(step_seconds, **machine).measure(**settings), **fields)[1]
        )
        for name, value in figures.items():
            known.setdefault(name, set()).add(value is not None)
    shares = {name for name in known if ".shares." in name and not name.endswith((".1", ".2"))}
    always = {"speedup.num_blocks", "speedup.ratio", "speedup.typical_ratio", *shares}
    always |= {"speedup.process_ratio"} | {name for name in known if ".start_r" in name}
    always |= {f"speedup.{arm}_samples_per_second" for arm in ("baseline", "candidate")}
    assert {name for name, values in known.items() if values == {True}} == always | {
        "speedup.num_starts",
        "speedup.num_warm_up",
    }
    assert [name for name, values in known.items() if values == {False}] == []


def test_the_warm_up_of_any_series_is_that_of_the_probe():
    """Falls of all sizes, in noise of which neighbouring rounds are alike."""
    generator, found = np.random.default_rng(3), set()
    for number in range(400):
        noise = generator.normal(size=(count := int(generator.integers(6, 25))))
        for at in range(1, count):
            noise[at] += (number % 8) / 10 * noise[at - 1]
        fall = generator.uniform(0, 5) * (np.arange(count) < generator.integers(2, count))
        slowness = 0.02 * (noise + fall)
        block = Block(arm="candidate", num_steps=1, seconds_per_sample=1.0)
        rounds = [[block.model_copy(update={"seconds_per_sample": float(np.exp(value))})] for value in slowness]
        assert recompute.warm_up(slowness) == num_warm_up(rounds)
        found.add(num_warm_up(rounds))
    assert len(found) > 5


def test_warm_up_and_carry_over_are_recomputed_where_they_occur():
    dropped, carried = (
        evidence_of(*SimulatedProbe(TWO_ARMS, **machine).measure(num_blocks=16))[0]["speedup"]
        for machine in ({"slow_seconds": 3.0}, {"carried": 0.2, "noise": 0.005})
    )
    assert (dropped["num_warm_up"] > 0, dropped["num_blocks"]) == (True, 16 - dropped["num_warm_up"])
    assert carried["carry_over"] == pytest.approx(0.095, abs=0.015)
    assert carried["carry_over_p"] < 0.01
    assert carried["process_low"] < 0.1 / 0.06 < carried["ratio"]


def test_a_figure_that_was_not_measured_is_noticed():
    _, files = evidence_of(*SimulatedProbe(TWO_ARMS).measure())
    summary = json.loads(files["summary.json"])
    summary["figures"]["speedup.low"] *= 1 + 1e-7
    summary["figures"]["speedup.mfu"] = 0.5
    files |= {"summary.json": json.dumps(summary).encode()}
    files |= {"SHA256SUMS": recompute.sums_of(files)}
    assert recompute.check(files)[1] == ["speedup.low", "speedup.mfu"]


@pytest.mark.parametrize("degrees", [2, 3, 4, 5, 11, 29])
@pytest.mark.parametrize("probability", [0.9, 0.975, 0.99, 0.9999])
def test_quantiles_of_student(degrees, probability):
    assert recompute.t_quantile(probability, degrees) == pytest.approx(stats.t.ppf(probability, degrees), rel=1e-12)


def test_the_same_steps_count():
    assert recompute.MIN_STEPS_TO_DROP_FIRST == MIN_STEPS_TO_DROP_FIRST


def unpacked(directory, files):
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return directory


ALONE = """
import sys
class NumpyAlone:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"scipy", "pandas", "pyarrow", "pydantic", "paceline", "torch", "mlflow"}:
            raise ImportError(name)
sys.meta_path.insert(0, NumpyAlone())
import runpy
sys.argv[:] = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_alone(directory):
    command = [sys.executable, "-c", ALONE, str(directory / "recompute.py")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_the_program_needs_numpy_alone(tmp_path):
    summary, files = evidence_of(*SimulatedProbe(DIAGNOSIS, num_devices=2).measure(), earlier=EARLIER)
    done = run_alone(unpacked(tmp_path, files))
    assert (done.returncode, done.stderr) == (0, "")
    printed = dict(line.split() for line in done.stdout.splitlines()[:-1])
    assert float(printed["speedup.ratio"]) == pytest.approx(summary["speedup"]["ratio"], rel=1e-9)
    assert float(printed["speedup.low"]) == pytest.approx(summary["speedup"]["low"], rel=1e-9)
    assert done.stdout.splitlines()[-1] == f"0 of {len(printed)} figures differ from the summary by more than 1e-09"


def test_a_changed_byte_of_any_file_leaves_no_number(tmp_path):
    _, files = evidence_of(*SimulatedProbe(TWO_ARMS).measure())
    program = runpy.run_path(recompute.__file__)["main"]
    unpacked(tmp_path, files)
    assert program([str(tmp_path)]) == 0
    random = np.random.default_rng(0)
    for name, content in files.items():
        for place in random.integers(0, len(content), 20).tolist():
            changed = bytearray(content)
            changed[place] ^= 1
            (tmp_path / name).write_bytes(changed)
            assert program([str(tmp_path)]) == 2, (name, place)
        (tmp_path / name).write_bytes(content)


def test_a_changed_byte_is_reported_with_its_file(tmp_path):
    _, files = evidence_of(*SimulatedProbe(TWO_ARMS).measure())
    unpacked(tmp_path, files | {"evidence.json": files["evidence.json"].replace(b"0.1", b"0.2")})
    (tmp_path / "evidence.json").write_bytes(files["evidence.json"] + b" ")
    done = run_alone(tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: evidence.json changed after the evidence was written\n"


def test_it_is_a_file_of_the_product():
    assert Path(recompute.__file__).parts[-4:] == ("tasks", "speedup", "evidence", "recompute.py")
