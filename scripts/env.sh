# shellcheck shell=bash
# Finds the Python to use, or makes one in .venv. Sourced by launch.sh and test.sh, which then call find_python.
#
# $FLUXLIKE_PYTHON is used as it is, with the packages that it has; else the active python3 if it has all that is needed; else .venv
# at the root of the repository, made once with pip and then used without a network. Everything said goes to stderr. The callers
# have set -e.
# Variables of the scripts begin with fx_: one of another name that the caller had exported would reach the program changed.

fx_root=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
fx_venv=$fx_root/.venv
fx_stamp=$fx_venv/fluxlike-ready # written last: a .venv without it was interrupted
fx_mark=$fx_venv/fluxlike-made-this # written first: a .venv without it is somebody else's and is never removed

die() {
  echo "$(basename "$0"): $1" >&2
  exit 2
}

# How many GPUs a process started here would see; CUDA_VISIBLE_DEVICES counts as CUDA reads it.
gpu_count() {
  local fx_count fx_visible fx_entry fx_entries
  fx_count=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ') || fx_count=$(find /dev -maxdepth 1 -name 'nvidia[0-9]*' | wc -l)
  if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
    fx_visible=0
    IFS=, read -r -a fx_entries <<<"$CUDA_VISIBLE_DEVICES"
    for fx_entry in ${fx_entries[@]+"${fx_entries[@]}"}; do
      [[ $fx_entry =~ ^\ *(-|NoDevFiles) ]] && break
      fx_visible=$((fx_visible + 1))
    done
    if [ "$fx_visible" -lt "$fx_count" ]; then fx_count=$fx_visible; fi
  fi
  echo "$fx_count"
}

# The extra of pyproject.toml that fits the machine.
extra_for_machine() {
  local fx_major fx_driver
  [ "$fx_gpus" -gt 0 ] || { echo cpu; return; }
  fx_major=$(nvidia-smi 2>/dev/null | sed -n '/CUDA[A-Za-z ]*Version *: *[0-9]/{s/.*CUDA[A-Za-z ]*Version *: *\([0-9]*\).*/\1/p;q}') || true
  if [ -z "$fx_major" ]; then # no nvidia-smi, as in some containers: driver branch 580 was the first with CUDA 13
    fx_driver=$(sed -n '1s/.*[^0-9]\([0-9]\{3,\}\)\.[0-9].*/\1/p' /proc/driver/nvidia/version 2>/dev/null) || true
    fx_major=$((${fx_driver:-580} >= 580 ? 13 : 12))
  fi
  if [ "$fx_major" -ge 13 ]; then echo cu13; else echo cu12; fi
}

# suits PYTHON MODULE...: whether it is new enough, has the torch and Triton that the library supports, and the modules.
# Versions come from the package records and modules are only looked up: importing torch would cost seconds a launch.
suits() {
  "$1" -P - "${@:2}" 2>/dev/null <<'PY'
import importlib.metadata, importlib.util, re, sys

def release(name):
    return tuple(int(n) for n in re.findall(r"\d+", importlib.metadata.version(name))[:2])

good = (2, 10) <= release("torch") < (2, 15) and (3, 6) <= release("triton") < (3, 10)
sys.exit(not (good and all(importlib.util.find_spec(name) for name in sys.argv[1:])))
PY
}

# lacks PYTHON MODULE...: prints "lacks" and those that it does not have. Other programs print something else, or nothing.
lacks() {
  "$1" -P -c 'import importlib.util, sys; print("lacks", *(fx_m for fx_m in sys.argv[1:] if importlib.util.find_spec(fx_m) is None))' \
    "${@:2}" 2>/dev/null
}

# A Python to build .venv from, of those that pyproject.toml allows. 3.14 and later have no NVSHMEM packages yet.
base_python() {
  local fx_name fx_last
  for fx_last in 12 13; do # 3.13 where there is no other: the tests run with those before
    for fx_name in python3 python3.12 python3.11 python3.13; do
      if "$fx_name" -c "import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, $fx_last))" 2>/dev/null; then
        echo "$fx_name"
        return
      fi
    done
  done
  die "no Python 3.11 to 3.13 with venv and ensurepip is on PATH; install one (on Debian or Ubuntu: apt install python3-venv) or set FLUXLIKE_PYTHON."
}

# What .venv was made from: the part of pyproject.toml that decides on packages, and the extra.
recipe() {
  echo "$(sed '/^\[tool\./,$d' "$fx_root/pyproject.toml" | cksum) $fx_extra"
}

venv_ready() {
  local fx_have fx_want
  [ -f "$fx_stamp" ] && "$fx_venv/bin/python" -c '' 2>/dev/null || return 1
  fx_have=$(cat "$fx_stamp")
  fx_want=$(recipe)
  # Without a GPU any extra serves, so that a home shared with GPU machines keeps their set-up.
  [ "$fx_have" = "$fx_want" ] || { [ "$fx_extra" = cpu ] && [ "${fx_have% *}" = "${fx_want% *}" ]; }
}

# Where pip finds torch without CUDA: PyPI has the one with it, gigabytes that a machine without GPUs has no use for. Nothing where
# the user has told pip of places, which are then meant to be all, and where this one does not answer, as pip would try it often.
cpu_wheels() {
  local fx_url=https://download.pytorch.org/whl/cpu fx_pip=("$fx_venv/bin/python" -m pip)
  [ "$fx_extra" = cpu ] || return 0
  if "${fx_pip[@]}" config list 2>/dev/null | grep -E 'index|find-links' >/dev/null; then return 0; fi
  if "${fx_pip[@]}" index versions torch --index-url "$fx_url" --timeout 10 --retries 0 >/dev/null 2>&1; then
    echo "--extra-index-url=$fx_url"
  fi
}

make_venv() {
  local fx_base fx_wheels fx_pins=()
  fx_base=$(base_python) || exit
  echo "fluxlike: setting up .venv with the extra '$fx_extra' (once; a few minutes and a network are needed)" >&2
  if [ -e "$fx_venv" ]; then # moved first, so that a removal cut short leaves no .venv that lost its mark
    rm -rf "$fx_venv.old"
    mv "$fx_venv" "$fx_venv.old"
    rm -rf "$fx_venv.old"
  fi
  { mkdir "$fx_venv" && touch "$fx_mark"; } || die "cannot write $fx_venv; make $fx_root writable or set FLUXLIKE_PYTHON."
  "$fx_base" -m venv "$fx_venv" >&2 || die "$fx_base -m venv failed; set FLUXLIKE_PYTHON to a Python that has the packages."
  fx_wheels=$(cpu_wheels)
  # Of the releases that cu13 allows the one that the GPU tests have run with; it brings Triton 3.6. The other extras name one each.
  if [ "$fx_extra" = cu13 ]; then fx_pins=('torch==2.11.*'); fi
  (cd "$fx_root" && "$fx_venv/bin/python" -m pip install -qq --disable-pip-version-check ${fx_wheels:+"$fx_wheels"} \
    -e ".[$fx_extra,test]" ${fx_pins[@]+"${fx_pins[@]}"} >&2) ||
    die "pip could not install the packages (see above); mend that and run again, or set FLUXLIKE_PYTHON to a Python that has them."
  recipe >"$fx_stamp"
}

# Two launches at once must not both set up: the second waits for the first. The lock is on the directory itself.
ensure_venv() (
  if command -v flock >/dev/null; then
    exec 9<"$fx_root"
    flock 9
  fi
  venv_ready || make_venv
)

# find_python [MODULE...]: sets fx_gpus, fx_places, how many ranks they are for, and fx_python to one that has torch, Triton, NVSHMEM
# where there are GPUs, and the modules.
find_python() {
  local fx_runs=(torch triton numpy) fx_needs fx_lacks
  [[ ${FLUXLIKE_RANKS_PER_GPU:-1} =~ ^[1-9][0-9]*$ ]] || die "FLUXLIKE_RANKS_PER_GPU=$FLUXLIKE_RANKS_PER_GPU is not a positive number."
  fx_gpus=$(gpu_count)
  fx_places=$((fx_gpus * ${FLUXLIKE_RANKS_PER_GPU:-1}))
  [ "$fx_gpus" -eq 0 ] || fx_runs+=(nvshmem.core cuda.bindings)
  fx_needs=("${fx_runs[@]}" "$@")
  if [ -n "${FLUXLIKE_PYTHON:-}" ]; then
    fx_python=$(command -v "$FLUXLIKE_PYTHON") || fx_python=$FLUXLIKE_PYTHON
    fx_lacks=$(lacks "$fx_python" torch triton numpy) && [[ $fx_lacks == lacks* ]] ||
      die "FLUXLIKE_PYTHON=$FLUXLIKE_PYTHON does not run as a Python from 3.11 on; set it to such an interpreter or unset it."
    [ "$fx_lacks" = lacks ] ||
      die "FLUXLIKE_PYTHON=$FLUXLIKE_PYTHON $fx_lacks; install that there (python -m pip install) or unset it."
  elif suits python3 "${fx_needs[@]}"; then
    fx_python=$(command -v python3)
  else
    fx_python=$fx_venv/bin/python
    if [ $# -gt 0 ] && suits python3 "${fx_runs[@]}"; then # by which launch.sh goes, so that the two may have different torches
      echo "fluxlike: $(command -v python3) lacks some of $*, so .venv is used, whose torch may be another;" \
        "to use the former: python3 -m pip install ${*//_/-}" >&2
    fi
    if [ -e "$fx_venv" ] && [ ! -e "$fx_mark" ] && ! rmdir "$fx_venv" 2>/dev/null; then
      suits "$fx_python" "${fx_needs[@]}" ||
        die ".venv lacks some of ${fx_needs[*]} and was not made by this script; install the package into it (pip install -e '.[$(extra_for_machine),test]') or move it away."
    else
      fx_extra=$(extra_for_machine)
      ensure_venv
    fi
  fi
  [[ $fx_python == /* ]] || fx_python=$PWD/$fx_python
  # A checkout that pip does not know, or that moved since pip saw it, must still win over any other fluxlike.
  local fx_found
  fx_found=$("$fx_python" -P -c 'import importlib.util as u; s = u.find_spec("fluxlike"); print(s.origin if s else "")' 2>/dev/null) || true
  if [ ! "$fx_found" -ef "$fx_root/fluxlike/__init__.py" ]; then
    export PYTHONPATH=$fx_root${PYTHONPATH:+:$PYTHONPATH}
  fi
}
