#!/usr/bin/env bash
# Makes most files anew that the README and the pages show, and writes their numbers into the pages. All parts take about
# an hour. Nothing else should run on the machine meanwhile.
#
#     scripts/docs_figures.sh [PART...] [OVERRIDES...]     all parts, or the named ones
#
# Parts: pitfalls, footprint, scalers, first_look, default, speed, bench, as_published, power. OVERRIDES, such as
# measure.budget_s=300, go to every sweep.
#
# Not made anew: docs/power/correct.csv, whose thousands of runs take a day (tests/power.py correct),
# docs/power/command.csv (scripts/networks_table.py), docs/real_bugs (tests/power.py real), docs/peers (scripts/peers.py),
# docs/watch (scripts/watch_cost.py, tests/watch/judge.py) and docs/clusters (scripts/many_races.py).
#
# For scalers, install the libraries first: pip install -e '.[scalers]'. Else it prints what this project's classes do.
#
# Environment: DOCS, the folder to write into (docs); PYTHON, the interpreter (python).
set -euo pipefail
docs=$(realpath -m "${DOCS:-$(dirname "$0")/../docs}")
python=${PYTHON:-python}
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD
parts=() overrides=()
for argument; do
  if [[ $argument == *=* ]]; then overrides+=("$argument"); else parts+=("$argument"); fi
done
((${#parts[@]})) || parts=(pitfalls footprint scalers first_look default speed bench as_published power)
sweeps=$(mktemp -d)
trap 'rm -rf "$sweeps"' EXIT

pitfalls() {
  "$python" -m mpcompare.pitfalls --out "$docs/pitfalls/pitfalls.png" | grep -v '^wrote' | sed 's/ *$//' \
    >"$docs/pitfalls/output.txt"
}

footprint() {
  local tasks=(mnist_mlp recipe_mlp mnist_cnn cifar10_cnn text_lstm imdb_lstm char_gpt)
  "$python" -m mpcompare.footprint gpt2 --out "$docs/footprint/gpt2.png" | grep -v '^wrote' | sed 's/ *$//' \
    >"$docs/footprint/gpt2.txt"
  "$python" scripts/check_footprint.py "${tasks[@]}" >"$docs/footprint/measured_tasks.txt"
  "$python" scripts/check_footprint.py gpt2 --batch 1 --length 128 >"$docs/footprint/measured_gpt2.txt"
}

scalers() {
  "$python" -m mpcompare.scalers ..x....xx.. --interval 4 | sed 's/ *$//' >"$docs/scalers/pattern.txt"
  "$python" -m mpcompare.scalers --thresholds docs/scalers/thresholds.txt --interval 50 \
    --out "$docs/scalers/scalers.png" | grep -v '^wrote' | sed 's/ *$//; /start  *end/,$!d' >"$docs/scalers/ends_with.txt"
}

first_look() { # its table, the answers, and the line that names the page
  "$python" -m mpcompare +experiment=first_look "${overrides[@]}" hydra.sweep.dir="$sweeps/first_look" |
    sed "/^\[/d; s| *\$||; s|$sweeps/first_look|multirun/DATE/TIME|" |
    awk '/^Right\?/ {answers = 1} answers; !cut && NF; /^$/ && ++blank == 2 {cut = 1; print "..."}' \
      >"$docs/first_look/output.txt"
  scripts/screenshot.sh "$sweeps/first_look/report/index.html" "$docs/first_look/page.png" 1280,760
}

default() {
  "$python" -m mpcompare -m backend=scratch,amp,fp32 "${overrides[@]}" hydra.sweep.dir="$sweeps/default"
  cp "$sweeps"/default/report/*.{csv,json,png} "$docs/default/"
}

speed() {
  sweep 8192 'amp amp_compile fp32' backend=scratch,amp,fp32,fused,amp_compile
  sweep 8192_adamw amp backend=scratch,amp,fused optimizer=adamw data=digits measure.budget_s=75 verdict.noise=1 \
    train.steps=8
}

sweep() { # NAME BASELINES OVERRIDES...: one sweep, and its ratios to each of the baselines
  local name=$1 baselines=$2 folder=$docs/speed/$1
  shift 2
  mkdir -p "$folder"
  "$python" -m mpcompare -m "$@" "${overrides[@]}" hydra.sweep.dir="$sweeps/$name"
  echo "python -m mpcompare -m" "$@" "${overrides[@]}" >"$folder/command.txt"
  for baseline in $baselines; do
    "$python" -m mpcompare.report "$sweeps/$name" --out "$sweeps/$name/$baseline" --baseline "$baseline" >/dev/null
    cp "$sweeps/$name/$baseline/summary.csv" "$folder/vs_$baseline.csv"
  done
}

bench() {
  "$python" scripts/bench_ops.py --only products --csv "$docs/bench/ops.csv"
  "$python" scripts/foretold_memory.py --out "$docs/bench/foretold_memory.csv"
}

as_published() { # its verdicts in words, and the first losses of amp and of the scaler that doubles
  local folder=$sweeps/as_published
  "$python" -m mpcompare +experiment=as_published data=digits "${overrides[@]}" hydra.sweep.dir="$folder"
  grep '^- \*\*[^?]*\*\*:' "$folder/report/summary.md" >"$docs/as_published/verdicts.txt"
  paste -d, "$folder"/{0,2}/steps.csv | awk -F, 'NR == 1 {print "step,loss of `amp`,loss of the mistake,its loss scale"}
    NR > 1 && NR < 10 {printf "%d,%.5f,%s,%d\n", $1, $3, $16 + 0 == $16 ? sprintf("%.5f", $16) : "nan", $18}' \
    >"$docs/as_published/losses.csv"
}

power() {
  "$python" tests/power.py planted --family all --csv "$docs/power" >/dev/null
}

for part in "${parts[@]}"; do
  [[ " pitfalls footprint scalers first_look default speed bench as_published power " == *" $part "* ]] || {
    echo "$part: expected pitfalls, footprint, scalers, first_look, default, speed, bench, as_published or power" >&2
    exit 2
  }
done
for part in "${parts[@]}"; do
  mkdir -p "$docs/$part"
  "$part"
done
if [[ $docs == "$PWD/docs" ]]; then "$python" scripts/docs_numbers.py; fi
