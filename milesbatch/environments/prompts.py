"""Prompts: what a group is asked, and the seeded stream that names every group before it is generated.

Owns the :class:`Prompt` value, the :class:`PromptStream` protocol, the choice of stream for a recipe, and the encoding of a
prompt into tokens. Never reads a clock or the number of processes. Invariant: ``stream.prompt(group_id)`` is a pure
function of (recipe seed, data section, group id), so that a group means the same in every incarnation and every process.
The page behind it is ``docs/protocol.md`` (vocabulary: prompt group).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import xxhash

from milesbatch.errors import DataError, ModelError
from milesbatch.recipe.models import ArithmeticData, Data, MadeModel, Model, PretrainedModel, ReasoningGymData, Recipe

Purpose = Literal["train", "warm_start", "evaluation"]
"""Streams of different purpose are drawn from unrelated seeds."""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message. ``role`` is ``system``, ``user`` or ``assistant``."""

    role: str
    content: str

    def as_dict(self) -> dict[str, str]:
        """The form that chat templates take."""
        return {"role": self.role, "content": self.content}


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one group is asked. ``answer`` is the reference for the reward; ``env`` (JSON values) is recorded with it."""

    prompt_id: str
    messages: tuple[Message, ...]
    answer: str
    env: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The contents of all messages joined; what a model without a chat template sees."""
        return "".join(message.content for message in self.messages)


class PromptStream(Protocol):
    """An endless stream of prompts, addressed by group id."""

    def prompt(self, group_id: int) -> Prompt:
        """The prompt of a group: same seed and id, same prompt, in every process."""

    @property
    def num_prompts(self) -> int | None:
        """How many different prompts there are, which groups 0 and on ask in turn; None when there is no end."""

    def fingerprint(self) -> str:
        """Digest of everything that the prompts depend on besides the recipe's seed."""


def stream_seed(seed: int, *path: object) -> int:
    """A 63-bit seed for one use of the recipe's ``seed``; different paths give unrelated seeds."""
    return xxhash.xxh3_64_intdigest("/".join(map(str, (seed, *path))).encode()) >> 1


def stream_random(seed: int, *path: object) -> random.Random:
    """A generator of its own for one use of the recipe's ``seed``."""
    return random.Random(stream_seed(seed, *path))


def open_prompts(recipe: Recipe, purpose: Purpose = "train") -> PromptStream:
    """The stream that the recipe's ``data`` section describes; opening checks the data.

    Raises:
        DataError: a prompt file is missing, empty or has broken rows; names file and line.
        RecipeError: the reasoning-gym task or its options do not exist.
    """
    return open_stream(recipe.data, recipe.seed, purpose)


def open_stream(data: Data, seed: int, purpose: Purpose) -> PromptStream:
    """The stream that a section such as ``data`` describes; see :func:`open_prompts`."""
    # Imported here: a stream of one kind must not need the packages of the others.
    if isinstance(data, ArithmeticData):
        from milesbatch.environments.arithmetic import ArithmeticStream

        return ArithmeticStream(data, seed, purpose)
    if isinstance(data, ReasoningGymData):
        from milesbatch.environments.gym import GymStream

        return GymStream(data, seed, purpose)
    from milesbatch.environments.files import FileStream

    return FileStream(data, seed, purpose)


def encode_prompt(tokenizer: Any, model: Model, prompt: Prompt) -> tuple[int, ...]:
    """Token ids that a response continues.

    A made model gets the beginning-of-sequence token and the text; a pretrained model gets its own chat template with the
    generation prompt, or the plain text when the recipe says ``chat_template: false``.

    Raises:
        DataError: the prompt holds a character that a made model has no token for.
        ModelError: the recipe asks for a chat template and the tokenizer has none.
    """
    if isinstance(model, MadeModel):
        return (int(tokenizer.bos_token_id), *encode_characters(tokenizer, prompt.text, prompt.prompt_id))
    return _encode_pretrained(tokenizer, model, prompt)


def encode_characters(tokenizer: Any, text: str, prompt_id: str) -> tuple[int, ...]:
    """Token ids of plain text for a made model, without special tokens.

    Raises:
        DataError: a character is not in the alphabet.
    """
    ids = tuple(int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"])
    if tokenizer.unk_token_id in ids:
        known = tokenizer.get_vocab()
        strange = "".join(sorted({character for character in text if character not in known}))
        raise DataError(
            f"prompt {prompt_id} holds characters that the made model has no token for: {strange!r}",
            mend="add them to model.alphabet, or use data without them",
        )
    return ids


def _encode_pretrained(tokenizer: Any, model: PretrainedModel, prompt: Prompt) -> tuple[int, ...]:
    if not model.chat_template:
        text = (model.system_prompt or "") + prompt.text
        return tuple(int(token) for token in tokenizer(text)["input_ids"])
    if not tokenizer.chat_template:
        raise ModelError(
            f"the tokenizer of {model.path} has no chat template",
            mend="set model.chat_template: false, or add chat_template.jinja to the model directory",
        )
    messages = [message.as_dict() for message in prompt.messages]
    if model.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": model.system_prompt})
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    # The template writes its own special tokens.
    return tuple(int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"])
