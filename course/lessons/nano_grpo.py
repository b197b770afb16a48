"""GRPO in one short file, with PyTorch and transformers alone.

    python course/lessons/nano_grpo.py    # a toy: reverse a number
    python course/lessons/nano_grpo.py MODEL ROWS.jsonl --lr 1e-6 --new_tokens 64  # prompt, answer

The policy pi samples G completions of each prompt. reward() scores each with a number r_i:

    A_i   = (r_i - mean(r_1..r_G)) / std(r_1..r_G)                                   advantages()
    rho_t = pi(y_t) / pi_old(y_t)               pi_old: the policy before the updates of this step
    L     = mean_t [ -min(rho_t A_i, clip(rho_t, 0.8, 1.28) A_i) ]                          loss()

Shapes: P prompts, G completions of each, N = P * G sequences of L tokens, V vocabulary. Position t
of a log-prob or a mask is about token t + 1."""

import argparse
import json

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
    rows = [dict(prompt=n, answer=n[::-1]) for n in map(str, range(10, 100))]
    return model, tokenizer, rows


def reward(completion, answer):
    """Return the fraction of the characters that are right."""
    right = sum(a == b for a, b in zip(completion, answer, strict=False))
    return right / max(len(completion), len(answer))


@torch.no_grad()
def sample(model, prompt, G, new_tokens, eos):
    """Return the ids of G completions of a prompt, each up to its EOS."""
    ids_GL = torch.tensor([prompt] * G)
    for _ in range(new_tokens):
        next_GV = model(ids_GL).logits[:, -1].softmax(-1)
        ids_GL = torch.cat([ids_GL, torch.multinomial(next_GV, 1)], dim=1)
    completions = ids_GL[:, len(prompt) :].tolist()
    return [ids[: ids.index(eos) + 1] if eos in ids else ids for ids in completions]


def logprobs(model, ids_NL):
    """Return the log-prob of each token after the first: [N, L - 1]."""
    logits_NLV = model(ids_NL).logits[:, :-1]
    return logits_NLV.log_softmax(-1).gather(-1, ids_NL[:, 1:, None])[..., 0]


def advantages(rewards_PG):
    centred_PG = rewards_PG - rewards_PG.mean(1, keepdim=True)
    return centred_PG / (rewards_PG.std(1, keepdim=True) + 1e-6)


def loss(logprobs_NL, old_logprobs_NL, advantages_N1, mask_NL):
    rho_NL = (logprobs_NL - old_logprobs_NL).exp()
    objective_NL = torch.min(rho_NL * advantages_N1, rho_NL.clamp(0.8, 1.28) * advantages_N1)
    return -(objective_NL * mask_NL).sum() / mask_NL.sum()


def train(model, tokenizer, rows, steps=120, P=32, G=16, epochs=2, new_tokens=3, lr=1e-3):
    """Train the model, and return the loss of each update."""
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for step in range(steps):
        sequences, masks, rewards = [], [], []
        for row in [rows[i] for i in torch.randperm(len(rows))[:P]]:
            message = [dict(role="user", content=row["prompt"])]
            prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True).input_ids
            for ids in sample(model, prompt, G, new_tokens, tokenizer.eos_token_id):
                sequences.append(torch.tensor(prompt + ids))
                masks.append(torch.tensor([False] * len(prompt) + [True] * len(ids)))
                text = tokenizer.decode(ids, skip_special_tokens=True)
                rewards.append(reward(text, row["answer"]))
        # Padding is on the right: no token attends to it, and the mask leaves it out of the loss.
        ids_NL = pad_sequence(sequences, batch_first=True)
        mask_NL = pad_sequence(masks, batch_first=True)[:, 1:]
        # float64: the mean of equal rewards is rounded, and the division by 1e-6 amplifies that.
        rewards_PG = torch.tensor(rewards, dtype=torch.float64).view(-1, G)
        advantages_N1 = advantages(rewards_PG).view(-1, 1)
        old_logprobs_NL = logprobs(model, ids_NL).detach()
        for _ in range(epochs):
            update_loss = loss(logprobs(model, ids_NL), old_logprobs_NL, advantages_N1, mask_NL)
            update_loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(update_loss.item())
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step + 1}: reward {rewards_PG.mean():.3f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", help="Hugging Face id or folder; default: the toy")
    parser.add_argument("rows", nargs="?", help=".jsonl with the columns prompt, answer")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--new_tokens", type=int, default=3)
    args = parser.parse_args()
    torch.manual_seed(0)
    model, tokenizer, rows = toy()
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        rows = [json.loads(line) for line in open(args.rows, encoding="utf-8")]
    train(model, tokenizer, rows, new_tokens=args.new_tokens, lr=args.lr)
    model.save_pretrained("runs/nano_grpo")
    tokenizer.save_pretrained("runs/nano_grpo")
