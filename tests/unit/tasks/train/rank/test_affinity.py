import os

import pytest

from paceline.tasks.train.rank.context import cores_of, memory_nodes, parse_cpus

NODES = [{0, 1, 2, 3}, {4, 5, 6, 7}]


@pytest.mark.parametrize(
    ("text", "cores"), [("0-3,8-9\n", {0, 1, 2, 3, 8, 9}), ("5\n", {5}), ("\n", set()), ("0,2,4-5", {0, 2, 4, 5})]
)
def test_lists_of_the_kernel_are_read(text, cores):
    assert parse_cpus(text) == cores


@pytest.mark.parametrize(
    ("num_ranks", "nodes", "expected"),
    [
        (2, NODES, [{0, 1, 2, 3}, {4, 5, 6, 7}]),
        (4, NODES, [{0, 1, 2, 3}] * 2 + [{4, 5, 6, 7}] * 2),
        (2, [{0}, {1}, {2}, {3}], [{0, 1}, {2, 3}]),
        (1, NODES, [None]),  # all of them
        (3, NODES, [None] * 3),
    ],
)
def test_ranks_are_spread_over_the_nodes(num_ranks, nodes, expected):
    assert [cores_of(rank, num_ranks, nodes) for rank in range(num_ranks)] == expected


def test_only_nodes_with_cores_of_ours_count(tmp_path):
    for number, cpus in {0: "0-3", 1: "4-7", 2: "", 10: "8-11"}.items():
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(f"{cpus}\n")
    assert memory_nodes({2, 3, 8, 9}, tmp_path) == [{2, 3}, {8, 9}]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity on this system")
def test_this_host_has_its_nodes():
    cores = os.sched_getaffinity(0)
    assert set().union(*memory_nodes(cores)) <= cores
