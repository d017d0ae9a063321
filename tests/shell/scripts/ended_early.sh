torchrun --nproc_per_node 2 pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 --bf16 \
    --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 \ 
    --global-batch-size 64 \
    # --fp16 \
    --lr 1e-4
    --clip-grad 0.5
