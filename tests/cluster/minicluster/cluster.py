"""Boots and stops a private Slurm below one directory, without systemd. Runs as root.

Knows which daemons there are, in what order they start, and how to tell that each is up. Every
daemon is found again by its own pid file and nothing else is ever signalled.
Knows nothing of the tests.
"""

import argparse
import contextlib
import hashlib
import os
import random
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import config
import database
from steps import BOOT_SECONDS, ClusterError, run, wait_until

STOP_SECONDS = 15
CGROUPS = Path("/sys/fs/cgroup")
RESERVATION = "h100"


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, below the range that the kernel hands out by itself."""
    found: list[int] = []
    for port in random.sample(range(20_000, 32_000), 500):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise ClusterError(f"found no {count} free ports between 20000 and 32000")


def plan_layout(prefix: Path, *, accounting: bool) -> config.Layout:
    ports = free_ports(7)
    digest = hashlib.sha256(f"{prefix} {ports}".encode()).hexdigest()
    tag = "".join(chr(ord("a") + int(digit, 16)) for digit in digest[:4])
    version = re.search(r"(\d+)\.(\d+)", run(["slurmctld", "-V"]))
    if version is None:
        raise ClusterError("slurmctld -V names no version")
    hierarchies = [CGROUPS / name for name in ("freezer", "memory", "cpuset", "devices")]
    return config.Layout(
        prefix=prefix,
        host=socket.gethostname().split(".")[0],
        tag=tag,
        controller_port=ports[0],
        database_port=ports[1],
        node_ports=tuple(ports[2:]),
        slurm_version=(int(version[1]), int(version[2])),
        cgroup_v1=all(os.access(path, os.W_OK) for path in hierarchies),
        accounting=accounting,
    )


def lay_out(layout: config.Layout) -> None:
    at = layout.prefix
    for name in ("etc", "run", "log", "state", "spool", "dev"):
        (at / name).mkdir(parents=True, exist_ok=True)
        (at / name).chmod(0o755)
    at.chmod(0o755)
    for number in range(config.GPUS_PER_NODE):
        device = at / "dev" / f"nvidia{number}"
        os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        device.chmod(0o666)
    (at / "etc/slurm.conf").write_text(config.slurm_conf(layout))
    (at / "etc/gres.conf").write_text(config.gres_conf(layout))
    (at / "etc/cgroup.conf").write_text(config.cgroup_conf(layout))
    (at / "etc/nodes").write_text("".join(f"{node}\n" for node in layout.nodes))
    secret(at / "etc/slurmdbd.conf", config.slurmdbd_conf(layout).encode())
    secret(at / "etc/munge.key", os.urandom(1024))


def secret(path: Path, data: bytes) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)


def client_env(prefix: Path) -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    env["PATH"] = f"{env.get('PATH', '/usr/bin:/bin')}:/usr/sbin:/sbin"
    return env | {"SLURM_CONF": str(prefix / "etc/slurm.conf")}


def start_munged(at: Path) -> None:
    run(
        [
            "munged",
            "--force",
            f"--key-file={at}/etc/munge.key",
            f"--socket={at}/run/munge.socket",
            f"--pid-file={at}/run/munged.pid",
            f"--log-file={at}/log/munged.log",
            f"--seed-file={at}/run/munged.seed",
        ]
    )


def start_slurmd(prefix: Path, node: str) -> None:
    (prefix / "spool" / node).mkdir(exist_ok=True)
    run(["slurmd", "-N", node, "-f", f"{prefix}/etc/slurm.conf"], env=client_env(prefix))


def up(prefix: Path, *, user: str, accounting: bool) -> config.Layout:
    down(prefix)
    for name in ("etc", "run", "state", "spool", "dev", "mariadb"):
        shutil.rmtree(prefix / name, ignore_errors=True)
    layout = plan_layout(prefix, accounting=accounting)
    lay_out(layout)
    env = client_env(prefix)
    start_munged(prefix)
    if accounting:
        database.start(prefix, env=env, cluster=f"prorl{layout.tag}", user=user)
    run(["slurmctld", "-c", "-f", f"{prefix}/etc/slurm.conf"], env=env)
    for node in layout.nodes:
        start_slurmd(prefix, node)

    def all_idle() -> bool:
        states = run(["sinfo", "-h", "-N", "-o", "%N %t"], env=env, check=False)
        return {line for line in states.splitlines() if line.endswith(" idle")} == {
            f"{node} idle" for node in layout.nodes
        }

    wait_until("all nodes idle", all_idle, log=prefix / "log/slurmctld.log", seconds=BOOT_SECONDS)
    run(
        [
            *("scontrol", "create", "reservation", f"reservationname={RESERVATION}"),
            *("starttime=now", "duration=UNLIMITED"),
            *(f"users=root,{user}", f"nodes={layout.gpu_nodes[0]}"),
        ],
        env=env,
    )
    return layout


def state_of(pid: int) -> str | None:
    """The process's state letter; None for one that is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state = text.rpartition(")")[2].split()[0]
    return None if state in "ZX" else state


def stop_daemon(pid_file: Path, name: str) -> None:
    """End the daemon whose pid the file holds, if that process still is this daemon."""
    try:
        pid = int(pid_file.read_text())
        if name not in Path(f"/proc/{pid}/cmdline").read_text():
            return
    except (OSError, ValueError):
        return
    # A stopped process would never act on the first signal.
    for number, seconds in (
        (signal.SIGCONT, 0),
        (signal.SIGTERM, STOP_SECONDS),
        (signal.SIGKILL, 5),
    ):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            break
        deadline = time.monotonic() + seconds
        while state_of(pid) and time.monotonic() < deadline:
            time.sleep(0.05)
    pid_file.unlink(missing_ok=True)


def nodes_of(prefix: Path) -> list[str]:
    file = prefix / "etc/nodes"
    return file.read_text().split() if file.exists() else []


def job_processes(node: str) -> tuple[list[int], list[int]]:
    """Pids of a node's slurmstepd processes and of the jobs below them.

    A job's process carries the node's name in its environment, and node names are unique to a
    cluster; its slurmstepd is the nearest ancestor of that name.
    """
    steps: set[int] = set()
    jobs: set[int] = set()
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if f"SLURMD_NODENAME={node}".encode() not in (directory / "environ").read_bytes().split(
                b"\0"
            ):
                continue
            pid = int(directory.name)
            jobs.add(pid)
            while pid > 1 and Path(f"/proc/{pid}/comm").read_text().strip() != "slurmstepd":
                pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if pid > 1:
            steps.add(pid)
    return sorted(steps), sorted(jobs - steps)


def kill_jobs(node: str) -> None:
    steps, jobs = job_processes(node)
    for pid in (*steps, *jobs):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def signal_slurmd(prefix: Path, node: str, number: int) -> None:
    os.kill(int((prefix / f"run/slurmd-{node}.pid").read_text()), number)


def kill_slurmd(prefix: Path, node: str) -> None:
    """As a crash of the daemon alone: the node's jobs live on."""
    pid_file = prefix / f"run/slurmd-{node}.pid"
    pid = int(pid_file.read_text())
    os.kill(pid, signal.SIGKILL)
    wait_until("slurmd gone", lambda: state_of(pid) is None, log=pid_file, seconds=STOP_SECONDS)
    pid_file.unlink(missing_ok=True)


def down(prefix: Path) -> None:
    """Cancel every job, stop every daemon, and remove what the cgroups left behind."""
    pids = prefix / "run"
    if (pids / "slurmctld.pid").exists():
        for argv in (["--state=PENDING"], ["-s", "KILL", "--state=RUNNING"]):
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(
                    ["scancel", *argv], env=client_env(prefix), capture_output=True, timeout=60
                )
    for node in nodes_of(prefix):
        stop_daemon(pids / f"slurmd-{node}.pid", "slurmd")
        kill_jobs(node)
    for name in ("slurmctld", "slurmdbd", "mariadb", "munged"):
        stop_daemon(pids / f"{name}.pid", name)
    for node in nodes_of(prefix):
        for leftover in CGROUPS.glob(f"*/slurm_{node}"):
            for directory in (*sorted(leftover.rglob("*/"), reverse=True), leftover):
                with contextlib.suppress(OSError):
                    directory.rmdir()


def act_on_node(options: argparse.Namespace) -> None:
    prefix, node = options.prefix, options.node
    if node not in nodes_of(prefix):
        raise ClusterError(f"no node {node!r} in {prefix}; it has {', '.join(nodes_of(prefix))}")
    if options.action == "start":
        start_slurmd(prefix, node)
    elif options.action == "stop":
        kill_slurmd(prefix, node)
    elif options.action == "crash":
        kill_slurmd(prefix, node)
        kill_jobs(node)
    else:
        signal_slurmd(prefix, node, signal.SIGSTOP if options.action == "cut" else signal.SIGCONT)


def main() -> int:
    parser = argparse.ArgumentParser(prog="minicluster", description="A private Slurm on one host.")
    parser.add_argument(
        "action",
        choices=["up", "down", "start", "stop", "crash", "cut", "heal"],
        help="up, down: the cluster. start: a node's slurmd. stop: kill it, its jobs live on. "
        "crash: kill it with its jobs. cut, heal: the controller loses the node, finds it again",
    )
    parser.add_argument("prefix", type=lambda text: Path(text).absolute())
    parser.add_argument("--node", default="")
    parser.add_argument("--user", default="prorl-tester")
    parser.add_argument("--accounting", action="store_true")
    options = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("must run as root")
    try:
        if options.action == "up":
            layout = up(options.prefix, user=options.user, accounting=options.accounting)
            print(f"nodes: {' '.join(layout.nodes)}")
            print(f"export SLURM_CONF={options.prefix}/etc/slurm.conf")
        elif options.action == "down":
            down(options.prefix)
        else:
            act_on_node(options)
    except (ClusterError, OSError, ValueError, subprocess.TimeoutExpired) as err:
        print(f"minicluster: {err}", file=sys.stderr)
        if options.action == "up":
            down(options.prefix)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
