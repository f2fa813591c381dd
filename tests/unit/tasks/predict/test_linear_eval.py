"""What a classifier on features says, as logits."""

import numpy as np

from paceline.tasks.evaluate.linear_classifier import fit
from paceline.tasks.predict.linear_eval import UNKNOWN_LOGIT, _logits


def test_whoever_is_certain_says_so_in_finite_numbers():
    values_ND = np.array([[-1.0], [1.0]] * 50, dtype=np.float32)
    fitted = fit("logistic", values_ND, np.array([0, 2] * 50), seed=1)
    logits_NK = _logits(fitted, np.array([[-1.0], [1e6]], dtype=np.float32), num_classes=3)
    assert np.isfinite(logits_NK).all()
    assert logits_NK.argmax(1).tolist() == [0, 2]
    assert logits_NK[:, 1].tolist() == [UNKNOWN_LOGIT] * 2
    assert logits_NK[1, 0] == UNKNOWN_LOGIT, "its probability is too small for a number"
