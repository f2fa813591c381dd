"""The user's script, as Python would run it, with an account of its training.

    python -P -m paceline.tasks.watch.program REPLAY SCRIPT [ARGUMENT...]

REPLAY is `replay` or `no-replay`. With `-json` behind it, stdout ends with the accounts as one line of JSON.
"""

import json
import os
import sys
from contextlib import nullcontext
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.tasks.names import Status
from paceline.tasks.redact import redact_tree
from paceline.tasks.watch import card
from paceline.tasks.watch.account import Account
from paceline.tasks.watch.hooks import follow
from paceline.tasks.watch.ranks import SEVERAL_RANKS, has_several_ranks, is_first_rank, num_ranks

TRAINERS = ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")
NO_LOOP = (
    "Paceline: {script} ran no training loop that Paceline can see",
    "hint: a loop has a DataLoader of torch, backward() and optimizer.step(), in the process and thread of the script",
)
NO_LOADER = (
    "Paceline: {script} ran {number:,} backward pass(es) and read no DataLoader of torch, so that it has no steps",
    "hint: read the batches from torch.utils.data.DataLoader",
)


class TrainerFinder(MetaPathFinder):
    """Adds the callback to each Trainer of Lightning when its module is imported."""

    def __init__(self, *, replay: bool) -> None:
        self._replay = replay

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """The module's own place, with a loader that watches its Trainer."""
        spec = PathFinder.find_spec(fullname, path, target) if fullname in TRAINERS else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_watch(module: ModuleType) -> None:
            execute(module)
            fit = module.Trainer.fit

            @wraps(fit)
            def watched(trainer: Any, *args: Any, **kwargs: Any) -> Any:
                from paceline.tasks.watch.callback import SpeedAccount

                if not any(isinstance(callback, SpeedAccount) for callback in trainer.callbacks):
                    trainer.callbacks.append(SpeedAccount(replay=self._replay))
                return fit(trainer, *args, **kwargs)

            module.Trainer.fit = watched

        spec.loader.exec_module = execute_and_watch  # type: ignore[method-assign]
        return spec


def main(replay: str, script: str, *arguments: str) -> int:
    """Run the script, print the card, and return the exit status; raises what ends a script otherwise."""
    module, path = ModuleType("__main__"), Path(script)
    module.__file__ = place = os.path.join(Path.cwd(), script)  # noqa: PTH118  as Python does, which keeps `./`
    sys.modules["__main__"], sys.argv = module, [script, *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    is_replayed = not replay.startswith("no-")
    sys.meta_path.insert(0, TrainerFinder(replay=is_replayed))
    is_first = is_first_rank()
    why = "" if is_replayed else "of --no-replay"
    account = Account(why_not_measured=SEVERAL_RANKS if has_several_ranks() else why, num_ranks=num_ranks())
    ended: BaseException | None = None
    try:
        with follow(account) if is_first else nullcontext():
            exec(compile(path.read_bytes(), place, "exec"), module.__dict__)
    except BaseException as error:  # noqa: BLE001  whatever ends a script
        ended = error
    if isinstance(ended, Exception):  # as Python would print it
        ended = ended.with_traceback(ended.__traceback__ and ended.__traceback__.tb_next)
        sys.excepthook(type(ended), ended, ended.__traceback__)
    is_done = isinstance(ended, SystemExit) and ended.code in (None, 0)
    status: Status = "FINISHED" if ended is None or is_done else card.status_of(ended)
    if is_first:
        _report(account, path.name, status, as_json=replay.endswith("-json"))
    if ended is not None and not isinstance(ended, Exception):
        raise ended
    return int(ended is not None)


def _report(account: Account, name: str, status: Status, *, as_json: bool) -> None:
    """Print the card, and record the run."""
    if card.finish(account, name, status) is None and not card.finished:
        lines = NO_LOADER if account.num_backward else NO_LOOP
        card.say(*(line.format(script=name, number=account.num_backward) for line in lines))
    if as_json:
        accounts = [result.model_dump(mode="json") for result in card.finished]
        print(json.dumps(redact_tree({"accounts": accounts})), flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
