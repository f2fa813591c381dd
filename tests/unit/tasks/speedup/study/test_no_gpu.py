"""The study "no GPU?" of made-up trainings: what is measured, what is estimated, and the verdict."""

import html
import re

import pytest

from paceline.tasks.records.cost import Cost
from paceline.tasks.report.no_gpu_report import HEAD, draw_no_gpu, no_gpu_table, render_no_gpu
from paceline.tasks.speedup.data_sheet import SHEETS, max_prediction_throughput, max_training_throughput
from paceline.tasks.speedup.hardware_table import HardwareRow
from paceline.tasks.speedup.study.no_gpu import (
    FEATURES,
    SCRATCH,
    TUNED,
    Gpu,
    NoGpuResult,
    TargetScore,
    measured_way,
    way_on_gpu,
)
from paceline.tasks.speedup.study.no_gpu_verdict import judge, notes_of
from paceline.tasks.speedup.study.pairs import StudyRuns
from paceline.tasks.speedup.study.records import ArmRun, PredictionThroughput, StudyArm

COST = Cost(forward_flops=1e9, training_flops=3e9, num_parameters=1_000_000, image_bytes=3072)
RATES = {SCRATCH: PredictionThroughput(eager=500.0, executed=1000.0)}
ARMS = [StudyArm(name=name, overrides=(), group="", is_baseline=name == SCRATCH) for name in (SCRATCH, TUNED, FEATURES)]
START = 5.0


def run(name, repeat, scores, epoch, **fields):
    """A run whose epochs take `epoch` seconds each after five of starting up."""
    validation = tuple((START + epoch * (number + 1), score) for number, score in enumerate(scores))
    known = {"end_to_end_seconds": validation[-1][0], "accuracy": 0.8, "num_test": 1000} | (
        {} if name == SCRATCH else {"num_gained": 10, "num_lost": 10}
    )
    return ArmRun(
        **{
            "arm": name,
            "repeat": repeat,
            "position": 0,
            "run_id": f"{name}-{repeat}",
            "facts": {"device": "Xeon"},
            "num_epochs": len(scores),
            "startup_seconds": START,
            "validation": validation,
        }
        | known
        | fields
    )


def runs_of(repeats=3, tuned=(0.6, 0.85), features=(0.82,), **fields):
    """From scratch 0.8 in 100 s; fine-tuned by the second of epochs of 10 s; features in 4 s."""
    found = []
    for repeat in range(repeats):
        found += [
            run(SCRATCH, repeat, (0.5, 0.6, 0.7, 0.8), 25.0, **fields.get("of_scratch", {})),
            run(TUNED, repeat, tuned, 10.0, **fields.get("of_tuned", {})),
            run(FEATURES, repeat, features, 4.0, **fields.get("of_features", {})),
        ]
    return found


def result_of(runs, target=None, repeats=3, gpu=None):
    goal = TargetScore(StudyRuns(ARMS, runs), target)
    gpu = gpu or gpu_of()
    found = NoGpuResult(
        run_id="0" * 32,
        experiment="paceline",
        preset="cifar10",
        pretrained="18 tensors of weights.pt",
        layer="pool",
        num_repeats=repeats,
        target=target,
        targets=goal.all(),
        ways=(*(measured_way(arm, goal, RATES.get(arm.name)) for arm in ARMS), *on_gpu(goal, gpu)),
        cost=gpu.cost,
        sheet=gpu.sheet,
        hardware="host: 2 cores",
        seconds=400.0,
    )
    choice, verdict = judge(found)
    return found.model_copy(update={"choice": choice, "verdict": verdict, "notes": tuple(notes_of(found))})


def on_gpu(goal, gpu):
    return tuple(way_on_gpu(arm, goal, gpu) for arm in ARMS)


def gpu_of(cost=COST, rows=(), **fields):
    known = {"rates": RATES, "name": None, "num_train": 6400, "batch_size": 64}
    return Gpu(sheet=SHEETS["T4"], rows={SCRATCH: rows}, cost=cost, **(known | fields))


def test_predictions_on_a_disturbed_machine_are_said_to_be():
    found = result_of(runs_of())
    assert not any("Predictions were timed" in note for note in found.notes)
    busy = found.model_copy(update={"prediction_disturbed": ("1.2 of 2 cores busy with other processes",)})
    (told,) = [note for note in notes_of(busy) if "Predictions were timed" in note]
    assert "(1.2 of 2 cores busy with other processes): take their rates for too low" in told


def test_times_to_the_target_are_divided_in_each_repeat():
    found = result_of(runs_of())
    scratch, tuned, features = (found.way(name) for name in (SCRATCH, TUNED, FEATURES))
    assert found.targets == (0.8, 0.8, 0.8)
    assert [way.target_seconds.value for way in (scratch, tuned, features)] == [100.0, 20.0, 4.0]
    assert [way.whole_seconds.value for way in (scratch, tuned, features)] == [105.0, 25.0, 9.0]
    assert tuned.target_ratio.value == pytest.approx(5.0)
    assert features.target_ratio.value == pytest.approx(25.0)
    assert features.whole_ratio.value == pytest.approx(105 / 9)
    assert features.target_ratio.low == pytest.approx(25.0), "three repeats that agree have an interval, of no width"
    assert scratch.target_ratio is None
    assert (scratch.parity, features.parity) == ("unknown", "on par")


def test_too_few_repeats_have_no_interval_and_say_so():
    found = result_of(runs_of(repeats=2), repeats=2)
    ratio = found.way(TUNED).target_ratio
    assert ratio.value == pytest.approx(5.0)
    assert (ratio.low, ratio.high) == (None, None)
    assert any("fewer than 3 repeats have no 95 % interval" in note for note in found.notes)
    assert not any("fewer than 3" in note for note in result_of(runs_of()).notes)


def test_what_never_reaches_the_target_says_never_and_is_not_divided():
    way = result_of(runs_of(features=(0.7,))).way(FEATURES)
    assert (way.target_seconds.kind, way.target_seconds.value) == ("never", None)
    assert way.target_ratio is None
    assert way.whole_ratio is not None

    runs = [one for one in runs_of() if (one.arm, one.repeat) != (TUNED, 1)]
    found = result_of([*runs, run(TUNED, 1, (0.6, 0.7), 10.0)])
    assert (found.way(TUNED).num_reached, found.way(TUNED).num_judged) == (2, 3)
    assert found.way(TUNED).target_ratio is None
    assert "20.0 s (2 of 3)" in no_gpu_table(found)[1][1]
    assert any("reached the target in 2 of 3" in note for note in found.notes)


def test_a_miss_beside_a_disturbed_training_is_a_miss():
    """Which is left out of the pairs, and would leave the others to be divided."""
    runs = [one for one in runs_of(repeats=5) if one.repeat != 2]
    runs += [run(SCRATCH, 2, (0.5, 0.6, 0.7, 0.8), 25.0, contaminated=True), run(TUNED, 2, (0.6, 0.7), 10.0)]
    found = result_of(runs, repeats=5)
    assert (found.way(TUNED).num_reached, found.way(TUNED).num_judged) == (4, 5)
    assert found.way(TUNED).target_ratio is None
    assert found.choice != "fine-tune"


def test_a_given_target_is_the_same_for_all():
    found = result_of(runs_of(), target=0.65)
    assert [found.way(name).target_seconds.value for name in (SCRATCH, TUNED, FEATURES)] == [75.0, 20.0, 4.0]
    assert found.way(TUNED).target_ratio.value == pytest.approx(75 / 20)


WORSE = {"num_gained": 0, "num_lost": 300, "accuracy": 0.5}
SLOW = {"validation": ((305.0, 0.9),), "end_to_end_seconds": 305.0}


@pytest.mark.parametrize(
    ("runs", "choice", "words"),
    [
        (
            runs_of(),
            "features",
            r"take features and a classifier: .* in 0\.04 \[.*\] of the time \(4\.0 s against 1 min 40 s",
        ),
        (runs_of(features=(0.7,)), "fine-tune", r"fine-tune: .* in 0\.20 \[.*\] of the time \(20\.0 s against"),
        (runs_of(of_features=WORSE), "fine-tune", r"fine-tune: .* 80\.00%"),
        (
            runs_of(tuned=(0.5,), features=(0.7,), of_tuned=WORSE, of_features=WORSE | {"accuracy": 0.74}),
            "features",
            r"0\.92 of the accuracy .* \(74\.00% against 80\.00%\) in 0\.09 \[.*\] of its time, though never as good",
        ),
        (
            runs_of(tuned=(0.5,), features=(0.7,), of_tuned=WORSE, of_features=WORSE),
            "from scratch",
            r"train from scratch: the weights do not help: .*features has 0\.62 of its accuracy \(worse\), never",
        ),
        (runs_of(of_tuned=SLOW, of_features=SLOW), "from scratch", r"in 3\.00 \[.*\] of the time to the target"),
        (runs_of(of_scratch={"contaminated": True}), "undecided", r"disturbed the machine in every training"),
        ([one for one in runs_of() if one.arm != SCRATCH], "undecided", r"training from scratch failed"),
    ],
    ids=["features", "fine-tune", "worse", "cheap", "bad", "slow", "disturbed", "failed"],
)
def test_the_verdict_follows_the_rule(runs, choice, words):
    found = result_of(runs)
    assert found.choice == choice
    assert re.search(words, found.verdict), found.verdict


def test_a_target_that_training_from_scratch_never_reaches_gives_no_verdict():
    found = result_of(runs_of(), target=0.95)
    assert (found.choice, found.way(SCRATCH).target_seconds.kind) == ("undecided", "never")
    assert "never reaches the target" in found.verdict


def test_what_a_data_sheet_bounds_is_labelled_and_known_by_hand():
    sheet = SHEETS["T4"]  # 65e12 operations and 320e9 bytes a second
    assert max_prediction_throughput(sheet, COST) == pytest.approx(65e12 / 1e9)
    assert max_prediction_throughput(sheet, COST.model_copy(update={"forward_flops": 1.0})) == pytest.approx(
        320e9 / 3072
    )
    assert max_training_throughput(sheet, COST, 64) == pytest.approx(65e12 / 3e9)
    light = COST.model_copy(update={"training_flops": 1.0})
    assert max_training_throughput(sheet, light, 64) == pytest.approx(320e9 / (3072 + 8e6 / 64))

    scratch, tuned, features = on_gpu(TargetScore(StudyRuns(ARMS, runs_of()), None), gpu_of())
    assert not scratch.is_measured
    assert scratch.basis == "estimate: bound by data sheet (NVIDIA T4 data sheet, 2019)"
    assert (scratch.executed.kind, scratch.executed.value) == ("at most", pytest.approx(65_000))
    assert (scratch.target_seconds.kind, tuned.whole_seconds.kind) == ("at least", "at least")
    assert scratch.target_seconds.value == pytest.approx(4 * 6400 / (65e12 / 3e9))
    assert tuned.whole_seconds.value == pytest.approx(2 * 6400 / (65e12 / 3e9))
    assert scratch.joules.kind == scratch.eager.kind == features.target_seconds.kind == "not measured"


def test_without_any_basis_nothing_is_told():
    for way in on_gpu(TargetScore(StudyRuns(ARMS, runs_of()), None), gpu_of(cost=None)):
        cells = (way.target_seconds, way.whole_seconds, way.joules, way.eager, way.executed)
        assert {(cell.kind, cell.value) for cell in cells} == {("not measured", None)}
        assert way.basis == "not measured, no basis"


ROW = HardwareRow(
    device="H200",
    num_devices=1,
    execution="bf16-mixed",
    num_runs=2,
    samples_per_second=12_800.0,
    speedup=20.0,
    fixed_seconds=6.0,
    joules_per_sample=0.01,
    prediction_samples_per_second=90_000.0,
)


def test_matched_runs_on_a_gpu_come_before_data_sheets():
    scratch, tuned, _ = on_gpu(TargetScore(StudyRuns(ARMS, runs_of()), None), gpu_of(rows=(ROW,)))
    assert (scratch.device, scratch.basis) == ("1 x H200", "estimate: 2 matched runs in the store")
    assert (scratch.target_seconds.kind, scratch.target_seconds.value) == ("about", pytest.approx(2.0))
    assert scratch.whole_seconds.value == pytest.approx(8.0)
    assert scratch.joules.value == pytest.approx(256.0)
    assert (scratch.executed.kind, scratch.executed.value) == ("about", 90_000.0)
    assert tuned.basis.startswith("estimate: bound"), "nobody fine-tuned on a GPU"


def test_a_gpu_is_rented_by_matched_runs_alone():
    assert result_of(runs_of(), gpu=gpu_of(rows=(ROW,))).choice == "gpu", "2 s against 4 s"
    slower = ROW.model_copy(update={"samples_per_second": 12_000.0})
    assert result_of(runs_of(), gpu=gpu_of(rows=(slower,))).choice == "features"
    found = result_of(runs_of(tuned=(0.5,), features=(0.7,), of_tuned=WORSE, of_features=WORSE))
    assert found.choice == "from scratch", "no bound of a data sheet is a ground to rent anything"


def test_a_gpu_of_this_host_is_measured():
    rates = {SCRATCH: PredictionThroughput(eager=500.0, executed=1000.0, gpu=80_000.0)}
    scratch, tuned, _ = on_gpu(
        TargetScore(StudyRuns(ARMS, runs_of()), None), gpu_of(rows=(ROW,), rates=rates, name="L4")
    )
    assert (scratch.executed.kind, scratch.executed.value) == ("measured", 80_000.0)
    assert scratch.executed.basis == "on this host's L4"
    assert tuned.executed.kind == "at most"
    assert scratch.basis.endswith("; prediction measured on this host's L4")
    assert "measured on" not in tuned.basis


def test_the_table_and_the_page_say_how_each_figure_is_known():
    found = result_of(runs_of())
    head, rows = no_gpu_table(found)
    assert head == HEAD
    assert [(row[0], row[1]) for row in rows[:3]] == [(name, "Xeon") for name in (SCRATCH, TUNED, FEATURES)]
    assert rows[0][3:9] == ["1 min 40 s", "1", "1 min 45 s", "1", "not measured", "1,000/s"]
    assert rows[2][3:5] == ["4.0 s", "25.00 [25.00, 25.00]"]
    assert rows[3][1:4] == ["T4", "\N{EN DASH}", "at least 1.2 s"]
    assert rows[3][8] == "at most 65,000/s"
    page = render_no_gpu(found, {"torch": "2.13"})
    for words in (found.verdict, "at most 65,000/s", "neither NVML nor RAPL can be read", "NVIDIA T4 data sheet, 2019"):
        assert html.escape(words) in page, words
    assert set(draw_no_gpu(found)) == {"target", "whole"}
    assert draw_no_gpu(result_of(runs_of(of_scratch={"contaminated": True}))) == {}


def test_times_are_of_undisturbed_trainings_where_there_are_any():
    runs = runs_of(repeats=2)
    slow = run(SCRATCH, 2, (0.5, 0.6, 0.7, 0.8), 250.0, contaminated=True)
    found = result_of([*runs, slow, run(TUNED, 2, (0.6, 0.85), 10.0), run(FEATURES, 2, (0.82,), 4.0)])
    assert found.way(SCRATCH).target_seconds.value == 100.0
    assert found.way(SCRATCH).basis == "measured, 3 trainings, 1 disturbed"
    assert found.way(FEATURES).num_pairs == 2
    assert "in 0.04 (of 2 pairs: no interval) of the time (4.0 s against 1 min 40 s)" in found.verdict
    alone = result_of([slow, *runs_of(repeats=0)])
    assert alone.way(SCRATCH).target_seconds.value == 1000.0


def test_failed_and_disturbed_trainings_are_told():
    failed = ArmRun(arm=TUNED, repeat=2, position=8, status="failed", error="the loss is nan")
    runs = [one for one in runs_of(of_features={"contaminated": True}) if (one.arm, one.repeat) != (TUNED, 2)]
    found = result_of([*runs, failed])
    assert (found.way(TUNED).num_done, found.way(TUNED).num_failed) == (2, 1)
    assert any("the loss is nan" in note for note in found.notes)
    assert any(note.startswith("3 trainings were disturbed") for note in found.notes)
