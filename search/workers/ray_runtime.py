"""Start or join Ray, watch whether it lives, and say what its errors mean.

Ray is imported only once it is to be started.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

from search.workers.pool import Failed, PoolError

PACKAGES = Path(__file__).resolve().parents[2]  # the folder that holds mola, studies and search
ANSWER_SECONDS = 2.0  # that a cluster's head may take to take a connection
MISSED_SECONDS = 15.0  # of no connection, after which the cluster is gone; Ray ends us after 60


def check_address(address: str) -> None:
    """Refuse an address that is not the cluster's own: that of a Ray client, or of its dashboard.

    Through a client's proxy a search could not tell whether its cluster lives, and Ray needs
    packages for it that are not among its requirements.

    Raises:
        ValueError: It is one; says what to do instead.
    """
    resolved = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
    if "://" in resolved:
        raise ValueError(
            f"--address {resolved}: a search does not run through a Ray client; start it on a "
            "machine of the cluster (`ray start --address HEAD:6379` makes this one join it) with "
            "--address HEAD:6379, or as a job of the cluster (`ray job submit`) with --address auto"
        )


def connect(address: str | None) -> tuple[ModuleType, bool]:
    """Start or join Ray, quietly.

    Returns:
        The module, and whether Ray was started or joined here rather than by the caller.

    Raises:
        PoolError: Ray cannot be started.
        ValueError: there is no cluster at the address, or it is none to be joined.
    """
    if address is not None:
        check_address(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray would run the workers at niceness 15, where a busy machine starves them.
    os.environ.setdefault("RAY_worker_niceness", "0")
    if address is None:
        # Despite its name this holds on Linux, too: Ray then listens on the loopback address.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    import ray

    if ray.is_initialized():
        return ray, False
    # Whatever log_to_driver says, Ray prints its nodes' errors on stdout, a paragraph for each
    # dead worker. There is no switch; without this function it has nothing to print with.
    ray._private.worker.print_to_stdstream = _print_nothing
    environment = {"py_modules": [str(PACKAGES / p) for p in ("mola", "studies", "search")]}
    try:
        ray.init(
            address=address or "local",
            namespace=f"mola-{uuid4().hex[:8]}",
            include_dashboard=None if address else False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env=environment if address else None,
        )
    except Exception as error:  # of no particular type where a node is slow to come up
        reason = " ".join(str(error).split())
        if address is not None:
            if _wants_token(error):
                reason = "it wants a token (RAY_AUTH_MODE=token, see Ray's documentation)"
            raise ValueError(f"--address {address}: cannot join the cluster: {reason}") from error
        raise PoolError(f"cannot start Ray on this machine: {reason}") from error
    return ray, True


def _wants_token(error: BaseException | None) -> bool:
    """Whether a cluster refused us for want of a token, which Ray says in the text of a cause."""
    while error is not None and "AuthenticationError" not in f"{type(error).__name__} {error}":
        error = error.__cause__ or error.__context__
    return error is not None


class RayWatch:
    """Find out whether Ray itself is alive, which its own calls say late, or never.

    Args:
        ray: The module, initialised.
        local: Whether this process has started Ray, rather than joined a cluster.
    """

    def __init__(self, ray: ModuleType, *, local: bool) -> None:
        self.local = local
        self._ray = ray
        self._missed_since: float | None = None
        context = ray.get_runtime_context()
        host, _, port = context.gcs_address.rpartition(":")
        self._head = (host.strip("[]"), int(port))
        self._node = context.get_node_id()

    def death(self, *, at_once: bool = False) -> str | None:
        """Say what of Ray has died; None while it lives.

        Args:
            at_once: Take a cluster whose head does not answer for dead, as where a worker has
                died, too; else it gets `MISSED_SECONDS`.
        """
        if self.local:
            # Ray says nowhere else that these have ended.
            processes = self._ray._private.worker._global_node.all_processes
            for name in ("gcs_server", "raylet"):
                if any(info.process.poll() is not None for info in processes.get(name, ())):
                    return f"Ray's own process {name} died"
            return None
        if not self._answers():
            now = time.monotonic()
            self._missed_since = self._missed_since or now
            gone = at_once or now - self._missed_since >= MISSED_SECONDS
            return "the Ray cluster does not answer any more" if gone else None
        self._missed_since = None
        alive = {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}
        return None if self._node in alive else "this machine has dropped out of the Ray cluster"

    def nodes(self) -> list[dict[str, float]] | None:
        """Give the resources of each node that is alive; None while the head does not answer."""
        if self._missed_since is not None:
            return None
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]

    def _answers(self) -> bool:
        try:
            socket.create_connection(self._head, ANSWER_SECONDS).close()
        except OSError:
            return False
        return True


def _print_nothing(*_: Any, **__: Any) -> None:
    """Stand in for Ray's own printing; a trial's failure is told in our words."""


def cause_of(error: BaseException) -> BaseException:
    """Give the exception that was raised in the worker, or the one of Ray itself."""
    return getattr(error, "cause", None) or error


def failure_of(ray: ModuleType, error: BaseException) -> Failed:
    """Say in one line what ended a call to a worker."""
    cause = cause_of(error)
    text = " ".join(str(cause).split())
    if isinstance(cause, FloatingPointError):
        return Failed(text, retry=False)
    if isinstance(error, ray.exceptions.OutOfMemoryError) or "running low on memory" in text:
        reason = "Ray ended the worker because the machine's memory was nearly full"
        return Failed(reason, out_of_memory=True)
    if type(cause).__name__ == "OutOfMemoryError":  # torch's, which need not be imported for it
        return Failed(f"out of GPU memory: {text[:300]}", out_of_memory=True)
    if isinstance(error, ray.exceptions.RayActorError) and "creation task" in text:
        return Failed(f"the worker cannot be made: {str(cause).strip().splitlines()[-1].strip()}")
    if isinstance(error, ray.exceptions.RayActorError):
        return Failed("the worker's process died: killed from outside, or out of memory")
    return Failed(f"{type(cause).__name__}: {text[:300]}" if text else type(cause).__name__)
