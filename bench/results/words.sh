#!/usr/bin/env bash
# Word problems with numbers below 20: a chat model before, after SFT and after GRPO on other questions.
#   bash bench/results/words.sh path/to/SmolLM2-135M-Instruct SEED
set -eu
model=$1 seed=$2 out=runs/words
test="--dataset $out/test.jsonl --reward gsm8k_flexible --max_new_tokens 128 --samples_per_prompt 0"

python bench/results/rows.py words --output_dir $out
[ -e $out/before/results.json ] || python eval.py --model $model $test --output_dir $out/before

python sft.py --config configs/smollm2_135m_sft.yaml --model $model --dataset $out/sft.jsonl \
    --seed $seed --output_dir $out/sft_$seed
python eval.py --model $out/sft_$seed/hf $test --output_dir $out/after_sft_$seed

python grpo.py --config configs/smollm2_135m_grpo.yaml --model $out/sft_$seed/hf --dataset $out/rl.jsonl \
    --reward gsm8k_flexible --seed $seed --output_dir $out/grpo_$seed
python eval.py --model $out/grpo_$seed/hf $test --output_dir $out/after_grpo_$seed
