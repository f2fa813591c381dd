"""What a rank says about the error that ends it."""

import pytest
import torch

from paceline.conf.hints import fault_and_hint
from paceline.tasks.errors import RunError
from paceline.tasks.train.rank.main import message_of

NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")
SAID = "OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00 GiB."


def test_own_code_without_memory_gets_advice():
    fault, hint = fault_and_hint(RunError(f"rank 0 failed: {message_of(NO_MEMORY, is_own=True)}"))
    assert fault == f"rank 0 failed: {SAID}"
    assert hint == "make the batches of your loader smaller"
    assert message_of(NO_MEMORY, is_own=False) == SAID, "Paceline halves its own batches"


@pytest.mark.parametrize("error", [ValueError("no label"), RunError("the loss is nan; lower the learning rate")])
def test_other_errors_are_said_as_they_are(error):
    assert message_of(error, is_own=True) == f"{type(error).__name__}: {error}"


def test_an_error_without_text_is_named():
    assert message_of(KeyboardInterrupt(), is_own=True) == "KeyboardInterrupt"
