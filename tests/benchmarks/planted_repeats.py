"""The loop of the benchmarks that plant a cause and count how often Paceline names it."""

import os
from collections import defaultdict

from tests.benchmarks.stored_lines import add_line, read_lines

KEYS = ("bottleneck", "cause", "contaminated", "verdict", "diagnosis", "shares")


def use_folder(folder):
    """Make the folder, and keep what Paceline stores in it, if no other home is given; before anything is started."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("PACELINE_HOME", str(folder / "home"))


def count_named(folder, repeats, names, measure, is_named, shown):
    """Measure each name in each repeat, and print the table.

    `measure(name)` gives the JSON of a speedup, and `is_named(name, result)` says whether it names what was planted.
    `shown` is the key that is shown of one that does not. Each measurement is a line of `results.jsonl` in the folder,
    so that an interrupted benchmark resumes.
    """
    results = folder / "results.jsonl"
    lines = read_lines(results)
    for repeat in range(repeats):
        for name in names:
            if any((line["planted"], line["repeat"]) == (name, repeat) for line in lines):
                continue
            result = measure(name)
            line = {"planted": name, "repeat": repeat, "is_named": is_named(name, result)}
            line |= {key: result[key] for key in KEYS}
            lines.append(line)
            add_line(results, line)
            print(f"{name} {repeat}: {'named' if line['is_named'] else line[shown]}", flush=True)
    print_table(lines, shown)


def print_table(lines, shown):
    print(f"{'planted':<18} {'named':>6} {'of':>3}  {'contaminated':>12}  named instead")
    by_name = defaultdict(list)
    for line in lines:
        by_name[line["planted"]].append(line)
    for name, ones in by_name.items():
        named = sum(one["is_named"] for one in ones)
        contaminated = sum(bool(one["contaminated"]) for one in ones)
        others = sorted({str(one[shown]) for one in ones if not one["is_named"]})
        print(f"{name:<18} {named:>6} {len(ones):>3}  {contaminated:>12}  {', '.join(others)}")
