import pytest

from paceline.tasks.train.launch.layout import WorkerSlot, gpus_of_workers, layouts, place_ranks, rank_environment
from tests.support.refusals import refused


def cluster(hosts, per_host, busy=()):
    return [
        WorkerSlot(worker=f"tcp://{host}:{port}", host=host, device=f"GPU-{host}{port}", busy=f"{host}{port}" in busy)
        for host in hosts
        for port in range(per_host)
    ]


@pytest.mark.parametrize("num_nodes", [1, 2, 4])
@pytest.mark.parametrize("num_devices", [1, 2, 8])
def test_ranks_of_a_host_are_neighbours_and_each_has_its_own_worker(num_nodes, num_devices):
    seats = place_ranks(cluster("abcd", 8), num_nodes, num_devices)
    assert [seat.rank for seat in seats] == list(range(num_nodes * num_devices))
    assert len({seat.worker for seat in seats}) == len(seats)
    for seat in seats:
        assert seat.rank == seat.node_rank * num_devices + seat.local_rank
        assert seat.host == "abcd"[seat.node_rank]


def test_free_devices_are_taken_first_and_keep_their_hosts_order():
    seats = place_ranks(cluster("a", 4, busy=("a0", "a2")), 1, 2)
    assert [seat.device for seat in seats] == ["GPU-a1", "GPU-a3"]
    seats = place_ranks(cluster("ab", 2, busy=("a1",)), 1, 2)
    assert {seat.host for seat in seats} == {"b"}
    seats = place_ranks(cluster("a", 3, busy=("a0", "a1")), 1, 2)
    assert [seat.device for seat in seats] == ["GPU-a0", "GPU-a2"], "it waits for as few as can be"


@pytest.mark.parametrize("num_gpus", [1, 2, 4, 8])
def test_each_worker_of_a_host_has_its_own_gpu(num_gpus):
    gpus = [f"GPU-{letter}" for letter in "hgfedcba"[:num_gpus]]
    for names in (gpus, [str(index) for index in range(num_gpus)]):
        rotated = [",".join(names[start:] + names[:start]) for start in range(num_gpus)]  # as dask-cuda does
        assert gpus_of_workers([(gpus, setting) for setting in rotated]) == gpus
    assert gpus_of_workers([(gpus, None)] * num_gpus) == gpus, "workers that all see the same"
    assert gpus_of_workers([(gpus, None)] * (num_gpus + 1)) == [*gpus, None], "one worker too many"
    assert gpus_of_workers([([gpu], gpu) for gpu in reversed(gpus)]) == gpus[::-1], "workers that see only their own"
    assert gpus_of_workers([([gpu], str(index)) for index, gpu in enumerate(gpus)]) == gpus


def test_a_host_with_too_few_workers_is_passed_over():
    workers = [*cluster("a", 1), *cluster("b", 2)]
    assert {seat.host for seat in place_ranks(workers, 1, 2)} == {"b"}


def test_too_small_a_cluster_is_refused_with_what_was_found():
    with refused("execution.num_devices", "a", "b", 1, 2):
        place_ranks([*cluster("a", 2), *cluster("b", 1)], 2, 2)


def test_a_group_may_shrink_to_the_layouts_with_enough_ranks():
    assert layouts(2, 4, None) == [(2, 4)]
    assert layouts(2, 2, 1) == [(2, 2), (1, 2), (2, 1), (1, 1)]
    assert layouts(2, 4, 5) == [(2, 4), (2, 3)]
    assert layouts(1, 2, 2) == [(1, 2)]


def test_another_groups_variables_are_scrubbed():
    inherited = {
        "PATH": "/bin",
        "RANK": "3",
        "WORLD_SIZE": "8",
        "MASTER_ADDR": "elsewhere",
        "SLURM_PROCID": "1",
        "TORCHELASTIC_RUN_ID": "x",
        "CUDA_VISIBLE_DEVICES": "1,0",
        "MALLOC_TRIM_THRESHOLD_": "65536",
    }
    environment = rank_environment(inherited, 4, "eth0", ("GPU-a", "GPU-b"))
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b"
    assert environment["OMP_NUM_THREADS"] == "4"
    assert (environment["GLOO_SOCKET_IFNAME"], environment["NCCL_SOCKET_IFNAME"]) == ("eth0", "=eth0")
    assert environment["PATH"] == "/bin"
    assert int(environment["MALLOC_TRIM_THRESHOLD_"]) > 2**30, "a worker's setting would double the time of a step"
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "SLURM_PROCID", "TORCHELASTIC_RUN_ID"} & environment.keys()


def test_a_sites_interfaces_stay():
    site = {"NCCL_SOCKET_IFNAME": "ib", "GLOO_SOCKET_IFNAME": "ib0"}
    assert site.items() <= rank_environment(site, 4, "eth0", ()).items()
    assert not site.keys() & rank_environment({}, 4, None, ()).keys()
