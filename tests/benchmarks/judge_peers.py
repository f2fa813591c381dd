"""`paceline judge` next to other tools, on equal programs and planted ones.

    python -m tests.benchmarks.judge_peers FOLDER

hyperfine is on the PATH; FOLDER/asv, FOLDER/pytest-benchmark and FOLDER/codspeed are virtual environments with the
tool of this name (`pip install asv virtualenv`, `pytest-benchmark`, `pytest-codspeed`). Each comparison is a line of
FOLDER/comparisons.jsonl once it is done, and the same command resumes. Needs a quiet machine.

hyperfine and `paceline judge` time processes, the others time the function inside. A tool is asked for about --seconds:

judge             its own decision
hyperfine         faster where the ratio that it prints is above 1 by more than the deviation next to it
asv               its own mark: a Mann-Whitney test, and a factor, of which the default (1.1) would miss all plants
pytest-benchmark  a threshold for the least time, as its --benchmark-compare-fail has
codspeed          a threshold for the mean, as its service has (10 % by default, which would miss all plants)
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from threading import Event, Thread

from tests.benchmarks.stored_lines import add_line, read_lines

UNITS = 1_000_000  # of the old side, a twelfth of a second
THRESHOLD = 0.025  # for tools that let the user choose one; half of what is planted
CASES = {"equal": 1.0, "equal, a neighbour comes": 1.0, "5 % faster": 1.05, "5 % slower": 1 / 1.05}
BUSY = (sys.executable, "-c", "while True: pass")
WORK = """
import sys

def work():
    total = 0
    for number in range(UNITS):
        total += number * number % 7

if __name__ == "__main__":
    work()
"""
TEST = """
from work import work

def test_work(benchmark):
    benchmark(work)
"""
ASV = {"version": 1, "project": "work", "repo": ".", "environment_type": "existing", "branches": ["HEAD"]}


def called(*command, place, **environment):
    """Standard output of a command."""
    variables = os.environ | {"PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1"} | environment
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, cwd=place, env=variables, text=True, check=False, **streams)
    if done.returncode != 0:
        raise RuntimeError(f"{command} ended with status {done.returncode}: {done.stdout[-2000:]}")
    return done.stdout


def by_threshold(ratio):
    """Faster, slower or neither, by a threshold."""
    return "faster" if ratio > 1 + THRESHOLD else "slower" if ratio < 1 / (1 + THRESHOLD) else "none"


def by_judge(old, new, seconds, _):
    home = old.parent / "home"
    sides = ["--old", f"{sys.executable} -S {old}/work.py", "--new", f"{sys.executable} -S {new}/work.py"]
    command = [sys.executable, "-m", "paceline.flows.cli", "judge", *sides, "--budget", str(seconds), "--json"]
    variables = os.environ | {"PACELINE_HOME": str(home)}
    variables.pop("MLFLOW_TRACKING_URI", None)
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    told = json.loads(done.stdout.splitlines()[-1])
    if "error" in told:
        raise RuntimeError(told["error"])
    ratio = told.get("ratio") or {"value": None}
    return {"KEEP": "faster", "DISCARD": "slower"}.get(told.get("outcome"), "none"), ratio["value"]


def by_hyperfine(old, new, seconds, _):
    file = old.parent / "hyperfine.json"
    commands = [f"{sys.executable} -S {side}/work.py" for side in (old, new)]
    first = time.monotonic()
    subprocess.run(commands[0].split(), check=True)
    runs = max(10, int(seconds / 2 / (time.monotonic() - first)))
    called("hyperfine", "-N", "--warmup", "1", "--runs", str(runs), "--export-json", str(file), *commands, place=old)
    before, after = json.loads(file.read_text())["results"]
    ratio = before["mean"] / after["mean"]
    deviation = ratio * sum((each["stddev"] / each["mean"]) ** 2 for each in (before, after)) ** 0.5
    return ("faster" if ratio - deviation > 1 else "slower" if ratio + deviation < 1 else "none"), ratio


def by_asv(old, new, seconds, environment):
    place = old.parent / "asv"
    (place / "benchmarks").mkdir(parents=True)
    (place / "asv.conf.json").write_text(json.dumps(ASV))
    repeat = f"(3, 1000, {seconds / 4})"  # of each of its two processes for a side
    lines = ["import sys", f"sys.path.insert(0, {str(place)!r})", "from work import work"]  # asv drops PYTHONPATH
    lines += ["def time_work(): work()", f"time_work.repeat = {repeat}"]
    (place / "benchmarks" / "__init__.py").write_text("")
    (place / "benchmarks" / "whole.py").write_text("\n".join(lines))
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b")
    called(*git, "init", "-q", place=place)
    asv, hashes = str(environment / "bin" / "asv"), []
    called(asv, "machine", "--yes", place=place, HOME=str(place))
    for side in (old, new):
        (place / "work.py").write_text((side / "work.py").read_text() + f"# {side.name}\n")
        called(*git, "add", "work.py", place=place)
        called(*git, "commit", "-q", "-m", side.name, place=place)
        hashes.append(called(*git, "rev-parse", "HEAD", place=place).strip())
        where = ("-E", f"existing:{environment / 'bin' / 'python'}", "--set-commit-hash", hashes[-1])
        called(asv, "run", *where, place=place, HOME=str(place))
    text = called(asv, "compare", *hashes, "--factor", str(1 + THRESHOLD), place=place, HOME=str(place))
    row = next(line for line in text.splitlines() if "time_work" in line)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    return {"-": "faster", "+": "slower"}.get(cells[0], "none"), 1 / float(cells[3].lstrip("~"))


def by_plugin(old, new, environment, options, results, read):
    """What a plugin of pytest measures of both sides, one after the other."""
    found = []
    for side in (old, new):
        (side / "test_work.py").write_text(TEST)
        called(str(environment / "bin" / "python"), "-m", "pytest", *options, "-q", "test_work.py", place=side)
        (file,) = side.glob(results)
        (benchmark,) = json.loads(file.read_text())["benchmarks"]
        found.append(benchmark["stats"][read])
    return by_threshold(found[0] / found[1]), found[0] / found[1]


def by_pytest_benchmark(old, new, seconds, environment):
    options = ("--benchmark-json=found.json", f"--benchmark-max-time={seconds / 2}")
    return by_plugin(old, new, environment, options, "found.json", "min")


def by_codspeed(old, new, seconds, environment):
    options = ("--codspeed", "--codspeed-mode=walltime", f"--codspeed-max-time={seconds / 2}")
    return by_plugin(old, new, environment, options, ".codspeed/results_*.json", "mean_ns")


TOOLS = {
    "judge": by_judge,
    "hyperfine": by_hyperfine,
    "asv": by_asv,
    "pytest-benchmark": by_pytest_benchmark,
    "codspeed": by_codspeed,
}


@contextmanager
def neighbours(after):
    """After so many seconds until the end, two busy processes for each processor; none where it is None."""
    over, processes = Event(), []

    def start():
        if not over.wait(after):
            processes.extend(subprocess.Popen(BUSY) for _ in range(2 * os.cpu_count()))

    thread = Thread(target=start)
    if after is not None:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if after is not None:
            thread.join()
        for process in processes:
            process.kill()
            process.wait()


def compare(folder, tool, case, seconds, after):
    """What a tool says of a case."""
    with tempfile.TemporaryDirectory() as name, neighbours(after):
        sides = [Path(name, side) for side in ("old", "new")]
        for side, units in zip(sides, (UNITS, round(UNITS / CASES[case])), strict=True):
            side.mkdir()
            (side / "work.py").write_text(WORK.replace("UNITS", str(units)))
        started = time.monotonic()
        verdict, ratio = TOOLS[tool](*sides, seconds, folder / tool)
        return {"verdict": verdict, "ratio": ratio, "seconds": time.monotonic() - started}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=8.0)
    options = parser.parse_args()
    file = options.folder.absolute() / "comparisons.jsonl"
    lines = read_lines(file)
    done = {(line["tool"], line["case"], line["repeat"]) for line in lines}
    for repeat in range(options.repeats):
        for case in CASES:
            for tool in TOOLS:
                if (tool, case, repeat) not in done:
                    usual = [line["seconds"] for line in lines if (line["tool"], line["case"]) == (tool, "equal")]
                    after = median(usual) / 2 if "neighbour" in case else None
                    found = compare(file.parent, tool, case, options.seconds, after)
                    lines.append({"tool": tool, "case": case, "repeat": repeat} | found)
                    add_line(file, lines[-1])
    print("| tool | " + " | ".join(CASES) + " | seconds |")
    print("|---" * (len(CASES) + 2) + "|")
    for tool in TOOLS:
        own = [line for line in lines if line["tool"] == tool]
        cells = []
        for case in CASES:
            counts = Counter(line["verdict"] for line in own if line["case"] == case)
            cells.append(", ".join(f"{number} {verdict}" for verdict, number in sorted(counts.items())))
        print(f"| {tool} | {' | '.join(cells)} | {median(line['seconds'] for line in own):.0f} |")


if __name__ == "__main__":
    main()
