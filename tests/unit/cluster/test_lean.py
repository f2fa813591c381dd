import dask
import distributed  # noqa: F401  its defaults
from dask.config import collect_env
from dask.config import get as setting

from tasks.cluster.lean import exports, lean


def test_every_setting_is_one_that_dask_knows_and_has_otherwise():
    shipped = dask.config.merge(*dask.config.defaults)  # whatever this process has set
    for name, value in lean().items():
        assert setting(name, config=shipped) != value, name


def test_a_batch_system_hands_the_same_on():
    variables = dict(line.removeprefix("export ").split("=") for line in exports())
    with dask.config.set(collect_env(variables)):
        for name, value in lean().items():
            assert setting(name) == value
