"""The worst mistakes of a classification, from planted predictions."""

from pathlib import Path

import numpy as np
import pytest

from paceline.tasks.records.data import PreparedSet
from paceline.tasks.records.training import TrainResult
from paceline.tasks.report.plotting import png_bytes
from paceline.tasks.report.quality_charts import draw_mistakes, worst_mistakes

NUM, PER_SHARD = 20, 7


@pytest.fixture(params=[1, 3, 18])
def predicted(request, tmp_path):
    """Three classes; each image is as bright as its number; sample 13 is most wrong, then 4; two ranks."""
    (tmp_path / "test").mkdir()
    labels = np.arange(NUM) % 3
    images = np.empty((NUM, 6, 6, request.param), np.uint8)
    images[:] = np.arange(NUM).reshape(-1, 1, 1, 1)
    for number, start in enumerate(range(0, NUM, PER_SHARD)):
        np.save(tmp_path / f"test/{number:05d}.images.npy", images[start : start + PER_SHARD])
        np.save(tmp_path / f"test/{number:05d}.labels.npy", labels[start : start + PER_SHARD])
    logits = np.eye(3)[labels] * 4
    logits[13] = [9, 0, 0]  # it is of class 1
    logits[4] = [0, 0, 5]
    files = []
    for rank, chosen in enumerate((np.arange(0, 10), np.arange(10, NUM))):
        np.savez(tmp_path / f"rank{rank}.npz", index=chosen, kept=logits[chosen])
        files.append(str(tmp_path / f"rank{rank}.npz"))
    train = TrainResult.model_construct(predictions=tuple(files), score_name="accuracy")
    prepared = PreparedSet.model_construct(
        path=str(tmp_path), class_names=("zero", "one", "a long name of a class"), num_test=NUM
    )
    return train, prepared


def test_the_worst_come_first_whoever_predicted_them(predicted):
    found = worst_mistakes(*predicted, number=3)
    assert [int(mistake.image_HWC.max()) for mistake in found[:2]] == [13, 4]
    assert [(mistake.predicted, mistake.truth) for mistake in found[:2]] == [
        ("zero", "one"),
        ("a long name of a class", "one"),
    ]
    assert found[0].probability == pytest.approx(np.exp(9) / (np.exp(9) + 2))
    assert found[2].predicted == found[2].truth


@pytest.mark.parametrize("spectrogram", [None, "1 s from left to right"])
def test_they_are_drawn(predicted, spectrogram):
    figure = draw_mistakes(*predicted, spectrogram)
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert len(texts) == 8
    assert texts[:2] == ["zero 100%\nis one", "a long name… 99%\nis one"]
    (canvas,) = figure.axes[0].images
    brightest = np.asarray(canvas.get_array())[..., :3].max(axis=(0, 2))
    assert np.flatnonzero(brightest)[0] == 0, "the first is there"
    assert png_bytes(figure, 50).startswith(b"\x89PNG")


def test_few_samples_leave_room_empty(predicted):
    train, prepared = predicted
    for path in sorted(Path(prepared.path).glob("test/0000[12]*")):
        path.unlink()
    np.savez(train.predictions[0], index=np.arange(PER_SHARD), kept=np.eye(3)[np.arange(PER_SHARD) % 3])
    fewer = train.model_copy(update={"predictions": train.predictions[:1]})
    figure = draw_mistakes(fewer, prepared.model_copy(update={"num_test": PER_SHARD}))
    assert len(figure.axes[0].texts) == PER_SHARD


def test_what_has_no_classes_of_images_has_no_mistakes(predicted):
    assert draw_mistakes(predicted[0].model_copy(update={"score_name": "mean_iou"}), predicted[1]) is None
