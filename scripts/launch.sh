#!/usr/bin/env bash
# Runs a Python file or module in N processes a host, one a GPU or, without GPUs, on the CPU. See --help.
set -euo pipefail
# shellcheck source=scripts/env.sh
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/env.sh"

usage() {
  cat <<EOT
usage: launch.sh [--nproc N] [--nnodes HOSTS --rdzv HOST:PORT] FILE [ARGS...]
       launch.sh [--nproc N] [--nnodes HOSTS --rdzv HOST:PORT] -m MODULE [ARGS...]

Runs FILE or MODULE under torchrun in N processes of this host (default: 4 without GPUs, else one a GPU, or FLUXLIKE_RANKS_PER_GPU).
Over several hosts: the same on each, in any order within ten minutes, with the address of one. The exit status is the failed rank's.
FLUXLIKE_PYTHON names the Python to use; without it, the active python3 if it has what is needed, else .venv, set up once.
EOT
}

fx_nproc='' fx_module='' fx_target='' fx_nnodes=1 fx_rdzv=''
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --nproc) [ -n "${2-}" ] || die "--nproc needs a number."; fx_nproc=$2; shift 2 ;;
    --nproc=*) fx_nproc=${1#*=}; [ -n "$fx_nproc" ] || die "--nproc= needs a number."; shift ;;
    --nnodes=*) fx_nnodes=${1#*=}; shift ;;
    --rdzv=*) fx_rdzv=${1#*=}; shift ;;
    --nnodes) [ $# -ge 2 ] || die "--nnodes needs a number."; fx_nnodes=$2; shift 2 ;;
    --rdzv) [ $# -ge 2 ] || die "--rdzv needs HOST:PORT."; fx_rdzv=$2; shift 2 ;;
    -m) [ $# -ge 2 ] || die "-m needs the name of a module."; fx_module=-m fx_target=$2; shift 2; break ;;
    -*) die "unknown option $1; options of the program go after its name (see --help)." ;;
    *) [ -f "$1" ] || die "there is no file $1; give a Python file, or -m and a module."; fx_target=$1; shift; break ;;
  esac
done
[ -n "$fx_target" ] || die "nothing to run; give a Python file, or -m and a module (see --help)."
[[ -z $fx_nproc || $fx_nproc =~ ^[1-9][0-9]*$ ]] || die "--nproc $fx_nproc is not a positive number."
[[ $fx_nnodes =~ ^[1-9][0-9]*$ ]] || die "--nnodes $fx_nnodes is not a positive number."
[[ $fx_nnodes != 1 || -z $fx_rdzv ]] || die "--rdzv needs --nnodes HOSTS, or each host would run a job of its own."
[[ $fx_nnodes = 1 || ($fx_rdzv =~ .:0*([0-9]{1,5})$ && BASH_REMATCH[1] -ge 1 && BASH_REMATCH[1] -le 65535) ]] || die "--nnodes $fx_nnodes needs --rdzv HOST:PORT, not '${fx_rdzv}', the same on all hosts: one of them, and a free port of 1 to 65535."

# shellcheck disable=SC2119 # nothing beyond the usual modules
find_python
[ -n "$fx_nproc" ] || fx_nproc=$((fx_places > 0 ? fx_places : 4))

# The ranks fill the cores already; more threads in each only make them wait for each other.
: "${OMP_NUM_THREADS:=1}" "${OPENBLAS_NUM_THREADS:=1}"
export OMP_NUM_THREADS OPENBLAS_NUM_THREADS
if [ "$fx_nnodes" = 1 ]; then
  # All ranks are on this host, whose name may not resolve: gloo would try it and warn.
  export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
  # As torchrun --standalone, but by address: with a host name that does not resolve, --standalone stalls.
  fx_where=(--nnodes=1 --local-addr=127.0.0.1 --rdzv-endpoint=127.0.0.1:0)
else
  # By which address this host is known, and whether it is the one that the others come to: torchrun would ask its host name, and so
  # would gloo, which therefore gets the interface.
  read -r fx_address fx_is_host fx_interface < <("$fx_python" "$fx_root/scripts/address.py" "${fx_rdzv%:*}") || exit 2
  if [ -n "${GLOO_SOCKET_IFNAME:-$fx_interface}" ]; then export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$fx_interface}"; fi
  fx_where=(--nnodes="$fx_nnodes" --local-addr="$fx_address" --rdzv-endpoint="$fx_rdzv" --rdzv-id="fluxlike-$fx_rdzv" --rdzv-conf="is_host=$fx_is_host,read_timeout=600")
fi
# Without the --, torchrun would take some of the program's options for abbreviations of its own.
exec "$fx_python" -P "$fx_root/scripts/run.py" --nproc-per-node="$fx_nproc" --rdzv-backend=c10d "${fx_where[@]}" $fx_module -- "$fx_target" "$@"
