"""Calibration of the printed interval: python -m tests.benchmarks.calibration, or infra/bench calibration.

    infra/bench calibration                              all parts, about an hour on two quiet cores
    infra/bench calibration --part planted identical     goals 13 and 14
    infra/bench calibration --minutes 25                 stops starting after so long; the same command resumes
    infra/bench calibration --table                      prints what is there

Each trial is a fresh process with production settings and a ratio that is known. Each is stored as a line of
.paceline/bench/calibration.jsonl once it is done. Parts:

    planted     goal 13: 100 starts, sleeps and training steps, ratios 0.90 to 1.10
    identical   goal 14: 200 starts, training steps of equal arms
    noise       sleeps with skew, unequal sensitivity, drift and a neighbour's bursts
    neighbour   training steps next to a process that keeps a core busy every now and then
    starts      sleeps whose starts differ by 0.5 to 3 %, each measured in three further processes
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from zlib import crc32

from scipy import stats

from paceline.conf.config import Speedup
from paceline.tasks.fingerprint import code_fingerprint
from paceline.tasks.host import keep_memory
from paceline.tasks.records.measurement import FurtherStarts, ProbeResult
from paceline.tasks.speedup.verdict import speedup_result
from tests.support.planted_ratios import KINDS, RATIOS, PlantedArms

ROOT = Path(__file__).parents[2]
PROGRAM = Path(sys.executable).with_name("paceline")
FILE = ROOT / ".paceline" / "bench" / "calibration.jsonl"
SLEEPERS = 6
"""Trials that sleep at once, on a machine that has nothing else to do."""
PROCESS_SDS = (0.005, 0.01, 0.02, 0.03)
FURTHER, FURTHER_ROUNDS = 3, 6
SHORT_TRAINING = (
    *("data.image_size=16", "model.width=4", "model.depth=1", "recipe.batch_size=64"),  # steps of about a millisecond
    *("recipe.num_epochs=1", "recipe.warmup_epochs=0", "speedup.baseline=none", "execution.precision=32-true"),
)
CELLS = {
    "planted": [("sleep", "plain", ratio, 0.0) for ratio in RATIOS]
    + [("work", "plain", ratio, 0.0) for ratio in RATIOS],
    "identical": [("work", "plain", 1.0, 0.0)],
    "noise": [("sleep", kind, ratio, 0.0) for kind in KINDS[1:] for ratio in RATIOS],
    "neighbour": [("work", "neighbour", ratio, 0.0) for ratio in (0.90, 1.00, 1.10)],
    "starts": [("sleep", "plain", ratio, sd) for sd in PROCESS_SDS for ratio in (0.98, 1.00)],
}
COUNTS = {"planted": 10, "identical": 200, "noise": 6, "neighbour": 7, "starts": 13}


def trials(parts, count):
    """The trials of some parts, each cell in turn, so that those done so far are balanced."""
    for part in parts:
        for number, (how, kind, ratio, sd) in itertools.product(range(count or COUNTS[part]), CELLS[part]):
            yield {"part": part, "how": how, "kind": kind, "ratio": ratio, "sd": sd, "number": number}


def key_of(trial):
    return tuple(trial[name] for name in ("part", "how", "kind", "ratio", "sd", "number"))


def stored(file):
    """The trials that this code has done."""
    lines = file.read_text().splitlines() if file.exists() else []
    done = [json.loads(line) for line in lines]
    return [line for line in done if line["code"] == code_fingerprint()]


def rank_spec(folder):
    """The description of a rank on this code, left by a short training."""
    home = folder / f"home-{code_fingerprint()}"
    specs = sorted(home.glob("runs/*/attempt-0/rank-0/spec.json"))
    if not specs:
        command = [PROGRAM, "run", "digits", *SHORT_TRAINING, "--json"]
        subprocess.run(command, env=os.environ | {"PACELINE_HOME": str(home)}, check=True, stdout=subprocess.DEVNULL)
        specs = sorted(home.glob("runs/*/attempt-0/rank-0/spec.json"))
    return specs[-1]


def probe_of(trial, seed, spec, **settings):
    """The probe of one fresh process."""
    facts = trial | {"seed": seed, "settings": settings, "spec": str(spec) if trial["how"] == "work" else None}
    command = [sys.executable, "-m", "tests.benchmarks.planted_start", json.dumps(facts)]
    environment = os.environ | keep_memory()
    if trial["how"] == "sleep":
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ProbeResult.model_validate_json(done.stdout.splitlines()[-1])


def measure(trial, spec):
    """What a run would print, and whether it holds the truth."""
    started = time.monotonic()
    seed = crc32(repr(key_of(trial)).encode())
    own = probe_of(trial, seed, spec)
    further = FurtherStarts()
    if trial["part"] == "starts":
        probes = [probe_of(trial, seed + 1 + each, spec, num_blocks=FURTHER_ROUNDS) for each in range(FURTHER)]
        further = FurtherStarts(probes=tuple(probes))
    result = speedup_result(own, starts=further)
    truth = PlantedArms(trial["ratio"], trial["kind"], 0).truth
    differs = result.significant if result.significant is not None else result.significant_within_process
    return trial | {
        "value": result.ratio,
        "low": result.low,
        "high": result.high,
        "covers": result.low is not None and bool(result.low <= truth <= result.high),
        "differs": bool(differs),
        "disturbed": bool(result.contaminated) or result.low is None,  # nothing is claimed
        "rounds": result.num_blocks,
        "warm_up": len(own.warm_up),  # rounds, the first of `blocks`
        "blocks": [{one.arm: one.seconds_per_sample for one in blocks} for blocks in (*own.warm_up, *own.rounds)],
        "seconds": time.monotonic() - started,
        "code": code_fingerprint(),
    }


def run(parts, count, minutes, file):
    """Measure what is missing; the sleeping trials at once, the others one after the other."""
    file.parent.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + 60 * minutes
    done = {key_of(line) for line in stored(file)}
    missing = [trial for trial in trials(parts, count) if key_of(trial) not in done]
    spec = rank_spec(file.parent) if any(trial["how"] == "work" for trial in missing) else None

    def note(trial):
        if time.monotonic() < until:
            line = json.dumps(measure(trial, spec))
            with file.open("a") as lines:
                lines.write(line + "\n")

    for how, at_once in (("sleep", SLEEPERS), ("work", 1)):
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(note, [trial for trial in missing if trial["how"] == how]))


def bounds(successes, count):
    """Clopper and Pearson's 95 % interval of a share (1934)."""
    low = stats.beta.ppf(0.025, successes, count - successes + 1) if successes else 0.0
    high = stats.beta.ppf(0.975, successes + 1, count - successes) if successes < count else 1.0
    return float(low), float(high)


def share(name, hits):
    low, high = bounds(sum(hits), len(hits))
    return f"{name} {sum(hits)} of {len(hits)} [{low:.3f}, {high:.3f}]"


def table(lines):
    """Rows for infra/LOG.md: coverage, width, false calls or power, each with its bounds, undisturbed trials alone."""
    groups = defaultdict(list)
    for line in lines:
        noise = f"starts differ by {line['sd']:.1%}" if line["sd"] else line["kind"]
        for ratio in ("all", f"{line['ratio']:.2f}"):
            groups[line["part"], line["how"], noise, ratio].append(line)
    yield "| part | work | noise | ratio | interval covers | half-width | called different | rounds | disturbed |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for (*names, ratio), members in sorted(groups.items()):
        quiet = [line for line in members if not line["disturbed"]]
        cells = ["-"] * 4
        if quiet:
            width = median((line["high"] - line["low"]) / 2 / line["value"] for line in quiet)
            called = (
                "-"
                if ratio == "all"
                else share("false" if ratio == "1.00" else "power", [line["differs"] for line in quiet])
            )
            cells = [share("", [line["covers"] for line in quiet]).strip(), f"{width:.2%}", called]
            cells.append(f"{median(line['rounds'] for line in quiet):.0f}")
        yield f"| {' | '.join([*names, ratio, *cells])} | {len(members) - len(quiet)} of {len(members)} |"


def goals(lines):
    """Goals 13 and 14 of the design, with upper bounds."""
    quiet = [line for line in lines if not line["disturbed"]]
    planted = [line["covers"] for line in quiet if line["part"] == "planted"]
    identical = [line["differs"] for line in quiet if line["part"] == "identical"]
    if planted:
        yield f"goal 13: {share('covers', planted)}, at least 0.93"
    if identical:
        yield f"goal 14: {share('called different', identical)}, at most 0.05"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=CELLS, default=list(CELLS))
    parser.add_argument("--count", type=int, help="trials of each ratio and noise; production counts otherwise")
    parser.add_argument("--minutes", type=float, default=600.0, help="start no trial after so long")
    parser.add_argument("--file", type=Path, default=FILE)
    parser.add_argument("--table", action="store_true", help="measure nothing")
    chosen = parser.parse_args()
    if not chosen.table:
        run(chosen.part, chosen.count, chosen.minutes, chosen.file)
    lines = stored(chosen.file)
    settings = Speedup()
    print(f"settings: {settings.num_blocks} blocks, {settings.max_seconds:g} s, {settings.target_half_width:.0%}")
    print("\n".join([*table(lines), *goals(lines)]))


if __name__ == "__main__":
    main()
