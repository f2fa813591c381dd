"""Puts the simulated clock, network, disk and processes under the real modules."""

import gc
import logging
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import distributed

from paceline.conf import environment
from paceline.flows.lifecycle import flow_run_lock, guardian, mlflow_run
from paceline.tasks import deadline, files, metrics_file
from paceline.tasks.records.hardware import Gpu, Hardware
from paceline.tasks.track import metrics_upload
from paceline.tasks.track import run as tracking
from paceline.tasks.train import prefect_tasks
from paceline.tasks.train.launch import (
    coordinator,
    device_lock,
    heartbeat,
    placement,
    rank_group,
    rank_process,
    recovery,
    run_lock,
    supervisor,
)
from paceline.tasks.train.rank import checkpoint, checkpoint_io
from tests.simulation import cluster, disk, programs, servers, system
from tests.simulation.disk import SimPath
from tests.simulation.system import PerProcess, kernel, process

OPERATING_SYSTEM = {
    "time": system.Time(),
    "os": system.OS(),
    "Path": SimPath,
    "subprocess": system.subprocess,
    "select": system.select,
    "socket": system.socket,
    "psutil": system.psutil,
    "threading": system.threading,
    "fcntl": SimpleNamespace(flock=disk.flock, LOCK_EX=2, LOCK_NB=4, LOCK_SH=1, LOCK_UN=8),
    "shutil": system.shutil,
    "atexit": system.atexit,
}
MODULES = (
    *(coordinator, device_lock, heartbeat, placement, rank_group, rank_process, recovery, run_lock, supervisor),
    *(
        checkpoint,
        checkpoint_io,
        deadline,
        files,
        metrics_file,
        metrics_upload,
        prefect_tasks,
        mlflow_run,
        flow_run_lock,
    ),
    guardian,
)
KEPT = {(placement, "os"), (placement, "threading"), (mlflow_run, "Path")}
_LOG = logging.getLogger("simulation")


def hardware():
    """`tasks.cluster.hardware.describe` on a worker: its host's GPUs."""
    host = process().host
    gpus = [
        Gpu(uuid=f"GPU-{host.name}-{slot}", name="GPU", memory_bytes=2**33, compute_capability=(9, 0))
        for slot in range(kernel().world.site.num_devices)
    ]
    return Hardware(host=host.name, cpu_name="cpu", num_cores=2, memory_bytes=2**33, cpu_bf16=True, gpus=tuple(gpus))


def worker_facts():
    """`placement.worker_facts`, of a worker of dask-cuda."""
    facts, slot = hardware(), process().memory["worker"].slot
    uuids = [gpu.uuid for gpu in facts.gpus]
    visible = ",".join(uuids[slot:] + uuids[:slot])
    return placement.WorkerFacts(code="code", hardware=facts, visible_devices=visible)


def of_cluster(name):
    def call(*arguments, **options):
        return getattr(process().memory["cluster"], name)(*arguments, **options)

    return call


class Torch:
    """`torch.save` and `torch.load` of plain types, without torch's 0.3 ms."""

    Tensor = type("Tensor", (), {})

    @staticmethod
    def save(content, buffer):
        buffer.write(repr(content).encode())

    @staticmethod
    def load(path, map_location, weights_only):
        return eval(path.read_bytes(), {"__builtins__": {}})


def replacements():
    """Modules, names and what stands there during a simulation."""
    for module in MODULES:
        for name, simulated in OPERATING_SYSTEM.items():
            if hasattr(module, name) and (module, name) not in KEPT:
                yield module, name, simulated
    for module in (coordinator, placement):
        yield module, "connect", of_cluster("connect")
        yield module, "code_fingerprint", lambda: "code"
    for module in (coordinator, placement, rank_group):
        yield module, "call_workers", of_cluster("call")
    yield rank_group, "fetch", of_cluster("fetch")
    for module in (placement, rank_group):
        yield module, "workers", of_cluster("addresses")
    for module in (environment, placement, supervisor):
        yield module, "Environment", lambda: kernel().world.environment
    yield environment, "quieten", lambda: None
    yield coordinator, "free_port", free_port
    yield coordinator, "host_identity", lambda: process().host.name
    yield placement, "worker_facts", worker_facts
    yield placement, "_reservation_lock", PerProcess("reservation", system.Lock)
    yield placement, "_reserved", PerProcess("reserved", set)
    yield supervisor, "_watches", PerProcess("watches", dict)
    yield supervisor, "idle_watts", lambda devices: None
    yield metrics_upload, "_left", PerProcess("left", dict)
    yield metrics_upload, "MlflowClient", servers.MlflowClient
    yield flow_run_lock, "_held", PerProcess("held", ExitStack)
    yield flow_run_lock, "_owned", PerProcess("owned", set)
    yield flow_run_lock, "promote_finished", lambda environment, flow_run_id: None  # nothing is registered
    yield flow_run_lock, "get_logger", lambda name: _LOG
    yield flow_run_lock, "get_current_settings", lambda: SimpleNamespace(api=SimpleNamespace(url="simulated"))
    yield flow_run_lock, "get_client", lambda sync_client: nullcontext(servers.PrefectClient(kernel().world.prefect))
    yield rank_process, "private_directory", lambda parent: parent
    yield rank_process, "take", lambda ready, environment: None
    yield rank_process, "log_of", lambda pid: ""
    yield checkpoint_io, "torch", Torch
    yield checkpoint_io, "ThreadPoolExecutor", system.Executor
    yield from (
        (tracking, "MlflowClient", servers.MlflowClient),
        (tracking, "open_store", servers.MlflowClient),
        (tracking, "check_reachable", lambda uri: None),
        (tracking, "sqlite_path", lambda uri: None),
        (tracking, "log_config", lambda handle, config: None),
        (tracking, "_sync_artifacts", lambda handle: None),
        (tracking, "time", system.Time()),
        (mlflow_run, "find_runs", lambda *arguments, **options: servers.MlflowClient().find_runs(*arguments)),
        (mlflow_run, "sqlite_path", lambda uri: None),
        (mlflow_run, "get_logger", lambda name: _LOG),
        (mlflow_run, "get_run_logger", lambda: _LOG),
        (mlflow_run, "flow_run", SimpleNamespace(get_id=lambda: process().memory.get("flow_run_id"))),
        (mlflow_run, "deployment", SimpleNamespace(get_id=lambda: None, get_name=lambda: None)),
        (mlflow_run, "defer_signals", system.deferred_signals),
        (prefect_tasks, "get_run_logger", lambda: _LOG),
        (prefect_tasks, "progress_bar", lambda title: nullcontext(lambda *arguments: None)),
        (distributed, "get_worker", cluster.get_worker),
        (distributed.worker, "thread_state", cluster.ThreadState()),
        (system.Popen, "programs", {rank_process.RANK_MODULE: programs.rank_main}),
    )


def free_port():
    """`supervisor.free_port`: every port is free once."""
    kernel().last_port = getattr(kernel(), "last_port", 30000) + 1
    return kernel().last_port


class TraceHandler(logging.Handler):
    def emit(self, record):
        if kernel().trace is not None and not record.getMessage().startswith("execution."):
            kernel().log(f"{record.levelname.lower()}: {record.getMessage()}")


@contextmanager
def simulated(with_logs=False):
    """Put the simulation under the real modules; once for many histories."""
    handler, loggers = TraceHandler(), [_LOG, logging.getLogger("paceline")]
    before = [(logger.level, logger.propagate) for logger in loggers]
    with ExitStack() as stack:
        for module, name, simulated_object in replacements():
            stack.enter_context(patch.object(module, name, simulated_object))
        for logger in loggers:
            logger.addHandler(handler)
            logger.propagate = False
            logger.setLevel(logging.INFO if with_logs else logging.CRITICAL)
        gc.collect()
        gc.freeze()  # a search for garbage in all imported modules would take a third of the time
        try:
            yield
        finally:
            gc.unfreeze()
            for logger, (level, propagate) in zip(loggers, before, strict=True):
                logger.removeHandler(handler)
                logger.setLevel(level)
                logger.propagate = propagate
