"""Starts this node's ranks and waits for them. Knows processes; no model.

    launch (one per node) --fork--> rank 0, 1, ... (own process each, own group)
       USR2/TERM: passed on to the ranks, who save and exit 75
       a rank dies: the others get the grace time, then are killed
       launch dies: the ranks see their pipe close and end

One rank on one node runs in this process.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType

from hpc import endpoints
from hpc.allocation import Allocation, StopFlag
from hpc.errors import EXIT_CONTINUE, EXIT_DONE, EXIT_USER, EndpointTimeout
from hpc.files import publish
from prorl_hpc.learner.record import log
from prorl_hpc.recipe import Recipe, RecipeError
from prorl_hpc.run import Run

POLL_SECONDS = 0.2
LAST_GRACE_SECONDS = 60.0
"""How long other ranks may go on after one has ended."""

MEETING_SECONDS = 600.0


def launch(run: Run, recipe: Recipe, *, allocation: Allocation, flag: StopFlag) -> int:
    """Starts the ranks of this node and returns the exit code of the whole."""
    per_node = recipe.learner.ranks_per_node
    nodes = allocation.num_nodes
    if nodes != recipe.learner.nodes:
        raise RecipeError(
            f"learner.nodes={recipe.learner.nodes}, but this job has {nodes}; submit again"
        )
    with ExitStack() as held:
        try:
            host, port = _meeting_point(run, allocation, held, stopping=lambda: flag.stopping)
        except EndpointTimeout as err:
            log(f"stopping, to be started again: {err}")
            return EXIT_CONTINUE
        environment = os.environ | {
            "WORLD_SIZE": str(nodes * per_node),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
        }
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "prorl_hpc.learner", "--run", str(run.root), "--rank"],
                env=environment
                | {"RANK": str(allocation.node_rank * per_node + i), "LOCAL_RANK": str(i)},
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
            for i in range(per_node)
        ]
        return _supervise(ranks, asked=lambda: flag.stopping)


def _meeting_point(
    run: Run, allocation: Allocation, held: ExitStack, *, stopping: Callable[[], bool]
) -> tuple[str, int]:
    """Host and port of rank 0: a free port on the first node, told to the others by a file.

    The port is rank 0's alone as long as `held` is open. Raises EndpointTimeout, naming that node,
    when it tells none in time or a stop is wanted.
    """
    path = run.endpoint(f"learner-ranks-{allocation.attempt}")
    if allocation.node_rank == 0:
        port = int(held.enter_context(endpoints.reserve_port()).getsockname()[1])
        host = "127.0.0.1" if allocation.num_nodes == 1 else allocation.hosts[0]
        path.parent.mkdir(parents=True, exist_ok=True)
        publish(path, data=f"{host} {port}".encode())
        return host, port
    deadline = time.monotonic() + MEETING_SECONDS
    while True:
        try:
            host, text = path.read_text().split()
            return host, int(text)
        except (OSError, ValueError) as err:
            late = time.monotonic() > deadline
            if late or stopping():
                why = f"within {MEETING_SECONDS:g} s" if late else "before a stop was wanted"
                raise EndpointTimeout(
                    f"node {allocation.hosts[0]} named no meeting point {why}; see its log"
                ) from err
            time.sleep(POLL_SECONDS)


def _supervise(
    ranks: list[subprocess.Popen[bytes]], *, asked: Callable[[], bool] = lambda: False
) -> int:
    def pass_on(number: int, _frame: FrameType | None) -> None:
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(signal.SIGUSR2 if number == signal.SIGUSR2 else signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, pass_on)
    if asked():  # a signal that came while the ranks were being started
        pass_on(signal.SIGTERM, None)
    try:
        return _wait(ranks)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGKILL)
                rank.wait()


def _wait(ranks: list[subprocess.Popen[bytes]]) -> int:
    """The code of the whole; gives the others a little time once one has ended."""
    ended: float | None = None
    while True:
        codes = [rank.poll() for rank in ranks]
        if all(code is not None for code in codes):
            break
        failed = [i for i, code in enumerate(codes) if code not in (None, EXIT_DONE)]
        if failed and ended is None:
            ended = time.monotonic()
            log(f"local rank {failed[0]} ended with {codes[failed[0]]}; ending the others")
        if ended is not None and time.monotonic() - ended > LAST_GRACE_SECONDS:
            break
        time.sleep(POLL_SECONDS)
    first = codes[0]
    if first in (EXIT_USER, EXIT_CONTINUE):
        return first  # the others' errors are echoes of it
    return combined_code([code for code in codes if code is not None])


def combined_code(codes: list[int]) -> int:
    """One exit code for all ranks: errors first, then a death by signal, then "continue"."""
    plain = [code for code in codes if code not in (EXIT_DONE, EXIT_CONTINUE) and code > 0]
    if plain:
        return min(plain, key=lambda code: code != 2)
    if any(code < 0 for code in codes) or EXIT_CONTINUE in codes:
        return EXIT_CONTINUE
    return EXIT_DONE


def end_with_parent(end: Callable[[int], None] = os._exit) -> None:
    """Ends this process once the launcher's end of stdin closes: no rank outlives its launcher."""

    def watch() -> None:
        while sys.stdin.buffer.read(1):
            pass
        end(EXIT_CONTINUE)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()
