"""A plugin of pytest: the goals for a GPU at a size at which they can be run to their end on the one that is not there.

What they print then is no measurement; that they print it is what is looked for.
"""

import dask

from tests.support import jobs

SMALL = {
    "cifar10": ["model.width=4", "model.depth=1", "recipe.num_epochs=1", "recipe.warmup_epochs=0"],
    "cifar10_fast": ["model.width=8", "recipe.num_epochs=1"],
    "cifar10_94": ["model.width=8", "recipe.num_epochs=1"],
    "twohead": ["recipe.num_epochs=1"],
}
SECONDS = 3
_new_job = jobs.new_job


def _small_job(address, preset, overrides):
    return _new_job(address, preset, [*overrides, *SMALL[preset]])


jobs.new_job = _small_job  # before the conftests take it
dask.config.set({"distributed.diagnostics.nvml": False})  # they clear what a shell says of Dask


def pytest_collection_modifyitems(items):
    """One training in place of several, and short measurements."""
    from tests.benchmarks import conftest

    conftest.SECONDS = SECONDS
    for item in items:
        item.module.REPEATS, item.module.SECONDS = 1, SECONDS
