"""Recipe and site to jobs: roles, order, limits."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from hpc.errors import SiteError
from hpc.site import Backend, Placement, Site
from prorl_hpc.choices import EngineKind, InferencePlacement
from prorl_hpc.learner.memory import facts_for
from prorl_hpc.planner import adjustments, make_plan
from prorl_hpc.recipe import (
    BufferConfig,
    EngineConfig,
    InferenceConfig,
    LearnerConfig,
    Recipe,
    RecipeError,
    RolloutConfig,
    TaskConfig,
    check,
)

RUN = Path("/data/runs/r")


def recipe(**changes: object) -> Recipe:
    base = Recipe(
        name="r",
        steps=3,
        tasks={"sums": TaskConfig(kind="logic")},
        rollout=RolloutConfig(nodes=6, cpus_per_node=8, walltime_minutes=60, memory_mib=1000),
        buffer=BufferConfig(cpus=2, walltime_minutes=120, memory_mib=1000),
        learner=LearnerConfig(
            nodes=2, ranks_per_node=4, cpus_per_node=16, walltime_minutes=60, memory_mib=1000
        ),
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def site(**changes: object) -> Site:
    place = dataclasses.replace(Placement(partition="main"), **changes)  # type: ignore[arg-type]
    return Site(name="desk", backend=Backend.slurm, placements={"default": place})


def test_three_jobs_in_start_order() -> None:
    plan = make_plan(recipe(), site(), run_directory=RUN, python="/usr/bin/python3")
    assert next(job.name for job in plan.ordered()) == "buffer"
    buffer, rollout, learner = (plan.job(n) for n in ("buffer", "rollout", "learner"))
    assert buffer.command == ("/usr/bin/python3", "-m", "prorl_hpc.buffer", "--run", str(RUN))
    assert rollout.array_size == 6
    assert rollout.resources.nodes == 1
    assert learner.resources.nodes == 2
    assert rollout.after == learner.after == ("buffer",)
    # 2 h of one buffer node, 1 h of 6 rollout nodes, 1 h of 2 learner nodes
    assert plan.node_hours() == 2 + 6 + 2


def test_threads_share_the_cores_of_the_ranks() -> None:
    learner = make_plan(recipe(), site(), run_directory=RUN).job("learner")
    assert dict(learner.environment)["OMP_NUM_THREADS"] == "4"  # 16 cores, 4 ranks


def test_colocated_buffer_has_no_job_of_its_own() -> None:
    changed = recipe(buffer=BufferConfig(colocate="learner"))
    plan = make_plan(changed, site(), run_directory=RUN)
    assert {job.name for job in plan.jobs} == {"learner", "rollout"}
    assert "prorl_hpc.colocated" in plan.job("learner").command
    assert plan.job("rollout").after == ("learner",)
    with pytest.raises(RecipeError, match=r"buffer\.colocate='rollout'"):
        make_plan(recipe(buffer=BufferConfig(colocate="rollout")), site(), run_directory=RUN)


def test_site_limits_cap_cores_and_walltime_and_say_so() -> None:
    small = site(cpus_per_node=4, max_walltime_minutes=30)
    plan = make_plan(recipe(), small, run_directory=RUN)
    assert plan.job("learner").resources.cpus_per_node == 4
    assert plan.job("buffer").resources.walltime_minutes == 30
    notes = adjustments(recipe(), small)
    assert any("buffer: walltime 120 min -> 30" in note for note in notes)
    assert any("learner: 16 cores per node -> 4" in note for note in notes)
    assert adjustments(recipe(), site()) == []


def test_warning_leaves_most_of_a_short_walltime() -> None:
    plan = make_plan(recipe(), site(max_walltime_minutes=4), run_directory=RUN)
    assert plan.job("learner").grace_seconds == 60  # a quarter of 240 s


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_nodes": 5}, "rollout.nodes=6 exceeds 5"),
        ({"memory_mib": 999}, "memory_mib=1000 exceeds"),
    ],
)
def test_what_does_not_fit_is_refused(limits: dict[str, object], message: str) -> None:
    with pytest.raises(SiteError, match=message):
        make_plan(recipe(), site(**limits), run_directory=RUN)


def test_a_learner_on_more_nodes_than_its_partition_gives_is_refused() -> None:
    places = {
        "default": Placement(partition="main"),
        "learner": Placement(partition="h100", max_nodes=1),
    }
    small = Site(name="desk", backend=Backend.slurm, placements=places)
    with pytest.raises(SiteError, match=r"learner\.nodes=2 exceeds 1 on partition 'h100'"):
        make_plan(recipe(), small, run_directory=RUN)


def own_jobs(**changes: object) -> Recipe:
    values = {
        "placement": InferencePlacement.own_jobs, "nodes": 3, "cpus_per_node": 12,
        "gpus_per_node": 4, "memory_mib": 1000, "walltime_minutes": 90,
    }  # fmt: skip
    return recipe(inference=InferenceConfig(**(values | changes)))  # type: ignore[arg-type]


def test_inference_jobs_are_an_array_of_their_own_on_their_own_partition() -> None:
    places = {
        "default": Placement(partition="main"),
        "inference": Placement(partition="a100", max_nodes=3, max_walltime_minutes=60),
    }
    split = Site(name="desk", backend=Backend.slurm, placements=places)
    plan = make_plan(own_jobs(), split, run_directory=RUN, python="/usr/bin/python3")
    assert [job.name for job in plan.ordered()] == ["buffer", "inference", "rollout", "learner"]
    job = plan.job("inference")
    assert job.command == ("/usr/bin/python3", "-m", "prorl_hpc.inference", "--run", str(RUN))
    assert (job.role, job.array_size, job.after) == ("inference", 3, ("buffer",))
    assert job.resources.gpus_per_node == 4
    assert job.restarts
    assert plan.job("rollout").resources.gpus_per_node == 0
    # 2 h of the buffer, 1 h (capped) of 3 inference nodes, 1 h of 6 rollout and 2 learner nodes
    assert plan.node_hours() == 2 + 3 + 6 + 2
    notes = adjustments(own_jobs(), split)
    assert any("inference: walltime 90 min -> 60" in note for note in notes)
    with pytest.raises(SiteError, match=r"inference\.nodes=4 exceeds 3 on partition 'a100'"):
        make_plan(own_jobs(nodes=4), split, run_directory=RUN)
    beside = dataclasses.replace(own_jobs(), buffer=BufferConfig(colocate="learner"))
    assert make_plan(beside, split, run_directory=RUN).job("inference").after == ("learner",)


def test_node_hours_count_inference_jobs() -> None:
    limited = dataclasses.replace(site(), max_node_hours=14.0)
    with pytest.raises(SiteError, match=r"14\.5 node-hours .*inference\.nodes"):
        # 2 h buffer, 3 times 1.5 h inference, 6 h rollout, 2 h learner
        make_plan(own_jobs(), limited, run_directory=RUN)
    make_plan(recipe(), limited, run_directory=RUN)


@pytest.mark.parametrize(
    ("rollout", "inference", "message"),
    [
        ({"gpus_per_node": 2}, {}, r"rollout\.gpus_per_node=2 has no use"),
        (
            {"engine": EngineConfig(kind=EngineKind.openai, urls=["http://h/v1"])},
            {},
            "names servers that run already",
        ),
        (
            {"engine": EngineConfig(kind=EngineKind.vllm, servers_per_node=4, tensor_parallel=2)},
            {"gpus_per_node": 4},
            r"need 8 GPUs, but inference\.gpus_per_node=4",
        ),
        ({}, {"nodes": 0}, r"inference\.nodes=0"),
        ({}, {"walltime_minutes": 0}, r"inference\.walltime_minutes=0"),
    ],
)
def test_placements_that_can_not_work_are_refused(
    rollout: dict[str, Any], inference: dict[str, Any], message: str
) -> None:
    made = dataclasses.replace(own_jobs(**inference), rollout=RolloutConfig(**rollout))
    with pytest.raises(RecipeError, match=message):
        check(made)
    usual = dataclasses.replace(made, inference=InferenceConfig())
    check(usual)


def test_node_hours_over_the_limit_are_refused() -> None:
    limited = dataclasses.replace(site(), max_node_hours=9.5)
    with pytest.raises(SiteError, match=r"10\.0 node-hours per walltime, above .*=9\.5"):
        make_plan(recipe(), limited, run_directory=RUN)


def test_role_without_a_place_is_named() -> None:
    empty = Site(name="bare", backend=Backend.slurm, placements={})
    with pytest.raises(SiteError, match="places neither role"):
        make_plan(recipe(), empty, run_directory=RUN)


BIG = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}


def test_a_learner_that_does_not_fit_the_stated_gpu_is_refused_with_what_does() -> None:
    """7 billion parameters on two nodes of four GPUs."""
    big = recipe()
    big.model.config, big.model.vocabulary = BIG, "abc"
    big.learner.gpus_per_node = 4
    big.model.activation_checkpointing, big.learner.tokens_per_micro_batch = True, 8192
    big.learner.memory_mib = 200_000
    for stated in ({}, {"gpu_memory_mib": 81920, "memory_mib": 500_000}):
        make_plan(big, site(**stated), run_directory=RUN)
    with pytest.raises(RecipeError, match=r"there are 15.6 GiB; use \d+ ranks"):
        make_plan(big, site(gpu_memory_mib=16000), run_directory=RUN)


def test_main_memory_of_a_learner_with_gpus_is_held_against_its_request() -> None:
    """Publishing and checkpoints pass through it: 4 of 8 shards of 7 billion, 16 bytes each."""
    big = recipe()
    big.model.config, big.model.vocabulary = BIG, "abc"
    big.learner.gpus_per_node = 4
    big.model.activation_checkpointing, big.learner.tokens_per_micro_batch = True, 8192
    big.learner.memory_mib = 65536
    make_plan(big, site(), run_directory=RUN)  # where memory isn't counted
    remedy = r"learner.memory_mib=65536: .* set learner.memory_mib="
    with pytest.raises(RecipeError, match=remedy) as refusal:
        make_plan(big, site(memory_mib=500_000), run_directory=RUN)
    big.learner.memory_mib = int(str(refusal.value).split("set learner.memory_mib=")[1].split()[0])
    facts = facts_for(big)
    assert facts is not None
    shards = 4 * 4 * -(-facts.num_parameters // 8)
    assert big.learner.memory_mib == pytest.approx(
        (4 * shards + 4 * facts.num_parameters) / 2**20 + 4096, rel=0.01
    )
    make_plan(big, site(memory_mib=500_000), run_directory=RUN)


def test_a_learner_on_cpus_is_held_against_its_own_request_where_the_site_states_memory() -> None:
    small = recipe()
    small.model.config = BIG | {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}
    small.model.vocabulary = "abc"
    small.learner.tokens_per_micro_batch = 512
    small.model.context_tokens = 512
    make_plan(small, site(memory_mib=64000), run_directory=RUN)
    big = recipe()
    big.model.config, big.model.vocabulary = BIG, "abc"
    make_plan(big, site(), run_directory=RUN)
    with pytest.raises(RecipeError, match=r"there are 0\.2 GiB"):
        make_plan(big, site(memory_mib=64000), run_directory=RUN)
