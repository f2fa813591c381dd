"""Work of threads ahead of the consumer: the order of the results, how many are in memory, and an early end."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event

from paceline.tasks.data.decode.map_ahead import map_ahead


def test_results_come_in_order_and_a_few_items_ahead():
    taken = []
    with ThreadPoolExecutor(3) as pool:
        results = map_ahead(pool, str, (taken.append(number) or number for number in range(9)), 4)
        assert next(results) == (0, "0")
        assert taken == [0, 1, 2, 3, 4]
        assert list(results) == [(number, str(number)) for number in range(1, 9)]


def test_work_that_has_not_started_is_cancelled_at_an_early_end():
    started, go_on = [], Event()

    def work(number):
        started.append(number)
        return number == 0 or go_on.wait()

    with ThreadPoolExecutor(1) as pool:
        results = map_ahead(pool, work, range(99), 50)
        assert next(results) == (0, True)
        results.close()
        go_on.set()
    assert max(started) <= 1
