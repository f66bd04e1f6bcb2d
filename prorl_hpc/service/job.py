"""Where a service lives, and its settings frozen for a job. Imports no server.

A service as a job is a run of one job: `prorl-hpc status`, `logs` and `cancel` know it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from hpc.errors import UserError
from hpc.files import publish
from prorl_hpc.run import Run

FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Where:
    """Where a service lives."""

    directory: Path
    policy: Path
    """The policy to start with: a published version, or a plain Hugging Face directory."""
    socket_path: Path | None = None
    """A private Unix socket; else TCP."""
    host: str = "127.0.0.1"
    port: int = 0
    """0: any free one."""
    llm_servers: bool = False
    """No engine of its own: clients bring servers through `/add_llm_server`."""
    open: bool = False
    """No token, also over TCP: whoever can connect may ask."""
    callback_hosts: tuple[str, ...] = ()
    """Hosts whose URLs may be called when a job is over."""
    format: int = FORMAT


def write_where(run: Run, where: Where) -> None:
    """Freezes the settings. Raises UserError where a started service has other ones."""
    data = msgspec.json.encode(where, enc_hook=str)
    if run.ledger.exists() and run.service_job.exists() and run.service_job.read_bytes() != data:
        raise UserError(
            f"service {run.name!r} was started with other settings; cancel it "
            f"(prorl-hpc cancel {run.root}), or choose another --dir"
        )
    publish(run.service_job, data=data, mode=0o600)


def read_where(run: Run) -> Where:
    """Raises UserError for a directory that holds no service, or one of a newer format."""
    try:
        data = run.service_job.read_bytes()
        where = msgspec.json.decode(data, type=Where, dec_hook=_decode)
    except (OSError, msgspec.DecodeError) as err:
        raise UserError(
            f"{run.root} holds no service ({err}); make it with prorl-hpc serve --submit"
        ) from err
    if where.format > FORMAT:
        raise UserError(
            f"{run.service_job} has format {where.format}, newer than {FORMAT}; update prorl-hpc"
        )
    return where


def _decode(kind: type, value: Any) -> Any:
    return kind(value)
