"""A SLURM of one node: munged, slurmctld and slurmd of this machine, for the time of a block."""

import os
import platform
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sinfo", "sbatch")
CONF = """\
ClusterName=test
SlurmctldHost={host}
SlurmctldPort={ctld_port}
SlurmdPort={slurmd_port}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.sock
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmdTimeout=10
KillWait=5
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SchedulerParameters=sched_interval=1,batch_sched_delay=0
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class NoSlurm(Exception):  # noqa: N818 - it is no fault
    """SLURM cannot be started here; the message says why."""


@contextmanager
def slurm() -> Iterator[Path]:
    """Starts the daemons; yields the path of ``slurm.conf``, for ``$SLURM_CONF``, and ends them.

    Raises:
        NoSlurm: it cannot be started.
    """
    if missing := [name for name in PROGRAMS if not shutil.which(name)]:
        raise NoSlurm(f"{', '.join(missing)} are not installed (apt-get install slurm-wlm munge)")
    if os.getuid() != 0:
        raise NoSlurm("its daemons are started by root only")
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    (conf := folder / "slurm.conf").write_text(
        CONF.format(
            folder=folder,
            host=platform.node().split(".")[0],
            cpus=os.cpu_count(),
            ctld_port=_port(),
            slurmd_port=_port(),
        )
    )
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (key := folder / "munge.key").write_bytes(os.urandom(128))
    key.chmod(0o400)
    environment = {**os.environ, "SLURM_CONF": str(conf)}
    places = [f"--{name}={folder}/munge.{end}" for name, end in (("socket", "sock"), ("pid-file", "pid"),
              ("log-file", "log"), ("seed-file", "seed"), ("key-file", "key"))]  # fmt: skip
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for command in (["munged", "--foreground", "--force", *places], ["slurmctld", "-D"], ["slurmd", "-D"]):
            daemons.append(_start(command, environment))
            while command[0] == "munged" and not (folder / "munge.sock").exists() and daemons[0].poll() is None:
                time.sleep(0.1)
        deadline = time.monotonic() + 60
        while "idle" not in _said(["sinfo", "--noheader"], environment):
            if time.monotonic() > deadline:
                logs = (folder / f"{name}.log" for name in ("munge", "slurmctld", "slurmd"))
                last = [path.read_text().splitlines()[-1:] for path in logs if path.exists()]
                raise NoSlurm(f"its node is not ready after 60 s: {last}")
            time.sleep(0.2)
        yield conf
    finally:
        with suppress(OSError):
            _said(["scancel", "--me"], environment)
        for daemon in reversed(daemons):
            daemon.terminate()
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
            daemon.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _start(command: list[str], environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _said(command: list[str], environment: dict[str, str]) -> str:
    with suppress(subprocess.TimeoutExpired):
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20).stdout
    return ""


def _port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
