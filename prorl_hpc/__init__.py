"""Prolonged reinforcement learning of language-model agents on Slurm."""

__version__ = "0.1.0"
