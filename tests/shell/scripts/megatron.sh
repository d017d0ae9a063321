#!/bin/bash
#SBATCH --nodes=2
# Everything that launch scripts are made of; what a human reads is in own.jsonl.
set -euo pipefail
export CUDA_DEVICE_MAX_CONNECTIONS=1

GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-1}
WORLD_SIZE=$(($GPUS_PER_NODE * NNODES))
TP=${TP:-2}
PP=${PP-2}
: ${MICRO:=4}                           # the usual way to take it from outside
DATA_PARALLEL=$(( WORLD_SIZE / (TP * PP) ))
GLOBAL=$((DATA_PARALLEL * MICRO * 8))
CHECKPOINTS=$1
STAMP=$(date +%F)

SIZE="7B" # or 13B
case "${SIZE}" in
    "7B") LAYERS=32; HIDDEN=4096; HEADS=32 ;;
    13B | 14B)
        LAYERS=40; HIDDEN=5120; HEADS=40 ;;
    *) echo "unknown size"; exit 1 ;;
esac

if [[ $LAYERS -gt 36 ]]; then
    SEQUENCE=2048
elif [ "$SIZE" = 7B ] && [[ ! $HIDDEN -lt 4096 ]]; then
    SEQUENCE=4096
else
    SEQUENCE=8192
fi

MODEL_ARGS=(
    --num-layers $LAYERS            # a comment in an array
    --hidden-size "$HIDDEN" --num-attention-heads ${HEADS}
    # --num-layers 999
    --seq-length ${SEQUENCE} --max-position-embeddings ${SEQUENCE}
    "--position-embedding-type rope"
)
MODEL_ARGS+=(--swiglu '--disable-bias-linear')
PRECISION="bf16"
[ "$PRECISION" == "fp16" ] && MODEL_ARGS+=(--fp16) || MODEL_ARGS+=(--${PRECISION})

TRAIN_ARGS=" \
    --micro-batch-size $MICRO \
    --global-batch-size=${GLOBAL} \
    --lr 3e-4 --min-lr 3e-5 \
    --clip-grad 1.0 --train-iters 1000 \
    --save $CHECKPOINTS/$STAMP --save-interval 100 \
    --data-path $DATA \
"
if [ -f /etc/profile ]; then
    EXTRA="--recompute-activations"
fi

launch() {
    local nodes=$1
    shift
    torchrun --nproc_per_node $GPUS_PER_NODE --nnodes=$nodes "$@" 2>&1 | tee train.log
}

launch $NNODES pretrain_gpt.py \
    --tensor-model-parallel-size ${TP} --pipeline-model-parallel-size ${PP} \
    ${MODEL_ARGS[@]} $TRAIN_ARGS \
    $EXTRA \
    --log-interval $LOG_INTERVAL
