"""Metrics and tags of a training and its speedup, the same for presets and for the user's own Lightning code."""

from paceline.tasks.measure.validity import judge
from paceline.tasks.names import Metric, Tag
from paceline.tasks.records.training import ModuleResult, Trained
from paceline.tasks.speedup.limit_share import limit_share
from paceline.tasks.speedup.records import SpeedupResult
from paceline.tasks.speedup.steady_state import break_even_steps, steady_rate


def training_metrics(trained: Trained) -> dict[str, float | None]:
    """Metrics of a training."""
    share, stats = limit_share(trained), trained.compile
    metrics: dict[str, float | None] = {
        Metric.THROUGHPUT: trained.samples_per_second,
        Metric.STEADY_THROUGHPUT: steady_rate(trained),
        Metric.DATA_WAIT_FRACTION: trained.data_wait_fraction,
        Metric.COMMUNICATION_FRACTION: trained.communication_fraction,
        Metric.IDLE_FRACTION: trained.idle_fraction,
        Metric.WALL_SECONDS: trained.wall_seconds,
        Metric.PEAK_MEMORY: trained.peak_memory_bytes,
        Metric.ENERGY: trained.energy_joules,
        Metric.OF_LIMIT: share.of_limit,
        Metric.OF_BANDWIDTH: share.of_bandwidth,
        Metric.FLOPS_THROUGHPUT: share.flops_per_second,
        Metric.BYTES_THROUGHPUT: share.bytes_per_second,
        Metric.MFU: share.mfu,
    }
    if isinstance(trained, ModuleResult):
        metrics |= {Metric.throughput(unit): rate for unit, rate in trained.units_per_second.items()}
    if stats is not None:
        metrics |= {
            Metric.COMPILE_HIT_RATE: stats.hit_rate,
            Metric.COMPILE_NUM_GRAPHS: stats.num_graphs,
            Metric.COMPILE_SECONDS: stats.seconds,
            Metric.BREAK_EVEN_STEPS: break_even_steps(trained),
        }
    return metrics | {Metric.seconds(item): seconds for item, seconds in trained.time_budget.items()}


def recovery_metrics(trained: Trained) -> dict[str, float | None]:
    """What restarts cost, and how far the time budget differs from another clock."""
    restarts = trained.restarts
    return {
        Metric.CLOCK_DIFFERENCE: trained.clock_difference,
        Metric.NUM_RESTARTS: len(restarts),
        Metric.LOST_STEPS: sum(restart.lost_steps for restart in restarts),
        Metric.RECOVERY_SECONDS: max((restart.seconds for restart in restarts), default=None),
    }


def speedup_metrics(speedup: SpeedupResult) -> dict[str, float | None]:
    """All ratios of a run, the shares of its step, and what each factor is worth."""
    metrics: dict[str, float | None] = {
        Metric.SPEEDUP: speedup.ratio,
        Metric.SPEEDUP_LOW: speedup.low,
        Metric.SPEEDUP_HIGH: speedup.high,
        Metric.PROCESS_SPEEDUP: speedup.process_ratio,
        Metric.EFFICIENCY: speedup.efficiency,
    }
    ratios = {
        Metric.OVER_COMPETENT: speedup.ratios.get("competent"),
        Metric.END_TO_END: speedup.ratios.get("end_to_end"),
        Metric.OF_LIMIT: speedup.ratios.get("of_limit"),
        Metric.EQUAL_HARDWARE: speedup.equal_hardware,
    }
    for name, ratio in ratios.items():
        if ratio is not None:
            metrics |= {name: ratio.value, f"{name}_low": ratio.low, f"{name}_high": ratio.high}
    metrics |= {Metric.step_share(name): share[0] for name, share in speedup.shares.items()}
    if speedup.factors is not None:
        metrics |= {Metric.factor(share.factor): share.ratio for share in speedup.factors.factors}
        metrics[Metric.INTERACTION] = speedup.factors.interaction
    return metrics


def speedup_tags(speedup: SpeedupResult, run_id: str) -> dict[str, str]:
    """The verdict, both arms, and what disturbed their measurement."""
    usable = speedup.ratio is not None and not speedup.contaminated
    return {
        Tag.VERDICT: speedup.verdict,
        Tag.BASELINE: speedup.baseline or "none",
        Tag.CANDIDATE: speedup.candidate or "none",
        # The probe's baseline is an arm of this run.
        Tag.BASELINE_RUN_ID: next(iter(speedup.baseline_runs), run_id) if usable else "",
        Tag.CONTAMINATED: str(speedup.contaminated),
        Tag.CONTAMINATION: "; ".join(speedup.validity.reasons) if speedup.validity else "",
    }


def is_disturbed(trained: Trained) -> bool:
    """Whether the machine disturbed a training; busy cores do not count, `regression` compares them."""
    validity = trained.validity
    return validity is not None and judge(validity.model_copy(update={"foreign_load": None})).contaminated is True
