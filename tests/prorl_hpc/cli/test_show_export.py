"""`show`, `export` and `buffer export` on a run whose buffer and policies were put in by hand."""

from pathlib import Path

import pytest

from prorl_hpc.buffer.image import shard_image, write_shard
from prorl_hpc.buffer.manifest import Closed, Line, ManifestWriter, Owner, Shard
from prorl_hpc.buffer.validation import first_group
from prorl_hpc.cli.main import main
from prorl_hpc.observe.trajectories import describe_trajectory, segments
from prorl_hpc.policy import publish_directory, publish_policy
from prorl_hpc.records import Kind, Trajectory
from prorl_hpc.run import Run
from tests.prorl_hpc.cli.support import trajectory


def store_groups(run: Run, made: list[Trajectory]) -> None:
    """What a buffer leaves: one shard, and its groups closed."""
    run.shards.mkdir(parents=True)
    image = shard_image(made)
    digest = write_shard(run.shard(7), image=image)
    rows = tuple((t.group_id, t.rollout_index, True) for t in made)
    lines: list[Line] = [
        Owner(format=1, attempt=1, host="n1"),
        Shard(number=7, digest=digest, num_bytes=image.num_bytes, rows=rows),
    ]
    for group in sorted({t.group_id for t in made}):
        rollouts = tuple((t.rollout_index, 7, row, True) for row, t in enumerate(made)
                         if t.group_id == group)  # fmt: skip
        lines.append(
            Closed(
                group=group,
                kind=Kind.validation,
                task="a",
                instance_id=f"a-{group}",
                num_rollouts=2,
                rollouts=rollouts,
                reason="complete",
            )
        )
    writer = ManifestWriter(run.manifest, owner=1)
    writer.append(lines)
    writer.close()


def test_export_checks_hashes(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "quickstart", "out"]) == 2
    assert "there: none yet" in capsys.readouterr().err
    publish_policy(
        run,
        version=3,
        step=3,
        write=lambda path: (path / "w.safetensors").write_bytes(b"w") and None,
    )
    assert main(["export", "quickstart", "out"]) == 0
    assert Path("out/w.safetensors").read_bytes() == b"w"
    assert main(["export", "quickstart", "out"]) == 2
    (run.policy(3) / "w.safetensors").write_bytes(b"x")
    assert main(["export", "quickstart", "out2"]) == 2
    assert "damaged" in capsys.readouterr().err
    assert not Path("out2").exists()


def test_export_of_a_step_takes_whatever_holds_it(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(path: Path) -> None:
        (path / "w.safetensors").write_bytes(b"w")

    assert main(["export", "quickstart", "out", "--step", "4"]) == 2
    assert (
        "step 4 of run 'quickstart' has no checkpoint; there: none yet" in capsys.readouterr().err
    )
    publish_policy(run, version=5, step=4, write=write)  # after a roll-back
    assert main(["export", "quickstart", "out", "--step", "4"]) == 0
    assert "version 5, step 4" in capsys.readouterr().out
    publish_directory(run.export(2), version=2, step=2, write=write)
    assert main(["export", "quickstart", "two", "--step", "2"]) == 0
    assert Path("two/w.safetensors").exists()
    assert main(["export", "quickstart", "two", "--step", "4"]) == 2
    assert "two exists" in capsys.readouterr().err


def test_show_without_groups(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "quickstart", "--group", "7"]) == 2
    assert "none is closed yet" in capsys.readouterr().err


def test_show_speaks_of_groups_as_the_user_counts_them(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    first = first_group(6)
    made = [trajectory(1.0, group=group, index=i) for group in (0, 5, first, first + 1)
            for i in (0, 1)]  # fmt: skip
    store_groups(run, made)
    assert main(["show", "quickstart", "--group", "99999"]) == 2
    err = capsys.readouterr().err
    assert "group 99999 of run 'quickstart' isn't in its buffer (closed: 0 to 5; " in err
    assert "--validation of version 6 (2 groups))\n" in err
    for wrong in (["--group", str(first)], ["--group", "2", "--validation", "6"],
                  ["--group", "0", "--validation", "7"], ["--group", "-1", "--validation", "7"],
                  ["--group", "0", "--rollout", "9"]):  # fmt: skip
        assert main(["show", "quickstart", "--ids", *wrong]) == 2
    assert "rollout 9 of group 0 isn't usable; usable are [0, 1]" in capsys.readouterr().err
    assert main(["show", "quickstart", "--ids", "--group", "1", "--validation", "6"]) == 0
    out = capsys.readouterr().out
    assert "group 1: validation of version 6, task a, " in out
    assert str(first) not in out


def test_export_of_an_empty_buffer(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["buffer", "export", "quickstart", "all.jsonl"]) == 0
    assert "0 trajectories" in capsys.readouterr().out
    assert main(["buffer", "export", "quickstart", "all.txt"]) == 2
    assert main(["buffer", "export", "quickstart", "none/all.jsonl"]) == 2
    assert "can't be written" in capsys.readouterr().err


def test_segments_part_what_was_given_from_what_was_sampled() -> None:
    one = trajectory(0.5)
    assert segments(one) == [(False, [5, 6]), (True, [7, 8])]
    text = describe_trajectory(one, decode=lambda ids: "-".join(map(str, ids)))
    assert "reward 0.5, scored" in text
    assert "--- policy ---\n7-8" in text
