"""Scores of a reward model: a Hugging Face model for sequence classification with one label."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from octavo.tasks.rewards import ModelReward
from octavo.trainer.errors import reason


class RewardModel:
    """A frozen model that gives a number to a conversation, higher for better ones.

    Args:
        config: which, and how much at once.
        device: where it runs.

    Raises:
        ValueError: it cannot be read, or has several labels.
    """

    def __init__(self, config: ModelReward, device: str) -> None:
        self.config, self.device = config, device
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(config.path)
            model = AutoModelForSequenceClassification.from_pretrained(config.path)
        except Exception as error:  # its files may hold anything, and transformers raises as much
            why = reason(error).removesuffix(".")
            raise ValueError(f"reward.model.path={config.path!r} cannot be read: {why}. Fetch it again") from error
        if model.config.num_labels != 1:
            raise ValueError(
                f"reward.model.path={config.path!r} has {model.config.num_labels} labels; a reward model has one. "
                f"Give another"
            )
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.tokenizer.truncation_side = "left"
        model.config.pad_token_id = self.tokenizer.pad_token_id
        self.model = model.to(device).eval().requires_grad_(False)

    @torch.no_grad()
    def scores(self, conversations: Sequence[list[dict[str, str]]]) -> list[float]:
        """One finite number a conversation, whose last message is the completion.

        Raises:
            ValueError: one is not finite.
        """
        texts, size, found = [self._text(messages) for messages in conversations], self.config.batch_size, []
        templated = bool(self.tokenizer.chat_template)  # which writes its own special tokens
        for start in range(0, len(texts), size):
            batch = self.tokenizer(
                texts[start : start + size],
                add_special_tokens=not templated,
                padding=True,
                truncation=True,
                max_length=self.config.max_tokens,
                return_tensors="pt",
            ).to(self.device)
            logits = self.model(**batch).logits
            found += logits[:, 0].float().tolist()
        if not all(map(torch.isfinite, torch.tensor(found))):
            raise ValueError(f"reward.model.path={self.config.path!r} gives scores that are not finite. Give another")
        return found

    def _text(self, messages: list[dict[str, str]]) -> str:
        if self.tokenizer.chat_template:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False))
        *before, completion = [message["content"] for message in messages]
        return "\n\n".join(before) + completion
