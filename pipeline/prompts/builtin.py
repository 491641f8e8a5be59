"""`builtin:instructions`: everyday requests, written for this project (Apache-2.0).

Data packages lean towards puzzles and small talk; a head trained on those alone is weak where
people use a model most: explaining, writing, planning, coding. A template is combined with every
subject that fits it, so the same source can give a dozen prompts or several thousand.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.errors import DataError
from pipeline.records import Prompt

LICENSE = "Apache-2.0"
NAME = "instructions"

_SUBJECTS = {
    "idea": (
        "compound interest|natural selection|the water cycle|supply and demand|plate tectonics|"
        "the immune system|recycling|photosynthesis in desert plants|version control|"
        "the greenhouse effect|public libraries|the printing press|vaccination|renewable energy|"
        "the scientific method|meditation|budgeting|machine translation|beekeeping|crop rotation|"
        "electric motors|the stock market|open source software|sleep|solar eclipses|fermentation|"
        "urban planning|volunteering|the metric system|music theory|antibiotics|the Silk Road|"
        "gravity|batteries|migration of birds|city parks|encryption|DNA replication|"
        "the periodic table|lighthouses|tides|road safety|composting|the Renaissance|inflation|"
        "satellites|glaciers|bridges|friction|radio waves|coral reefs|the French Revolution|"
        "democracy|probability|black holes|earthquakes|nutrition|cloud computing|ancient Rome"
    ),
    "scene": (
        "a rainy market|an old clockmaker|a lost letter|the first day at a new school|"
        "a night train|two rival bakers|a lighthouse keeper|a robot gardener|"
        "a mountain village in winter|a forgotten song|a boat without oars|a talking map|"
        "an unexpected guest|a garden on a roof|a library at midnight|a stolen bicycle|"
        "the last summer of childhood|a postman and a dog|an island that moves|"
        "a chess game in a park|a painter who cannot see red"
    ),
    "event": (
        "a team meeting that was moved|a delayed delivery|a farewell party|a new coffee machine|"
        "a workshop on writing|a neighbourhood clean-up|a broken heater|a job interview|"
        "a product launch|a school trip|a charity run|a missed deadline|a customer complaint|"
        "a promotion|a book club"
    ),
    "role": (
        "travel guide|history teacher|gardener|nutrition coach|software engineer|astronaut|chef|"
        "librarian|museum curator|job coach|detective|weather presenter|physics tutor|carpenter|"
        "sports commentator|doctor explaining things to a child"
    ),
    "task": (
        "reverses the words of a sentence|counts the vowels in a string|"
        "finds the largest number in a list|checks whether a word is a palindrome|"
        "merges two sorted lists|converts Celsius to Fahrenheit|removes duplicates from a list|"
        "computes the factorial of a number|reads a CSV file and sums a column|"
        "finds all prime numbers below n|groups words by their first letter|"
        "validates an e-mail address|computes the median of a list|flattens a nested list|"
        "counts how often each word occurs in a text|rotates a matrix by ninety degrees|"
        "finds the longest common prefix|parses a date"
    ),
    "pair": (
        "tea and coffee|trains and planes|Python and Java|books and films|cats and dogs|"
        "city life and country life|SQL and spreadsheets|solar and wind power|"
        "online and classroom learning|running and swimming|mammals and reptiles|"
        "novels and short stories|cash and cards|democracy and monarchy|stars and planets"
    ),
}

#: (category, kind of subject, template). A second turn, where there is one, follows a bar.
_TEMPLATES: tuple[tuple[str, str, str], ...] = (
    ("explain", "idea", "Explain {} to a ten-year-old."),
    (
        "explain",
        "idea",
        "What is {} and why does it matter?|Can you give an example from daily life?",
    ),
    ("explain", "idea", "Give me a short overview of {}, with three key points."),
    ("explain", "idea", "What are common misconceptions about {}?"),
    ("explain", "idea", "How has {} changed the way people live? Answer in two paragraphs."),
    (
        "explain",
        "idea",
        "I have to give a talk on {} tomorrow. Make me an outline.|Now write the opening sentence.",
    ),
    ("writing", "scene", "Write a short story about {}."),
    ("writing", "scene", "Write a poem about {}.|Rewrite it so that it rhymes."),
    ("writing", "scene", "Describe {} so that the reader can see and hear it."),
    ("writing", "idea", "Write a blog post about {} for beginners."),
    ("writing", "event", "Write a polite e-mail about {}.|Make it shorter."),
    ("writing", "event", "Draft a friendly announcement of {}."),
    ("roleplay", "role", "You are a {}. Introduce yourself and tell me about your day."),
    ("roleplay", "role", "Pretend to be a {} and give me three pieces of advice."),
    ("code", "task", "Write a Python function that {}.|Explain how it works."),
    ("code", "task", "Write a JavaScript function that {}."),
    ("code", "task", "How would you test a function that {}?"),
    ("compare", "pair", "Compare {}."),
    ("compare", "pair", "What are the advantages and disadvantages of {}?"),
    ("plan", "idea", "Make a plan for learning about {} in one week."),
    ("plan", "event", "List five things to think of when dealing with {}."),
    ("reason", "pair", "Somebody asks you to choose between {}. How would you decide?"),
    ("reason", "idea", "Suppose {} did not exist. What would be different?"),
)


def read_builtin(name: str) -> Iterator[Prompt]:
    """All prompts of the built-in source `name`; DataError for any other name."""
    if name != NAME:
        where, fix = f"builtin:{name}", f"use builtin:{NAME}"
        raise DataError("no such built-in source", where=where, fix=fix)
    for number, (category, kind, template) in enumerate(_TEMPLATES):
        for index, subject in enumerate(_SUBJECTS[kind].split("|")):
            turns = tuple(template.replace("{}", subject).split("|"))
            yield Prompt(
                sample_id=f"{number}-{index}",
                source=f"builtin:{NAME}",
                license=LICENSE,
                category=category,
                turns=turns,
            )
