#!/usr/bin/env bash
# Runs the default sweep and puts its table and figures into docs/default, where the README shows them.
set -euo pipefail
cd "$(dirname "$0")/.."
sweep=$(mktemp -d)
trap 'rm -rf "$sweep"' EXIT
python -m mpcompare -m backend=scratch,amp,fp32 hydra.sweep.dir="$sweep"
mkdir -p docs/default
cp "$sweep"/report/*.{csv,json,png} docs/default/
grep -H examine_s "$sweep"/*/result.json
