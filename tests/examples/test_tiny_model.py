from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from octavo.tasks.arithmetic import ArithmeticConfig
from octavo.tasks.prompts import encode_prompt, stop_token_ids

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "tiny" / "model"


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


def test_the_files_are_small_and_the_widths_fit_every_recipe(model):
    assert (FOLDER / "model.safetensors").stat().st_size <= 8_000_000
    assert 1_000_000 <= sum(parameter.numel() for parameter in model.parameters()) <= 4_000_000
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            assert all(width % 128 == 0 for width in parameter.shape), f"{name} {tuple(parameter.shape)}"
    assert model.config.tie_word_embeddings and model.config.max_position_embeddings == 256


def test_the_tokenizer_has_one_token_a_character(tokenizer, model):
    text = "(7+8-5+9+2)%10:5,0,9,1 Hi\n"
    tokens = encode_prompt(tokenizer, text)
    assert len(tokens) == len(text) and tokenizer.decode(tokens) == text
    assert tokenizer.chat_template is None and tokenizer.pad_token is None
    assert stop_token_ids(tokenizer, model.generation_config, model.config) == (tokenizer.eos_token_id,)


def test_held_out_accuracy_leaves_room_to_learn(model, tokenizer):
    task = ArithmeticConfig().build()
    problems = list(task.test[:256])
    prompts = torch.tensor([encode_prompt(tokenizer, problem.text) for problem in problems])
    torch.manual_seed(0)
    tokens = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=16,
        pad_token_id=tokenizer.eos_token_id,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
    )
    texts = tokenizer.batch_decode(tokens[:, prompts.shape[1] :], skip_special_tokens=True)
    accuracy = sum(task.check(*pair).reward for pair in zip(problems, texts, strict=True)) / len(problems)
    worked = sum(text.startswith(":") for text in texts) / len(texts)
    assert 0.25 <= accuracy <= 0.55, f"accuracy at temperature 1 is {accuracy}, e.g. {texts[:5]}"
    assert 0.2 <= worked <= 0.8, f"both styles should be frequent; worked is {worked}, e.g. {texts[:5]}"
