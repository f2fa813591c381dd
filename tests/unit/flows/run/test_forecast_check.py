"""What another version has left in the store, and what has several parts."""

from paceline.flows.run.forecast_check import _parse
from paceline.flows.study.record import _serial_fractions
from paceline.tasks.speedup.forecast.records import Check
from paceline.tasks.speedup.study.scaling import scaling


def test_a_document_of_another_version_is_as_if_it_were_not_there():
    assert _parse(Check, None) is None
    assert _parse(Check, {"predicted": 1.9, "whatever": True}) is None


def test_serial_fractions_of_several_scalings_have_their_groups():
    one, other = (scaling("strong", group, {2: [ratio] * 3}) for group, ratio in (("32-true", 1.9), ("bf16", 1.4)))
    assert _serial_fractions([]) is None
    assert _serial_fractions([scaling("weak", "", {2: [1.9] * 3})]) is None
    assert list(_serial_fractions([one])) == ["2"]
    both = _serial_fractions([one, other])
    assert both["32-true"]["2"] < both["bf16"]["2"]
