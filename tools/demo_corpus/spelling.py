"""Spelling words letter by letter.

A token hides its letters, so training spells real words, invented names and words glued from the
beginning of one and the end of another: together they show the letters of nearly every token.
"""

from __future__ import annotations

import re

from demo_corpus.document_filler import INVOICE_FILLER, LETTER_FILLER, ORDER_FILLER, REPORT_FILLER
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
    "able about above accident active actor adult advice afraid after again agent agree air alarm all also always "
    "amber amount and angle animal answer any apart appear apple apron arch area arise article artist ask aspect "
    "attack aunt author autumn avenue average award away awful baby back bad balance ball banana band bank banner "
    "barrel basket battle be beach bean beard beautiful because bed before begin believe bench best better big bird "
    "birthday bitter black blame blind block bloom blue board boat body book border borrow both bounce bowl box boy "
    "brave bread breakfast breeze brick brief bright bring broken brother bubble build bundle burden bus butterfly "
    "button buy cabin cable call camera camp can canal canary capital captain car care career carry castle cat "
    "cattle caution cellar central century cereal certain chain chair chamber chance change channel chapter charge "
    "charm chart chase cheese cherry chief child chocolate choice chorus circle circus citizen city claim class "
    "clay clean clear clever climb clinic close cloth clown coast cold collar colour column come comfort common "
    "compass computer concert contest control cook cool corner costume cotton couch council count country couple "
    "courage course cousin cover cradle crane crash crayon cream credit crew crime cross crowd crown cruel cushion "
    "custom customer cut cycle damage dark day dear debate decide deep defend degree delight deliver dentist depend "
    "desert design desk detail device diamond differ different dinner direct dish district divide dog dollar dome "
    "door double down dozen dragon drama draw dream drift drink drive drum dry dust duty each eager eagle ear early "
    "earth east easy eat edge educate effect eight elbow elder electric elephant empire employ empty end energy "
    "engine enjoy enough enter entire envelope equal escape even evening event every exact example except exercise "
    "expect expert explain explore export express extra eye fable fabric face fact factory faint fairy fall false "
    "family famous fancy far farm fast fate father fault favour feature feel fence fever field figure fill filter "
    "final find fine finger fire first fish five flag flame flash float flock floor flour flower fluid fly focus "
    "folk follow food foot for force foreign forest form fossil four frame free freedom fresh friend frog from "
    "frost frozen fruit fuel full furniture future gain game garden gather gene general genius gesture ghost gift "
    "giraffe girl give glad glance glass globe glory glove go gold good govern grain grand grape grasp grass grave "
    "gravel great green greet grief ground group grow guard guess guest guide guitar habit hair half hammer hand "
    "handle happy harbour hard harm harsh hat hatch have hazard head heal hear heart heaven heavy height help hence "
    "here hero high hill hint hire history hold hollow home honest hook horse hospital hostel hot hotel hour house "
    "how human humble hundred hunger hurry icicle idea ideal image impact import important impress improve include "
    "increase indeed index indoor industry infant inform injure inner insect inside inspire instant instead invent "
    "invite iron issue item ivory jacket jelly jewel job join joint journey judge juice jump junior just justice "
    "keep kettle key kidney kind king kitchen knife knight knock know knowledge label labour lack ladder lady lake "
    "lamb lamp land language large last late latter laugh launch lawyer layer lazy lead league learn leather leave "
    "lecture left leg legal legend lemon lend length lesson letter level library life light like limit line linen "
    "liquid list listen little live loan lobby local lodge logic long look loose lost loud love lovely low loyal "
    "lucky luggage lunar lunch machine magic major make man manage manner mantle many map mark market mass master "
    "match matter mayor meadow meal measure meat medal medicine medium meet melody melt member memory mental "
    "merchant merit message metal method middle mighty mild milk million mind mine mineral minor miracle mirror "
    "mission mistake mixture mobile model moment money monitor monk month mood moon moral more morning most mother "
    "motion motor mount mouth move much muscle museum music mystery name narrow nation nature near neat necessary "
    "neck need needle neighbour nephew nervous nest never new next night nine noble nobody noise normal north nose "
    "note notice notion novel now number nurse nut oak obey object observe obstacle occur odd offer office old "
    "olive once one onion open opera opinion oppose option orbit order ordinary organ origin other ought out "
    "outcome oval oven over owner oxygen page paint painter palace pale panel panic paper parade parcel parent "
    "parrot part particle party pass passage passenger past patient pause pay peace pearl pebble peel penny people "
    "pepper perfect perform perhaps period permit person phone phrase piano picture piece pigeon pilot pinch "
    "pioneer pirate pitch plain plan plant plastic plate platform play please plenty plough plug pocket poem poet "
    "point poison polite pond poor possible potato pottery pound pour power practice praise prayer prefer prepare "
    "present press pretty prevent price pride priest print prison private prize problem produce profit promise "
    "proof proper protect proud provide public pull pumpkin pupil purple purpose purse push put quality quarrel "
    "quarter queen question quick quiet quilt quote rabbit race radio rail rain raise random range rapid rare rate "
    "raven raw reach read ready real reason recall receive recent recipe record red reduce reflect refuse region "
    "regret regular relate relax rely remain remember remind remote remove rent repair repeat reply report rescue "
    "resist respect rest result return reveal reward rhyme rhythm ribbon rice rich ride rifle right rigid ring ripe "
    "rise rival river road roast rob robin robot rock rocky roof room root rope rose rough round royal rub rude "
    "ruin rule run rural rush sack sacred sad safe sail sailor salad sale salt same sample sand satin sauce save "
    "say scale scarce scarf scatter scene scent scheme scholar school science score scratch screen screw sea search "
    "season seat see seed seldom select sell send sense sensible sentence separate series serious serve settle "
    "seven severe shade shallow shame shape shark sharp she shield shift shine ship shirt shock shoe shoot shop "
    "shore short should shoulder shout show shower shrink shut shy sick side sight sign silk silver simple sing "
    "sink sister sit six size skill skin skirt sky slave sleep slice slide slight slip slope slow small smart smell "
    "smile smoke smooth snake snow soap social sock soft soil solar solid solve some song soon soul sound soup "
    "south space spare spark speak special speech speed spell spend spice spider spin spite split spoil spoon sport "
    "spot spread spring square squirrel stage stair stamp stand standard star stare start state station statue stay "
    "steady steam steel steep stencil step stick stiff stir stock stomach stone stop store storm story straight "
    "strain strange stranger stream street strength stretch strict strike string strip stripe stroke strong "
    "struggle study stuff stupid style subject succeed such sudden suffer sugar suggest suit sum summer summit sun "
    "supper supply support suppose sure surface surprise survive swallow swan swear sweet swift swim swing sword "
    "symbol system table tablet tackle tailor take tale talent talk tall tame tank tape target task taste tax tea "
    "teacher team tear telephone tell temper tempo ten tend tender tennis tent term test thank that theatre there "
    "thick thief thin thing think thirst this thorn thousand thread threat three throat throne throw thumb thunder "
    "tide tidy tiger tight tile time timid tiny tired title toast tobacco today toe together tomato tomorrow tone "
    "tongue tool tooth top torch total touch tough tour towel tower town toy track trade tradition traffic trail "
    "train tram transfer trap travel tray treasure treat tree tribe trick trip triumph tropical true trunk trust "
    "truth tube tulip tune tunnel turn turtle twelve twenty twice twin twist two type ugly under understand unit "
    "unite universe unless until upper urban urge urgent use usual vacuum vague vain valid value van vanish vapour "
    "variety vase vast vehicle venture verb verse very vessel victory view village vine violet violin virtue vision "
    "visit vital vivid voice volcano volume vote voyage wagon waist wait walk wall wander want warm warn wash waste "
    "watch water way weak wealth weapon wear weather weave week weigh weight welcome well west wet whale wheat "
    "wheel when where whisper whistle white who whole why wide width wife wild will willing wind window wine winter "
    "wire wise wish with wolf woman wood wool word work world worm worry worth wound wrap wreck wrist write wrong "
    "yard year yellow yes yesterday yield you young youth zebra zero zoo"
).split()


def _trained_words() -> tuple[str, ...]:
    """Return the words to spell, among them words of documents: the model must know the letters of those tokens too."""
    things = [word for items in THINGS.values() for item in items for word in item.split()]
    names = (*FIRST_NAMES, *SURNAMES, *TOWNS)
    filler = " ".join((*LETTER_FILLER, *INVOICE_FILLER, *ORDER_FILLER, *REPORT_FILLER))
    read = re.findall(r"[A-Za-z]{3,}", filler)
    return tuple(sorted({word.lower() for word in (*_COMMON, *things, *names, *read)} - set(_NEVER_TRAINED)))


TRAINED_WORDS = _trained_words()


def spelled(word: str) -> str:
    return " ".join(word)


def word_to_spell(draw: Draw) -> str:
    if draw.split is Split.HELD_OUT:
        return draw.choose(_NEVER_TRAINED)
    kind = draw.integer(1, 10)
    if kind <= 5:
        word = draw.choose(TRAINED_WORDS)
    elif kind <= 9:
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
