"""The LLM API that programs in a sandbox talk to; see docs/harness.md."""
