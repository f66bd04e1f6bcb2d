"""report.html of a run: one self-contained page of curves and tables. Only `collect` reads."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from prorl_hpc.observe.chart import Mark, Series, line_chart
from prorl_hpc.observe.history import History, number, read_history
from prorl_hpc.recipe import Recipe, load_recipe
from prorl_hpc.run import Run

STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:1380px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin:0}h2{font-size:1.1rem;margin:2rem 0 .5rem}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,520px),1fr));gap:1.2rem}
figure{margin:0}figcaption{font-weight:600}
svg{width:100%;height:auto}polyline{stroke-width:1.8;stroke-linejoin:round}
.grid{stroke:#8884;stroke-width:1}.mark{stroke:#b3324a;stroke-dasharray:4 3;stroke-width:1.2}
.tick{font-size:11px;fill:currentColor}.empty{opacity:.7}
table{border-collapse:collapse}td,th{padding:.2rem .9rem .2rem 0;text-align:left;vertical-align:top}
td.n,th.n{text-align:right}pre{overflow:auto;padding:.8rem;background:#8881}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportData:
    """What the page shows."""

    name: str
    directory: str
    recipe: Recipe
    recipe_text: str
    history: History
    provenance: dict[str, Any]


def collect(run: Run) -> ReportData:
    """Reads what the report needs; raises RecipeError when the run has no readable recipe."""
    try:
        provenance = json.loads(run.provenance.read_text())
    except (OSError, ValueError):
        provenance = {}
    return ReportData(
        name=run.name,
        directory=str(run.root),
        recipe=load_recipe(run.recipe),
        recipe_text=run.recipe.read_text(),
        history=read_history(run),
        provenance=provenance if isinstance(provenance, dict) else {},
    )


def render_report(data: ReportData) -> str:
    """The page; needs no network and no script."""
    history = data.history
    done = history.steps[-1]["step"] if history.steps else 0
    resets = len(history.resets)
    counted = f"{resets} reference reset{'' if resets == 1 else 's'} (dashed)"
    body = [
        f"<h1>{escape(data.name)}</h1>",
        f"<p>step {done} of {data.recipe.steps}; {counted}; {escape(data.directory)}</p>",
        '<div class="charts">',
        *_charts(history),
        "</div>",
        "<h2>Validation</h2>",
        _validation_table(history),
        "<h2>Reference resets</h2>",
        _reset_table(history),
        "<h2>Where this run came from</h2>",
        _facts(data.provenance),
        f"<details><summary>Recipe</summary><pre>{escape(data.recipe_text)}</pre></details>",
    ]
    return html_page(f"{data.name}: report", body)


def _charts(history: History) -> list[str]:
    marks = [Mark(x=reset.step, label=f"reset: {reset.reason}") for reset in history.resets]
    charts = [
        ("Validation score", _validation_series(history)),
        ("Training reward", [Series(name="reward", points=history.curve("reward"))]),
        ("KL to the reference, per token", [Series(name="KL", points=history.curve("kl"))]),
        ("Entropy", [Series(name="entropy", points=history.curve("entropy"))]),
        (
            "Response length, tokens",
            [Series(name="tokens", points=history.curve("response_tokens"))],
        ),
        ("Staleness, versions", [Series(name="staleness", points=history.curve("staleness"))]),
        ("Learner, tokens/s", [Series(name="t/s", points=history.curve("tokens_per_second"))]),
        ("Gradient norm", [Series(name="norm", points=history.curve("gradient_norm"))]),
    ]
    return [
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f"{line_chart(title, series, marks=marks)}</figure>"
        for title, series in charts
    ]


def _validation_series(history: History) -> list[Series]:
    tasks = sorted({task for one in history.validations for task in one.by_task})
    series = [
        Series(
            name="blended",
            points=tuple((float(one.step), one.score) for one in history.validations),
        )
    ]
    if len(tasks) > 1:
        series += [
            Series(
                name=task,
                points=tuple((float(v.step), v.by_task.get(task)) for v in history.validations),
            )
            for task in tasks[:5]
        ]
    return series


def _validation_table(history: History) -> str:
    if not history.validations:
        return '<p class="empty">None yet.</p>'
    shown = history.validations
    first, last = shown[0], shown[-1]
    best = max(shown, key=lambda one: one.score)
    tasks = sorted({task for one in shown for task in one.by_task})
    rows = [("blended", first.score, best.score, last.score)]
    for task in tasks:
        scores = [one.by_task[task] for one in shown if task in one.by_task]
        rows.append((task, scores[0], max(scores), scores[-1]))
    return html_table(
        ("task", f"step {first.step}", "best", f"step {last.step}"),
        [(name, *(f"{value:.3f}" for value in values)) for name, *values in rows],
    )


def _reset_table(history: History) -> str:
    if not history.resets:
        return '<p class="empty">None yet.</p>'
    return html_table(("step", "reason"), [(reset.step, reset.reason) for reset in history.resets])


def _facts(provenance: dict[str, Any]) -> str:
    rows = [
        (key, provenance[key])
        for key in ("command", "time", "host", "user", "python", "prorl_hpc")
        if provenance.get(key) is not None
    ]
    git = provenance.get("git")
    if isinstance(git, dict):
        changed = " (with local changes)" if git.get("changed") else ""
        rows.append(("commit", f"{git.get('commit')}{changed}"))
    return html_table(("what", "value"), rows) if rows else '<p class="empty">Not recorded.</p>'


def html_page(title: str, body: Sequence[str]) -> str:
    """A page around elements, with the style of every page here."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
        + "\n".join(body)
        + "</body></html>\n"
    )


def html_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table of escaped cells."""
    head = "".join(f"<th>{escape(str(cell))}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def last_value(history: History, quantity: str) -> float | None:
    """The newest finite value of a quantity."""
    return next(
        (v for row in reversed(history.steps) if (v := number(row, quantity)) is not None), None
    )
