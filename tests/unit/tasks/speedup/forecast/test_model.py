"""Predictions against simulated clusters of up to 1,024 devices whose every constant is planted."""

from dataclasses import dataclass

import numpy as np
import pytest

from paceline.tasks.measure.paired_ratio import Interval
from paceline.tasks.records.measurement import AllReduceTime
from paceline.tasks.report.forecast_report import limit_sentences
from paceline.tasks.speedup.forecast.links import LINKS, all_reduce_seconds, fit_link, given_link
from paceline.tasks.speedup.forecast.model import MODEL_ERROR, Forecast, expected_largest
from paceline.tasks.speedup.forecast.records import DeviceProfile, Interference, Link, ProfilePoint
from tests.support.refusals import refused

BATCH = 4096
SIZES = (BATCH, BATCH // 2, BATCH // 8)
NOISE = 0.01


@dataclass(frozen=True)
class Cluster:
    """A machine whose step times are known exactly."""

    overhead: float
    per_sample: float
    latency: float
    per_byte: float
    gradient_bytes: int
    contention: float
    engine: float
    """Seconds per step that the engine needs on several devices."""
    scatter: float
    """Standard deviation of a device's step time, relative."""

    def alone(self, batch):
        return self.overhead + self.per_sample * batch

    def free(self, batch):
        return self.contention * self.alone(batch)

    def waiting(self, num, batch):
        return self.engine + self.scatter * self.free(batch) * expected_largest(num)

    def all_reduce(self, num, num_bytes):
        return 2 * (num - 1) * (self.latency + num_bytes / num * self.per_byte)

    def step(self, num, batch):
        if num == 1:
            return self.alone(batch)
        return self.free(batch) + self.waiting(num, batch) + self.all_reduce(num, self.gradient_bytes)

    def speedup(self, num, scaling):
        local = BATCH if scaling == "weak" else BATCH // num
        return (num if scaling == "weak" else 1) * self.step(1, BATCH) / self.step(num, local)

    def profile(self, rng):
        """What a noisy measurement on two devices says of it."""
        points = [
            ProfilePoint(batch_size=size, seconds=_seen(rng, self.alone(size), 0 if size == BATCH else NOISE))
            for size in SIZES
        ]
        token = self.all_reduce(2, 4)
        return DeviceProfile(
            points=tuple(points),
            gradient_bytes=self.gradient_bytes,
            batch_size=BATCH,
            num_train=50_000,
            num_epochs=10,
            company=tuple(self.company(rng, size, token) for size in (BATCH // 8, BATCH // 2, BATCH)),
            label="simulated",
        )

    def company(self, rng, size, token):
        waiting = self.free(size) + self.waiting(2, size) + token
        return Interference(
            batch_size=size,
            contention=_seen(rng, self.contention),
            waiting=_seen(rng, waiting / self.free(size)),
            token_seconds=token,
            step_seconds=_seen(rng, self.step(2, size)),
        )

    def link(self, rng):
        """Fitted to noisy all-reduces on two devices."""
        sizes = (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
        return fit_link([timed(2, size, self.all_reduce(2, size) * np.exp(rng.normal(0, 0.03))) for size in sizes])


def timed(num_devices, num_bytes, seconds):
    return AllReduceTime(num_bytes=num_bytes, num_devices=num_devices, seconds=seconds, spread=0.0)


def _seen(rng, value, noise=NOISE):
    """A value as a measurement reports it: off by its noise, with an interval of that noise."""
    seen = value * np.exp(rng.normal(0, noise))
    return Interval(value=seen, low=seen * np.exp(-1.96 * noise), high=seen * np.exp(1.96 * noise))


def random_cluster(rng):
    return Cluster(
        overhead=10 ** rng.uniform(-4, -2.5),
        per_sample=10 ** rng.uniform(-5.5, -4),
        latency=10 ** rng.uniform(-5.5, -4),
        per_byte=1 / 10 ** rng.uniform(9, 11.5),
        gradient_bytes=int(10 ** rng.uniform(5, 7.3)),  # within one bucket: nothing hides behind the backward pass
        contention=rng.uniform(1.0, 1.3),
        engine=10 ** rng.uniform(-5, -3),
        scatter=rng.uniform(0.0, 0.05),
    )


@pytest.mark.parametrize("num", [2, 8, 64, 1024])
@pytest.mark.parametrize("scaling", ["strong", "weak"])
def test_intervals_cover_the_truth_of_simulated_clusters(num, scaling):
    rng = np.random.default_rng(num)
    inside, errors = [], []
    for _ in range(400):
        cluster = random_cluster(rng)
        found = Forecast(cluster.profile(rng), cluster.link(rng)).predict(num, scaling)
        truth = cluster.speedup(num, scaling)
        inside.append(found.low <= truth <= found.high)
        errors.append(abs(found.ratio / truth - 1))
    assert np.mean(inside) >= 0.92  # of 0.95; 400 trials scatter by 0.011
    assert np.median(errors) <= (0.02 if num == 2 else 0.03)


def test_without_noise_two_devices_are_predicted_exactly():
    rng = np.random.default_rng(5)
    cluster = random_cluster(rng)
    exact = Link(name="exact", latency_seconds=cluster.latency, seconds_per_byte=cluster.per_byte, source="measured")
    profile = cluster.profile(_Silent())
    for scaling in ("strong", "weak"):
        for num in (2, 64):
            assert Forecast(profile, exact).predict(num, scaling).ratio == pytest.approx(
                cluster.speedup(num, scaling), rel=1e-6
            )
    assert Forecast(profile, exact).predict(1, "strong").ratio == 1


class _Silent:
    """A random generator without noise."""

    def normal(self, mean, deviation):
        return mean


def simple(overhead=1e-3, per_sample=1e-5, **changes):
    points = [
        ProfilePoint(batch_size=size, seconds=Interval(value=overhead + per_sample * size)) for size in (64, 128, 256)
    ]
    settings = {
        "points": tuple(points),
        "gradient_bytes": 1_000_000,
        "batch_size": 256,
        "num_train": 25_600,
        "num_epochs": 10,
        "label": "simple",
    }
    return DeviceProfile(**(settings | changes))


FREE = Link(name="free", latency_seconds=0, seconds_per_byte=0, source="given")


def test_strong_scaling_ends_where_the_overhead_is_all_there_is_and_weak_scaling_does_not():
    strong, weak = (Forecast(simple(), FREE).limits(scaling) for scaling in ("strong", "weak"))
    assert strong.last_paying_num_devices == 16  # from 16 to 32: 1.16 ms / 1.08 ms is 1.07
    assert weak.last_paying_num_devices == 4096


def test_a_slow_link_names_itself_and_the_batch_from_which_it_pays():
    slow = Link(name="slow", latency_seconds=5e-3, seconds_per_byte=0, source="given")
    found = Forecast(simple(), slow).predict(2, "strong")
    assert found.bound == "communication"
    assert found.ratio < 1
    limits = Forecast(simple(), slow).limits("strong")
    assert limits.smallest_paying_batch_size == 1024  # 10 ms of latency for 10 us a sample


def test_more_gradients_than_a_bucket_may_hide_behind_the_backward_pass():
    link = Link(name="link", latency_seconds=0, seconds_per_byte=1e-10, source="given")
    profile = simple(per_sample=1e-3, gradient_bytes=400_000_000)
    found = Forecast(profile, link).predict(2, "weak")
    assert found.communication_seconds == pytest.approx(0.04)
    hidden_all, hidden_none = 2 * 0.257 / 0.257, 2 * 0.257 / (0.257 + 0.04)
    assert hidden_none < found.ratio < hidden_all
    assert found.low < hidden_none * 1.05
    assert found.high > hidden_all * 0.95


def test_the_cheapest_number_of_devices_meets_the_deadline_with_the_fewest_device_hours():
    profile = simple(overhead=0.0)  # 256 us a step of 10 us samples, 1000 steps: 2.56 s
    found = Forecast(profile, FREE).cheapest("strong", 1.0, price=36.0)
    assert found.num_devices == 4
    assert found.total_seconds == pytest.approx(0.64)
    assert found.cost == pytest.approx(36.0 * 4 * 0.64 / 3600)
    assert Forecast(profile, FREE).cheapest("strong", 1e-6).num_devices is None


def test_step_times_between_and_beyond_the_measured_batches():
    forecast = Forecast(simple(), FREE)
    assert forecast.step(96)[0] == pytest.approx(1e-3 + 96e-5)
    beyond_D = forecast.step(2048)
    assert beyond_D[0] == pytest.approx(1e-3 + 2048e-5)
    low, high = np.quantile(beyond_D[1:], [0.025, 0.975])
    assert high / low > 1.1  # three doublings away nothing is certain


def test_bad_questions_are_refused():
    with refused("num_devices", 512, 256):
        Forecast(simple(), FREE).predict(512, "strong")
    with refused(None):
        Forecast(simple(points=simple().points[:1]), FREE).predict(2, "strong")
    with refused("num_devices", "num_devices=0"):
        Forecast(simple(), FREE).predict(0, "weak")


def test_a_link_is_found_again_from_its_all_reduces():
    link = fit_link([timed(4, size, 6 * (20e-6 + size / 4 * 1e-9)) for size in (1000, 100_000, 10_000_000)])
    assert link.latency_seconds == pytest.approx(20e-6)
    assert link.seconds_per_byte == pytest.approx(1e-9)
    assert link.relative_error == 0.05
    assert all_reduce_seconds(link, 1, 1e9) == 0
    assert all_reduce_seconds(link, 8, 0) == pytest.approx(14 * 20e-6)


def test_links_that_cannot_be_are_refused():
    one = timed(2, 8, 1e-3)
    with refused(None, 2):
        fit_link([one, one])
    with refused(None, 16, 2, "0.0"):
        fit_link([one, one.model_copy(update={"num_bytes": 16, "seconds": 0.0})])
    with refused("--link", "--latency", "--bandwidth"):
        given_link(None, 1.0)
    with refused("--bandwidth", -1):
        given_link(1e-6, -1.0)


def test_known_links_are_ordered_as_everybody_knows():
    message = 100e6
    order = ["nvlink", "pcie4", "infiniband", "ethernet100", "ethernet25", "ethernet10"]
    times = [all_reduce_seconds(LINKS[name], 8, message) for name in order]
    assert times[0] < times[1]
    assert times[2:] == sorted(times[2:])


def test_no_batch_may_be_large_enough():
    one = Interval(value=1.0)
    company = [
        Interference(
            batch_size=size,
            contention=Interval(value=2.1),
            waiting=one,
            token_seconds=0.0,
            step_seconds=Interval(value=2.1 * (1e-3 + 1e-5 * size)),
        )
        for size in (64, 256)
    ]
    found = Forecast(simple(company=tuple(company)), FREE).limits("weak")
    assert found.smallest_paying_batch_size == 0
    assert any("slower than one with every batch" in sentence for sentence in limit_sentences(found))


def test_a_forecast_of_two_devices_at_a_measured_batch_is_the_measured_step():
    """Its interval is that of one ratio, and of what two starts differ by; noise of the parts does not add up."""
    rng = np.random.default_rng(3)
    profile = random_cluster(rng).profile(rng)
    narrow = profile.model_copy(
        update={
            "company": tuple(
                each.model_copy(update={name: _wide(getattr(each, name)) for name in ("contention", "waiting")})
                for each in profile.company
            )
        }
    )
    for scaling in ("weak", "strong"):
        batch = BATCH if scaling == "weak" else BATCH // 2
        step = next(each.step_seconds.value for each in profile.company if each.batch_size == batch)
        found = Forecast(narrow, FREE).predict(2, scaling)
        assert found.step_seconds == pytest.approx(step)
        assert found.high / found.low == pytest.approx(np.exp(2 * np.hypot(1.96 * NOISE, MODEL_ERROR)), rel=0.03)


def _wide(interval):
    return Interval(value=interval.value, low=interval.value / 1.05, high=interval.value * 1.05)
