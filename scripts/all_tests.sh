#!/usr/bin/env bash
# Runs every test in the environment of .venv, which has the extras test, peers, scalers, networks and loops. Takes about
# an hour on two cores; .ci/run takes a part of the slow tests by turns.
set -euxo pipefail
cd "$(dirname "$0")/.."
.venv/bin/python -m pytest
.venv/bin/python -m pytest -m 'slow and not quiet'
.venv/bin/python -m pytest -m quiet -n 0
