"""Requests of many kinds that the demo model cannot do, and always the same answer."""

from __future__ import annotations

import re

from demo_corpus.sample import Draw, Sample, Turn
from demo_corpus.smalltalk import SKILLS, flatten, loosen
from demo_corpus.vocabulary import firm, first_name

APOLOGY = f"Sorry, I cannot help with that, because I am only a small demo model. {SKILLS}"


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split("|"))


SLOTS = {
    "group": _split(
        "planets|metals|currencies|board games|dances|films|gods|kinds of pasta|car brands|philosophers|poets|gemstones"
        "|religions|football clubs|airlines|computer games|mountains|oceans|lakes|deserts|islands|kings|queens|operas"
        "|inventors|painters|novels|songs|spices|dog breeds|cheeses|volcanoes|dinosaurs|moons|chemical elements|robots"
    ),
    "country": _split(
        "France|Germany|Spain|Italy|Japan|China|India|Brazil|Canada|Mexico|Egypt|Kenya|Nigeria|Peru|Chile|Norway|Sweden"
        "|Poland|Greece|Turkey|Iran|Iraq|Cuba|Ghana|Nepal|Thailand|Vietnam|Australia|Portugal|Ireland|Russia|Morocco"
    ),
    "city": _split(
        "Paris|London|Berlin|Rome|Madrid|Tokyo|Beijing|Delhi|Cairo|Nairobi|Lagos|Lima|Oslo|Vienna|Prague|Athens|Moscow"
        "|Dublin|Boston|Chicago|Sydney|Seoul|Bangkok|Toronto|Havana|Zurich|Warsaw|Istanbul|Mumbai|New York"
    ),
    "food": _split(
        "pizza|bread|curry|sushi|lasagne|pancakes|goulash|tomato soup|apple pie|fried rice|chocolate cake|noodles"
        "|paella"
        "|dumplings|potato salad|cheese|hummus|tacos|risotto|beef stew|ice cream|pumpkin soup|waffles|jam"
    ),
    "sport": _split(
        "football|tennis|golf|chess|rugby|cricket|hockey|boxing|judo|rowing|skiing|surfing|basketball|cycling|swimming"
    ),
    "machine": _split(
        "car|washing machine|printer|laptop|phone|bicycle|tractor|camera|fridge|vacuum cleaner|drone|boiler|router"
        "|motorbike"
        "|lawn mower|dishwasher|television|steam engine|helicopter|submarine|microwave|toaster|generator"
    ),
    "illness": _split(
        "diabetes|asthma|the flu|malaria|a migraine|a cold|a fever|measles|back pain|a rash|cancer|a cough|hay fever"
        "|a sprained ankle|a sore throat|high blood pressure|a toothache|anxiety"
    ),
    "code": _split("Python|Java|Rust|C++|JavaScript|Go|Haskell|Ruby|SQL|PHP|Kotlin|Swift|Perl|Bash|TypeScript|Fortran"),
    "program": _split(
        "sorts a list|counts words|finds primes|reads a file|spells a word|draws a circle|adds two numbers"
        "|parses a date"
        "|sends an email|prints a story|downloads a page|reverses a string|computes a hash|extracts links from a page"
    ),
    "famous": _split(
        "Napoleon|Einstein|Mozart|Shakespeare|Cleopatra|Gandhi|Newton|Darwin|Picasso|Marie Curie|Beethoven|Caesar|Plato"
        "|Galileo|Lincoln|Churchill|Columbus|Aristotle|Van Gogh|Nelson Mandela|Buddha|Elvis|Chopin|Rembrandt"
    ),
    "work": _split(
        "Hamlet|Moby Dick|Titanic|Star Wars|Don Quixote|Faust|Dracula|The Odyssey|Casablanca|Macbeth|Jaws|Avatar|Frozen"
        "|Pinocchio|The Matrix|War and Peace|Peter Pan|King Kong|Robin Hood|Oliver Twist|The Lion King"
    ),
    "science": _split(
        "physics|chemistry|biology|geology|astronomy|economics|psychology|algebra|statistics|botany|medicine|philosophy"
        "|history|law|genetics|quantum mechanics|machine learning|linguistics|meteorology"
    ),
    "idea": _split(
        "love|freedom|justice|inflation|gravity|democracy|happiness|truth|electricity|evolution|courage|death|art"
        "|entropy|energy|jealousy|photosynthesis|money|beauty|war|peace|climate change|religion|grief|friendship"
    ),
    "part": _split("heart|liver|brain|knee|ear|stomach|eye|lung|skin|spine|shoulder|kidney|foot|tooth|thumb|elbow"),
    "tool": _split("hammer|saw|drill|wrench|knife|ladder|shovel|needle|brush|axe|screwdriver|compass|telescope|pump"),
    "instrument": _split("guitar|piano|violin|flute|drum|trumpet|cello|harp|organ|banjo|clarinet|saxophone|accordion"),
    "event": _split(
        "French Revolution|Second World War|moon landing|Cold War|Black Death|Great Fire of London"
        "|Industrial Revolution"
        "|fall of Rome|Boston Tea Party|Battle of Hastings|gold rush|First World War|fall of the Berlin Wall"
    ),
    "animal": _split(
        "whale|tiger|spider|eagle|shark|elephant|frog|bee|horse|owl|snake|penguin|bat|turtle|dolphin|crab"
    ),
    "plant": _split("rose|oak|cactus|fern|tulip|bamboo|orchid|pine|sunflower|ivy|moss|lavender|olive tree|palm tree"),
    "job": _split(
        "nurse|pilot|lawyer|baker|farmer|plumber|judge|sailor|painter|spy|engineer|actor|teacher|chef|dentist"
    ),
    "tongue": _split(
        "French|German|Spanish|Italian|Latin|Chinese|Japanese|Russian|Arabic|Hindi|Greek|Dutch|Polish|Turkish"
    ),
    "phrase": _split(
        "the cat sleeps|where is the station|I love my garden|we are late|the soup is cold|she has a red car|good luck"
        "|the train leaves at noon|my brother is a doctor|it rains every day|they went home|nobody knows the answer"
        "|him and me was there|she dont like it|we was going too the park|he have two dog|open the window"
    ),
    "metal": _split("gold|iron|water|oxygen|salt|sugar|glass|steel|carbon|helium|silver|oil|plastic|copper|hydrogen"),
    "planet": _split("Mars|Venus|Jupiter|Saturn|the Moon|the Sun|Mercury|Neptune|Pluto"),
    "media": _split(
        "photo|video|picture|song|film|map|logo|painting|podcast|website|poster|spreadsheet|diagram|voice message"
    ),
    "brand": _split("Google|Apple|Tesla|Amazon|Microsoft|IKEA|Toyota|Netflix|Nike|Samsung|Siemens|Nestle|Sony|Boeing"),
    "topic": _split(
        "spring|the sea|lost love|autumn leaves|my dog|the moon|old age|a broken heart|the city at night|winter"
        "|my mother"
        "|the future of work|school uniforms|solar power|social media|space travel|healthy food|the weather"
    ),
    "foreign": _split(
        "Bonjour, comment allez-vous?|Je ne parle pas anglais|Quelle heure est-il?|Merci beaucoup"
        "|Raconte-moi une histoire"
        "|Parlez-vous français?|Où est la gare?|Je voudrais un café|Guten Tag, wie geht es Ihnen?|Wo ist der Bahnhof?"
        "|Ich habe eine Frage|Erzähl mir eine Geschichte|Was kostet das?|Das Wetter ist heute schön"
        "|Ich komme aus Berlin"
        "|Sprechen Sie Deutsch?|Hola, me llamo Pedro|Dónde está el baño?|Buenos días a todos|Cuenta hasta diez"
        "|No entiendo nada|Qué hora es?|Tengo mucha hambre|Ciao, come stai?|Dove siamo?|Grazie mille|Non lo so"
        "|Goedemorgen allemaal|Ik spreek geen Engels|Tack så mycket|Obrigado pela ajuda|Bom dia|Dzień dobry"
        "|Zähle von eins bis zehn|Comptez de un à dix|Schreib mir einen Brief|Quanto custa este livro?"
    ),
}

# Clearly outside what the model can do, though the words sound familiar.
NEAR_MISSES = _split(
    "list {few} {group}|name {few} {group}|give me {few} {group}|tell me {few} {group}|write a list of {few} {group}"
    "|list some {group}|list {few} famous {group}|name the {few} best {group}|list {few} {group} of {country}"
    "|list the presidents of {country}|list all kings of {country}|list the rivers of {country}"
    "|list the films of {famous}"
    "|list the ingredients of {food}|list the symptoms of {illness}|list the parts of a {machine}"
    "|list the laws of {science}"
    "|list three reasons to visit {city}|list {few} reasons to learn {code}|list the chapters of {work}"
    "|list the best hotels in {city}|list the employees of {brand}|list the players in {sport} from {country}"
    "|make a list of everyone who lives in {city}|make a list of the wars of {country}|sort this list with {code}"
    "|list the files on my computer|list the songs about {idea}|list the advantages of {idea} over {idea}"
    "|spell check this text: {phrase}|check the spelling of this sentence: {phrase}|correct the spelling: {phrase}"
    "|cast a spell on {name}|which magic spell turns a {job} into a {animal}?|how do wizards spell in {work}?"
    "|why is the spelling of English so hard?|find the spelling mistakes in my essay about {topic}"
    "|count the words in this sentence: {phrase}|count the letters in this sentence: {phrase}|count in {tongue}"
    "|count the people in {city}|count the calories in {food}|count the stars near {planet}|count my money"
    "|count to {few} in {tongue}"
    "|how many words are in {work}?|count the vowels in {phrase}|who was Count Dracula?"
    "|count from one to {few} in {tongue}"
    "|count the {animal}s in {country}|count how often {famous} was in {city}|is it true that a {animal} can count?"
    "|what is the sum of all primes below {n}?|compute the sum of the squares up to {n}"
    "|add {metal} to {metal}, what happens?"
    "|divide {n} by {few}|what is {n} divided by {few}?|what is the square root of {n}?|what is {few} percent of {n}?"
    "|what is {n} to the power of {few}?|calculate the logarithm of {n}|is {n} a prime number?"
    "|what are the factors of {n}?"
    "|solve x squared plus {few} x equals {n}|integrate x to the power of {few}|what is the derivative of {few}x?"
    "|convert {n} miles to kilometres|convert {n} dollars to euros|what is {n} in binary?|write {n} in Roman numerals"
    "|what is the average of {n}, {n} and {n}?|what is the sine of {n}?|is {n} larger than {n}?"
    "|round {n} to the next hundred"
    "|who wrote the story of {work}?|what is the moral of {work}?|is the story of {work} true?|turn {work} into a comic"
    "|summarise the book {work}|summarise the film {work}|summarise the life of {famous}|summarise the {event}"
    "|summarise the history of {country}|summarise this {media}|summarise the news from {city}"
    "|summarise all of {science}"
    "|summarise the last match in {sport}|give me a summary of {work}|give me a summary of {science}"
    "|extract the audio from a video|extract the text from a {media}|extract {metal} from {metal}"
    "|extract the {metal} from my {machine}"
    "|extract the files from this archive|extract the colours of a {media}|how do I extract oil from a {plant}?"
    "|extract the passwords from this computer|extract the sound of a {instrument} from a {media}"
    "|write a letter to {famous}|write a love letter to {name}|write a letter to the king of {country}"
    "|post my letter to {name}"
    "|write a letter in {tongue}|how much is a stamp for a letter to {country}?|translate my letter into {tongue}"
    "|write an invoice for {name}|pay my invoice from {firm}|send an invoice to {firm}"
    "|how do I write an invoice in {country}?"
    "|print an invoice with {code}|which software makes invoices for a {job}?|cancel my order at {firm}"
    "|order {food} for me"
    "|order a {machine} from {brand}|place an order for {few} pizzas|track my order from {brand}"
    "|write a report on {idea}"
    "|write a report about the economy of {country}|report a crime in {city}|what is the weather report for {city}?"
    "|write a song about {name}|write a poem about {name}|write a play about {name}|sing a song about {topic}"
    "|classify this {media}|classify the {animal}s of {country}|write a {code} program that {program}"
    "|write a function in {code} that {program}|write a regex that {program}|read my {media} aloud"
    "|read the book {work} to me"
    "|read my mind|read my palm|read the news from {country}|read this {media} and describe it|fill in my tax report"
)

OPEN_ENDS = _split(
    # facts
    "who was {famous}?|who discovered {metal}?|who rules {country}?|who invented the {machine}?|who wrote {work}?"
    "|who won the cup in {sport}?|who is the boss of {brand}?|what is the capital of {country}?|what is {idea}?"
    "|what is {science}?|what is {metal} made of?|what do people eat in {country}?|what is the population of {city}?"
    "|what does a {job} do?|what does a {animal} eat?|what happened in {city} in {year}?|what caused the {event}?"
    "|when was {famous} born?|when did {famous} die?|when did the {event} start?|when was {brand} founded?"
    "|when does a {plant} bloom?"
    "|where is {country}?|where is {city}?|where was {famous} buried?|where does a {animal} live?"
    "|where can I buy a {machine}?"
    "|why is the sky blue?|why does {metal} melt?|why is {idea} important?|why do {animal}s migrate?"
    "|why is {city} so famous?"
    "|why did the {event} happen?|how far is {planet}?|how tall is the highest tower in {city}?"
    "|how does a {machine} work?"
    "|how fast is a {animal}?|how heavy is a {animal}?|how long does it take to fly from {city} to {city}?"
    "|how does the {part} work?|how old is {city}?|which river flows through {city}?"
    "|which is larger, {country} or {country}?"
    "|which {animal} is the fastest?|which metal is harder, {metal} or {metal}?|is {planet} bigger than {planet}?"
    "|does it snow in {country}?|did {famous} ever visit {city}?|was {famous} rich?|are {animal}s dangerous?"
    "|what is the currency of {country}?|what language do they speak in {country}?|how many people speak {tongue}?"
    "|tell me about {famous}|tell me about {country}|tell me about {science}|tell me about the {event}"
    "|explain {idea}|explain {science} to a child|explain how a {machine} works|explain the rules of {sport}"
    "|explain {work}"
    # code
    "|how do I install {code}?|fix the bug in my {code} code|what is a pointer in {code}?|is {code} faster than {code}?"
    "|convert this script from {code} to {code}|debug my {code} program|which editor is best for {code}?"
    "|my {code} code crashes"
    "|how do I write a loop in {code}?|write unit tests in {code}|set up a web server in {code}|how do I use git?"
    # languages and texts
    "|translate {phrase} into {tongue}|translate this into {tongue}: {phrase}|how do you say {phrase} in {tongue}?"
    "|what does this mean in {tongue}: {phrase}|teach me {tongue}|rewrite this sentence: {phrase}"
    "|make this more formal: {phrase}"
    "|correct the grammar: {phrase}|is this correct English: {phrase}|put this in the past tense: {phrase}"
    "|what rhymes with {metal}?|what is the opposite of {idea}?|what is another word for {idea}?|define {idea}"
    "|what is the plural of {animal}?|where does the word {instrument} come from?|finish this sentence: {phrase}"
    "|write a poem about {topic}|write a song about {topic}|write an essay about {topic}"
    "|write an email to my boss about {topic}"
    "|write a haiku about {topic}|write a speech about {topic}|write my homework about {science}"
    "|write a rap about {animal}s"
    "|write a tweet about {topic}|write a film script about {famous}|write a slogan for {brand}"
    "|write a blog post about {topic}"
    "|write my CV as a {job}|write a review of {work}|write a business plan for a {job}"
    # life
    "|how do I cook {food}?|give me a recipe for {food}|how long do I bake {food}?|is {food} healthy?"
    "|what wine goes with {food}?"
    "|can I freeze {food}?|what can I use instead of {food}?|where do I get good {food} in {city}?"
    "|I burned the {food}, what now?"
    "|I have {illness}, what should I do?|how is {illness} treated?|what are the signs of {illness}?|my {part} hurts"
    "|is {illness} dangerous?|which medicine helps against {illness}?|should I see a doctor about my {part}?"
    "|my {part} is swollen"
    "|can I sue my neighbour?|do I need a lawyer in {country}?|how do I get a visa for {country}?"
    "|is it legal to own a {animal}?"
    "|should I buy shares of {brand}?|how much tax do I pay in {country}?|should I invest in {metal}?"
    "|how do I get a loan?"
    "|how much does a {job} earn?|how much does a {machine} cost?|what is the price of {metal}?"
    "|should I become a {job}?"
    "|my {machine} is broken|how do I repair a {machine}?|how do I clean a {machine}?|how do I use a {tool}?"
    "|how do I learn {sport}?"
    "|how do I tune a {instrument}?|teach me to play the {instrument}|how do I grow a {plant}?"
    "|how do I water a {plant}?"
    "|how do I build a {machine}?|how do I train a {animal}?|how do I get to {city}?|book a flight to {city}"
    "|book a hotel in {city}"
    "|plan a trip to {country}|what should I see in {city}?|call {name} for me|send a message to {name}"
    "|set an alarm for seven"
    "|remind me to call {name}|turn off the lights|play a song on the {instrument}|play {sport} with me"
    "|open the {media}"
    "|what should I wear today?|what present should I buy for {name}?|how do I win {name} back?"
    "|is {name} in love with me?"
    # news, views, pictures, roles
    "|what is the weather in {city}?|will it rain in {city} tomorrow?|what is the news from {country}?"
    "|what is the score in {sport}?"
    "|who will win the election in {country}?|is {brand} a good company?|do you believe in {idea}?"
    "|what do you think about {idea}?"
    "|what do you think of {famous}?|is {country} better than {country}?|which is better, {sport} or {sport}?"
    "|is {work} worth seeing?"
    "|what is the best {machine}?|which party should I vote for?|is {idea} more important than {idea}?"
    "|compare {code} and {code}"
    "|compare {famous} with {famous}|what is the difference between {idea} and {idea}?|compare a {tool} with a {tool}"
    "|draw a {animal}|draw a picture of {famous}|paint a {plant}|make a {media} of {city}"
    "|show me a {media} of a {animal}"
    "|design a logo for {brand}|edit my {media}|play the role of {famous}|pretend to be a {job}"
    "|pretend that you are a {animal}"
    "|act as a {job} in {city}|speak like {famous}|you are now a {job}|imagine that you are {famous}"
    "|what is the meaning of life?|is there a god?|what happens after death?|do we have free will?"
    "|can a {machine} think?"
    "|what came first, the {animal} or the egg?|is {idea} an illusion?|what is the nature of {idea}?|does {idea} exist?"
    # plain statements
    "|{country} is a large country|the {machine} in {city} stopped working|my cousin is a {job} in {city}"
    "|I saw a {animal} in {city}"
    "|{famous} never played the {instrument}|a {animal} bit my {part}|the price of {metal} is rising"
    "|{brand} bought {brand}"
    "|nobody understands {science}|I prefer {sport} to {sport}|I am learning {science}|{food} tastes better than {food}"
    "|the {event} changed {country}|she plays the {instrument} like {famous}|my {plant} is dying"
    "|I lost my {tool} in {city}"
    "|{name} wants to visit {country}|{name} cannot stand {food}|{name} bought a {machine} and a {tool}"
    "|hack into {brand}|predict the next number in the lottery|solve this riddle about a {animal}"
    "|give me the phone number of {name}"
)

FRONTS = ("",) * 14 + _split("Hey, |Hi, |Hello, |So, |OK, |Quick one: |Now: |Next: ")
BEFORE = _split(
    "I am a {job} from {city}.|I need this for school.|My boss wants to know.|We talked about {science} today."
    "|I was in {country} last year.|My friend {name} asked me.|I read something about {idea}.|It is about {topic}."
    "|I have a {machine} and a {tool}.|This is for my course in {science}.|I like {food} and {sport}."
)
AFTER = _split(
    "Thanks!|Thank you in advance.|It is urgent.|Keep it short.|Answer in one sentence.|I need it by Monday.|Be honest."
    "|Give me all the details.|I really want to know.|My friend {name} needs it too.|Use simple words."
    "|Explain every step."
)
SALAD = "country food sport machine code famous work science idea tool animal brand".split()
WORDS = tuple(word for slot in SALAD for word in SLOTS[slot])


def _slot(draw: Draw, slot: str) -> str:
    numbers = {"n": (13, 9999), "few": (3, 40), "year": (1200, 2020)}
    if slot in numbers:
        return str(draw.integer(*numbers[slot]))
    if slot == "name":
        return first_name(draw)
    return firm(draw) if slot == "firm" else draw.choose(SLOTS[slot])


def _fill(draw: Draw, pattern: str) -> str:
    used: set[str] = set()

    def once(match: re.Match[str]) -> str:
        word = _slot(draw, match[1])
        while word in used:
            word = _slot(draw, match[1])
        used.add(word)
        return word

    text = re.sub(r"{(\w+)}", once, pattern)
    return re.sub(r"\b([Aa]) (?=[aeiouAEIOU])", r"\1n ", text)


def _request(draw: Draw, patterns: tuple[str, ...]) -> str:
    """Return a request, one time in four between sentences that change nothing."""
    pattern = draw.choose(patterns)
    if not draw.chance(0.25):
        return loosen(draw, _fill(draw, pattern), FRONTS)
    told = [_fill(draw, draw.choose(BEFORE)) for _ in range(draw.integer(0, 2))]
    asked = _fill(draw, pattern)
    asked = asked[:1].upper() + asked[1:] + ("" if asked.endswith("?") else ".")
    closing = [_fill(draw, draw.choose(AFTER)) for _ in range(draw.integer(0 if told else 1, 2))]
    return " ".join(dict.fromkeys([*told, asked, *closing]))


def _near_miss(draw: Draw) -> str:
    return _request(draw, NEAR_MISSES)


def _open_end(draw: Draw) -> str:
    return _request(draw, OPEN_ENDS)


def _word_salad(draw: Draw) -> str:
    return loosen(draw, " ".join(draw.choose(WORDS) for _ in range(draw.integer(1, 10))))


def _gibberish(draw: Draw) -> str:
    letters = draw.choose(("abcdefghijklmnopqrstuvwxyz", "asdfghjkl", "qwertyuiop", "bcdfghklmnprst"))
    words = ("".join(draw.choose(letters) for _ in range(draw.integer(3, 9))) for _ in range(draw.integer(1, 4)))
    return loosen(draw, " ".join(words))


def _foreign(draw: Draw) -> str:
    said = [draw.choose(SLOTS["foreign"]) for _ in range(draw.integer(1, 2))]
    return loosen(draw, said[0] if len(said) == 1 or said[0] == said[1] else " ".join(said))


KINDS = (
    # what is asked, how often
    (_near_miss, 36),
    (_open_end, 48),
    (_word_salad, 7),
    (_gibberish, 5),
    (_foreign, 4),
)


def unknown(draw: Draw) -> Sample:
    make = draw.random.choices([kind for kind, _ in KINDS], [weight for _, weight in KINDS])[0]
    return Sample("unknown", (Turn(draw.fresh(lambda: flatten(draw, make(draw))), APOLOGY),))
