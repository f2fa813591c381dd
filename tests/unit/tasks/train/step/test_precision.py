import pytest
import torch

from paceline.tasks.records.execution import arithmetic_of
from paceline.tasks.train.step.precision import lightning_precision, set_arithmetic

GPU = torch.device("cuda")


def switches():
    """What decides how CUDA computes fp32; torch has them without a GPU as well."""
    backends = torch.backends
    precisions = {
        backends.cuda.matmul.fp32_precision,
        backends.cudnn.fp32_precision,
        backends.cudnn.conv.fp32_precision,
        backends.cudnn.rnn.fp32_precision,
    }
    return precisions, torch.get_float32_matmul_precision(), backends.cudnn.benchmark


@pytest.fixture(autouse=True)
def as_before():
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = torch.backends.cudnn.fp32_precision = "none"
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = True, False


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed", "16-mixed"])
def test_fp32_is_ieee_in_convolutions_too_and_cudnn_measures(precision):
    set_arithmetic("tf32", GPU)
    assert switches() == ({"tf32"}, "high", True)
    set_arithmetic(precision, GPU)
    assert switches() == ({"ieee"}, "highest", True)
    assert "ieee fp32" in arithmetic_of(precision, "gpu") or precision == "64-true"


def test_the_older_switches_can_be_read_as_lightning_and_inductor_do():
    for precision in ("tf32", "32-true"):
        set_arithmetic(precision, GPU)
        assert torch.backends.cuda.matmul.allow_tf32 == torch.backends.cudnn.allow_tf32 == (precision == "tf32")
        with torch.backends.cudnn.flags(enabled=False):
            pass
        assert switches()[0] == {"tf32" if precision == "tf32" else "ieee"}, "as they were"


def test_a_cpu_is_left_alone():
    before = switches()
    set_arithmetic("32-true", torch.device("cpu"))
    assert switches() == before
    assert arithmetic_of("32-true", "cpu") is None


def test_lightning_knows_tf32_as_fp32():
    assert [lightning_precision(name) for name in ("tf32", "bf16-mixed")] == ["32-true", "bf16-mixed"]
