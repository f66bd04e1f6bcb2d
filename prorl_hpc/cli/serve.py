"""`prorl-hpc serve`: rollouts of a recipe's tasks over HTTP, for any trainer."""

import argparse
import dataclasses
from pathlib import Path

from hpc.errors import UserError
from hpc.site import Backend
from prorl_hpc.choices import InferencePlacement
from prorl_hpc.recipe import Recipe, site_of
from prorl_hpc.run import Run
from prorl_hpc.service.allowed import check_host
from prorl_hpc.service.job import Where, write_where

EPILOG = """\
  prorl-hpc serve recipe=logic model.path=/models/qwen --port 8006
  prorl-hpc serve recipe=logic --policy runs/logic/policy/v00000120 --socket /tmp/me/rollouts
  prorl-hpc serve recipe=logic --policy DIR --llm-servers     servers come by /add_llm_server
  prorl-hpc serve recipe=logic --policy DIR site=mycluster --submit    as a job of the cluster

docs/rollout-service.md describes the routes and a complete external trainer.
"""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Serve rollouts of a recipe's tasks over HTTP until stopped.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="recipe=NAME and more")
    parser.add_argument("--recipe-dir", type=Path, metavar="DIR")
    parser.add_argument("--policy", type=Path, metavar="DIR", help="model directory to start with")
    parser.add_argument(
        "--dir", type=Path, metavar="DIR", help="jobs, token, address (RUN_ROOT/NAME-service)"
    )
    parser.add_argument(
        "--host", help="interface to listen on (127.0.0.1; as a job on Slurm 0.0.0.0)"
    )
    parser.add_argument("--port", type=int, default=0, help="0: any free one (default)")
    parser.add_argument("--socket", type=Path, metavar="PATH", help="a Unix socket instead of TCP")
    parser.add_argument(
        "--llm-servers", action="store_true", help="no engine here; clients add inference servers"
    )
    parser.add_argument(
        "--no-token", action="store_true", help="whoever can connect may ask (ProRL v1 clients)"
    )
    parser.add_argument(
        "--callback-host",
        action="append",
        default=[],
        metavar="HOST[:PORT]",
        help="a host that callback_url may name (none unless given; repeatable)",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--submit", action="store_true", help="as a job of the site, not in here")
    how.add_argument("--dry-run", action="store_true", help="write the job's script only")
    return parser


def run(args: argparse.Namespace) -> int:
    from prorl_hpc.cli.submit import compose_recipe

    recipe = compose_recipe(args.overrides, recipe_dir=args.recipe_dir, name=None)
    where = _where(args, recipe)
    if args.submit or args.dry_run:
        return _as_job(args, recipe, where)
    return _here(recipe, where)


def _where(args: argparse.Namespace, recipe: Recipe) -> Where:
    own_jobs = recipe.inference.placement is InferencePlacement.own_jobs
    if own_jobs and not args.llm_servers:
        raise UserError(
            "inference.placement=own_jobs: a service starts no inference jobs; set "
            "inference.placement=rollout_nodes, or bring servers with --llm-servers"
        )
    policy = args.policy or (Path(recipe.model.path) if recipe.model.path else None)
    if policy is None or not (policy / "config.json").is_file():
        raise UserError(
            f"no model to serve: {policy or 'model.path is null'}; give --policy DIR or "
            "model.path=DIR, a directory with config.json and tokenizer"
        )
    if not 0 <= args.port < 65536:
        raise UserError(f"--port {args.port} is outside 0..65535")
    for text in args.callback_host:
        check_host(text)
    on_cluster = (args.submit or args.dry_run) and site_of(recipe).backend is Backend.slurm
    return Where(
        directory=(args.dir or Path(recipe.run_root) / f"{recipe.name}-service").resolve(),
        policy=policy.resolve(),
        socket_path=args.socket.resolve() if args.socket else None,
        host=args.host or ("0.0.0.0" if on_cluster else "127.0.0.1"),  # noqa: S104
        port=args.port,
        llm_servers=args.llm_servers,
        open=args.no_token,
        callback_hosts=tuple(args.callback_host),
    )


def _here(recipe: Recipe, where: Where) -> int:
    import asyncio

    from prorl_hpc.inference.engine import EngineError

    try:
        from prorl_hpc.service.serve import serve
    except ImportError as err:
        raise UserError(f"package {err.name!r} is missing; pip install 'prorl-hpc[serve]'") from err
    try:
        asyncio.run(serve(recipe, where))
    except EngineError as err:
        raise UserError(f"the engine can't start: {err}") from err
    return 0


def _as_job(args: argparse.Namespace, recipe: Recipe, where: Where) -> int:
    from hpc.prepare import check, check_cluster
    from hpc.submit import launch
    from prorl_hpc.cli.freeze import Frozen, freeze, submit_lock
    from prorl_hpc.cli.inputs import check_name
    from prorl_hpc.cli.submit import describe
    from prorl_hpc.planner import make_service_plan
    from prorl_hpc.provenance import provenance

    run_ = Run(where.directory)
    recipe = dataclasses.replace(recipe, name=check_name(run_.name))
    site = site_of(recipe)
    plan = make_service_plan(recipe, site, run_directory=run_.root)
    check(plan, site)
    frozen = Frozen(
        recipe=recipe,
        site=site,
        plan=plan,
        provenance=provenance(args.argv, overrides=args.overrides),
    )
    print(describe(plan, site))
    with submit_lock(run_):
        if args.submit and site.backend is Backend.slurm:
            check_cluster(plan, site)
        freeze(run_, frozen)  # refuses a directory that holds another run
        write_where(run_, where)
        if args.dry_run:
            print(f"\ndry run: nothing was started; sbatch {run_.script('service')} does")
            return 0
        launch(run_.root, plan, site)
    print(
        f"\nthe address will be in {run_.root / 'service.json'}\n"
        f"next: prorl-hpc logs {run_.root} rollout; prorl-hpc cancel {run_.root}"
    )
    return 0
