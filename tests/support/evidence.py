"""Evidence of simulated probes: arms whose steps take made-up times, measured by the product's own schedule."""

import io

import numpy as np

from paceline.conf.config import Config, Speedup
from paceline.tasks.measure.probe import ArmRunner, run_probe
from paceline.tasks.measure.step_times import StepTimes
from paceline.tasks.measure.validity import judge
from paceline.tasks.names import Artifact
from paceline.tasks.records.execution import BASELINE, ladder_arms
from paceline.tasks.records.measurement import CompetentCosts, FurtherStarts, Validity
from paceline.tasks.speedup.baselines.ratios import add_ratios
from paceline.tasks.speedup.evidence.archive import PLAN, analysis_plan, evidence_files
from paceline.tasks.speedup.limit_share import SHARES, add_share, limit_share
from paceline.tasks.speedup.verdict import speedup_result
from tests.support.reports import CANDIDATE, limited, make_report, make_train

WINDOWS = ((0, 50, 6.5), (50, 50, 4.25), (100, 37, 3.1))
WINDOW_SAMPLES = (3200, 3200, 2301)
QUIET = judge(Validity(steal_fraction=0.001, foreign_load=0.04, num_cores=2))
BUSY = judge(Validity(steal_fraction=0.3, num_cores=2))


class SimulatedProbe:
    """A probe of arms whose steps take these seconds, with noise of the machine and of single steps.

    Args:
        step_seconds: By role.
        spikes: Share of a role's steps that take three times as long.
        alike: Autocorrelation of the noise from block to block.
        slow_seconds: Time from the start in which all steps take half as long again.
        carried: Share by which the baseline's steps take longer after another arm.
        validities: What the watch sees, attempt by attempt.
        changes: Of the candidate.
        slow_rank: Seconds of the second rank without exchange over those of the first.
    """

    def __init__(
        self, step_seconds, *, noise=0.02, spikes=None, alike=0.0, slow_seconds=0.0, carried=0.0, num_devices=1,
        validities=(QUIET,), seed=0, slow_rank=None, changes=None,
    ):  # fmt: skip
        self.random, self.now, self.level = np.random.default_rng(seed), 0.0, 0.0
        self.slow_seconds, self.carried, self.last = slow_seconds, carried, "baseline"
        self.noise, self.alike, self.spikes = noise, alike, spikes or {}
        self.validities = list(validities)
        several = CANDIDATE.model_copy(update={"num_devices": num_devices} | (changes or {}))
        ladder = ladder_arms(BASELINE, several)
        arms = {"baseline": BASELINE, "single": CANDIDATE, "alone": CANDIDATE} | ladder
        sizes = {"baseline": 64, "single": 64, "alone": 64, "half_batch": 32 * num_devices} | dict.fromkeys(ladder, 64)
        self.runners = {
            role: ArmRunner(
                arms.get(role, several),
                self._runner(role, seconds),
                sizes.get(role, 64 * num_devices),
                gather=(lambda own: (own, slow_rank * own)) if slow_rank and role == "no_sync" else None,
            )
            for role, seconds in step_seconds.items()
        }

    def _runner(self, role, seconds):
        def run(num_steps):
            self.level = self.alike * self.level + self.random.normal(0, self.noise)
            factors = np.exp(self.level + self.random.normal(0, self.noise, num_steps))
            factors[self.random.random(num_steps) < self.spikes.get(role, 0.0)] *= 3
            factors *= 1.5 if self.now < self.slow_seconds else 1.0
            factors *= 1 + self.carried if role == "baseline" != self.last else 1.0
            self.last = role
            steps = (seconds * factors).tolist()
            self.now += sum(steps)
            return steps

        return run

    def stop(self):
        return self.validities.pop(0)

    def measure(self, **settings):
        """The probe's result, and the file with its step times."""
        settings = Speedup(**{"num_blocks": 12, "max_seconds": 1e4, "target_half_width": 1e-9} | settings)
        steps, content = StepTimes(), io.BytesIO()
        probe = run_probe(self.runners, settings, watch=lambda: self, clock=lambda: self.now, steps=steps)
        np.savez_compressed(content, **steps.columns())
        return probe, content.getvalue()


def evidence_of(probe, raw, *, earlier=(), starts=(), contaminated=None, **fields):
    """The summary that a run with this probe would print, and its files of evidence."""
    fields = {"windows": WINDOWS, "window_samples": WINDOW_SAMPLES} | limited() | fields
    seconds = sum(window[2] for window in fields["windows"])
    rate = sum(fields["window_samples"]) / seconds if seconds else None
    trained = make_train(probe, samples_per_second=rate, **fields)
    share = limit_share(trained)
    speedup = add_share(
        speedup_result(probe, trained, 2, earlier, FurtherStarts(probes=[one[0] for one in starts])), share
    )
    if probe.others.keys() & {"competent", "all_cores"}:
        costs = CompetentCosts(
            start_seconds=2.0, build_seconds=1.0, evaluation_seconds=(1e-4,) * 5, record_seconds=0.1, num_workers=1,
            num_threads=2,
        )  # fmt: skip
        with_costs = trained.model_copy(update={"probe": probe.model_copy(update={"competent": costs})})
        speedup = add_ratios(speedup, Config(), make_report(None).prepared, with_costs, 100.0)
    train = share.model_dump(mode="json", include={*SHARES}) | {"samples_per_second": rate}
    summary = {"speedup": speedup.model_dump(mode="json"), "train": train, "rows": [("speedup", speedup.verdict)]}
    facts = {
        "run_id": 32 * "a",
        "contaminated": speedup.contaminated if contaminated is None else contaminated,
        "reasons": list(speedup.validity.reasons),
        "earlier": list(earlier),
    }
    documents = {PLAN: analysis_plan(Speedup()), Artifact.ENVIRONMENT: b"{}"}
    raw = [raw, *(content for further, content in starts if not further.validity.contaminated)]
    return summary, evidence_files(raw, trained, facts, summary, documents)
