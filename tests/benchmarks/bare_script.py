"""The work of `paceline run` in one process, without Prefect, Dask and MLflow: what goal 10 compares with.

python bare_script.py HOME PRESET [key=value...], in the environment of a rank. The same listing, shards, training,
predictions and evaluation, by the same functions; a JSON file is all that it logs.
"""

import json
import os
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

from paceline.conf.load import load
from paceline.tasks.cluster import hardware
from paceline.tasks.data.key import preparation_key
from paceline.tasks.data.prepare import manifest, store
from paceline.tasks.data.prepare.chunks import ChunkPlanner
from paceline.tasks.data.prepare.shard import write_shards
from paceline.tasks.data.sources import registry as source
from paceline.tasks.evaluate.metrics import evaluate_predictions, read_test_split
from paceline.tasks.fingerprint import code_fingerprint
from paceline.tasks.host import host_identity
from paceline.tasks.records.training import TrainResult
from paceline.tasks.train.launch.heartbeat import Heartbeat
from paceline.tasks.train.plan import resolve
from paceline.tasks.train.rank import main as rank
from paceline.tasks.train.rank.time_budget import Stopwatch
from paceline.tasks.train.rank_spec import RankSpec


def prepare(data, home):
    listing = source.list_samples(data)
    key = preparation_key(listing, data)
    if (found := store.find(home, key)) is not None:
        return found
    with store.temporary(home, key) as directory:
        records = write_shards(list(ChunkPlanner(listing, data, directory).chunks()))
        facts = manifest.build(listing, data, key, records, num_rejected=0)
        path = store.publish(home, directory, facts, [])
    return facts.to_prepared_set(path, reused=False, seconds=0.0)


def train(config, prepared, home):
    directory = Path(tempfile.mkdtemp(dir=home))
    spec = RankSpec(
        config=config,
        plan=resolve(config, hardware.describe(), prepared.num_train),
        prepared=prepared,
        run_id="bare",
        directory=str(directory),
        checkpoint_directory=str(directory / "checkpoints"),
        resume_from=None,
        rank=0,
        local_rank=0,
        node_rank=0,
        world_size=1,
        num_nodes=1,
        num_devices=1,
        master_address="127.0.0.1",
        master_port=0,
        interface=None,
        coordinator=(host_identity(), os.getpid()),
        code_fingerprint=code_fingerprint(),
        home=str(home),
        compile_cache=str(home / "compiled"),
    )
    rank.open_metrics = lambda context: nullcontext()  # it logs nothing
    rank.run_rank(spec, Stopwatch("startup", time.monotonic()), Heartbeat())
    return TrainResult.model_validate_json((directory / "result.json").read_text())


def main(home, preset, *overrides):
    config = load(preset, list(overrides))
    prepared = prepare(config.data, home)
    trained = train(config, prepared, home)
    truth = read_test_split(Path(prepared.path), prepared.class_names)
    evaluated = evaluate_predictions(trained.predictions, truth, trained.prediction_samples_per_second)
    facts = {"train": trained.model_dump(mode="json"), "evaluate": evaluated.model_dump(mode="json")}
    (home / "bare.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), *sys.argv[2:])
