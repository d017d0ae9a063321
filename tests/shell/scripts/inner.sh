#!/bin/bash
OPTIONS=" --num-layers 6 --hidden-size 512 --num-attention-heads 8 \
  --seq-length 512 --max-position-embeddings 512 --split '98,2,0' --micro-batch-size 3 "
NODES=2
export CMD="pretrain_gpt.py $OPTIONS --fp16"
LAUNCHER="python -u -m torch.distributed.launch --nproc_per_node 4 --nnodes $NODES"
clear; srun --wait=60 --jobid $SLURM_JOBID bash -c "$LAUNCHER --node_rank \$SLURM_PROCID $CMD" 2>&1 | tee log.txt
