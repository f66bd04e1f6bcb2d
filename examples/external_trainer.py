"""A trainer of one's own on top of the rollout service: GRPO in plain torch, about 60 lines.

    prorl-hpc serve recipe=quickstart --policy POLICY --dir SERVICE
    python examples/external_trainer.py POLICY SERVICE --steps 20

It asks the service for groups of rollouts, takes one step on them, publishes the new weights on
the shared file system and tells the service, which goes on without a restart.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from prorl_hpc.policy import publish_directory
from prorl_hpc.service.client import RolloutClient


def policy_loss(model, samples):
    """Token-mean policy gradient over one group, with its mean reward as the baseline."""
    rewards = torch.tensor([sample["reward"] for sample in samples])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    total, count = torch.zeros(()), 0
    for sample, advantage in zip(samples, advantages, strict=True):
        tokens = torch.tensor(sample["tokens"])
        mask = torch.tensor(sample["loss_mask"][1:], dtype=torch.bool)
        logits = model(tokens[None, :-1]).logits[0].float()
        new = torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0][mask]
        old = torch.tensor(sample["logprobs"][1:])[mask]
        ratio = (new - old).exp()  # weights may have moved since the token was sampled
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        total, count = total - surrogate.sum(), count + int(mask.sum())
    return total / max(count, 1)


def publish(model, start, directory, version):
    """Weights, configuration and tokenizer as a version that the service will accept."""

    def write(target):
        model.save_pretrained(target)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            if (start / name).is_file():
                (target / name).write_bytes((start / name).read_bytes())

    path = directory / "trained" / f"v{version:08d}"
    publish_directory(path, version=version, step=version, write=write)
    return path


def train(policy, service, *, steps, groups=4, num_samples=8, learning_rate=1e-4):
    """Returns the mean reward of each step."""
    model = AutoModelForCausalLM.from_pretrained(policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    history = []
    with RolloutClient.at(service) as client:
        task = client.tasks()[0]
        for step in range(steps):
            jobs = [
                client.submit(task=task["name"], index=(step * groups + group) % task["train_size"],
                              num_samples=num_samples, seed=step, idempotency_key=f"{step}/{group}")
                for group in range(groups)
            ]  # fmt: skip
            batch = [client.result(job)["samples"] for job in jobs]
            usable = [[s for s in group if s["reward"] is not None] for group in batch]
            loss = torch.stack([policy_loss(model, group) for group in usable if len(group) > 1])
            optimizer.zero_grad()
            loss.mean().backward()
            optimizer.step()
            client.load_policy(step + 1, path=publish(model, policy, service, step + 1))
            rewards = [sample["reward"] for group in usable for sample in group]
            history.append(sum(rewards) / len(rewards))
            print(f"step {step + 1}: mean reward {history[-1]:.3f}", flush=True)
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("policy", type=Path)
    parser.add_argument("service", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    train(arguments.policy, arguments.service, steps=arguments.steps)
