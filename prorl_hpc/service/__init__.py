"""Rollouts as an HTTP service for other trainers; see docs/rollout-service.md."""
