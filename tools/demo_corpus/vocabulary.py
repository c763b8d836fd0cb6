"""Names of people, firms and places: the open-class words that every kind of conversation shares.

Half of the people have names that exist and half have names made of syllables, so that the model
learns to copy a name rather than to know it.
"""

from __future__ import annotations

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

_STARTS = (
    "Ba Be Bo Bra Ca Da De Do El Fa Fe Ga Gre Ha Ho Ja Jo Ka Ke Ko La Le Lo Ma Mi Mo Na Ne No Pa Pe Ra Re Ro "
    "Sa Se Sta Ta Te Tro Va Ve Wa Za"
).split()
_MIDDLES = "ba be bi da di do ga ka ki la le li lo ma mi mo na ne ni no ra re ri ro sa si ta te ti to va vi za".split()
_ENDS = "n r s l m lan ler lis man mer nd nen nor ra ren ric rin ro rt sen son ta tan ten ton va vik ya".split()


def invented(draw: Draw, syllables: int) -> str:
    """A pronounceable name that nobody has, such as Balino or Stamiren."""
    middle = "".join(draw.choose(_MIDDLES) for _ in range(syllables))
    return draw.choose(_STARTS) + middle + draw.choose(_ENDS)


def first_name(draw: Draw) -> str:
    if draw.chance(0.5):
        return draw.own(FIRST_NAMES)
    return draw.fresh(lambda: invented(draw, draw.integer(0, 1)))


def surname(draw: Draw) -> str:
    if draw.chance(0.5):
        return draw.own(SURNAMES)
    return draw.fresh(lambda: invented(draw, draw.integer(1, 2)))


def person(draw: Draw) -> str:
    return f"{first_name(draw)} {surname(draw)}"


def town(draw: Draw) -> str:
    if draw.chance(0.5):
        return draw.own(TOWNS)
    return draw.fresh(lambda: invented(draw, 1) + draw.choose(("ton", "ford", "burg", "field", "ville", "ham")))


def firm(draw: Draw) -> str:
    return f"{surname(draw)} {draw.choose(FIRM_ENDINGS)}"


def address(draw: Draw) -> str:
    return f"{draw.fresh(lambda: draw.integer(1, 199))} {draw.choose(STREETS)}, {town(draw)}"
