#!/usr/bin/env bash
# A real vLLM 0.33.0 engine, its own block tables against the plugin's: greedy tokens of four models
# (the engine in a spawned process, eager and with CUDA graphs, and with so few blocks that requests
# are preempted), then time per step. On a machine of several GPUs the models take them in turns.
#
#   OUT=results bash bench/vllm_engine.sh      from the tree's root, within TOTAL seconds (570)
#
# It needs the test equipment that unpacks vLLM for a GPU machine in EQUIPMENT (.scratch/vgpu).
# Every part has its own time limit and log; what fails does not stop the others.
set -u
equipment=${EQUIPMENT:-.scratch/vgpu}
place=${PLACE:-/tmp} # where the equipment unpacks vLLM and writes its logs and tokens
total=${TOTAL:-570}
models=${MODELS:-qwen3 gemma3 falcon_h1 qwen3_next}
export OUT=${OUT:?a folder for the results}
entry=$place/fused_slots_entry
graphs="--mode FULL_DECODE_ONLY"

# job NAME SECONDS stock|plugin ENGINE-ARGUMENTS...: one engine, tokens in $place/res, log in $place/log
job() {
  local name=$1 seconds=$2 path=
  [ "$3" = plugin ] && path=$PWD:$entry
  shift 3
  XPATH=$path bash "$equipment/job.sh" 0.33.0 "$name" "$seconds" "$@"
}

# Blocks that hold one longest request, and not all requests of a batch.
few_blocks() {
  case $1 in
    qwen3) echo 300 ;;
    gemma3) echo 620 ;;
    *) echo 40 ;;
  esac
}

# Stock with graphs goes first, because it fills Triton's cache; bfloat16 where float32 fails.
run_model() {
  local m=$1 dtype
  for dtype in float32 bfloat16; do
    job "${m}_graph_stock" 200 stock --model "$m" --mp --dtype $dtype $graphs
    if grep -q ^DONE "$place/log/${m}_graph_stock.log" || [ $SECONDS -gt 120 ]; then break; fi
    mv "$place/log/${m}_graph_stock.log" "$place/log/${m}_graph_stock_$dtype.failed"
  done
  job "${m}_graph_plugin" 150 plugin --model "$m" --mp --dtype $dtype $graphs &
  job "${m}_eager_stock" 150 stock --model "$m" --mp --dtype $dtype &
  job "${m}_eager_plugin" 150 plugin --model "$m" --mp --dtype $dtype &
  for blocks in $(few_blocks "$m"); do
    job "${m}_few${blocks}_stock" 150 stock --model "$m" --mp --dtype $dtype --blocks "$blocks" &
    job "${m}_few${blocks}_plugin" 150 plugin --model "$m" --mp --dtype $dtype --blocks "$blocks" &
  done
  if [ "$m" = qwen3 ]; then # the comparison must be able to fail: a table that is broken on purpose
    job qwen3_graph_control 150 stock --model qwen3 --dtype $dtype $graphs --impl mut-slot &
  fi
  wait
}

if [ "${1-}" = model ]; then
  CUDA_VISIBLE_DEVICES=$3 run_model "$2"
  exit
fi

# end_session ID: processes of a session that this script started and that outlived their run
end_session() {
  local stat fields
  for stat in /proc/[0-9]*/stat; do
    read -r -a fields < <(sed 's/^.*) //' "$stat" 2>/dev/null)
    if [ "${fields[3]-}" = "$1" ]; then kill -KILL "$(basename "$(dirname "$stat")")"; fi
  done
}

say() { echo "-- $SECONDS s: $*"; }
mkdir -p "$OUT" $place/log $place/res
exec > >(tee "$OUT/vllm_engine.txt") 2>&1
rm -f $place/log/*_stock.log $place/log/*_plugin.log $place/log/*_control.log $place/res/*.json

# Entry points as an installed package has them; the second prints launches per step.
mkdir -p $entry/fused_slots-0.dist-info
printf 'Metadata-Version: 2.1\nName: fused-slots\nVersion: 0\n' >$entry/fused_slots-0.dist-info/METADATA
cat >$entry/fused_slots-0.dist-info/entry_points.txt <<'ENTRY'
[vllm.general_plugins]
fused_slots = fused_slots.vllm.plugin:register
fused_slots_count = bench.vllm_engine_count:register
ENTRY

timeout 120 bash "$equipment/boot.sh"
say "vLLM is unpacked"

# The engines to be timed start now and then wait, idle, until nothing else runs.
rm -f $place/vllm_engine_go
PYTHONPATH=$place/v0.33.0:$place/site:$PWD:$entry setsid timeout $((total - SECONDS)) \
  python3 -m bench.vllm_engine_time --json "$OUT/vllm_engine.json" --logs $place/log \
  --go $place/vllm_engine_go --seconds $((total - SECONDS - 10)) &
timing=$!
sessions=()
gpus=$(nvidia-smi --list-gpus | wc -l)
for m in $models; do
  setsid bash "$0" model "$m" $((${#sessions[@]} % gpus)) >"$place/log/$m.out" 2>&1 &
  sessions+=($!)
done
for session in "${sessions[@]}"; do
  while kill -0 "$session" 2>/dev/null && [ $SECONDS -lt $((total - 190)) ]; do sleep 1; done
  end_session "$session"
done
say "tokens are there"
timeout 30 python3 -m bench.vllm_engine_tokens --json "$OUT/vllm_tokens.json" \
  --results $place/res --logs $place/log
timeout 30 python3 "$equipment/cmp.py" >"$OUT/cmp.txt" 2>&1

touch $place/vllm_engine_go
while kill -0 $timing 2>/dev/null && [ $SECONDS -lt $total ]; do sleep 1; done
end_session $timing
say "time is measured"
tar czf "$OUT/logs.tgz" -C "$place" log
timeout 20 python3 -m bench.vllm_engine_time --show "$OUT/vllm_engine.json"
say "end"
sleep 1 # tee writes the last lines
