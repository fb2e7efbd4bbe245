import pytest
from transformers import AutoTokenizer

from milesbatch.environments.prompts import Message, Prompt, encode_prompt
from milesbatch.errors import DataError, RecipeError
from milesbatch.models.tokenizer import make_tokenizer
from milesbatch.recipe.models import MadeModel

ALPHABET = "0123456789+-*=() ab\n"


def asked(text: str) -> Prompt:
    return Prompt("p", (Message("user", text),), "")


def test_each_character_is_one_token_and_decoding_gives_the_text_back(tmp_path):
    make_tokenizer(ALPHABET, 64).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    text = " 12 +(3)\n= ab  "
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([1, *ids, 2, 0], skip_special_tokens=True) == text
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert len(tokenizer) == 4 + len(ALPHABET)


def test_the_chat_template_says_the_same_as_encode_prompt():
    tokenizer = make_tokenizer(ALPHABET, 64)
    by_template = tokenizer.apply_chat_template([{"role": "user", "content": "1+2="}], tokenize=False)
    ids = encode_prompt(tokenizer, MadeModel(alphabet=ALPHABET), asked("1+2="))
    assert ids == (1, *tokenizer("1+2=", add_special_tokens=False)["input_ids"])
    assert tuple(tokenizer(by_template, add_special_tokens=False)["input_ids"]) == ids


def test_a_character_without_a_token_is_named():
    with pytest.raises(DataError, match="'xü'"):
        encode_prompt(make_tokenizer(ALPHABET, 64), MadeModel(alphabet=ALPHABET), asked("x+ü"))


def test_a_doubled_character_is_a_recipe_error():
    with pytest.raises(RecipeError, match="'1'"):
        make_tokenizer("0121", 64)
