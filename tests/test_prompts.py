"""Prompts become token ids: the chat template gets its variables, and its errors name them."""

import numpy as np
import pytest

from lookahead.core import SettingsError
from lookahead.sampling.processors import _bad_words
from lookahead.text.prompts import encode
from toy import VOCABULARY, tokenizer


@pytest.mark.parametrize(("variables", "given"), [(None, ""), ({"effort": "low"}, " and effort")])
def test_the_chat_template_gets_its_variables_and_its_errors_name_them(variables, given):
    made = tokenizer()
    made.chat_template = "{{ messages[0].content }} {{ effort }}"
    messages = [{"role": "user", "content": "x"}]
    text = "x low" if variables else "x "
    assert encode(messages, made, "", VOCABULARY, None, variables) == made(text).input_ids
    made.chat_template = "{{ raise_exception('too hard') }}"
    with pytest.raises(
        SettingsError, match=f"^the model's chat template rejects these messages{given}: too hard$"
    ):
        encode(messages, made, "", VOCABULARY, None, variables)


def test_token_ids_may_be_integers_of_numpy():
    assert encode(list(np.array([3, 4])), None, "", VOCABULARY, None) == [3, 4]
    with pytest.raises(SettingsError, match=r"a prompt must be a string, .*got list"):
        encode([True, False], None, "", VOCABULARY, None)


def test_a_bad_word_must_be_unicode():
    with pytest.raises(SettingsError, match="a bad word must be valid Unicode, got half a surrogate pair"):
        _bad_words(["\ud800"], tokenizer())
