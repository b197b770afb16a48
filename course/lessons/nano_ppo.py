"""PPO in one short file, with PyTorch and transformers alone.

    python course/lessons/nano_ppo.py    # a toy: reverse a number
    python course/lessons/nano_ppo.py MODEL ROWS.jsonl --lr 1e-6 --new_tokens 64  # prompt, answer

A second model predicts the value V_t of each prefix: the rewards that are still to come.

    r_t = -beta log(pi_old(y_t) / pi_ref(y_t)), plus the score at the last token     token_rewards()
    A_t = sum_j lambda^j (r_{t+j} + V_{t+j+1} - V_{t+j})              no discount: gamma is 1  gae()
    R_t = A_t + V_t; then A_t gets mean 0 and standard deviation 1
    L   = mean_t [ -min(rho_t A_t, clip(rho_t, 0.8, 1.2) A_t) ]      rho_t = pi(y_t) / pi_old(y_t)
    L_V = mean_t [ max((v_t - R_t)^2, (clip(v_t, V_t - 0.2, V_t + 0.2) - R_t)^2) / 2 ]

pi_ref is the starting model. A rollout serves several updates: pi_old and V_t are from before the
first of them, pi and v_t change with each.

Shapes: N sequences of L tokens, V vocabulary, D hidden size. Position t of a log-prob, a value or a
mask is about token t + 1."""

import argparse
import copy
import json
from functools import partial

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


class ValueModel(torch.nn.Module):
    """A copy of the policy's transformer with one number for each token."""

    def __init__(self, policy):
        super().__init__()
        self.decoder = copy.deepcopy(policy.get_decoder())
        D = policy.config.hidden_size
        weight = torch.randn(1, D, generator=torch.Generator().manual_seed(0)) / (D + 1) ** 0.5
        self.head = torch.nn.Parameter(weight)

    def forward(self, ids_NL):
        """Return the value of the prefix before each token after the first: [N, L - 1]."""
        return (self.decoder(ids_NL).last_hidden_state[:, :-1] @ self.head.T)[..., 0]


def token_rewards(scores_N, old_logprobs_NL, ref_logprobs_NL, mask_NL, beta):
    """Return r_t: a penalty for each token that pi_ref finds unlikely, and the score at the end."""
    rewards_NL = -beta * (old_logprobs_NL - ref_logprobs_NL) * mask_NL
    last_N = mask_NL.shape[1] - 1 - mask_NL.flip(1).int().argmax(1)  # position of the last token
    rewards_NL[torch.arange(len(last_N)), last_N] += scores_N
    return rewards_NL


def gae(rewards_NL, values_NL, mask_NL, gae_lambda=0.95):
    """Return A_t, from the last token to the first: A_t = delta_t + lambda A_{t+1}."""
    advantages_NL = torch.zeros_like(rewards_NL)
    A_N = next_value_N = torch.zeros(len(rewards_NL))  # after the last token
    for t in reversed(range(rewards_NL.shape[1])):
        delta_N = rewards_NL[:, t] + next_value_N - values_NL[:, t]
        A_N = (delta_N + gae_lambda * A_N) * mask_NL[:, t]  # stays 0 on the padding
        advantages_NL[:, t] = A_N
        next_value_N = values_NL[:, t] * mask_NL[:, t]
    return advantages_NL


def loss(logprobs_NL, old_logprobs_NL, advantages_NL, mask_NL):
    rho_NL = (logprobs_NL - old_logprobs_NL).exp()
    objective_NL = torch.min(rho_NL * advantages_NL, rho_NL.clamp(0.8, 1.2) * advantages_NL)
    return -objective_NL[mask_NL].mean()


def value_loss(values_NL, old_values_NL, returns_NL, mask_NL):
    """Return L_V. Where the clipped error is the larger, v_t went far enough: no gradient."""
    clipped_NL = values_NL.clamp(old_values_NL - 0.2, old_values_NL + 0.2)
    errors_NL = torch.max((values_NL - returns_NL) ** 2, (clipped_NL - returns_NL) ** 2)
    return errors_NL[mask_NL].mean() / 2


def update(model, optimizer, loss):
    """Take one optimizer step, and return the loss."""
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def train(model, tokenizer, rows, steps=120, P=80, epochs=4, new_tokens=3, lr=1e-3, beta=0.05):
    """Train the model, and return the loss of each update."""
    reference, value_model = copy.deepcopy(model), ValueModel(model)
    adamw = partial(torch.optim.AdamW, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    policy_optimizer, value_optimizer = adamw(model.parameters()), adamw(value_model.parameters())
    losses = []
    for step in range(steps):
        sequences, masks, scores = [], [], []
        for row in [rows[i] for i in torch.randperm(len(rows))[:P]]:
            message = [dict(role="user", content=row["prompt"])]
            prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True).input_ids
            (ids,) = sample(model, prompt, 1, new_tokens, tokenizer.eos_token_id)
            sequences.append(torch.tensor(prompt + ids))
            masks.append(torch.tensor([False] * len(prompt) + [True] * len(ids)))
            scores.append(reward(tokenizer.decode(ids, skip_special_tokens=True), row["answer"]))
        ids_NL = pad_sequence(sequences, batch_first=True)
        mask_NL = pad_sequence(masks, batch_first=True)[:, 1:]
        with torch.no_grad():  # all of this stays fixed during the updates
            old_NL, ref_NL = logprobs(model, ids_NL), logprobs(reference, ids_NL)
            old_values_NL = value_model(ids_NL)
            rewards_NL = token_rewards(torch.tensor(scores), old_NL, ref_NL, mask_NL, beta)
            advantages_NL = gae(rewards_NL, old_values_NL, mask_NL)
            returns_NL = advantages_NL + old_values_NL
            trained = advantages_NL[mask_NL]
            advantages_NL = (advantages_NL - trained.mean()) / (trained.std() + 1e-6)
        for _ in range(epochs):
            policy_loss = loss(logprobs(model, ids_NL), old_NL, advantages_NL, mask_NL)
            losses.append(update(model, policy_optimizer, policy_loss))
            error = value_loss(value_model(ids_NL), old_values_NL, returns_NL, mask_NL)
            update(value_model, value_optimizer, error)
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step + 1}: reward {sum(scores) / len(scores):.3f}")
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
    model.save_pretrained("runs/nano_ppo")
    tokenizer.save_pretrained("runs/nano_ppo")
