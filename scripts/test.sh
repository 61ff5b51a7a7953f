#!/usr/bin/env bash
# Runs the tests. See --help.
set -euo pipefail
# shellcheck source=scripts/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

usage() {
  cat <<EOT
usage: test.sh [PYTEST ARGS...]                  the tests that need no GPU, after ruff and mypy where installed; all of
                                                 them must run 90 % of the lines, where coverage is installed
       test.sh gpu [--nproc N] [PYTEST ARGS...]  the test files on N GPUs (default: all), every rank in its own process

Paths among the arguments are relative to the root of the repository.
EOT
}

case ${1:-} in -h | --help) usage; exit 0 ;; esac
find_python pytest hypothesis
cd "$ROOT"
export FLUXLIKE_PYTHON=$PYTHON

if [ "${1:-}" = gpu ]; then
  shift
  ranks=()
  case ${1:-} in
    --nproc) ranks=("${@:1:2}"); shift "${#ranks[@]}" ;;
    --nproc=*) ranks=("$1"); shift ;;
  esac
  : "${FLUXLIKE_TEST_HEAP:=nvshmem}"
  export FLUXLIKE_TEST_HEAP
  # No cache of failures: the ranks would write the same files.
  exec bash scripts/launch.sh ${ranks[@]+"${ranks[@]}"} -m pytest -q -p no:cacheprovider "$@"
fi

# Everything runs even if the first check fails: one run tells all there is to mend.
status=0
if "$PYTHON" -m ruff --version >/dev/null 2>&1; then "$PYTHON" -m ruff check . || status=1; fi
if "$PYTHON" -m mypy --version >/dev/null 2>&1; then "$PYTHON" -m mypy || status=1; fi
# With coverage, all of the tests must run nine of ten lines; a part of them says nothing about that.
run=(-m pytest)
covered=
if "$PYTHON" -c 'import coverage' 2>/dev/null; then
  covered=$ROOT/build/coverage
  rm -rf "$covered"
  mkdir -p "$covered"
  run=(-m coverage run -m pytest)
  # cheaper, and there from Python 3.12 on
  if "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then export COVERAGE_CORE=sysmon; fi
fi
"$PYTHON" "${run[@]}" -m "not gpu" "$@" || status=$?
if [ -n "$covered" ]; then
  "$PYTHON" -m coverage combine -q || status=1
  echo "lines of fluxlike that the tests ran: $("$PYTHON" -m coverage report --format=total --fail-under=0) %"
  if [ $# -eq 0 ] && ! "$PYTHON" -m coverage report >"$covered/report.txt"; then
    cat "$covered/report.txt"
    status=1
  fi
fi
exit $status
