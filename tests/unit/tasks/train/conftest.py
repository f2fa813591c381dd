"""A rank's training of own Lightning code in this process."""

import os
import threading

import pytest
import torch

from paceline.conf.lightning import EXECUTION, FIXED
from paceline.conf.load import validate
from paceline.tasks.fingerprint import code_fingerprint
from paceline.tasks.host import host_identity
from paceline.tasks.records.execution import Plan
from paceline.tasks.records.record import Choice
from paceline.tasks.train.lightning.code import identities
from paceline.tasks.train.rank_spec import RankSpec
from tests.support.own_lightning import PACKAGE


@pytest.fixture
def own_packages(monkeypatch):
    """The packages of own Lightning code, importable, in a process that gets its threads back."""
    for package in ("text", "shapes"):
        monkeypatch.syspath_prepend(str(PACKAGE.parent / package))
    number = torch.get_num_threads()
    yield
    torch.set_num_threads(number)
    assert not [thread for thread in threading.enumerate() if thread.name == "trainer-steps"]


@pytest.fixture
def settings(own_packages, tmp_path):
    """Settings of the example, small, with its data prepared."""
    from prose.corpus import Corpus

    data = {"directory": str(tmp_path / "data"), "num_bytes": 20_000}
    Corpus(**data).prepare_data()
    return {
        "seed_everything": 7,
        "model": {"class_path": "prose.gpt.GPT", "init_args": {"width": 16, "depth": 1}},
        "data": {"class_path": "prose.corpus.Corpus", "init_args": data},
        "trainer": {"max_epochs": 1, "gradient_clip_val": 1.0, "accelerator": "cpu", "devices": 1},
    }


@pytest.fixture
def make_spec(settings, tmp_path):
    """Specifies a rank."""

    def make(precision="32-true", attempt=0, settings=settings, ranks=(0, 1, 0), execution=None, **speedup):
        rank, world_size, port = ranks
        execution = EXECUTION | {"precision": precision, "accelerator": "cpu"} | (execution or {})
        rules = {"precision": precision, "compile": "off"}
        is_open = [name for name in rules if execution[name] == "auto"]
        execution["num_devices"] = world_size
        trainer = {key: value for key, value in settings["trainer"].items() if key not in ("accelerator", "devices")}
        short = {"num_blocks": 4, "max_seconds": 3, "steps_per_block": 2}
        own = settings | {"trainer": trainer | {"enable_model_summary": False}}
        tree = {
            "lightning": {"settings": own, "packages": identities(own, None)},
            "execution": execution,
            "speedup": FIXED["speedup"] | short | speedup,
        }
        plan = Plan(
            accelerator="cpu",
            device_name="this one",
            world_size=world_size,
            num_threads=1,
            precision=precision,
            compile=execution["compile"] if "compile" not in is_open else "off",
            memory_format="contiguous",
            loading="foreground",
            strategy="ddp" if world_size > 1 else "single",
            reasons={name: Choice(value=rules[name], reason="the rule") for name in is_open},
        )
        run = tmp_path / f"run-{attempt}"
        directory = run / "attempt-0" / f"rank-{rank}"
        directory.mkdir(parents=True)
        return RankSpec(
            config=validate(tree),
            plan=plan,
            may_search=True,
            run_id="0" * 32,
            home=str(tmp_path),
            directory=str(directory),
            checkpoint_directory=str(run / "checkpoints"),
            resume_from=None,
            rank=rank,
            local_rank=rank,
            node_rank=0,
            world_size=world_size,
            num_nodes=1,
            num_devices=world_size,
            master_address="127.0.0.1",
            master_port=port,
            interface=None,
            coordinator=(host_identity(), os.getpid()),
            code_fingerprint=code_fingerprint(),
            compile_cache=str(tmp_path),
        )

    return make
