"""Goal 16, candidates of known speed through one ledger: python -m tests.benchmarks.judge_candidates FOLDER

Half of the candidates are equal to the base, a quarter is faster by 2 to 5 % and a quarter slower, by real work, in an
order of chance. Each is judged by `paceline judge`, and next to it by two usual rules on the same times: that of
hyperfine's output (the ratio of the means less its standard deviation is above 1), and Welch's t-test at 5 %. Each is a
line of FOLDER/candidates.jsonl once it is done, and the same command resumes. 200 take about an hour.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from statistics import fmean, stdev

from scipy import stats

from tests.benchmarks.stored_lines import add_line, read_lines

WORK = "import sys\ntotal = 0\nfor number in range(int(sys.argv[1])):\n    total += number * number % 7\n"
UNITS = 1_000_000  # of the base, a twelfth of a second
LARGE = 1.04  # true ratio of a large gain
SEED = 16
RULES = ("judge", "hyperfine", "t-test")


def candidates(count):
    """Throughput of each candidate over that of the base, without its start."""
    chance = random.Random(SEED)
    gains = [chance.uniform(0.02, 0.05) for _ in range(count // 4)]
    ratios = [1 + gain for gain in gains] + [1 / (1 + gain) for gain in gains]
    ratios += [1.0] * (count - len(ratios))
    chance.shuffle(ratios)
    return ratios


def hyperfine_keeps(old, new):
    """Whether the ratio of the means is above 1 by more than its standard deviation."""
    ratio = fmean(old) / fmean(new)
    return ratio - ratio * ((stdev(old) / fmean(old)) ** 2 + (stdev(new) / fmean(new)) ** 2) ** 0.5 > 1


def t_test_keeps(old, new):
    """Whether the new times are shorter by Welch's test, two-sided at 5 %."""
    return bool(fmean(new) < fmean(old) and stats.ttest_ind(old, new, equal_var=False).pvalue < 0.05)


def judge(folder, number, ratio, budget):
    """Judge a candidate; its line of the file."""
    script = f"{sys.executable} -S {folder / 'work.py'}"
    sides = ["--old", f"{script} {UNITS}", "--new", f"{script} {round(UNITS / ratio)} {number}"]
    environment = os.environ | {"PACELINE_HOME": str(folder / "home")}
    environment.pop("MLFLOW_TRACKING_URI", None)
    command = [sys.executable, "-m", "paceline.flows.cli", "judge", *sides, "--budget", str(budget), "--json"]
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    told = json.loads(done.stdout.splitlines()[-1])
    rounds = [each for each in told.get("rounds", ()) if not each["contaminated"]]
    times = {
        name: [
            run["seconds"]
            for each in rounds
            for side, run in zip(each["order"], each["runs"], strict=True)
            if side == name
        ]
        for name in ("old", "new")
    }
    is_compared = len(rounds) > 1
    keeps = {
        "judge": told.get("outcome") == "KEEP",
        "hyperfine": is_compared and hyperfine_keeps(**times),
        "t-test": is_compared and t_test_keeps(**times),
    }
    facts = {key: told.get(key) for key in ("outcome", "reason", "error", "ratio", "level", "num_rounds", "seconds")}
    return {"number": number, "true_ratio": ratio, **facts, "keeps": keeps, "times": times}


def summarise(lines):
    """By rule: how many are kept, the share of those that are not faster, and the shares kept of what is faster."""
    num_faster, num_large = (sum(line["true_ratio"] > least for line in lines) for least in (1, LARGE))
    table = {}
    for rule in RULES:
        kept = [line for line in lines if line["keeps"][rule]]
        num_false = sum(line["true_ratio"] <= 1 for line in kept)
        table[rule] = {
            "kept": len(kept),
            "false": num_false,
            "false_share": num_false / max(1, len(kept)),
            "power": (len(kept) - num_false) / max(1, num_faster),
            "power_large": sum(line["true_ratio"] > LARGE for line in kept) / max(1, num_large),
        }
    return table


def run(folder, count, budget):
    """Judge the candidates that the file does not have yet; all lines."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "work.py").write_text(WORK)
    file = folder / "candidates.jsonl"
    lines = read_lines(file)
    done = {line["number"] for line in lines}
    for number, ratio in enumerate(candidates(count)):
        if number not in done:
            lines.append(judge(folder, number, ratio, budget))
            add_line(file, lines[-1])
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--candidates", type=int, default=200)
    parser.add_argument("--budget", type=float, default=20.0)
    options = parser.parse_args()
    lines = run(options.folder.absolute(), options.candidates, options.budget)
    print(f"{'rule':<10}{'kept':>6}{'false':>7}{'of kept':>9}{'of the faster':>15}{'of 4 to 5 %':>13}")
    for rule, found in summarise(lines).items():
        shares = f"{found['false_share']:>9.1%}{found['power']:>15.1%}{found['power_large']:>13.1%}"
        print(f"{rule:<10}{found['kept']:>6}{found['false']:>7}{shares}")
    undecided = sum(line["outcome"] == "RETEST" for line in lines)
    print(f"{len(lines)} candidates, {undecided} undecided, {sum(line['error'] is not None for line in lines)} failed")


if __name__ == "__main__":
    main()
