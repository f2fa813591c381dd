import numpy as np
import pytest

from tasks.evaluate.charts import draw_classes, draw_confusion, draw_quality, quality_svgs
from tasks.figures import png_bytes
from tasks.records import EvaluateResult


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
    svgs = quality_svgs(draw_quality(result))
    assert all("<b>" not in svg and svg.startswith("<svg ") for svg in svgs.values())
