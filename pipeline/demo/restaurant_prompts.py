"""Synthetic prompts for the demo: attributes of restaurants in the format of the E2E NLG challenge.

Names and places are drawn from our own word lists; no E2E data is in the project. `vary_names` puts such names into E2E
training pairs, so that a small model learns to copy names rather than to memorise the few of the data set.
"""

import random
import re
from collections.abc import Iterable, Iterator

FIRST = (
    "Amber Ash Autumn Birch Black Blue Brass Bright Broken Bronze Cedar Cherry Clever Cloud Copper Coral Crooked "
    "Crystal Dancing Drifting Dusty Early Elder Emerald Fern Fiddler's Flying Forest Foxglove Frosty Garden "
    "Gilded Ginger Glass Golden Grey Happy Hazel Hidden Hollow Honey Iron Ivory Ivy Jade Jolly Juniper Lantern "
    "Lavender Lemon Lilac Linden Little Lone Lucky Maple Marble Meadow Mellow Merry Midnight Misty Moonlit Mossy "
    "Noble Northern Oak Old Olive Opal Orchard Painted Paper Pearl Pepper Pine Plum Poppy Proud Quiet Rambling "
    "Red River Roaming Rosemary Royal Rusty Saffron Salty Scarlet Secret Silent Silver Singing Sleepy Smoky Snowy "
    "Southern Spotted Stone Summer Sunny Tall Thirsty Thistle Velvet Violet Wandering Western Whistling White "
    "Wild Willow Winter Wooden Yellow"
).split()
SECOND = (
    "Anchor Antler Apple Arch Badger Barn Barrel Basket Bear Bell Bicycle Boat Bridge Brook Cabin Candle Castle "
    "Cellar Chimney Clock Corner Cottage Crane Crow Crown Deer Dragon Duck Eagle Elephant Falcon Feather Fern "
    "Finch Fish Fork Fox Garden Gate Goose Griffin Grove Hare Harbour Hearth Hedgehog Heron Hill Horse House Inn "
    "Kettle Key Kitchen Ladle Lamb Lantern Leaf Lighthouse Lion Magpie Mill Moon Nest Oak Orchid Otter Oven Owl "
    "Pantry Parrot Peacock Pear Pelican Pheasant Pigeon Plate Pony Pot Quill Rabbit Raven River Robin Rooster "
    "Rose Salmon Saucer Ship Shore Spoon Sparrow Squirrel Stag Star Starling Stone Stove Swan Table Teapot Tiger "
    "Tower Tree Trout Turtle Valley Well Wheel Whale Wolf Wren Yard"
).split()
SUFFIX = ("Bistro", "Diner", "House", "Kitchen", "Rooms", "Tavern", "Tea Rooms", "Terrace")
PLACES = (
    "Bridge",
    "Church",
    "Gallery",
    "Gardens",
    "Hall",
    "Hotel",
    "Library",
    "Market",
    "Museum",
    "Park",
    "Station",
    "Theatre",
)

# (attribute, probability, values) of the E2E challenge
ATTRIBUTES: tuple[tuple[str, float, tuple[str, ...]], ...] = (
    ("eatType", 0.7, ("pub", "restaurant", "coffee shop")),
    ("food", 0.8, ("Chinese", "English", "Fast food", "French", "Indian", "Italian", "Japanese")),
    ("priceRange", 0.6, ("cheap", "moderate", "high", "less than £20", "£20-25", "more than £30")),
    ("customer rating", 0.6, ("low", "average", "high", "1 out of 5", "3 out of 5", "5 out of 5")),
    ("area", 0.6, ("riverside", "city centre")),
    ("familyFriendly", 0.6, ("yes", "no")),
)


def restaurant_name(rng: random.Random) -> str:
    """One of about 23,000 names, e.g. `The Copper Kettle`."""
    name = f"{rng.choice(FIRST)} {rng.choice(SECOND)}"
    style = rng.random()
    if style < 0.5:
        return f"The {name}"
    return name if style < 0.8 else f"{name.split()[0]} {rng.choice(SUFFIX)}"


def place_name(rng: random.Random) -> str:
    """A landmark for the attribute `near`, e.g. `Willow Station`."""
    return f"{rng.choice(FIRST)} {rng.choice(PLACES)}" if rng.random() < 0.6 else restaurant_name(rng)


def make_prompts(num_rows: int, seed: int = 0) -> Iterator[dict[str, str]]:
    """Yields `num_rows` distinct rows {id, prompt, name}, determined by `seed`."""
    rng = random.Random(seed)
    seen: set[str] = set()
    while len(seen) < num_rows:
        name = restaurant_name(rng)
        parts = [f"name[{name}]"]
        parts += [f"{key}[{rng.choice(values)}]" for key, share, values in ATTRIBUTES if rng.random() < share]
        if rng.random() < 0.5 or len(parts) < 3:  # the challenge gives three attributes or more
            parts.append(f"near[{place_name(rng)}]")
        prompt = ", ".join(parts)
        if len(parts) < 3 or prompt in seen:
            continue
        seen.add(prompt)
        yield {"id": f"demo-{len(seen) - 1:05d}", "prompt": prompt, "name": name}


def vary_names(pairs: Iterable[tuple[str, str]], share: float, seed: int) -> Iterator[tuple[str, str]]:
    """The (prompt, response) pairs; in a `share` of them, name and neighbour are replaced on both sides."""
    rng = random.Random(seed)
    for prompt, response in pairs:
        if rng.random() < share:
            for key, make in (("name", restaurant_name), ("near", place_name)):
                found = re.search(rf"\b{key}\[(.*?)\]", prompt)
                if found and found[1] in response:
                    new = make(rng)
                    prompt = prompt.replace(f"{key}[{found[1]}]", f"{key}[{new}]")
                    response = response.replace(found[1], new)
        yield prompt, response
