# One command each, on a fresh Debian or Ubuntu machine too: every target sets up what it needs.
#   make demo    the whole pipeline on this machine
#   make test    lint and every test that this machine can run
#   make test-vllm PRORL_VLLM_PYTHON=/path/to/python   the real vLLM, in an environment of its own
# PYTHON=... picks the interpreter of .venv; PRORL_TORCH_INDEX=URL the index that torch comes from.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-vllm lint cluster-up cluster-down clean

BIN := .venv/bin
CLUSTER := tests/cluster/minicluster
PREFIX ?= /var/tmp/prorl-cluster-$(shell id -un)
export OMP_NUM_THREADS ?= 1

help:
	@echo "make demo         run the pipeline on this machine and show what it learned"
	@echo "make test         lint, then every test that this machine can run"
	@echo "make test-vllm    tests against a real vLLM; PRORL_VLLM_PYTHON names its interpreter"
	@echo "make lint         ruff, mypy, import-linter, shellcheck"
	@echo "make setup        only create .venv with the pinned packages"
	@echo "make cluster-up   start a private Slurm under PREFIX (root or sudo); cluster-down stops it"
	@echo "make clean        remove .venv and caches"

setup:
	@.ci/setup

demo: setup
	@$(BIN)/prorl-hpc demo

lint: setup
	@$(BIN)/python .ci/check.py lint

test: setup
	@$(BIN)/python .ci/check.py lint test

test-vllm: setup
	@test -n "$$PRORL_VLLM_PYTHON" || { echo "name the interpreter that has vLLM: make test-vllm PRORL_VLLM_PYTHON=..."; exit 2; }
	@$(BIN)/python -m pytest -q -m vllm tests/prorl_hpc/inference

cluster-up:
	@$(CLUSTER)/install-slurm
	@$(CLUSTER)/up $(PREFIX)

cluster-down:
	@$(CLUSTER)/down $(PREFIX)

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
