"""A character tokenizer for made models, saved in the files that ``transformers`` loads.

Owns the vocabulary's order: special tokens first, then the alphabet as written in the recipe. Never depends on data.
Invariant: every character of the alphabet is exactly one token, and decoding the tokens of a text gives the text.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from milesbatch.errors import RecipeError

PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
SPECIAL_TOKENS = (PAD, BOS, EOS, UNKNOWN)

CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""A made model has no chat format: contents are joined behind the beginning-of-sequence token."""


def make_tokenizer(alphabet: str, max_length: int) -> Any:
    """A ``PreTrainedTokenizerFast`` with one token for each character; ids 0..3 are pad, bos, eos, unknown.

    Raises:
        RecipeError: a character appears twice in the alphabet.
    """
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    twice = [character for character, count in Counter(alphabet).items() if count > 1]
    if twice:
        raise RecipeError(f"model.alphabet holds {''.join(twice)!r} more than once", mend="write each character once")
    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=UNKNOWN))
    # Isolating every match splits the text into single characters, line ends included.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
    )
