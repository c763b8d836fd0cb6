"""Numbered lists of n things of a kind. Some lengths are kept from training altogether."""

from __future__ import annotations

from collections.abc import Sequence

from demo_corpus.phrasing import number, request
from demo_corpus.sample import Draw, Sample, Split, Turn

LONGEST = 20
HELD_OUT_LENGTHS = (6, 11, 17)
TRAINED_LENGTHS = tuple(n for n in range(1, LONGEST + 1) if n not in HELD_OUT_LENGTHS)

THINGS: dict[str, tuple[str, ...]] = {
    kind: tuple(items.split(", "))
    for kind, items in {
        "fruits": "apple, banana, orange, pear, grape, cherry, plum, peach, mango, lemon, melon, kiwi, fig, date, "
        "lime, papaya, apricot, coconut, strawberry, pineapple",
        "vegetables": "carrot, potato, tomato, onion, cabbage, pea, bean, spinach, pepper, garlic, lettuce, cucumber, "
        "pumpkin, radish, leek, celery, broccoli, turnip, beetroot, mushroom",
        "animals": "cat, dog, horse, cow, sheep, goat, lion, tiger, bear, wolf, fox, rabbit, mouse, elephant, monkey, "
        "deer, camel, zebra, giraffe, pig",
        "birds": "eagle, sparrow, crow, owl, robin, swan, duck, goose, parrot, pigeon, hawk, stork, penguin, gull, "
        "finch, raven, turkey, ostrich, heron, swallow",
        "fish": "salmon, trout, tuna, cod, carp, herring, shark, eel, perch, pike, sardine, mackerel, bass, halibut, "
        "catfish, plaice, sole, haddock, anchovy, swordfish",
        "insects": "ant, bee, wasp, fly, beetle, butterfly, moth, mosquito, cricket, grasshopper, dragonfly, ladybird, "
        "termite, flea, locust, mantis, hornet, firefly, cicada, earwig",
        "colours": "red, blue, green, yellow, orange, purple, black, white, brown, pink, grey, gold, silver, violet, "
        "turquoise, beige, cream, scarlet, navy, olive",
        "countries": "France, Germany, Italy, Spain, Portugal, Norway, Sweden, Finland, Poland, Greece, Turkey, Egypt, "
        "Kenya, India, China, Japan, Canada, Mexico, Brazil, Chile",
        "cities": "London, Paris, Rome, Madrid, Berlin, Vienna, Prague, Oslo, Athens, Cairo, Delhi, Tokyo, Sydney, "
        "Toronto, Boston, Chicago, Lima, Moscow, Dublin, Lisbon",
        "rivers": "Nile, Amazon, Danube, Rhine, Thames, Volga, Ganges, Congo, Mekong, Loire, Seine, Elbe, Tiber, Po, "
        "Indus, Niger, Yukon, Tagus, Ebro, Oder",
        "sports": "football, tennis, golf, hockey, cricket, rugby, boxing, rowing, sailing, swimming, running, "
        "cycling, skiing, skating, judo, karate, archery, fencing, volleyball, basketball",
        "tools": "hammer, saw, drill, screwdriver, wrench, pliers, axe, chisel, file, spade, rake, shovel, ladder, "
        "level, clamp, ruler, plane, crowbar, hoe, trowel",
        "instruments": "piano, guitar, violin, flute, drum, trumpet, cello, harp, clarinet, organ, trombone, banjo, "
        "oboe, tuba, saxophone, viola, bassoon, accordion, mandolin, lute",
        "jobs": "teacher, doctor, nurse, farmer, baker, driver, pilot, cook, lawyer, painter, plumber, tailor, judge, "
        "sailor, dentist, engineer, gardener, butcher, barber, writer",
        "trees": "oak, pine, birch, maple, willow, elm, ash, beech, cedar, poplar, spruce, palm, chestnut, larch, "
        "alder, hazel, cypress, linden, fir, yew",
        "flowers": "rose, tulip, lily, daisy, violet, iris, poppy, orchid, lavender, sunflower, jasmine, carnation, "
        "daffodil, peony, marigold, dahlia, crocus, lilac, pansy, snowdrop",
        "drinks": "water, tea, coffee, milk, juice, lemonade, cocoa, beer, wine, cider, soda, syrup, punch, "
        "cola, smoothie, buttermilk, ginger ale, tonic, mead, broth",
        "clothes": "shirt, coat, hat, scarf, glove, sock, shoe, boot, skirt, dress, jacket, sweater, belt, tie, cap, "
        "vest, apron, cloak, sandal, trousers",
        "body parts": "head, hand, foot, arm, leg, nose, ear, eye, mouth, neck, knee, elbow, finger, toe, back, "
        "shoulder, chin, heart, wrist, ankle",
        "pieces of furniture": "table, chair, bed, desk, sofa, shelf, cupboard, stool, bench, wardrobe, drawer, lamp, "
        "mirror, bookcase, armchair, cabinet, cradle, chest, couch, dresser",
        "vehicles": "car, bus, train, bicycle, tram, truck, van, boat, ship, plane, taxi, tractor, scooter, ferry, "
        "helicopter, motorcycle, ambulance, sled, canoe, wagon",
        "school subjects": "mathematics, history, geography, physics, chemistry, biology, music, art, English, French, "
        "Latin, sport, economics, drama, religion, philosophy, computing, law, politics, astronomy",
        "shapes": "circle, square, triangle, rectangle, oval, star, cube, sphere, cone, cylinder, pyramid, diamond, "
        "hexagon, pentagon, octagon, crescent, heart, cross, spiral, ring",
        "kitchen items": "spoon, fork, knife, plate, cup, bowl, pot, pan, kettle, oven, glass, jug, tray, whisk, "
        "sieve, toaster, ladle, grater, mug, teapot",
    }.items()
}

_ORDERS = (
    "List {n} {kind}",
    "Name {n} {kind}",
    "Give me {n} {kind}",
    "Write a list of {n} {kind}",
    "Make a list of {n} {kind}",
    "Give me a list of {n} {kind}",
    "Tell me {n} {kind}",
    "Write down {n} {kind}",
    "List {n} different {kind}",
    "Name {n} different {kind}",
)


def listed(items: Sequence[str], start: int = 1) -> str:
    return "\n".join(f"{index}. {item}" for index, item in enumerate(items, start))


def list_length(draw: Draw) -> int:
    return draw.choose(TRAINED_LENGTHS if draw.split is Split.TRAIN else HELD_OUT_LENGTHS)


def list_order(draw: Draw, kind: str, n: int) -> str:
    counted = kind if n > 1 else singular(kind)
    return request(draw, draw.choose(_ORDERS[: 8 if n == 1 else None]).format(n=number(draw, n), kind=counted))


def singular(kind: str) -> str:
    """Return the phrase for a single thing of a kind: "1 fruit", "1 piece of furniture"."""
    irregular = {"countries": "country", "cities": "city", "fish": "fish", "clothes": "piece of clothing"}
    head, *rest = kind.split(" of ")
    return irregular.get(kind) or " of ".join([head.removesuffix("s"), *rest])


def list_things(draw: Draw) -> Sample:
    kind, n = draw.choose(tuple(THINGS)), list_length(draw)
    return Sample("list", (Turn(list_order(draw, kind, n), listed(THINGS[kind][:n])),), asked=n)
