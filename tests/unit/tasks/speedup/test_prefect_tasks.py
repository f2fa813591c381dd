from prefect.logging import disable_run_logger

from paceline.tasks.speedup.prefect_tasks import account
from tests.support.reports import make_probe, make_train


def test_account_judges_the_probe_of_the_training():
    with disable_run_logger():
        result = account.fn(make_train(make_probe()), num_cores=2)
    assert result.cause == "compute-bound"


def test_account_without_probe():
    with disable_run_logger():
        assert account.fn(make_train(None)).cause == "not measured"
