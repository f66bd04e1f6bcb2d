"""evaluation of prorl-hpc; see docs/architecture.md."""
