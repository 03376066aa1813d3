#!/usr/bin/env bash
# A real vLLM 0.33.0 engine on two GPUs (tensor, pipeline and decode context parallel), and on one with
# drafts and with few blocks: greedy tokens of three engines (vLLM's own tables; the plugin; the
# plugin with vLLM's tables beside it, which compare every slot and row in every process).
#
#   OUT=results bash bench/vllm_engine_parallel.sh      from the tree's root, within TOTAL seconds (560)
#
# It needs the test equipment that unpacks vLLM for a GPU machine in EQUIPMENT (.scratch/vgpu).
# RUNS selects runs by a pattern. On a machine of one GPU those that need two are left out.
set -u
equipment=${EQUIPMENT:-.scratch/vgpu}
place=${PLACE:-/tmp} # where the equipment unpacks vLLM and writes its logs and tokens
total=${TOTAL:-560}
runs=${RUNS:-.}
export OUT=${OUT:?a folder for the results}
export ENGINE_TWIN=$place/twin_found
graphs="--mode FULL_DECODE_ONLY"

# name | GPUs | which engines | arguments. Tokens prove something in float32; decode context parallel
# has bfloat16 kernels only, and there the comparison in the process counts.
list="
tp_qwen3 | 2 | stock plugin twin | --model qwen3 --tp 2 --dtype float32 $graphs
tp_gemma3 | 2 | stock plugin twin | --model gemma3 --tp 2 --dtype float32 $graphs
pp_falcon_h1 | 2 | stock plugin twin | --model falcon_h1 --pp 2 --dtype float32
dcp_qwen3_interleave1 | 2 | twin | --model qwen3 --kv-heads 1 --tp 2 --dcp 2 --backend FLASH_ATTN
dcp_qwen3_interleave16 | 2 | twin | --model qwen3 --kv-heads 1 --tp 2 --dcp 2 --interleave 16 --backend FLASH_ATTN
spec_self_qwen3 | 1 | stock plugin twin | --model qwen3 --spec self --dtype float32 $graphs
spec_self_gemma3 | 1 | stock plugin twin | --model gemma3 --spec self --dtype float32 $graphs
spec_ngram_qwen3 | 1 | stock plugin twin | --model qwen3 --spec ngram_gpu --dtype float32
few_qwen3_next | 1 | twin | --model qwen3_next --blocks 100
few_falcon_h1 | 1 | stock twin | --model falcon_h1 --blocks 40 --dtype float32
"

say() { echo "-- $SECONDS s: $*"; }
mkdir -p "$OUT" "$place/log" "$place/res" "$ENGINE_TWIN"
exec > >(tee "$OUT/vllm_parallel.txt") 2>&1

# Entry points as an installed package has them.
entry() {
  mkdir -p "$place/entry_$1/fused_slots-0.dist-info"
  printf 'Metadata-Version: 2.1\nName: fused-slots\nVersion: 0\n' \
    >"$place/entry_$1/fused_slots-0.dist-info/METADATA"
  printf '[vllm.general_plugins]\nfused_slots = %s:register\n' "$2" \
    >"$place/entry_$1/fused_slots-0.dist-info/entry_points.txt"
}
entry plugin fused_slots.vllm.plugin
entry twin bench.vllm_engine_twin

# job NAME SIDE ENGINE-ARGUMENTS...: one engine, tokens in $place/res, log in $place/log
job() {
  local name=$1_$2 path=
  [ "$2" = stock ] || path=$PWD:$place/entry_$2
  shift 2
  [ -n "$path" ] || export FUSED_SLOTS_VLLM=off # in a subshell of its own
  XPATH=$path ENGINE_TWIN_RUN=$name timeout $((total - SECONDS - 25)) \
    bash "$equipment/job.sh" 0.33.0 "$name" 240 "$@"
}

timeout 120 bash "$equipment/boot.sh"
say "vLLM is unpacked"
gpus=$(nvidia-smi --list-gpus | wc -l)
card=0
wave=() # engines that run side by side
while IFS='|' read -r name need sides arguments; do
  name=$(echo $name)
  [ -n "$name" ] && [[ $name =~ $runs ]] && [ "$need" -le "$gpus" ] || continue
  for side in $sides; do
    if [ "$need" -eq 1 ]; then
      CUDA_VISIBLE_DEVICES=$((card % gpus)) job "$name" "$side" $arguments &
      card=$((card + 1))
    else
      job "$name" "$side" $arguments &
    fi
    wave+=($!)
    # Stock runs of a wave fill Triton's cache for those after them.
    if [ ${#wave[@]} -ge "${WAVE:-9}" ]; then
      wait "${wave[@]}"
      wave=()
      say "after $name $side"
    fi
  done
done <<<"$list"
[ ${#wave[@]} -eq 0 ] || wait "${wave[@]}"
say "all engines are done"
cat "$place"/log/*.sum >"$OUT/vllm_parallel_sums.txt"
timeout 30 python3 -m bench.vllm_engine_twin_report --json "$OUT/vllm_parallel.json" \
  --results "$place/res" --twins "$ENGINE_TWIN" --logs "$place/log"
tar czf "$OUT/vllm_parallel_logs.tgz" -C "$place" log
say "end"
sleep 1 # tee writes the last lines
