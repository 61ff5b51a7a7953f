#!/usr/bin/env bash
# Runs a Python file or module in N processes of this host, one a GPU or, without GPUs, on the CPU. See --help.
set -euo pipefail
# shellcheck source=scripts/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

usage() {
  cat <<EOT
usage: launch.sh [--nproc N] FILE [ARGS...]
       launch.sh [--nproc N] -m MODULE [ARGS...]

Runs FILE or MODULE under torchrun in N processes of this host (default: one a GPU, or 4 without GPUs).
FLUXLIKE_PYTHON names the Python to use; without it, the active python3 if it has what is needed, else .venv, set up once.
EOT
}

nproc='' module='' target=''
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --nproc) [ $# -ge 2 ] || die "--nproc needs a number."; nproc=$2; shift 2 ;;
    --nproc=*) nproc=${1#*=}; shift ;;
    -m) [ $# -ge 2 ] || die "-m needs the name of a module."; module=-m target=$2; shift 2; break ;;
    -*) die "unknown option $1; options of the program go after its name (see --help)." ;;
    *) [ -f "$1" ] || die "there is no file $1; give a Python file, or -m and a module."; target=$1; shift; break ;;
  esac
done
[ -n "$target" ] || die "nothing to run; give a Python file, or -m and a module (see --help)."
[[ -z $nproc || $nproc =~ ^[1-9][0-9]*$ ]] || die "--nproc $nproc is not a positive number."

# shellcheck disable=SC2119 # nothing beyond the usual modules
find_python
[ -n "$nproc" ] || nproc=$((GPUS > 0 ? GPUS : 4))

# The ranks fill the cores already; more threads in each only make them wait for each other.
: "${OMP_NUM_THREADS:=1}" "${OPENBLAS_NUM_THREADS:=1}"
# All ranks are on this host, whose name may not resolve: gloo would try it and warn.
: "${GLOO_SOCKET_IFNAME:=lo}"
export OMP_NUM_THREADS OPENBLAS_NUM_THREADS GLOO_SOCKET_IFNAME

# What torchrun --standalone does, but by address: with a host name that does not resolve, --standalone stalls.
# Without the --, torchrun would take some of the program's options for abbreviations of its own.
exec "$PYTHON" -m torch.distributed.run --nnodes=1 --nproc-per-node="$nproc" --local-addr=127.0.0.1 \
  --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0 $module -- "$target" "$@"
