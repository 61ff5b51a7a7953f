#!/usr/bin/env bash
# Runs the tests. See --help.
set -euo pipefail
# shellcheck source=scripts/env.sh
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/env.sh"

usage() {
  cat <<EOT
usage: test.sh [PYTEST ARGS...]                  the tests that need no GPU but the slow ones, after ruff and mypy where installed
       test.sh full [PYTEST ARGS...]             the slow ones, too; without arguments they must run 90 % of fluxlike's lines
       test.sh gpu [--nproc N] [--jobs J] [PYTEST ARGS...]
                                                 the test files on N GPUs (default: all), every rank in its own process; with --jobs
                                                 over J pytests side by side, which compile side by side, and then the tests that must
                                                 run alone. Without pytest arguments then the tests that start their own processes and,
                                                 where compute-sanitizer is installed, every kernel under it, on four ranks or two; with
                                                 --jobs several of these at once. What is behind a
                                                 test that failed runs in new processes, unless -x is given. With fewer GPUs than
                                                 ranks, set FLUXLIKE_RANKS_PER_GPU

Paths among the arguments are relative to the root of the repository.
EOT
}

# In the background, in a process group of its own, as its ranks must end with it.
apart() {
  set -m
  "$@" &
  set +m
  fx_shards+=($!)
}

# A command that ends with this script, also by a signal that only this script gets: bash heeds those while it waits, and not before.
stand() {
  local fx_code=0
  apart "$@"
  wait "$!" || fx_code=$?
  fx_shards=()
  return "$fx_code"
}

# Waits for what runs beside, shows what each of them said, and fails as one of them did.
gather() {
  local fx_i fx_code=0
  for fx_i in "${!fx_shards[@]}"; do
    wait "${fx_shards[fx_i]}" || fx_code=$?
    cat "$fx_logs/$fx_i.log"
  done
  fx_shards=()
  return "$fx_code"
}

# Memory, shared memory and barriers of every kernel, in four ranks, or two where there is no room, and as two nodes; says so where
# it cannot be run. Three of the six side by side, or all, as most of each is the start of the processes that the tool looks at.
sanitize() {
  local fx_tool fx_log fx_i fx_found=0 fx_nproc=$((fx_places >= 4 ? 4 : 2)) fx_checks=(memcheck racecheck synccheck)
  fx_tool=$(PATH=$PATH${CUDA_HOME:+:$CUDA_HOME/bin}:/usr/local/cuda/bin type -P compute-sanitizer) || {
    echo "compute-sanitizer was not run: it is neither on PATH nor in \$CUDA_HOME/bin or /usr/local/cuda/bin. It comes with the CUDA toolkit."
    return 0
  }
  [ "$fx_places" -ge 2 ] || { echo "compute-sanitizer was not run: its case is for two ranks, and there is room for $fx_places."; return 0; }
  for fx_i in 0 1 2 3 4 5; do
    fx_log=$fx_logs/${#fx_shards[@]}.log
    echo "$fx_tool --tool ${fx_checks[fx_i % 3]} on tests/sanitizer_case.py, nodes: $((fx_i / 3 + 1))" >"$fx_log"
    FLUXLIKE_VIRTUAL_NODES=$((fx_i / 3 + 1)) apart bash scripts/launch.sh --nproc "$fx_nproc" tests/sanitizer_case.py "$fx_tool" \
      "${fx_checks[fx_i % 3]}" >>"$fx_log" 2>&1
    if [ "$fx_i" = 5 ] || { [ "$fx_i" = 2 ] && [ "$fx_jobs" -lt 6 ]; }; then gather || fx_found=1; fi
  done
  return $fx_found
}

fx_needs=(pytest pytest_timeout hypothesis)
case ${1:-} in
  -h | --help) usage; exit 0 ;;
  full) fx_needs+=(coverage) ;;
  gpu)
    [ "${FLUXLIKE_TEST_HEAP:-nvshmem}" != nvshmem ] || [ "$(gpu_count)" -gt 0 ] ||
      die "gpu needs a GPU and there is none${CUDA_VISIBLE_DEVICES+ (CUDA_VISIBLE_DEVICES is '$CUDA_VISIBLE_DEVICES')}; leave gpu out for the tests that need none, or set FLUXLIKE_TEST_HEAP=shm to run the ranks on the CPU."
    ;;
esac
find_python "${fx_needs[@]}"
cd "$fx_root"
export FLUXLIKE_PYTHON=$fx_python

if [ "${1:-}" = gpu ]; then
  shift
  fx_ranks=() fx_jobs=1
  while [ $# -gt 0 ]; do
    case $1 in
      --nproc) fx_ranks=("${@:1:2}"); shift "${#fx_ranks[@]}" ;;
      --nproc=*) fx_ranks=("$1"); shift ;;
      --jobs) [ $# -ge 2 ] || die "--jobs needs a number."; fx_jobs=$2; shift 2 ;;
      --jobs=*) fx_jobs=${1#*=}; shift ;;
      *) break ;;
    esac
  done
  [[ $fx_jobs =~ ^[1-9][0-9]*$ ]] || die "--jobs $fx_jobs is not a positive number."
  : "${FLUXLIKE_TEST_HEAP:=nvshmem}"
  export FLUXLIKE_TEST_HEAP
  # No cache of failures: the ranks would write the same files. What a library writes before it ends its process, as NVSHMEM does, is
  # lost where pytest captures file descriptors.
  fx_pytest=(-m pytest -q -p no:cacheprovider --capture=sys)
  # A test that fails may leave its ranks apart, and those behind it would fail, too: they run in new ranks. Of some tests a part may
  # have none, which is pytest's status 5, and no failure if another has.
  launch() {
    local fx_at fx_behind=() fx_code=0 fx_bad=0
    fx_at=$(mktemp "$fx_logs/at.XXXXXX") # where rank 0 writes which test it is at
    while :; do
      : >"$fx_at"
      bash scripts/launch.sh ${fx_ranks[@]+"${fx_ranks[@]}"} "${fx_pytest[@]}" -x "--at=$fx_at" ${fx_behind[@]+"${fx_behind[@]}"} "$@" ||
        fx_code=$?
      if [ "$fx_code" -eq 5 ] && [ ! -s "$fx_at" ] && [ "$fx_jobs" -gt 1 ]; then return "$fx_bad"; fi
      : >"$fx_logs/ran"
      [ "$fx_code" -ne 0 ] || return "$fx_bad"
      fx_bad=$fx_code fx_code=0
      # Ended from outside (HUP, INT, TERM; a rank that crashes has another status), in front of any test, or as the caller wants it.
      if [[ $fx_bad =~ ^(129|130|143)$ ]] || [ ! -s "$fx_at" ] || [[ " $* " =~ \ (-x|--maxfail|--exitfirst) ]]; then return "$fx_bad"; fi
      fx_behind=("--behind=$(cat "$fx_at")")
    done
  }
  fx_status=0 fx_shards=() fx_logs=$(mktemp -d)
  trap 'for fx_i in ${fx_shards[@]+"${fx_shards[@]}"}; do kill -- "-$fx_i" 2>/dev/null || true; done; rm -rf "$fx_logs"' EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
  if [ "$fx_jobs" -eq 1 ]; then stand launch "$@" || fx_status=$?; fi
  for ((fx_i = 0; fx_i < fx_jobs && fx_jobs > 1; fx_i++)); do
    apart launch -m "not alone" "--shard=$fx_i/$fx_jobs" "$@" >"$fx_logs/$fx_i.log" 2>&1
  done
  gather || fx_status=$?
  if [ "$fx_jobs" -gt 1 ]; then stand launch -m alone "$@" || fx_status=$?; fi
  [ -e "$fx_logs/ran" ] || fx_status=5
  # These end their own processes, or are a rank by themselves, so they are none of torchrun's.
  if [ $# -eq 0 ]; then
    stand "$fx_python" "${fx_pytest[@]}" -m gpu tests/test_faults_processes.py || fx_status=1
    fx_lot=$((fx_jobs < 4 ? fx_jobs : 4)) # each of these starts ranks of its own, which is most of its time
    if [ "$fx_lot" -eq 1 ]; then stand "$fx_python" "${fx_pytest[@]}" -m gpu tests/test_nodes{,_faults}.py || fx_status=1; fi
    for ((fx_i = 0; fx_i < fx_lot && fx_lot > 1; fx_i++)); do
      apart "$fx_python" "${fx_pytest[@]}" -m gpu "--shard=$fx_i/$fx_lot" tests/test_nodes{,_faults}.py >"$fx_logs/$fx_i.log" 2>&1
    done
    gather || fx_status=1
    stand "$fx_python" "${fx_pytest[@]}" tests/test_alone.py || fx_status=1
    sanitize || fx_status=1
  fi
  exit $fx_status
fi

fx_which="not gpu and not slow"
fx_run=(-m pytest)
fx_covered=
if [ "${1:-}" = full ]; then
  shift
  "$fx_python" -c 'import coverage' 2>/dev/null ||
    die "full measures which lines the tests run and $fx_python has no coverage; $fx_python -m pip install 'coverage>=7.10'."
  fx_which="not gpu"
  fx_covered=$fx_root/build/coverage
  rm -rf "$fx_covered"
  mkdir -p "$fx_covered"
  fx_run=(-m coverage run -m pytest)
  # cheaper, and there from Python 3.12 on
  if "$fx_python" -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then export COVERAGE_CORE="${COVERAGE_CORE:-sysmon}"; fi
fi

# Everything runs even if the first check fails: one run tells all there is to mend.
fx_status=0 fx_beside=() fx_lanes=() fx_logs=$(mktemp -d)
trap 'kill ${fx_lanes[@]+"${fx_lanes[@]}"} 2>/dev/null || true; rm -rf "$fx_logs"' EXIT
trap 'exit 130' INT # also where pytest has taken it, and would be followed by a wait for those beside it
if [ $# -eq 0 ]; then
  # Beside all others: what compiles; and ranks whose tests have no tight limits, while the ranks of the others wait for each other.
  # Those that break ranks stay together, and mutants keep a part of the machine: what is to catch one shall not be that it is busy.
  fx_compiling="again ptx lint lint_signals tiles topology topology_detect tune tune_ranks tune_tool bench
             bench_report bench_sparse doctor doctor_facts library_collectives links public_api numerics offsets scripts security
             sparse_ahead sparse_all_reduce sparse_in_a_model sparse_index sparse_refusals whole_sizes"
  # the interpreter's tests count threads, so they stand before any that leave some
  fx_computing="interpreter interpreter_language ops calls all_reduce collectives copy_engine decomposed direct fuzz fuzz_collectives
             gradients groups library nn async_tp async_tp_calls async_tp_reports compiled_graphs choice sanitizer_case operands
             racecheck racecheck_host racecheck_memory racecheck_tables racecheck_waits runfile sequential trace trees waves as_on_gpus
             bench_few bench_ranks"
  for fx_names in "$fx_compiling" "$fx_computing"; do
    fx_files=()
    for fx_name in $fx_names; do fx_files+=("tests/test_$fx_name.py"); done
    "$fx_python" "${fx_run[@]}" -p no:cacheprovider -m "$fx_which" "${fx_files[@]}" >"$fx_logs/${#fx_lanes[@]}.log" 2>&1 &
    fx_lanes+=($!)
    fx_beside+=("${fx_files[@]}")
  done
fi
if "$fx_python" -m ruff --version >/dev/null 2>&1; then "$fx_python" -m ruff check . || fx_status=1; fi
if "$fx_python" -m mypy --version >/dev/null 2>&1; then "$fx_python" -m mypy || fx_status=1; fi
"$fx_python" "${fx_run[@]}" -m "$fx_which" ${fx_beside[@]+"${fx_beside[@]/#/--ignore=}"} "$@" || fx_status=$?
for fx_i in "${!fx_lanes[@]}"; do
  wait "${fx_lanes[fx_i]}" || fx_status=$?
  echo "beside these:"
  cat "$fx_logs/$fx_i.log"
done
fx_lanes=()
if [ -n "$fx_covered" ]; then
  echo "lines of fluxlike that the tests ran, themselves and on ranks 0 and 1; not those of programs that they start:"
  "$fx_python" -m coverage combine -q || fx_status=1
  # A choice among the tests says nothing about all of them.
  if [ $# -eq 0 ]; then "$fx_python" -m coverage report || fx_status=1; else "$fx_python" -m coverage report --fail-under=0 || fx_status=1; fi
fi
exit $fx_status
