"""Prompts become token ids: the chat template gets its variables, and its errors name them."""

import pytest

from lookahead.core import SettingsError
from lookahead.engine.prompts import encode
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
