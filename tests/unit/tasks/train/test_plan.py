import pytest

from paceline.conf.load import load
from paceline.tasks.records.hardware import Gpu, Hardware
from paceline.tasks.train.plan import can_capture, resolve
from tests.support.refusals import refused

GIB = 2**30


def host(bf16=True, gpus=0, capability=(9, 0), cores=2, board=None, physical=None):
    gpu = [
        Gpu(uuid=f"GPU-{i}", name="X", memory_bytes=GIB, compute_capability=capability, board=board)
        for i in range(gpus)
    ]
    return Hardware(
        host="here",
        cpu_name="cpu",
        num_cores=cores,
        num_physical_cores=physical,
        memory_bytes=8 * GIB,
        cpu_bf16=bf16,
        gpus=tuple(gpu),
    )


@pytest.mark.parametrize(
    ("hardware", "precision", "memory_format"),
    [
        (host(bf16=True), "bf16-mixed", "channels_last"),
        (host(bf16=False), "32-true", "channels_last"),
        (host(gpus=1), "bf16-mixed", "channels_last"),
        (host(gpus=1, capability=(7, 0)), "16-mixed", "channels_last"),
    ],
)
def test_auto_follows_the_hardware_and_gives_its_reason(hardware, precision, memory_format):
    plan = resolve(load("digits"), hardware, 1000)
    assert (plan.precision, plan.memory_format) == (precision, memory_format)
    assert set(plan.reasons) == {
        "accelerator",
        "precision",
        "memory_format",
        "compile",
        "loading",
        "micro_batch",
        "num_threads",
        "checkpoint_steps",
    }
    assert all(choice.reason for choice in plan.reasons.values())


@pytest.mark.parametrize(
    ("hardware", "ranks", "num_threads", "reason"),
    [
        (host(cores=8, physical=4), 1, 4, "4 physical cores over 1 ranks of a host"),
        (host(cores=8, physical=4), 8, 1, "4 physical cores over 8 ranks of a host"),
        (host(cores=8, physical=8), 2, 4, "8 cores over 2 ranks of a host"),
        (host(cores=8), 2, 4, "8 cores over 2 ranks of a host"),  # unknown
        (host(cores=8, physical=4, gpus=2), 2, 4, "8 cores over 2 ranks of a host"),  # they read and decode
    ],
)
def test_ranks_share_physical_cores_on_a_cpu(hardware, ranks, num_threads, reason):
    plan = resolve(load("digits", [f"execution.num_devices={ranks}"]), hardware, 1000)
    assert plan.num_threads == num_threads
    assert plan.reasons["num_threads"].reason == reason


def test_what_is_asked_for_is_done_and_needs_no_reason():
    plan = resolve(load("digits", ["execution.precision=32-true"]), host(), 1000)
    assert plan.precision == "32-true"
    assert "precision" not in plan.reasons


def test_a_set_too_large_for_memory_is_streamed():
    assert resolve(load("digits"), host(), 1000).loading == "resident"
    assert resolve(load("digits"), host(), 10_000_000).loading == "streaming"


@pytest.mark.parametrize(
    ("free", "loading"),
    [
        ([None, None], "resident"),  # unknown: the memory that there is
        ([GIB, GIB // 8], "streaming"),
        ([GIB // 8, GIB, GIB], "resident"),  # ranks take free GPUs first
    ],
)
def test_a_set_must_fit_into_free_memory(free, loading):
    here = host(gpus=len(free))
    gpus = [gpu.model_copy(update={"free_bytes": number}) for gpu, number in zip(here.gpus, free, strict=True)]
    config = load("digits", ["execution.num_devices=2", "data.image_size=32"])
    plan = resolve(config, here.model_copy(update={"gpus": tuple(gpus)}), 70_000)
    assert plan.loading == loading
    assert "free device memory" in plan.reasons["loading"].reason


def test_ranks_of_a_host_share_its_cores():
    plan = resolve(load("digits", ["execution.num_devices=4"]), host(cores=8), 1000)
    assert (plan.num_threads, plan.strategy, plan.world_size) == (2, "ddp", 4)


@pytest.mark.parametrize(("num_devices", "strategy"), [(1, "single"), (2, "fsdp")])
def test_sharding_is_asked_for_and_needs_several_ranks(num_devices, strategy):
    overrides = ["execution.strategy=fsdp", f"execution.num_devices={num_devices}"]
    assert resolve(load("digits", overrides), host(), 1000).strategy == strategy


@pytest.mark.parametrize(
    ("overrides", "capability", "compile"),
    [
        ([], (9, 0), "graph"),
        ([], (7, 0), "off"),
        (["execution.num_devices=2"], (9, 0), "off"),
        (["execution.activation_checkpointing=on"], (9, 0), "off"),
        (["execution.accelerator=cpu"], (9, 0), "off"),
    ],
)
def test_one_gpu_takes_its_step_as_a_graph_where_it_can_be_recorded(overrides, capability, compile):
    plan = resolve(load("digits", overrides), host(gpus=2, capability=capability), 1000)
    assert plan.compile == compile == plan.reasons["compile"].value


def test_the_step_of_a_user_s_own_network_is_not_recorded_unasked(monkeypatch):
    """It may draw numbers on the host, which a graph would repeat."""
    config = load("digits")
    assert resolve(config, host(gpus=1), 1000).compile == "graph"
    monkeypatch.setattr(type(config.model), "plugin", property(lambda model: object()))
    plan = resolve(config, host(gpus=1), 1000)
    assert plan.compile == "off"
    assert not can_capture(plan), "a search does not try it either"
    old = resolve(config, host(gpus=1, capability=(7, 0)), 1000)
    assert not can_capture(old.model_copy(update={"precision": "32-true"}))
    asked = load("digits", ["execution.compile=graph"])
    assert resolve(asked, host(gpus=1), 1000).compile == "graph"


@pytest.mark.parametrize("value", ["graph", "step_graph"])
@pytest.mark.parametrize("num_devices", [1, 2])
def test_graphs_are_for_gpus_one_or_several(value, num_devices):
    overrides = [f"execution.compile={value}", f"execution.num_devices={num_devices}"]
    assert resolve(load("digits", overrides), host(gpus=2), 1000).compile == value


@pytest.mark.parametrize(
    ("overrides", "hardware", "wrong"),
    [
        (["execution.num_devices=3"], host(), ["execution.num_devices", 3, 2, "CPU"]),
        (
            ["execution.num_devices=2", "execution.accelerator=gpu"],
            host(gpus=1),
            ["execution.num_devices", 2, 1, "GPUs"],
        ),
        (["execution.accelerator=gpu"], host(), ["execution.accelerator", "here"]),
        (["execution.precision=16-mixed"], host(), ["execution.precision", "execution.precision=16-mixed", "CPU"]),
        (["execution.precision=tf32"], host(), ["execution.precision", "execution.precision=tf32", "bf16-mixed"]),
        (
            ["execution.precision=tf32"],
            host(gpus=1, capability=(7, 5)),
            ["execution.precision", "execution.precision=tf32", "32-true"],
        ),
        (
            ["execution.num_devices=2", "execution.strategy=fsdp"],
            host(gpus=2, capability=(7, 0)),
            ["execution.strategy", "execution.precision=auto", "16-mixed", "execution.precision=32-true"],
        ),
        (
            ["execution.precision=bf16-mixed"],
            host(gpus=1, capability=(7, 5)),
            ["execution.precision", "execution.precision=bf16-mixed", "16-mixed"],
        ),
        (["execution.num_devices=2"], host(gpus=2, board="GPU-0"), ["execution.num_devices", 2, "MIG"]),
        (["execution.compile=graph"], host(), ["execution.compile", "CPU", 1]),
        (["execution.compile=graph", "execution.num_devices=2"], host(), ["execution.compile", 2, "gloo"]),
        (["execution.compile=step_graph"], host(), ["execution.compile", "execution.compile=step_graph"]),
        (
            ["execution.compile=graph", "execution.num_devices=2", "execution.gradient_compression=bf16"],
            host(gpus=2),
            ["execution.compile", 2, "gradient_compression=bf16"],
        ),
        (["execution.compile=graph"], host(gpus=1, capability=(7, 0)), ["execution.compile", "16-mixed"]),
    ],
)
def test_what_the_hardware_cannot_do_is_refused(overrides, hardware, wrong):
    with refused(*wrong):
        resolve(load("digits", overrides), hardware, 1000)
