#!/bin/bash
ranks=4
args=(--output_dir "$OUT" --per_device_train_batch_size 8
      --gradient_accumulation_steps $((ranks * 2)) --fp16
      --train_schedule 1f1b --partition_method uniform)
srun -N 1 bash -c "python -m torch.distributed.run --nproc_per_node=$ranks run_gpt.py ${args[*]} --learning_rate 1e-4"
