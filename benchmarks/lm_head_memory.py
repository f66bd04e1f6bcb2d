"""Peak memory and time of the LM head, forward and backward: chunked against the plain ones.

    python benchmarks/lm_head_memory.py [--tokens 4096] [--hidden 512] [--vocabulary 32768]

Prints one table. Peers: the plain computation (full logits in float32) and the same computation
under activation checkpointing per chunk. The limit is what any method must add: the
gradients. Every method runs in a process of its own; memory is the peak above the inputs: the
allocator's on CUDA, the resident set's on CPU.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

METHODS = ("plain", "checkpointed", "chunked")


def measure(method: str, *, tokens: int, hidden: int, vocabulary: int, chunk: int) -> dict:
    """Best of two passes, after one that warms up; runs in a fresh process."""
    import torch

    from prorl_hpc.learner.lm_head import token_logprobs

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    scale = hidden**-0.5
    h = (torch.randn(tokens, hidden, generator=generator)).to(device).requires_grad_()
    w = (scale * torch.randn(vocabulary, hidden, generator=generator)).to(device).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), generator=generator).to(device)

    def plain(h, w, targets):
        return (h @ w.T).float().log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)

    def checkpointed(h, w, targets):
        parts = [
            torch.utils.checkpoint.checkpoint(plain, a, w, b, use_reentrant=False)
            for a, b in zip(h.split(chunk), targets.split(chunk), strict=True)
        ]
        return torch.cat(parts)

    def chunked(h, w, targets):
        return token_logprobs(h, w, targets, chunk_tokens=chunk).logprobs

    run = {"plain": plain, "checkpointed": checkpointed, "chunked": chunked}[method]
    # Warm up the libraries with tensors too small to leave freed memory behind for reuse.
    tiny = (h[:2, :4].detach().requires_grad_(), w[:8, :4].detach().requires_grad_())
    run(*tiny, targets[:2] % 8).sum().backward()
    before = memory_bytes(torch, device, peak=False)
    seconds = []
    for _ in range(2):
        h.grad = w.grad = None
        started = time.perf_counter()
        result = run(h, w, targets)
        result.sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return {
        "peak_bytes": memory_bytes(torch, device, peak=True) - before,
        "seconds": min(seconds),
        "checksum": float(result.detach().double().sum()),
        "gradient": float(w.grad.double().norm()),
        "device": device,
    }


def memory_bytes(torch, device: str, *, peak: bool) -> int:
    """Memory held now (the peak starts here), or the peak since."""
    if device == "cuda":
        if not peak:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
    if not peak:
        # Linux: sets the high-water mark of this process back to what it holds now.
        Path("/proc/self/clear_refs").write_text("5")
    field = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--chunk", type=int, default=256, help="tokens per chunk")
    parser.add_argument("--method", choices=METHODS, help=argparse.SUPPRESS)
    arguments = vars(parser.parse_args())
    method = arguments.pop("method")
    if method:
        print(json.dumps(measure(method, **arguments)))
        return
    flags = [f"--{name}={value}" for name, value in arguments.items()]
    rows = {}
    for name in METHODS:
        command = [sys.executable, __file__, f"--method={name}", *flags]
        rows[name] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    report(rows, **arguments)


def report(rows: dict, *, tokens: int, hidden: int, vocabulary: int, chunk: int) -> None:
    """One table; the ratio is against the plain computation."""
    limit = 4 * (tokens * hidden + vocabulary * hidden)
    plain = rows["plain"]
    print(
        f"LM head, {tokens} tokens, hidden {hidden}, vocabulary {vocabulary}, chunk {chunk}, "
        f"float32, {plain['device']}"
    )
    print(f"{'method':<14}{'peak MiB':>10}{'of plain':>10}{'seconds':>10}{'of plain':>10}")
    for name, row in rows.items():
        same = abs(row["checksum"] - plain["checksum"]) <= 1e-4 * abs(plain["checksum"])
        same &= abs(row["gradient"] - plain["gradient"]) <= 1e-4 * plain["gradient"]
        if not same:
            raise SystemExit(f"{name} differs from plain: {row} against {plain}")
        print(
            f"{name:<14}{row['peak_bytes'] / 2**20:>10.0f}"
            f"{row['peak_bytes'] / plain['peak_bytes']:>10.2f}"
            f"{row['seconds']:>10.2f}{row['seconds'] / plain['seconds']:>10.2f}"
        )
    print(f"{'limit':<14}{limit / 2**20:>10.0f}{limit / plain['peak_bytes']:>10.2f}  (gradients)")


if __name__ == "__main__":
    main()
