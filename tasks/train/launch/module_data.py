"""The user's Lightning code on the workers of a cluster: its packages, and `prepare_data` in a child process."""

import time
from pathlib import Path

from paceline.conf.lightning import Lightning
from paceline.tasks import deadline
from paceline.tasks.cluster.client import connect, host_of, workers
from paceline.tasks.errors import InputError, RunError, one_line
from paceline.tasks.train.launch.coordinator import TrainJob
from paceline.tasks.train.lightning import child, code

POLL_SECONDS = 0.1


def require_code(module: Lightning, address: str) -> None:
    """Raise InputError: a worker has other packages of the user's classes than this process."""
    names = code.package_names(module.settings, Path(module.code) if module.code else None)
    if not names:
        return
    expected = module.packages[-len(names) :]
    with connect(address) as client:
        answers = client.run(code.identify, names, on_error="return")
    for worker, answer in sorted(answers.items()):
        if answer != expected:
            has = f"has {' and '.join(answer)}" if isinstance(answer, tuple) else one_line(answer)
            raise InputError(f"worker {worker} {has}, this run {' and '.join(expected)}", hint=code.SAME_CODE)


def prepare_on_hosts(job: TrainJob, address: str) -> list[str]:
    """Prepare the data on all hosts at the same time; return the hosts. Raises RunError: it failed on one of them."""
    module = job.config.lightning
    copied = str(job.directory / code.FOLDER) if module.code else None
    with connect(address) as client:
        hosts = {host_of(worker): worker for worker in reversed(workers(client))}
        futures = {}
        for index, (host, worker) in enumerate(sorted(hosts.items())):
            request = child.Request(task="prepare", code=copied, settings=module.settings, host_index=index)
            how = {"workers": [worker], "allow_other_workers": False, "pure": False, "retries": 0}
            futures[host] = client.submit(child.ask, request, **how)
        while not all(future.done() for future in futures.values()):
            deadline.check()
            time.sleep(POLL_SECONDS)
        for host, future in futures.items():
            if (error := future.exception()) is not None:
                raise RunError(f"on host {host}: {one_line(error)}") from error
    return list(futures)
