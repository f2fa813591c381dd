"""What the tests do with each command of the documents. One that is not here fails `tests/unit/test_docs.py`.

Every `paceline` command, whatever else is done with it, goes through the program's own parser and configuration there.
`tests/integration/run/test_docs.py` runs the stories: the commands of one run in a row in one shell, in a directory
that looks like a clone, with real images for DIR, a run of the program for RUN_ID, and so on.
"""

from dataclasses import dataclass
from typing import Literal

SMALL = "data.image_size=16 model.width=4 model.depth=1 recipe.num_epochs=1 recipe.warmup_epochs=0"
LEARNS = "model.width=8 recipe.num_epochs=4"
"""Behind SMALL: a network that has learned nothing may tell other classes in bf16, and is then not predicted with."""
NO_PROBE = "speedup.baseline=none"
SHORT_PROBE = "speedup.max_seconds=2"
ONE_HOST = "cluster.kind=local cluster.hosts=[] execution.num_nodes=1"

Story = Literal[
    "settings",
    "help",
    "trained",
    "predictions",
    "a set by hand",
    "a rank by hand",
    "a probe by hand",
    "doctor",
    "clone",
    "comparisons",
    "studies",
    "sweeps",
    "advice",
    "nights",
    "own scheduler",
]


@dataclass(frozen=True)
class Told:
    """Run in a story."""

    story: Story
    add: str = ""
    """Behind the command: what makes it small, or keeps it on this host and on free ports."""


@dataclass(frozen=True)
class Checked:
    """Only parsed, with its settings, as every command is."""

    why: str


AS_SERVICES = Checked(
    "tests/integration/services/test_services.py and test_services_nights.py run it, in a home of its own"
)
AS_LIFE = Checked("tests/integration/services/test_upgrade.py and test_uninstall.py run it, in a home of its own")
AS_UNITS = Checked("tests/integration/services/test_site_files.py writes these files, and starts each command in them")
AS_CLEAN = Checked("tests/integration/faults/test_clean.py runs it, in homes of its own")
AS_EVIDENCE = Checked("tests/unit/tasks/speedup/evidence and tests/unit/flows/commands: a disturbed machine gives none")
AS_FEATURES = Checked("tests/integration/predict/test_own_images.py runs it on two folders")
AS_POOL = Checked("tests/integration/services/test_work_pool.py runs it")
AS_OWN = Checked("tests/integration/run/test_own.py installs the package of guides/extend.md and runs it")
AS_OWN_MODULES = Checked("tests/unit/tasks/train/test_own_modules.py parses it and trains")
AS_LIGHTNING = Checked("tests/integration/run/test_lightning.py runs it on tests/packages/text")
AS_FORECAST = Checked("tests/integration/run/test_advise_lightning.py runs the like on tests/packages/text")
AS_STUDIED = Checked("tests/integration/study/test_study_lightning.py runs the like on tests/packages/text")
AS_SWEPT = Checked("tests/integration/sweep/test_sweep_lightning.py runs the like on tests/packages/text")
AS_SERVED = Checked("tests/integration/services/test_serve_lightning.py serves tests/packages/text")
AS_JUDGED = Checked("tests/integration/run/test_judge.py judges scripts with planted work, and two revisions")
AS_SETTINGS = Checked("tests/integration/run/test_judge.py judges digits and tests/packages/text")
AS_WATCHED = Checked("tests/integration/run/test_watch.py runs it on tests/packages/scripts")
ON_A_STORE = Checked("tests/integration/data/test_object_store.py runs it on a server of S3")
NO_HOSTS = Checked("node1 and node2 are not there; tests/integration/cluster/test_clusters.py has real hosts over SSH")

TREATMENTS: dict[str, Told | Checked] = {
    # README.md and infra/docs
    "paceline run digits": Checked("infra/run is this command, and runs in the story of the clone"),
    "paceline ui": Checked("tests/integration/faults/test_guard.py starts it and opens its pages"),
    "infra/bench 1 9": Checked("takes many minutes on a quiet machine; its goals are tests/benchmarks"),
    "paceline run cifar10 data.root=DIR --diagnose": Checked("a study is diagnosed in the stories"),
    "infra/run": Told("clone", f"{SMALL} {NO_PROBE}"),
    "infra/test": Told("clone", "--collect-only -q tests/unit/test_house.py"),
    "export PATH=$PWD/.venv/bin:$PATH": Told("settings"),
    "paceline run folder data.root=DIR data.image_size=64": Told(
        "trained", f"{SMALL} {LEARNS} {SHORT_PROBE} track.register=pictures"
    ),
    "paceline run config.yaml --code .": AS_LIGHTNING,
    "paceline run config.yaml track.register=prose": AS_LIGHTNING,
    'paceline serve config.yaml --code . --cron "0 2 * * *" --overlap skip': AS_SERVED,
    "paceline predict RUN_ID": AS_LIGHTNING,
    "paceline predict RUN_ID data.class_path=prose.corpus.Prompts": AS_LIGHTNING,
    "paceline predict RUN_ID trainer.limit_predict_batches=10 --out continuations": AS_LIGHTNING,
    "paceline predict RUN_ID ckpt_path=models/epoch=3-val_loss=0.842.ckpt": AS_LIGHTNING,
    "paceline predict models:/prose@champion": AS_LIGHTNING,
    "paceline watch train.py --epochs 3": AS_WATCHED,
    "paceline judge --old 'python train.py 32' --new 'python train.py 64' --metric 'loss=(.+)' "
    "--lower-is-better --budget 110": AS_JUDGED,
    "paceline judge --old 'python train.py' --new 'python train.py --fused' --mlflow-metric val_loss "
    "--lower-is-better": AS_JUDGED,
    "paceline judge digits --old execution.precision=32-true --new execution.precision=bf16-mixed": AS_SETTINGS,
    "paceline judge digits recipe.num_epochs=4 --old '' "
    '--new "execution.memory_format=channels_last execution.loading=resident"': AS_SETTINGS,
    "paceline judge config.yaml --code . --old model.init_args.width=256 --new model.init_args.width=192 "
    "--metric-key metrics.val_loss --lower-is-better": AS_SETTINGS,
    "paceline judge --old HEAD~1 --new HEAD -- python train.py 32": AS_JUDGED,
    "paceline judge --ledger": AS_JUDGED,
    "infra/judge-ci --state judgements --out judge.md --old main --new HEAD -- python train.py 32": Checked(
        "tests/integration/run/test_judge_ci.py runs it on a repository of its own"
    ),
    "paceline bisect --good fast.txt --bad slow.txt -- python train.py 32": Checked(
        "tests/integration/run/test_bisect.py searches wheels with planted work"
    ),
    "paceline bisect --good v1.0 --bad HEAD -- python train.py 32": Checked(
        "tests/integration/run/test_bisect.py searches a repository with planted work"
    ),
    "paceline run config.yaml --code . model.init_args.width=128 execution.num_devices=2": AS_LIGHTNING,
    "paceline run config.yaml --code . execution.precision=bf16-mixed --diagnose": AS_LIGHTNING,
    "paceline run config.yaml --code . execution.precision=auto execution.compile=auto": AS_LIGHTNING,
    "paceline run config.yaml --code . ckpt_path=lightning_logs/version_0/checkpoints/epoch=1-step=176.ckpt": (
        AS_LIGHTNING
    ),
    "paceline run config.yaml --code . cli=acme.cli.TextCLI": AS_OWN_MODULES,
    "paceline run config.yaml --code . model.class_path=prose.gpt.GPT data.class_path=prose.corpus.Corpus": (
        AS_OWN_MODULES
    ),
    "paceline run config.yaml --code . model.init_args.width=128 execution.num_devices=2 trainer.max_epochs=1 "
    "speedup.max_seconds=10 --diagnose": AS_LIGHTNING,
    "paceline run CONFIG.yaml --code DIR": AS_LIGHTNING,
    "cp -r tests/packages/text text": AS_LIGHTNING,
    "cd text": AS_LIGHTNING,
    "python main.py fit --config config.yaml": AS_LIGHTNING,
    "paceline run lightning --code . model.class_path=prose.gpt.GPT data.class_path=prose.corpus.Corpus "
    "data.init_args.directory=data": AS_LIGHTNING,
    "paceline advise config.yaml --code . --devices 2,4,8": AS_FORECAST,
    "paceline study config.yaml --code . --axis execution.precision=32-true,bf16-mixed --axis "
    "data.init_args.num_workers=0,2 --repeats 3": AS_STUDIED,
    "paceline study config.yaml --code . --axis model.init_args.depth=2,4 --axis execution.num_devices=1,2 "
    "--minimize val_loss": AS_STUDIED,
    "paceline study config.yaml --code . --axis data.init_args.directory=data,/dev/shm/data --same-work "
    "data.init_args.directory": AS_STUDIED,
    'paceline sweep config.yaml --code . --param "model.init_args.learning_rate=log(1e-4,1e-1)" --trials 10 '
    "--minimize val_loss": AS_SWEPT,
    "pip install ./acme": AS_OWN,
    "paceline run folder data.source=table data.root=DIR model.name=mixer": AS_OWN,
    "paceline run --help": Told("help"),
    "paceline run cifar10 data.root=DIR --show": Told("help"),
    "paceline predict RUN_ID DIR": Told("predictions"),
    "paceline predict models:/NAME@champion DIR --out predictions": Told("predictions"),
    "paceline predict RUN_ID digits": Told("comparisons"),
    "paceline predict RUN_ID DIR --own-size": Checked(
        "tests/integration/run/test_pixels.py predicts images of many sizes"
    ),
    "paceline run folder data.root=DIR model.pretrained=RUN_ID recipe.backbone_rate=0.1": Checked(
        "tests/integration/run/test_transfer.py runs the like on digits"
    ),
    "paceline run folder data.root=DIR model.name=resnet18 model.pretrained=resnet18.safetensors "
    "model.freeze=backbone": Checked(
        "the published weights are not there; tests/integration/run/test_transfer.py has own"
    ),
    "paceline features RUN_ID DIR/train --layer pool --out train-features": AS_FEATURES,
    "paceline features RUN_ID DIR/test --layer pool --out test-features": AS_FEATURES,
    "paceline classify train-features test-features": AS_FEATURES,
    "paceline no-gpu folder data.root=DIR --pretrained RUN_ID --fine-tune recipe.num_epochs=4": Checked(
        "tests/integration/study/test_no_gpu.py runs the like on digits"
    ),
    "paceline study --plan no-gpu data.root=DIR model.pretrained=RUN_ID": Checked(
        "tests/integration/study/test_no_gpu.py runs the like on digits"
    ),
    "paceline study digits --axis execution.precision=32-true,bf16-mixed --axis execution.loading=foreground,resident "
    "--repeats 6": Told("studies", f"--repeats 1 {SMALL}"),
    "paceline study digits --axis execution.num_devices=1,2 --axis execution.precision=32-true,bf16-mixed --ladder "
    "--diagnose": Told("studies", f"--repeats 1 {SMALL} {SHORT_PROBE}"),
    "paceline study --plan scaling data.root=DIR": Told("studies", f"--repeats 1 {SMALL} recipe.batch_size=16"),
    'paceline sweep digits --param "recipe.learning_rate=log(1e-3,1)" --trials 20': Told(
        "sweeps", f"--trials 2 {SMALL} {NO_PROBE}"
    ),
    'paceline sweep digits --param "recipe.learning_rate=log(1e-3,1)" --param "model.width=int(16,64,16)" '
    "--pruner asha": Told("sweeps", f"--trials 2 {SMALL} {NO_PROBE}"),
    'paceline sweep digits --param "recipe.optimizer=[sgd,adamw]" --param "recipe.batch_size=[64,128]" --sampler grid '
    "--at-once 2": Told("sweeps", f"{SMALL} {SHORT_PROBE}"),
    "paceline advise digits --devices 2,4,8 recipe.batch_scaling=strong --deadline 60": Told(
        "advice", f"{SMALL} {SHORT_PROBE}"
    ),
    "paceline compare RUN_ID RUN_ID": Told("comparisons"),
    "paceline compare --experiment paceline --last 5 --html compared.html": Told("comparisons"),
    "paceline hardware --price H200=4.5 --html hardware.html": Checked(
        "tests/integration/services/test_nights.py asks for the table of its nights"
    ),
    "paceline evidence RUN_ID -o run.tar": AS_EVIDENCE,
    "paceline evidence --check run.tar": AS_EVIDENCE,
    "tar -xf run.tar": AS_EVIDENCE,
    "python evidence/recompute.py": AS_EVIDENCE,
    "paceline doctor": Told("doctor"),
    "export PREFECT_SERVER_ANALYTICS_ENABLED=false": Told("settings"),
    "export DO_NOT_TRACK=true": Told("settings"),
    "PACELINE_ALARM_URL=https://chat.example/hook infra/alarm": Checked(
        "tests/integration/services/test_alarm.py runs it"
    ),
    "export PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE=prefect.server.concurrency.lease_storage.filesystem": Told(
        "settings"
    ),
    "prefect server start": Told("nights", "--host 127.0.0.1 --port PORT --no-ui"),
    "export PREFECT_API_URL=http://127.0.0.1:4200/api": Told("settings"),
    'paceline serve cifar10 data.root=DIR --cron "0 2 * * *" --timezone Europe/Zurich --overlap skip '
    "track.register=cifar10 track.min_accuracy=0.85": Told("nights", "recipe.batch_size=32"),
    "prefect deployment run paceline-run/cifar10": Told("nights", '--start-in "in 1 day"'),
    "prefect deployment schedule ls paceline-run/cifar10": Told("nights"),
    "prefect deployment schedule pause paceline-run/cifar10 ID": Told("nights"),
    "paceline serve ... --catch-up": Told("nights"),
    "infra/certificates": Told("own scheduler"),
    'paceline run digits cluster.kind=ssh "cluster.hosts=[node1,node2]" execution.num_nodes=2 '
    "execution.num_devices=4": NO_HOSTS,
    "paceline run digits cluster.kind=slurm cluster.cores_per_host=16 cluster.memory_per_host=64G "
    "execution.accelerator=gpu --show": Told("help"),
    "paceline run digits cluster.kind=address cluster.address=tls://host:8786": Told(
        "own scheduler", f"{SMALL} {NO_PROBE}"
    ),
    "export PACELINE_TLS=${PACELINE_TLS:-$PWD/.paceline/tls}": Told("own scheduler"),
    'TLS=(--tls-ca-file "$PACELINE_TLS/ca.pem" --tls-cert "$PACELINE_TLS/cert.pem" --tls-key "$PACELINE_TLS/key.pem")': Told(  # noqa: E501
        "own scheduler"
    ),
    "export DASK_CONFIG=$PWD/conf/dask/dask.yaml": Told("own scheduler"),
    'dask scheduler --host tls:// "${TLS[@]}"': Told(
        "own scheduler", "--host tls://127.0.0.1 --port PORT --no-dashboard"
    ),
    'dask worker tls://host:8786 --nworkers 4 --nthreads 1 --preload-nanny paceline.tasks.cluster.renewal "${TLS[@]}"': Told(  # noqa: E501
        "own scheduler", "--nworkers 1 --no-dashboard"
    ),
    'dask worker tls://host:8786 --nworkers 4 --nthreads 1 --preload-nanny paceline.tasks.cluster.gpu_workers "${TLS[@]}"': Checked(  # noqa: E501
        "the same with a preload, whose effect is on GPUs alone"
    ),
    "export AWS_PROFILE=NAME AWS_ENDPOINT_URL=https://store.example:9000": ON_A_STORE,
    "paceline run folder data.root=s3://BUCKET/PREFIX data.image_size=64": ON_A_STORE,
    "paceline predict RUN_ID s3://BUCKET/PREFIX": ON_A_STORE,
    "export DASK_CONFIG=$PWD/conf/dask": ON_A_STORE,
    "paceline run folder data.root=s3://BUCKET/PREFIX cluster.kind=address cluster.address=tls://host:8786": ON_A_STORE,
    "infra/install": Told("clone"),
    "export PACELINE_HOME=$PWD/.paceline": Told("settings"),
    'paceline doctor cluster.kind=ssh "cluster.hosts=[node1,node2]" execution.num_nodes=2': NO_HOSTS,
    'paceline run cifar10 data.root=DIR cluster.kind=ssh "cluster.hosts=[node1,node2]" execution.num_nodes=2 '
    "--show": Told("help", ONE_HOST),
    'paceline run cifar10 data.root=DIR cluster.kind=ssh "cluster.hosts=[node1,node2]" execution.num_nodes=2 '
    "recipe.num_epochs=1": NO_HOSTS,
    "infra/up": AS_SERVICES,
    ". .paceline/services/environment": AS_SERVICES,
    "paceline doctor cluster.kind=address cluster.address=$PACELINE_SCHEDULER": AS_SERVICES,
    'paceline serve digits cluster.kind=address cluster.address=$PACELINE_SCHEDULER --cron "0 2 * * *" --overlap '
    "skip": AS_SERVICES,
    "paceline clean --dry-run": AS_CLEAN,
    "paceline clean --keep 10 --older-than 30": AS_CLEAN,
    'paceline serve --clean "0 6 * * 0"': AS_CLEAN,
    "infra/backup nightly.tar": AS_SERVICES,
    "infra/down": AS_SERVICES,
    "infra/restore --overwrite nightly.tar": AS_SERVICES,
    "infra/certificates --renew": Checked("tests/integration/faults/test_renewal.py runs it, on a running cluster"),
    "infra/upgrade": AS_LIFE,
    "useradd --system --create-home --home-dir /var/lib/paceline paceline": AS_UNITS,
    "export PACELINE_HOME=/var/lib/paceline": AS_UNITS,
    "sudo -u paceline --preserve-env=PACELINE_HOME infra/up --host ADDRESS --units /var/lib/paceline/units": AS_UNITS,
    "cp --recursive /var/lib/paceline/units/. /etc/systemd/system": AS_UNITS,
    "systemctl daemon-reload": AS_UNITS,
    "systemctl enable --now paceline.target": AS_UNITS,
    "sudo -u paceline --preserve-env=PACELINE_HOME infra/up --compose /var/lib/paceline/compose.yaml": AS_UNITS,
    "docker compose -f /var/lib/paceline/compose.yaml up --build --detach": AS_UNITS,
    "infra/uninstall": AS_LIFE,
    "prefect work-pool create paceline --type process": AS_POOL,
    "prefect --no-prompt deploy --all --prefect-file infra/prefect.yaml": AS_POOL,
    "prefect worker start --pool paceline --type process": AS_POOL,
    # tasks/data/README.md
    'python -c "from paceline.conf.load import load; from paceline.tasks.data.key import describe; '
    "print(describe(load('folder', ['data.root=DIR']).data))\"": Told("a set by hand"),
    "python -m json.tool SET/manifest.json": Told("a set by hand"),
    'python -c "from pathlib import Path; from paceline.tasks.data.prepare.store import verify; '
    "print(verify(Path('SET')) or 'sound')\"": Told("a set by hand"),
    "python -c \"import numpy; print(numpy.load('SET/train/00000.images.npy', mmap_mode='r').shape)\"": Told(
        "a set by hand"
    ),
    "head -n 5 SET/rejected.jsonl": Told("a set by hand"),
    # tasks/speedup/README.md
    'python -c "from pathlib import Path; from paceline.tasks.records import ProbeResult; from paceline.tasks.speedup.verdict import '  # noqa: E501
    "speedup_result; print(speedup_result(ProbeResult.model_validate_json(Path("
    "'.paceline/runs/RUN_ID/attempt-0/rank-0/probe.json').read_text())).verdict)\"": Told("a probe by hand"),
    "paceline compare --experiment paceline --last 5": Told("comparisons"),
    # tasks/train/README.md
    "cat .paceline/runs/RUN_ID/attempt-0/rank-0/log.txt": Told("a rank by hand"),
    'sed \'s#"directory":"[^"]*"#"directory":"replay"#; '
    's#"checkpoint_directory":"[^"]*"#"checkpoint_directory":"replay"#\' '
    ".paceline/runs/RUN_ID/attempt-0/rank-0/spec.json > spec.json": Told("a rank by hand"),
    "python -m paceline.tasks.train.rank.main spec.json": Told("a rank by hand"),
    "python -c \"from paceline.conf.environment import Environment; print(*(path.read_text() for path in Environment().leases.glob('*.lease')), "  # noqa: E501
    "sep='\\n')\"": Told("a rank by hand"),
}


def of_story(story):
    """Its commands in their order, with what is added."""
    found = [(command, how) for command, how in TREATMENTS.items() if isinstance(how, Told) and how.story == story]
    return [f"{command} {how.add}".strip() for command, how in found]
