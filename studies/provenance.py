"""Record what each run of a search was: its command, versions, machine and data."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import optuna

from studies.shape import Check, require, text, texts, whole
from studies.strict import shown

RUNS_ATTR = "runs"
MOST_RUNS = 20  # the first and the latest are kept: a study that went on daily stays small
_PACKAGES = ("mola-search", "torch", "transformers", "peft", "datasets", "optuna", "ray")
_GPU_SECONDS = 10  # nvidia-smi may hang where a driver is broken


@dataclass(frozen=True)
class RunNote:
    """A run of the search command.

    Attributes:
        command: Repeats it; passwords are masked.
        began: Date and time in UTC, ISO 8601.
        versions: Version of Python and of each package.
        machine: The driver's machine: system, processor, cores, memory, GPUs.
        train_rows: Rows of the training split.
        validation_rows: Rows that an evaluation reads.
        goal: Distinct allocations that it wants measured in all.
        replicates: Trials of its confirmation, at most.
    """

    command: str
    began: str
    versions: dict[str, str]
    machine: dict[str, str]
    train_rows: int
    validation_rows: int
    goal: int
    replicates: int


_NOTE: dict[str, Check] = {
    **dict.fromkeys(("command", "began"), text),
    **dict.fromkeys(("versions", "machine"), texts),
    **dict.fromkeys(("train_rows", "validation_rows", "goal", "replicates"), whole),
}


def note_run(
    study: optuna.Study,
    command: str,
    *,
    train_rows: int,
    validation_rows: int,
    goal: int,
    replicates: int,
) -> None:
    """Add this process to the study's list of runs.

    Args:
        study: The study.
        command: Repeats the run; without passwords.
        train_rows: Rows of the training split.
        validation_rows: Rows that an evaluation reads.
        goal: Distinct allocations that are to be measured in all.
        replicates: Trials of the confirmation, at most.
    """
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    note = RunNote(
        command, now, versions(), machine(), train_rows, validation_rows, goal, replicates
    )
    kept = list(study.user_attrs.get(RUNS_ATTR, []))
    del kept[1 : max(1, len(kept) - MOST_RUNS + 2)]
    study.set_user_attr(RUNS_ATTR, [*kept, asdict(note)])


def run_notes(study: optuna.Study) -> list[RunNote]:
    """Give the runs of a study, the first one first; empty for studies of older versions.

    Raises:
        ValueError: Another program or version wrote them.
    """
    notes = study.user_attrs.get(RUNS_ATTR, [])
    where = f"the study {study.study_name!r}: {RUNS_ATTR}"
    if not isinstance(notes, list):
        raise ValueError(f"{where} must be a list, got {shown(notes)}")
    for place, note in enumerate(notes):
        require(note, _NOTE, f"{where}[{place}]")
    return [RunNote(**{key: note[key] for key in _NOTE}) for note in notes]


def versions() -> dict[str, str]:
    """Give the version of Python and of each package that a result depends on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def machine() -> dict[str, str]:
    """Describe this machine without loading torch or touching a GPU."""
    described = {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": str(os.cpu_count()),
    }
    try:
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        described["memory"] = f"{pages * size / 2**30:.0f} GiB"
    except (AttributeError, OSError, ValueError):  # no POSIX system
        pass
    described["GPUs"] = ", ".join(_gpus()) or "none"
    return described


def _processor() -> str:
    """Name the processor; Linux alone keeps a name for people."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _gpus() -> list[str]:
    """Ask NVIDIA's own tool, which makes no CUDA context."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        asked = subprocess.run(  # noqa: S603
            query, capture_output=True, text=True, timeout=_GPU_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in asked.stdout.splitlines() if line.strip()]
