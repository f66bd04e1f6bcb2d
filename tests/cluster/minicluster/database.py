"""MariaDB on a Unix socket alone and slurmdbd on top of it: the cluster's accounting.

Knows how both start and what the cluster must be told once. Stopping is the caller's.
"""

import subprocess
from collections.abc import Callable
from pathlib import Path

from steps import BOOT_SECONDS, run, wait_until

ACCOUNT = "rl"
GRANTS = """\
CREATE DATABASE slurm_acct_db;
CREATE USER slurm@localhost IDENTIFIED BY 'slurm';
GRANT ALL ON slurm_acct_db.* TO slurm@localhost;
"""


def answers(argv: list[str], *, env: dict[str, str]) -> Callable[[], bool]:
    def ask() -> bool:
        done = subprocess.run(
            argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=60
        )
        return done.returncode == 0

    return ask


def start_mariadb(at: Path, *, env: dict[str, str]) -> None:
    data, sock = at / "mariadb", at / "run/mariadb.sock"
    run(
        [
            *("mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={data}"),
            *("--auth-root-authentication-method=socket", "--skip-test-db"),
            "--skip-name-resolve",
        ],
        env=env,
    )
    with (at / "log/mariadb.log").open("w") as log:
        subprocess.Popen(
            [
                *("mariadbd", "--no-defaults", "--user=root", f"--datadir={data}"),
                *(f"--socket={sock}", f"--pid-file={at}/run/mariadb.pid"),
                *("--skip-networking", "--skip-log-bin", "--innodb-buffer-pool-size=64M"),
                *("--innodb-log-file-size=32M", "--innodb-flush-log-at-trx-commit=0"),
                "--innodb-lock-wait-timeout=900",
            ],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    client = ["mariadb", "--no-defaults", "-S", str(sock), "-e"]
    wait_until(
        "MariaDB up",
        answers([*client, "SELECT 1"], env=env),
        log=at / "log/mariadb.log",
        seconds=BOOT_SECONDS,
    )
    run([*client, GRANTS], env=env)


def start(at: Path, *, env: dict[str, str], cluster: str, user: str) -> None:
    start_mariadb(at, env=env)
    # The client library inside slurmdbd takes the socket's place from this variable only.
    run(["slurmdbd"], env=env | {"MYSQL_UNIX_PORT": str(at / "run/mariadb.sock")})
    wait_until(
        "slurmdbd up",
        answers(["sacctmgr", "-n", "list", "cluster"], env=env),
        log=at / "log/slurmdbd.log",
        seconds=BOOT_SECONDS,
    )
    for change in (
        ["add", "cluster", cluster],
        ["add", "account", ACCOUNT, "description=rl", "organization=rl"],
        ["add", "user", user, f"account={ACCOUNT}"],
    ):
        run(["sacctmgr", "-i", *change], env=env)
