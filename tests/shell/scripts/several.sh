COMMON="--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --max-position-embeddings 1024"
python prepare.py --input text
torchrun --nproc-per-node 2 pretrain_gpt.py $COMMON --micro-batch-size 1 --bf16
if [ -d "$OLD" ]; then
    torchrun --nproc-per-node 4 pretrain_gpt.py $COMMON --micro-batch-size 2 --fp16
fi
