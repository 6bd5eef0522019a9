#!/usr/bin/env bash
# Runs GPU tests and benchmarks on a host with an NVIDIA GPU; README.md beside this file lists the steps.
#
# usage: benchmarks/gpu_host.sh SITE OUT SECONDS:STEP...
#   SITE     site-packages with SGLang; the overlay is applied to it first
#   OUT      folder for logs and results
#   SECONDS  the limit of a step; one that fails or runs out of it does not keep the next from running
# The interpreter is $PYTHON (python3). $EXTRA, if set, is a folder with pytest, click and unidiff for it.
set -uo pipefail
if (($# < 3)); then
  sed -n '2,9s/^# \{0,1\}//p' "$0"
  exit 2
fi
cd "$(dirname "$0")/.." || exit
site=$(realpath "$1") out=$(realpath -m "$2")
shift 2
mkdir -p "$out"
python=${PYTHON:-python3}
export PYTHONPATH=$PWD/overlay:$PWD:$site${EXTRA:+:$EXTRA} PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1 SGLANG_DISABLE_VERSION_CHECK=1 TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$out/triton-cache}
unset TRITON_INTERPRET
"$python" apply.py --target "$site" || exit

# One layer of a benchmark: its JSON and its page.
measure() { "$python" "benchmarks/$1.py" "$out/$2.json" "$out/$2.md" "${@:3}"; }

step() {
  case $1 in
    tests) "$python" -m pytest -v -p no:cacheprovider -m gpu tests/overlay/gpu "${PYTEST_ARGS:---tb=short}" ;;
    memcheck | racecheck) compute-sanitizer --tool "$1" "$python" -m tests.overlay.gpu.sanitize_case ;;
    self-test) "$python" verify_install.py --target "$site" --require self-test --self-test ;;
    adapter) measure verify_adapter verify-adapter ;;
    portable) measure verify_portable verify-portable ;;
    grouped) "$python" benchmarks/grouped_verify.py "$out/grouped-verify.json" ;;
    mover) measure slot_mover slot-mover ;;
    masks) measure mask_building mask-building ;;
    engine-flashmla | engine-triton) "$python" benchmarks/verify_engine_gpu.py "$out" "${1#engine-}" ;;
    engine-fp8) "$python" benchmarks/verify_engine_gpu.py "$out" --kv fp8_e4m3 ;;
    engine-tp2) "$python" benchmarks/verify_engine_gpu.py "$out" --ranks 2 ;;
    ddtree) "$python" benchmarks/ddtree_gpu.py "$out" ;;
    ddtree-throughput) "$python" benchmarks/ddtree_throughput.py "$out" ;;
    ddtree-server) "$python" benchmarks/ddtree_server.py "$out" 120 triton hybrid ;;
    kv-calls) measure kv_calls kv-calls ;;
    kv-layouts) "$python" benchmarks/kv_layouts.py "$out" ${KV_LAYOUTS:+--layouts "$KV_LAYOUTS"} ;;
    kv-throughput)
      # shellcheck disable=SC2086 # several options
      "$python" benchmarks/kv_throughput.py "$out" ${KV_THROUGHPUT:-}
      ;;
    *) echo "unknown step: $1; benchmarks/README.md lists them" >&2 && return 2 ;;
  esac
}
export -f step measure
export python out site

failed=()
for each in "$@"; do
  name=${each#*:}
  echo "== $name, at most ${each%%:*} s"
  began=$SECONDS
  # shellcheck disable=SC2016 # expanded by the inner shell
  timeout --kill-after=10 "${each%%:*}" bash -c 'step "$1"' step "$name" >"$out/$name.log" 2>&1
  code=$?
  tail -n 25 "$out/$name.log"
  echo "== $name: exit code $code after $((SECONDS - began)) s"
  ((code == 0)) || failed+=("$name")
done
echo "failed: ${failed[*]:-none}"
((${#failed[@]} == 0))
