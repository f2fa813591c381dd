"""What a sweep that goes on makes of what was measured before it was cut short."""

from types import SimpleNamespace

import pytest

from paceline.flows.sweep.trial import COLOCATION_FILE, colocation_on
from paceline.tasks.files import save_result
from paceline.tasks.measure.paired_ratio import Interval
from paceline.tasks.sweep.concurrency import Colocation

MEASURED = Colocation(
    num_devices=4,
    over_alone=Interval(value=3.6, low=3.5, high=3.7),
    over_together=Interval(value=1.5, low=1.4, high=1.6),
    over_whole=None,
    num_rounds=9,
    seconds=9.0,
    contaminated=False,
)


@pytest.mark.parametrize("num_at_once", [4, 2, 1])
def test_it_counts_only_for_as_many_trials_at_once(num_at_once, tmp_path):
    kept = tmp_path / "runs" / "0123" / COLOCATION_FILE
    kept.parent.mkdir(parents=True)
    save_result(kept, MEASURED, [])
    room = SimpleNamespace(num_at_once=num_at_once)
    work = SimpleNamespace(environment=SimpleNamespace(root=tmp_path), parent=SimpleNamespace(run_id="0123"), room=room)
    found, why = colocation_on(work, "probe")
    assert found == (MEASURED if num_at_once == 4 else None)
    assert why == ("" if num_at_once == 4 else f"4 trials ran at once before the interruption, now {num_at_once} do")
