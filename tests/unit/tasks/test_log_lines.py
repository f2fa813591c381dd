import json
import os
import subprocess
import sys

FIELDS = ["time", "level", "logger", "message", "run_id", "stage", "rank"]
PROGRAM = """
import faulthandler, logging, os, sys, time, warnings
from paceline.tasks import log_lines
from paceline.tasks.redact import redact_logs
redact_logs()
faulthandler.enable()
log_lines.labels |= {"run_id": "abc", "stage": "train", "rank": 1}
log_lines.log_as_json()
print("of the interpreter", flush=True)
os.system("echo error: of a child >&2")
warnings.warn("of Python", stacklevel=1)
try:
    raise ValueError("with hunter2hunter2 in it")
except ValueError:
    logging.getLogger("mine").exception("two\\nlines of %s", "a \\"record\\"")
faulthandler._sigsegv()
"""


def lines_of(program, **environment):
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.stdout == ""
    return done.returncode, [json.loads(line) for line in done.stderr.splitlines()]


def test_all_that_a_process_prints_becomes_lines_of_json_even_its_crash(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "hunter2hunter2")
    status, lines = lines_of(PROGRAM, **os.environ)
    assert status < 0
    assert all(list(line) == FIELDS for line in lines)
    assert {(line["run_id"], line["stage"], line["rank"]) for line in lines} == {("abc", "train", 1)}
    by_message = {line["message"]: (line["logger"], line["level"]) for line in lines}
    assert by_message["of the interpreter"] == ("stderr", "INFO")
    assert by_message["error: of a child"] == ("stderr", "ERROR")
    assert by_message["Fatal Python error: Segmentation fault"][0] == "stderr"
    (warning,) = [line for line in lines if line["logger"] == "py.warnings"]
    assert (warning["level"], "of Python" in warning["message"]) == ("WARNING", True)
    (record,) = [line for line in lines if line["logger"] == "mine"]
    assert record["message"].startswith('two\nlines of a "record"\nTraceback')
    assert record["message"].endswith("ValueError: with *** in it")


def test_what_stdout_is_given_stays_its_own_and_the_run_is_learnt():
    program = """
import logging, sys
from paceline.tasks import log_lines
log_lines.convert(2)
log_lines.labels["run_id"] = "abc"
record = logging.makeLogRecord({"name": "mine", "levelname": "INFO", "msg": "known", "created": 0.0})
sys.stderr.write(log_lines.JsonFormatter().format(record) + "\\nplain\\n")
"""
    status, (known, plain) = lines_of(program, **os.environ)
    assert status == 0
    assert known["time"] == "1970-01-01T00:00:00.000+00:00"
    assert (plain["message"], plain["run_id"]) == ("plain", "abc")
