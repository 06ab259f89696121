"""The second Ctrl-C ends a process whatever that is doing, in processes of their own."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(60)

START = """
import ctypes, signal, sys, time
from search.console import signals
from search.console.signals import StopSignals

class Finalised:
    def __del__(self):
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
"""
CLOSING = """
with StopSignals() as stop:
    try:
        {work}
        time.sleep(600)
    except KeyboardInterrupt:
        print("closed", stop.received.name)
        sys.exit(130)
"""


def run(script: str, interrupts: int = 0) -> tuple[int, str, str]:
    """Run a script, and press Ctrl-C after each line that it prints.

    Returns:
        Its exit status, what else it printed, and what it said on stderr.
    """
    with subprocess.Popen(
        [sys.executable, "-c", START + script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for _ in range(interrupts):
            assert process.stdout.readline() == "now\n"
            process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    return process.returncode, out, err


@pytest.mark.parametrize(
    "work",
    [
        "Finalised()",
        "x = Finalised(); x.itself = x; del x; import gc; gc.collect()",
        "ctypes.CFUNCTYPE(None)(lambda: Finalised.__del__(None))()",  # a callback from C
    ],
)
def test_an_interrupt_that_python_drops_is_raised_again(work: str) -> None:
    assert run(CLOSING.format(work=work)) == (130, "closed SIGINT\n", "")


def test_another_exception_that_python_drops_is_told_as_always() -> None:
    script = """
class Broken:
    def __del__(self):
        raise ZeroDivisionError
with StopSignals():
    Broken()
"""
    status, _, err = run(script)
    assert (status, "Exception ignored in" in err, "ZeroDivisionError" in err) == (0, True, True)


@pytest.mark.parametrize(("grace", "interrupts"), [(0.5, 2), (600, 3)])
def test_a_process_that_never_returns_from_c_ends(grace: float, interrupts: int) -> None:
    script = f"""
import threading
signals.GRACE_SECONDS = {grace}
libc = ctypes.CDLL(None)
mutex = ctypes.create_string_buffer(256)
def say():
    for _ in range({interrupts}):
        print("now", flush=True)
        time.sleep(0.1)
with StopSignals():
    libc.pthread_mutex_lock(mutex)
    threading.Thread(target=say).start()
    libc.pthread_mutex_lock(mutex)  # for ever: no signal ends it
"""
    said = "Stopped at once; the same command goes on.\n"
    assert run(script, interrupts) == (130, "", said)
