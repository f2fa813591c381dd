"""What a search makes of arms that cannot be begun."""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from paceline.conf.load import load
from paceline.tasks.errors import MemoryLimitError
from paceline.tasks.train.autotune.search import _AutotuneSession
from paceline.tasks.train.plan import arm_of, resolve
from tests.support.studies import HARDWARE

ARM = arm_of(resolve(load("digits"), HARDWARE, 1293))


def hunt(error):
    def runner(stack, arm):
        raise error

    return _AutotuneSession(SimpleNamespace(runner=runner), num_steps=1000, step=0.01, budget=10.0, started=0.0)


@pytest.mark.parametrize("kind", ["step", "graph"])
def test_an_arm_that_does_not_compile_is_left_out_with_its_reason(kind):
    found = hunt(RuntimeError("unsupported operator\nat line 3"))
    arm = ARM.model_copy(update={"compile": kind})
    with ExitStack() as stack:
        assert found._start_arm(stack, arm, ARM, compiles=True) is None
    assert found.failed == {arm.label: "unsupported operator at line 3"}


@pytest.mark.parametrize(
    ("error", "compile"), [(RuntimeError("broken"), "off"), (MemoryLimitError("a pass over 8 samples", 8), "step")]
)
def test_what_is_no_compilers_fault_is_raised(error, compile):
    with ExitStack() as stack, pytest.raises(type(error)):
        hunt(error)._start_arm(stack, ARM.model_copy(update={"compile": compile}), ARM, compiles=False)
