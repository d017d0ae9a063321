deepspeed --num_gpus=4 --num_nodes=2 train.py \
    --deepspeed trainer.json \
    --per_device_train_batch_size 2 --gradient_accumulation_steps 8 \
    --learning_rate 2e-5 --weight_decay 0. --bf16 True
