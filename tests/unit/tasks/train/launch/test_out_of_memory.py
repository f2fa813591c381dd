import pytest

from paceline.conf.load import load
from paceline.tasks.errors import RankError
from paceline.tasks.records.hardware import Hardware
from paceline.tasks.train.launch.out_of_memory import restore_micro_batch, save_micro_batch, with_smaller_micro_batch
from paceline.tasks.train.plan import resolve

HOST = Hardware(host="here", cpu_name="a device", num_cores=2, memory_bytes=2**33, cpu_bf16=False)


def planned(*overrides):
    config = load("digits", list(overrides))
    return resolve(config, HOST, 1000), config


def failed(num_samples):
    return RankError("rank 0 failed: no room", 0, too_many=num_samples)


def test_a_pass_that_did_not_fit_is_halved_and_the_reason_kept_with_the_run(tmp_path):
    plan, config = planned()
    assert plan.micro_batch is None
    found = with_smaller_micro_batch(plan, config, failed(25))
    assert found.micro_batch == 13
    assert found.reasons["micro_batch"].reason == "25 samples at once did not fit into the memory of a device"
    save_micro_batch(tmp_path, found)
    assert restore_micro_batch(tmp_path, plan, config) == found
    asked, config = planned("execution.micro_batch=20")
    assert restore_micro_batch(tmp_path, asked, config) == asked, "what is asked for is done"


def test_other_failures_leave_the_plan():
    assert with_smaller_micro_batch(*planned(), failed(None)) is None


@pytest.mark.parametrize(
    ("overrides", "num_samples", "remedy"),
    [
        ([], 1, "one sample alone does not fit; use a smaller data.image_size"),
        (["execution.micro_batch=8"], 8, "use execution.micro_batch=auto, or 4"),
        (["execution.micro_batch=off"], 64, "use execution.micro_batch=auto, or 32"),
        (["execution.strategy=fsdp", "execution.num_devices=2"], 64, "use a smaller recipe.batch_size or more devices"),
    ],
)
def test_where_nothing_can_be_done_the_error_says_what_the_user_can(overrides, num_samples, remedy):
    with pytest.raises(RankError, match="rank 0 failed: no room; ") as found:
        with_smaller_micro_batch(*planned(*overrides), failed(num_samples))
    assert remedy in str(found.value)
    assert found.value.final
