"""Fixtures of the tests of stages."""

import pytest

from paceline.tasks.report.run_report import ReportInput
from tests.support.reports import make_sample_report


@pytest.fixture
def report() -> ReportInput:
    return make_sample_report()
