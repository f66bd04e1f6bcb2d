"""How the jobs of a run find each other: one small file per role. Opens no connection.

A role binds to a free port and publishes where it is; the others wait for the file with a
deadline, and are told who is missing when it passes.
"""

import os
import socket
import time
from collections.abc import Callable, Mapping

import msgspec

from hpc import ledger
from hpc.errors import EndpointTimeout, UserError
from hpc.files import publish as publish_file
from hpc.prepare import load
from hpc.rundir import RunDirectory

FORMAT = 1
"""Format number of an endpoint file."""

_FIRST_WAIT_SECONDS = 0.05
_LONGEST_WAIT_SECONDS = 2.0


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where a role listens."""

    run: str
    """Identity of the run, so that a stale file of another one is never taken."""
    role: str
    host: str
    port: int
    public_key: str
    """CURVE public key, Z85; empty where the channel has none."""
    attempt: int
    published: float
    """Unix seconds."""
    format: int = FORMAT

    @property
    def address(self) -> str:
        """`tcp://host:port`, as ZeroMQ takes it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"


def publish(run: RunDirectory, *, endpoint: Endpoint) -> bool:
    """Publishes an endpoint atomically; False when a later attempt already has.

    The older of two attempts that both live thus can't take the place of its successor.
    """
    run.endpoints.mkdir(parents=True, exist_ok=True)
    before = read(run, endpoint.role)
    if before is not None and before.run == endpoint.run and before.attempt > endpoint.attempt:
        return False
    publish_file(run.endpoint(endpoint.role), data=msgspec.json.encode(endpoint))
    return True


def read(run: RunDirectory, role: str) -> Endpoint | None:
    """The published endpoint; None when there is none that this version can read."""
    try:
        found = msgspec.json.decode(run.endpoint(role).read_bytes(), type=Endpoint)
    except (OSError, msgspec.DecodeError):
        return None
    return found if found.format <= FORMAT else None


def withdraw(run: RunDirectory, *, endpoint: Endpoint) -> None:
    """Removes the file if it is still this attempt's."""
    found = read(run, endpoint.role)
    if found is not None and found.attempt == endpoint.attempt and found.run == endpoint.run:
        run.endpoint(endpoint.role).unlink(missing_ok=True)


def await_endpoint(
    run: RunDirectory,
    role: str,
    *,
    run_id: str,
    timeout_seconds: float,
    after_attempt: int = 0,
    stopping: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Endpoint:
    """Waits for the endpoint of `role` in this run, newer than `after_attempt`.

    Raises EndpointTimeout naming the culprit and what its job last did, after `timeout_seconds` or
    as soon as `stopping()` says so.
    """
    until = clock() + timeout_seconds
    wait = _FIRST_WAIT_SECONDS
    while True:
        found = read(run, role)
        if found is not None and found.run == run_id and found.attempt > after_attempt:
            return found
        left = until - clock()
        if left <= 0 or stopping():
            why = f"after {timeout_seconds:.0f} s" if left <= 0 else "when this job had to stop"
            raise EndpointTimeout(f"no endpoint of role {role!r} {why}: {culprit(run, role)}")
        sleep(min(wait, left))
        wait = min(_LONGEST_WAIT_SECONDS, wait * 1.5)


def culprit(run: RunDirectory, role: str) -> str:
    """What the ledger says about a role, in one sentence."""
    home = _home(run, role)
    histories = [
        history
        for history in ledger.fold(ledger.read(run.ledger)).values()
        if history.last_start is not None and history.last_start.role == home
    ]
    if not histories:
        whose = "its job" if home == role else f"the {home} job, in which it runs,"
        return f"{whose} never started; see `squeue` and {run.logs / home}"
    newest = max(histories, key=lambda history: history.starts[-1].time)
    start, end = newest.last_start, newest.last_exit
    assert start is not None
    which = "its attempt" if home == role else f"in the {home} job, attempt"
    if end is None:
        return f"{which} {start.attempt} on {start.host} hasn't published one"
    return f"{which} {start.attempt} on {start.host} ended: {end.reason}"


def _home(run: RunDirectory, role: str) -> str:
    """The role of the job that it runs in: without one of its own, that which the others follow."""
    try:
        plan, _ = load(run)
    except UserError:
        return role
    roles = [job.role for job in plan.ordered()]
    return role if role in roles or not roles else roles[0]


def reserve_port(host: str = "") -> socket.socket:
    """A socket that keeps a free TCP port for a process that binds it with SO_REUSEADDR.

    While it is open, nobody is handed that port who asks for any. It never listens.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((host, 0))
    return reserved


def own_address(*, peer: str | None = None, environment: Mapping[str, str] | None = None) -> str:
    """The address under which others reach this host: that of the route to `peer`.

    Without a peer: the route to the host that launched the job, else this host's name. On one
    machine without Slurm it is 127.0.0.1.
    """
    given = os.environ if environment is None else environment
    if peer is None:
        if not given.get("SLURM_JOB_ID"):
            return "127.0.0.1"
        peer = given.get("SLURM_LAUNCH_NODE_IPADDR")
    for candidate in (_routed(peer), _named()):
        if candidate is not None and not candidate.startswith("127."):
            return candidate
    return "127.0.0.1"


def _routed(peer: str | None) -> str | None:
    """Our address on the interface towards `peer`; sends nothing."""
    if not peer:
        return None
    try:
        kind, *_, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _named() -> str | None:
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    addresses = [str(entry[4][0]) for entry in found]
    return next((a for a in addresses if not a.startswith("127.") and a != "::1"), None)
