#!/usr/bin/env bash
# Models split over two GPUs beside one GPU and PyTorch: calibrates, measures, prints a table and leaves two_gpus.json.
#
#   benchmarks/two_gpus.sh [--bundles DIR|FILE.tgz] [--out DIR] [--seconds N] [--device D] [--small] [case ...]
#
# Without --bundles models are compiled first, which needs torch-mlir and no GPU: two_gpus.py --prepare DIR does that elsewhere.
# Takes at most --seconds (440) after that. Called again with the same --out it goes on where it ended.
set -u
cd "$(dirname "$0")/.." || exit 1
bundles="" out=out/two_gpus seconds=440 device=cuda topology=h200-x2 options=() cases=()
while [ $# -gt 0 ]; do
  case "$1" in
    --bundles) bundles="$2"; shift 2 ;;
    --out) out="$2"; shift 2 ;;
    --seconds) seconds="$2"; shift 2 ;;
    --device) device="$2"; shift 2 ;;
    --small) options+=(--small); shift ;;
    --*) echo "error: no option $1 (--bundles, --out, --seconds, --device, --small)" >&2; exit 2 ;;
    *) cases+=("$1"); shift ;;
  esac
done
# NVLink multicast stays off: a process that dies while it is used can take the switch out of service for the whole host.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}" TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}"
[ "$device" = cpu ] && topology=cpu
mkdir -p "$out" || exit 1

if [ -z "$bundles" ]; then
  bundles="$out/bundles"
  python benchmarks/two_gpus.py --prepare "$bundles" --topology "$topology" "${options[@]}" "${cases[@]}"
elif [ -f "$bundles" ]; then
  mkdir -p "$out/bundles" && tar -xzf "$bundles" -C "$out/bundles" || exit 1
  bundles="$out/bundles"
fi

end=$((SECONDS + seconds))
left() { echo $((end - SECONDS > 0 ? end - SECONDS : 0)); }

if [ "$device" != "cuda:0" ] && [ ! -f "$out/calibrated.json" ]; then
  sizes=8K,128K,2M,32M,512M
  [ "$device" = cpu ] && sizes=8K,128K
  timeout 120 python -m topo_opt.tools.hw calibrate --topology "$topology" --repeats 8 --sizes "$sizes" -o "$out/calibrated.json" ||
    echo "not calibrated" >&2
fi

# A row that fails ends the processes; new ones record it and go on.
for _ in $(seq 20); do
  [ "$(left)" -le 15 ] && break
  timeout "$(left)" python -m torch.distributed.run --nproc-per-node=2 --master-port=$((20000 + RANDOM % 20000)) \
    benchmarks/two_gpus.py --measure "$bundles" --out "$out" --device "$device" --peers --seconds "$(($(left) - 15))" \
    "${options[@]}" "${cases[@]}" 2> >(grep -v -e '^E[0-9]* ' -e '^W[0-9]* ' >&2)
  code=$?
  [ $code -eq 0 ] && break
  grep -q '"rows"' "$out/two_gpus.json" 2>/dev/null || { echo "error: nothing was measured (exit code $code)" >&2; exit 1; }
done
[ "$(left)" -le 15 ] && rm -f "$out/current.json" # the time was over, not the row's fault
python benchmarks/two_gpus.py --table "$out/two_gpus.json"
