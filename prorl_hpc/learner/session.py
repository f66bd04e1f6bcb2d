"""One rank of the learner from its first line to its exit code. Knows the run and its allocation.

prepare start (rank 0) -> join -> load newest checkpoint or begin -> connect -> loop
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from hpc.allocation import Allocation, StopFlag
from hpc.errors import EXIT_CONTINUE, EXIT_DONE, EXIT_USER, HpcError, UserError
from prorl_hpc.buffer.client import LearnerClient
from prorl_hpc.buffer.messages import BufferGone, Fenced, GroupIds, WireError
from prorl_hpc.buffer.reader import GroupReader
from prorl_hpc.learner.checkpoint import LearnerState, load_newest, restore
from prorl_hpc.learner.collect import NoBatch
from prorl_hpc.learner.distributed import Ranks, RanksError, join, leave, use_determinism
from prorl_hpc.learner.filtering import EffectiveSamples
from prorl_hpc.learner.link import Connect, explain, open_line, patience
from prorl_hpc.learner.model import build_policy
from prorl_hpc.learner.objective import objective_config
from prorl_hpc.learner.optimizer import build_optimizer
from prorl_hpc.learner.output import Outputs
from prorl_hpc.learner.preflight import longest_of_run
from prorl_hpc.learner.publish import publish_start
from prorl_hpc.learner.record import Recorder, log
from prorl_hpc.learner.reset import ResetState, state_to_json
from prorl_hpc.learner.shared import Client, SharedClient
from prorl_hpc.learner.stages import check_stages
from prorl_hpc.learner.step import Stepper
from prorl_hpc.learner.together import on_all, on_first
from prorl_hpc.learner.train import Loop
from prorl_hpc.learner.warmup import prepare_start
from prorl_hpc.recipe import Recipe, load_recipe
from prorl_hpc.run import Run


def check_learner(recipe: Recipe) -> None:
    """Refuses settings with which the loop could not go on; raises AlgorithmError."""
    check_stages(recipe.algorithm.stages)


def run_rank(run: Run, *, allocation: Allocation, flag: StopFlag) -> int:
    """Runs this rank; returns its exit code."""
    client: LearnerClient | None = None

    def connect(*, patience_seconds: float) -> Client:
        nonlocal client
        client = open_line(
            run,
            attempt=allocation.attempt,
            patience_seconds=patience_seconds,
            stopping=lambda: flag.stopping,
        )
        return client

    def body() -> str:
        try:
            return train(
                run,
                connect=connect,
                read=reader.read,
                stop_reason=lambda: flag.reason or None,
            )
        except BufferGone as err:
            raise explain(run, err) from err

    reader = GroupReader(run)
    try:
        return guarded(body)
    finally:
        if client is not None:
            client.close()
        reader.close()


def guarded(body: Callable[[], str]) -> int:
    """Runs `body` and turns its end into an exit code, with one line where it failed."""
    try:
        reason = body()
    except UserError as err:
        print(f"prorl-hpc: {err}", file=sys.stderr, flush=True)
        return EXIT_USER
    except Fenced as err:
        # No error of the program; whether anything follows is for the newer attempt's record.
        log(f"stopping: {err}")
        return EXIT_CONTINUE
    except (NoBatch, WireError, RanksError, OSError) as err:
        # Lost peers and full disks may be gone at the next attempt; its chain is bounded.
        log(f"stopping, to be started again: {err}")
        return EXIT_CONTINUE
    except HpcError as err:
        print(f"prorl-hpc: {err}", file=sys.stderr, flush=True)
        return 1
    except RuntimeError as err:
        if not is_lost_rank(err):
            raise
        log(f"stopping, to be started again: another rank is gone ({err})")
        return EXIT_CONTINUE
    if reason == "done":
        log("all steps are done")
        return EXIT_DONE
    log(f"stopped: {reason}")
    return EXIT_CONTINUE


def is_lost_rank(err: RuntimeError) -> bool:
    """Whether a collective failed because another rank has ended."""
    text = str(err)
    return torch.distributed.is_initialized() and any(
        sign in text for sign in ("Connection", "gloo", "NCCL", "Socket", "peer")
    )


def train(
    run: Run,
    *,
    connect: Connect,
    read: Callable[..., object],
    stop_reason: Callable[[], str | None],
    ranks: Ranks | None = None,
) -> str:
    """Trains to the end or to a stop; returns "done" or the reason. Joins ranks if not given."""
    recipe = load_recipe(run.recipe)
    check_learner(recipe)
    # Rank 0 may wait for a batch as long as the recipe allows; the others wait for rank 0.
    own = ranks is None
    ranks = ranks or join(
        timeout_seconds=2 * recipe.learner.batch_seconds + 1800,
        stopping=lambda: stop_reason() is not None,
    )
    try:
        if recipe.learner.deterministic:
            use_determinism(ranks.device)
        stopped = _prepare(recipe, run, ranks=ranks, stop_reason=stop_reason)
        if stopped is not None:
            return stopped
        loop, resumed = build_loop(
            recipe, run, ranks=ranks, connect=connect, read=read, stop_reason=stop_reason
        )
        try:
            loop.start(resumed=resumed)
            return loop.train()
        finally:
            if ranks.is_first:
                loop.recorder.close()
    finally:
        if own:
            leave(ranks)


def _prepare(
    recipe: Recipe, run: Run, *, ranks: Ranks, stop_reason: Callable[[], str | None]
) -> str | None:
    """Rank 0 makes the starting policy; why it was stopped before it had one, else None."""
    return on_first(
        ranks,
        lambda: prepare_start(recipe, run, device=ranks.device, stop_reason=stop_reason),
    )


def build_loop(
    recipe: Recipe,
    run: Run,
    *,
    ranks: Ranks,
    connect: Connect,
    read: Callable[..., object],
    stop_reason: Callable[[], str | None],
) -> tuple[Loop, bool]:
    """The loop at its newest checkpoint (true), or at step 0 with version 0 published (false)."""
    started = time.monotonic()
    torch.manual_seed(recipe.seed)
    stepper = on_all(ranks, lambda: _build_stepper(recipe, run, ranks=ranks))
    found = load_newest(run, ranks=ranks, report=log)
    if found is None:
        state = _begin(run, stepper)
    else:
        path, state = found
        _resume(stepper, path=path, state=state)
    ranks.barrier()
    if ranks.is_first:
        where = "starting" if found is None else f"resuming at step {state.step}"
        log(f"{where} on {ranks.world} ranks after {time.monotonic() - started:.1f} s")
    is_over = state.decided_step >= state.step >= recipe.steps
    outputs = Outputs(
        run=run,
        config=recipe.learner,
        ranks=ranks,
        stopping=lambda: stop_reason() is not None,
    )
    made: list[tuple[Client, Recorder]] = []

    def make() -> None:
        client = SharedClient(connect(patience_seconds=patience(recipe, is_over=is_over)))
        made.append((client, Recorder(run, space=outputs.space)))

    on_first(ranks, make)
    client, recorder = made[0] if made else (None, None)
    loop = Loop(
        recipe=recipe,
        run=run,
        ranks=ranks,
        stepper=stepper,
        state=state,
        client=client,  # type: ignore[arg-type]
        read=read,  # type: ignore[arg-type]
        recorder=recorder,  # type: ignore[arg-type]
        outputs=outputs,
        stop_reason=stop_reason,
    )
    return loop, found is not None


def _build_stepper(recipe: Recipe, run: Run, *, ranks: Ranks) -> Stepper:
    """Model (the starting policy), optimizer and objective, without a reference."""
    model = build_policy(
        run.model_start,
        recipe.model,
        ranks=ranks,
        chunk_tokens=recipe.learner.head_chunk_tokens,
    )
    optimizer = build_optimizer([p for _, p in model.named_weights()], config=recipe.algorithm)
    return Stepper(
        model=model,
        optimizer=optimizer,
        algorithm=recipe.algorithm,
        objective=objective_config(recipe.algorithm, max_new_tokens=longest_of_run(recipe)),
        ranks=ranks,
        tokens_per_micro_batch=recipe.learner.tokens_per_micro_batch,
        reference_placement=recipe.learner.reference_placement,
    )


def _begin(run: Run, stepper: Stepper) -> LearnerState:
    """Step 0: the starting policy is version 0, and the reference."""
    stepper.renew_reference(index=0, step=0)
    on_first(stepper.ranks, lambda: publish_start(run))
    return _first_state()


def _resume(stepper: Stepper, *, path: Path, state: LearnerState) -> None:
    """Fills the stepper from a checkpoint."""
    stepper.reference = restore(
        path,
        state,
        model=stepper.model,
        optimizer=stepper.optimizer,
        with_reference=stepper.objective.needs_reference,
        ranks=stepper.ranks,
        placement=stepper.reference_placement,
    )
    if stepper.reference is None:
        # The coefficient was 0 before: the reference begins here.
        index = int(state.reset.get("num_resets", 0))
        stepper.renew_reference(index=index, step=state.step)


def _first_state() -> LearnerState:
    return LearnerState(
        step=0,
        version=0,
        consumed=GroupIds(),
        filtered=0,
        samples=EffectiveSamples(),
        reset=state_to_json(ResetState()),
        reference=None,
        has_moments=False,
    )
