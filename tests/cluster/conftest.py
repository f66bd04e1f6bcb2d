"""Fixtures of the real components: a private Slurm and rootless Apptainer, as an ordinary user.

Knows how to get them on a machine where that is possible, and says plainly why where it isn't.
Only what is started here is ever stopped here.
"""

import getpass
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpc import ledger
from hpc.rundir import RunDirectory

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).resolve().parent / "minicluster"
USER = "prorl-tester"
AS_ROOT = [] if os.geteuid() == 0 else ["sudo", "-n", "--"]

Result = subprocess.CompletedProcess[str]


def execute(argv: list[str], *, timeout: float, cwd: Path | None = None) -> Result:
    return subprocess.run(
        argv,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout,
    )


def need(argv: list[str], *, timeout: float, what: str) -> str:
    """The command's output; the test is skipped, with the command's last words, when it fails."""
    try:
        done = execute(argv, timeout=timeout)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{what}: {Path(argv[0]).name} took more than {timeout:.0f} s")
    if done.returncode != 0:
        words = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        pytest.skip(f"{what}: {words}")
    return done.stdout


def poll(ready: Callable[[], object], *, what: str, timeout: float = 300.0) -> None:
    """Wait for a condition of the cluster; the failure names it."""
    deadline = time.monotonic() + timeout
    while not ready():
        assert time.monotonic() < deadline, f"not within {timeout:.0f} s: {what}"
        time.sleep(0.2)


@dataclass(frozen=True, kw_only=True)
class User:
    """The ordinary user that jobs and containers belong to."""

    name: str
    home: Path
    env: dict[str, str]
    """The whole environment of its commands; nothing of the tests' own environment leaks in."""

    def run(
        self,
        argv: list[str],
        *,
        timeout: float = 240.0,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
    ) -> Result:
        """Run a command as this user. Not checked: the caller looks at `returncode`."""
        pairs = [f"{key}={value}" for key, value in {**self.env, **(env or {})}.items()]
        become = (
            ["runuser", "-u", self.name, "--"]
            if os.geteuid() == 0
            else ["sudo", "-n", "-u", self.name, "--"]
        )
        # The directory is entered as the user: the tests' own may be closed to it.
        inner = f"cd {shlex.quote(str(cwd or self.home))} && exec {shlex.join(argv)}"
        return execute([*become, "env", "-i", *pairs, "bash", "-c", inner], timeout=timeout)

    def new_directory(self, name: str) -> Path:
        """A fresh directory of the user's own, below its home."""
        made = self.run(["mktemp", "-d", str(self.home / f"{name}.XXXXXX")])
        assert made.returncode == 0, made.stderr
        return Path(made.stdout.strip())


@pytest.fixture(scope="session")
def user() -> Iterator[User]:
    need([str(SCRIPTS / "make-user"), USER], timeout=300, what="no ordinary user to run as")
    base = Path(tempfile.mkdtemp(prefix="prorl-user-", dir="/var/tmp"))
    base.chmod(0o755)
    home = base / "home"
    home.mkdir()
    subprocess.run([*AS_ROOT, "chown", f"{USER}:", str(home)], check=True, timeout=180)
    env = {
        "HOME": str(home),
        "USER": USER,
        "LOGNAME": USER,
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{ROOT / '.venv/bin'}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
    }
    person = User(name=USER, home=home, env=env)
    check = person.run([str(ROOT / ".venv/bin/python"), "-c", "import hpc"])
    if check.returncode != 0:
        subprocess.run([*AS_ROOT, "rm", "-rf", str(base)], check=False, timeout=300)
        pytest.skip(f"{USER} can't run {ROOT}/.venv/bin/python; make the checkout readable by all")
    yield person
    # A container's work directory may hold entries without permissions; the user may change them.
    person.run(["chmod", "-R", "u+rwX", str(home)], timeout=300)
    subprocess.run([*AS_ROOT, "rm", "-rf", str(base)], check=False, timeout=300)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A private Slurm. Partitions: cpu, gpu, preemptible, urgent. Reservation: h100."""

    prefix: Path
    user: User
    nodes: tuple[str, ...]
    max_array_size: int

    @property
    def env(self) -> dict[str, str]:
        """What a command needs to talk to this cluster."""
        return {"SLURM_CONF": str(self.prefix / "etc/slurm.conf")}

    @property
    def cpu_nodes(self) -> tuple[str, ...]:
        return tuple(node for node in self.nodes if node.startswith("cn-"))

    @property
    def gpu_nodes(self) -> tuple[str, ...]:
        """The first one is the reservation h100; each has 8 GPUs."""
        return tuple(node for node in self.nodes if node.startswith("gn-"))

    def run(
        self,
        argv: list[str],
        *,
        as_user: bool = True,
        timeout: float = 240.0,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
    ) -> Result:
        """Run a command with this cluster's configuration, as the user or as root."""
        settings = {**self.env, **(env or {})}
        if as_user:
            return self.user.run(argv, timeout=timeout, cwd=cwd, env=settings)
        pairs = [f"{key}={value}" for key, value in settings.items()]
        return execute([*AS_ROOT, "env", *pairs, *argv], timeout=timeout, cwd=cwd)

    def sbatch(self, script: str, *options: str, cwd: Path | None = None) -> str:
        """Submit a bash script given as text; the job's id."""
        done = self.run(["sbatch", "--parsable", *options, "--wrap", script], cwd=cwd)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip().split(";")[0]

    def job(self, job_id: str) -> dict[str, str]:
        """What the controller says of a job, by scontrol's field names."""
        done = self.run(["scontrol", "-o", "show", "job", job_id])
        return dict(re.findall(r"(\S+?)=(\S*)", done.stdout.splitlines()[0] if done.stdout else ""))

    def state(self, job_id: str) -> str:
        return self.job(job_id).get("JobState", "UNKNOWN")

    def wait_for(self, job_id: str, *states: str, timeout: float = 300.0) -> None:
        poll(
            lambda: self.state(job_id) in states,
            what=f"job {job_id} in {' or '.join(states)}; it is {self.state(job_id)}",
            timeout=timeout,
        )

    def node_state(self, node: str) -> str:
        done = self.run(["sinfo", "-h", "-n", node, "-o", "%T"])
        return done.stdout.split()[0] if done.stdout.split() else "unknown"

    def stop_slurmd(self, node: str) -> None:
        """Kill the node's daemon; its jobs live on."""
        self._act("stop", node)

    def crash(self, node: str) -> None:
        """Kill the node's daemon and its jobs, as a power cut would."""
        self._act("crash", node)

    def start_slurmd(self, node: str) -> None:
        self._act("start", node)

    def cut(self, node: str) -> None:
        """The controller can't reach the node any more; the node's jobs live on."""
        self._act("cut", node)

    def heal(self, node: str) -> None:
        self._act("heal", node)

    def report(self) -> str:
        """Nodes and queue as they are now, for the message of a failed test."""
        parts = []
        for argv in (["sinfo", "-N", "-l"], ["squeue", "-a", "-r", "-o", "%i %j %T %r %N %S"]):
            done = self.run(argv)
            parts.append(f"$ {' '.join(argv)}\n{done.stdout}{done.stderr}".rstrip())
        return "\n".join(parts)

    def _act(self, action: str, node: str) -> None:
        script = [*AS_ROOT, "/usr/bin/python3", str(SCRIPTS / "cluster.py")]
        done = execute([*script, action, str(self.prefix), "--node", node], timeout=180)
        assert done.returncode == 0, done.stderr


def attempts(run: RunDirectory) -> str:
    """What became of every attempt of a run, one line each."""
    lines = ["attempts:"]
    for (job, index), history in ledger.fold(ledger.read(run.ledger)).items():
        for start in history.starts:
            end = history.exits.get(start.attempt)
            said = "no end" if end is None else f"{end.code}, {end.next}: {end.reason}"
            lines.append(
                f"  {job} {index} #{start.attempt} job {start.job_id} {start.host}: {said}"
            )
    return "\n".join(lines)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test shows the cluster, and what its run's jobs did, at the end of its report."""
    report = yield
    if report.failed and call.when == "call":
        funcargs = getattr(item, "funcargs", {})
        for name in ("cluster", "cluster_with_accounting"):
            if hasattr(funcargs.get(name), "report"):
                report.sections.append((name, funcargs[name].report()))
        run = getattr(funcargs.get("session"), "run", None)
        if isinstance(run, RunDirectory):
            report.sections.append(("attempts", attempts(run)))
    return report


def boot(user: User, prefix: Path, *options: str) -> Cluster:
    what = "no private Slurm cluster"
    need([str(SCRIPTS / "install-slurm")], timeout=1200, what=what)
    booted = need(
        [str(SCRIPTS / "up"), str(prefix), "--user", user.name, *options], timeout=700, what=what
    )
    nodes = re.search(r"^nodes: (.*)$", booted, re.MULTILINE)
    assert nodes is not None, booted
    conf = (prefix / "etc/slurm.conf").read_text()
    largest = re.search(r"^MaxArraySize=(\d+)$", conf, re.MULTILINE)
    assert largest is not None, conf
    return Cluster(
        prefix=prefix,
        user=user,
        nodes=tuple(nodes[1].split()),
        max_array_size=int(largest[1]),
    )


def cluster_prefix(name: str) -> Iterator[Path]:
    given = os.environ.get("PRORL_CLUSTER_PREFIX")
    base = Path(given) if given else Path(tempfile.mkdtemp(prefix="prorl-cluster-", dir="/var/tmp"))
    if not given:
        base.chmod(0o755)
    prefix = base / name
    try:
        yield prefix
    finally:
        if prefix.exists():
            execute([str(SCRIPTS / "down"), str(prefix)], timeout=300)
        if not given:
            subprocess.run([*AS_ROOT, "rm", "-rf", str(base)], check=False, timeout=300)


@pytest.fixture(scope="session")
def cluster(user: User) -> Iterator[Cluster]:
    """A running cluster without accounting, shared by the session's tests."""
    for prefix in cluster_prefix("plain"):
        yield boot(user, prefix)


@pytest.fixture(scope="session")
def cluster_with_accounting(user: User) -> Iterator[Cluster]:
    """A second cluster, with slurmdbd; it can run beside the first."""
    for prefix in cluster_prefix("accounting"):
        yield boot(user, prefix, "--accounting")


@dataclass(frozen=True, kw_only=True)
class Apptainer:
    """A rootless Apptainer and a small image of bash, coreutils, git, patch, python3 and pytest."""

    command: str
    user: User
    rootfs: Path
    """The image as a directory, owned by the user."""
    sif: Path
    """The same image as one file."""

    def run(
        self, argv: list[str], *, timeout: float = 240.0, env: dict[str, str] | None = None
    ) -> Result:
        """Run `apptainer -s ARGV` as the user."""
        return self.user.run([self.command, "-s", *argv], timeout=timeout, env=env)


@pytest.fixture(scope="session")
def apptainer(user: User) -> Apptainer:
    need([str(SCRIPTS / "install-apptainer")], timeout=900, what="no Apptainer")
    command = shutil.which("apptainer") or shutil.which("singularity") or ""
    images = user.new_directory("images")
    with tempfile.TemporaryDirectory(prefix="prorl-rootfs-", dir="/var/tmp") as scratch:
        Path(scratch).chmod(0o755)
        made = Path(scratch) / "rootfs"
        python = str(ROOT / ".venv/bin/python")
        need([str(SCRIPTS / "mk-rootfs"), str(made), python], timeout=600, what="no base image")
        assert user.run(["cp", "-a", str(made), str(images / "rootfs")]).returncode == 0
    ready = Apptainer(command=command, user=user, rootfs=images / "rootfs", sif=images / "base.sif")
    fast = ["--mksquashfs-args", "-comp zstd -Xcompression-level 3"]
    built = ready.run(["build", *fast, str(ready.sif), str(ready.rootfs)], timeout=600)
    started = ready.run(["exec", "--containall", "--cleanenv", str(ready.rootfs), "true"])
    for step in (built, started):
        if step.returncode != 0:
            words = (step.stderr.strip() or "no message").splitlines()[-1]
            pytest.skip(f"Apptainer can't run containers for {getpass.getuser()} here: {words}")
    return ready
