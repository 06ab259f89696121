"""A claim that a process shares: one for all names of a store, and only its own to release."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import optuna
import pytest

from search.shared_claim import share_claim


def locks(folder: Path) -> int:
    return len(list(folder.glob("study.db.*.lock")))


def test_a_store_of_two_names_is_claimed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"sqlite:///{tmp_path}/study.db"
    study = optuna.create_study(study_name="mine", storage=url)
    (tmp_path / "link.db").symlink_to(tmp_path / "study.db")
    claim = share_claim(study)
    assert claim is not None
    others = [
        share_claim(optuna.load_study(study_name="mine", storage=name))
        for name in ("sqlite:///study.db", f"sqlite:///{tmp_path}/link.db", f"{url}?timeout=9")
    ]
    assert all(other is claim for other in others)
    del claim
    gc.collect()
    assert locks(tmp_path) == 1
    others.clear()
    gc.collect()
    assert locks(tmp_path) == 0


def test_two_studies_of_a_store_are_claimed_apart(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/study.db"
    claims = [share_claim(optuna.create_study(study_name=n, storage=url)) for n in ("a", "b")]
    assert claims[0] is not claims[1]
    assert locks(tmp_path) == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forked processes are of POSIX systems")
def test_a_forked_child_neither_has_the_lock_nor_ends_it(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/study.db"
    assert forked(url, "claim_again()", "drop()", "sys.exit()", "claim_again()") == ["held", "held"]
    assert locks(tmp_path) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forked processes are of POSIX systems")
def test_a_forked_child_does_not_end_the_lease(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/study.db"
    assert forked(url, "use_leases()", "drop()", "sys.exit()", "say_whether_leased()") == ["held"]


def forked(url: str, *parts: str) -> list[str]:
    """Claim a study in a process, do each part in a child forked from it, and give their words.

    The part `use_leases()` is done before the claim, in the process itself.
    """
    script = f"""
import gc, os, sys
import optuna
import studies.claim
from search.shared_claim import share_claim

optuna.logging.set_verbosity(optuna.logging.WARNING)
url, parts = {url!r}, {list(parts)!r}

def use_leases():
    studies.claim.fcntl = None
    studies.claim.SETTLE_SECONDS = 0

def claim_again():
    try:
        share_claim(optuna.load_study(study_name="mine", storage=url))
        print("free")
    except ValueError as error:
        print("held" if f"process {{os.getppid()}} on" in str(error) else error)

def drop():
    global held
    held = None
    gc.collect()

def say_whether_leased():
    attrs = optuna.storages.RDBStorage(url).get_study_system_attrs(study._study_id)
    print("held" if attrs.get(studies.claim.LEASE_ATTR) else "free")

if parts[0] == "use_leases()":
    exec(parts.pop(0))
study = optuna.create_study(study_name="mine", storage=url)
held = share_claim(study)
for part in parts:
    child = os.fork()
    if child == 0:
        exec(part)
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0
"""
    # Newer Pythons warn of forks beside threads, of which the lease has one.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()
