"""Puts a service together: engine, tasks, verifiers, store, socket. Knows how the parts fit.

In its directory: `jobs.sqlite`, `token` (0600) and `service.json` with the address, for clients on
the same file system. As a job (prorl_hpc.service.__main__) its chain of attempts goes on as long as
clients bring jobs.
"""

import asyncio
import functools
import logging
import os
import secrets
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import uvicorn

from hpc.allocation import Allocation, cpu_count
from hpc.endpoints import own_address
from hpc.errors import UserError
from hpc.files import publish
from hpc.scratch import OwnedDirectory
from prorl_hpc.agents.registry import make_agent
from prorl_hpc.agents.render import load_tokenizer
from prorl_hpc.inference.engine import Engine
from prorl_hpc.inference.http_pool import HttpPool
from prorl_hpc.inference.pool import make_engine
from prorl_hpc.policy import MANIFEST, verify_policy
from prorl_hpc.recipe import Recipe
from prorl_hpc.rollout.environments import open_environments
from prorl_hpc.rollout.pipeline import Parts
from prorl_hpc.rollout.scoring import VerifierPool
from prorl_hpc.rollout.serving import open_own
from prorl_hpc.rollout.versions import Versions
from prorl_hpc.run import Run
from prorl_hpc.service.app import make_app
from prorl_hpc.service.callbacks import Callbacks
from prorl_hpc.service.core import Core
from prorl_hpc.service.job import Where
from prorl_hpc.service.jobs import Bounds, Jobs
from prorl_hpc.service.store import JobStore, StoreError
from prorl_hpc.tasks.base import Task
from prorl_hpc.tasks.environment_task import MakeEnvironment
from prorl_hpc.tasks.registry import make_tasks

log = logging.getLogger("prorl_hpc.service")

FAREWELL_SECONDS = 10
PROGRESS_SECONDS = 30.0
LOADED = "loaded.json"


class ServeError(UserError, OSError):
    """The service can't listen where it was told to."""


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """What `loaded.json` holds: the policy that clients moved the service to."""

    version: int
    path: str
    start: str
    """The policy that the service was started with then."""
    format: int = 1


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """What `service.json` holds."""

    url: str
    pid: int
    format: int = 1


async def serve(recipe: Recipe, where: Where, *, allocation: Allocation | None = None) -> None:
    """Serves until SIGTERM, SIGINT or SIGUSR2. Raises UserError for what the user must mend.

    With an `allocation` the number of jobs ever posted is recorded as the job's progress.
    """
    where.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    callbacks = Callbacks(where.callback_hosts)
    private = where.socket_path is not None or where.open
    token = None if private else read_token(where.directory / "token")
    with listening(where) as (listener, url):
        async with AsyncExitStack() as stack:
            core = await _open_core(stack, recipe, where)
            store = JobStore(where.directory / "jobs.sqlite")
            stack.callback(store.close)
            rollout = recipe.rollout
            bounds = Bounds(
                capacity=rollout.run_workers + rollout.init_workers,
                max_retries=recipe.buffer.max_infrastructure_retries,
            )
            jobs = Jobs(store, produce=core.produce, bounds=bounds, notify=callbacks.notify)
            app = make_app(core, jobs, callbacks=callbacks, token=token)
            server = make_server(app)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
                asyncio.get_running_loop().add_signal_handler(number, server.leave)
            if allocation is not None:
                progress = asyncio.create_task(_record_progress(allocation, store))
                stack.callback(progress.cancel)
            address = Address(url=url, pid=os.getpid())
            publish(where.directory / "service.json", data=msgspec.json.encode(address), mode=0o600)
            print(f"serving {', '.join(recipe.tasks)} at {url}", flush=True)
            if token is not None:
                print(f"bearer token: {where.directory / 'token'}", flush=True)
            elif where.socket_path is None:
                print("no token: whoever can connect may post jobs", flush=True)
            await server.serve(sockets=[listener])


async def _record_progress(allocation: Allocation, store: JobStore) -> None:
    while True:
        try:
            await asyncio.to_thread(allocation.record_progress, float(store.num_added))
        except (OSError, StoreError) as err:  # a full disk: the chain needs the next one
            log.warning("progress can't be recorded: %s", err)
        await asyncio.sleep(PROGRESS_SECONDS)


def make_server(app: Any) -> "Server":
    """A server of the application that leaves signals to its owner."""
    return Server(
        uvicorn.Config(
            app,
            log_level="warning",
            timeout_graceful_shutdown=FAREWELL_SECONDS,
            lifespan="on",
            ws="none",
        )
    )


class Server(uvicorn.Server):
    """uvicorn that leaves signals to us: what is open must be closed after it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def leave(self) -> None:
        self.should_exit = True


@contextmanager
def listening(where: Where) -> Iterator[tuple[socket.socket, str]]:
    """A bound socket and the URL that clients use. Raises ServeError."""
    path = where.socket_path
    if path is None:
        family = socket.AF_INET6 if ":" in where.host else socket.AF_INET
        # asyncio turns Nagle's algorithm off only where the socket names its protocol; without
        # that small answers wait for delayed acknowledgements.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        target: str | tuple[str, int] = (where.host, where.port)
    else:
        listener = socket.socket(socket.AF_UNIX)
        target = str(path)
        if path.is_socket() and not _answers(path):
            path.unlink()  # of a service that was killed
    mask = os.umask(0o077)
    try:
        listener.bind(target)
    except OSError as err:
        listener.close()
        remedy = "give a shorter --socket" if "too long" in str(err) else "choose another one"
        raise ServeError(f"can't listen at {target}: {err}; {remedy}") from err
    finally:
        os.umask(mask)
    try:
        if path is not None:
            yield listener, f"unix:{path}"
        else:
            host = own_address() if where.host in ("0.0.0.0", "::") else where.host  # noqa: S104
            shown = f"[{host}]" if ":" in host else host
            yield listener, f"http://{shown}:{listener.getsockname()[1]}"
    finally:
        listener.close()
        if path is not None:
            path.unlink(missing_ok=True)


def read_token(path: Path) -> str:
    """The service's bearer token; made at the first start."""
    with suppress(FileNotFoundError):
        token = path.read_text().strip()
        if token:
            return token
    token = secrets.token_urlsafe(32)
    publish(path, data=token.encode(), mode=0o600)
    return token


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


async def _open_core(stack: AsyncExitStack, recipe: Recipe, where: Where) -> Core:
    tasks = make_tasks(recipe)
    tokenizer = await asyncio.to_thread(load_tokenizer, where.policy)
    agents = {
        n: make_agent(c, tokenizer=tokenizer, task=tasks.get(n)) for n, c in recipe.tasks.items()
    }
    make_environment = await asyncio.to_thread(_environments, stack, tasks)
    engine = _engine(recipe, where)
    stack.push_async_callback(engine.close)
    await engine.start()
    serving = open_own(stack, engine, Versions(engine, run=Run(where.directory)))
    scorer = VerifierPool(
        recipe.tasks,
        seed=recipe.seed,
        num_workers=min(recipe.rollout.eval_workers, max(cpu_count(), 1)),
    )
    stack.push_async_callback(scorer.close)
    return Core(
        Parts(
            recipe=recipe,
            tasks=tasks,
            agents=agents,
            tokenizer=tokenizer,
            engine=engine,
            versions=serving.versions,
            limits=serving.limits,
            scorer=scorer,
            make_environment=make_environment,
            worker=f"service-{os.getpid()}",
            attempt=1,
        ),
        loaded=functools.partial(remember, where),
    )


def _engine(recipe: Recipe, where: Where) -> Engine:
    if where.llm_servers:
        return HttpPool(version=0)
    policy = start_policy(where)
    version = 0
    if (policy / MANIFEST).is_file():
        version = verify_policy(policy).version
    return make_engine(recipe, path=policy, version=version)


def start_policy(where: Where) -> Path:
    """The policy that a predecessor had been moved to, where it is still there; else the given."""
    try:
        last = msgspec.json.decode((where.directory / LOADED).read_bytes(), type=Loaded)
    except (OSError, msgspec.DecodeError):
        return where.policy
    if last.start != str(where.policy):
        return where.policy  # the operator chose another one since
    if not (Path(last.path) / MANIFEST).is_file():
        print(f"{last.path} is gone; starting with {where.policy}", flush=True)
        return where.policy
    return Path(last.path)


def remember(where: Where, version: int, path: Path) -> None:
    """A successor starts with what clients have moved this service to."""
    last = Loaded(version=version, path=str(path), start=str(where.policy))
    publish(where.directory / LOADED, data=msgspec.json.encode(last))


def _environments(stack: AsyncExitStack, tasks: Mapping[str, Task]) -> MakeEnvironment | None:
    """Raises IsolationError, with the admin's fix, before the address is told to anybody."""
    scratch = os.environ.get("PRORL_SCRATCH") or stack.enter_context(OwnedDirectory.make("serve"))
    return open_environments(stack, tasks, Path(scratch) / "environments")
