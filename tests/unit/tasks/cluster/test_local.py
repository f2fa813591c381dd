import re
import subprocess
import sys

import pytest
from distributed import Client

from paceline.conf.cluster import Cluster
from paceline.conf.environment import Environment
from paceline.tasks.cluster.client import ClusterResources, connect, workers
from paceline.tasks.cluster.hardware import usable_cores
from paceline.tasks.cluster.kinds import open_cluster
from paceline.tasks.cluster.local import local_arguments, local_cuda_arguments, num_local_workers
from paceline.tasks.cluster.tls import local_security
from paceline.tasks.records.hardware import Gpu
from tests.support.refusals import refused

START = "from paceline.tasks.cluster.local import require_main_guard as start"


def gpus(count):
    return [Gpu(uuid=f"GPU-{i}", name="X", memory_bytes=1, compute_capability=(9, 0)) for i in range(count)]


def demand(workers, on_gpus=True):
    return ClusterResources(num_hosts=1, workers_per_host=workers, gpus=on_gpus)


@pytest.mark.parametrize("num_gpus", range(1, 9))
def test_there_is_one_worker_of_one_thread_per_gpu(num_gpus):
    for wanted in range(1, num_gpus + 1):
        arguments = local_cuda_arguments(gpus(num_gpus), demand(wanted), None)
        assert arguments["preload_nanny"] == ["paceline.tasks.cluster.gpu_workers"]
        assert arguments["n_workers"] == wanted
        assert arguments["threads_per_worker"] == 1
        assert arguments["host"] == "127.0.0.1"
    with refused("execution.num_devices", f"execution.num_devices={num_gpus + 1}", num_gpus):
        local_cuda_arguments(gpus(num_gpus), demand(num_gpus + 1), None)


def test_a_cluster_of_this_host_is_joined_by_this_process_alone():
    with open_cluster(Cluster(num_workers=1), demand(1, on_gpus=False)) as address:
        assert address.startswith("tls://127.0.0.1:")
        with connect(address) as client:
            assert client.submit(sum, [1, 2]).result(30) == 3
            for place in (address, *workers(client)):
                for strange in (None, local_security(Cluster(), Environment())):
                    scheme = place if strange else place.replace("tls://", "tcp://")
                    with pytest.raises((OSError, TypeError, ValueError)):
                        Client(scheme, security=strange, timeout=3, set_as_default=False).run(sum, [1])
        again = address
    with refused("PACELINE_TLS", "infra/certificates"):
        connect(again).__enter__()


def test_without_certificates_there_is_no_tls():
    arguments = local_arguments(3, None)
    assert (arguments["protocol"], arguments["security"], arguments["n_workers"]) == ("tcp://", None, 3)


def test_the_number_of_local_workers():
    assert num_local_workers(Cluster(num_workers=3), demand(2, on_gpus=False)) == 3
    assert num_local_workers(Cluster(), demand(1, on_gpus=False)) == usable_cores()
    assert num_local_workers(Cluster(), demand(1, on_gpus=False).model_copy(update={"prepares": False})) == 1
    assert num_local_workers(Cluster(), demand(usable_cores() + 1, on_gpus=False)) == usable_cores() + 1


@pytest.mark.parametrize(
    ("body", "faulty_line"),
    [
        ("start()", 3),
        ("from threading import Thread\nthread = Thread(target=start)\nthread.start(); thread.join()", 5),
        ("def main():\n    start()\n\nfor _ in range(1):\n    main()", 7),
        ('if __name__ == "__main__":\n    start()', None),
        ("if True:\n    start()", 4),
    ],
)
def test_a_script_that_workers_would_run_again_is_refused(tmp_path, body, faulty_line):
    script = tmp_path / "train.py"
    script.write_text(f"{START}\n\n{body}\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    line = re.search(r"InputError: line (\d+) of train.py starts a run outside of", done.stderr)
    assert (line and int(line[1])) == faulty_line, done.stderr
