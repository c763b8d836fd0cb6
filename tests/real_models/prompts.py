"""Prompts as people send them: questions, orders, code, other languages, turns, a long one; and texts with facts."""

from __future__ import annotations

from typing import Any

_QUESTIONS = """\
What is the capital of France?
How many legs does a spider have?
Who wrote Romeo and Juliet?
What is the boiling point of water in degrees Celsius?
Why do leaves turn yellow in autumn?
What is the largest planet in the solar system?
How do I boil an egg so that the yolk stays soft?
What is the difference between a virus and a bacterium?
When did the Second World War end?
Which gas do plants take in from the air?
What does HTTP stand for?
Is a tomato a fruit or a vegetable?
What is 12 times 12?
How far is the Moon from the Earth?
Can you explain what inflation means?
Give me three names for a black cat.
Write a haiku about the sea.
Summarise this in one sentence: The library will close at noon on Friday, because the heating has to be repaired. \
It opens again on Monday at nine. Books that are due on Friday may be returned on Monday.
Translate "good morning" into Spanish.
Rewrite this politely: Send me the report now.
List the days of the week.
Write a short e-mail that asks for a day off on Monday.
Invent a name for a bakery, and a slogan.
Correct the spelling: I recieved teh package yesturday.
Is this review positive or negative? "The room was dirty and the staff was rude."
Write a Python function that reverses a string.
What does this print? for i in range(3): print(i * 2)
Write an SQL query that counts the rows of the table users.
Explain this regular expression: ^[a-z]+\\d{2}$
How do I undo the last commit in git?
Write a JavaScript function that returns the largest number of an array.
Fix this code: def add(a, b) return a + b
Wie heißt die Hauptstadt von Deutschland?
Quelle est la couleur du ciel ?
¿Cuántos días tiene una semana?
Qual è il fiume più lungo d'Italia?
日本の首都はどこですか。
Какой сегодня день после вторника?
什么是人工智能?
Tell me a joke 🙂 please!
""".splitlines()

_TURNS: list[list[tuple[str, str]]] = [
    [("user", "My name is Ada."), ("assistant", "Hello Ada! How can I help you?"), ("user", "What is my name?")],
    [("system", "Answer with one word."), ("user", "Which animal says meow?")],
    [
        ("user", "Recommend a book about the sea."),
        ("assistant", "You may like Moby-Dick by Herman Melville."),
        ("user", "Who is its main character?"),
        ("assistant", "Its narrator is Ishmael, a sailor."),
        ("user", "And the captain?"),
    ],
    [("system", "You are a pirate. Answer as one."), ("user", "How are you today?")],
    [("user", "2 + 2?"), ("assistant", "4"), ("user", "And 4 + 4?"), ("assistant", "8"), ("user", "And 8 + 8?")],
]

# Prompts without a chat's marks, as a completion API gets them.
PLAIN = [
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "The three primary colours are",
    "Dear Sir or Madam,\n\nI am writing to",
]

_LETTER = """\
The museum was founded in 1893 by a merchant who collected clocks. In his first years he bought about forty of them, \
most in London and Geneva, and showed them to his guests on Sundays. After his death his daughter gave the house and \
the collection to the town, with one wish: every clock that still runs must be wound every day. Two people do this \
today. They begin at seven in the morning in the cellar, where the oldest clocks stand, and reach the attic at nine. \
One clock has no key: it takes its power from changes of the air's pressure, and has run since 1928 without being \
wound. In 2011 a pipe burst above the east wing, and thirty clocks stood in water for a night. A watchmaker from the \
next town repaired them in four years; two could not be saved. """
LONG = f"Read this text, and say what happened in 2011.\n\n{3 * _LETTER}"

CONVERSATIONS: list[list[dict[str, str]]] = [
    *([{"role": "user", "content": question}] for question in (*_QUESTIONS, LONG)),
    *([{"role": role, "content": content} for role, content in turns] for turns in _TURNS),
]


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


_TEXT, _NUMBER = {"type": "string"}, {"type": "integer"}
_PERSON = _object(name=_TEXT, age=_NUMBER)
_CITY = _object(city=_TEXT, country=_TEXT)
_GOODS = _object(product=_TEXT, price=_NUMBER)
_MOOD = _object(sentiment={"enum": ["positive", "negative"]})
_MEETING = _object(day=_TEXT, time=_TEXT)

# What is asked, the caller's schema, and what the text says.
EXTRACTIONS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("Anna is 34 years old.", _PERSON, {"name": "Anna", "age": 34}),
    ("My brother Tom turned 12 last week.", _PERSON, {"name": "Tom", "age": 12}),
    ("Maria Lopez, aged 51, lives in Madrid.", _PERSON, {"name": "Maria Lopez", "age": 51}),
    ("The winner was Kenji, who is 27.", _PERSON, {"name": "Kenji", "age": 27}),
    ("Peter is 8 years old and likes football.", _PERSON, {"name": "Peter", "age": 8}),
    ("Grace Hall is 73 years old.", _PERSON, {"name": "Grace Hall", "age": 73}),
    ("I live in Paris, in France.", _CITY, {"city": "Paris", "country": "France"}),
    ("She was born in Rome, Italy.", _CITY, {"city": "Rome", "country": "Italy"}),
    ("We fly to Tokyo, Japan.", _CITY, {"city": "Tokyo", "country": "Japan"}),
    ("The office is in Berlin, Germany.", _CITY, {"city": "Berlin", "country": "Germany"}),
    ("He moved to Cairo, Egypt.", _CITY, {"city": "Cairo", "country": "Egypt"}),
    ("Product: lamp. Price: 25 euros.", _GOODS, {"product": "lamp", "price": 25}),
    ("The price of the chair is 40 dollars.", _GOODS, {"product": "chair", "price": 40}),
    ("We sell this umbrella for 12 euros.", _GOODS, {"product": "umbrella", "price": 12}),
    ("I love this phone, it is wonderful!", _MOOD, {"sentiment": "positive"}),
    ("The food was cold and terrible.", _MOOD, {"sentiment": "negative"}),
    ("What a great film, the best of the year.", _MOOD, {"sentiment": "positive"}),
    ("The worst hotel I have ever seen.", _MOOD, {"sentiment": "negative"}),
    ("Let us meet on Monday at 10:30.", _MEETING, {"day": "Monday", "time": "10:30"}),
    ("The dentist expects you on Friday at 9:15.", _MEETING, {"day": "Friday", "time": "9:15"}),
]
