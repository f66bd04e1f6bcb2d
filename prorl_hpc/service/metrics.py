"""The service's counters as Prometheus text. Pure formatting."""

from collections.abc import Mapping

from prorl_hpc.service.jobs import Jobs

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def prometheus(
    jobs: Jobs,
    *,
    policy_version: int,
    occupied: Mapping[str, int],
    callbacks: Mapping[str, int],
) -> str:
    """All metrics, one sample a line."""
    lines: list[str] = []

    def family(name: str, kind: str, text: str, values: Mapping[str, float], label: str) -> None:
        lines.append(f"# HELP prorl_{name} {text}")
        lines.append(f"# TYPE prorl_{name} {kind}")
        for key, value in sorted(values.items()):
            tag = f'{{{label}="{key}"}}' if label else ""
            lines.append(f"prorl_{name}{tag} {value:g}")

    def single(name: str, kind: str, text: str, value: float) -> None:
        family(name, kind, text, {"": value}, "")

    single("jobs_queued", "gauge", "Jobs that wait for a place.", jobs.num_queued)
    single("jobs_running", "gauge", "Jobs with a sample at work or done.", jobs.num_running)
    single("samples_running", "gauge", "Samples at work.", jobs.num_samples_running)
    single("results_unfetched", "gauge", "Results that wait for a client.", jobs.num_unfetched)
    single("policy_version", "gauge", "Version that new tokens come from.", policy_version)
    family("stage_occupied", "gauge", "Samples in a stage.", occupied, "stage")
    family("jobs_ended_total", "counter", "Jobs by the state they ended in.", jobs.ended, "state")
    family("samples_total", "counter", "Samples by outcome.", jobs.samples, "outcome")
    family(
        "stage_seconds_total", "counter", "Seconds spent per stage.", jobs.stage_seconds, "stage"
    )
    family("callbacks_total", "counter", "Callbacks by how they ended.", callbacks, "result")
    single("sampled_tokens_total", "counter", "Tokens sampled.", jobs.num_sampled_tokens)
    single("sample_retries_total", "counter", "Infrastructure retries.", jobs.num_retries)
    return "\n".join(lines) + "\n"
