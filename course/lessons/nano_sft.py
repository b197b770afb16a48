"""Supervised fine-tuning in one short file, with PyTorch and transformers alone.

    python course/lessons/nano_sft.py                               # a toy: reverse a number
    python course/lessons/nano_sft.py MODEL ROWS.jsonl --lr 2e-5    # columns prompt, completion

The policy pi imitates the completions of the data. y_t are the M tokens of the completions of a
batch:

    L = -1/M sum_t log pi(y_t)                                                              loss()

Shapes: N sequences of L tokens, V vocabulary. Position t of a log-prob or a mask is about token
t + 1."""

import argparse
import json
import math

import torch
from tokenizers import Tokenizer, decoders, models
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as FastTokenizer


def toy():
    """Return a small Llama with random weights, a tokenizer of characters, and rows."""
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", *"0123456789="])}
    characters = Tokenizer(models.BPE(vocab, merges=[]))
    characters.decoder = decoders.Fuse()
    tokenizer = FastTokenizer(tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = "{{ messages[0].content }}="
    size = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=13, pad_token_id=0, eos_token_id=1, **size))
    rows = [dict(prompt=n, completion=n[::-1]) for n in map(str, range(1000, 3000))]
    return model, tokenizer, rows


def encode(tokenizer, prompt, completion):
    """Return the ids of a prompt and its completion, and which of them are trained."""
    messages = [dict(role="user", content=prompt)]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True).input_ids
    completion += tokenizer.eos_token
    completion = tokenizer(completion, add_special_tokens=False).input_ids
    mask = [False] * len(prompt) + [True] * len(completion)
    return torch.tensor(prompt + completion), torch.tensor(mask)


def logprobs(model, ids_NL):
    """Return the log-prob of each token after the first: [N, L - 1]."""
    logits_NLV = model(ids_NL).logits[:, :-1]
    return logits_NLV.log_softmax(-1).gather(-1, ids_NL[:, 1:, None])[..., 0]


def loss(logprobs_NL, mask_NL):
    return -(logprobs_NL * mask_NL).sum() / mask_NL.sum()


def learning_rate(step, steps, peak):
    """Return the learning rate of a step, counted from 0: a cosine from the peak to 0."""
    return peak * (1 + math.cos(math.pi * step / steps)) / 2


def train(model, tokenizer, rows, steps=300, batch_size=64, lr=3e-3):
    """Train the model, and return the loss of each step."""
    samples = [encode(tokenizer, row["prompt"], row["completion"]) for row in rows]
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for step in range(steps):
        batch = [samples[i] for i in torch.randperm(len(samples))[:batch_size]]
        # Padding is on the right: no token attends to it, and the mask leaves it out of the loss.
        ids_NL = pad_sequence([ids for ids, _ in batch], batch_first=True)
        mask_NL = pad_sequence([mask for _, mask in batch], batch_first=True)[:, 1:]
        step_loss = loss(logprobs(model, ids_NL), mask_NL)
        step_loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps, lr)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(step_loss.item())
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step + 1}: loss {losses[-1]:.4f}")
    return losses


@torch.no_grad()
def complete(model, tokenizer, prompt):
    """Return the greedy completion of a prompt."""
    ids, mask = encode(tokenizer, prompt, "")
    prompt_1L = ids[~mask][None]
    ids_1L = model.generate(prompt_1L, do_sample=False, max_new_tokens=8)
    return tokenizer.decode(ids_1L[0, prompt_1L.shape[1] :], skip_special_tokens=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", help="Hugging Face id or folder; default: the toy")
    parser.add_argument("rows", nargs="?", help=".jsonl with the columns prompt, completion")
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()
    torch.manual_seed(0)
    model, tokenizer, rows = toy()
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        rows = [json.loads(line) for line in open(args.rows, encoding="utf-8")]
    held_out = rows[::97]
    train(model, tokenizer, [row for row in rows if row not in held_out], lr=args.lr)
    right = [complete(model, tokenizer, row["prompt"]) == row["completion"] for row in held_out]
    print(f"right: {sum(right)} of {len(right)} held-out prompts")
    model.save_pretrained("runs/nano_sft")
    tokenizer.save_pretrained("runs/nano_sft")
