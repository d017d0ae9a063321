DATA_PATH=<Specify path and file prefix>_text_document
torchrun pretrain_gpt.py --num-layers 2 --data-path $DATA_PATH
