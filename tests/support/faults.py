"""Faults that a cluster suffers, by name and from a seed, on a site of two hosts and the services of infra/up."""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil

from paceline.conf.environment import Environment
from paceline.tasks.train.launch.rank_process import RANK_MODULE, log_of
from tests.support.patience import until
from tests.support.small_disk import fill

JOIN_SECONDS = 15
SHORT, LONG = 3.0, 14.0
"""Seconds: a fault that connections survive, and one that they do not."""


CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static long shift(void) {
    long seconds = 0;
    FILE *file = fopen(getenv("SHIFT_FILE"), "re");
    if (file) {
        if (fscanf(file, "%ld", &seconds) != 1) seconds = 0;
        fclose(file);
    }
    return seconds;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(clock, now);
    if (clock == CLOCK_REALTIME && !status) now->tv_sec += shift();
    return status;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    int status = clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return status;
}

time_t time(time_t *place) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (place) *place = exact.tv_sec;
    return exact.tv_sec;
}
"""


def clock_settings(file):
    """Variables of processes whose clock is shifted by the seconds in a file, now and later.

    Their monotonic clock is not shifted, as when an administrator or NTP sets the clock of a host. (libfaketime lets
    absolute sleeps on the monotonic clock fail while the shift changes.)
    """
    file.write_text("0")
    library = file.with_suffix(".so")
    command = ["gcc", "-x", "c", "-shared", "-fPIC", "-O2", "-o", library, "-", "-ldl"]
    subprocess.run(command, input=CLOCK, text=True, check=True)
    return {"LD_PRELOAD": str(library), "SHIFT_FILE": str(file)}


class Faults:
    """Every public method is a fault; it returns when what an operator or a supervisor would repair is repaired.

    Args:
        hosts: `TwoHosts`, on which the ranks train.
        services: `Services`, of which the flow uses PostgreSQL, Prefect and MLflow.
        filler: File on the disk of the runs.
        clock: File with the shift of the clocks.
    """

    def __init__(self, hosts, services, filler, clock):
        self._hosts, self._services, self._filler, self._clock = hosts, services, filler, clock

    @classmethod
    def names(cls):
        """All faults."""
        return sorted(name for name in vars(cls) if not name.startswith("_") and name not in ("names", "draw"))

    @classmethod
    def draw(cls, seed, number):
        """The fault of a number in the list of a seed, and its own random numbers."""
        chance = random.Random(f"{seed}/{number}")
        names = cls.names()  # each occurs once before one repeats
        order = random.Random(f"{seed}/{number // len(names)}").sample(names, len(names))
        return order[number % len(names)], chance

    def kill_a_rank(self, flow, chance):
        self._signal(self._ranks(), signal.SIGKILL, chance)

    def stop_a_rank(self, flow, chance):
        self._signal(self._ranks(), signal.SIGSTOP, chance)

    def truncate_the_newest_checkpoint_and_kill_a_rank(self, flow, chance):
        found = Environment().root.glob("runs/*/checkpoints/step-*.ckpt")
        if newest := max(found, key=lambda path: path.stat().st_mtime, default=None):
            newest.write_bytes(newest.read_bytes()[:-50])
        self._signal(self._ranks(), signal.SIGKILL, chance)

    def kill_a_worker(self, flow, chance):
        self._signal(self._workers(), signal.SIGKILL, chance)

    def stop_a_worker_for_a_while(self, flow, chance):
        self._pause([chance.choice(self._workers())], LONG)

    def kill_a_nanny(self, flow, chance):
        self._signal(self._named("distributed.cli.dask_worker"), signal.SIGKILL, chance)
        self._repair_workers()

    def kill_the_scheduler(self, flow, chance):
        self._hosts.scheduler.kill()
        time.sleep(SHORT)
        self._hosts.restart()

    def stop_the_scheduler_for_a_while(self, flow, chance):
        self._pause([self._hosts.scheduler], chance.choice([SHORT, LONG]))
        self._repair_workers()

    def cut_a_link_for_a_while(self, flow, chance):
        end = chance.choice(["b", "here"])  # host b, or the flow, from host a and its scheduler
        self._hosts.cut(end)
        time.sleep(chance.choice([SHORT, LONG]))
        self._hosts.restore(end)
        self._repair_workers()

    def kill_the_flow(self, flow, chance):
        flow.kill()

    def end_the_flow(self, flow, chance):
        flow.terminate()

    def stop_the_flow_for_a_while(self, flow, chance):
        self._pause([psutil.Process(flow.pid)], chance.choice([SHORT, LONG]))

    def kill_prefect(self, flow, chance):
        self._kill_service("prefect")

    def stop_prefect_for_a_while(self, flow, chance):
        self._pause(self._services.daemon("prefect").family(), LONG)

    def kill_mlflow(self, flow, chance):
        self._kill_service("mlflow")

    def stop_mlflow_for_a_while(self, flow, chance):
        self._pause(self._services.daemon("mlflow").family(), LONG)

    def kill_postgresql(self, flow, chance):
        self._kill_service("postgres")

    def stop_postgresql_for_a_while(self, flow, chance):
        self._pause(self._services.daemon("postgres").family(), LONG)

    def fill_the_disk_for_a_while(self, flow, chance):
        fill(self._filler)
        time.sleep(SHORT)
        self._filler.unlink()

    def set_the_clock(self, flow, chance):
        """Of the flow, of Dask and of the ranks, by minutes to days, forwards or back."""
        shifted = self._clock.with_suffix(".new")
        shifted.write_text(f"{chance.choice('+-')}{chance.choice([90, 3600, 200_000])}")
        shifted.replace(self._clock)

    def _named(self, word):
        found = []
        for letter in "ab":
            for process in self._hosts.processes(letter):
                with suppress(psutil.Error):
                    if sys.executable in process.cmdline() and word in " ".join(process.cmdline()):
                        found.append(process)
        return found

    def _ranks(self):
        return [process for process in self._named(RANK_MODULE) if log_of(process.pid)]  # not those that stand by

    def _workers(self):
        return [process for process in self._named("spawn_main") if RANK_MODULE not in process.cmdline()]

    def _signal(self, processes, number, chance):
        with suppress(ProcessLookupError):
            if processes:
                os.kill(chance.choice(processes).pid, number)

    def _pause(self, processes, seconds):
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
            if number == signal.SIGSTOP:
                time.sleep(seconds)

    def _kill_service(self, name):
        for process in self._services.daemon(name).family():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(SHORT)
        done = self._services.up()
        assert done.returncode == 0, done.stderr

    def _repair_workers(self):
        """Start workers that have ended or do not come back, as systemd does."""
        time.sleep(1)
        for letter in self._hosts.hosts:
            with suppress(TimeoutError):
                if self._hosts.worker_runs(letter):
                    until(lambda letter=letter: self._hosts.has_joined(letter), "worker", JOIN_SECONDS)
                    continue
            self._hosts.restart_worker(letter)
