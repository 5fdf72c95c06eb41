#!/usr/bin/env bash
# Checks fp16core on the NVIDIA GPU of this machine, in eight minutes at most: builds
# it for that GPU, runs the tests, lets compute-sanitizer watch the kernels, and times
# them. Prints one table, and exits with 1 if anything failed.
#
#   bash tests/gpu/run.sh
#
# PYTHON  the python with torch, and what builds and tests need (else that on PATH)
# OUT     where logs, the table and the timings go (build/gpu/out)
#
# Nothing is downloaded, unless doctest.h is missing and apt-get can bring it.

set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1

export OUT=${OUT:-build/gpu/out}
export PYTHON=${PYTHON:-$(command -v python || command -v python3)}
# CMake and Ninja may lie beside the interpreter; compute-sanitizer in the toolkit.
PATH=$(dirname "${PYTHON:-.}"):$PATH:${CUDA_HOME:-/usr/local/cuda}/bin
export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}
site=$PWD/build/gpu/site # what is tested
tree=build/gpu/tree # CMake's build folder
export PYTHONPATH=$site

seconds_in_all=480
skipped=77 # as exit status of a stage; its last line says why

has_module() {
  "$PYTHON" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$1') is None)"
}

# ---- the stages ----

# A wheel, as users build it; plain CMake where scikit-build-core is missing.
stage_build() {
  set -e
  rm -rf "$site"
  if has_module scikit_build_core && has_module pip; then
    rm -rf build/gpu/dist
    "$PYTHON" -m pip wheel . --disable-pip-version-check --no-build-isolation \
      --no-deps --no-index --verbose --wheel-dir build/gpu/dist \
      --config-settings build-dir=$tree \
      --config-settings cmake.define.FP16CORE_CUDA=ON \
      --config-settings cmake.define.FP16CORE_BUILD_TESTS=OFF \
      --config-settings "cmake.define.CMAKE_CUDA_ARCHITECTURES=$ARCHITECTURE"
    "$PYTHON" -m pip install --disable-pip-version-check --no-deps --no-index \
      --target "$site" build/gpu/dist/*.whl
  else
    local generator=()
    if command -v ninja >/dev/null; then generator=(-G Ninja); fi
    cmake -S . -B $tree "${generator[@]}" -DFP16CORE_CUDA=ON \
      -DFP16CORE_BUILD_TESTS=OFF -DPython_EXECUTABLE="$PYTHON" \
      "-DCMAKE_CUDA_ARCHITECTURES=$ARCHITECTURE"
    cmake --build $tree
    cmake --install $tree --prefix "$site/fp16core"
    cp -r python/fp16core "$site/"
  fi
  "$PYTHON" -m fp16core --info
  "$PYTHON" -c "from fp16core import _core; assert _core.built_with_cuda()"
}

stage_python_tests() {
  has_module pytest || { echo "there is no pytest"; return 1; }
  FP16CORE_REQUIRE_CUDA=1 "$PYTHON" -m pytest tests/test_device.py --slow \
    --durations=10 --junitxml="$OUT/test_device.xml"
}

stage_cpp_tests() {
  local doctest
  doctest=$(timeout 30 sh cpp/tests/get_doctest.sh build/gpu/doctest) || return 1
  cmake $tree -DFP16CORE_BUILD_TESTS=ON -DFP16CORE_DOCTEST_DIR="$doctest" &&
    cmake --build $tree --target fp16core_tests &&
    # The emulated device is for machines without a GPU.
    ctest --test-dir $tree --output-on-failure -E on_host
}

sanitized() {
  if ! command -v compute-sanitizer >/dev/null; then
    echo "there is no compute-sanitizer"
    return $skipped
  fi
  local only=()
  if compute-sanitizer --help 2>&1 | grep -q -- --kernel-regex; then
    only=(--kernel-regex kns=fp16core) # torch's own kernels take long
  fi
  compute-sanitizer --tool "$1" --error-exitcode 9 "${only[@]}" \
    "$PYTHON" tests/gpu/exercise.py
}

stage_memcheck() {
  sanitized memcheck
}

stage_racecheck() {
  sanitized racecheck
}

stage_timings() {
  "$PYTHON" tests/gpu/timings.py --json "$OUT/timings.json"
}

if [ "${1:-}" = --stage ]; then
  "stage_$2"
  exit
fi

# ---- the run ----

if [ -z "$PYTHON" ]; then
  echo "tests/gpu/run.sh: there is no python on PATH, and PYTHON is not set" >&2
  exit 1
fi
gpu=$("$PYTHON" - <<'END'
import sys
needs = "tests/gpu/run.sh: needs a torch that finds a GPU, but"
try:
    import torch
except ImportError as error:
    sys.exit(f"{needs} {sys.executable} cannot import one: {error}")
if not torch.cuda.is_available():
    sys.exit(f"{needs} torch {torch.__version__} finds no CUDA device")
major, minor = torch.cuda.get_device_capability()
print(f"{major}{minor}-real {torch.cuda.get_device_name()}, torch {torch.__version__}")
END
) || exit 1
export ARCHITECTURE=${gpu%% *}
mkdir -p "$OUT"
rm -f "$OUT"/*.log "$OUT"/table.txt "$OUT"/timings.json
echo "${gpu#* }"

failed=0
built=1
rows=()

# stage NAME SECONDS: runs a stage within its budget and what is left of the whole.
stage() {
  local name=$1 budget=$2 start=$SECONDS status note=
  local log=$OUT/$name.log
  local left=$((seconds_in_all - SECONDS))
  if [ "$left" -lt "$budget" ]; then budget=$left; fi
  echo "=== $name"
  if [ "$built" = 0 ]; then
    status=FAIL note="nothing was built"
  elif [ "$budget" -lt 5 ]; then
    status=FAIL note="no time was left"
  else
    timeout -k 5 "$budget" bash tests/gpu/run.sh --stage "$name" >"$log" 2>&1
    local code=$?
    tail -n 40 "$log"
    case $code in
      0) status=PASS ;;
      "$skipped") status=SKIPPED note=$(tail -n 1 "$log") ;;
      124 | 137) status=FAIL note="took longer than $budget s" ;;
      *) status=FAIL note="exit status $code, see $log" ;;
    esac
  fi
  if [ $status = FAIL ]; then
    failed=1
    if [ "$name" = build ]; then built=0; fi
  fi
  rows+=("$(printf '%-14s %-8s %4d s  %s' "$name" $status $((SECONDS - start)) "$note")")
}

stage build 250
stage python_tests 100
stage cpp_tests 90
stage memcheck 60
stage racecheck 60
stage timings 60

{
  echo
  echo "${gpu#* }"
  printf '%s\n' "${rows[@]}"
} | tee "$OUT/table.txt"
exit $failed
