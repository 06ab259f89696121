"""Searches in processes of their own, that are killed, stopped, suspended and cut off."""

from __future__ import annotations

import os
import pty
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from pretend_search import (
    Nursery,
    check_finished,
    check_whole,
    nursery,
    study_of,
    wait_for,
)
from small_disk import mounted

CONFIRM = ("--confirm-seeds", "2")
PACE = 0.02  # seconds of a poll, so that a search lasts about two
pytestmark = pytest.mark.timeout(240)  # each takes a second, on a machine that is not busy


@pytest.fixture(scope="module")
def searches() -> Iterator[Nursery]:
    with nursery() as kept:
        yield kept


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "small", "1500k") as folder:
        yield folder


def errors(folder: Path) -> str:
    text = (folder / "err.txt").read_text(errors="replace")
    assert "Traceback" not in text, text
    assert "Exception ignored" not in text, text
    return text


def test_a_driver_killed_before_any_of_its_writes_loses_and_repeats_nothing(
    searches: Nursery, tmp_path: Path
) -> None:
    draw = random.Random(8)
    for _ in range(6):
        killed = searches.start(tmp_path, *CONFIRM, die_at=draw.randrange(1, 500))
        assert killed.wait() == -signal.SIGKILL
        finished = [t for t in study_of(tmp_path) if t.state in ("COMPLETE", "PRUNED")]
        if finished:
            check_whole(tmp_path / "runs/mine/study.db")
    assert finished, "no search came far enough to have something to lose"
    assert searches.start(tmp_path, *CONFIRM).wait() == 0
    check_finished(tmp_path, finished, fresh_seeds=2)
    errors(tmp_path)


def test_a_second_driver_is_told_so_and_leaves_the_first_alone(
    searches: Nursery, tmp_path: Path
) -> None:
    first = searches.start(tmp_path, pace=PACE)
    wait_for(tmp_path / "err.txt", "trial 1 ")
    (tmp_path / "err.txt").rename(tmp_path / "first.txt")
    settings = (tmp_path / "runs/mine/config.toml").read_text()
    assert searches.start(tmp_path, "--trials", "99").wait() == 2
    line = errors(tmp_path).splitlines()[-1]
    assert line.startswith("Error: another search works on the study 'mine': process ")
    assert f"process {first.pid} on " in line
    assert (tmp_path / "runs/mine/config.toml").read_text() == settings
    assert first.wait() == 0
    check_finished(tmp_path)
    assert {path.name for path in (tmp_path / "runs/mine").iterdir()} == {"study.db", "config.toml"}
    assert searches.start(tmp_path).wait() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_cleanly_and_the_same_command_goes_on(
    searches: Nursery, tmp_path: Path, number: signal.Signals
) -> None:
    stopped = searches.start(tmp_path, pace=PACE)
    wait_for(tmp_path / "err.txt", "trial 1 ")
    stopped.signal(number)
    assert stopped.wait() == 128 + number
    assert "Stopped; the trials under way start again.\nTo go on: python -m " in errors(tmp_path)
    left = study_of(tmp_path)
    assert "RUNNING" not in {trial.state for trial in left}
    assert searches.start(tmp_path).wait() == 0
    check_finished(tmp_path, [trial for trial in left if trial.state == "COMPLETE"])


def test_a_second_signal_stops_at_once(searches: Nursery, tmp_path: Path) -> None:
    stopped = searches.start(tmp_path, pace=600)
    wait_for(tmp_path / "err.txt", "allocations to run")
    subprocess.run(["sleep", "1"], check=True)  # until it waits for its workers
    stopped.signal(signal.SIGINT)
    stopped.signal(signal.SIGTERM)
    assert stopped.wait() in (128 + signal.SIGINT, 128 + signal.SIGTERM)  # they may overtake
    assert "To go on: python -m " in errors(tmp_path)
    assert searches.start(tmp_path).wait() == 0
    check_finished(tmp_path)


@pytest.mark.slow
def test_a_search_under_nohup_outlives_its_terminal(searches: Nursery, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with nursery() as ignorant:
            search = ignorant.start(tmp_path, pace=PACE)
            wait_for(tmp_path / "err.txt", "trial 1 ")
            search.signal(signal.SIGHUP)
            assert search.wait() == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    check_finished(tmp_path)


def test_a_closed_terminal_stops_cleanly(searches: Nursery, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    search = searches.start(tmp_path, pace=PACE, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    while b"trial 1 " not in shown:
        shown += os.read(ours, 65536)
    os.close(ours)
    assert search.wait() == 128 + signal.SIGHUP
    left = study_of(tmp_path)
    assert "RUNNING" not in {trial.state for trial in left}
    assert searches.start(tmp_path).wait() == 0
    check_finished(tmp_path, [trial for trial in left if trial.state == "COMPLETE"])


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_pipe_whose_reader_has_left_ends_no_search(
    searches: Nursery, tmp_path: Path, stream: str
) -> None:
    reader, writer = os.pipe()
    search = searches.start(tmp_path, pace=0.002, **{stream: writer})
    os.close(writer)
    os.close(reader)
    assert search.wait() == (1 if stream == "stdout" else 0)
    errors(tmp_path)
    check_finished(tmp_path)


def test_results_that_nobody_can_take_are_one_line(searches: Nursery, tmp_path: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    search = searches.start(tmp_path, stdout=full)
    os.close(full)
    assert search.wait() == 1
    assert errors(tmp_path).splitlines()[-1] == "Error: [Errno 28] No space left on device"
    check_finished(tmp_path)


@pytest.mark.slow
def test_a_suspended_driver_gives_up_nobody(searches: Nursery, tmp_path: Path) -> None:
    search = searches.start(tmp_path, "--trial-timeout", "5.5", pace=PACE)
    wait_for(tmp_path / "err.txt", "trial 1 ")
    search.signal(signal.SIGSTOP)
    subprocess.run(["sleep", "6"], check=True)  # longer than a trial may take
    search.signal(signal.SIGCONT)
    assert search.wait() == 0
    assert {trial.state for trial in study_of(tmp_path)} <= {"COMPLETE", "PRUNED"}
    check_finished(tmp_path)


def test_a_store_that_is_deleted_under_the_driver_is_saved(
    searches: Nursery, tmp_path: Path
) -> None:
    search = searches.start(tmp_path, pace=3 * PACE)
    wait_for(tmp_path / "err.txt", "trial 3 ")
    finished = [trial for trial in study_of(tmp_path) if trial.state == "COMPLETE"]
    (tmp_path / "runs/mine").rename(tmp_path / "gone")  # at once, whatever is being written there
    shutil.rmtree(tmp_path / "gone")
    assert search.wait() == 1
    text = errors(tmp_path)
    assert "Error: runs/mine/study.db was moved, deleted or replaced while it was in use" in text
    saved = tmp_path / "runs/mine/study.db.rescued"
    assert f"what it held is in {saved.relative_to(tmp_path)}" in text
    saved.rename(saved.with_name("study.db"))
    assert searches.start(tmp_path).wait() == 0
    check_finished(tmp_path, finished)


def test_a_full_disk_is_waited_for(searches: Nursery, small_disk: Path, tmp_path: Path) -> None:
    search = searches.start(tmp_path, "--root", "small", pace=PACE)
    wait_for(tmp_path / "err.txt", "trial 1 ")
    filler = small_disk / "filler"
    fill_until(filler, tmp_path / "err.txt", "database or disk is full; waiting until that is over")
    filler.unlink()
    assert search.wait() == 0
    assert errors(tmp_path).count("the storage can be used again") == 1
    (tmp_path / "runs").symlink_to("small")
    check_finished(tmp_path)


@pytest.mark.slow
def test_a_full_disk_can_be_left_and_gone_on_with(
    searches: Nursery, small_disk: Path, tmp_path: Path
) -> None:
    search = searches.start(tmp_path, "--root", "small", pace=PACE)
    wait_for(tmp_path / "err.txt", "trial 1 ")
    filler = small_disk / "filler"
    fill_until(filler, tmp_path / "err.txt", "waiting until that is over")
    search.signal(signal.SIGINT)
    assert search.wait() == 128 + signal.SIGINT
    assert "To go on: " in errors(tmp_path)
    filler.unlink()
    assert searches.start(tmp_path, "--root", "small").wait() == 0
    (tmp_path / "runs").symlink_to("small")
    check_finished(tmp_path)


def test_a_store_that_becomes_read_only_is_waited_for(searches: Nursery, tmp_path: Path) -> None:
    search = searches.start(tmp_path, pace=PACE, modest=True)
    wait_for(tmp_path / "err.txt", "trial 1 ")
    (tmp_path / "runs/mine").chmod(0o555)  # no journal can be made then, or removed
    wait_for(tmp_path / "err.txt", "waiting until that is over")
    (tmp_path / "runs/mine").chmod(0o755)
    assert search.wait() == 0
    assert errors(tmp_path).count("the storage can be used again") == 1
    check_finished(tmp_path)


@pytest.mark.parametrize("mode", [0o555, 0])
def test_a_store_out_of_reach_can_be_left_and_gone_on_with(
    searches: Nursery, tmp_path: Path, mode: int
) -> None:
    search = searches.start(tmp_path, pace=PACE, modest=True)
    wait_for(tmp_path / "err.txt", "trial 1 ")
    (tmp_path / "runs/mine").chmod(mode)
    wait_for(tmp_path / "err.txt", "waiting until that is over")
    search.signal(signal.SIGINT)
    assert search.wait() == 128 + signal.SIGINT
    assert "Stopped; " in errors(tmp_path)
    assert "To go on: python -m " in errors(tmp_path)
    (tmp_path / "runs/mine").chmod(0o555)
    assert searches.start(tmp_path, modest=True).wait() == 2
    assert "Error: cannot use the storage " in errors(tmp_path).splitlines()[-1]
    (tmp_path / "runs/mine").chmod(0o755)
    assert searches.start(tmp_path, modest=True).wait() == 0
    check_finished(tmp_path)


def fill_until(path: Path, told: Path, text: str) -> None:
    """Leave no room on a file system, not even that of a journal that was there, until it shows."""
    deadline = time.monotonic() + 60
    while text not in told.read_text(errors="replace"):
        assert time.monotonic() < deadline, told.read_text(errors="replace")
        with path.open("ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))
