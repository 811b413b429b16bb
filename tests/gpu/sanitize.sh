#!/usr/bin/env bash
# Runs the four tools of compute-sanitizer over the kernels' parity tests, all of whose sizes are small, and over small
# plans inside the persistent kernel and as stacks in one, and prints one line for each.  Fails if a tool reports anything,
# or if the tests fail without any.
#
#     tests/gpu/sanitize.sh             # PYTHON and COMPUTE_SANITIZER name other programs than those on the PATH
#     tests/gpu/sanitize.sh -k large_k     # arguments of pytest; files among them take the place of those above
#     KEEP=folder tests/gpu/sanitize.sh # leaves the tools' reports in a folder
set -uo pipefail
cd "$(dirname "$0")/../.."

# What a tool reports wrongly, one line each: "part of kernels' names | tool | reason". sanitizer_errors.cu has a minimal
# kernel of each kind, and forms that are not reported.
exceptions=(
    "_large_k | racecheck | where one lane arrives at a barrier in shared memory for its warp, it misses what the others wrote"
    "dense_update_stream | racecheck | the same"
    "persistent_ | synccheck | calls an aligned barrier divergent to which two roles come from two places, and ends the kernel"
)

tools=(memcheck racecheck initcheck synccheck)
sanitizer=${COMPUTE_SANITIZER:-compute-sanitizer}
reports=${KEEP:-$(mktemp -d)}
mkdir -p "$reports"
# Nothing but the tests and what they need: plugins may import PyTorch, whose CUDA calls would be watched too.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 MLPGPU_REQUIRE_GPU=1 PYTHONPATH="$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}"
files=(
    tests/gpu/test_parity.py tests/gpu/test_persistent.py::test_small_plans
    tests/gpu/test_persistent.py::test_small_plans_of_few_rows tests/gpu/test_local_stack.py::test_small_stacks
)
for argument in "$@"; do [[ -e ${argument%%::*} ]] && files=(); done
tests=("${PYTHON:-python3}" -m pytest -q -x -m gpu -p no:cacheprovider -p no:benchmark --confcutdir=tests/gpu "${files[@]}" "$@")

# Compiles the kernels, which the tools then find in the cache.
if ! "${tests[@]}" >"$reports/plain" 2>&1; then
    tail -n 40 "$reports/plain"
    echo "the tests fail without a tool"
    exit 1
fi

check() {
    local options=(--tool "$1" --error-exitcode 99 --report-api-errors no)
    for exception in "${exceptions[@]}"; do
        IFS='|' read -r kernel tool reason <<<"$exception"
        [[ ${tool// /} == "$1" ]] && options+=(--kernel-name-exclude "kernel_substring=${kernel// /}")
    done
    [[ $1 == racecheck ]] && options+=(--racecheck-report all)
    "$sanitizer" "${options[@]}" "${tests[@]}" >"$reports/$1" 2>&1
}

declare -A jobs
for tool in "${tools[@]}"; do
    check "$tool" &
    jobs[$tool]=$!
done

failures=0
for tool in "${tools[@]}"; do
    wait "${jobs[$tool]}"
    status=$?
    summary=$(grep -hE '(ERROR|RACECHECK) SUMMARY' "$reports/$tool" | sed 's/^=* *//' | tail -n 1)
    passed=$(grep -hE '[0-9]+ (passed|failed)' "$reports/$tool" | tail -n 1)
    echo "$tool: ${summary:-no summary}; tests: ${passed:-no result}"
    if ((status)) || [[ -z $summary ]]; then
        failures=$((failures + 1))
        grep -E '^========= ' "$reports/$tool" | head -n 20
        ((status == 99)) || tail -n 20 "$reports/$tool"
    fi
done
for exception in "${exceptions[@]}"; do
    echo "excepted: $exception"
done
echo "$((${#tools[@]} - failures)) of ${#tools[@]} tools report nothing"
exit $((failures > 0))
