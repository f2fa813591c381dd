"""From when on a run counts its cold start."""

import time

from paceline.conf.config import Config
from paceline.conf.environment import Environment
from paceline.flows.checks.prestart import Prestart, cold_seconds
from paceline.tasks import host


def test_a_run_that_a_process_of_the_users_has_called_has_no_cold_start(monkeypatch):
    monkeypatch.setattr(host, "program_start", None)
    with Prestart(Config(), Environment()):
        assert cold_seconds() is None


def test_only_the_run_of_a_command_starts_with_its_program(monkeypatch):
    monkeypatch.setattr(host, "program_start", time.clock_gettime(time.CLOCK_BOOTTIME) - 100)
    assert cold_seconds() is None, "a study has several runs in one process"
    with Prestart(Config(), Environment()):
        assert 100 <= cold_seconds() < 200
