#!/usr/bin/env bash
# Questions that want JSON with given keys: a chat model before, after SFT and after GRPO on other questions.
#   bash bench/results/bills.sh path/to/SmolLM2-135M-Instruct SEED
set -eu
model=$1 seed=$2 out=runs/bills
test="--dataset $out/test.jsonl --reward bench/results/bills_reward.py:right_object --max_new_tokens 128 --samples_per_prompt 0"

python bench/results/rows.py bills --output_dir $out
[ -e $out/before/results.json ] || python eval.py --model $model $test --output_dir $out/before

python sft.py --config configs/smollm2_135m_sft.yaml --model $model --dataset $out/sft.jsonl \
    --max_steps 3 --seed $seed --output_dir $out/sft_$seed
python eval.py --model $out/sft_$seed/hf $test --output_dir $out/after_sft_$seed

python grpo.py --config configs/smollm2_135m_grpo.yaml --model $out/sft_$seed/hf --dataset $out/rl.jsonl \
    --reward bench/results/bills_reward.py:right_object --seed $seed --output_dir $out/grpo_$seed
python eval.py --model $out/grpo_$seed/hf $test --output_dir $out/after_grpo_$seed
