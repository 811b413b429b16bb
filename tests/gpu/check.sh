#!/usr/bin/env bash
# Checks and times the package on a GPU, stage after stage, and prints a short table of them last.  A stage that fails
# does not keep the next one from running; the exit status says whether any failed.
#
#     tests/gpu/check.sh                       # stage "tests"
#     tests/gpu/check.sh tests sanitize        # and compute-sanitizer's tools
#     tests/gpu/check.sh versions OLD          # another checkout, in turns: is a row slower, or has other bits?
#     tests/gpu/check.sh predict               # predictions beside PyTorch and JAX
#     tests/gpu/check.sh cards                 # ranks, on a machine with two cards or more
#
# PYTHON names another interpreter, PROCESSES how many share the card in tests (6), which needs pytest-xdist, and OUT a
# folder for what stages print and for their JSON.
set -uo pipefail
cd "$(dirname "$0")/../.."

python=${PYTHON:-python3}
out=${OUT:-$(mktemp -d)}
mkdir -p "$out"
export MLPGPU_REQUIRE_GPU=1 PYTHONUNBUFFERED=1
# pytest-benchmark, where it is installed, warns beside pytest-xdist, and warnings are errors.
pytest=("$python" -m pytest -q -p no:cacheprovider -p no:benchmark)
declare -a table
failures=0

# Runs a stage's command, whose last matching line goes into the table: name, pattern, command.
stage() {
    local name=$1 pattern=$2 began=$SECONDS status
    shift 2
    echo "--- $name: $*"
    "$@" 2>&1 | tee "$out/$name.log"
    status=${PIPESTATUS[0]}
    table+=("$(printf '%-12s %-6s %5d s  %s' "$name" "$( ((status)) && echo FAILED || echo passed)" $((SECONDS - began)) \
        "$(grep -E "$pattern" "$out/$name.log" | tail -n 1 | cut -c 1-100)")")
    ((status == 0)) || failures=$((failures + 1))
}

(($#)) || set -- tests
while (($#)); do
    case $1 in
        tests)
            # One process compiles what all of them load.
            stage compile '(passed|failed|error)' "${pytest[@]}" tests/gpu/test_parity.py -m gpu -k all_tiles_give
            stage together '(passed|failed|error)' "${pytest[@]}" tests/gpu -m "gpu and not alone" -n "${PROCESSES:-6}" --dist load
            stage alone '(passed|failed|error)' "${pytest[@]}" tests/gpu -m "gpu and alone" \
                --ignore tests/gpu/test_ranks_on_cards.py
            ;;
        sanitize)
            stage sanitize 'tools report nothing' tests/gpu/sanitize.sh
            ;;
        versions)
            (($# > 1)) || { echo "versions: name the folder of another checkout"; exit 2; }
            stage versions '.' "$python" benchmarks/versions.py "$2" --json "$out/versions.jsonl"
            shift
            ;;
        predict)
            stage predict '.' "$python" benchmarks/predict.py --backend cuda --only mlpgpu PyTorch JAX --json "$out/predict.jsonl"
            ;;
        cards)
            stage cards '(passed|failed|error)' "${pytest[@]}" tests/gpu/test_ranks_on_cards.py -m gpu
            stage ranks '.' "$python" benchmarks/ranks.py --backend cuda --json "$out/ranks.jsonl"
            ;;
        *)
            echo "expected tests, sanitize, versions OLD, predict or cards, got $1"
            exit 2
            ;;
    esac
    shift
done
printf '%s\n' "" "${table[@]}"
exit $((failures > 0))
