"""Which requests of the corpus are about a task of a data set (``benchmarks.corpus.overlap``)."""

import pytest

from benchmarks.corpus.overlap import found_in, task_of, words_of


def test_words_are_compared_without_endings_and_common_words():
    assert words_of("Write a Python function to list the vowels of a given string.") == {"vowel"}
    assert words_of("reversing snake_case and camelCase") == {"revers", "snake", "case", "camel"}


@pytest.mark.parametrize(
    ("prompt", "task"),
    [
        ("Add two tuples. Answer with Python code only.\n\nassert f()", "Add two tuples."),
        ('Complete.\n\ndef f(a):\n    """ Add two.\n    >>> f(1)\n    3\n    """\n', " Add two.\n    "),
    ],
)
def test_the_task_of_a_prompt_has_neither_tests_nor_examples(prompt, task):
    assert task_of(prompt) == task


def test_a_request_about_a_task_is_found_and_others_are_not():
    tasks = ["Write a function to convert snake case string to camel case string.", "Sort a list."]
    about = "Write a Python function that can convert snake case into camel case. Use recursion."
    others = ["Write a Python function to convert binary to decimal.", "Sort these words: snake, camel."]
    assert found_in([about, *others], tasks) == {about: {0}}
