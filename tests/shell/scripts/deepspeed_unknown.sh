cat > ds.json <<EOT
{
  "train_batch_size": $GLOBAL,
  "train_micro_batch_size_per_gpu": $(nproc),
  "bf16": {"enabled": true}
}
EOT
deepspeed train.py --deepspeed_config ds.json
