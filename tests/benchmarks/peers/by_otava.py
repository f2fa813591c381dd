"""Goal 15's peer, in an environment of its own: python by_otava.py SERIES.json; nights on which a loss is reported.

Each night the series so far is analysed. An alarm is a change point that the nights before did not know, with a lower
mean after it. The file holds series of values and least magnitudes; prints JSON: nights by series, for each magnitude.
"""

import json
import sys
from pathlib import Path

from otava.analysis import compute_change_points

WINDOW, MAX_PVALUE = 50, 0.001  # Otava's defaults
HISTORY = 130


def nights_of(values, magnitude):
    known, nights = set(), []
    for night in range(8, len(values)):
        begin = max(0, night + 1 - HISTORY)
        points, _ = compute_change_points(values[begin : night + 1], WINDOW, MAX_PVALUE, magnitude)
        lower = {begin + point.index for point in points if point.stats.mean_2 < point.stats.mean_1}
        fresh = {index for index in lower if all(abs(index - other) > 3 for other in known)}  # an index may move
        if fresh:
            nights.append(night)
        known |= lower
    return nights


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[1]).read_text())
    found = {str(least): [nights_of(values, least) for values in asked["series"]] for least in asked["magnitudes"]}
    print(json.dumps(found))
