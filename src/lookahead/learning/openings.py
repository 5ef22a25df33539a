"""Seed prompts for self-generated text. They were written for this purpose, not for a data set.

``opening(i)`` is the i-th request to a chat model: a frame with a topic in one of several languages, a sum, or a task
about code. ``beginning(i)`` is the start of a request that the model completes by itself; models without a chat
template continue it as plain text. Both are pure functions of i. Frames and topics give 2,119 different openings; the
numbers of the sums give several hundred thousand more.
"""

from __future__ import annotations

import random

#: Frames of requests in English; {} is a topic.
FRAMES = (
    "Tell me about {}.",
    "Explain {} to a child.",
    "What should a beginner know about {}?",
    "Write a short story about {}.",
    "Write a short essay on {}.",
    "Give me five tips about {}.",
    "List ten facts about {}.",
    "Why do people care about {}?",
    "Compare two opinions about {}.",
    "Write an email to a friend about {}.",
    "Write a formal letter to a company about {}.",
    "Describe {} in three sentences.",
    "What are the advantages and disadvantages of {}?",
    "Write a dialogue between two neighbours about {}.",
    "Plan a one-day workshop on {}.",
    "What are common mistakes with {}, and how can I avoid them?",
    "Write a blog post introduction about {}.",
    "How did {} change over the last hundred years?",
    "Summarize what is known about {}.",
    "Write a poem about {}.",
    "Write a product description related to {}.",
    "Make a checklist for {}.",
    "Give step-by-step instructions that have to do with {}.",
    "Imagine you are an expert on {}. Answer a worried customer.",
    "Write a quiz with three questions about {}, and the answers.",
    "Draft a speech of one minute about {}.",
)
TOPICS = (
    "keeping bees",
    "old railway stations",
    "learning the piano",
    "baking bread at home",
    "the tides of the sea",
    "saving money for a house",
    "walking in the mountains",
    "volcanoes",
    "sleep",
    "the history of paper",
    "repairing a bicycle",
    "growing tomatoes",
    "solar panels",
    "moving to a new city",
    "a lost key",
    "lighthouses",
    "coral reefs",
    "job interviews",
    "the planet Mars",
    "a village in winter",
    "board games",
    "electric cars",
    "vaccines",
    "medieval castles",
    "public libraries",
    "cooking for a large family",
    "rainforests",
    "time zones",
    "the first day at school",
    "inflation",
    "photography at night",
    "earthquakes",
    "running a small shop",
    "whales",
    "a broken washing machine",
    "the Roman Empire",
    "drinking water",
    "remote work",
    "violins",
    "maps",
    "a long train journey",
    "friendship",
    "noise in cities",
    "black holes",
    "healthy breakfasts",
    "the stock market",
    "desert animals",
    "folk music",
    "first aid",
    "writing a diary",
    "chess openings",
    "clouds and weather",
    "recycling glass",
    "ancient Egypt",
    "learning a language",
    "a dog that is afraid of thunder",
    "bridges",
    "tea",
    "climate and farming",
    "how computers store pictures",
)
#: Sums; {a}, {b} and {c} are random numbers.
SUMS = (
    "A box holds {a} apples. I buy {b} boxes and eat {c} apples. How many apples are left?",
    "A train leaves with {a} passengers; {b} get on and {c} get off. How many are on the train?",
    "I have {a} coins, my sister has {b} times as many. How many do we have together?",
    "What is {a} plus {b}, and then minus {c}? Show your steps.",
    "A shirt costs {a} euros and is reduced by {c} percent. What does it cost now?",
    "A tank of {a} litres loses {c} litres an hour. When is it empty?",
    "{b} workers need {a} hours for a wall. How long do {c} workers need?",
    "What is the average of {a}, {b} and {c}?",
)
#: Requests about code; {} is a task.
CODE_FRAMES = (
    "Write a Python function to {}.",
    "Write a Python function that can {}. Include type hints and a docstring.",
    "In JavaScript, how do I {}?",
    "Write a small C program to {}.",
    "Show me Java code to {}.",
    "Write Python code to {} and test it with assertions.",
    "Explain step by step how a program can {}.",
    "Complete this code:\n\n```python\n# a function to {}\ndef ",
    "Write a Python class that helps to {}.",
    "Write a command-line script in Python to {}.",
    "What is the fastest way to {} in Python? Give code.",
    "Write unit tests for a function that should {}.",
)
CODE_TASKS = (
    "reverse the words of a line",
    "merge two sorted lists",
    "count how often each letter occurs",
    "read a CSV file and print the mean of a column",
    "find the longest word in a text",
    "convert a date from one format to another",
    "remove duplicates and keep the order",
    "check whether brackets are balanced",
    "compute the greatest common divisor",
    "rename all files in a folder",
    "parse a configuration file",
    "draw a triangle of stars",
    "sort dictionaries by a field",
    "find the second largest number",
    "split a list into pieces of equal size",
    "store items in a queue with a limit",
    "download a web page and list its links",
    "calculate compound interest",
    "rotate a matrix by ninety degrees",
    "generate random passwords",
    "validate an email address",
    "search a sorted array",
    "print a calendar of one month",
    "keep the score of a tennis match",
    "flatten nested lists",
    "convert numbers to Roman numerals",
    "simulate a vending machine",
    "write log messages with a time stamp",
    "multiply two polynomials",
    "find a path through a grid",
    "cache the results of slow calls",
    "translate text into Morse code",
)
#: Frames and topics in other languages.
OTHERS = (
    (
        (
            "Erzähle mir etwas über {}.",
            "Schreibe eine kurze Geschichte über {}.",
            "Was muss man über {} wissen?",
            "Nenne fünf Tipps zum Thema {}.",
        ),
        ("Brot", "das Meer", "alte Uhren", "Fahrräder", "den Winter", "Musik", "die Eisenbahn", "Gärten"),
    ),
    (
        (
            "Parle-moi de {}.",
            "Écris une courte histoire sur {}.",
            "Que faut-il savoir sur {} ?",
            "Donne cinq conseils sur {}.",
        ),
        ("la mer", "le pain", "les jardins", "la musique", "les trains", "le sommeil", "les marchés"),
    ),
    (
        (
            "Háblame de {}.",
            "Escribe un cuento corto sobre {}.",
            "¿Qué hay que saber sobre {}?",
            "Da cinco consejos sobre {}.",
        ),
        ("el mar", "el pan", "los jardines", "la música", "los trenes", "el sueño", "los mercados"),
    ),
    (
        ("Parlami di {}.", "Scrivi una breve storia su {}.", "Che cosa bisogna sapere su {}?"),
        ("il mare", "il pane", "la musica", "i treni", "il mercato"),
    ),
    (
        ("Fale sobre {}.", "Escreva uma pequena história sobre {}.", "O que é preciso saber sobre {}?"),
        ("o mar", "o pão", "a música", "os comboios", "o mercado"),
    ),
    (
        (
            "请介绍一下{}。",
            "写一个关于{}的小故事。",
            "关于{}，初学者应该知道什么？",
            "给出五条关于{}的建议。",
        ),
        ("大海", "面包", "花园", "音乐", "火车", "睡眠", "市场", "冬天"),
    ),
    (
        ("{}について教えてください。", "{}についての短い物語を書いてください。"),
        ("海", "パン", "庭", "音楽", "電車"),
    ),
    (
        ("Расскажи о {}.", "Напиши короткий рассказ о {}.", "Что нужно знать о {}?"),
        ("море", "хлебе", "музыке", "поездах", "зиме"),
    ),
)
#: Starts of requests that the model completes by itself.
STARTS = (
    "",
    "Write",
    "How",
    "What",
    "Explain",
    "Why",
    "Can you",
    "I",
    "Give",
    "Please",
    "Write a Python",
    "The",
    "Describe",
    "Is it",
    "My",
    "List",
    "Create",
    "Translate",
    "Compare",
    "Help me",
    "Who",
    "When",
    "Fix",
    "Summarize",
)
#: Of ten openings, how many on average are about code, are sums and are in another language; the others are English.
SHARES = (3, 1, 1)


def opening(number: int) -> str:
    """The request with this number. Its kind is drawn, because the number also decides which texts have openings."""
    draw = random.Random(f"opening {number}")
    kind = draw.randrange(10)
    if kind < SHARES[0]:
        return draw.choice(CODE_FRAMES).format(draw.choice(CODE_TASKS))
    if kind < sum(SHARES[:2]):
        a, b, c = draw.randint(20, 400), draw.randint(2, 19), draw.randint(2, 19)
        return draw.choice(SUMS).format(a=a, b=b, c=c)
    if kind < sum(SHARES):
        frames, topics = draw.choice(OTHERS)
        return draw.choice(frames).format(draw.choice(topics))
    return draw.choice(FRAMES).format(draw.choice(TOPICS))


def beginning(number: int) -> str:
    """The start of a request; it may be empty."""
    return random.Random(f"beginning {number}").choice(STARTS)
