"""pass@k over policy versions as one self-contained HTML page. Pure: results in, markup out."""

from collections.abc import Sequence
from html import escape

from prorl_hpc.evaluation.evaluate import TaskScore
from prorl_hpc.evaluation.sweep import VersionResult
from prorl_hpc.observe.chart import Series, line_chart
from prorl_hpc.observe.report import html_page, html_table


def render_versions(run: str, results: Sequence[VersionResult]) -> str:
    """One chart for each k with a curve for each task, and the numbers below."""
    ks = sorted({k for _, score in _scores(results) for k in score.pass_at})
    sampling = next((one.evaluation for one in results if one.evaluation is not None), None)
    body = [f"<h1>{escape(run)}: evaluation of {len(results)} versions</h1>"]
    if sampling is not None:
        body.append(
            f"<p>temperature {sampling.temperature:g}, top-p {sampling.top_p:g}; 95 % bootstrap "
            "intervals over instances in brackets</p>"
        )
    charts = [(f"pass@{k}", _curves(results, k)) for k in ks] + [("reward", _curves(results, None))]
    body.append('<div class="charts">')
    for title, series in charts:
        chart = line_chart(title, series, x_label="policy version")
        body.append(f"<figure><figcaption>{escape(title)}</figcaption>{chart}</figure>")
    body += ["</div>", "<h2>Results</h2>", html_table(header(ks), rows(results, ks))]
    failed = [one for one in results if one.evaluation is None]
    if failed:
        lost = [(one.version, one.error, one.log or "") for one in failed]
        body += ["<h2>Not evaluated</h2>", html_table(("version", "why", "log"), lost)]
    return html_page(f"{run}: evaluation", body)


def header(ks: Sequence[int]) -> tuple[str, ...]:
    """Titles of `rows`."""
    return ("version", "task", "instances", "samples", *(f"pass@{k}" for k in ks), "reward",
            "tokens", "lost")  # fmt: skip


def rows(results: Sequence[VersionResult], ks: Sequence[int]) -> list[tuple[object, ...]]:
    """One row for each version and task that was evaluated."""
    found: list[tuple[object, ...]] = []
    for one in results:
        for name, score in one.evaluation.tasks.items() if one.evaluation is not None else ():
            intervals = [score.pass_at[k] for k in ks]
            found.append(
                (
                    one.version,
                    name,
                    score.instances,
                    score.samples,
                    *(f"{i.mean:.3f} [{i.low:.3f}, {i.high:.3f}]" for i in intervals),
                    f"{score.reward.mean:.3f}",
                    f"{score.response_tokens:.0f}",
                    score.failures,
                )
            )
    return found


def _scores(results: Sequence[VersionResult]) -> list[tuple[str, TaskScore]]:
    return [
        (name, score)
        for one in results
        if one.evaluation is not None
        for name, score in one.evaluation.tasks.items()
    ]


def _curves(results: Sequence[VersionResult], k: int | None) -> list[Series]:
    """By task over versions: pass@k, or the mean reward where k is None."""
    curves = []
    for task in dict.fromkeys(name for name, _ in _scores(results)):
        points: list[tuple[float, float | None]] = []
        for one in sorted(results, key=lambda result: result.version):
            score = None if one.evaluation is None else one.evaluation.tasks.get(task)
            value = None
            if score is not None:
                value = score.reward.mean if k is None else score.pass_at[k].mean
            points.append((float(one.version), value))
        curves.append(Series(name=task, points=tuple(points)))
    return curves
