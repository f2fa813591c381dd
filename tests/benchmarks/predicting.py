"""How fast a trained model is executed, compiled ahead of time: python predicting.py SETTINGS.json DATA.npz SECONDS.

As a worker of `paceline predict ... execution.compile=step` does it, without reading and writing. Prints JSON: accuracy
on the test split, and test images predicted in a second.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np

from paceline.tasks.predict.job import Settings
from paceline.tasks.predict.predictor import Predictor


def main(settings, data, seconds):
    predictor = Predictor(settings)
    pixels_NHWC, labels_N = data["test_images"], data["test_labels"]
    accuracy = float(np.mean(predictor(pixels_NHWC)[0].argmax(axis=1) == labels_N))
    started, passes = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        predictor(pixels_NHWC)[0].argmax(axis=1)
        passes += 1
    rate = passes * len(labels_N) / (time.perf_counter() - started)
    print(json.dumps({"accuracy": accuracy, "samples_per_second": rate}))


if __name__ == "__main__":
    main(Settings.model_validate_json(Path(sys.argv[1]).read_text()), np.load(sys.argv[2]), float(sys.argv[3]))
