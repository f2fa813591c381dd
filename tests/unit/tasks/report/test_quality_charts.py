import numpy as np
import pytest

from paceline.tasks.records.training import EvaluateResult
from paceline.tasks.report.plotting import png_bytes, svg_text
from paceline.tasks.report.quality_charts import (
    CLASS_COLOURS,
    draw_classes,
    draw_confusion,
    draw_examples,
    draw_quality,
)
from tests.support.reports import make_report, make_train


@pytest.mark.parametrize("num_classes", [2, 10, 30, 100])
def test_confusion_of_any_size(num_classes):
    counts = np.random.default_rng(0).integers(0, 9, (num_classes, num_classes))
    counts[0] = 0  # a class without samples
    names = [f"a rather long name {number}" for number in range(num_classes)]
    assert png_bytes(draw_confusion(counts.tolist(), names), 60).startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["$x^", "猫", "<b>", "_hidden", "a" * 200, ""])
def test_odd_class_names(name):
    assert png_bytes(draw_confusion([[1, 0], [0, 1]], [name, "other"]), 60)
    assert png_bytes(draw_classes({name: 0.5, "other": None}), 60)


def test_nothing_known_is_not_drawn():
    assert draw_classes({"a": None}) is None
    assert draw_classes({}) is None


def test_pictures_by_name():
    result = EvaluateResult(
        num_samples=4,
        accuracy=0.5,
        top_k={},
        per_class_accuracy={"a": 0.5, "<b>": 0.5},
        confusion=((1, 1), (1, 1)),
        angle_rmse_degrees=None,
        samples_per_second=1.0,
        seconds=0.1,
    )
    assert list(draw_quality(result)) == ["confusion", "class_accuracy"]
    for name, figure in draw_quality(result).items():
        svg = svg_text(figure, name)
        assert svg.startswith("<svg ")
        assert "<b>" not in svg


@pytest.mark.parametrize(("num_classes", "expected"), [(2, ["no class", "class 0", "class 1"]), (20, None)])
def test_the_colours_of_masks_are_named(tmp_path, num_classes, expected):
    names = tuple(f"class {number}" for number in range(num_classes))
    masks = np.arange(3 * 7 * 7).reshape(3, 7, 7) % (num_classes + 1)
    np.savez(tmp_path / "examples.npz", seen=np.zeros((3, 3, 7, 7)), told=masks, there=masks)
    prepared = make_report(None).prepared.model_copy(
        update={"image_shape": (7, 7, 4), "num_planes": 1, "class_names": names, "mean": (0.5,) * 4, "std": (0.2,) * 4}
    )
    figure = draw_examples(make_train(None, examples=str(tmp_path / "examples.npz")), prepared)
    (legend,) = figure.legends
    named = [text.get_text() for text in legend.get_texts()]
    assert named == expected or (named[-1] == "any other" and len(named) == len(CLASS_COLOURS))
    colours = [patch.get_facecolor()[:3] for patch in legend.get_patches()]
    drawn = figure.axes[1].get_images()[0].get_array().reshape(-1, 3)
    assert {tuple(colour) for colour in drawn} <= set(colours), "each colour that is there is named"
    assert png_bytes(figure, 60)


def test_classes_of_pixels_are_drawn_by_their_iou():
    result = EvaluateResult(
        num_samples=4,
        score_name="mean_iou",
        per_class_accuracy={"a": 0.9, "b": 0.8},
        per_class_iou={"a": 0.5, "b": None},
        samples_per_second=1.0,
        seconds=0.1,
    )
    (name,) = draw_quality(result)
    assert name == "class_iou"
