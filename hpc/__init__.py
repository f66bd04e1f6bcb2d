"""The cluster layer: plans, scripts, jobs, containers, files. Knows nothing of learning."""
