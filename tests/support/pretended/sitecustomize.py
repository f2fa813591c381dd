"""Loaded by every Python whose PYTHONPATH names this folder: gives it a GPU that is not there.

PRETENDED_GUARD is the library made of guard.cpp. torch gets its part when it is imported, for most processes never do.
"""

import ctypes
import importlib.util
import os
import runpy
import sys
from contextlib import suppress


class _Finder:
    """Finds torch once, and has it end its import with a GPU."""

    def find_spec(self, name, path=None, target=None):
        """As the other finders do, whose loader it then wraps."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def with_gpu(module):
            ctypes.CDLL(os.environ["PRETENDED_GUARD"], ctypes.RTLD_GLOBAL)
            execute(module)
            importlib.import_module("pretended_gpu").install()
            module.cuda.set_device = lambda device: pretended_nvml.open_context()

        spec.loader.exec_module = with_gpu
        return spec


with suppress(ModuleNotFoundError):  # another Python, such as a program's of the system
    import pretended_nvml

    from paceline.tasks.cluster import hardware

    sys.modules["pynvml"] = pretended_nvml
    hardware.torch_has_cuda = lambda: True
    sys.meta_path.insert(0, _Finder())

if "PLANTED" in os.environ:  # the other file of this name
    runpy.run_path(os.environ["PLANTED"])
