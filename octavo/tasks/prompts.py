"""From a problem's text to prompt tokens, and the tokens that end a completion."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ChatTemplate = Literal["auto", "always", "never"]


def encode_prompt(
    tokenizer: "PreTrainedTokenizerBase",
    text: str,
    system_prompt: str | None = None,
    chat_template: ChatTemplate = "auto",
) -> list[int]:
    """As `encode_messages`, of one user's message and perhaps a system message."""
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    return encode_messages(tokenizer, [*system, {"role": "user", "content": text}], chat_template)


def encode_messages(
    tokenizer: "PreTrainedTokenizerBase",
    messages: list[dict[str, str]],
    chat_template: ChatTemplate = "auto",
    enable_thinking: bool | None = None,
) -> list[int]:
    """Tokens of one prompt, up to the point where the completion begins.

    Args:
        tokenizer: a transformers tokenizer; it needs no pad token, since nothing is ever padded.
        messages: a system message or none, turns of user and assistant as examples, and the user's message that the
            completion answers. In plain text an answer stands on the line after its message, and a blank line
            separates the rest.
        chat_template: "auto" uses the tokenizer's template if it has one, "always" insists on it, "never" gives plain
            text.
        enable_thinking: the switch of templates such as Qwen3's; None leaves the template's default.

    Returns:
        At least one token, beginning with at most one BOS.
    """
    if chat_template not in ("auto", "always", "never"):
        raise ValueError(f"chat_template is 'auto', 'always' or 'never'; got {chat_template!r}")
    has_template = bool(tokenizer.chat_template)
    if chat_template == "always" and not has_template:
        raise ValueError(
            f"chat_template='always' wants a tokenizer with a chat template; {tokenizer.name_or_path!r} has none. "
            f"Use an instruction-tuned model, or chat_template='auto' or 'never' for a base model."
        )
    chat = has_template and chat_template != "never"
    if enable_thinking is not None and not (chat and "enable_thinking" in str(tokenizer.chat_template)):
        raise ValueError(
            f"enable_thinking={enable_thinking} wants a chat template with that switch, such as Qwen3's; "
            f"{tokenizer.name_or_path!r} {'has a template without it' if chat else 'is prompted without a template'}. "
            f"Set it to null"
        )
    if chat:
        switch: dict[str, Any] = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        try:
            rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **switch)
        except Exception as error:  # a program of others, which may refuse a system message
            raise ValueError(
                f"the chat template of {tokenizer.name_or_path!r} cannot be used: {' '.join(str(error).split())}. "
                f"Correct it, leave out the system prompt, or use chat_template='never'"
            ) from error
        tokens = tokenizer.encode(rendered, add_special_tokens=False)  # the template writes its own BOS
    else:
        tokens = tokenizer.encode(_plain_text(messages))
    if len(tokens) > 1 and tokens[0] == tokens[1] == tokenizer.bos_token_id:
        tokens = tokens[1:]  # the text began with BOS, and the tokenizer added its own
    if not tokens:
        text = messages[-1]["content"]
        raise ValueError(f"a prompt wants at least one token; the text {text!r} gave none. Drop the empty problem.")
    return tokens


def _plain_text(messages: Sequence[dict[str, str]]) -> str:
    text = ""
    for message in messages:
        before = "" if not text else "\n" if message["role"] == "assistant" else "\n\n"
        text += before + message["content"]
    return text


def stop_token_ids(
    tokenizer: "PreTrainedTokenizerBase", generation_config: Any = None, model_config: Any = None
) -> tuple[int, ...]:
    """Every token that ends a completion, ascending: the EOS ids of all three sources, each an int or a list.

    Chat models often list their end-of-turn token only in the generation config, base models only in the
    tokenizer; stopping at any of them is what serving engines do.

    Raises:
        ValueError: none of them names one, or something is named that is no token.
    """
    found: set[int] = set()
    for source in (tokenizer, generation_config, model_config):
        eos = getattr(source, "eos_token_id", None)
        for token in eos if isinstance(eos, list | tuple) else [] if eos is None else [eos]:
            if type(token) is not int or token < 0:
                raise ValueError(
                    f"eos_token_id is a token id or a list of them; the model's {type(source).__name__} has {eos!r}. "
                    f"Correct it in generation_config.json or config.json."
                )
            found.add(token)
    if not found:
        raise ValueError(
            "a model wants at least one EOS token; neither its tokenizer, nor generation_config.json, nor "
            "config.json names one, so no completion could end. Set eos_token_id in generation_config.json."
        )
    return tuple(sorted(found))


class HasPrompt(Protocol):
    """Anything that carries its prompt as token ids."""

    @property
    def prompt(self) -> Sequence[int]:
        """The tokens before the completion."""


HasPromptT = TypeVar("HasPromptT", bound=HasPrompt)


def keep_within_limit(encoded: Sequence[HasPromptT], max_prompt_tokens: int) -> tuple[list[HasPromptT], int]:
    """Leaves out prompts over the limit; none is ever cut, which would change the problem.

    Args:
        encoded: problems with their prompts, in any order.
        max_prompt_tokens: the longest prompt that stays, in tokens.

    Returns:
        Those that stay, in their order, at least one; and how many were left out.
    """
    kept = [item for item in encoded if len(item.prompt) <= max_prompt_tokens]
    if not kept:
        shortest = min((len(item.prompt) for item in encoded), default=0)
        raise ValueError(
            f"max_prompt_tokens={max_prompt_tokens} wants at least one prompt that short; all {len(encoded)} are "
            f"longer, the shortest has {shortest} tokens. Raise max_prompt_tokens, or use shorter problems."
        )
    return kept, len(encoded) - len(kept)
