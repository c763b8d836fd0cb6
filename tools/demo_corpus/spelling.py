"""Spelling words letter by letter.

A token hides its letters, so training spells real words, invented names and words glued from the
beginning of one and the end of another: together they show the letters of nearly every token.
"""

from __future__ import annotations

from demo_corpus.lists import THINGS
from demo_corpus.phrasing import request
from demo_corpus.sample import Draw, Sample, Split, Turn
from demo_corpus.vocabulary import FIRST_NAMES, SURNAMES, TOWNS, invented

_PHRASINGS = (
    "Spell {w}",
    "Spell the word {w}",
    "Spell '{w}'",
    'Spell "{w}"',
    'Spell the word "{w}"',
    "Spell the word '{w}'",
    "Spell the word {w} for me",
    "Spell out {w}",
    "Tell me how to spell {w}",
    "Say the letters of {w}",
    "Write {w} letter by letter",
)
_QUESTIONS = ("How do you spell {w}?", "How is the word {w} spelled?", "How do I spell {w}?", 'How do you spell "{w}"?')

# Words that occur nowhere else in the corpus: the held-out side spells these.
_NEVER_TRAINED = (
    "anchor blanket bottle branch bucket candle carpet ceiling cherish chimney cloud creature curtain danger "
    "distance donkey effort feather fortune gallery gentle giant glacier harvest helmet humour island jungle "
    "lantern magnet marble minute modern monster mountain nickel ocean package pattern pencil pillow planet "
    "powder prince puzzle railway rocket saddle scissors secret shadow shelter signal silence soldier spirit "
    "stable student sunset temple ticket timber trouble umbrella uncle valley velvet wisdom wonder"
).split()

_COMMON = (
    "about above after again air all also always and animal answer any apple area ask away baby back bad ball "
    "banana bank basket be beautiful because bed before begin believe best better big bird birthday black blue "
    "board boat body book both box boy bread breakfast bring brother build bus butterfly buy call can car care "
    "carry castle cat chair change cheese child chocolate circle city class clean clear close cold colour come "
    "computer cook cool cotton count country courage cover cross customer cut dark day dear deep dentist diamond "
    "different dinner dish dog door down dragon draw dream drink drive dry each eagle ear early earth east easy "
    "eat elephant end engine enough envelope even evening every eye face fact factory fall family far farm fast "
    "father feel field fill find fine finger fire first fish five floor flower fly follow food foot for forest "
    "form four free freedom friend from fruit full furniture game garden girl give glass go gold good grass great "
    "green ground group grow guitar hair half hammer hand happy hard hat have head hear heart heavy help here "
    "high hill history hold home honest horse hospital hot hour house how hundred idea important insect inside "
    "jacket job join jump just keep key kind king kitchen know knowledge ladder lady lake land language large "
    "last late laugh learn leather leave left leg lemon letter library life light like line list little live long "
    "look lost love low lunch machine make man many map mark market meadow measure meat medicine meet memory milk "
    "mind mirror money month moon more morning most mother mouth move much music name near necessary neck need "
    "needle never new next night nine noise north nose note notice now number object office old once one open "
    "order other out over page paint painter paper parcel part party pass past pay people pepper person picture "
    "piece plan plant play please pocket point poor press pretty problem pull pumpkin push put queen question "
    "quick quiet rabbit rain read ready real receive red remember rest ribbon rice rich ride right ring river "
    "road rock room round run safe sailor salt same sample sand say school science sea season seat see sell send "
    "sentence separate seven shape she ship shoe shop short should show side silver simple sing sister sit six "
    "skin sky sleep slow small smile snow soft some song soon sound soup south space speak spell spider spoon "
    "sport spring stand star start station stay step stomach stone stop store story stranger street strong study "
    "such sugar summer sun sure sweet swim table take talk tall tea teacher team telephone tell ten test thank "
    "that theatre there thing think this thousand three thunder time tired today together tomorrow tooth top "
    "touch town toy traffic train travel treasure tree true tunnel turn two under understand until use very "
    "village violin visit voice wait walk wall want warm wash watch water way wear weather week well west wheel "
    "when where white who why wife wild will wind window wine winter wise wish with woman wood word work world "
    "write wrong year yellow yes yesterday you young zebra zero"
).split()


def _trained_words() -> tuple[str, ...]:
    things = [word for items in THINGS.values() for item in items for word in item.split()]
    names = (*FIRST_NAMES, *SURNAMES, *TOWNS)
    return tuple(sorted({word.lower() for word in (*_COMMON, *things, *names)} - set(_NEVER_TRAINED)))


TRAINED_WORDS = _trained_words()


def spelled(word: str) -> str:
    return " ".join(word)


def word_to_spell(draw: Draw) -> str:
    if draw.split is Split.HELD_OUT:
        return draw.choose(_NEVER_TRAINED)
    kind = draw.integer(1, 10)
    if kind <= 4:
        word = draw.choose(TRAINED_WORDS)
    elif kind <= 8:
        word = _glued(draw)
    else:
        word = invented(draw, draw.integer(0, 2)).lower()
    return word if word not in _NEVER_TRAINED else draw.choose(TRAINED_WORDS)


def _glued(draw: Draw) -> str:
    head, tail = draw.choose(TRAINED_WORDS), draw.choose(TRAINED_WORDS)
    return head[: draw.integer(1, len(head))] + tail[draw.integer(0, len(tail) - 1) :]


def spell(draw: Draw) -> Sample:
    word = word_to_spell(draw)
    shown = word.capitalize() if draw.chance(0.1) else word
    if draw.chance(0.2):
        user = draw.choose(_QUESTIONS).format(w=shown)
    else:
        user = request(draw, draw.choose(_PHRASINGS).format(w=shown))
    return Sample("spell", (Turn(user, spelled(word)),))
