"""The loop of guides/drive.md: it finds the planted waste among proposals that do harm, fail, or change nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.documents import ROOT, fences

SCRIPT, LOOP = (one.body for one in fences(ROOT / "infra/docs/guides/drive.md") if one.language == "python")
BUSY = "rounds are contaminated"


def test_the_loop_is_short():
    assert len(LOOP.splitlines()) < 40


@pytest.mark.slow
def test_the_loop_keeps_what_is_faster_and_nothing_else(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "optimise.py").write_text(LOOP)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PACELINE_HOME": str(tmp_path / "home"), "PATH": path}
    environment.pop("MLFLOW_TRACKING_URI", None)
    done = subprocess.run(
        [sys.executable, "optimise.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert len(found) == 5, "calls of paceline judge"
    if BUSY in done.stdout:
        pytest.skip(f"the machine is busy: {done.stdout}")
    assert found["take the mean once"].startswith("KEEP, 1.")
    assert found["sort the points"].startswith("DISCARD")
    assert found["raise the rate"].startswith("DISCARD")
    assert "rnage" in found["misspell a name"]
    best = (tmp_path / "best.py").read_text()
    assert best.index("mean = ") < best.index("for _ in range(40)")
    assert not any(wrong in best for wrong in ("sorted", "rnage", "5 * gradient / 1"))
    namespace = {}
    exec(best, namespace)
    assert namespace["slope"] == pytest.approx(3, abs=0.05)
