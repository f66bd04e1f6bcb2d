"""History, live lines, charts and the report page, from rows as the learner writes them."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from prorl_hpc.observe.chart import Mark, Series, line_chart, ticks
from prorl_hpc.observe.dashboard import header, reset_line, step_line, validation_line
from prorl_hpc.observe.history import number, read_history
from prorl_hpc.observe.metrics import MetricsWriter
from prorl_hpc.observe.report import collect, render_report
from prorl_hpc.recipe import Recipe, TaskConfig, dump_recipe
from prorl_hpc.run import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Three steps, the second one repeated after a crash, one reset, two validations."""
    run = Run(tmp_path / "r<1>")
    run.root.mkdir()
    recipe = Recipe(name="r<1>", steps=3, tasks={"a": TaskConfig(kind="logic")})
    run.recipe.write_text(dump_recipe(recipe))
    run.provenance.write_text(json.dumps({"command": "prorl-hpc submit <x>", "git": None}))
    with MetricsWriter(run.metrics("learner")) as writer:
        for step, reward in ((1, 0.1), (2, 0.9), (2, 0.2), (3, 0.4)):
            writer.write(
                event="step", step=step, reward=reward, kl=0.01 * step, staleness=1.0,
                groups_seen=32.0, step_seconds=4.0, batch_tokens=900.0, score_seconds=1.0,
                train_seconds=2.0,
            )  # fmt: skip
        writer.write(event="reset", step=2, reset_index=1, trigger="schedule", reason="every 2")
    with MetricsWriter(run.validation) as writer:
        for step, score in ((0, 0.25), (3, 0.75)):
            tasks = {"a": {"reward": score, "solved": score}, "b": {"reward": 0.0, "solved": 0.0}}
            writer.write(format=1, step=step, version=step, score=score, tasks=tasks)
        writer.write(format=1, step=4, version=4, score=None, tasks={})
    return run


def test_history_keeps_the_surviving_rows(run: Run) -> None:
    history = read_history(run)
    assert history.curve("reward") == ((1.0, 0.1), (2.0, 0.2), (3.0, 0.4))
    assert [(one.step, one.score) for one in history.validations] == [(0, 0.25), (3, 0.75)]
    assert history.validations[1].by_task == {"a": 0.75, "b": 0.0}
    assert [(one.step, one.reason) for one in history.resets] == [(2, "every 2")]


def test_rates_are_counts_over_seconds(run: Run) -> None:
    row = read_history(run).steps[0]
    assert number(row, "groups_per_second") == 8.0  # 32 groups in 4 s
    assert number(row, "tokens_per_second") == 300.0  # 900 tokens in 1 + 2 s
    assert number({"batch_tokens": 5.0}, "tokens_per_second") is None


def test_empty_run_has_an_empty_history(tmp_path: Path) -> None:
    history = read_history(Run(tmp_path))
    assert (history.steps, history.validations, history.resets) == ((), (), ())


def test_live_lines(run: Run) -> None:
    row = read_history(run).steps[2]
    assert step_line(row, steps=3).split() == ["train", "3/3", "0.400", "0.0300", "1.00", "8.0",
                                               "300"]  # fmt: skip
    assert len(header()) == len(step_line(row, steps=3))
    assert step_line({"event": "step", "step": 1}, steps=3).split()[2:] == ["-"] * 5
    reset = reset_line({"event": "reset", "step": 2, "reason": "every 2"})
    assert reset is not None
    assert "step 2" in reset
    assert reset_line(row) is None
    assert validation_line({"score": None}) is None
    line = validation_line({"step": 3, "version": 3, "score": 0.5, "tasks": {}})
    assert line is not None
    assert line.split() == ["validation", "step", "3:", "0.500"]


def test_ticks_are_round_and_cover_the_range() -> None:
    assert ticks(0.0, 1.0) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(0, 73) == [0, 20, 40, 60, 80]
    assert ticks(5.0, 5.0)[0] < 5.0 < ticks(5.0, 5.0)[-1]
    assert len(ticks(0.0, 0.0)) >= 2


def test_chart_is_well_formed_and_breaks_at_gaps() -> None:
    points = ((0.0, 1.0), (1.0, 2.0), (2.0, None), (3.0, 4.0))
    text = line_chart(
        "a < b", [Series(name="x & y", points=points)], marks=[Mark(x=1, label="<m>")]
    )
    root = ElementTree.fromstring(text)
    assert len(root.findall("polyline")) == 1  # 0 to 1; the lone point 3 is a circle
    assert len(root.findall("circle")) == 1
    assert "no values yet" in line_chart("t", [Series(name="x", points=((0.0, None),))])


def test_report_is_self_contained_and_escapes(run: Run) -> None:
    page = render_report(collect(run))
    assert "<h1>r&lt;1&gt;</h1>" in page
    assert "r<1>" not in page
    assert "submit <x>" not in page
    assert "step 3 of 3; 1 reference reset " in page
    assert "<td>0.250</td><td>0.750</td><td>0.750</td>" in page
    assert "http" not in page.replace("http-equiv", "")
    assert page.count("<svg") >= 4
