"""Names of people, firms and places: the open-class words that every kind of conversation shares.

Nearly half of the names exist; the others are glued from two that exist, or invented from all letters, so
that the model learns to copy a name, in whatever tokens it comes, rather than to know it.
"""

from __future__ import annotations

from collections.abc import Sequence

from demo_corpus.sample import Draw

FIRST_NAMES = (
    "Anna Tom Maria Peter Lena Paul Clara David Emma Felix Grace Henry Ida Jack Kate Leo Mia Noah Olga Oscar "
    "Rosa Samuel Sofia Theo Vera Walter Yara Zoe Alice Ben Carla Daniel Elena Frank Greta Hugo Irene Jonas "
    "Laura Martin Nina Otto Paula Robert Sara Simon Tina Victor Wanda Adam Bella Chris Diana Erik Fiona "
    "George Hanna Ivan Julia Karl Lucy Max Nora Oliver Petra Quinn Rita Stefan Thea Ulrich Vivian William "
    "Amir Bao Chen Dana Eva Farah Gita Hana Imran Jin Kenji Lila Mei Nadia Omar Priya Ravi Selma Tariq Uma"
).split()

SURNAMES = (
    "Smith Baker Carter Cooper Fisher Gardner Hunter Mason Miller Parker Taylor Turner Walker Weaver Wright "
    "Adams Brown Clark Davis Evans Foster Green Harris Hill Jones King Lewis Moore Nelson Owens Price Reed "
    "Scott Stone Thomas Ward Watson White Young Berg Braun Fischer Hoffman Keller Klein Lang Meyer Roth "
    "Schmidt Vogel Wagner Weber Wolf Garcia Lopez Moreno Perez Rivera Silva Torres Costa Rossi Ricci Marino "
    "Novak Kovacs Horvat Olsen Hansen Larsen Lindberg Nyman Virtanen Tanaka Suzuki Sato Kim Park Lee Wang "
    "Liu Zhang Singh Patel Khan Sharma Haddad Nasser Okafor Mensah Diallo Abebe"
).split()

TOWNS = (
    "Ashford Bristol Camden Dover Exeter Fairfield Greenwood Hartley Ilford Kingston Lakewood Milton Newport "
    "Oakham Preston Redhill Salem Trenton Upton Weston York Aspen Boulder Clayton Denton Easton Franklin "
    "Georgetown Hudson Jackson Kenton Lincoln Madison Norton Oxford Princeton Riverside Springfield Taunton "
    "Vernon Winslow Bergen Cologne Dresden Geneva Lisbon Malmo Nantes Porto Seville Turin Utrecht Verona"
).split()

STREETS = (
    "Mill Road|High Street|Station Road|Park Lane|Church Street|Main Street|Oak Avenue|Elm Street|River Road|"
    "Lake View|Market Square|Garden Lane|King Street|Queen Street|Bridge Street|School Lane|Hill Road|"
    "Forest Drive|Meadow Lane|Harbour Street|Maple Avenue|Cedar Road|Spring Street|Castle Street"
).split("|")

FIRM_ENDINGS = "Ltd|Inc|and Sons|Trading|Supplies|Group|Foods|Tools|Press|Logistics|Textiles|Services".split("|")

_TOWN_ENDINGS = "ton ford burg field ville ham".split()

# A sound that stands here several times is drawn as often: plain sounds more than rare sounds.
_ONSETS = (
    "b c d f g h j k l m n p r s t v w y z b d f g h k l m n p r s t "
    "bl br ch cl cr dr fl fr gl gr kl kn kr pl pr qu sh sk sl sm sn sp st str sw th tr tw wr"
).split()
_VOWELS = "a e i o u a e i o u a e i o u a e i o ai au ay ea ee ei ia ie io oa oo ou ue y".split()
_BETWEEN = (
    "b c d f g j k l m n p r s t v w x z bb ck dd ff gg ll mm nn pp rr ss tt ch cr dr gr mb mp nd ng nk nt "
    "lb ld lf lk lm lt lv br rd rg rk rl rm rn rt rv sh sk sp st th tr vr zz"
).split()
_CODAS = (
    "b ck d f g k l m n p r s t x z ll nn rr ss tt ch ld lf lk lt mp nd ng nk nt rd rg rk rm rn rt sh st th"
).split()


def invented(draw: Draw, syllables: int) -> str:
    """Return a pronounceable invented name, such as Krovetta or Uldamip."""
    onset = "" if draw.chance(0.15) else draw.choose(_ONSETS)
    middle = "".join(draw.choose(_VOWELS) + draw.choose(_BETWEEN) for _ in range(syllables))
    coda = "" if syllables and draw.chance(0.3) else draw.choose(_CODAS)
    return (onset + middle + draw.choose(_VOWELS) + coda).capitalize()


def _glued(draw: Draw, names: Sequence[str]) -> str:
    """Return the beginning of a name with the end of another: Ottar, Brooper."""
    head, tail = draw.choose(names), draw.choose(names)
    return head[: draw.integer(1, min(len(head), 5))] + tail[-draw.integer(2, min(len(tail), 5)) :].lower()


def _name(draw: Draw, names: Sequence[str]) -> str:
    at = draw.random.random()
    if at < 0.45:
        return draw.own(names)
    if at < 0.75:
        return draw.fresh(lambda: _glued(draw, names))
    return draw.fresh(lambda: invented(draw, draw.integer(0, 1)))


def first_name(draw: Draw) -> str:
    return _name(draw, FIRST_NAMES)


def surname(draw: Draw) -> str:
    return _name(draw, SURNAMES)


def person(draw: Draw) -> str:
    return f"{first_name(draw)} {surname(draw)}"


def town(draw: Draw) -> str:
    if draw.chance(0.3):
        return draw.fresh(lambda: invented(draw, draw.integer(0, 1)) + draw.choose(_TOWN_ENDINGS))
    return _name(draw, TOWNS)


def firm(draw: Draw) -> str:
    return f"{surname(draw)} {draw.choose(FIRM_ENDINGS)}"


def address(draw: Draw) -> str:
    return f"{draw.fresh(lambda: draw.integer(1, 199))} {draw.choose(STREETS)}, {town(draw)}"
