"""The end of an account: a card on stderr, and a run in MLflow."""

import sys
from contextlib import redirect_stdout

from paceline.conf.environment import Environment, quiet_engines
from paceline.tasks.errors import PacelineError, one_line
from paceline.tasks.formatting import number_text
from paceline.tasks.names import WATCH_EXPERIMENT, Artifact, Metric, Status, Tag
from paceline.tasks.redact import redact
from paceline.tasks.speedup.limit_share import format_share
from paceline.tasks.watch.account import Account
from paceline.tasks.watch.records import WatchResult
from paceline.tasks.watch.verdict import format_gain, judge

finished: list[WatchResult] = []
"""Accounts of this process that have ended, the oldest first."""
WORDS = {"data_wait": "input"}
GAINS = {
    "measured": "{gain} if each batch were ready in time: measured in {rounds} pairs of blocks",
    "computed": "{gain} without the wait: computed, not measured, because {why}",
    "at most": "{gain} at most, if this cause were gone altogether: computed from its share of a step",
}


def finish(account: Account, name: str, status: Status = "FINISHED") -> WatchResult | None:
    """Stop an account, print its card, and record it as a run; None where there was no training loop.

    An error of Paceline is printed, and stops no training.
    """
    try:
        account.stop()
        result = judge(account, name)
        if result is not None:
            finished.append(result)
            say(*card(result))
            with quiet_engines(), redirect_stdout(sys.stderr):  # MLflow's client prints addresses of a server
                run = _record(result, status, account.environment)
            say(f"  run      {run}")
        return result
    except PacelineError as error:
        say(f"error: {error}", *([f"hint: {error.hint}"] if error.hint else []))
    except Exception as error:  # noqa: BLE001  the training of the user is worth more than its account
        say(f"error: Paceline could not finish the account of {name}: {one_line(error)}")
    return None


def status_of(error: BaseException) -> Status:
    """The status of a run that an error ended."""
    return "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"


def say(*lines: str) -> None:
    """Write lines on stderr."""
    sys.stderr.write("".join(f"{redact(line)}\n" for line in lines))
    sys.stderr.flush()


def card(result: WatchResult) -> list[str]:
    """The account in a few lines."""
    rate = f", {1 / result.step_seconds:,.1f} steps/s" if result.step_seconds else ""
    rate += f", {number_text(result.samples_per_second)} samples/s" if result.samples_per_second else ""
    lines = [f"Paceline: {result.name}, {result.num_steps:,} steps{rate}", f"  verdict  {result.verdict}"]
    if result.num_measured:
        parts = " + ".join(f"{WORDS.get(part, part)} {1000 * value:.1f}" for part, value in result.parts.items())
        lines.append(f"  step     {1000 * result.step_seconds:.1f} ms = {parts}")
    if result.gain is not None and result.gain_source is not None:
        words = {"gain": format_gain(result.gain), "rounds": str(result.num_rounds), "why": result.why_not_measured}
        lines.append(f"  gain     {GAINS[result.gain_source].format(**words)}")
    if result.of_limit is not None:
        lines.append(f"  limit    {format_share(result.of_limit)} of what this device does in {result.precision}")
    return [*lines, f"  next     {result.next_step}"]


def _record(result: WatchResult, status: Status, site: Environment) -> str:
    """Record a run in MLflow, and return where it is."""
    from paceline.tasks.track import run as tracking
    from paceline.tasks.track.store import check_store

    experiment_id = check_store(site.tracking_uri, WATCH_EXPERIMENT, site.artifact_root)
    tags = {Tag.ROLE: "watch", Tag.CAUSE: result.cause, Tag.VERDICT: result.verdict}
    handle = tracking.begin_named(site.tracking_uri, WATCH_EXPERIMENT, experiment_id, result.name, tags)
    metrics = {
        Metric.THROUGHPUT: result.samples_per_second,
        Metric.OF_LIMIT: result.of_limit,
        Metric.FLOPS_THROUGHPUT: result.flops_per_second,
        Metric.FOREIGN_CORES: result.validity.foreign_load,
        Metric.STEP_SECONDS: result.step_seconds or None,
        **{Metric.seconds(item): seconds for item, seconds in result.time_budget.items()},
        **{Metric.step_share(name): share.value for name, share in result.shares.items()},
    }
    if result.gain is not None:
        ends = result.gain.value, result.gain.low, result.gain.high
        metrics |= dict(zip((Metric.GAIN, Metric.GAIN_LOW, Metric.GAIN_HIGH), ends, strict=True))
    tracking.log_facts(handle, metrics, {Tag.CONTAMINATED: str(result.validity.contaminated)})
    tracking.log_document(handle, Artifact.SUMMARY, result.model_dump(mode="json"))
    tracking.finish(handle, status)
    return f"{handle.run_id} in experiment {WATCH_EXPERIMENT}; see it with: paceline ui {handle.run_id}"
