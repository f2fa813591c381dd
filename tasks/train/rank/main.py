"""Main program of a rank: `python -m paceline.tasks.train.rank.main spec.json`.

`run_rank` is a rank's work in seven steps, from joining the group to result.json. Independent of Dask and Prefect, so
that an engineer can replay a rank by hand.
"""

import faulthandler
import gc
import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

LOADED_AT = time.monotonic()
if __name__ == "__main__":
    gc.disable()  # until `main`: searching the imported modules for garbage takes a quarter of the time

from paceline.tasks import log_lines
from paceline.tasks.errors import CaptureError, MeasureMemoryError, PacelineError
from paceline.tasks.measure.system_metrics import log_system_metrics
from paceline.tasks.metrics_file import FILE as METRICS_FILE
from paceline.tasks.metrics_file import MetricsFile
from paceline.tasks.model.out_of_memory import is_out_of_memory
from paceline.tasks.records.measurement import AutotuneResult, MeasureResult
from paceline.tasks.records.training import TrainResult
from paceline.tasks.redact import redact, redact_logs
from paceline.tasks.train.autotune.choice import choose
from paceline.tasks.train.autotune.search import autotune, time_layers
from paceline.tasks.train.launch.heartbeat import Heartbeat
from paceline.tasks.train.launch.layout import SEARCH_FILE
from paceline.tasks.train.launch.standby import die_with_supervisor
from paceline.tasks.train.plan import arm_of
from paceline.tasks.train.rank import predictions
from paceline.tasks.train.rank import process_group as group
from paceline.tasks.train.rank.benchmark import ArmBenchmark, measure, measure_rank_loads, name_oom, probe_execution
from paceline.tasks.train.rank.callbacks import LogMetrics, write_atomically
from paceline.tasks.train.rank.context import RankContext
from paceline.tasks.train.rank.device_limit import limit_facts
from paceline.tasks.train.rank.fit import fit, restore_schedule, training_facts
from paceline.tasks.train.rank.time_budget import Stopwatch
from paceline.tasks.train.rank_spec import RankSpec
from paceline.tasks.train.step.compile import CompileWatch
from paceline.tasks.train.step.cuda_graph import capture_error
from paceline.tasks.train.step.train_step import oom_sample_count


def run_rank(spec: RankSpec, stopwatch: Stopwatch, heartbeat: Heartbeat) -> None:
    """Train, or measure what the spec asks for, and write result.json into the rank's directory."""
    if spec.config.lightning.settings:
        from paceline.tasks.train.lightning.fit import fit_module  # jsonargparse
        from paceline.tasks.train.lightning.measure import measure_module

        asks = spec.measurement is not None
        done = measure_module(spec, stopwatch) if asks else fit_module(spec, stopwatch, heartbeat)
        write_atomically(Path(spec.directory) / "result.json", done.model_dump_json())
        return

    # 1. Join the group
    context = RankContext(spec)
    config = spec.config

    # 2. Build the network
    context.build_network()
    if spec.measurement is not None:
        with group.wait_for_rank_0(), name_oom("search", "search"):
            arms = spec.measurement.arms
            result = measure(context) if arms else time_layers(ArmBenchmark(context), spec.plan)
        write_result(context, result)
        return
    compile_watch = CompileWatch()

    # 3. Autotune: share batches by the ranks' speed, and choose the fastest of the executions that `auto` leaves open
    if config.execution.worker_load == "measured" and spec.world_size > 1:
        with stopwatch.during("setup"):
            context.set_rank_loads(measure_rank_loads(context))
    schedule = restore_schedule(context)
    with stopwatch.during("search"), name_oom("search", "search"), group.wait_for_rank_0():
        num_steps = schedule.num_steps(config.recipe.num_epochs) - schedule.first_step
        timing = autotune(ArmBenchmark(context), spec.plan, num_steps, spec.search) if spec.may_search else None
        if timing is not None and context.writes:
            write_atomically(context.directory / SEARCH_FILE, timing.model_dump_json())
        search = timing or spec.search
        if search is not None:
            context.execute(choose(spec.plan, search, arm_of(spec.plan), num_steps))

    with ExitStack() as stack:
        # 4. Probe: compare the execution with the baseline
        with stopwatch.during("probe"), name_oom("probe", "probe"), group.wait_for_rank_0():
            loader, probe = probe_execution(context)
        stack.callback(loader.close)

        # 5. Fit
        log = stack.enter_context(open_metrics(context)) if context.writes else None
        learner, facts = fit(context, loader, schedule, stopwatch, heartbeat, compile_watch, log)
        learner.network.to(context.device)  # Lightning has moved it to the CPU, where NCCL cannot average
        group.average_buffers(learner.network)

        # 6. Predict the test split
        with stopwatch.during("prediction"):
            network = predictions.gather_network(context, learner)
            facts |= predictions.predict_test_split(context, predictions.inference_network(context, network))
            facts["weights"] = predictions.save_weights(context, network)
            if config.track.register:  # without anything that makes prediction faster
                num_samples, *totals = predictions.count_statistics(context, network, "test", "32-true")
                facts["plain_score"] = context.task.score(totals, num_samples)
        stopwatch.switch("teardown")

    # 7. Measure the limit of the device, and write the result
    with stopwatch.during("limit"):
        facts |= limit_facts(context)
    facts |= training_facts(context, learner, schedule, stopwatch, facts["windows"], probe)
    facts |= {"probe": probe, "no_probe": context.no_probe, "worker_load": context.loads, "search": search}
    write_result(context, TrainResult.model_validate(facts))


def write_result(context: RankContext, result: TrainResult | MeasureResult | AutotuneResult) -> None:
    """Write result.json, which the supervisor reads once the process has ended."""
    write_atomically(context.directory / "result.json", result.model_dump_json())


@contextmanager
def open_metrics(context: RankContext) -> Iterator[LogMetrics]:
    """Open the metrics file of rank 0, and sample the host's system metrics into it."""
    path = context.directory / METRICS_FILE
    with closing(MetricsFile(path)) as metrics, log_system_metrics(metrics.log_durably, context.gpu_uuids()):
        yield metrics.log


def main(spec_path: str) -> int:
    """Run the rank of a spec; return 0 when it has written its result."""
    gc.freeze()  # later collections need not search the imported modules again
    gc.enable()
    redact_logs()
    faulthandler.enable()  # a crash in native code leaves the Python stack in the log
    die_with_supervisor()
    heartbeat = Heartbeat()
    stopwatch = Stopwatch("startup", float(os.environ.get("PACELINE_SPAWNED_AT", LOADED_AT)))
    spec = RankSpec.model_validate_json(Path(spec_path).read_text(encoding="utf-8"))
    Path(spec.directory).mkdir(parents=True, exist_ok=True)
    if log_lines.is_json():
        stage = "train" if spec.measurement is None else "measure"
        log_lines.labels |= {"run_id": spec.run_id, "stage": stage, "rank": spec.rank}
        log_lines.log_as_json()
    for engine in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(engine).setLevel(logging.WARNING)  # hides banners and advertisements
    warnings.filterwarnings("ignore", module="lightning")  # advice on DataLoader workers, which Paceline does not use
    try:
        run_rank(spec, stopwatch, heartbeat)
    except BaseException as raised:  # noqa: BLE001  whatever ends a rank is reported, with its traceback
        error = capture_error(raised) or _interrupt(raised) or raised
        facts = {
            "message": redact(message_of(error, is_own=bool(spec.config.lightning.settings))),
            "traceback": redact(traceback.format_exc()),
            "time": time.time(),
            "causes": {
                "final": isinstance(error, PacelineError),
                "too_many": oom_sample_count(error),
                "oom_stage": error.stage if isinstance(error, MeasureMemoryError) else None,
                "oom_arm": error.arm if isinstance(error, MeasureMemoryError) else None,
                "failed_capture": str(error) if isinstance(error, CaptureError) else None,
            },
        }
        heartbeat.final_error(facts)
        logging.getLogger("paceline.tasks.train.rank").error("%s", facts["traceback"])
        return 1
    return 0


def message_of(error: BaseException, *, is_own: bool) -> str:
    """The type and text of the error that ends a rank, and advice where it trains own code and has no memory left."""
    message = f"{type(error).__name__}: {error}".removesuffix(": ")
    if is_own and is_out_of_memory(error) and not isinstance(error, PacelineError):
        return f"{message}; make the batches of your loader smaller"
    return message


def _interrupt(raised: BaseException) -> BaseException | None:
    """The KeyboardInterrupt of the user's code after which Lightning has left the program."""
    cause = raised.__context__ if isinstance(raised, SystemExit) else None
    return cause if isinstance(cause, KeyboardInterrupt) else None


if __name__ == "__main__":
    status = main(sys.argv[1])
    # Leave at once: the interpreter's own exit takes half a second with torch loaded, and after an error
    # a group's destructor may wait for peers that are gone.
    os._exit(status)
