"""The buffer job: `python -m prorl_hpc.buffer --run DIR`. Wires files, keys and signals together.

Exit codes: 0 the run is finished; 75 another attempt is to follow; 2 bad input.
"""

import argparse
import logging
import os
import sys
import time
from pathlib import Path

import msgspec

from hpc import endpoints
from hpc.allocation import Allocation, StopFlag
from hpc.errors import EXIT_CONTINUE, EXIT_DONE, EXIT_USER, UserError
from hpc.memory import keep_freed_memory
from prorl_hpc.buffer.keys import load_server_keys
from prorl_hpc.buffer.manifest import Superseded
from prorl_hpc.buffer.messages import StatusReply
from prorl_hpc.buffer.server import KEEP_BYTES, BufferServer, Ended
from prorl_hpc.buffer.service import Service
from prorl_hpc.buffer.settings import TaskSize, config_from_recipe, server_from_recipe
from prorl_hpc.recipe import Recipe, load_recipe
from prorl_hpc.run import Run

log = logging.getLogger("prorl_hpc.buffer")

ROLE = "buffer"


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One line of metrics/buffer.jsonl."""

    time: float
    attempt: int
    status: StatusReply


class Reporter:
    """Writes metrics, progress and, when it changes, the note for people."""

    def __init__(self, run: Run, *, allocation: Allocation) -> None:
        self._path = run.metrics("buffer")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._allocation = allocation
        self._note = ""

    def __call__(self, service: Service) -> None:
        status = service.status()
        if status.note != self._note:
            self._note = status.note
            log.warning("%s", status.note or "goes on")
        line = Metric(time=time.time(), attempt=self._allocation.attempt, status=status)
        try:
            with self._path.open("ab") as stream:
                stream.write(msgspec.json.encode(line) + b"\n")
            if self._allocation.role == ROLE:  # beside the learner, the job's progress is its steps
                self._allocation.record_progress(status.groups_closed + status.step)
        except OSError as err:  # a full disk must not end what waits for space
            log.warning("metrics can't be written: %s", err)


def size_of(recipe: Recipe, name: str) -> TaskSize:
    """Asks the task itself."""
    from prorl_hpc.records import Kind
    from prorl_hpc.tasks.registry import make_task

    task = make_task(name, recipe.tasks[name], recipe.seed)
    return TaskSize(train=task.size(Kind.train), validation=task.size(Kind.validation))


def serve(run: Run, *, allocation: Allocation) -> Ended:
    """Runs the buffer until it ends."""
    keep_freed_memory(KEEP_BYTES)
    recipe = load_recipe(run.recipe)
    keys = load_server_keys(run)
    stop = StopFlag.of(allocation).install()
    report = Reporter(run, allocation=allocation)
    server = BufferServer(
        run,
        config=config_from_recipe(recipe, size_of=lambda name: size_of(recipe, name)),
        server=server_from_recipe(recipe),
        keys=keys,
        attempt=allocation.attempt,
        report=report,
        stopping=lambda: stop.reason,
    )
    endpoint = endpoints.Endpoint(
        run=run.name,
        role="buffer",
        host=endpoints.own_address(environment=os.environ),
        port=server.bind(),
        public_key=keys.public.decode(),
        attempt=allocation.attempt,
        published=time.time(),
    )
    try:
        if not endpoints.publish(run, endpoint=endpoint):
            raise Superseded("a later attempt of the buffer job has published its endpoint")
        log.info("buffer of %s listens at %s", run.name, endpoint.address)
        return server.serve()
    finally:
        server.close()
        endpoints.withdraw(run, endpoint=endpoint)


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="prorl_hpc.buffer", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="run directory")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        ended = serve(Run(given.run.resolve()), allocation=Allocation.from_environment())
    except UserError as err:
        print(f"prorl-hpc: {err}", file=sys.stderr)
        return EXIT_USER
    except Superseded as err:
        log.error("%s; this attempt ends", err)
        return EXIT_CONTINUE
    log.log(logging.ERROR if ended.culprit else logging.INFO, "buffer ends: %s", ended.reason)
    return EXIT_DONE if ended.finished else EXIT_CONTINUE


if __name__ == "__main__":
    sys.exit(main())
