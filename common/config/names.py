"""Names of flags in other libraries and scripts, for the message about an unknown flag."""

import difflib
import re
from collections.abc import Sequence

from common.parallel import distributed

# our flags, each with its names elsewhere and the flags of our other scripts with the same use
ELSEWHERE = dict(
    activation_checkpointing="gradient_checkpointing use_gradient_checkpointing",
    batch_size="per_device_train_batch_size train_batch_size global_batch_size micro_batch_size",
    beta="kl_coef kl_coeff init_kl_coef kl_loss_coef kl_penalty",
    clip_high="epsilon_high clip_ratio_high",
    clip_low="epsilon cliprange clip_range clip_ratio clip_eps eps_clip",
    columns="dataset_text_field text_field text_column prompt_column",
    dataset="dataset_name dataset_path data data_path train_file train_data train_dataset",
    dataset_split="dataset_train_split train_split split",
    dtype="bf16 fp16 torch_dtype precision mixed_precision",
    engine="use_vllm vllm_mode backend",
    epochs="num_train_epochs num_epochs n_epochs train_epochs total_epochs",
    epochs_per_rollout="num_iterations num_ppo_epochs ppo_epochs",
    eval_dataset="eval_file eval_data val_dataset val_file validation_file test_dataset test_file",
    eval_every="eval_steps eval_interval eval_strategy evaluation_strategy",
    eval_size="max_prompts max_eval_samples max_eval_prompts num_eval_samples eval_samples limit",
    eval_split="dataset_test_split test_split val_split",
    gpu_memory_utilization="vllm_gpu_memory_utilization",
    keep_best="metric_for_best_model load_best_model_at_end",
    keep_last="save_total_limit",
    log="report_to",
    lora_rank="lora lora_r use_peft use_lora",
    lora_targets="lora_target_modules target_modules lora_target",
    loss="loss_type",
    lr="learning_rate",
    lr_schedule="lr_scheduler_type",
    max_grad_norm="grad_clip clip_grad gradient_clipping",
    max_length=(
        "max_prompt_length max_seq_length max_seq_len seq_len seq_length cutoff_len block_size"
    ),
    max_new_tokens=(
        "max_completion_length max_response_length response_length max_tokens generate_max_len"
    ),
    max_prompts="eval_size max_eval_samples max_samples num_samples limit",
    max_steps="steps num_steps total_steps max_iters train_steps num_training_steps",
    model="model_name_or_path model_name model_path base_model pretrain",
    output_dir="output out_dir save_dir out",
    prompts_per_step=(
        "batch_size rollout_batch_size train_batch_size per_device_train_batch_size "
        "global_batch_size"
    ),
    reference_model="ref_model ref_model_path reference_model_path",
    resume="resume_from_checkpoint",
    reward="reward_funcs reward_func reward_function reward_fn reward_model reward_model_path",
    samples_per_prompt=(
        "num_generations group_size n_samples_per_prompt rollout_n num_return_sequences n"
    ),
    save_every="save_steps save_interval",
    sft_weight="rpo_alpha sft_coef nll_weight",
    stop="stop_strings stop_sequences stop_words until",
    stop_token_ids="stop_tokens eos_token_id eos_token_ids",
    tensor_parallel_size="vllm_tensor_parallel_size tp_size tp",
    wandb_name="run_name",
    warmup_steps="warmup num_warmup_steps warmup_ratio",
)

# flags that only some scripts can have, with the reason
REFUSED = dict.fromkeys(
    ("top_p", "top_k", "min_p"),
    "only eval.py and bok.py truncate the distribution; training needs the log-probs of the whole"
    " one, see --temperature",
)


def flag_for(name: str, known: Sequence[str]) -> str | None:
    """Return the one of `known` that has the name elsewhere; underscores do not count."""
    plain = name.replace("_", "")
    flags = (flag for flag, names in ELSEWHERE.items() if plain in names.replace("_", "").split())
    return next((flag for flag in flags if flag in known), None)


def hint(name: str, known: Sequence[str]) -> str:
    """Return what may be meant by a flag that is not one of `known`: a flag of other scripts, the
    name of another library's flag here, or the nearest name; empty if nothing is near."""
    if name in REFUSED:
        return f": {REFUSED[name]}"
    declaration = re.compile(rf"^    {re.escape(name)}: .* = ", re.MULTILINE)
    scripts = [
        path.name
        for path in sorted(distributed.PROJECT.glob("*.py"))
        if declaration.search(path.read_text(encoding="utf-8"))
    ]
    text = f": it is a flag of {', '.join(scripts)}" if scripts else ""
    flag = flag_for(name, known)
    if flag:
        text += f"; here it is --{flag}"
    return text or similar(name, known, "--")


def similar(name: str, known: Sequence[str], mark: str = "") -> str:
    """Return a guess for a misspelled name, with a mark such as `--` before it, for a message;
    empty without one."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f" (did you mean {mark}{close[0]}?)" if close else ""
