#!/usr/bin/env bash
# scripts/benchmarks/all_gpus.sh OUT [PART ...]: measures training steps on all GPUs of this host, as docs/benchmarks
# shows them. Prints tables, and writes figures of steps and models to OUT as JSON. Without parts all but
# `shown`, `windows`, `hybrid`, `servers`, `lost` and `grids` run, for about half an hour on four H200.
#
#   modes    every way to attend, one process: documents A, B, C and uniform ones
#   shown    the modes that figures are about, A, B, C: fewer than above
#   liger    the same with Liger's kernels in all modes
#   saved    attention outputs saved, and the best settings (saved, Liger's kernels)
#   models   whole models: Llama-3-8B and Qwen3-4B, one long document, 64K and 128K tokens per GPU (on four)
#   windows  layers of Gemma 3 27B, OLMo 3 7B and GPT-OSS 20B: sliding windows, and sinks
#   hybrid   layers of Qwen 3.5 27B: whole documents, tasks move
#   servers  all GPUs but one train, and that one is an attention server: beside an even split, and without the server
#   lost     the same with FSDP2 (with DDP on two): the server is killed and stopped in turns, LOSSES times (10)
#   grids    all of these, beside their simulation from the profile CLUSTER (h100 or h200 by the GPUs' name):
#   hsdp       two replicas, each sharded by FSDP2
#   pipeline   two stages: plain, as packed, shaped; measured beside predicted
#   tensor     two tensor ranks (Transformers 5.19)
#   experts    layers of Qwen3-30B-A3B, whose experts all GPUs divide (Transformers 5.23); not simulated
#   host     time of the host per attention call
#   memory   memory that torch holds while shapes change
#
# DOCUMENTS replaces A, B and C, whose tokens are meant for four GPUs: on two, for example,
# 65536,16x4096;131072,32x4096. NCCL_P2P_DISABLE=1 gives links of about 30 GB/s, like a network between nodes;
# DISTCA_EXCHANGE_CHUNKS=4 is the setting that the product takes between nodes by itself.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:?usage: scripts/benchmarks/all_gpus.sh OUT [PART ...]}
shift
mkdir -p "$out"
documents=${DOCUMENTS:-C;A;B}
gpus=$(nvidia-smi --list-gpus | wc -l)
export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 # kernels are compiled once for all parts

trainers=$((gpus - 1))
cluster=${CLUSTER-$(nvidia-smi --query-gpu=name --format=csv,noheader | grep -oim 1 'h[12]00' | tr '[:upper:]' '[:lower:]' || true)}

# One document, and so many of 4,096 tokens that all add up.
mix() {
    local longest=$1 short=$((($2 - $1) / 4096))
    echo "$longest$([[ $short -eq 0 ]] || echo ",${short}x4096")"
}
launch() { torchrun --standalone --nproc-per-node "$gpus" "$@"; }
step() {
    local name=$1
    shift
    echo "== $name"
    launch scripts/benchmarks/attention_step.py --layers 4 --warmup 1 --rounds 3 --no-exposed --out "$out/$name.json" "$@"
}
# For so many data ranks: their option, with 64K and 128K tokens per data rank.
grid() {
    local name=$1 ranks=$2
    shift 2
    step "$name" --no-kernels --modes ideal,placed,fixed,local ${cluster:+--cluster "$cluster"} \
        --documents "$(mix 65536 $((65536 * ranks)));$(mix 131072 $((131072 * ranks)))" "$@"
}
model() {
    local name=$1
    shift
    echo "== $name"
    launch scripts/benchmarks/model_step.py --liger --head liger --warmup 1 --rounds 1 --out "$out/$name.json" "$@"
}

for part in "${@:-modes liger saved models host memory}"; do
    for name in $part; do
        case $name in
        modes) step modes --documents "$documents;$((16 * gpus))x4096" ;;
        shown) step shown --documents "$documents" --modes ideal,placed,fixed,local ;;
        liger) step liger --liger --no-check --no-kernels --documents "$documents" --modes ideal,placed,local ;;
        saved)
            step saved --checkpointing saved --no-check --no-kernels --documents "$documents" --modes ideal,placed
            step best --checkpointing saved --liger --no-check --no-kernels \
                --documents "$documents" --modes ideal,placed
            ;;
        models)
            model llama-64k --documents 262144
            model llama-128k --documents 262144,64x4096
            model qwen-64k --preset qwen3-4b --documents 262144
            model qwen-128k --preset qwen3-4b --documents 262144,64x4096
            ;;
        windows)
            for preset in gemma3-27b olmo3-7b gpt-oss-20b; do
                echo "== $preset"
                launch scripts/benchmarks/attention_step.py --preset "$preset" --warmup 1 --rounds 5 --no-exposed \
                    --documents "$documents" --modes ideal,placed --out "$out/$preset.json"
            done
            ;;
        hybrid)
            echo "== qwen3.5-27b"
            launch scripts/benchmarks/attention_step.py --preset qwen3.5-27b --warmup 1 --rounds 3 --no-exposed \
                --documents "$documents" --modes ideal,fixed,local --out "$out/qwen3.5-27b.json"
            ;;
        servers)
            echo "== servers"
            launch -m distca_hf.run --attention-servers 1 scripts/benchmarks/server_step.py --layers 4 --rounds 3 \
                --documents "$(mix $((16384 * gpus)) $((65536 * trainers)));$(mix $((32768 * gpus)) $((65536 * trainers)))" \
                --out "$out/servers.json"
            ;;
        lost)
            echo "== lost"
            python scripts/faults/lose_servers.py --device cuda --trainers "$trainers" --servers 1 --how both \
                --losses "${LOSSES:-10}" --wrap "$([[ $trainers -eq 1 ]] && echo ddp || echo fsdp2)"
            ;;
        grids) scripts/benchmarks/all_gpus.sh "$out" hsdp pipeline tensor experts ;;
        hsdp) grid hsdp "$gpus" --dp-replicate-size 2 ;;
        pipeline)
            echo "== pipeline"
            launch scripts/benchmarks/pipeline_step.py --layers 4 --tokens-per-rank 65536 --seed 2 --rounds 2
            ;;
        tensor) grid tensor $((gpus / 2)) --tp-size 2 ;;
        experts) grid experts "$gpus" --preset qwen3-30b-a3b --ep-size "$gpus" ;;
        host) launch scripts/benchmarks/host_time.py ;;
        memory)
            launch scripts/benchmarks/memory.py --layers 4 --longest 131072 --steps 30
            PYTORCH_ALLOC_CONF=expandable_segments:True launch scripts/benchmarks/memory.py --layers 4 --longest 131072 --steps 30
            ;;
        *)
            echo "scripts/benchmarks/all_gpus.sh: no part $name" >&2
            exit 1
            ;;
        esac
    done
done
