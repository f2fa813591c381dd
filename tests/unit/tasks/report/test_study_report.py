"""The pages and pictures of studies and advice, from records whose figures are known."""

import re

import pytest

from paceline.tasks.measure.paired_ratio import Interval
from paceline.tasks.report.forecast_report import advise_table, draw_advise, render_advise
from paceline.tasks.report.plotting import png_bytes
from paceline.tasks.report.study_charts import draw_study
from paceline.tasks.report.study_report import render_study, study_notes, study_table
from paceline.tasks.speedup.forecast.device_profile import rank_moves
from paceline.tasks.speedup.forecast.model import Forecast
from paceline.tasks.speedup.forecast.records import (
    AdviseResult,
    DeviceProfile,
    Interference,
    Link,
    ProfilePoint,
    calibration,
    check,
)
from tests.support.studies import PRECISION, arms_of, result_of, training

QUESTIONS = [
    "How much faster, at 95 % confidence?",
    "Compared with what?",
    "Where did the time go?",
    "What limits it?",
    "What to do next",
]
AMDAHL = {number: 1 / (0.1 + 0.9 / number) for number in (1, 2, 4, 8)}


def wobble(arm, repeat):
    """A few per cent, the same at each call."""
    return 1 + 0.01 * ((hash_of(arm.name) + 3 * repeat) % 5 - 2)


def hash_of(text):
    return sum(map(ord, text))


def study(axes, rate, repeats=3, **arguments):
    arms = arms_of(*axes, **arguments)
    return arms, [
        training(arm, repeat, rate(dict(part.split("=", 1) for part in arm.overrides)) * wobble(arm, repeat), **fields)
        for arm in arms
        for repeat in range(repeats)
        for fields in [{"base": arguments.get("base", ())}]
    ]


def faster_in_bf16(settings):
    return 200.0 if settings["execution.precision"] == "bf16-mixed" else 100.0


def test_the_page_answers_in_the_order_that_was_asked():
    page = render_study(result_of(*study([PRECISION], faster_in_bf16)), {"commit": "abc"})
    titles = re.findall(r"<h2>(.*?)</h2>", page)
    assert titles[: len(QUESTIONS)] == QUESTIONS
    assert re.search(r"2\.0\d x", page)
    assert "with 95 % confidence" in page
    assert "script" not in page.replace("script-src", "")


def test_scaling_has_the_ideal_line_the_laws_and_a_serial_fraction():
    axes = ["execution.num_devices=1,2,4,8"]
    result = result_of(
        *study(axes, lambda s: 100 * AMDAHL[int(s["execution.num_devices"])], base=["recipe.batch_scaling=strong"])
    )
    (scaling,) = result.scalings
    assert scaling.kind == "strong"
    assert {fit.law for fit in scaling.fits} == {"Amdahl", "Universal Scalability"}
    assert scaling.fits[0].parameters["serial_fraction"].value == pytest.approx(0.1, abs=0.03)
    page = render_study(result, {})
    assert "Amdahl, strong scaling" in page
    assert "experimentally determined serial fraction" in page
    assert "scaling-0" in draw_study(result)


def test_too_few_numbers_of_devices_get_no_law_and_say_so():
    axes = ["execution.num_devices=1,2"]
    result = result_of(*study(axes, lambda s: 100.0 * int(s["execution.num_devices"])))
    assert "Weak scaling: no law is fitted to 2 numbers of devices" in render_study(result, {})


def test_a_ladder_shows_each_factor_and_how_they_interact():
    axes = [PRECISION, "execution.loading=foreground,resident"]

    def rate(settings):
        return faster_in_bf16(settings) * (1.5 if settings["execution.loading"] == "resident" else 1.0)

    result = result_of(*study(axes, rate, ladder=True))
    assert "ladder" in draw_study(result)
    assert "do not interact" in " ".join(study_notes(result))
    assert result.interaction.value == pytest.approx(1.0, abs=0.05)


def test_a_map_names_the_winner_of_each_kind_of_work():
    axes = ["model.width=4,32", "data.image_size=14,28", PRECISION]

    def rate(settings):
        return faster_in_bf16(settings) if settings["model.width"] == "32" else 100.0

    result = result_of(*study(axes, rate))
    assert "winners" in draw_study(result)
    notes = study_notes(result)
    assert any("model.width=32" in note and "take `execution.precision=bf16-mixed`" in note for note in notes)
    assert any("model.width=4" in note and "keep it" in note for note in notes)
    assert all(picture.startswith(b"\x89PNG") for picture in map(png_bytes, draw_study(result).values()))


def test_crashed_and_contaminated_arms_have_words_instead_of_numbers():
    arms, runs = study([PRECISION, "execution.loading=foreground,resident"], faster_in_bf16)
    broken = arms[1].name
    runs = [
        run.model_copy(update={"status": "failed", "error": "rank 0 failed: <boom>", "samples_per_second": None})
        if run.arm == broken
        else run
        for run in runs
    ]
    result = result_of(arms, runs)
    verdicts = {row[0]: row[1] for row in study_table(result)[1]}
    assert verdicts[broken] == "failed"
    page = render_study(result, {})
    assert "&lt;boom&gt;" in page
    assert "<boom>" not in page

    dirty = [run.model_copy(update={"contaminated": run.arm == arms[0].name}) for run in runs]
    found = result_of(arms, dirty, contaminated=3)
    assert all(arm.ratio is None for arm in found.arms), "a contaminated training is nobody's base"
    assert "baseline contaminated" in {row[1] for row in study_table(found)[1]}
    assert "no ratio" in render_study(found, {})
    assert "quiet machine" in " ".join(study_notes(found))


def test_an_uncertain_gain_is_no_headline():
    arms = arms_of(PRECISION)
    rates = {arms[0].name: (100, 100, 100), arms[1].name: (60, 200, 120)}
    runs = [training(arm, repeat, float(rates[arm.name][repeat])) for arm in arms for repeat in range(3)]
    page = render_study(result_of(arms, runs), {})
    assert hero_of(page) == (
        "no arm significantly beats the baseline",
        "nearest: precision=bf16-mixed, 1.15 x, not significant; 0.25 to 5.07 with 95 % confidence",
    )
    assert "not significant" in page


def hero_of(page):
    """The large words of a page, and the small ones under them."""
    found = re.search(r'<div class="big[^"]*">(.*?)<small>(.*?)</small></div>', page)
    return found[1], found[2]


def test_an_arm_that_loses_is_no_headline():
    axis = "execution.loading=foreground,streaming,resident"
    rates = {"foreground": 100.0, "streaming": 80.0, "resident": 50.0}
    result = result_of(*study([axis], lambda settings: rates[settings["execution.loading"]]))
    big, small = hero_of(render_study(result, {}))
    assert big == "no arm beats the baseline"
    assert re.fullmatch(
        r"nearest: loading=streaming, 0\.\d\d x, slower; 0\.\d\d to 0\.\d\d with 95 % confidence", small
    )
    note = study_notes(result)[0]
    assert note.startswith("no arm beats the baseline, loading=foreground: keep it. Nearest: loading=streaming, 0.")


def test_an_arm_that_learns_less_is_no_headline_and_not_nearest():
    axis = "execution.precision=32-true,bf16-mixed,64-true"
    rates = {"32-true": 100.0, "bf16-mixed": 200.0, "64-true": 60.0}
    arms, runs = study([axis], lambda settings: rates[settings["execution.precision"]])
    worse = {"score": 0.8, "num_lost": 100, "num_gained": 0}
    runs = [run.model_copy(update=worse if "bf16" in run.arm else {}) for run in runs]
    big, small = hero_of(render_study(result_of(arms, runs), {}))
    assert big == "no arm significantly beats the baseline"
    assert small.startswith("nearest: precision=64-true, 0.")


def test_faster_but_worse_is_marked():
    arms, runs = study([PRECISION], faster_in_bf16)
    runs = [
        run.model_copy(update={"score": 0.8, "num_lost": 100, "num_gained": 0}) if run.arm == arms[1].name else run
        for run in runs
    ]
    result = result_of(arms, runs)
    assert study_table(result)[1][1][1] == "faster but worse"
    assert "Learned less than the baseline (accuracy)" in " ".join(study_notes(result))


def test_a_faster_arm_whose_parity_is_not_shown_is_no_headline():
    arms, runs = study([PRECISION], faster_in_bf16)
    few = {"num_lost": 10, "num_gained": 9, "num_test": 360}
    result = result_of(arms, [run.model_copy(update=few if run.arm == arms[1].name else {}) for run in runs])
    assert study_table(result)[1][1][1] == "faster, parity not shown"
    assert study_table(result)[1][1][-1] == "90.00%, undecided, within 2.7 points"
    assert hero_of(render_study(result, {}))[0] == "no arm is shown to be faster and on par"
    notes = " ".join(study_notes(result))
    assert "Faster, but not shown to learn as much as the baseline within 1 points: precision=bf16-mixed" in notes
    assert "take `" not in notes


def test_the_headline_of_several_arms_is_that_of_fresh_trainings():
    axis = "execution.precision=32-true,bf16-mixed,64-true"
    rates = {"32-true": 100.0, "bf16-mixed": 200.0, "64-true": 60.0}
    arms, runs = study([axis], lambda settings: rates[settings["execution.precision"]])
    fresh = [
        training(arm, repeat, rate * wobble(arm, repeat), is_fresh=True)
        for repeat in range(3, 6)
        for arm, rate in ((arms[0], 100.0), (arms[1], 150.0))
    ]
    result = result_of(arms, [*runs, *fresh], num_repeats=3)
    big, small = hero_of(render_study(result, {}))
    assert big == f"{result.arms[1].confirmation.value:.2f} x"
    assert small.endswith("measured again")
    assert "x its baseline in fresh trainings" in study_notes(result)[0]
    slow = [run.model_copy(update={"samples_per_second": 100.0}) for run in fresh]
    result = result_of(arms, [*runs, *slow], num_repeats=3)
    assert hero_of(render_study(result, {}))[0] == "the fastest arm was not confirmed"
    assert study_table(result)[1][1][1] == "faster, not confirmed by fresh trainings"


def test_without_a_ratio_no_baseline_is_recommended():
    arms, runs = study([PRECISION], faster_in_bf16)
    disturbed = [run.model_copy(update={"contaminated": True}) for run in runs]
    assert study_notes(result_of(arms, disturbed))[0] == "no arm has a ratio, so nothing can be said."


def test_pixels_are_judged_by_their_own_score():
    arms, runs = study([PRECISION], faster_in_bf16)
    scored = {"score_name": "mean_iou", "num_gained": None, "num_lost": None}
    runs = [run.model_copy(update=scored) for run in runs]
    assert [arm.parity for arm in result_of(arms, runs).arms] == ["unknown", "unknown"]
    for difference, expected in ((0.001, "on par, within 0.5 points"), (-0.1, "worse")):
        compared = {"score_difference": difference, "score_error": 0.002}
        result = result_of(arms, [run.model_copy(update=compared if run.arm == arms[1].name else {}) for run in runs])
        head, (_, row) = study_table(result)
        assert (head[-1], row[-1]) == ("mean IoU", f"90.00%, {expected}")
        assert result.arms[1].accuracy_difference.value == pytest.approx(difference)
        page = render_study(result, {})
        assert "Mean IoU on the test split" in page
        assert "accura" not in page
    mixed = [run.model_copy(update={"score_name": "accuracy"} if run.arm == arms[0].name else {}) for run in runs]
    head, (base, row) = study_table(result_of(arms, mixed))
    assert (head[-1], base[-1], row[-1]) == ("score", "accuracy 90.00%", "mean IoU 90.00%, unknown")


# Advice

LINK = Link(name="measured", latency_seconds=1e-4, seconds_per_byte=1e-9, relative_error=0.1, source="measured")


def advice(**fields):
    points = [ProfilePoint(batch_size=size, seconds=Interval(value=1e-3 + 1e-5 * size)) for size in (64, 128)]
    profile = DeviceProfile(
        points=tuple(points), gradient_bytes=10**6, batch_size=128, num_train=12800, num_epochs=10, label="one device"
    )
    gains = {
        "execution.precision=bf16-mixed": Interval(value=1.5, low=1.4, high=1.6),
        "recipe.batch_size=256": Interval(value=1.2, low=1.1, high=1.3),
        "execution.loading=streaming": Interval(value=0.9, low=0.8, high=0.95),
        "execution.memory_format=contiguous": Interval(value=1.0, low=0.9, high=1.1),
    }
    kinds = ("strong", "weak")
    return AdviseResult(
        **{
            "run_id": "r",
            "experiment": "paceline",
            "preset": "digits",
            "workload": "0123abcd",
            "profile": profile,
            "link": LINK,
            "predictions": tuple(Forecast(profile, LINK).predict(number, kind) for kind in kinds for number in (2, 4)),
            "limits": tuple(Forecast(profile, LINK).limits(kind) for kind in kinds),
            "bound": "compute",
            "advice": rank_moves(gains, {"execution.compile=step": "no C++ compiler was found"}),
            "cheapest": Forecast(profile, LINK).cheapest("strong", 60.0, price=2.0),
            "seconds": 1.0,
        }
        | fields
    )


def test_moves_are_ranked_by_their_certain_gain():
    settings = [move.setting for move in advice().advice]
    assert settings[:3] == ["execution.precision=bf16-mixed", "recipe.batch_size=256", "execution.compile=step"]
    reasons = {move.setting: move.reason for move in advice().advice}
    assert reasons["execution.loading=streaming"].startswith("slower")
    assert reasons["execution.memory_format=contiguous"].startswith("no measurable gain")


def test_advice_shows_predictions_limits_moves_and_how_earlier_ones_did():
    result = advice()
    hit = check(result.predictions[0], "p", "m1", result.predictions[0].ratio, 1.0)
    miss = check(result.predictions[0], "p", "m2", 3 * result.predictions[0].ratio, 2.0)
    page = render_advise(result, [hit, miss])
    assert "2 predictions checked: 33.3% mean absolute error, 1 of 2 inside their interval" in page
    assert set(draw_advise(result, [hit, miss])) == {"predicted-strong", "predicted-weak", "calibration"}
    assert "no C++ compiler was found" in page
    table = dict(advise_table(result))
    assert "Cheapest within" in table["deadline"]
    assert "1 device," in table["deadline"]
    assert "No prediction has been checked yet" in render_advise(result, [])


def test_advice_shows_what_two_devices_took_together():
    company = Interference(
        batch_size=64,
        contention=Interval(value=1.1),
        waiting=Interval(value=1.02),
        token_seconds=1e-5,
        step_seconds=Interval(value=2.5e-3),
    )
    result = advice()
    page = render_advise(
        result.model_copy(update={"profile": result.profile.model_copy(update={"company": (company,)})}), []
    )
    told = (
        "64 samples each: a step takes +10.0% because both compute, and +2.0% more because they wait for each other. "
    )
    assert told + "With the exchange of the gradients it takes 2.5 ms" in " ".join(page.split())


def test_on_a_cpu_more_devices_need_more_cores():
    result = advice()
    on_cpu = result.model_copy(update={"profile": result.profile.model_copy(update={"num_threads": 1})})
    told = "A device is here 1 core of a CPU. N devices need N times those cores"
    assert told in dict(advise_table(on_cpu))["devices"]
    assert told in render_advise(on_cpu, [])
    assert "devices" not in dict(advise_table(result))
    assert "of a CPU" not in render_advise(result, [])


def test_calibration_counts_what_lay_inside():
    result = advice()
    checks = [check(result.predictions[0], "p", "m", result.predictions[0].ratio * factor, 0.0) for factor in (1, 1.01)]
    found = calibration(checks)
    assert found["num_checks"] == 2
    assert found["share_inside"] == 1
    assert found["share_inside_low"] < 0.5, "two checks prove little"


def test_a_metric_of_own_code_is_no_share_and_its_loss_is_in_percent():
    base, arm = arms_of(PRECISION)
    own = {"score_name": "val_loss", "accuracy": 2.3456, "num_gained": None, "num_lost": None, "score_error": 0.0}
    runs = [training(base, repeat, 100.0 + repeat, **own, score_difference=0.0) for repeat in range(3)]
    runs += [training(arm, repeat, 200.0 + repeat, **own, score_difference=0.002) for repeat in range(3)]
    result = result_of((base, arm), runs)
    head, rows = study_table(result)
    assert (head[-1], rows[1][-1]) == ("val_loss", "2.346, on par, within 0.2 %")
    assert any("val_loss on par, within 0.2 %" in note for note in study_notes(result))
    page = render_study(result, {})
    assert "as your module logged it last" in page
    assert "test split" not in page
