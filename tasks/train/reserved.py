"""Which devices the trainings of this process have chosen: two that begin at the same moment choose different ones.

The lease is what keeps a device to one training, whoever asks for it, but it is taken after the choice. Knows nothing
of other processes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tasks.train.launch.layout import Seat

Device = tuple[str, str]
"""Its host's address, and its name there."""

_choosing = threading.Lock()
_chosen: set[Device] = set()


def devices_spoken_for() -> frozenset[Device]:
    """Those that are chosen now."""
    with _choosing:
        return frozenset(_chosen)


@contextmanager
def chosen(choose: Callable[[frozenset[Device]], list[Seat]]) -> Iterator[list[Seat]]:
    """Choose seats; their devices are spoken for until the end of the body.

    Args:
        choose: is given the devices that others here have chosen, and should prefer other ones.
    """
    with _choosing:
        seats = choose(frozenset(_chosen))
        mine = {(seat.host, seat.device) for seat in seats} - _chosen  # of one that is shared, the first one speaks
        _chosen.update(mine)
    try:
        yield seats
    finally:
        with _choosing:
            _chosen.difference_update(mine)
