"""The loop that keeps the processes of one run on one machine. Knows no learning.

Decisions about what follows an end are those of `hpc.attempts`, recorded by the scripts
themselves; the supervisor records them for a script that was killed.
"""

import errno
import logging
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field

from hpc import ledger, slurm
from hpc.attempts import Next, restart_delay_seconds
from hpc.context import LOCAL
from hpc.groups import Guardian, kill_group, start_guardian
from hpc.plan import Job, Plan
from hpc.prepare import finished_indexes, indexes_of, peers, unfinished
from hpc.rundir import RunDirectory
from hpc.site import Site
from hpc.task import Phase, Task, outcome, record_cancel, unrecorded
from hpc.wakeup import Wakeup

log = logging.getLogger("hpc.supervisor")

LINGER_SECONDS = 60.0
"""Time that the other jobs of a run get to end by themselves; `site.extra.linger_seconds`."""

KILL_MARGIN_SECONDS = 10.0
"""Beyond the grace time, within which the script itself kills a command that hangs."""

STEADY_SECONDS = 30.0
"""An attempt that lived this long starts the back-off anew."""

PASSING = frozenset(
    {errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT}
)
"""What keeps a process from being started for a while: the machine or the disk is full."""


@dataclass(kw_only=True, slots=True)
class Supervisor:
    """All tasks of a run and their processes."""

    run: RunDirectory
    plan: Plan
    site: Site
    tasks: list[Task] = field(default_factory=list)
    stopping: str = ""
    linger_until: dict[frozenset[str], float] = field(default_factory=dict)
    guardian: Guardian | None = None
    counter: int = 0

    def enlist(self, now: float) -> None:
        """Takes up what the run still needs, in start order, and records it."""
        wanted = {job.name: indexes_of(self.run, job) for job in self.plan.jobs}
        needed = unfinished(self.plan, finished=finished_indexes(self.run), wanted=wanted)
        for job in self.plan.ordered():
            self._enlist_job(job, needed[job.name], now=now)

    def _enlist_job(self, job: Job, indexes: tuple[int, ...], *, now: float) -> None:
        if not indexes:
            return
        entry = ledger.Submit(
            time=now,
            job=job.name,
            token="",
            job_id=f"{LOCAL}{os.getpid()}",
            indexes=None if job.array_size is None else ledger.format_indexes(indexes),
        )
        ledger.append(self.run.ledger, entry=entry)
        self.tasks += [self._task(job, index) for index in indexes]

    def _task(self, job: Job, index: int) -> Task:
        number, array_task = divmod(index, self.site.max_array_size)
        name = job.name if number == 0 else f"{job.name}.chunk-{number}"
        return Task(job=job, index=index, script=self.run.script(name), array_task=array_task)

    def serve(self) -> int:
        """Runs until every task is over; 0 when all that had to be done was done."""
        grace = max((task.job.grace_seconds for task in self.tasks), default=0)
        self.guardian = start_guardian(grace_seconds=grace + KILL_MARGIN_SECONDS)
        with Wakeup(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD) as wakeup:
            while True:
                now = time.monotonic()
                self._reap(now)
                self._end_peers(now)
                self._start_next(now)
                self._timers(now)
                if all(task.over for task in self.tasks):
                    break
                for number in wakeup.wait(self._next_timer() - time.monotonic()):
                    self._signalled(number)
        self.guardian.dismiss()
        return 1 if any(task.phase is Phase.failed for task in self.tasks) else 0

    def _signalled(self, number: int) -> None:
        if number in (signal.SIGTERM, signal.SIGINT):
            self._stop_all()
        elif number == signal.SIGHUP:
            self._rescale()

    def _stop_all(self) -> None:
        cancelled = self.run.stop_request.exists()
        self.stopping = "the run was cancelled" if cancelled else "the supervisor was ended"
        for task in self.tasks:
            self._stop(task, reason=self.stopping)

    def _rescale(self) -> None:
        """Follows the sizes that `scale` wrote."""
        for job in self.plan.jobs:
            if job.array_size is None or self.stopping:
                continue
            wanted = set(indexes_of(self.run, job))
            for task in self.tasks:
                if task.job.name != job.name:
                    continue
                if task.index not in wanted:
                    self._stop(task, reason=f"scaled down to {len(wanted)}")
                elif task.phase is Phase.running:
                    task.stop_reason = ""  # wanted again before it had ended
            kept = {
                task.index
                for task in self.tasks
                if task.job.name == job.name and task.phase is not Phase.stopped
            }
            new = wanted - kept
            self.tasks = [
                task
                for task in self.tasks
                if not (task.job.name == job.name and task.over and task.index in new)
            ]
            self._enlist_job(job, tuple(sorted(new)), now=time.time())
            log.info("%s: wanted %d tasks, %d new", job.name, len(wanted), len(new))

    def _start_next(self, now: float) -> None:
        """Starts one task that is due: signals and requests to stop are heard before the next."""
        due = (task for task in self.tasks if task.phase is Phase.waiting and task.due <= now)
        task = next(due, None)
        if task is None:
            return
        if self.run.stop_request.exists():
            self._stop_all()
        else:
            self._start(task, now)

    def _start(self, task: Task, now: float) -> None:
        self.counter += 1
        task.token = f"{LOCAL}{os.getpid()}-{self.counter}"
        environment = slurm.scrubbed(os.environ)
        environment.setdefault("OMP_NUM_THREADS", "1")
        environment["PRORL_JOB_ID"] = task.token
        if task.job.array_size is not None:
            environment["PRORL_TASK"] = str(task.array_task)
        try:
            task.process = self._process(task, environment)
        except OSError as err:
            if err.errno not in PASSING:
                raise
            task.failures += 1
            task.due = now + restart_delay_seconds(task.failures)
            log.warning("%s[%d] can't be started yet: %s", task.job.name, task.index, err)
            return
        assert self.guardian is not None
        self.guardian.add(task.process.pid)
        task.phase = Phase.running
        task.started = now
        seconds = 60.0 * task.job.resources.walltime_minutes
        task.warn_at = now + seconds - task.job.grace_seconds
        task.kill_at = now + seconds + KILL_MARGIN_SECONDS
        log.info("%s[%d] started as process %d", task.job.name, task.index, task.process.pid)

    def _process(self, task: Task, environment: dict[str, str]) -> "subprocess.Popen[bytes]":
        path = self.run.logs / task.job.role / f"local-{task.index}.out"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as output:
            return subprocess.Popen(
                ["bash", str(task.script)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=environment,
                cwd=self.run.root,
            )

    def _stop(self, task: Task, *, reason: str) -> None:
        """SIGTERM once; the timer kills the group after the grace time."""
        if task.phase is Phase.waiting:
            task.phase = Phase.stopped
            self._note_stop(task, reason=reason)
        elif task.phase is Phase.running and not task.stop_reason:
            assert task.process is not None
            task.stop_reason = reason
            task.process.send_signal(signal.SIGTERM)
            grace = task.job.grace_seconds + KILL_MARGIN_SECONDS
            task.kill_at = min(task.kill_at, time.monotonic() + grace)

    def _timers(self, now: float) -> None:
        for task in self.tasks:
            if task.phase is not Phase.running or task.process is None:
                continue
            if task.warn_at <= now:
                task.warn_at = float("inf")
                task.process.send_signal(signal.SIGUSR2)
            if task.kill_at <= now:
                log.info("%s[%d] hangs: killed", task.job.name, task.index)
                kill_group(task.process.pid, number=signal.SIGKILL)
                task.kill_at = now + 1.0

    def _next_timer(self) -> float:
        times = [min(task.warn_at, task.kill_at) for task in self.tasks if task.process is not None]
        times += [task.due for task in self.tasks if task.phase is Phase.waiting]
        times += list(self.linger_until.values())
        return min(times, default=float("inf"))

    def _reap(self, now: float) -> None:
        for task in self.tasks:
            process = task.process
            if process is None:
                continue
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            if os.waitid(os.P_PID, process.pid, flags) is None:
                continue
            kill_group(process.pid, number=signal.SIGKILL)  # what the script left behind
            process.wait()
            assert self.guardian is not None
            self.guardian.remove(process.pid)
            task.process = None
            self._ended(task, returncode=process.returncode, now=now)

    def _ended(self, task: Task, *, returncode: int, now: float) -> None:
        code = 128 - returncode if returncode < 0 else returncode
        try:
            follows, reason = outcome(self.run, self.site, task, code=code)
        except OSError as err:  # a full disk: go on without the record
            follows, reason = unrecorded(task, code=code), f"not recorded: {err}"
        log.info("%s[%d] ended with %d: %s (%s)", task.job.name, task.index, code, follows, reason)
        if follows is Next.finished:
            task.phase = Phase.finished
        elif follows in (Next.cancelled, Next.again) and not self._wanted(task):
            task.phase = Phase.stopped
            if follows is Next.again:
                reason = task.stop_reason or self.stopping or "the run was cancelled"
                self._note_stop(task, reason=reason)
        elif follows in (Next.cancelled, Next.again):
            steady = now - task.started >= STEADY_SECONDS
            task.failures = 0 if steady else task.failures + 1
            task.due = now + restart_delay_seconds(task.failures - 1 if task.failures else 0)
            task.phase = Phase.waiting
        else:
            task.phase = Phase.failed
        task.warn_at = task.kill_at = float("inf")

    def _note_stop(self, task: Task, *, reason: str) -> None:
        try:
            record_cancel(self.run, task, reason=reason)
        except OSError as err:  # a full disk: the others are to be stopped all the same
            log.warning("%s[%d]: %s; not recorded: %s", task.job.name, task.index, reason, err)

    def _wanted(self, task: Task) -> bool:
        """Whether another attempt is wanted now; `scale` may have changed that meanwhile."""
        stopped = task.stop_reason or self.stopping or self.run.stop_request.exists()
        return not stopped and task.index in indexes_of(self.run, task.job)

    def _end_peers(self, now: float) -> None:
        """Ends the jobs that work with one that is over, after time to end by themselves."""
        linger = float(self.site.extra.get("linger_seconds", LINGER_SECONDS))
        for job in self.plan.jobs:
            group = frozenset(peers(self.plan, job))
            if len(group) > 1 and group not in self.linger_until and self._ends_group(job):
                self.linger_until[group] = now + linger
        for group, until in self.linger_until.items():
            for task in self.tasks:
                if task.job.name not in group or task.over:
                    continue
                if task.phase is Phase.waiting:
                    self._stop(task, reason="the run is over")
                elif until <= now:
                    self._stop(task, reason="the run is over; it didn't end by itself")
            if until <= now:
                self.linger_until[group] = float("inf")

    def _ends_group(self, job: Job) -> bool:
        """A job that failed ends its peers; so does a plain job that finished as the last one.

        The last one is a plain job after which no other plain job starts: the buffer of a run
        may be done before its learner is, not the other way round.
        """
        tasks = [task for task in self.tasks if task.job.name == job.name]
        ended = [task for task in tasks if task.phase in (Phase.finished, Phase.failed)]
        if not tasks or len(ended) < len(tasks):
            return False
        if all(task.phase is Phase.failed for task in tasks):
            return True
        last = not any(job.name in other.after and other.array_size is None
                       for other in self.plan.jobs)  # fmt: skip
        return job.array_size is None and last
