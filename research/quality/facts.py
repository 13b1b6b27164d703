"""Building blocks of generated documents: names of people and towns, values, and sentences that state or ask a fact."""

import dataclasses
import random


@dataclasses.dataclass(frozen=True)
class Predicate:
    """A fact about a person. `statements` have {name} and {value}, `questions` have {who}.

    A relation's value is a person, and its `phrase`, with {name}, names that person in a two-hop question.
    """

    statements: tuple[str, ...]
    questions: tuple[str, ...]
    values: tuple[str, ...] = ()
    phrase: str | None = None


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _compound_words(rng: random.Random, starts: str, ends: str, count: int, taken: set[str]) -> tuple[str, ...]:
    """`count` words, each a start plus an end, none of them in `taken`, to which they are added."""
    words = []
    while len(words) < count:
        word = (rng.choice(_words(starts)) + rng.choice(_words(ends))).capitalize()
        if word not in taken:
            taken.add(word)
            words.append(word)
    return tuple(words)


_RNG = random.Random("names")
_TAKEN: set[str] = set()
FIRST_NAMES = _compound_words(
    _RNG,
    "al be ca da el fa ga ho is jo ka li mi no or pe ri sa ti va",
    "bren dric fel gund la mar nor rik sel vin",
    128,
    _TAKEN,
)
SURNAMES = _compound_words(
    _RNG,
    "bar cor dun fen gar hol hul kel lan mor nes pol ran sel tam ul ver wen yar zor",
    "brook dell field gate holt kin low mere rin sted tor vale win wood",
    256,
    _TAKEN,
)
TOWNS = _compound_words(
    _RNG,
    "ash birch crow dray elm frost gran hazel ivy kings long mill north oak penn",
    "bury chester combe ford ham port ton wick",
    96,
    _TAKEN,
)

ATTRIBUTES = (
    Predicate(
        ("{name} works as a {value}.", "The trade of {name} is that of a {value}.", "People know {name} as a {value}."),
        ("What is the trade of {who}?", "What does {who} work as?"),
        _words(
            "baker brewer carpenter chandler cobbler cooper doctor dyer farmer fisher gardener glazier hatter hunter "
            "jeweller joiner judge lawyer locksmith mason merchant miller miner painter potter printer sailor shepherd "
            "singer smith soldier surgeon tailor tanner thatcher tinker weaver writer"
        ),
    ),
    Predicate(
        ("{name} lives in {value}.", "The home town of {name} is {value}.", "The house of {name} stands in {value}."),
        ("What is the home town of {who}?", "Where does {who} live?"),
        TOWNS,
    ),
    Predicate(
        ("{name} was born in {value}.", "The birth year of {name} is {value}.", "The birth of {name} was in {value}."),
        ("What is the birth year of {who}?", "When was {who} born?"),
        tuple(map(str, range(1700, 1900))),
    ),
    Predicate(
        (
            "{name} plays the {value}.",
            "The instrument of {name} is the {value}.",
            "Many hear {name} on the {value}.",
        ),
        ("What is the instrument of {who}?", "What does {who} play?"),
        _words("banjo bugle cello clarinet drum fiddle flute guitar harp horn lute lyre pipe trumpet viola violin"),
    ),
    Predicate(
        ("{name} keeps a {value}.", "The animal of {name} is a {value}.", "In the yard of {name} lives a {value}."),
        ("What is the animal of {who}?", "What does {who} keep?"),
        _words(
            "badger camel cat cow crow dog donkey duck falcon ferret fox goat goose hare hawk hen horse jackdaw lamb "
            "mule parrot pig pigeon pony rabbit raven sheep swan tortoise toad"
        ),
    ),
    Predicate(
        ("{name} always wears {value}.", "The colour of {name} is {value}.", "The door of {name} is painted {value}."),
        ("What is the colour of {who}?", "What colour does {who} wear?"),
        _words("black blue brown crimson golden green grey lilac pink purple red scarlet silver white yellow"),
    ),
    Predicate(
        (
            "{name} likes to eat {value}.",
            "The favourite dish of {name} is {value}.",
            "At home {name} cooks {value}.",
        ),
        ("What is the favourite dish of {who}?", "What does {who} like to eat?"),
        _words("beans bread broth cabbage cheese dumplings fish honey lentils mushrooms pie plums porridge rice stew"),
    ),
)
RELATIONS = (
    Predicate(
        ("{name} was taught by {value}.", "The teacher of {name} is {value}."),
        ("Who is the teacher of {who}?", "Who taught {who}?"),
        phrase="the teacher of {name}",
    ),
    Predicate(
        ("{name} lives next door to {value}.", "The neighbour of {name} is {value}."),
        ("Who is the neighbour of {who}?", "Who lives next door to {who}?"),
        phrase="the neighbour of {name}",
    ),
    Predicate(
        ("{name} is married to {value}.", "The spouse of {name} is {value}."),
        ("Who is the spouse of {who}?", "Who is married to {who}?"),
        phrase="the spouse of {name}",
    ),
    Predicate(
        ("{name} is employed by {value}.", "The employer of {name} is {value}."),
        ("Who is the employer of {who}?", "Who employs {who}?"),
        phrase="the employer of {name}",
    ),
)
PREDICATES = ATTRIBUTES + RELATIONS
