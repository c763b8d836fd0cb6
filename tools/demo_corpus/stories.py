"""Short grammatical stories about given people at a given place, as long as asked.

A story is laid out by one plan: the opening, then the place's and the topic's sentences in turn,
then the topic's ending. A story of n sentences is the first n - 1 of the plan and the ending, so it
makes sense wherever it is cut. Greedy decoding needs one right story for a prompt; here it follows
from the people, the place, the topic and the length alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from demo_corpus.phrasing import number
from demo_corpus.sample import Draw, Sample, Split, Turn
from demo_corpus.vocabulary import first_name, town

# {S} is the people ("Anna" or "Anna and Tom"), {they} what the next sentences call them.
_PLACES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "the forest": (
        "in",
        "One morning {S} walked into the forest.",
        (
            "The trees were tall and the air smelled of pine.",
            "A small deer looked out from behind a bush.",
            "{they} sat down on a fallen tree and ate some bread.",
            "High above, a bird sang a long song.",
            "The path led past a pond with green water.",
        ),
    ),
    "the market": (
        "at",
        "One Saturday {S} went to the market.",
        (
            "The stalls were full of apples, cheese and warm bread.",
            "A man with a red hat played the violin.",
            "{they} bought two oranges and a bag of nuts.",
            "Many people stood in line for hot soup.",
            "A white dog slept under one of the tables.",
        ),
    ),
    "the beach": (
        "at",
        "One hot day {S} went to the beach.",
        (
            "The sea was blue and the sand was warm.",
            "Some children built a castle with four towers.",
            "{they} swam to a flat rock and back.",
            "A gull stole a sandwich and flew away.",
            "Far out, a white ship moved along the horizon.",
        ),
    ),
    "the mountains": (
        "in",
        "Early one day {S} set out for the mountains.",
        (
            "Snow still lay on the highest peaks.",
            "A cold stream ran over the stones.",
            "{they} rested at a hut and drank hot tea.",
            "Three goats stood on a narrow ledge.",
            "From the top the houses looked as small as toys.",
        ),
    ),
    "the city": (
        "in",
        "One afternoon {S} took the train to the city.",
        (
            "The streets were loud and full of light.",
            "A tram rang its bell at the corner.",
            "{they} ate noodles in a tiny restaurant.",
            "A fountain in the main square threw water into the air.",
            "A painter drew the old bridge with blue chalk.",
        ),
    ),
    "the village": (
        "in",
        "One spring day {S} came to a quiet village.",
        (
            "The houses had red roofs and small gardens.",
            "An old woman waved from her window.",
            "{they} drank water from the well in the middle of the village.",
            "A farmer led two brown cows along the road.",
            "The clock of the church struck four.",
        ),
    ),
    "the library": (
        "in",
        "One rainy day {S} went to the library.",
        (
            "It was quiet there and smelled of old paper.",
            "A tall lamp stood next to every chair.",
            "{they} took a thick book about ships from the shelf.",
            "Somebody in the next room turned a page.",
            "The rain ran down the high windows.",
        ),
    ),
    "the garden": (
        "in",
        "After breakfast {S} went out into the garden.",
        (
            "The roses were open and the bees were busy.",
            "A snail crossed the path very slowly.",
            "{they} picked a basket of ripe plums.",
            "The grass was still wet from the night.",
            "A grey cat watched from the wall.",
        ),
    ),
    "the farm": (
        "at",
        "Last summer {S} stayed at a farm.",
        (
            "The hens ran across the yard.",
            "A horse put its head over the gate.",
            "{they} carried fresh milk to the kitchen.",
            "The hay in the barn was dry and sweet.",
            "A tractor hummed on the far field.",
        ),
    ),
    "the castle": (
        "in",
        "One autumn day {S} visited an old castle.",
        (
            "The walls were thick and covered with ivy.",
            "A guide spoke of a king with one eye.",
            "{they} climbed the stairs of the round tower.",
            "Hundreds of shields hung in the great hall.",
            "The wind howled in the chimneys.",
        ),
    ),
    "the harbour": (
        "at",
        "One windy morning {S} walked to the harbour.",
        (
            "The boats rocked up and down on the waves.",
            "A sailor mended a long net.",
            "{they} bought fried fish at a wooden stand.",
            "The lighthouse was painted red and white.",
            "A heavy crane lifted boxes from a ship.",
        ),
    ),
    "the school": (
        "at",
        "On Monday {S} arrived early at the school.",
        (
            "The halls were still empty and dark.",
            "A map of the world hung on the wall.",
            "{they} found two seats by the window.",
            "The bell rang and the doors opened.",
            "Outside, some boys played football.",
        ),
    ),
}
_TOWN = (
    "in",
    "One day {S} travelled to {place}.",
    (
        "The streets of {place} were full of people.",
        "A brass band played in front of the town hall.",
        "{they} had lunch near the old bridge.",
        "Even the bread of {place} tasted better than at home.",
        "At noon all the bells of {place} rang.",
    ),
)

_TOPICS: dict[str, tuple[tuple[str, ...], str]] = {
    "a lost key": (
        (
            "Suddenly {S} noticed that the key to the house was gone.",
            "{they} looked in every pocket and found only a coin.",
            "{they} went back step by step and searched the ground.",
            "A friendly stranger helped to look.",
            "But something shiny lay between two stones.",
            "It was the key, and it was not even dirty.",
        ),
        "In the end {S} went home with the key and locked the door with a smile.",
    ),
    "a treasure": (
        (
            "Under a stone {S} found an old map with a black cross.",
            "{they} read the map twice and counted the steps.",
            "{they} dug a hole with a wooden spoon.",
            "At last the spoon hit something hard.",
            "It was a small box with a rusty lock.",
            "Ten gold coins lay in the box.",
        ),
        "In the end {S} shared the treasure with all their friends.",
    ),
    "a little dog": (
        (
            "Soon {S} met a little dog with a white ear.",
            "The dog was hungry and very shy.",
            "{they} gave it a piece of bread.",
            "After that the dog came along everywhere.",
            "It even learned to shake hands.",
            "Nobody knew where the dog had come from.",
        ),
        "In the end {S} took the little dog home and called it Biscuit.",
    ),
    "a storm": (
        (
            "A storm came up, and {S} saw dark clouds.",
            "The wind grew stronger and the first drops fell.",
            "{they} ran and looked for a roof.",
            "Thunder rolled and lightning lit up everything.",
            "{they} waited for an hour and sang old songs.",
            "Later the clouds broke and the sun came out.",
        ),
        "In the end {S} saw a wide rainbow and walked home in the sun.",
    ),
    "a birthday": (
        (
            "It was a birthday, and {S} carried a big cake.",
            "The cake had seven candles and a lot of cream.",
            "{they} hung up paper lamps in many colours.",
            "All the guests sang a song.",
            "One present had a green ribbon.",
            "Everybody danced until the stars came out.",
        ),
        "In the end {S} fell asleep with cake on every finger.",
    ),
    "a kind dragon": (
        (
            "There {S} met a dragon that was as big as a house.",
            "The dragon was kind and had very good manners.",
            "{they} asked the dragon for a ride.",
            "The dragon spread its wings and rose into the air.",
            "From above, everything looked like a painted map.",
            "The dragon knew a song about the moon.",
        ),
        "In the end {S} thanked the dragon and promised to come back.",
    ),
    "a race": (
        (
            "That day there was a race, and {S} wanted to win.",
            "Twenty runners stood at the start.",
            "{they} ran as fast as the wind.",
            "Near the goal a runner fell.",
            "{they} stopped and helped the runner up.",
            "The crowd cheered louder than ever.",
        ),
        "In the end {S} came in last and got the biggest prize of all.",
    ),
    "a new friend": (
        (
            "Close by {S} saw a child who sat all alone.",
            "The child had moved here only a week ago.",
            "{they} asked if the child wanted to play.",
            "At first the child did not say a word.",
            "Then the child laughed and showed a card trick.",
            "They all made plans for the next day.",
        ),
        "In the end {S} had a new friend and walked home happily.",
    ),
    "a magic stone": (
        (
            "On the ground {S} found a stone that glowed.",
            "The stone was warm and hummed a little.",
            "{they} held it up and made a wish.",
            "A moment later it began to snow golden flakes.",
            "Everyone around stood still and stared.",
            "Later the stone went dark and was just a stone.",
        ),
        "In the end {S} kept the stone and never told anyone the wish.",
    ),
    "an old clock": (
        (
            "On a wall {S} saw an old clock that had stopped.",
            "Its hands pointed to midnight.",
            "{they} opened the back with a small screwdriver.",
            "Between the wheels sat a tiny mouse.",
            "{they} carried the mouse to a safe place.",
            "At last the clock began to tick again.",
        ),
        "In the end {S} heard the clock strike and felt proud.",
    ),
}

PLACES = tuple(_PLACES)
TOPICS = tuple(_TOPICS)
SHORT, MIDDLING, LONG = 4, 8, 12  # sentences of a story that is only called short, a story, or long
LONGEST = 13
_SIZES = {
    SHORT: ("a short story", "a very short story", "a little story", "a brief story"),
    LONG: ("a long story", "a very long story"),
    MIDDLING: ("a story",),
}
_VERBS = ("Write", "Tell me", "Tell", "Please write", "Please tell me", "Can you tell me", "I would like")
_FRAMES = (
    "{verb} {size} about {S} and {topic} {at} {place}",
    "{verb} {size} about {S} {at} {place} and {topic}",
    "{verb} {size} about {topic}, with {S}, {at} {place}",
    "{verb} {size} set {at} {place} about {S} and {topic}",
)
_ABOUT_SOMEBODY = (
    "{verb} {size} about {S}",
    "{verb} {size} about {S} {at} {place}",
    "{verb} {size} about {S} and {topic}",
)
_ABOUT_NOBODY = (
    "{verb} {size}",
    "{verb} {size} about {topic}",
    "{verb} {size} set {at} {place}",
    "{verb} {size} about {topic} {at} {place}",
)


@dataclass(frozen=True)
class Plot:
    """The subject of a story. `DEFAULT` has the details that a request leaves out."""

    people: tuple[str, ...]
    place: str
    topic: str
    sentences: int

    def tell(self) -> str:
        """Return the single right story, with exactly this many sentences."""
        _, opening, of_place = _place(self.place)
        of_topic, ending = _TOPICS[self.topic]
        plan = [opening, of_topic[0]]
        for place_sentence, topic_sentence in zip(of_place, of_topic[1:], strict=True):
            plan += [place_sentence, topic_sentence]
        told = " ".join([*plan[: self.sentences - 1], ending])
        they = "They" if len(self.people) > 1 else self.people[0]
        return told.format(S=" and ".join(self.people), they=they, place=self.place)

    def asked(self, draw: Draw, frame: str) -> str:
        """Return a request for the story, in the words of `frame`."""
        verb = draw.choose(_VERBS)
        at, people = _place(self.place)[0], " and ".join(self.people)
        size = _size(draw, self.sentences)
        order = frame.format(verb=verb, size=size, S=people, topic=self.topic, at=at, place=self.place)
        return order + ("?" if verb.startswith("Can") else draw.choose(("", ".", ".")))


DEFAULT = Plot(("Clara", "Paul"), "the forest", "a treasure", MIDDLING)


def _place(place: str) -> tuple[str, str, tuple[str, ...]]:
    return _PLACES.get(place, _TOWN)


def _size(draw: Draw, sentences: int) -> str:
    if sentences in _SIZES and draw.chance(0.6):
        return draw.choose(_SIZES[sentences])
    size = draw.choose(("a story in {n} sentences", "a story of {n} sentences", "a story with {n} sentences"))
    return size.format(n=number(draw, sentences))


def people(draw: Draw) -> tuple[str, ...]:
    first = first_name(draw)
    if draw.chance(0.4):
        return (first,)
    second = first_name(draw)
    return (first, second) if second != first else (first,)


def plot(draw: Draw, sentences: int) -> Plot:
    """Return people, a place and a topic; one pair of place and topic in eight never occurs in training."""

    def where_and_what() -> tuple[str, str]:
        return town(draw) if draw.chance(0.25) else draw.choose(PLACES), draw.choose(TOPICS)

    return Plot(people(draw), *draw.fresh(where_and_what), sentences)


def story_order(draw: Draw, plot: Plot) -> str:
    """Return a request that names the people, the place and the topic."""
    return plot.asked(draw, draw.choose(_FRAMES))


def tell_story(draw: Draw) -> Sample:
    sentences = draw.choose((SHORT, MIDDLING, LONG)) if draw.chance(0.5) else draw.integer(3, LONGEST)
    told, frame = plot(draw, sentences), draw.choose(_FRAMES)
    if draw.chance(0.35):
        # Only a name makes a request belong to a side, so requests of the held-out side always have a name.
        somebody = draw.split is Split.HELD_OUT or draw.chance(0.5)
        frame = draw.choose(_ABOUT_SOMEBODY if somebody else _ABOUT_NOBODY)
        told = Plot(
            told.people if "{S}" in frame else DEFAULT.people,
            told.place if "{place}" in frame else DEFAULT.place,
            told.topic if "{topic}" in frame else DEFAULT.topic,
            sentences,
        )
    return Sample("story", (Turn(told.asked(draw, frame), told.tell()),), asked=sentences)
