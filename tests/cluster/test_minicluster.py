"""The private cluster behaves as the rest of the cluster tests assume a Slurm to behave."""

from pathlib import Path

import pytest

from tests.cluster.conftest import Apptainer, Cluster, poll

ALIVE = "date +%s%N >> beats; exec sleep 600"


def lines(cluster: Cluster, path: Path) -> list[str]:
    return cluster.user.run(["cat", str(path)]).stdout.splitlines()


def test_a_job_of_an_ordinary_user_gets_the_gpus_it_asked_for(cluster: Cluster) -> None:
    work = cluster.user.new_directory("gpu")
    job = cluster.sbatch(
        "echo $CUDA_VISIBLE_DEVICES; id -un; hostname",
        *("--partition=gpu", "--reservation=h100", "--gres=gpu:8", "--output=out"),
        cwd=work,
    )
    cluster.wait_for(job, "COMPLETED")
    assert lines(cluster, work / "out")[:2] == ["0,1,2,3,4,5,6,7", cluster.user.name]
    assert cluster.job(job)["NodeList"] == cluster.gpu_nodes[0]


def test_an_array_runs_every_task_once(cluster: Cluster) -> None:
    work = cluster.user.new_directory("array")
    cluster.sbatch("echo $SLURM_ARRAY_TASK_ID >> done", "--array=0-11", "--mem=100", cwd=work)
    poll(lambda: len(lines(cluster, work / "done")) >= 12, what="12 tasks done")
    assert sorted(map(int, lines(cluster, work / "done"))) == list(range(12))


def test_an_array_beyond_the_limit_is_refused(cluster: Cluster) -> None:
    beyond = ["sbatch", f"--array=0-{cluster.max_array_size}", "--wrap", "true"]
    refused = cluster.run(beyond)
    assert refused.returncode != 0
    assert "array" in refused.stderr.lower()


def test_an_urgent_job_takes_the_node_and_the_preempted_one_comes_back(cluster: Cluster) -> None:
    work, node = cluster.user.new_directory("preempt"), cluster.cpu_nodes[2]
    whole = ("--exclusive", f"--nodelist={node}", "--mem=100")
    victim = cluster.sbatch(ALIVE, "--partition=preemptible", "--requeue", *whole, cwd=work)
    cluster.wait_for(victim, "RUNNING")
    poll(lambda: len(lines(cluster, work / "beats")) == 1, what="the first start's heartbeat")
    urgent = cluster.sbatch("true", "--partition=urgent", *whole, cwd=work)
    cluster.wait_for(urgent, "COMPLETED")
    poll(lambda: len(lines(cluster, work / "beats")) == 2, what="the second start's heartbeat")
    assert cluster.job(victim)["Restarts"] == "1"
    cluster.run(["scancel", victim])


def test_a_job_restarts_elsewhere_while_its_cut_off_copy_lives_on(cluster: Cluster) -> None:
    work = cluster.user.new_directory("cut")
    job = cluster.sbatch(
        "while :; do echo beat >> beats.$SLURMD_NODENAME; sleep 0.3; done",
        *("--requeue", "--mem=100", f"--exclude={cluster.cpu_nodes[2]}"),
        cwd=work,
    )
    cluster.wait_for(job, "RUNNING")
    node = cluster.job(job)["NodeList"]
    other = next(n for n in cluster.cpu_nodes[:2] if n != node)
    cluster.cut(node)
    try:
        poll(lambda: "down" in cluster.node_state(node), what=f"{node} down")
        poll(lambda: lines(cluster, work / f"beats.{other}"), what="the successor's heartbeat")
        before = len(lines(cluster, work / f"beats.{node}"))
        poll(
            lambda: len(lines(cluster, work / f"beats.{node}")) > before, what="the old copy alive"
        )
    finally:
        cluster.heal(node)
    poll(lambda: cluster.node_state(node) == "idle", what=f"{node} back")
    cluster.run(["scancel", job])


def test_a_crashed_node_is_noticed_and_its_job_requeued(cluster: Cluster) -> None:
    work = cluster.user.new_directory("crash")
    job = cluster.sbatch(ALIVE, "--requeue", "--mem=100", cwd=work)
    cluster.wait_for(job, "RUNNING")
    poll(lambda: len(lines(cluster, work / "beats")) == 1, what="the first start's heartbeat")
    node = cluster.job(job)["NodeList"]
    cluster.crash(node)
    try:
        poll(lambda: len(lines(cluster, work / "beats")) == 2, what="the second start's heartbeat")
        assert cluster.job(job)["NodeList"] != node
    finally:
        cluster.start_slurmd(node)
    poll(lambda: cluster.node_state(node) == "idle", what=f"{node} back")
    cluster.run(["scancel", job])


def test_accounting_knows_a_finished_job(cluster_with_accounting: Cluster) -> None:
    job = cluster_with_accounting.sbatch("exit 3", "--mem=100")
    cluster_with_accounting.wait_for(job, "FAILED")
    asked = ["sacct", "-n", "-P", "-X", "-j", job, "-o", "State,ExitCode"]
    poll(
        lambda: cluster_with_accounting.run(asked).stdout.strip() == "FAILED|3:0",
        what="the job's record",
    )


def test_a_container_runs_as_an_ordinary_user_without_network(apptainer: Apptainer) -> None:
    isolated = ["--containall", "--cleanenv", "--no-home", "--net", "--network", "none"]
    script = "python3 -m pytest --version && grep -c : /proc/net/dev"
    for image in (apptainer.sif, apptainer.rootfs):
        done = apptainer.run(["exec", *isolated, "--cwd", "/", str(image), "sh", "-c", script])
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "1"  # the loopback interface alone


@pytest.mark.parametrize("tool", ["git", "patch", "find", "python3"])
def test_the_base_image_holds_what_scoring_needs(apptainer: Apptainer, tool: str) -> None:
    assert apptainer.run(["exec", str(apptainer.rootfs), tool, "--version"]).returncode == 0
