#!/bin/bash
MICRO_BATCH=4
torchrun --nproc_per_node 8 pretrain_gpt.py \
    --num-layers 24x \
    --hidden-size 2048 --num-attention-heads 16 \
    --seq-length 2048 --max-position-embeddings 2048 \
    --micro-batch-size $MIRCO_BATCH \
    --global-batch-size $(nproc) \
    --lr-decay-style sinus \
    --clip-grad \
    --bf16
