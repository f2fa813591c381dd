"""What the JSON of a study says where it has several parts."""

from paceline.flows.study.record import _serial_fractions
from paceline.tasks.speedup.study.scaling import scaling


def test_serial_fractions_of_several_scalings_have_their_groups():
    one, other = (scaling("strong", group, {2: [ratio] * 3}) for group, ratio in (("32-true", 1.9), ("bf16", 1.4)))
    assert _serial_fractions([]) is None
    assert _serial_fractions([scaling("weak", "", {2: [1.9] * 3})]) is None
    assert list(_serial_fractions([one])) == ["2"]
    both = _serial_fractions([one, other])
    assert both["32-true"]["2"] < both["bf16"]["2"]
