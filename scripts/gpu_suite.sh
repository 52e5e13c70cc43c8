#!/usr/bin/env bash
# Runs everything that needs a GPU, in about 20 minutes, the most important part first:
#
#     scripts/gpu_suite.sh OUT [PART...]
#
#   build      the native operators, for this GPU           ops        bench_ops.py
#   operators  pytest -m cuda: the operators' results       roofline   roofline.py
#   compile    amp_compile, so that the sweep finds it      tests      pytest -m cuda: all other tests
#              in inductor's cache                          memcheck   compute-sanitizer over the operators' tests
#   sweep      all backends, 16-bit ones in fp16            racecheck  the same, for data races
#   tasks      amp, amp_graph, fp32 and master_weights      ncu        the kernels of one step of fused
#              in fp16 on four other networks
#   recipe     fused, scratch, amp, amp_graph and fp32 in fp16 with AdamW, a cosine, clipping and two micro-batches
#   bf16       fused, scratch and amp in bf16
#   speed      fused, scratch, amp, amp_graph and fp32 at batch 512, 1024 wide: a step too small to fill a GPU
#
# Every part has a time limit. A part that fails is named in the end and makes the exit code 1; the others go on. The
# sanitizer and ncu may not work here, or may be too slow, so only the findings of the sanitizer count as a failure. The
# exit code is 3 if there is no GPU. OUT gets results.tar.gz, which holds everything, and next to it the files to read
# first; the tables are printed last. MNIST comes from the folder MPCOMPARE_DATA, or is downloaded; otherwise the data
# is digits.
#
# Environment: PYTHON, the interpreter (python3); MPCOMPARE_DATA, absolute or relative to the top of the repository,
# shown in the reports as it is given; MPCOMPARE_COMMIT, the commit of a copy without history; SUITE_SECONDS, the time
# limit of all parts together (1200).
set -euo pipefail

if (($# < 1)); then
  echo "usage: scripts/gpu_suite.sh OUT [PART...]" >&2
  exit 2
fi
python=${PYTHON:-python3}
limit=${SUITE_SECONDS:-1200} # seconds for all parts together; the tables after them take a few more
SECONDS=0

if ! said=$("$python" -c 'import torch' 2>&1); then
  echo "gpu_suite: $python cannot import torch, set PYTHON to one that can: ${said##*$'\n'}" >&2
  exit 2
fi
if ! said=$("$python" -c 'import sys, torch
if not torch.cuda.is_available(): sys.exit(f"torch {torch.__version__} sees no GPU")' 2>&1); then
  echo "gpu_suite: no GPU to run on: ${said##*$'\n'}" >&2
  exit 3
fi

mkdir -p "$1"
out=$(cd "$1" && pwd)
wanted=" ${*:2} "
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'limit=0' INT TERM # the results so far are still written
mkdir "$work/logs"
echo "part,result,seconds,said" >"$work/parts.csv"
: >"$out/suite.log"
failed=0
result=ok # result of the last part

say() { echo "$*" | tee -a "$out/suite.log"; }

ended() { # NAME RESULT SECONDS WHY [CODE]: notes the end of a part
  local why=${4//\"/\'}
  result=$2
  case $1,$2,${5:-0} in
    *,ok,*) ;;
    memcheck,*,99 | racecheck,*,99) failed=1 ;;
    memcheck,* | racecheck,* | ncu,*) ;;
    *) failed=1 ;;
  esac
  echo "$1,$2,$3,\"${why:0:200}\"" >>"$work/parts.csv"
  say "$(printf '%-10s %-8s %4d s  %s' "$1" "$2" "$3" "${why:0:120}")"
}

part() { # NAME SECONDS COMMAND...: runs a part; its output goes to logs/NAME.log
  local name=$1 seconds=$2 left=$((limit - SECONDS)) start=$SECONDS code=0 last
  shift 2
  [[ $wanted == "  " || $wanted == *" $name "* ]] || return 0
  if ((left < 5)); then
    ended "$name" "not run" 0 "no time was left"
    return 0
  fi
  ((seconds < left)) || seconds=$left
  # SIGINT lets Python programs write what they have; programs that do not end are killed.
  timeout -k 5 -s INT "$seconds" "$@" >"$work/logs/$name.log" 2>&1 || code=$?
  last=$(grep -v -e '^ *$' -e '^Report: ' "$work/logs/$name.log" | tail -n 1 | tr -s ' ' || true)
  if ((code == 0)); then
    ended "$name" ok $((SECONDS - start)) "$last"
  elif ((SECONDS - start >= seconds)); then
    ended "$name" stopped $((SECONDS - start)) "its time limit, $seconds s; last: $last"
  else
    ended "$name" failed $((SECONDS - start)) "exit code $code: $last" "$code"
  fi
}

tool() { # NAME: prints the path of a program, or nothing if there is none
  local found
  for found in "$(command -v "$1" || true)" "/usr/local/cuda/bin/$1"; do
    if [[ -x $found ]]; then
      echo "$found"
      return
    fi
  done
}

missing() { # PART TOOL: notes that a part's tool is not here
  [[ $wanted == "  " || $wanted == *" $1 "* ]] || return 0
  ended "$1" "no tool" 0 "$2 is not here"
}

say "gpu_suite: $(date -u +%Y-%m-%dT%H:%M:%SZ), $limit s at most"
nvcc=$("$python" -c 'from mpcompare.native import build; print(build.cuda_recipe("sm_90").compiler[0])' 2>&1) ||
  say "no nvcc, so no native operators, no fused, and scratch by plain torch: ${nvcc##*$'\n'}"
data=$(timeout 60 "$python" -c 'import logging; logging.disable()
from mpcompare.tasks.data import mnist
print(mnist.auto(0, 1500).name)' 2>/dev/null | tail -n 1) || data=digits
say "data: $data"

sweep() { # NAME SECONDS BUDGET FOLDER OVERRIDES...: runs a sweep as a part
  part "$1" "$2" "$python" -m mpcompare -m "measure.budget_s=$3" "hydra.sweep.dir=$work/$4" \
    hydra.launcher.silence_limit_s=75 "${@:5}"
}
# Slow tests are included. Tests of the prose need more packages, and no GPU.
pytest=("$python" -m pytest -q -p no:cacheprovider -o addopts="-ra --strict-markers --import-mode=importlib" -m cuda)
tests() { # NAME SECONDS ARGUMENTS...: runs tests as a part, in eight processes
  part "$1" "$2" "${pytest[@]}" -n 8 --maxfail=20 --durations=10 --junit-xml="$work/junit-$1.xml" "${@:3}"
}
operators=(tests/native/test_ops.py tests/native/test_fused_ops.py tests/native/test_optimizer_ops.py)
sixteen=fused,scratch,amp,amp_graph,master_weights
networks=mnist_cnn,char_gpt,text_lstm,cifar10_cnn

part machine 30 "$python" scripts/describe_machine.py "$work/machine.json" --dataset "$data"
part build 120 "$python" scripts/build_ops.py
tests operators 90 "${operators[@]}"
part compile 120 "$python" scripts/one_step.py amp_compile
[[ $result == stopped ]] || sixteen+=,amp_compile # otherwise it would take the sweep's time from all others
sweep sweep 240 25 default "backend=$sixteen,fp32,tf32" "data=$data"
sweep recipe 120 10 recipe backend=fused,scratch,amp,amp_graph,fp32 "data=$data" optimizer=adamw schedule=cosine \
  task.clip_norm=1 task.accumulate=2
part roofline 60 "$python" scripts/roofline.py --data "$data" --csv "$work/roofline.csv" --png "$work/roofline.png"
ncu=$(tool ncu)
if [[ $ncu ]]; then
  metrics=gpu__time_duration.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed
  metrics+=,sm__throughput.avg.pct_of_peak_sustained_elapsed
  # The GPU's clocks are left alone: others may use the GPU too.
  part ncu 60 "$ncu" --clock-control none --profile-from-start off --csv --print-units base --metrics "$metrics" \
    --log-file "$work/ncu.log" "$python" scripts/one_step.py fused
else
  missing ncu ncu
fi
sweep bf16 120 10 bf16 backend=fused,scratch,amp precision=bf16 "data=$data"
part ops 60 "$python" scripts/bench_ops.py --csv "$work/ops.csv"
sweep tasks 240 5 tasks "task=$networks" backend=amp,amp_graph,fp32,master_weights train.steps=10 verdict.noise=1
sweep speed 120 15 speed +experiment=speed backend=fused,scratch,amp,amp_graph,fp32 "data=$data" \
  task.batch_size=512 'task.model.hidden=[1024]'
tests tests 300 tests --ignore=tests/docs --ignore=tests/test_structure.py "${operators[@]/#/--ignore=}"

sanitizer=$(tool compute-sanitizer)
few=(--hypothesis-profile=few "${operators[@]}") # the sanitizer is 10 to 100 times slower
if [[ $sanitizer ]]; then
  for name in memcheck racecheck; do
    part "$name" 150 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$sanitizer" --tool "$name" --error-exitcode 99 \
      "${pytest[@]}" "${few[@]}"
  done
else
  missing memcheck compute-sanitizer
  missing racecheck compute-sanitizer
fi
for name in default tasks recipe bf16 speed; do # a sweep that was stopped has records but no report yet
  if [[ -d $work/$name && ! -f $work/$name/report/summary.csv ]]; then
    timeout -k 2 20 "$python" -m mpcompare.report "$work/$name" >"$work/logs/report-$name.log" 2>&1 || true
  fi
done
code=0
timeout -k 2 25 "$python" scripts/suite_tables.py "$work" >"$work/tables.txt" 2>"$work/logs/tables.log" || code=$?
if ((code)); then
  ended tables failed 0 "$(tail -n 1 "$work/logs/tables.log")"
fi
cp "$out/suite.log" "$work/"
tar -czf "$out/results.tar.gz" -C "$work" .
for file in tables.txt machine.json roofline.png default/report/summary.csv; do
  [[ -f $work/$file ]] && cp "$work/$file" "$out/"
done
tail -c 8500 "$work/tables.txt" # the most important tables
echo
cat "$out/suite.log"
exit "$failed"
