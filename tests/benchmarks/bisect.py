"""Acceptance of `paceline bisect`: python -m tests.benchmarks.bisect --attempts 10.

    --part planted      8 % of real work in one of 16 commits, at a random place: found
    --part neighbour    no slow commit; the bad time was measured next to other programs, which are there again: the
                        machine, not the code
    --minutes 25        start no attempt after so long; the same command resumes
    --table             print what is there

Each attempt is a process of the program in a new repository and a new home. Each is stored as a line of
.paceline/bench/bisect.jsonl once it is done.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from paceline.tasks.fingerprint import code_fingerprint
from tests.benchmarks.stored_lines import add_line, read_lines
from tests.support.slow_history import make_history

ROOT = Path(__file__).parents[2]
FILE = ROOT / ".paceline" / "bench" / "bisect.jsonl"
NUM_COMMITS, SLOWDOWN = 16, 0.08
NUM_STEPS = 3_000_000
"""About a quarter of a second. A process of a tenth of it is over before its neighbours get their share."""
SETTLE_SECONDS = 2.0  # until the neighbours share the processors evenly
BUSY = "while True: pass"
PARTS = ("planted", "neighbour")
WANTED = {"planted": "FOUND", "neighbour": "MACHINE"}


def time_program(place, count=5):
    """Median seconds of the program at the newest commit."""
    seconds = []
    for _ in range(count):
        started = time.monotonic()
        subprocess.run([sys.executable, "-S", "work.py"], cwd=place, check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.monotonic() - started)
    return median(seconds)


def attempt(part, number, budget, num_steps):
    """One search, and whether its outcome is the right one."""
    started = time.monotonic()
    slow = random.Random(f"{part} {number}").randrange(1, NUM_COMMITS + 1) if part == "planted" else None
    neighbours = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "repository")
        make_history(place, NUM_COMMITS, slow, num_steps, SLOWDOWN)
        options = ["--good", f"main~{NUM_COMMITS}", "--bad", "main", "--budget", str(budget), "--json"]
        try:
            if part == "neighbour":
                options += ["--good-seconds", str(time_program(place))]
                neighbours = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(2 * os.cpu_count())]
                time.sleep(SETTLE_SECONDS)
                options += ["--bad-seconds", str(time_program(place))]
            done = subprocess.run(
                [sys.executable, "-m", "paceline.flows.cli", "bisect", *options, "--", sys.executable, "-S", "work.py"],
                env=os.environ | {"PACELINE_HOME": f"{folder}/home"},
                cwd=place,
                capture_output=True,
                text=True,
                check=False,
            )
        finally:
            for neighbour in neighbours:
                neighbour.kill()
                neighbour.wait()
    told = json.loads(done.stdout.splitlines()[-1])
    subjects = [commit["subject"] for commit in told.get("commits", [])]
    is_right = told.get("outcome") == WANTED[part] and (slow is None or subjects == [f"Change {slow}"])
    series = [
        {
            "verdict": each["verdict"],
            "ratios": each["ratios"],
            "rounds": len(each["rounds"]),
            "contaminated": sum(bool(one["contaminated"]) for one in each["rounds"]),
        }
        for each in told.get("series", [])
    ]
    return {
        "part": part,
        "number": number,
        "slow": slow,
        "num_steps": num_steps,
        "is_right": is_right,
        "outcome": told.get("outcome"),
        "reason": told.get("reason", told.get("error")),
        "remaining": subjects,
        "ratio": told.get("ratio"),
        "series": series,
        "status": done.returncode,
        "seconds": time.monotonic() - started,
        "code": code_fingerprint(),
    }


def stored(file):
    """The attempts that this code has done."""
    return [line for line in read_lines(file) if line["code"] == code_fingerprint()]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--attempts", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=600.0, help="start no attempt after so long")
    parser.add_argument("--budget", type=float, default=900.0, help="seconds of a search")
    parser.add_argument("--num-steps", type=int, default=NUM_STEPS, help="work of the program")
    parser.add_argument("--file", type=Path, default=FILE)
    parser.add_argument("--table", action="store_true", help="measure nothing")
    chosen = parser.parse_args()
    chosen.file.parent.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + 60 * chosen.minutes
    done = {(line["part"], line["number"]) for line in stored(chosen.file)}
    for number in range(chosen.attempts):
        for part in chosen.part:
            if (part, number) not in done and not chosen.table and time.monotonic() < until:
                add_line(chosen.file, attempt(part, number, chosen.budget, chosen.num_steps))
    print("| part | attempt | slow commit | outcome | remain | rounds | seconds |")
    print("|---|---|---|---|---|---|---|")
    lines = stored(chosen.file)
    for line in lines:
        rounds = sum(each["rounds"] for each in line["series"])
        cells = (line["part"], line["number"], line["slow"], line["outcome"], len(line["remaining"]), rounds)
        print(f"| {' | '.join(map(str, cells))} | {line['seconds']:.0f} |")
    for part in chosen.part:
        right = [line["is_right"] for line in lines if line["part"] == part]
        print(f"{part}: {sum(right)} of {len(right)} are {WANTED[part]}")


if __name__ == "__main__":
    main()
