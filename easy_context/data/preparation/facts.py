"""Key-value facts as text: who or what, which number, how it is told and how it is asked for."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class FactTemplate:
    """One way to tell a fact and to ask for it.

    Attributes:
        statement: with {name} and {value}, perhaps {thing}.
        question: may use {name} and {thing}.
        answer: with {value} once; what stands before it is given, the value and what follows is learned.
    """

    statement: str
    question: str
    answer: str

    def __post_init__(self) -> None:
        if "{name}" not in self.statement or "{value}" not in self.statement:
            raise ValueError(f"the statement {self.statement!r} must hold {{name}} and {{value}}")
        if self.answer.count("{value}") != 1:
            raise ValueError(f"the answer {self.answer!r} must hold {{value}} exactly once")


@dataclass(frozen=True)
class Fact:
    """One fact as text.

    Attributes:
        statement: as it goes into the text, with the white space around it.
        question: everything before the answer, the given part of the answer included.
        answer: what is learned.
        after: white space that leads back to the text.
    """

    statement: str
    question: str
    answer: str
    after: str


# None has the form of a sentence, question or answer of `eval_needle.py`, which tells needles as "The ... of X is V":
# a model trained on these has not seen the test. tests/data/preparation/test_training_forms.py compares them.
FACT_TEMPLATES = (
    FactTemplate(
        "It is written that {name} was given the {thing} {value}.",
        "Which {thing} was {name} given?",
        "{name} was given the {thing} {value}.",
    ),
    FactTemplate("{name} has {value} as {thing}.", "As {thing}, {name} has which number?", "{name} has {value}."),
    FactTemplate(
        "Whoever asks for {name} must name the {thing}, namely {value}.",
        "Which {thing} must be named by whoever asks for {name}?",
        "One must name {value}.",
    ),
    FactTemplate("{name}, {thing}: {value}.", "Say {name}'s {thing}.", "{name}, {thing}: {value}."),
    FactTemplate(
        "When {name} came in, everybody wrote down {value} as {thing}.",
        "When {name} came in, which {thing} did everybody write down?",
        "Everybody wrote down {value}.",
    ),
    FactTemplate(
        "Remember {value}, because {name} will need this {thing}.",
        "Which {thing} will {name} need?",
        "{name} will need {value}.",
    ),
)

# How a question and its answer stand in the text.
FRAMES = (
    "\n{question} {answer}",
    "\n\nReader: {question}\nWriter: {answer}",
    "\n- {question}\n- {answer}",
    "\n{question}\n{answer}",
)


def _words(text: str, between: str | None = None) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(between))


THINGS = _words(
    "access code, account number, badge number, catalogue number, door code, file number, hidden number, key number, "
    "licence number, locker code, lucky number, membership number, order number, password, reference number, "
    "safe combination, seat number, serial number, special number, ticket number, tracking number",
    ",",
)
ADJECTIVES = _words(
    "bold bitter blue blunt calm careful cheerful clever cold curious damp dark deep drowsy dusty eager early faded "
    "fearless foggy gentle green hasty heavy humble idle jolly lazy light lively lost loud low loyal merry mild "
    "modest muddy neat new nimble noble odd pale plain polite proud purple quick rare restless royal sharp shy sleepy "
    "slow smooth soft sour stern strange sturdy subtle sunny sweet tall tame thin tidy tiny tired vast warm weary "
    "wicked wild wise young"
)
NOUNS = _words(
    "actor apple artist baker banker barber basket bear blanket boat bottle box bucket builder butcher button cabin "
    "camel carpet cart cat cave chair cherry chest clerk cloud coat cook crow dancer desk doctor dog donkey door "
    "dragon driver duck eagle engine farmer feather fiddle fisher flute fox frog gardener ghost giant glove goat goose "
    "hammer hawk hill horse hunter judge juggler king knight lamp lawyer lion lizard merchant miner monk moon "
    "mouse neighbour nurse oak painter palace parrot pencil pilot pirate plum poet potter prince queen rabbit "
    "raven ring rose sailor shepherd shoe singer smith snail soldier spider spoon star stone stove stranger student "
    "sword table tailor teacher tent tiger train tree uncle wagon waiter weaver widow window wizard wolf writer"
)
ONSETS = _words("b br d dr f fl g gl h k l m n p r s st t tr v z")
VOWELS = _words("a e i o u")
CODAS = (*_words("l m n r s nd"), *[""] * 10)


def _described(rng: np.random.Generator) -> str:
    return f"the {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"


def _invented(rng: np.random.Generator) -> str:
    syllables = rng.integers(2, 4)
    return "".join(rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS) for _ in range(syllables)).capitalize()


def _names(rng: np.random.Generator, count: int, kinds: tuple) -> list[str]:
    """Draw different names; one letter more makes up for a repetition, so that any count can be had."""
    names: dict[str, None] = {}
    while len(names) < count:
        name = kinds[rng.integers(len(kinds))](rng)
        names[name if name not in names else f"{name} {_invented(rng)}"] = None
    return list(names)


def _value(rng: np.random.Generator, digits: tuple[int, int]) -> str:
    count = rng.integers(digits[0], digits[1] + 1)
    return str(rng.integers(10 ** (count - 1), 10**count)) if count > 1 else str(rng.integers(10))


def draw_facts(
    rng: np.random.Generator,
    count: int,
    templates: tuple[FactTemplate, ...],
    frames: tuple[str, ...],
    digits: tuple[int, int],
) -> list[Fact]:
    """Draw the facts of one row.

    In half of the rows all facts share one template and one thing, so that nothing but the name tells them apart: each
    is a distractor of the others. In the other half everything is mixed.

    Args:
        rng: decides everything.
        count: number of facts, all with different names.
        templates: ways to tell and to ask.
        frames: ways to set a question and its answer, with {question} and {answer}.
        digits: fewest and most digits of a value.
    """
    uniform = rng.random() < 0.5
    kinds = ((_described,), (_invented,), (_described, _invented))[rng.integers(3)]
    template, thing = templates[rng.integers(len(templates))], THINGS[rng.integers(len(THINGS))]
    frame = frames[rng.integers(len(frames))]
    facts = []
    for name in _names(rng, count, kinds):
        if not uniform:
            template, thing = templates[rng.integers(len(templates))], THINGS[rng.integers(len(THINGS))]
            frame = frames[rng.integers(len(frames))]
        facts.append(_tell(rng, template, frame, name, thing, _value(rng, digits)))
    return facts


def _tell(rng: np.random.Generator, template: FactTemplate, frame: str, name: str, thing: str, value: str) -> Fact:
    def fill(text: str) -> str:
        filled = text.replace("{name}", name).replace("{thing}", thing)
        return filled[:1].upper() + filled[1:]

    given, closing = fill(template.answer).split("{value}")
    question = frame.replace("{question}", fill(template.question)).replace("{answer}", given)
    statement = fill(template.statement).replace("{value}", value)
    inline = rng.random() < 0.5
    return Fact(f" {statement}" if inline else f"\n{statement}\n", question.rstrip(" "), f" {value}{closing}", "\n")
