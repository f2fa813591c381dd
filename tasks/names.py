"""Names in MLflow: tags, metrics and artifacts of our runs. Public contract: a name never changes."""

import hashlib
import posixpath
import re
from collections.abc import Mapping
from typing import Literal

Status = Literal["FINISHED", "FAILED", "KILLED"]
"""Last status of a run."""


class Tag:
    """Tags of a run, or of a registered version."""

    ANALYSIS_PLAN = "paceline.analysis_plan"
    """SHA-256 of the rules by which the probe is measured and judged, set before its first step."""
    ARM = "paceline.arm"
    BASELINE = "paceline.baseline"
    BASELINE_RUN_ID = "paceline.baseline_run_id"
    BEST = "paceline.best"
    BEST_ACCURACY = "paceline.best_accuracy"  # as BEST_SCORE; versions from before it was written have no other
    BEST_RUN_ID = "paceline.best_run_id"
    BEST_SCORE = "paceline.best_score"
    BOUND = "paceline.bound"
    CALIBRATION = "paceline.calibration"
    CANDIDATE = "paceline.candidate"
    CAUSE = "paceline.cause"
    CHOICE = "paceline.choice"
    CODE = "paceline.code"  # fingerprint of the source of Paceline with which the run started
    CONFIRMATION = "paceline.confirmation"  # whether an alarm was confirmed by timing the last good run again, in words
    CONTAMINATED = "paceline.contaminated"
    """Whether other work disturbed the measurement: the probe of a run, the training of an arm, a sweep's layout."""
    CONTAMINATION = "paceline.contamination"
    DATASET = "paceline.dataset"  # fingerprint of the prepared set
    DISTURBED = "paceline.disturbed"
    """Whether heat or a hypervisor slowed the training of a run; foreign load is a metric (`FOREIGN_CORES`)."""
    ERROR = "paceline.error"
    EXECUTION = "paceline.execution"
    GATE = "paceline.gate"
    GROUP = "paceline.group"
    HOST = "paceline.host"
    HOSTS = "paceline.hosts"  # hosts of the ranks, in alphabetical order; `HOST` is that of the command
    IS_BASELINE = "paceline.is_baseline"
    JUDGEMENT = "paceline.judgement"  # KEEP, DISCARD or RETEST; of a search FOUND, MACHINE, NO SLOWDOWN or UNDECIDED
    KEY = "paceline.key"
    LAYER = "paceline.layer"
    LAYOUT = "paceline.layout"
    LEDGER = "paceline.ledger"  # name of the ledger of a judgement
    MATCH = "paceline.match"
    MODEL = "paceline.model"
    MODEL_DIGEST = "paceline.model_digest"  # digest of the model that a run logged: description and weights
    PARENT = "mlflow.parentRunId"
    PARITY = "paceline.parity"
    PREDICTION_RUN_ID = "paceline.prediction_run_id"
    PREDICTIONS = "paceline.predictions"
    PRETRAINED = "paceline.pretrained"
    PROCESS = "paceline.process"  # of the process of a side that has logged a run, where `judge` reads its metric
    PRUNED = "paceline.pruned"
    REGISTERED = "paceline.registered"
    REGRESSION = "paceline.regression"
    """`none`, the measures that got worse, or why it was not judged. A user's `accepted` starts a new history here."""
    REGRESSION_TEXT = "paceline.regression_text"
    REPEAT = "paceline.repeat"
    RESUMED_WITH = "paceline.resumed_with"
    """Code and versions that changed before a resume, in words: the speed of such a run is not that of one version."""
    ROLE = "paceline.role"
    SCORE = "paceline.score"
    SCORE_NAME = "paceline.score_name"
    SERIES = "paceline.series"  # runs with the same value are each other's history
    SPEEDUP = "paceline.speedup"
    STUDY_KIND = "paceline.study_kind"
    STUDY_RUN_ID = "paceline.study_run_id"
    SUPERSEDED_BY = "paceline.superseded_by"
    SWEEP_RUN_ID = "paceline.sweep_run_id"
    TRIAL = "paceline.trial"
    VERDICT = "paceline.verdict"
    VERSIONS = "paceline.versions"  # versions of Python and of the packages with which the run started
    VIEW = "paceline.view"
    WORKLOAD = "paceline.workload"
    ACCURACY = "paceline.accuracy"  # as SCORE; versions from before it was written have no other


DOCTOR_EXPERIMENT = "paceline-doctor"  # holds the history of `paceline doctor --measure`
JUDGEMENT_EXPERIMENT = "judgements"  # holds the judgements of `paceline judge`
WATCH_EXPERIMENT = "paceline-watch"  # holds the accounts of users' own scripts
PREDICTIONS_FILE = "predictions.json"  # next to the parts of a prediction; it describes them
REGRESSION_EVENT = "paceline.regression"  # Prefect events that an automation may wait for
LATE_EVENT = "paceline.late"
SERIES_RESOURCE = "paceline.series"  # prefix of the event's resource


class Metric:
    """Metrics of a run. Those of one name and another number, split or item are formats."""

    BREAK_EVEN_EPOCHS = "speedup/break_even_epochs"
    BREAK_EVEN_STEPS = "compile/break_even_steps"
    COMPILE_HIT_RATE = "compile/hit_rate"
    COMPILE_NUM_GRAPHS = "compile/num_graphs"
    COMPILE_SECONDS = "compile/seconds"
    COST_PER_EPOCH = "cost/per_epoch"
    ENERGY = "energy/joules"
    FOREIGN_CORES = "machine/foreign_cores"
    NUM_REJECTED = "data/num_rejected"
    PEAK_MEMORY = "memory/peak_bytes"

    FORECAST_RATIO, FORECAST_LOW, FORECAST_HIGH = "prediction/ratio", "prediction/low", "prediction/high"
    FORECAST_MEASURED = "prediction/measured"
    FORECAST_ERROR = "prediction/error"
    FORECAST_INSIDE = "prediction/inside"

    PARITY_AGREEMENT = "predict/parity_agreement"
    PARITY_MAX_DIFFERENCE = "predict/parity_max_difference"

    GAIN, GAIN_LOW, GAIN_HIGH = "watch/gain", "watch/gain_low", "watch/gain_high"
    """Factor of the throughput of a user's own script without the cause that the account names."""
    STEP_SECONDS = "watch/step_seconds"

    JUDGEMENT_LEVEL = "judge/level"  # chance of a false KEEP that a judgement could spend

    LOST_STEPS = "recovery/lost_steps"
    NUM_RESTARTS = "recovery/num_restarts"
    RECOVERY_SECONDS = "recovery/seconds"  # longest time from a noticed failure to the start of the next ranks

    SPEEDUP, SPEEDUP_LOW, SPEEDUP_HIGH = "speedup/ratio", "speedup/low", "speedup/high"
    SPEEDUP_INTERVAL = "speedup/interval"
    """Low end, high end, ratio as steps 0, 1, 2 of one moment: MLflow, without error bars, draws a vertical line."""
    PROCESS_SPEEDUP = "speedup/process_ratio"  # of the training's own process
    EFFICIENCY = "speedup/efficiency"
    OF_LIMIT = "speedup/of_limit"
    OF_BANDWIDTH = "speedup/of_bandwidth"
    INTERACTION = "speedup/interaction"
    END_TO_END_SPEEDUP = "speedup/end_to_end_ratio"
    OVER_COMPETENT = "speedup/over_competent"  # as the next two and `OF_LIMIT` with `_low` and `_high`
    END_TO_END = "speedup/end_to_end"
    EQUAL_HARDWARE = "speedup/equal_hardware"
    PREDICTION_SPEEDUP = "speedup/prediction_ratio"
    TARGET_SPEEDUP, TARGET_SPEEDUP_LOW = "speedup/target_ratio", "speedup/target_low"
    TARGET_SPEEDUP_HIGH = "speedup/target_high"

    STUDY_NUM_ARMS = "study/num_arms"
    STUDY_NUM_CONTAMINATED = "study/num_contaminated"
    STUDY_NUM_FAILED = "study/num_failed"
    STUDY_SECONDS = "study/seconds"

    SWEEP_BEST_SCORE = "sweep/best_score"
    SWEEP_BEST_TEST_SCORE = "sweep/best_test_score"
    SWEEP_NUM_EPOCHS = "sweep/num_epochs"
    SWEEP_NUM_FAILED = "sweep/num_failed"
    SWEEP_NUM_PRUNED = "sweep/num_pruned"
    SWEEP_NUM_TRIALS = "sweep/num_trials"
    SWEEP_OCCUPANCY = "sweep/occupancy"
    SWEEP_SCORE = "sweep/score"
    SWEEP_SECONDS = "sweep/seconds"

    TEST_ACCURACY = "test/accuracy"
    TEST_ANGLE_RMSE = "test/angle_rmse_degrees"
    TEST_NOISY_PSNR = "test/noisy_psnr_db"
    TEST_PSNR = "test/psnr_db"
    TEST_SCORE = "test/score"

    THROUGHPUT = "throughput/samples_per_second"
    BASELINE_THROUGHPUT = "throughput/baseline_samples_per_second"
    PREDICTION_THROUGHPUT = "throughput/prediction_samples_per_second"
    BYTES_THROUGHPUT = "throughput/bytes_per_second"
    FLOPS_THROUGHPUT = "throughput/flops_per_second"
    MFU = "throughput/mfu"
    STEADY_THROUGHPUT = "throughput/steady_samples_per_second"

    COMMUNICATION_FRACTION = "time/communication_fraction"
    DATA_WAIT_FRACTION = "time/data_wait_fraction"
    END_TO_END_SECONDS = "time/end_to_end_seconds"
    EPOCH_SECONDS = "time/epoch_seconds"
    EXTRACT_SECONDS = "time/extract_seconds"
    CLOCK_DIFFERENCE = "time/clock_difference"
    FIT_SECONDS = "time/fit_seconds"
    IDLE_FRACTION = "time/idle_fraction"
    PREPARE_SECONDS = "time/prepare_seconds"
    STARTUP_SECONDS = "time/startup_seconds"
    WALL_SECONDS = "time/wall_seconds"

    TRAIN_FINAL_LOSS = "train/final_loss"
    TRAIN_LEARNING_RATE = "train/learning_rate"
    TRAIN_LOSS = "train/loss"
    TRAIN_NUM_RANKS = "train/num_ranks"
    TRAIN_THROUGHPUT = "train/samples_per_second"
    VALIDATION_LOSS = "validation/loss"

    @staticmethod
    def test(name: str) -> str:
        """A measure of quality on the test split."""
        return f"test/{name}"

    @staticmethod
    def validation(name: str) -> str:
        """A measure of quality on the validation split."""
        return f"validation/{name}"

    @staticmethod
    def seconds(item: str) -> str:
        """An item of the time budget."""
        return f"time/{item}_seconds"

    @staticmethod
    def train_rate(unit: str) -> str:
        """Rate of the training steps between two log points, in a unit of the user's own, such as tokens."""
        return f"train/{unit}_per_second"

    @staticmethod
    def throughput(unit: str) -> str:
        """Throughput of a training in such a unit."""
        return f"throughput/{unit}_per_second"

    @staticmethod
    def step_share(name: str) -> str:
        """A share of the candidate's step time."""
        return f"speedup/share_{name}"

    @staticmethod
    def factor(name: str) -> str:
        """A factor between the baseline and the run: by how much it multiplies the throughput."""
        return f"speedup/factor_{name}"

    @staticmethod
    def device(host: str, device: str, figure: str) -> str:
        """A rate of a device, measured by the doctor: operations or bytes per second."""
        return f"device/{host}/{device}/{figure}"

    @staticmethod
    def forecast(scaling: str, num_devices: int, end: str) -> str:
        """A forecast's `ratio`, `low` or `high`."""
        return f"prediction/{scaling}_{num_devices}_devices_{end}"


class Artifact:
    """Files of a run; the model's folder holds the files of `paceline.tasks.model_bundle`."""

    ADVICE = "advice.json"
    BISECTION = "bisection.json"  # the search for the changes that made a run slower
    CONFIG = "config.yaml"
    DEVICES = "devices.json"
    ENVIRONMENT = "environment.json"
    EVIDENCE = "evidence.tar"
    """Raw data behind the speedup, with a program that recomputes it (`paceline.tasks.speedup.evidence`)."""
    FACTS = "facts.json"  # what decides whether two runs are comparable
    MODEL = "model"
    NO_GPU = "no_gpu.json"
    NO_GPU_REQUEST = "no_gpu_request.json"
    PREDICTION_CHECK = "prediction_check.json"
    REJECTED = "rejected.jsonl"
    REPORT = "report.html"
    STEPS = "steps.parquet"  # time of each step of the probe
    STUDY = "study.json"
    STUDY_REQUEST = "study_request.json"
    SUMMARY = "summary.json"
    SWEEP = "sweep.json"
    SWEEP_REQUEST = "sweep_request.json"
    WINDOWS = "windows.parquet"  # seconds of the training steps between two reads of the loss

    @staticmethod
    def picture(name: str) -> str:
        """A picture of the report."""
        return f"pictures/{name}.png"


def is_contaminated(tags: Mapping[str, str]) -> bool:
    """Whether other work, heat or a hypervisor disturbed a run's probe or its training."""
    return "True" in (tags.get(Tag.CONTAMINATED), tags.get(Tag.DISTURBED))


def metric_name(name: str) -> str:
    """The name of a metric of the user's in MLflow, which refuses some characters, paths and lengths (3.17).

    A refused name gets a suffix of its own, so that two names stay two there, in every attempt and order.
    """
    allowed = re.sub(r"[^\w\-. /:]", "_", name)[:250]
    is_path = posixpath.normpath(allowed) == allowed != "." and not allowed.startswith(("..", "/"))
    if allowed == name and is_path:
        return name
    stem = allowed if is_path else re.sub(r"[/.]", "_", allowed)
    return f"{stem[:240]}_{hashlib.sha256(name.encode()).hexdigest()[:6]}"
