from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from octavo.tasks.prompts import encode_messages, encode_prompt, keep_within_limit, stop_token_ids

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def build_tokenizer(bos=False, chat_template=None, eos="<eos>"):
    """Words split at spaces and brackets; with `bos`, the tokenizer puts <bos> first, as Llama's does."""
    words = ["<unk>", "<bos>", "<eos>", "<", ">", "system", "user", "assistant", "add", "one", "two", "brief"]
    tokenizer = Tokenizer(models.WordLevel({word: token for token, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<bos>" if bos else None,
        eos_token=eos,
        chat_template=chat_template,
    )


def words(tokenizer, tokens):
    return " ".join(tokenizer.convert_ids_to_tokens(tokens))


def test_auto_without_template_is_plain_text():
    tokenizer = build_tokenizer()
    assert tokenizer.pad_token is None
    assert words(tokenizer, encode_prompt(tokenizer, "add one two")) == "add one two"
    assert words(tokenizer, encode_prompt(tokenizer, "add one", system_prompt="brief")) == "brief add one"


def test_auto_with_template_ends_where_the_assistant_begins():
    tokenizer = build_tokenizer(chat_template=TEMPLATE)
    assert words(tokenizer, encode_prompt(tokenizer, "add one")) == "< user > add one < assistant >"
    assert words(tokenizer, encode_prompt(tokenizer, "one", "brief")) == "< system > brief < user > one < assistant >"
    assert encode_prompt(tokenizer, "one", chat_template="always") == encode_prompt(tokenizer, "one")


def test_never_ignores_the_template():
    tokenizer = build_tokenizer(chat_template=TEMPLATE)
    assert words(tokenizer, encode_prompt(tokenizer, "add one", chat_template="never")) == "add one"


def test_bos_is_never_doubled():
    with_template = build_tokenizer(bos=True, chat_template=TEMPLATE)
    assert words(with_template, encode_prompt(with_template, "one")) == "<bos> < user > one < assistant >"
    plain = build_tokenizer(bos=True)
    assert words(plain, encode_prompt(plain, "one")) == "<bos> one"
    assert words(plain, encode_prompt(plain, "<bos> one")) == "<bos> one"


def test_always_without_template_is_an_error():
    with pytest.raises(ValueError, match="chat_template='always' wants a tokenizer with a chat template"):
        encode_prompt(build_tokenizer(), "one", chat_template="always")


def test_unknown_option_and_empty_prompt_are_errors():
    with pytest.raises(ValueError, match="'auto', 'always' or 'never'; got 'sometimes'"):
        encode_prompt(build_tokenizer(), "one", chat_template="sometimes")
    with pytest.raises(ValueError, match="at least one token"):
        encode_prompt(build_tokenizer(), "")


TURNS = [
    {"role": "system", "content": "brief"},
    {"role": "user", "content": "add one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "add two"},
]


def test_examples_are_turns_of_a_chat_or_plain_text():
    chat = build_tokenizer(chat_template=TEMPLATE)
    wanted = "< system > brief < user > add one < assistant > two < user > add two < assistant >"
    assert words(chat, encode_messages(chat, TURNS)) == wanted
    plain = build_tokenizer()
    plain.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    plain.backend_tokenizer.model = models.WordLevel(
        {"<unk>": 0, "brief\n\nadd": 1, " ": 2, "one\ntwo\n\nadd": 3, "two": 4}, "<unk>"
    )
    assert encode_messages(plain, TURNS) == [1, 2, 3, 2, 4]


def test_the_thinking_switch_reaches_the_template_or_is_refused():
    template = TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}brief{% endif %}"
    tokenizer = build_tokenizer(chat_template=template)
    turn = [{"role": "user", "content": "one"}]
    assert words(tokenizer, encode_messages(tokenizer, turn)) == "< user > one < assistant >"
    assert words(tokenizer, encode_messages(tokenizer, turn, enable_thinking=True)) == "< user > one < assistant >"
    assert (
        words(tokenizer, encode_messages(tokenizer, turn, enable_thinking=False)) == "< user > one < assistant > brief"
    )
    for other, template in (
        (build_tokenizer(chat_template=TEMPLATE), "auto"),
        (build_tokenizer(), "auto"),
        (tokenizer, "never"),
    ):
        with pytest.raises(ValueError, match="enable_thinking=False wants a chat template with that switch"):
            encode_messages(other, turn, template, enable_thinking=False)


def test_stop_tokens_come_from_all_three_sources():
    tokenizer = build_tokenizer()  # <eos> is 2
    configs = SimpleNamespace(eos_token_id=[9, 2]), SimpleNamespace(eos_token_id=7)
    assert stop_token_ids(tokenizer, *configs) == (2, 7, 9)
    assert stop_token_ids(tokenizer) == (2,)
    assert stop_token_ids(tokenizer, None, SimpleNamespace(eos_token_id=None)) == (2,)
    assert stop_token_ids(build_tokenizer(eos=None), SimpleNamespace(eos_token_id=0)) == (0,)


def test_no_stop_token_is_an_error():
    with pytest.raises(ValueError, match="at least one EOS token"):
        stop_token_ids(build_tokenizer(eos=None), SimpleNamespace(eos_token_id=None), None)


def test_keep_within_limit_keeps_the_order_and_counts_the_rest():
    encoded = [SimpleNamespace(prompt=[0] * length) for length in (3, 5, 4, 9)]
    assert keep_within_limit(encoded, 4) == ([encoded[0], encoded[2]], 2)
    assert keep_within_limit(encoded, 9) == (encoded, 0)


def test_all_prompts_too_long_is_an_error_that_names_limit_and_shortest():
    encoded = [SimpleNamespace(prompt=[0] * length) for length in (7, 5)]
    with pytest.raises(ValueError, match=r"max_prompt_tokens=4 .* the shortest has 5 tokens"):
        keep_within_limit(encoded, 4)
