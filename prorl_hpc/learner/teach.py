"""Supervised steps on demonstrations, which can be stopped anywhere. Knows no run and no recipe.

    draw a batch -> log-probabilities of the answers -> AdamW ... stop wanted? -> one file -> on

The file holds weights, moments and the place in the sequence of examples: the steps that follow
are those of a warm-up that was never stopped, bit for bit in deterministic mode.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hpc.files import publish_with
from prorl_hpc.learner.attention import document_layout
from prorl_hpc.learner.demonstrations import Demonstrations, Example
from prorl_hpc.learner.model import PolicyModel
from prorl_hpc.learner.record import log
from prorl_hpc.recipe import WarmupConfig

FORMAT = "1"
SAVE_SECONDS = 300.0
"""A warm-up that is killed loses so much at most."""
TELL_STEPS = 20
TELL_SECONDS = 10.0
MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass(kw_only=True, slots=True)
class Teacher:
    """A model, what teaches it, and how far it is."""

    model: PolicyModel
    examples: Demonstrations
    config: WarmupConfig
    device: torch.device
    path: Path
    """Where it leaves what it has done."""
    fingerprint: str
    """Of all that it depends on; a file with another one is of no use."""
    report: Callable[[int, float], None]
    """(steps done, loss in nats per token), now and then."""
    step: int = 0
    _optimizer: torch.optim.AdamW = field(init=False)
    _told: float = field(init=False)

    def __post_init__(self) -> None:
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=self.config.learning_rate,
            weight_decay=0.0,
            foreach=False,
        )
        self._told = time.monotonic()

    def run(self, *, stop_reason: Callable[[], str | None]) -> str | None:
        """Takes all steps that are left; None, or why it was stopped (what it has done is kept)."""
        saved = time.monotonic()
        while self.step < self.config.steps:
            reason = stop_reason()
            if reason is not None:
                self.save()
                log(f"warm-up stops after {self.step} of {self.config.steps} steps: {reason}")
                return reason
            self._tell(self._take_step())
            if time.monotonic() - saved > SAVE_SECONDS:
                saved = time.monotonic()
                self._try_to_save()
        self._optimizer.zero_grad(set_to_none=True)
        return None

    def go_on(self) -> None:
        """Takes over what an earlier attempt has done, if it can be used."""
        from safetensors import SafetensorError, safe_open

        if not self.path.exists():
            return
        try:
            with safe_open(self.path, framework="pt") as stream:
                facts = stream.metadata() or {}
                if (facts.get("format"), facts.get("of")) != (FORMAT, self.fingerprint):
                    log("warm-up begins anew: what was kept belongs to another recipe")
                    return
                tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as err:
            log(f"warm-up begins anew: {self.path.name} can't be read ({err})")
            return
        self._fill(tensors)
        self.examples.go_on_from(facts["place"])
        self.step = int(facts["step"])
        log(f"warm-up goes on after {self.step} of {self.config.steps} steps")

    def save(self) -> None:
        """Keeps weights, moments and place. Raises OSError with the file before in place."""
        from prorl_hpc.learner.weights import write_tensors

        tensors: dict[str, Tensor] = {}
        for name, parameter in self.model.named_weights():
            tensors[f"weight/{name}"] = parameter.detach().cpu()
            for moment, value in self._optimizer.state.get(parameter, {}).items():
                tensors[f"{moment}/{name}"] = value.detach().cpu()
        facts = {
            "format": FORMAT,
            "of": self.fingerprint,
            "step": str(self.step),
            "place": self.examples.place,
        }
        publish_with(
            self.path, write=lambda path: write_tensors(tensors, path, facts=facts, durable=True)
        )

    def _try_to_save(self) -> None:
        try:
            self.save()
        except OSError as err:
            log(f"warm-up goes on, but what it has done can't be kept: {err}")

    def _fill(self, tensors: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_weights():
                parameter.copy_(tensors[f"weight/{name}"])
                state = {
                    moment: tensors[f"{moment}/{name}"].clone()
                    for moment in MOMENTS
                    if f"{moment}/{name}" in tensors
                }
                if state:
                    for moment in ("exp_avg", "exp_avg_sq"):
                        state[moment] = state[moment].to(self.device)
                    self._optimizer.state[parameter] = state

    def _take_step(self) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = self.config.learning_rate * _rate(self.step, self.config.steps)
        batch = [next(self.examples) for _ in range(self.config.batch)]
        loss = -_answer_logprobs(self.model, batch, device=self.device).mean()
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=False)
        self._optimizer.step()
        self.step += 1
        return float(loss.detach())

    def _tell(self, loss: float) -> None:
        now = time.monotonic()
        due = (self.step - 1) % TELL_STEPS == 0 or self.step == self.config.steps
        if due or now - self._told >= TELL_SECONDS:
            self._told = now
            log(f"warm-up step {self.step} of {self.config.steps}: loss {loss:.3f}")
            self.report(self.step, loss)


def _rate(step: int, steps: int) -> float:
    """Warm up over a tenth, then fall linearly to a tenth."""
    rise = max(1, steps // 10)
    return min((step + 1) / rise, 1.0 - 0.9 * step / max(steps, 1))


def _answer_logprobs(
    model: PolicyModel, batch: Sequence[Example], *, device: torch.device
) -> torch.Tensor:
    starts = np.cumsum([0, *(ids.shape[0] for ids, _ in batch)])
    flat = torch.from_numpy(np.concatenate([ids for ids, _ in batch])).to(device)
    answers = torch.from_numpy(
        np.concatenate(
            [
                np.arange(start + begin, start + ids.shape[0])
                for start, (ids, begin) in zip(starts, batch, strict=False)
            ]
        )
    ).to(device)
    logprobs: torch.Tensor = model(
        flat,
        document_layout([ids.shape[0] for ids, _ in batch], device=device),
        answers - 1,
        flat[answers],
        torch.ones(answers.shape[0], device=device),
    ).logprobs
    return logprobs
