#!/usr/bin/env bash
# Builds csrc/cpu, and csrc/cuda for the emulator, with the address and undefined-behaviour sanitizers, and runs the
# operators' tests on these builds. Tests that draw shapes, strides and values at random draw 1000 new examples each
# time. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
cxx=${CXX:-g++}
XDG_CACHE_HOME=$(mktemp -d)
trap 'rm -rf "$XDG_CACHE_HOME"' EXIT
export XDG_CACHE_HOME
export CXX="$cxx -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g"
export ASAN_OPTIONS=detect_leaks=0:strict_string_checks=1 # Python and torch do not free all memory
export UBSAN_OPTIONS=print_stacktrace=1
runtime="$($cxx -print-file-name=libasan.so) $($cxx -print-file-name=libstdc++.so)" # libstdc++ too: its throw is intercepted
LD_PRELOAD="$runtime" python -m pytest -q -p no:cacheprovider --hypothesis-profile=fuzz -m "" \
  tests/native/test_ops.py tests/native/test_fused_ops.py tests/native/test_optimizer_ops.py tests/native/test_cuda_emulated.py "$@"
