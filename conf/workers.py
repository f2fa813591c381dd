"""The settings of where the Dask workers come from."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from conf.credentials import Text
from conf.section import Section


class Cluster(Section):
    """Where the Dask workers come from."""

    kind: Literal["local", "local_cuda", "ssh", "slurm", "address"] = "local"
    """`local`: workers on this machine for this run; `local_cuda`: one worker of dask-cuda for each GPU to be used;
    `ssh`: workers on `hosts`; `slurm`: one job per host; `address`: join a running scheduler."""
    num_workers: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """`local`: worker processes; `auto`: one per core, and at least one per rank. The other kinds start one worker for
    each device that is trained on."""
    address: Text | None = None
    """`address`: the scheduler's address, such as tcp://host:8786, or tls:// where it wants certificates."""
    hosts: tuple[Text, ...] = ()
    """`ssh`: hosts by the names under which `ssh` knows them; the scheduler runs on the first one too."""
    interface: Text | None = None
    """`ssh`, `slurm`: network interface that Dask listens on, such as eth0; None for the one that leads outwards."""
    partition: Text | None = None
    """`slurm`: partition of the jobs; None for Slurm's default."""
    account: Text | None = None
    """`slurm`: account that the jobs are charged to."""
    time_limit: Annotated[str, Field(pattern=r"^(\d+-)?\d+(:\d+){0,2}$")] | None = None
    """`slurm`: time limit of the jobs, such as 2:00:00 or 1-12 (a day and a half)."""
    cores_per_host: Annotated[int, Field(ge=1)] | None = None
    """`slurm`: CPU cores that a job asks for; needed there."""
    memory_per_host: Annotated[str, Field(pattern=r"^[1-9]\d*[MGT]$")] | None = None
    """`slurm`: memory that a job asks for, such as 64G; needed there."""
    sbatch: tuple[Text, ...] = ()
    """`slurm`: further options of sbatch, such as --constraint=a100."""
    tls: Literal["auto", "on", "off"] = "auto"
    """Whether the Dask parts talk TLS, with the certificates in PACELINE_TLS, and refuse everybody else; `auto`: beyond
    this host's loopback, and there with a certificate that is made for the run."""
    wait_seconds: Annotated[float, Field(gt=0)] = 300.0
    """`ssh`, `slurm`: how long to wait for the workers, seconds; the time in Slurm's queue counts."""
    min_workers: Annotated[int, Field(ge=1)] | None = None
    """Fewest workers with which a training goes on when it has lost others, until they are back; None for all.
    Batch and learning rate follow `recipe.batch_scaling`: weak, and each device's batch stays, the learning rate falls
    with the number of devices; strong, and the workers that are left take larger shares of the same batches."""

    @model_validator(mode="after")
    def _address_where_needed(self) -> Self:
        if (self.kind == "address") != (self.address is not None):
            raise ValueError(
                f"cluster.address={self.address} does not fit cluster.kind={self.kind}; "
                "give an address exactly with kind=address"
            )
        if self.address is not None and self.tls != "auto" and (self.tls == "on") != self.address.startswith("tls://"):
            raise ValueError(
                f"cluster.tls={self.tls} does not fit cluster.address={self.address}; "
                "an address begins with tls:// where the scheduler wants certificates, with tcp:// where not"
            )
        return self

    @model_validator(mode="after")
    def _settings_fit_the_kind(self) -> Self:
        for name, kinds in _KINDS_OF_SETTING.items():
            if self.kind not in kinds and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"cluster.{name}={getattr(self, name)} has no use with cluster.kind={self.kind}; "
                    f"drop it or choose kind={' or '.join(kinds)}"
                )
        if self.kind == "ssh" and not self.hosts:
            raise ValueError("cluster.kind=ssh needs the hosts; name them, as in cluster.hosts=[node1,node2]")
        if self.kind == "slurm" and (self.cores_per_host is None or self.memory_per_host is None):
            raise ValueError(
                "cluster.kind=slurm needs what each job asks for; "
                "for example cluster.cores_per_host=16 cluster.memory_per_host=64G"
            )
        return self


_KINDS_OF_SETTING = {
    "num_workers": ("local",),
    "hosts": ("ssh",),
    "interface": ("ssh", "slurm"),
    "partition": ("slurm",),
    "account": ("slurm",),
    "time_limit": ("slurm",),
    "cores_per_host": ("slurm",),
    "memory_per_host": ("slurm",),
    "sbatch": ("slurm",),
}
