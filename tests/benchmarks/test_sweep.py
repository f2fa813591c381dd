"""A sweep of eight trials on two workers against the same trials one after the other. Whole commands, A B B A.

infra/bench S          about 70 minutes on two quiet cores

"One after the other" is `--at-once 1`, in two ways: each trial on one device of all cores, as such a sweep would be run
here, and each on one core, which is the device that it has when two run at once. The second also says how near the
sweep's own estimate comes, which takes start-up to be held back by a neighbour as steps are.
"""

import numpy as np
import pytest

from paceline.tasks.measure.paired_ratio import FIXED_CONFIDENCE, estimate_ratio
from tests.benchmarks.conftest import at_least, paceline, tell
from tests.support.prefect_server import prefect_server

pytestmark = pytest.mark.timeout(7200)

NUM_TRIALS = 8
NUM_BLOCKS = 3
BAR = 1.7
TRIALS = ["digits", "--param", f"seed=int(1,{NUM_TRIALS})", "--sampler", "grid", "recipe.num_epochs=60"]
"""Trials that differ in their seeds alone, so that each costs the same."""


class Sweeps:
    """Runs the same sweep in one home, with the prepared set in it."""

    def __init__(self, home, url):
        self._home, self._url = home, url

    def run(self, *arguments):
        """The sweep's JSON, and the seconds that the whole command took."""
        summary, _, seconds = paceline(self._home, "sweep", *TRIALS, *arguments, PREFECT_API_URL=self._url)
        assert summary["num_done"] == NUM_TRIALS
        return summary, seconds

    def ratio(self, alone, beside):
        """Seconds one after the other over those at once, of whole commands; the last sweep at once."""
        self.run(*beside)  # the prepared set, and files in the page cache
        logs, last = [], None
        for _ in range(NUM_BLOCKS):
            first, slow, slow_too, second = (self.run(*how) for how in (beside, alone, alone, beside))
            last = second[0]
            logs += [np.log(slow[1] / first[1]), np.log(slow_too[1] / second[1])]
            seconds = [f"{found[1]:.1f}" for found in (first, slow, slow_too, second)]
            print(f"at once {seconds[0]}, {seconds[3]} s; one after the other {seconds[1]}, {seconds[2]} s", flush=True)
        return estimate_ratio(np.asarray(logs), FIXED_CONFIDENCE), last


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory):
    with prefect_server(tmp_path_factory.mktemp("prefect")) as url:
        yield Sweeps(tmp_path_factory.mktemp("home"), url)


def tell_ratio(what, found):
    interval = f"{found.low:.2f} to {found.high:.2f}"
    verdict = at_least(found.low, found.high, BAR)
    tell(f"sweep of {NUM_TRIALS} trials, two at once, over {what} >= {BAR}", f"{found.value:.2f}", interval, verdict)


def test_over_one_after_the_other_on_all_cores(sweeps):
    quiet = "speedup.baseline=none"
    found, _ = sweeps.ratio([quiet, "--at-once", "1"], [quiet, "--at-once", "2"])
    tell_ratio("one after the other on all cores", found)


def test_over_one_after_the_other_on_such_a_device_and_by_its_own_estimate(sweeps):
    common = ["speedup.baseline=none", "execution.num_threads=1"]
    found, _ = sweeps.ratio([*common, "--at-once", "1"], [*common, "--at-once", "2"])
    tell_ratio("one after the other on one core", found)
    own, _ = sweeps.run("--at-once", "2")
    speedup = own["speedup"]
    tell(
        "the sweep's own estimate of that, of its trials' time",
        f"{speedup['ratio']:.2f}",
        f"{speedup['low']:.2f} to {speedup['high']:.2f}",
        f"layout: {speedup['layout']}; contaminated: {speedup['contaminated']}",
    )
