#!/bin/bash
STAGE=2
MICRO=4
GLOBAL=$((MICRO * 4 * 8))
CONFIG="./ds.$JOB.json"
cat <<EOT > $CONFIG
{
  "train_batch_size": $GLOBAL,
  "train_micro_batch_size_per_gpu": ${MICRO},
  "gradient_clipping": 1.0, // comments are fine
  "zero_optimization": {"stage": $STAGE},
  "bf16": {"enabled": true},
  "steps_per_print": 100
}
EOT
ARGS=" --deepspeed --deepspeed_config=${CONFIG} "
RUN="deepspeed --num_gpus 8 train.py $ARGS"
echo "$RUN"
eval $RUN
