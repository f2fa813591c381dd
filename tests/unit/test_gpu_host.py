"""The script for a GPU host names modules, settings, keys and tests that exist."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.conf.load import load

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "infra" / "gpu" / "first").read_text().replace("\\\n", " ")
RUNS = re.findall(r"paceline run (.*?)(?: --diagnose)? --json", TEXT)
assert len(RUNS) == 4


def test_it_starts_the_program():
    (module,) = re.findall(r"python3 -m (paceline[\w.]+)", TEXT)
    assert importlib.util.find_spec(module)
    for path in re.findall(r"pytest -q(?: -m benchmark)? (tests/\w+)", TEXT):
        assert list((ROOT / path).glob("test_*.py"))


@pytest.mark.parametrize("command", RUNS)
def test_its_runs_have_valid_settings(command):
    words = command.replace('"$DATA"', "DIR").split()
    for compiled, loading in (("off", "resident"), ("graph", "streaming")):
        chosen = [word.replace("$compile", compiled).replace("$loading", loading) for word in words]
        load(chosen[0], chosen[1:])


def test_it_reads_summaries(tmp_path):
    (program,) = re.findall(r"<<'P'\n(.*?)\nP\n", TEXT, re.DOTALL)
    summary = '{"train": {"samples_per_second": 9.5, "final_loss": 0.5}, "speedup": null, "seconds": 7}'
    (tmp_path / "good.json").write_text(f"progress\n{summary}\n")
    (tmp_path / "empty.json").write_text("")
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1] == "good.json 9.5 0.5 None None 7"
    assert done.stdout.startswith("empty.json no summary")
