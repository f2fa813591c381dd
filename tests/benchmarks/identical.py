"""A against A, again and again, in a rank's own environment: python -m tests.benchmarks.identical SPEC NUMBER."""

import json
import sys
from pathlib import Path

from paceline.tasks.measure.paired_ratio import speedup_ratio
from paceline.tasks.records.execution import Arm
from paceline.tasks.train.rank.benchmark import ArmBenchmark
from paceline.tasks.train.rank.context import RankContext
from paceline.tasks.train.rank_spec import RankSpec


def main(spec_path, number):
    spec = RankSpec.model_validate_json(Path(spec_path).read_text())
    tree = spec.config.model_dump(mode="json")
    tree["speedup"] |= {"max_seconds": 4.0, "num_blocks": 24, "target_half_width": 0.001}
    place = RankContext(spec.model_copy(update={"config": type(spec.config).model_validate(tree)}))
    place.build_network()
    plan = spec.plan
    arm = Arm(
        num_devices=1,
        precision=plan.precision,
        compile=plan.compile,
        memory_format=plan.memory_format,
        loading=plan.loading,
    )
    for _ in range(int(number)):
        found = speedup_ratio(ArmBenchmark(place).probe({"baseline": arm, "candidate": arm}, {}).rounds)
        print(json.dumps([found.value, found.low, found.high]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
