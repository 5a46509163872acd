#!/usr/bin/env bash
# scripts/benchmarks/all_gpus.sh OUT [PART ...]: measures training steps on all GPUs of this host, as docs/benchmarks
# shows them. Prints tables, and writes figures of steps and models to OUT as JSON. Without parts `modes`, `liger`,
# `saved`, `models`, `host` and `memory` run, for about half an hour on four H200. Parts in which a launch failed are
# listed at the end, which is an exit status of 1; later launches of such a part, and parts after it, run all the same.
#
#   modes    all default modes of attention_step.py: documents A, B, C and uniform ones
#   shown    the modes that pages show, A, B, C: fewer than above
#   scale    the product, Ulysses, and ring-flash-attn's own code if it is there: A, B, C; 4 minutes, 5 on eight GPUs
#   scale-one    the same for D, one document over all GPUs; 1 minute on two, 3 on eight
#   weak     2, 4, ... GPUs of 64K tokens each; one GPU that does the part of one of them in `ideal` (--share-tokens),
#            the same tokens and pairs; one long document, and documents of 32K; WEAK has further options
#   liger    ideal, placed and plain packing with Liger's kernels: A, B, C
#   saved    attention outputs saved, and the best settings (saved, Liger's kernels)
#   models   whole models: Llama-3-8B and Qwen3-4B, one long document, 64K and 128K tokens per GPU (on four)
#   windows  layers of Gemma 3 27B, OLMo 3 7B and GPT-OSS 20B: sliding windows, and sinks
#   hybrid   layers of Qwen 3.5 27B and Nemotron-H 8B, which carry a state
#   training whole models with Trainer, 50 steps of 128K tokens per GPU, losses compared with Ulysses; TRAINING has
#            further options, for example --checkpointed-attention recompute on GPUs of 80 GB
#   prefixes layers of Llama-3-8B on documents that begin alike: trees of agents, groups, pairs; PREFIXES has further options
#   longest  the longest document that Llama-3-8B trains on: memory by short attention, then with whole attention;
#            LONGEST has further options, for example --checkpointing full --minutes 9
#   servers  all GPUs but one train, and that one is an attention server: compared with an even split, and without the server
#   lost     the same with FSDP2 (with DDP on two): the server is killed and stopped in turns, LOSSES times (10)
#   grids    the four below; hsdp and tensor with their simulation from the profile CLUSTER (h100 or h200 by the GPUs' name):
#   hsdp       two replicas, each sharded by FSDP2
#   pipeline   two stages: plain, as packed, shaped; measured and predicted
#   tensor     two tensor ranks (Transformers 5.19)
#   experts    layers of Qwen3-30B-A3B, whose experts all GPUs divide (Transformers 5.23); not simulated
#   host     time of the host per attention call, and per call of FlashAttention
#   memory   memory that torch holds while shapes change
#
# ROUNDS is how often steps are measured, if not by default. DOCUMENTS replaces A, B and C for as many GPUs
# as there are: for example 65536,16x4096;131072,32x4096 on two.
# NCCL_P2P_DISABLE=1 gives links of 24 to 30 GB/s, like a network between nodes;
# DISTCA_EXCHANGE_CHUNKS=4 is the setting that the product takes between nodes by itself.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:?usage: scripts/benchmarks/all_gpus.sh OUT [PART ...]}
shift
mkdir -p "$out"
gpus=$(nvidia-smi --list-gpus | wc -l)
documents=${DOCUMENTS:-C:$gpus;A:$gpus;B:$gpus}
# Modes of a package that need not be there.
ring=$(python -c 'import importlib.util as u; print(",zigzag,llama3" * bool(u.find_spec("ring_flash_attn")))')
export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 # kernels are compiled once for all parts

trainers=$((gpus - 1))
cluster=${CLUSTER-$(nvidia-smi --query-gpu=name --format=csv,noheader | grep -oim 1 'h[12]00' | tr '[:upper:]' '[:lower:]' || true)}

# One document, and so many of 4,096 tokens that all add up.
mix() {
    local longest=$1 short=$((($2 - $1) / 4096))
    echo "$longest$([[ $short -eq 0 ]] || echo ",${short}x4096")"
}
# Later launches of a part run all the same: `failure` is the status of the last one that failed.
launch() { torchrun --standalone --nproc-per-node "$gpus" "$@" || failure=$?; }
# A program by its name, and the file of its figures by theirs.
measure() {
    local program=$1 name=$2
    shift 2
    echo "== $name"
    launch "scripts/benchmarks/$program.py" --out "$out/$name.json" "$@"
}
layers() { measure attention_step "$1" --warmup 1 --rounds "${ROUNDS:-3}" "${@:2}"; }
step() { layers "$1" --layers 4 "${@:2}"; }
model() { measure model_step "$1" --liger --head liger --warmup 1 --rounds 1 "${@:2}"; }
# For so many data ranks: their option, with 64K and 128K tokens per data rank.
grid() {
    local name=$1 ranks=$2
    shift 2
    step "$name" --modes ideal,placed,given,local ${cluster:+--cluster "$cluster"} \
        --documents "C:$ranks;B:$ranks" "$@"
}
search() {
    local name=$1
    shift
    PYTORCH_ALLOC_CONF=expandable_segments:True python scripts/benchmarks/longest_context.py \
        --liger --out "$out/$name.json" "$@"
}

run_part() {
    local name=$1
    case $name in
    modes) step modes --documents "$documents;$((16 * gpus))x4096" ;;
    shown) step shown --documents "$documents" --modes ideal,placed,given,local ;;
    scale | scale-one) test -n "$ring" || echo "ring-flash-attn is not installed: its modes are left out" ;;&
    scale) step scale --documents "$documents" --modes "ideal,placed,given,local,ulysses$ring" ;;
    scale-one) # cannot stay whole on a GPU: there are no packs of it
        step scale-one --rounds "${ROUNDS:-2}" --documents "D:$gpus" --modes "ideal,placed,ulysses$ring"
        ;;
    weak)
        for ((size = 2; size <= gpus; size *= 2)); do
            for text in "$(mix $((49152 * size)) $((65536 * size)))" "$((size * 2))x32768"; do
                # shellcheck disable=SC2086 # several options
                for ways in "1 ideal --share-tokens 65536" "$size ideal,placed"; do
                    read -r processes modes share <<<"$ways"
                    echo "== weak, $size GPUs, $text: $processes"
                    torchrun --standalone --nproc-per-node "$processes" scripts/benchmarks/attention_step.py --layers 4 \
                        --warmup 1 --rounds "${ROUNDS:-2}" --documents "$text" --modes "$modes" \
                        --out "$out/weak-$size-${text//,/-}-$processes.json" $share ${WEAK:-} || failure=$?
                done
            done
        done
        ;;
    liger) step liger --liger --no-check --documents "$documents" --modes ideal,placed,local ;;
    saved)
        step saved --checkpointing saved --no-check --documents "$documents" --modes ideal,placed
        step best --checkpointing saved --liger --no-check --documents "$documents" --modes ideal,placed
        ;;
    models)
        model llama-64k --documents 262144
        model llama-128k --documents 262144,64x4096
        model qwen-64k --preset qwen3-4b --documents 262144
        model qwen-128k --preset qwen3-4b --documents 262144,64x4096
        ;;
    windows)
        for preset in gemma3-27b olmo3-7b gpt-oss-20b; do
            layers "$preset" --preset "$preset" --documents "$documents" --modes ideal,placed
        done
        ;;
    hybrid)
        for preset in qwen3.5-27b nemotron-h-8b; do
            layers "$preset" --preset "$preset" --documents "$documents" --modes ideal,placed,given,local
        done
        ;;
    training)
        for preset in llama3-8b qwen3-4b; do
            # shellcheck disable=SC2086 # several options
            PYTORCH_ALLOC_CONF=expandable_segments:True measure training_run "training-$preset" \
                --preset "$preset" --liger --steps 50 ${TRAINING:-}
        done
        ;;
    # shellcheck disable=SC2086 # several options
    prefixes) measure shared_prefixes prefixes --layers 4 --rounds "${ROUNDS:-8}" ${PREFIXES:-} ;;
    longest)
        echo "== longest"
        # shellcheck disable=SC2086 # several options
        search longest-short --attended-tokens 4096 ${LONGEST:-}
        found=$(python -c 'import json, sys; print(json.load(open(sys.argv[1]))["longest_tokens_per_rank"])' "$out/longest-short.json")
        # shellcheck disable=SC2086 # several options
        search longest ${LONGEST:-} --attended-tokens 0 --first-tokens "$found" --most-tokens "$found"
        ;;
    servers)
        echo "== servers"
        # Kernels are compiled meanwhile: a server may be silent for longer than usual.
        DISTCA_TIMEOUTS_HEARTBEAT_LIMIT_SECONDS=60 launch -m distca_hf.run --attention-servers 1 \
            scripts/benchmarks/attention_step.py --layers 4 --checkpointing saved --rounds "${ROUNDS:-3}" \
            --documents "$(mix $((16384 * gpus)) $((65536 * trainers)));$(mix $((32768 * gpus)) $((65536 * trainers)))" \
            --out "$out/servers.json"
        ;;
    lost)
        echo "== lost"
        python scripts/faults/lose_servers.py --device cuda --trainers "$trainers" --servers 1 --how both \
            --losses "${LOSSES:-10}" --wrap "$([[ $trainers -eq 1 ]] && echo ddp || echo fsdp2)"
        ;;
    hsdp) grid hsdp "$gpus" --dp-replicate-size 2 ;;
    pipeline)
        echo "== pipeline"
        folder=$(mktemp -d "$out/pipeline.XXXXXX")
        trap 'rm -rf "$folder"' EXIT # of this part, also if it fails
        launch scripts/benchmarks/pipeline_step.py --layers 4 --tokens-per-rank 65536 --seed 2 --rounds "${ROUNDS:-2}" \
            --folder "$folder/model"
        ;;
    tensor) grid tensor $((gpus / 2)) --tp-size 2 ;;
    experts) grid experts "$gpus" --preset qwen3-30b-a3b --ep-size "$gpus" --even-experts ;;
    host) launch scripts/benchmarks/host_time.py ;;
    memory)
        launch scripts/benchmarks/memory.py --layers 4 --longest 131072 --steps 30
        PYTORCH_ALLOC_CONF=expandable_segments:True launch scripts/benchmarks/memory.py --layers 4 --longest 131072 --steps 30
        ;;
    *)
        echo "scripts/benchmarks/all_gpus.sh: no part $name" >&2
        return 1
        ;;
    esac
}

parts=${*:-modes liger saved models host memory}
failed=()
trap 'exit 130' INT # else the next part begins
for part in ${parts//grids/hsdp pipeline tensor experts}; do
    set +e # after || or if, a part would go on after its first error
    (
        set -e
        trap 'exit 130' INT # else the next launch begins
        failure=0
        run_part "$part"
        exit "$failure"
    )
    status=$?
    set -e
    if [[ $status -ne 0 ]]; then
        echo "== $part failed with status $status" >&2
        failed+=("$part")
    fi
done
if [[ ${#failed[@]} -ne 0 ]]; then
    echo "== failed parts: ${failed[*]}" >&2
    exit 1
fi
