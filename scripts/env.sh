# shellcheck shell=bash
# Finds the Python to use, or makes one in .venv. Sourced by launch.sh and test.sh, which then call find_python.
#
# $FLUXLIKE_PYTHON is used as it is; else the active python3 if it has all that is needed; else .venv at the root of the
# repository, made once with pip and then used without a network. Everything said goes to stderr. The callers have set -e.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$ROOT/.venv
STAMP=$VENV/fluxlike-ready # written last: a .venv without it was interrupted
MARK=$VENV/fluxlike-made-this # written first: a .venv without it is somebody else's and is never removed

die() {
  echo "$(basename "$0"): $1" >&2
  exit 2
}

# How many GPUs a process started here would see; CUDA_VISIBLE_DEVICES counts as CUDA reads it.
gpu_count() {
  local count visible entry entries
  count=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ') || count=$(find /dev -maxdepth 1 -name 'nvidia[0-9]*' | wc -l)
  if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
    visible=0
    IFS=, read -r -a entries <<<"$CUDA_VISIBLE_DEVICES"
    for entry in ${entries[@]+"${entries[@]}"}; do
      [[ $entry =~ ^\ *(-|NoDevFiles) ]] && break
      visible=$((visible + 1))
    done
    if [ "$visible" -lt "$count" ]; then count=$visible; fi
  fi
  echo "$count"
}

# The extra of pyproject.toml that fits the machine.
extra_for_machine() {
  local major driver
  [ "$GPUS" -gt 0 ] || { echo cpu; return; }
  major=$(nvidia-smi 2>/dev/null | sed -n '/CUDA[A-Za-z ]*Version *: *[0-9]/{s/.*CUDA[A-Za-z ]*Version *: *\([0-9]*\).*/\1/p;q}') || true
  if [ -z "$major" ]; then # no nvidia-smi, as in some containers: driver branch 580 was the first with CUDA 13
    driver=$(sed -n '1s/.*[^0-9]\([0-9]\{3,\}\)\.[0-9].*/\1/p' /proc/driver/nvidia/version 2>/dev/null) || true
    major=$((${driver:-580} >= 580 ? 13 : 12))
  fi
  if [ "$major" -ge 13 ]; then echo cu13; else echo cu12; fi
}

# suits PYTHON MODULE...: whether it is new enough, has the torch and Triton that the library supports, and the modules.
# Versions come from the package records and modules are only looked up: importing torch would cost seconds a launch.
suits() {
  "$1" -P - "${@:2}" 2>/dev/null <<'PY'
import importlib.metadata, importlib.util, re, sys

def release(name):
    return tuple(int(n) for n in re.findall(r"\d+", importlib.metadata.version(name))[:2])

good = (2, 10) <= release("torch") < (2, 14) and (3, 6) <= release("triton") < (3, 8)
sys.exit(not (good and all(importlib.util.find_spec(name) for name in sys.argv[1:])))
PY
}

# A Python to build .venv from. 3.14 and later have no NVSHMEM packages yet.
base_python() {
  local name
  for name in python3 python3.12 python3.11 python3.13; do
    if "$name" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
      echo "$name"
      return
    fi
  done
  die "no Python 3.11 to 3.13 with venv and ensurepip is on PATH; install one (on Debian or Ubuntu: apt install python3-venv) or set FLUXLIKE_PYTHON."
}

# What .venv was made from: the part of pyproject.toml that decides on packages, and the extra.
recipe() {
  echo "$(sed '/^\[tool\./,$d' "$ROOT/pyproject.toml" | cksum) $EXTRA"
}

venv_ready() {
  local have want
  [ -f "$STAMP" ] && "$VENV/bin/python" -c '' 2>/dev/null || return 1
  have=$(cat "$STAMP")
  want=$(recipe)
  # Without a GPU any extra serves, so that a home shared with GPU machines keeps their set-up.
  [ "$have" = "$want" ] || { [ "$EXTRA" = cpu ] && [ "${have% *}" = "${want% *}" ]; }
}

make_venv() {
  local base
  base=$(base_python) || exit
  echo "fluxlike: setting up .venv with the extra '$EXTRA' (once; a few minutes and a network are needed)" >&2
  if [ -e "$VENV" ]; then # moved first, so that a removal cut short leaves no .venv that lost its mark
    rm -rf "$VENV.old"
    mv "$VENV" "$VENV.old"
    rm -rf "$VENV.old"
  fi
  { mkdir "$VENV" && touch "$MARK"; } || die "cannot write $VENV; make $ROOT writable or set FLUXLIKE_PYTHON."
  "$base" -m venv "$VENV" >&2 || die "$base -m venv failed; set FLUXLIKE_PYTHON to a Python that has the packages."
  (cd "$ROOT" && "$VENV/bin/python" -m pip install -qq --disable-pip-version-check -e ".[$EXTRA,test]" >&2) ||
    die "pip could not install the packages (see above); mend that and run again, or set FLUXLIKE_PYTHON to a Python that has them."
  recipe >"$STAMP"
}

# Two launches at once must not both set up: the second waits for the first. The lock is on the directory itself.
ensure_venv() (
  if command -v flock >/dev/null; then
    exec 9<"$ROOT"
    flock 9
  fi
  venv_ready || make_venv
)

# find_python [MODULE...]: sets PYTHON to one that has torch, Triton, NVSHMEM where there are GPUs, and the modules.
find_python() {
  local needs=(torch triton numpy "$@")
  GPUS=${GPUS:-$(gpu_count)}
  [ "$GPUS" -eq 0 ] || needs+=(nvshmem.core cuda.bindings)
  if [ -n "${FLUXLIKE_PYTHON:-}" ]; then
    PYTHON=$(command -v "$FLUXLIKE_PYTHON") || PYTHON=$FLUXLIKE_PYTHON
    "$PYTHON" -c '' 2>/dev/null ||
      die "FLUXLIKE_PYTHON=$FLUXLIKE_PYTHON does not run; set it to a Python interpreter or unset it."
  elif suits python3 "${needs[@]}"; then
    PYTHON=$(command -v python3)
  else
    PYTHON=$VENV/bin/python
    if [ -e "$VENV" ] && [ ! -e "$MARK" ] && ! rmdir "$VENV" 2>/dev/null; then
      suits "$PYTHON" "${needs[@]}" ||
        die ".venv lacks some of ${needs[*]} and was not made by this script; install the package into it (pip install -e '.[$(extra_for_machine),test]') or move it away."
    else
      EXTRA=$(extra_for_machine)
      ensure_venv
    fi
  fi
  [[ $PYTHON == /* ]] || PYTHON=$PWD/$PYTHON
  # A checkout that pip does not know, or that moved since pip saw it, must still win over any other fluxlike.
  local found
  found=$("$PYTHON" -P -c 'import importlib.util as u; s = u.find_spec("fluxlike"); print(s.origin if s else "")' 2>/dev/null) || true
  if [ ! "$found" -ef "$ROOT/fluxlike/__init__.py" ]; then
    export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
  fi
}
