#!/usr/bin/env bash
# Runs the tests. See --help.
set -euo pipefail
# shellcheck source=scripts/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

usage() {
  cat <<EOT
usage: test.sh [PYTEST ARGS...]                  the tests that need no GPU but the slow ones, after ruff and mypy where installed
       test.sh full [PYTEST ARGS...]             the slow ones, too; without arguments they must run 90 % of fluxlike's lines
       test.sh gpu [--nproc N] [--jobs J] [PYTEST ARGS...]
                                                 the test files on N GPUs (default: all), every rank in its own process; with --jobs
                                                 over J pytests side by side, which compile side by side, and after them those tests
                                                 that stand none beside them; without arguments then those that end processes

Paths among the arguments are relative to the root of the repository.
EOT
}

needs=(pytest hypothesis)
case ${1:-} in
  -h | --help) usage; exit 0 ;;
  full) needs+=(coverage) ;;
esac
find_python "${needs[@]}"
cd "$ROOT"
export FLUXLIKE_PYTHON=$PYTHON

if [ "${1:-}" = gpu ]; then
  shift
  ranks=() jobs=1
  while [ $# -gt 0 ]; do
    case $1 in
      --nproc) ranks=("${@:1:2}"); shift "${#ranks[@]}" ;;
      --nproc=*) ranks=("$1"); shift ;;
      --jobs) [ $# -ge 2 ] || die "--jobs needs a number."; jobs=$2; shift 2 ;;
      --jobs=*) jobs=${1#*=}; shift ;;
      *) break ;;
    esac
  done
  [[ $jobs =~ ^[1-9][0-9]*$ ]] || die "--jobs $jobs is not a positive number."
  : "${FLUXLIKE_TEST_HEAP:=nvshmem}"
  export FLUXLIKE_TEST_HEAP
  # No cache of failures: the ranks would write the same files.
  pytest=(-m pytest -q -p no:cacheprovider)
  launch() { bash scripts/launch.sh ${ranks[@]+"${ranks[@]}"} "${pytest[@]}" "$@"; }
  status=0 shards=() logs=$(mktemp -d)
  trap 'kill "${shards[@]}" 2>/dev/null || true; rm -rf "$logs"' EXIT
  if [ "$jobs" -eq 1 ]; then launch "$@" || status=$?; fi
  for ((i = 0; i < jobs && jobs > 1; i++)); do
    launch -m "not alone" --shard "$i/$jobs" "$@" >"$logs/$i.log" 2>&1 &
    shards+=($!)
  done
  for i in "${!shards[@]}"; do
    wait "${shards[i]}" || status=$?
    cat "$logs/$i.log"
  done
  shards=()
  if [ "$jobs" -gt 1 ]; then launch -m alone "$@" || status=$?; fi
  # These end their own processes, so they run beside no rank of torchrun's.
  if [ $# -eq 0 ]; then "$PYTHON" "${pytest[@]}" -m gpu tests/test_faults_processes.py || status=1; fi
  exit $status
fi

which="not gpu and not slow"
run=(-m pytest)
covered=
if [ "${1:-}" = full ]; then
  shift
  "$PYTHON" -c 'import coverage' 2>/dev/null ||
    die "full measures which lines the tests run and $PYTHON has no coverage; $PYTHON -m pip install 'coverage>=7.10'."
  which="not gpu"
  covered=$ROOT/build/coverage
  rm -rf "$covered"
  mkdir -p "$covered"
  run=(-m coverage run -m pytest)
  # cheaper, and there from Python 3.12 on
  if "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then export COVERAGE_CORE=sysmon; fi
fi

# Everything runs even if the first check fails: one run tells all there is to mend.
status=0 beside=() lanes=()
if [ -n "$covered" ] && [ $# -eq 0 ]; then
  # Beside all others: what compiles; and ranks whose tests have no tight limits, while the ranks of the others wait for each other.
  # Those that break ranks stay together, and mutants keep a part of the machine: what is to catch one shall not be that it is busy.
  compiling="ptx choice lint tiles topology topology_detect tune async_tp library nn bench bench_ranks bench_sparse doctor links
             public_api numerics offsets sanitizer_case security"
  # the interpreter's tests count threads, so they stand before any that leave some
  computing="interpreter interpreter_language ops calls all_reduce collectives decomposed direct fuzz gemm_ar groups model sequential
             sparse_all_reduce sparse_index trace trees"
  trap 'kill "${lanes[@]}" 2>/dev/null || true' EXIT
  for names in "$compiling" "$computing"; do
    files=()
    for name in $names; do files+=("tests/test_$name.py"); done
    "$PYTHON" "${run[@]}" -p no:cacheprovider -m "$which" "${files[@]}" >"$covered/beside${#lanes[@]}.log" 2>&1 &
    lanes+=($!)
    beside+=("${files[@]}")
  done
fi
if "$PYTHON" -m ruff --version >/dev/null 2>&1; then "$PYTHON" -m ruff check . || status=1; fi
if "$PYTHON" -m mypy --version >/dev/null 2>&1; then "$PYTHON" -m mypy || status=1; fi
"$PYTHON" "${run[@]}" -m "$which" ${beside[@]+"${beside[@]/#/--ignore=}"} "$@" || status=$?
for i in "${!lanes[@]}"; do
  wait "${lanes[i]}" || status=$?
  echo "beside these:"
  cat "$covered/beside$i.log"
done
trap - EXIT
if [ -n "$covered" ]; then
  echo "lines of fluxlike that the tests ran, on ranks 0 and 1 and in other processes:"
  "$PYTHON" -m coverage combine -q || status=1
  # A choice among the tests says nothing about all of them.
  if [ $# -eq 0 ]; then "$PYTHON" -m coverage report || status=1; else "$PYTHON" -m coverage report --fail-under=0 || status=1; fi
fi
exit $status
