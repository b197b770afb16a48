"""Direct preference optimisation in one short file, with PyTorch and transformers alone.

    python course/lessons/nano_dpo.py                             # a toy: prefer a reversed number
    python course/lessons/nano_dpo.py MODEL ROWS.jsonl --lr 1e-6  # columns prompt, chosen, rejected

The policy pi learns from pairs of completions, y_c (chosen) and y_r (rejected). pi_ref is the model
before training:

    r(y) = beta log(pi(y) / pi_ref(y))            pi(y): product over the tokens of the completion
    L    = mean_pairs [ -log sigma(r(y_c) - r(y_r)) ]                                       loss()

Shapes: W pairs; N = 2W sequences (all chosen, then all rejected ones) of L tokens; V vocabulary.
Position t of a log-prob or a mask is about token t + 1."""

import argparse
import copy
import json

import torch
from tokenizers import Tokenizer, decoders, models
from torch.nn.functional import logsigmoid
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
    numbers = [str(n) for n in range(1000, 3000)]
    rows = [dict(prompt=n, chosen=n[::-1], rejected=n) for n in numbers if n != n[::-1]]
    return model, tokenizer, rows


def encode(tokenizer, prompt, completion):
    """Return the ids of a prompt and its completion, and which of them are trained."""
    messages = [dict(role="user", content=prompt)]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True).input_ids
    completion += tokenizer.eos_token
    completion = tokenizer(completion, add_special_tokens=False).input_ids
    mask = [False] * len(prompt) + [True] * len(completion)
    return torch.tensor(prompt + completion), torch.tensor(mask)


def completion_logps(model, samples):
    """Return log pi(y) of each completion: the sum over its tokens, [N]."""
    # Padding is on the right: no token attends to it, and the mask leaves it out of the sum.
    ids_NL = pad_sequence([ids for ids, _ in samples], batch_first=True)
    mask_NL = pad_sequence([mask for _, mask in samples], batch_first=True)[:, 1:]
    logits_NLV = model(ids_NL).logits[:, :-1]
    logprobs_NL = logits_NLV.log_softmax(-1).gather(-1, ids_NL[:, 1:, None])[..., 0]
    return (logprobs_NL * mask_NL).sum(1)


def implicit_rewards(logps_N, ref_logps_N, beta):
    return (beta * (logps_N - ref_logps_N)).chunk(2)


def loss(chosen_W, rejected_W):
    return -logsigmoid(chosen_W - rejected_W).mean()


def learning_rate(step, steps, peak):
    """Return the learning rate of a step, counted from 0: a line from the peak to 0."""
    return peak * (1 - step / steps)


def train(model, tokenizer, rows, steps=200, batch_size=64, lr=1e-3, beta=0.1):
    """Train the model, and return the loss of each step."""
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for step in range(steps):
        batch = [rows[i] for i in torch.randperm(len(rows))[:batch_size]]
        samples = [encode(tokenizer, row["prompt"], row["chosen"]) for row in batch]
        samples += [encode(tokenizer, row["prompt"], row["rejected"]) for row in batch]
        with torch.no_grad():
            ref_logps_N = completion_logps(reference, samples)
        logps_N = completion_logps(model, samples)
        chosen_W, rejected_W = implicit_rewards(logps_N, ref_logps_N, beta)
        step_loss = loss(chosen_W, rejected_W)
        step_loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps, lr)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(step_loss.item())
        if step % 20 == 0 or step == steps - 1:
            accuracy = (chosen_W > rejected_W).float().mean()
            print(f"step {step + 1}: loss {losses[-1]:.4f}, chosen preferred {accuracy:.2f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", help="Hugging Face id or folder; default: the toy")
    parser.add_argument("rows", nargs="?", help=".jsonl with the columns prompt, chosen, rejected")
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()
    torch.manual_seed(0)
    model, tokenizer, rows = toy()
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        rows = [json.loads(line) for line in open(args.rows, encoding="utf-8")]
    train(model, tokenizer, rows, lr=args.lr)
    model.save_pretrained("runs/nano_dpo")
    tokenizer.save_pretrained("runs/nano_dpo")
