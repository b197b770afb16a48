#!/usr/bin/env bash
# A chat model before, after SFT and after GRPO on other questions. Task `words`: word problems with numbers below 20;
# `bills`: questions that want JSON with three given keys.
#   bash bench/results/run.sh words path/to/SmolLM2-135M-Instruct SEED
set -eu
task=$1 model=$2 seed=$3 out=runs/$1
case $task in
    words) reward=gsm8k_flexible sft_steps=8 ;;
    bills) reward=bench/results/bills_reward.py:right_object sft_steps=3 ;;
esac
test="--dataset $out/test.jsonl --reward $reward --max_new_tokens 128 --samples_per_prompt 0"

python bench/results/rows.py $task --output_dir $out
[ -e $out/before/results.json ] || python eval.py --model $model $test --output_dir $out/before

python sft.py --config configs/smollm2_135m_sft.yaml --model $model --dataset $out/sft.jsonl \
    --max_steps $sft_steps --seed $seed --output_dir $out/sft_$seed
python eval.py --model $out/sft_$seed/hf $test --output_dir $out/after_sft_$seed

python grpo.py --config configs/smollm2_135m_grpo.yaml --model $out/sft_$seed/hf --dataset $out/rl.jsonl \
    --reward $reward --seed $seed --output_dir $out/grpo_$seed
python eval.py --model $out/grpo_$seed/hf $test --output_dir $out/after_grpo_$seed
