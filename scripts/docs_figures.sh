#!/usr/bin/env bash
# Runs what is behind the figures and tables of README and docs: the pitfalls, the footprint of GPT-2, the scalers, the
# default sweep into docs/default, and the sweeps of speed into docs/speed/NAME. It prints the tables for the README. It
# takes about half an hour, during which nothing else should run on the machine.
#
#     scripts/docs_figures.sh [OVERRIDES...]     the overrides go to every sweep
#
# Environment: DOCS, the folder to write into (docs); PYTHON, the interpreter (python).
set -euo pipefail
docs=$(realpath -m "${DOCS:-$(dirname "$0")/../docs}")
python=${PYTHON:-python}
cd "$(dirname "$0")/.."
overrides=("$@")
kept=()
sweeps=$(mktemp -d)
trap 'rm -rf "$sweeps"' EXIT

mkdir -p "$docs"/{pitfalls,footprint,scalers}
"$python" -m mpcompare.pitfalls --out "$docs/pitfalls/pitfalls.png"
"$python" -m mpcompare.footprint gpt2 --out "$docs/footprint/gpt2.png"
"$python" -m mpcompare.scalers --thresholds docs/scalers/thresholds.txt --interval 50 --out "$docs/scalers/scalers.png"
"$python" -m mpcompare -m backend=scratch,amp,fp32 "${overrides[@]}" hydra.sweep.dir="$sweeps/default"
mkdir -p "$docs/default"
cp "$sweeps"/default/report/*.{csv,json,png} "$docs/default/"

speed() { # NAME VARIABLES -- BASELINES -- OVERRIDES...: one sweep, and its ratios to each of the baselines
  local name=$1 variables=() baselines=() said
  shift
  while [[ $1 != -- ]]; do variables+=("$1") && shift; done
  shift
  while [[ $1 != -- ]]; do baselines+=("$1") && shift; done
  shift
  said=("${variables[@]}" python -m mpcompare +experiment=speed "$@" "${overrides[@]}")
  env "${variables[@]}" "$python" -m mpcompare +experiment=speed "$@" "${overrides[@]}" \
    hydra.sweep.dir="$sweeps/$name"
  mkdir -p "$docs/speed/$name"
  echo "${said[*]}" >"$docs/speed/$name/command.txt"
  for baseline in "${baselines[@]}"; do
    "$python" -m mpcompare.report "$sweeps/$name" --out "$sweeps/$name/$baseline" --baseline "$baseline" >/dev/null
    cp "$sweeps/$name/$baseline/summary.csv" "$docs/speed/$name/vs_$baseline.csv"
  done
  kept+=("$docs/speed/$name")
}

malloc=(MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=8589934592) # glibc keeps freed activations
small=(task.batch_size=2048 'task.model.hidden=[2048]')
smaller=(task.batch_size=512 'task.model.hidden=[1024]')
speed 8192 -- amp amp_compile fp32 --
speed 8192_malloc "${malloc[@]}" -- amp amp_compile fp32 --
speed 8192_fp32 -- fp32 -- backend=fused,scratch,fp32 precision=fp32
speed 2048 -- amp amp_compile fp32 -- "${small[@]}"
speed 2048_fp16 -- amp -- backend=fused,scratch,amp precision=fp16 "${small[@]}"
speed 512x1024 -- amp amp_compile fp32 -- "${smaller[@]}"
"$python" scripts/readme_speed.py "${kept[@]}"
