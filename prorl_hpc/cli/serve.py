"""`prorl-hpc serve`: rollouts of a recipe's tasks over HTTP, for any trainer."""

import argparse
from pathlib import Path

from hpc.errors import UserError

EPILOG = """\
  prorl-hpc serve recipe=logic model.path=/models/qwen --port 8006
  prorl-hpc serve recipe=logic --policy runs/logic/policy/v00000120 --socket /tmp/me/rollouts
  prorl-hpc serve recipe=logic --policy DIR --llm-servers     servers come by /add_llm_server

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
    parser.add_argument("--host", default="127.0.0.1", help="interface to listen on")
    parser.add_argument("--port", type=int, default=0, help="0: any free one (default)")
    parser.add_argument("--socket", type=Path, metavar="PATH", help="a Unix socket instead of TCP")
    parser.add_argument(
        "--llm-servers", action="store_true", help="no engine here; clients add inference servers"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    import asyncio

    from prorl_hpc.cli.submit import compose_recipe
    from prorl_hpc.inference.engine import EngineError

    recipe = compose_recipe(args.overrides, recipe_dir=args.recipe_dir, name=None)
    policy = args.policy or (Path(recipe.model.path) if recipe.model.path else None)
    if policy is None or not (policy / "config.json").is_file():
        raise UserError(
            f"no model to serve: {policy or 'model.path is null'}; give --policy DIR or "
            "model.path=DIR, a directory with config.json and tokenizer"
        )
    if not 0 <= args.port < 65536:
        raise UserError(f"--port {args.port} is outside 0..65535")
    try:
        from prorl_hpc.service.serve import Where, serve
    except ImportError as err:
        raise UserError(f"package {err.name!r} is missing; pip install 'prorl-hpc[serve]'") from err
    where = Where(
        directory=(args.dir or Path(recipe.run_root) / f"{recipe.name}-service").resolve(),
        policy=policy.resolve(),
        socket_path=args.socket.resolve() if args.socket else None,
        host=args.host,
        port=args.port,
        llm_servers=args.llm_servers,
    )
    try:
        asyncio.run(serve(recipe, where))
    except EngineError as err:
        raise UserError(f"the engine can't start: {err}") from err
    return 0
