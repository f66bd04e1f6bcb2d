"""What must hold for every backend: a suite that pytest runs here, and any user runs as a script.

    python checks.py BACKEND IMAGE NAME     (IMAGE "-": none) exit 0 when the check holds

Needs the standard library alone. `destructive` checks attack their own sandbox and may run only
inside one, as an ordinary user.
"""

import asyncio
import os
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
if __name__ == "__main__":
    sys.path.insert(0, str(REPOSITORY))

from prorl_hpc.environment import Backend  # noqa: E402
from tests.prorl_hpc.environment import (  # noqa: E402
    checks_attacks,
    checks_isolation,
    checks_shell,
)
from tests.prorl_hpc.environment.bench import (  # noqa: E402
    APPTAINER,
    CHECKS,
    DESTRUCTIVE,
    ISOLATING,
    Bench,
    Check,
)

__all__ = ["ALL", "APPTAINER", "CHECKS", "DESTRUCTIVE", "ISOLATING", "run_check"]

ALL = CHECKS | ISOLATING | DESTRUCTIVE


# importing them registers their checks
MODULES = (checks_attacks, checks_isolation, checks_shell)


def run_check(function: Check, *, backend: Backend, image: Path | None, root: Path) -> None:
    """Runs one check with a factory of its own."""

    async def inside() -> None:
        bench = Bench(backend, image, root)
        try:
            await function(bench)
        finally:
            bench.factory.close()
        assert list(bench.scratch.iterdir()) == []

    asyncio.run(inside())


def main(arguments: list[str]) -> None:
    backend, image, name, *rest = arguments
    chosen = Backend(backend), None if image == "-" else Path(image)
    if name == "worker":
        run_check(
            checks_isolation.be_a_worker, backend=chosen[0], image=chosen[1], root=Path(rest[0])
        )
        return
    if os.geteuid() == 0 and name in DESTRUCTIVE:
        sys.exit(f"{name} is destructive: run it as an ordinary user")
    with tempfile.TemporaryDirectory(prefix="prorl-check-", dir="/var/tmp") as root:
        known = ALL | APPTAINER | {"the_kernel_limits_it": checks_attacks.the_kernel_limits_it}
        run_check(known[name], backend=chosen[0], image=chosen[1], root=Path(root))


if __name__ == "__main__":
    main(sys.argv[1:])
