"""Which of a sandbox's processes are the agent's, and how to stop just those.

Knows the shape of a started sandbox (runtime, namespace's process 1, outer and inner shell);
knows nothing of pipes, commands or limits.
"""

import signal
import threading
import time
from dataclasses import dataclass, field

from prorl_hpc.environment import processes
from prorl_hpc.environment.processes import ProcessInfo
from prorl_hpc.environment.scratch import Scratch

SNAPSHOT_SECONDS = 0.2


class SharedSnapshot:
    """One reading of the process table for all environments of a worker."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = float("-inf")
        self._table: dict[int, ProcessInfo] = {}

    def get(self) -> dict[int, ProcessInfo]:
        """At most SNAPSHOT_SECONDS old."""
        with self._lock:
            if time.monotonic() - self._taken > SNAPSHOT_SECONDS:
                self._table = processes.snapshot()
                self._taken = time.monotonic()
            return self._table


@dataclass(kw_only=True, slots=True)
class SandboxTree:
    """The processes of one started sandbox. All methods block; none raises for a lost process."""

    scratch: Scratch
    root: int
    """The process that was spawned: the runtime, or the outer shell itself."""
    inner: int = 0
    """The agent's shell, by its id on this machine; 0 while there is none."""
    init: int = 0
    """Process 1 of the sandbox's PID namespace; 0 without one."""
    _keep: frozenset[int] = field(default_factory=frozenset)

    def adopt_inner(self, inside: int) -> bool:
        """Finds the shell that calls itself `inside`; False when it is gone already."""
        members = processes.sandbox_members(self.scratch.path, token=self.scratch.token)
        depths = {pid: processes.namespace_pids(pid) for pid in members}
        table = processes.snapshot()
        # an agent may nest namespaces of its own: the shell is the shallowest of that name
        named = sorted((len(ids), pid) for pid, ids in depths.items() if ids and ids[-1] == inside)
        if not named:
            return False
        self.inner = named[0][1]
        above = processes.ancestors([self.inner], table)
        inits = [pid for pid in processes.namespace_inits(above) if pid in members]
        self.init = inits[0] if inits else 0
        self._keep = frozenset([self.inner, self.root, *above])
        return True

    def payload(self, table: dict[int, ProcessInfo] | None = None) -> list[int]:
        """The agent's shell and everything it started."""
        if self.init:
            known = processes.snapshot() if table is None else table
            below = processes.descendants([self.init], known)
            return [pid for pid in below if known[pid].alive and self._is_payload(pid)]
        members = processes.sandbox_members(self.scratch.path, token=self.scratch.token)
        return [pid for pid in members if self._is_payload(pid)]

    def _is_payload(self, pid: int) -> bool:
        if pid in self._keep:
            return pid == self.inner
        # without a namespace the runtime's helpers are among the members
        return bool(self.init) or not processes.is_helper(pid)

    def kill_commands(self, *, deadline_seconds: float = 5.0) -> bool:
        """Kills everything of the agent's but its shell."""
        return processes.kill_all(
            lambda: [pid for pid in self.payload() if pid != self.inner],
            deadline_seconds=deadline_seconds,
        )

    def stop(self, memory_bytes: int) -> None:
        """Ends the command: its processes, and the loop in which the shell would start more.

        The shell goes only when it is itself what fills the memory.
        """
        self.kill_commands()
        self.interrupt_shell()
        self.kill_commands()
        info = processes.snapshot().get(self.inner)
        if info is not None and info.resident_bytes > memory_bytes // 2:
            self.kill_shell()

    def interrupt_shell(self) -> None:
        """Asks the shell to leave a loop of its own."""
        if self.inner:
            processes.send(self.inner, signal.SIGUSR1)

    def kill_shell(self) -> None:
        """Kills the agent's shell; the outer one starts another."""
        if self.inner:
            processes.send(self.inner, signal.SIGKILL)

    def end(self) -> bool:
        """Ends the whole sandbox."""
        return processes.end_sandbox(self.scratch.path, token=self.scratch.token)


def resident_bytes(table: dict[int, ProcessInfo], pids: list[int]) -> int:
    """Resident memory; pages that processes share count for each of them."""
    return sum(table[pid].resident_bytes for pid in pids if pid in table)
