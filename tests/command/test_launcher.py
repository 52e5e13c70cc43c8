"""A sweep is a race of processes, which are isolated, take turns, and may die in many ways."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pandas as pd
import psutil
import pytest
from support import command

from mpcompare.command import belongings, warden

SMALL = (*command.SMALL, "verdict.enabled=false")  # the verdict has its own tests, and takes a second an entrant
PATH = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))


def results(folder):
    return {path.parent.name: json.loads(path.read_text()) for path in sorted(folder.glob("*/result.json"))}


@pytest.fixture
def start(tmp_path, request):
    """Returns a function that starts the command in a session of its own, where its orphans can be found. The command
    ends with the test."""

    def start(*args, **more):
        process = subprocess.Popen(
            [sys.executable, "-m", "mpcompare", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": PATH, **more}, start_new_session=True,
        )  # fmt: skip
        request.addfinalizer(process.kill)  # its entrants end with it
        return process

    return start


def wait_for(condition, process, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_alive(process):
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def nothing_is_left_of(process, within=15):
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.slow
def test_one_computes_at_any_moment(cli, tmp_path):
    targets = ",".join(["support.misbehaving.Logged"] * 3)
    ended = cli("-m", "backend=fp32", f"backend._target_={targets}",
                *SMALL, "train.steps=20", f"hydra.sweep.dir={tmp_path / 'sweep'}")  # fmt: skip
    assert ended.code == 0, ended.err
    spans = {
        path.name: [tuple(map(float, line.split())) for line in path.read_text().splitlines()]
        for path in tmp_path.glob("steps-*")
    }
    assert len(spans) == 3
    merged = sorted((begin, end, name) for name, all_ in spans.items() for begin, end in all_)
    assert all(end <= begin for (_, end, _), (begin, _, _) in itertools.pairwise(merged))
    found = results(tmp_path / "sweep")
    races = {result["timing"]["race"] for result in found.values()}
    assert len(races) == 1
    for name in found:
        blocks = pd.read_csv(tmp_path / "sweep" / name / "blocks.csv")
        assert blocks["round"].tolist() == list(range(1, found[name]["timing"]["rounds"] + 1))
        assert found[name]["step_ms_p50"] == blocks["step_ms"].median()


@pytest.mark.slow
def test_every_way_to_die_is_a_row_with_its_cause(cli, tmp_path):
    ways = ("Killed", "Hung", "Exits", "Segfault", "Raises")
    targets = ",".join(("mpcompare.backends.fp32.Fp32", *(f"support.misbehaving.{way}" for way in ways)))
    ended = cli("-m", "backend=fp32", f"backend._target_={targets}", *SMALL, "hydra.launcher.silence_limit_s=40",
                f"hydra.sweep.dir={tmp_path / 'sweep'}")  # fmt: skip
    assert ended.code == 1
    table = pd.read_csv(tmp_path / "sweep" / "report" / "summary.csv").set_index("run")
    assert table["status"].tolist() == ["ok", *["failed"] * 5]
    errors = table["error"].tolist()[1:]
    assert errors[0].startswith("killed by SIGKILL: ")
    assert "memory" in errors[0]
    assert errors[1] == "hung: no sign of life for 40 s (hydra.launcher.silence_limit_s)"
    assert errors[2] == "ended with exit code 3: something native gave up"
    assert errors[3].startswith("killed by SIGSEGV")
    assert errors[4] == "ZeroDivisionError: a bug"
    assert "Traceback" in ended.err
    for error in errors:
        assert error in ended.err


@pytest.mark.slow
@pytest.mark.parametrize("much", ["ComputesOutOfTurn", "ComputesALittleOutOfTurn"])
def test_who_computes_out_of_turn_is_named(cli, tmp_path, much):
    targets = f"mpcompare.backends.fp32.Fp32,support.misbehaving.{much}"
    ended = cli("-m", "backend=fp32", f"backend._target_={targets}", *SMALL, "measure.budget_s=3",
                "measure.rel_ci=0.001", f"hydra.sweep.dir={tmp_path / 's'}")  # fmt: skip
    assert ended.code == 0, ended.err
    blocks = [pd.read_csv(path) for path in sorted((tmp_path / "s").glob("*/blocks.csv"))]
    waits = [each[["cpu_s_between_turns", "s_between_turns"]][1:].sum() for each in blocks]
    right, wrong = (each["cpu_s_between_turns"] / each["s_between_turns"] for each in waits)
    assert right < 0.02 < wrong
    (line,) = (line for line in ended.out.splitlines() if "in the turns of others" in line)
    assert line.startswith("fp32 torch [1-fp32-auto]: kept ")


@pytest.mark.slow
def test_a_process_whose_clock_goes_slow_is_named(cli, tmp_path):
    targets = "mpcompare.backends.amp.Amp,support.misbehaving.SlowClock"
    ended = cli("-m", "backend=amp", f"backend._target_={targets}", *command.SMALL, "measure.budget_s=8",
                "measure.block_s=0.1", "verdict.noise=0", f"hydra.sweep.dir={tmp_path / 's'}")  # fmt: skip
    assert ended.code == 0, ended.err
    verdicts = json.loads((tmp_path / "s" / "report" / "verdict.json").read_text())
    assert [(each["word"], each["cause"]) for each in verdicts.values()] == [("reference", ""), ("differs", "clock")]
    said = re.search(r"clock of its process says (.*) of the time that the race saw its blocks take", ended.out)
    assert said
    assert 0.4 < float(said[1]) <= 0.5  # the race hears of an end late, never early


@pytest.mark.slow
def test_jobs_that_differ_in_what_they_compute_race_apart(cli, tmp_path):
    ended = cli("-m", "backend=amp,fp32", *SMALL, "task.batch_size=32,64", "measure.budget_s=3",
                f"hydra.sweep.dir={tmp_path / 's'}")  # fmt: skip
    assert ended.code == 0, ended.err
    races = {name: result["timing"]["race"] for name, result in results(tmp_path / "s").items()}
    assert races["0-amp-auto"] == races["2-fp32-auto"] != races["1-amp-auto"] == races["3-fp32-auto"]
    table = pd.read_csv(tmp_path / "s" / "report" / "summary.csv")
    assert table["side_by_side"].all()
    assert (table["time_vs_baseline_low"] <= table["time_vs_baseline"]).all()


@pytest.mark.slow
def test_the_basic_launcher_still_works_and_its_ratios_say_what_they_are(cli, tmp_path):
    ended = cli("-m", "backend=amp,fp32", "hydra/launcher=basic", *SMALL, f"hydra.sweep.dir={tmp_path / 's'}")
    assert ended.code == 0, ended.err
    assert pd.read_csv(tmp_path / "s" / "report" / "summary.csv")["side_by_side"].tolist() == [True, False]
    assert "~ not timed in turns with its baseline" in ended.out


def test_jobs_that_share_a_folder_are_refused_before_the_first(cli, tmp_path):
    ended = cli("-m", "backend=amp,fp32", *SMALL, f"hydra.sweep.dir={tmp_path / 's'}", "hydra.sweep.subdir=one")
    assert ended.code == 2
    assert "hydra.sweep.subdir=one: expected a folder of its own for each job" in ended.err
    assert not list(tmp_path.rglob("result.json"))


@pytest.mark.slow
def test_what_a_sweep_varies_may_be_allowed_and_a_wrong_name_ends_it_before_its_first_job(cli, tmp_path):
    sweep = ("plan", *SMALL, "backend=amp", "+task.model.extra=2,3", f"hydra.sweep.dir={tmp_path / 'sweep'}")
    ended = cli(*sweep, "report.allow=[task.model.extr]")
    assert ended.code == 2
    assert "report.allow=task.model.extr: expected one of task, " in ended.err
    assert not list(tmp_path.rglob("result.json"))
    ended = cli(*sweep, "report.allow=[task.model.extra]")
    assert ended.code == 0, ended.err
    assert len(list(tmp_path.rglob("result.json"))) == 2


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["measure.rel_ci=0", "measure.budget_s=x", "hydra.launcher.silence_limit_s=-1"])
def test_wrong_rules_end_a_sweep_before_its_first_job(cli, tmp_path, wrong):
    ended = cli("-m", "backend=amp,fp32", *SMALL, wrong, f"hydra.sweep.dir={tmp_path / 's'}")
    assert ended.code == 2
    assert f"mpcompare: error: {wrong}: expected" in ended.err
    assert not list(tmp_path.rglob("result.json"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "moment"), [(signal.SIGINT, "training"), (signal.SIGINT, "timing"), (signal.SIGTERM, "timing")]
)
def test_ctrl_c_ends_all_within_seconds_and_leaves_nothing_running(start, tmp_path, number, moment):
    small = [a for a in SMALL if not a.startswith("measure.budget") and not a.startswith("train.steps")]
    steps = "train.steps=1000000" if moment == "training" else "train.steps=4"
    process = start("-m", "backend=scratch,amp,fp32", *small, steps, "measure.budget_s=1000",
                    "measure.rel_ci=0.00001", "hydra.sweep.dir=s")  # fmt: skip
    file = "steps.csv" if moment == "training" else "blocks.csv"
    wait_for(lambda: any(p.stat().st_size > 500 for p in tmp_path.rglob(file)), process)
    interrupted = time.monotonic()
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert time.monotonic() - interrupted < 10
    assert process.returncode == 130
    assert "mpcompare: interrupted" in err
    assert "Traceback" not in out + err
    assert nothing_is_left_of(process)
    assert {result["status"] for result in results(tmp_path / "s").values()} == {"interrupted"}
    for path in tmp_path.rglob(file):
        assert pd.read_csv(path).iloc[:, 0].is_monotonic_increasing


def endless_race(start, tmp_path, *overrides):
    """Starts a race that goes on for long, and waits until both entrants are timed. Returns the launcher."""
    overrides = ("backend=amp,fp32", "measure.budget_s=1000", "measure.rel_ci=0.00001", *overrides)
    names = [override.split("=")[0] for override in overrides]
    small = [override for override in SMALL if override.split("=")[0] not in names]
    process = start("-m", *small, *overrides, "hydra.sweep.dir=s")
    wait_for(lambda: len(list(tmp_path.rglob("blocks.csv"))) == 2, process)
    return process


@pytest.mark.slow
def test_entrants_do_not_outlive_a_launcher_that_is_killed(start, tmp_path):
    process = endless_race(start, tmp_path)
    process.kill()
    process.communicate(timeout=30)
    assert nothing_is_left_of(process)
    assert {result["status"] for result in results(tmp_path / "s").values()} == {"interrupted"}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_launcher_holds_no_torch_and_entrants_share_it(start, tmp_path):
    process = endless_race(start, tmp_path, "data=synthetic", "task.samples=65536")
    data_bytes = 65536 * 784 * 4
    assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
    (server,) = children(process.pid)
    assert "libtorch" in Path(f"/proc/{server}/maps").read_text()
    assert "libcuda.so" not in Path(f"/proc/{server}/maps").read_text()
    assert len(list(Path(f"/proc/{server}/task").iterdir())) == 1
    for entrant in entrants(process.pid):
        assert "/.shared-" in Path(f"/proc/{entrant}/maps").read_text()
        assert private_bytes(entrant) < 150e6 < data_bytes
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert nothing_is_left_of(process)
    assert not list(tmp_path.rglob(".shared-*"))


def private_bytes(pid):
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_"))


@pytest.mark.slow
def test_a_signal_to_all_processes_ends_a_race_like_ctrl_c(start, tmp_path):
    """Terminals, batch systems and service managers send such a signal."""
    process = endless_race(start, tmp_path)
    os.killpg(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in out + err
    assert nothing_is_left_of(process)
    assert {result["status"] for result in results(tmp_path / "s").values()} == {"interrupted"}


@pytest.mark.slow
def test_sigterm_of_a_single_run_is_recorded_as_interrupted(start, tmp_path):
    small = [each for each in SMALL if not each.startswith("train.steps")]
    process = start("backend=amp", *small, "train.steps=1000000", "hydra.run.dir=run")
    wait_for(lambda: any(path.stat().st_size > 500 for path in tmp_path.rglob("steps.csv")), process)
    process.terminate()
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "mpcompare: interrupted" in err
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["status"], result["error"]) == ("interrupted", "interrupted")


@pytest.fixture
def short():
    """Returns an empty folder with a short name, in which sockets can be made."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


@pytest.mark.slow
def test_a_long_name_of_the_temporary_folder_stops_no_sweep(start, tmp_path):
    (folder := tmp_path / ("x" * 90)).mkdir()
    process = start("-m", "backend=fp32,amp", *SMALL, "hydra.sweep.dir=s", TMPDIR=str(folder))
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert not list(folder.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["nobody", "an entrant", "the server", "the launcher", "the warden", "all"])
def test_nothing_is_left_of_a_sweep_whoever_is_killed(start, tmp_path, short, monkeypatch, victim):
    """Neither programs that an entrant has started, in another session even, nor a temporary file."""
    monkeypatch.setenv("TMPDIR", str(short))
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    process = start("-m", "backend=fp32", *SMALL, "measure.budget_s=5", "measure.rel_ci=0.00001", "hydra.sweep.dir=s",
                    "backend._target_=support.misbehaving.HasChildren,mpcompare.backends.fp32.Fp32")  # fmt: skip
    wait_for(lambda: len(list(tmp_path.rglob("blocks.csv"))) == 2, process)
    launcher = psutil.Process(process.pid)
    (server,) = (each for each in launcher.children() if "forkserver" in " ".join(each.cmdline()))
    (guard,) = (each for each in launcher.children() if "warden" in " ".join(each.cmdline()))
    child = psutil.Process(int((tmp_path / "child").read_text()))
    assert child.name() == "sleep"
    killed = {
        "nobody": [], "an entrant": server.children()[:1], "the server": [server], "the launcher": [launcher],
        "the warden": [guard], "all": [*launcher.children(recursive=True), launcher],
    }[victim]  # fmt: skip
    for each in killed:
        each.kill()
    process.communicate(timeout=100)
    assert process.returncode == (0 if victim in ("nobody", "the warden") else 1 if launcher not in killed else -9)
    if victim in ("the warden", "all"):  # a later sweep finds what is left
        (folder,) = short.glob("mpcompare-sweep-*")
        os.utime(folder, (0, 0))
        belongings._tidy()
    psutil.wait_procs([child, server, guard], timeout=15)
    assert not [each for each in (child, server, guard) if is_alive(each)]
    assert nothing_is_left_of(process)
    assert not list(short.iterdir())
    assert not list(tmp_path.rglob(".shared-*"))
    for name, result in results(tmp_path / "s").items():
        if victim in ("an entrant", "the server") and result["status"] != "ok":
            expected = "killed by SIGKILL" if victim == "an entrant" else "the process of which all entrants are forks"
            assert expected in result["error"], name


def test_only_folders_of_the_sweep_are_deleted_through_links_in_its_temporary_folder(tmp_path):
    (folder := tmp_path / "mpcompare-sweep-1").mkdir()
    of_user = {folder / "imagenet": tmp_path / "imagenet", folder / ".shared-data": tmp_path / "data"}
    ours = {folder / ".shared-2": tmp_path / ".shared-2"}
    for link, target in (of_user | ours).items():
        target.mkdir()
        (target / "file").write_text("")
        link.symlink_to(target)
    warden.clear(folder)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["data", "file", "file", "imagenet"]


def test_the_end_of_an_entrant_ends_no_daemon_of_another(tmp_path):
    own, daemons, deadline = belongings.Belongings(tmp_path, forget=lambda: None), {}, time.monotonic() + 10
    for name in ("0-amp", "1-fp32"):
        marks = {**os.environ, warden.MARK: str(tmp_path), belongings.ENTRANT: name}
        said = subprocess.check_output(["sh", "-c", "sleep 100 >/dev/null & echo $!"], env=marks)
        daemons[name] = psutil.Process(int(said))
    for entrant, left in (("0-amp", {"1-fp32"}), (None, set())):
        own.end_orphans(entrant)
        while (alive := {name for name in daemons if is_alive(daemons[name])}) > left and time.monotonic() < deadline:
            time.sleep(0.01)
        assert alive == left


@pytest.mark.slow
def test_a_thread_of_an_entrant_does_not_hold_up_a_sweep(cli, tmp_path):
    began = time.monotonic()
    ended = cli("-m", "backend=fp32", "backend._target_=support.misbehaving.HasAThread,mpcompare.backends.fp32.Fp32",
                *SMALL, "hydra.sweep.dir=s")  # fmt: skip
    assert ended.code == 0, ended.err
    assert time.monotonic() - began < 200
    assert "0-fp32-auto: warning: ended while reader went on, a thread that is no daemon" in ended.err
    assert {result["status"] for result in results(tmp_path / "s").values()} == {"ok"}


@pytest.mark.slow
def test_what_entrants_are_forks_of_has_no_threads_and_has_not_asked_for_a_gpu(tmp_path):
    script = (
        "import os, threading, torch\n"
        "asked, before = [], set(os.environ)\n"
        "torch._C._cuda_getDeviceCount = lambda: asked.append('count') or 0\n"
        "torch._C._cuda_init = lambda: asked.append('init')\n"
        "import mpcompare.command.preload, gc\n"
        "assert not asked and not torch.cuda.is_initialized()\n"
        "assert threading.active_count() == 1 \n"
        "assert set(os.environ) - before <= {'KINETO_LOG_LEVEL'}\n"
        "assert gc.get_freeze_count() > 100_000\n"
        "import sys; assert not sys.platform.startswith('linux') or len(os.listdir('/proc/self/task')) == 1"
    )
    environment = {**os.environ, "CUDA_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_variables_that_libraries_read_when_they_are_loaded_count_as_they_are_at_the_sweep(cli, tmp_path, monkeypatch):
    for threads in ("1", "2"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        ended = cli("-m", "backend=fp32,amp", *SMALL, f"hydra.sweep.dir={tmp_path / threads}")
        assert ended.code == 0, ended.err
        assert {result["threads"] for result in results(tmp_path / threads).values()} == {int(threads)}
    ended = cli("-m", "backend=fp32,amp", *SMALL, "+hydra.job.env_set.OMP_NUM_THREADS=1",
                f"hydra.sweep.dir={tmp_path / 'set'}")  # fmt: skip
    assert ended.code == 0, ended.err
    assert {result["threads"] for result in results(tmp_path / "set").values()} == {1}


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.0, 4.0])
def test_an_entrant_that_is_killed_at_any_moment_costs_nobody_else(start, tmp_path, delay_s):
    """The moments begin with the start of the entrant's process; scripts/check_clock.py takes random ones."""
    process = start("-m", "backend=scratch,amp,fp32", *SMALL, "measure.budget_s=3", "measure.rel_ci=0.0001",
                    "hydra.sweep.dir=s")  # fmt: skip
    wait_for(lambda: (tmp_path / "s" / "2-fp32-auto").is_dir() and len(entrants(process.pid)) >= 3, process)
    time.sleep(delay_s)
    victim = entrants(process.pid)[1]
    os.kill(victim, signal.SIGKILL)
    out, err = process.communicate(timeout=120)
    table = pd.read_csv(tmp_path / "s" / "report" / "summary.csv")
    assert process.returncode == 1, out + err
    assert sorted(table["status"]) == ["failed", "ok", "ok"]
    (error,) = table["error"].dropna()
    assert error.startswith("killed by SIGKILL")


def children(pid):
    """Returns the processes that a process has started, without multiprocessing's resource tracker and the warden."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # one is gone by now
            for child in map(int, task.read_text().split()):
                command = Path(f"/proc/{child}/cmdline").read_text(errors="replace")
                if "resource_tracker" not in command and "warden" not in command:
                    found.append(child)
    return found


def entrants(pid):
    """Returns the entrants of a launcher, which are forks of its only child."""
    return [entrant for server in children(pid) for entrant in children(server)]
