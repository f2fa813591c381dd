"""Planted causes in own Lightning code: python -m tests.benchmarks.planted_own RESULTS [REPEATS] [NAME ...].

Plants each cause in a copy of `tests/packages/text`, runs it in fresh processes, and counts how often Paceline names
it. RESULTS is a folder: every run is a line of `results.jsonl` in it, so that an interrupted benchmark resumes, and the
table is printed at the end. It needs a quiet machine of two cores; 40 runs take about half an hour.
"""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.planted_repeats import count_named, use_folder
from tests.support.own_lightning import PACKAGE

REPEATS = 10
SETTINGS = ("trainer.max_epochs=1", "trainer.limit_val_batches=0", "speedup.max_seconds=16", "--diagnose")
# Its exchange must take most of a step on any machine: of 8 million, it took 0.39 to 0.43 on two quick cores.
BALLAST = """        self.ballast = torch.nn.Parameter(torch.zeros(24_000_000))
        self.save_hyperparameters()"""


@dataclass(frozen=True)
class Cause:
    """A planted cause."""

    named: tuple[str, ...]
    """Values of `cause` that name it."""
    changes: tuple[tuple[str, str, str], ...] = ()
    """File of the package, what is replaced, and by what."""
    overrides: tuple[str, ...] = ()


CAUSES = {
    "equal arms": Cause(("identical arms", "no measurable difference")),
    "slow __getitem__": Cause(
        ("data-bound",),
        (("corpus.py", "        start = index", "        import time; time.sleep(0.01)\n        start = index"),),
        ("data.init_args.num_workers=1",),
    ),
    "a step that waits": Cause(
        ("launch-bound",),
        (
            (
                "gpt.py",
                "        loss = self._loss(batch)\n",
                "        import time; time.sleep(0.2)\n        loss = self._loss(batch)\n",
            ),
        ),
        ("data.init_args.num_workers=1",),  # not bf16, whose arithmetic is a cause of its own on many processors
    ),
    "big all-reduce": Cause(
        ("communication-bound",),
        (
            ("gpt.py", "        self.save_hyperparameters()", BALLAST),
            ("gpt.py", 'batch["next"].flatten())', 'batch["next"].flatten()) + 0 * self.ballast.sum()'),
            (
                "gpt.py",
                "torch.optim.AdamW(self.parameters()",
                "torch.optim.AdamW([each for name, each in self.named_parameters() if name != 'ballast']",
            ),
        ),
        ("execution.num_devices=2",),
    ),
}


def run(name, folder):
    """The JSON of a run's speedup."""
    cause, code = CAUSES[name], folder / name.replace(" ", "-")
    if not code.exists():
        shutil.copytree(PACKAGE, code)
        for file, before, after in cause.changes:
            path = code / "prose" / file
            text = path.read_text()
            assert before in text, before
            path.write_text(text.replace(before, after))
    data = f"data.init_args.directory={folder / 'data'}"
    command = [str(Path(sys.executable).with_name("paceline")), "run", str(code / "config.yaml"), "--code", str(code)]
    done = subprocess.run(
        [*command, "--json", data, *SETTINGS, *cause.overrides],
        stdout=subprocess.PIPE, text=True, check=True, timeout=600,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])["speedup"]


def main(folder, repeats=REPEATS, names=()):
    use_folder(folder)

    def is_named(name, result):
        return result["cause"] in CAUSES[name].named

    count_named(folder, repeats, names or CAUSES, lambda name: run(name, folder), is_named, "cause")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), int(sys.argv[2]) if len(sys.argv) > 2 else REPEATS, sys.argv[3:])
