import io
import json

import numpy as np
import pytest
from pyarrow import parquet

from paceline.conf.config import Speedup
from paceline.tasks.errors import InputError, RunError
from paceline.tasks.speedup.evidence import archive, recompute
from tests.support.evidence import BUSY, WINDOWS, SimulatedProbe, evidence_of

TWO_ARMS = {"baseline": 0.1, "candidate": 0.06}


@pytest.fixture(scope="module")
def files():
    return evidence_of(*SimulatedProbe(TWO_ARMS).measure())[1]


def resealed(files, **facts):
    """The same files with other facts and right sums."""
    changed = json.loads(files["evidence.json"]) | facts
    files = files | {"evidence.json": json.dumps(changed).encode()}
    return files | {"SHA256SUMS": recompute.sums_of(files)}


def test_equal_content_gives_equal_bytes(files):
    content = archive.pack(files)
    assert archive.pack(dict(reversed(files.items()))) == content
    assert archive.unpack(content, "run.tar") == files
    assert archive.check(content, "run.tar")["speedup.ratio"] == pytest.approx(1.65, rel=0.05)


def test_one_changed_byte_is_refused_wherever_it_is(files):
    content = archive.pack(files)
    random = np.random.default_rng(0)
    places = [0, 100, 156, 257, 500, 511, len(content) - 1, len(content) - 1024, *random.integers(0, len(content), 150)]
    for place in places:
        for bit in (1, 128):
            changed = bytearray(content)
            changed[place] ^= bit
            with pytest.raises(InputError, match=r"^run\.tar"):
                archive.check(bytes(changed), "run.tar")
    for changed in (content[:-1], content + b"\0", content[: len(content) // 2], b"", b"text"):
        with pytest.raises(InputError, match="is not evidence, or has changed"):
            archive.check(changed, "run.tar")


@pytest.mark.parametrize(
    ("facts", "fault", "hint"),
    [
        ({"version": 2}, "has version 2, and this program reads version 1", "run the recompute.py of the archive"),
        ({"contaminated": True, "reasons": ["heat"]}, r"disturbed during the measurement \(heat\)", "quiet machine"),
        ({"num_left_out": 7}, "the times of 7 steps were left out", "write it again"),
    ],
)
def test_evidence_that_must_not_be_used_is_refused(files, facts, fault, hint):
    with pytest.raises(InputError, match=fault) as refused:
        archive.check(archive.pack(resealed(files, **facts)), "run.tar")
    assert hint in refused.value.hint


def test_a_sum_that_is_right_does_not_make_a_figure_right(files):
    summary = json.loads(files["summary.json"])
    summary["figures"]["speedup.ratio"] = 2.0
    forged = resealed(files | {"summary.json": json.dumps(summary).encode()})
    with pytest.raises(InputError, match=r"other figures: speedup\.ratio"):
        archive.check(archive.pack(forged), "run.tar")


def test_a_contaminated_run_has_evidence_that_is_refused():
    machine = SimulatedProbe(TWO_ARMS, validities=(BUSY,) * 9)
    _, files = evidence_of(*machine.measure(max_seconds=12))
    with pytest.raises(InputError, match=r"30\.0% of CPU time stolen"):
        archive.check(archive.pack(files), "run.tar")


def test_steps_of_another_probe_are_no_evidence():
    probe, _ = SimulatedProbe(TWO_ARMS).measure()
    _, other = SimulatedProbe(TWO_ARMS, seed=1).measure()
    with pytest.raises(RunError, match=r"other figures for .*speedup\.ratio"):
        evidence_of(probe, other)


def test_tables_have_each_step_and_each_window(files):
    steps = parquet.read_table(io.BytesIO(files["steps.parquet"]))
    loaded = np.load(io.BytesIO(files["steps.npz"]))
    assert steps.column_names == ["process", "arm", "attempt", "round", "position", "step", "started", "seconds"]
    assert steps["seconds"].to_pylist() == loaded["seconds"].tolist()
    assert steps["arm"].to_pylist() == loaded["arms"][loaded["arm"]].tolist()
    assert set(
        zip(steps["arm"].to_pylist(), steps["round"].to_pylist(), steps["position"].to_pylist(), strict=True)
    ) == {
        (arm, number, place if number % 2 == 0 else 1 - place)
        for number in range(12)
        for place, arm in enumerate(("baseline", "candidate"))
    }
    facts = json.loads(steps.schema.metadata[b"paceline"])
    assert facts["version"] == recompute.VERSION
    assert facts["analysis_plan"] == recompute.hashlib.sha256(files["analysis_plan.json"]).hexdigest()
    windows = parquet.read_table(io.BytesIO(files["windows.parquet"]))
    assert windows["seconds"].to_pylist() == [window[2] for window in WINDOWS]


def test_credentials_are_not_in_the_evidence(monkeypatch):
    monkeypatch.setenv("STORE_PASSWORD", "very-secret-word")
    probe, raw = SimulatedProbe(TWO_ARMS).measure()
    left_out = {"half_batch": "cannot reach https://me:very-secret-word@host"}
    _, files = evidence_of(probe.model_copy(update={"left_out": left_out}), raw)
    assert b"very-secret-word" not in archive.pack(files)


def test_the_plan_changes_with_settings_and_rules(monkeypatch):
    plan = archive.analysis_plan(Speedup())
    assert archive.analysis_plan(Speedup()) == plan
    assert archive.analysis_plan(Speedup(target_half_width=0.01)) != plan
    rules = json.loads(plan)["rules"]
    assert len(rules) == len(archive.RULES)
    assert all(len(digest) == 64 for digest in rules.values())


def test_steps_are_those_of_the_digest(tmp_path):
    for number, content in enumerate((b"one", b"two")):
        directory = tmp_path / f"attempt-{number}" / "rank-0"
        directory.mkdir(parents=True)
        (directory / "steps.npz").write_bytes(content)
    digest = recompute.hashlib.sha256(b"one").hexdigest()
    assert archive.find_steps(tmp_path, digest) == b"one"
    assert archive.find_steps(tmp_path, None) is None
