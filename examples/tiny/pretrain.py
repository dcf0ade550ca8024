"""Pretrains the tiny Qwen3 model in examples/tiny/model, in a few minutes on two CPU cores.

    python examples/tiny/pretrain.py --seed 0

The text is sums with their results, in two styles, as if from two hands: some lines give the result at once,
`(7+8-5+9+2)%10=1`, the others give every running total first, `(7+8-5+9+2)%10:5,0,9,1`. Nothing in it is wrong,
and no held-out problem is in it. Training stops early, while the model still mixes both styles and still slips
when it works a sum; what is left to gain is what reinforcement learning is for.
"""

import argparse
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from octavo.tasks.arithmetic import ArithmeticConfig, draw_problem_text, is_held_out, running_totals
from octavo.tasks.problem import Problem, Task

MODEL_FOLDER = Path(__file__).resolve().parent / "model"
VOCAB_SIZE = 128
MAX_NEW_TOKENS = 16
IGNORED = -100


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character: printable ASCII and the newline."""
    characters = ["<eos>", "<unk>", "\n", *map(chr, range(32, 127))]
    vocab = {character: token for token, character in enumerate(characters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>", model_max_length=256
    )


def build_model(eos_token_id: int) -> Qwen3ForCausalLM:
    """1.8 M parameters, random. Every width is a multiple of 128, so that every FP8 recipe fits."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            tie_word_embeddings=True,
            max_position_embeddings=256,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            bos_token_id=None,
            eos_token_id=eos_token_id,
        )
    )


def draw_line(rng: random.Random, config: ArithmeticConfig, worked_share: float) -> tuple[str, str]:
    """A problem that is not held out and a right completion: ("(7+8-5)%10", ":5,0") or ("(7+8-5)%10", "=0")."""
    while True:
        text = draw_problem_text(rng, config)
        if not is_held_out(text):
            break
    totals = running_totals(text)
    if rng.random() < worked_share:
        return text, ":" + ",".join(map(str, totals))
    return text, f"={totals[-1]}"


def completion_loss(model, tokenizer, lines: list[tuple[str, str]]) -> torch.Tensor:
    """Summed cross-entropy of the completions and their EOS, in nats; lines are padded to the longest one."""
    prompts = tokenizer([prompt for prompt, _ in lines])["input_ids"]
    completions = tokenizer([completion + tokenizer.eos_token for _, completion in lines])["input_ids"]
    width = max(len(p) + len(c) for p, c in zip(prompts, completions, strict=True))
    tokens = torch.full((len(lines), width), tokenizer.eos_token_id)
    targets = torch.full((len(lines), width), IGNORED)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        end = len(prompt) + len(completion)
        tokens[row, :end] = torch.tensor(prompt + completion)
        targets[row, len(prompt) : end] = torch.tensor(completion)
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum")


def pretrain(model, tokenizer, config: ArithmeticConfig, args: argparse.Namespace) -> None:
    """AdamW on fresh lines every step, until the running mean of the loss falls to `stop_loss`."""
    rng = random.Random(args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01)
    start, running_loss = time.monotonic(), 10.0
    for step in range(1, args.max_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, step / 50)
        lines = [draw_line(rng, config, args.worked_share) for _ in range(args.lines_per_step)]
        lines.sort(key=lambda line: len(line[1]))
        half = len(lines) // 2
        for similar_length in (lines[:half], lines[half:]):
            loss = completion_loss(model, tokenizer, similar_length) / len(lines)
            loss.backward()
            running_loss += 0.05 * loss.item()
        running_loss -= 0.05 * running_loss
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        done = running_loss <= args.stop_loss or step == args.max_steps
        if step % 100 == 0 or done:
            print(f"step {step:5d}  loss {running_loss:.3f} nats a line  {time.monotonic() - start:.0f} s", flush=True)
        if done:
            return


@torch.no_grad()
def sample(model, tokenizer, problems: list[Problem], do_sample: bool) -> list[str]:
    """One completion a problem at temperature 1, or the greedy one. Prompts must have one length."""
    prompts = torch.tensor([tokenizer.encode(problem.text) for problem in problems])
    choice = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if do_sample else {"do_sample": False}
    tokens = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=MAX_NEW_TOKENS,
        pad_token_id=tokenizer.eos_token_id,
        **choice,
    )
    return tokenizer.batch_decode(tokens[:, prompts.shape[1] :], skip_special_tokens=True)


def rewards_of(task: Task, problems: list[Problem], texts: list[str]) -> list[float]:
    """Reward of one completion of each problem."""
    return [task.check(problem, text).reward for problem, text in zip(problems, texts, strict=True)]


def print_held_out(model, tokenizer, task: Task) -> None:
    """Accuracy on the held-out problems: sampled, greedy, and any of 8 samples right."""
    problems = list(task.test)
    rounds = [sample(model, tokenizer, problems, do_sample=True) for _ in range(8)]
    rewards = torch.tensor([rewards_of(task, problems, texts) for texts in rounds])  # [8, P]
    greedy = torch.tensor(rewards_of(task, problems, sample(model, tokenizer, problems, do_sample=False)))
    mixed = (rewards.std(dim=0) > 0).float().mean()
    worked = [[text.startswith(":") for text in texts] for texts in rounds]
    num_tokens = sum(len(text) + 1 for texts in rounds for text in texts) / rewards.numel()
    print(f"held-out problems                  {len(problems)}")
    print(f"accuracy, temperature 1            {rewards.mean():.3f}")
    print(f"accuracy, greedy                   {greedy.mean():.3f}")
    print(f"any of 8 samples right             {rewards.amax(dim=0).mean():.3f}")
    print(f"groups of 8 with unequal rewards   {mixed:.3f}")
    for style, wanted in (("worked", True), ("direct", False)):
        chosen = torch.tensor(worked) == wanted
        print(f"{style}: share {chosen.float().mean():.3f}, accuracy at temperature 1 {rewards[chosen].mean():.3f}")
    print(f"tokens in a completion, with EOS   {num_tokens:.1f}")


def main() -> None:
    """Pretrains, saves, and measures what was saved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and of the text")
    parser.add_argument("--stop-loss", type=float, default=2.45, help="stop at this running mean, in nats a line")
    parser.add_argument("--max-steps", type=int, default=2000, help="optimiser steps, if that loss is never reached")
    parser.add_argument("--lines-per-step", type=int, default=64, help="lines of text in one step")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--worked-share", type=float, default=0.45, help="share of lines that give running totals")
    parser.add_argument("--folder", type=Path, default=MODEL_FOLDER, help="where the model is written")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    config = ArithmeticConfig()
    tokenizer = build_tokenizer()
    model = build_model(tokenizer.eos_token_id)
    pretrain(model, tokenizer, config, args)
    model.to(torch.bfloat16).save_pretrained(args.folder)
    tokenizer.save_pretrained(args.folder)
    model = Qwen3ForCausalLM.from_pretrained(args.folder, dtype=torch.float32)  # the weights as others read them
    print_held_out(model, tokenizer, config.build())


if __name__ == "__main__":
    main()
