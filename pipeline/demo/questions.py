"""Instructions for the chat demo: templates filled with subjects, e.g. "Give three tips for someone new to sewing."

All texts are our own. The demo's instructions and those for training an adapter (`make_training_questions`) come from
different templates, so the demo never shows an adapter what it was trained on.
"""

import random
from collections.abc import Iterator

from pipeline.config.tree import ConfigError

# Subjects.
THINGS = (
    "a bicycle, a compass, a rainbow, a volcano, an eclipse, a glacier, a vaccine, a magnet, a battery, a bridge, a "
    "camera, a desert, a dictionary, a forest, a harbour, a lighthouse, a map, a microscope, a museum, a planet, a "
    "recipe, a river, a satellite, a telescope, a thermometer, a tide, a train, a tunnel, a virus, a windmill, "
    "an earthquake, an island, an orchestra, an oven, a clock, a coral reef, a honeybee, a library, a passport, a sail"
).split(", ")
TOPICS = (
    "gravity, photosynthesis, electricity, democracy, inflation, recycling, evolution, friendship, memory, sleep, "
    "erosion, migration, nutrition, insurance, gardening, astronomy, pottery, archaeology, chess, jazz, weather, "
    "cryptography, magnetism, hibernation, fermentation, justice, probability, translation, architecture, "
    "agriculture, compound interest, machine learning, climate change, public transport, renewable energy, "
    "freedom of speech, supply and demand, the water cycle, the immune system, the solar system"
).split(", ")
HOBBIES = (
    "sewing, running, painting, baking bread, playing the piano, learning Spanish, growing tomatoes, public speaking, "
    "bird watching, saving money, cycling to work, writing a diary, photography, camping, swimming, juggling, "
    "knitting, cooking for a family, playing chess, keeping bees, hiking in winter, fishing, singing in a choir, "
    "drawing faces, repairing furniture, meditating, volunteering, programming in Python, reading faster, "
    "growing herbs indoors, training a puppy, travelling alone, moving to a new city, preparing for an exam, "
    "hosting a dinner, making cheese, planning a budget, studying history, taking notes, riding a horse"
).split(", ")
PAIRS = (
    "a frog and a toad, a city and a town, butter and margarine, a comet and a meteor, a novel and a short story, "
    "speed and velocity, weather and climate, a violin and a viola, a crocodile and an alligator, jam and jelly, "
    "a debit card and a credit card, a lake and a pond, tea and coffee, a boat and a ship, a simile and a metaphor, "
    "an island and a peninsula, mass and weight, a rabbit and a hare, fog and smoke, an orchestra and a band, "
    "a password and a passphrase, copper and bronze, an herb and a spice, a mayor and a governor, a road and a street, "
    "a biography and an autobiography, heat and temperature, a canal and a river, a fruit and a vegetable, "
    "a moth and a butterfly, an opinion and a fact, sand and soil, a judge and a lawyer, cement and concrete, "
    "a loan and a gift, a hill and a mountain, a play and a film, wool and cotton, an atom and a molecule, "
    "a nurse and a doctor"
).split(", ")
REQUESTS = (
    "move a meeting to Friday, thank a colleague for help, ask for a refund, invite neighbours to a party, "
    "apologise for a late delivery, ask a teacher for feedback, cancel a subscription, report a broken lamp, "
    "congratulate a friend on a new job, ask for a day off, recommend a restaurant, remind a team of a deadline, "
    "decline an invitation, introduce a new employee, ask a landlord to fix a tap, confirm an appointment, "
    "ask a librarian about a book, offer to help with a project, announce a holiday, request an invoice, "
    "ask for directions to an office, welcome a new member to a club, report a lost parcel, suggest a lunch menu, "
    "ask for a longer deadline, thank a host for dinner, propose a walk in the park, ask about opening hours, "
    "share the notes of a meeting, book a table for six, ask for a price list, wish someone a quick recovery, "
    "sell a used bicycle, ask to borrow a ladder, explain a delay of a train, invite a speaker to a school, "
    "ask for a reference, praise a good service, order more printer paper, say goodbye to a team"
).split(", ")
KINDS: tuple[tuple[str, list[str]], ...] = (
    ("What is {}? Answer in two sentences.", THINGS),
    ("Explain to a ten-year-old how {} works or comes about.", THINGS),
    ("Write a riddle whose answer is {}.", THINGS),
    ("Write a short poem about {}.", THINGS),
    ("Tell a short story in which {} is important.", THINGS),
    ("Name three facts about {}.", TOPICS),
    ("Explain {} in simple words.", TOPICS),
    ("Why is {} important? Give two reasons.", TOPICS),
    ("Write three quiz questions about {}.", TOPICS),
    ("Suggest a title and a first sentence for an essay on {}.", TOPICS),
    ("Give three tips for someone new to {}.", HOBBIES),
    ("Make a plan of five steps for {}.", HOBBIES),
    ("What do I need for {}? Make a short list.", HOBBIES),
    ("Name one advantage and one disadvantage of {}.", HOBBIES),
    ("What mistakes do people make when they start {}?", HOBBIES),
    ("What is the difference between {}?", PAIRS),
    ("Compare {} in one sentence.", PAIRS),
    ("How would you explain the difference between {} to a visitor?", PAIRS),
    ("Write a short, polite email to {}.", REQUESTS),
    ("Write a friendly text message to {}.", REQUESTS),
)
# Other tasks on the same subjects, for training.
TRAINING_KINDS: tuple[tuple[str, list[str]], ...] = (
    ("Describe {} to someone who has never seen one.", THINGS),
    ("What would the world be like without {}?", THINGS),
    ("Who might need {}, and why?", THINGS),
    ("List four words that come to mind when you think of {}.", THINGS),
    ("Write the first lines of a children's book about {}.", THINGS),
    ("What is the most surprising thing about {}?", THINGS),
    ("Write a short advertisement for {}.", THINGS),
    ("Give a one-sentence definition of {}.", TOPICS),
    ("What do people often get wrong about {}?", TOPICS),
    ("How does {} affect everyday life?", TOPICS),
    ("Give an example of {}.", TOPICS),
    ("Write a short dialogue between a teacher and a pupil about {}.", TOPICS),
    ("Summarise {} in three bullet points.", TOPICS),
    ("Which question about {} would you ask an expert?", TOPICS),
    ("How much time does {} take in a week?", HOBBIES),
    ("Convince a friend to try {}.", HOBBIES),
    ("How can I stay motivated for {}?", HOBBIES),
    ("What does {} teach you?", HOBBIES),
    ("Is {} expensive? Explain briefly.", HOBBIES),
    ("Describe a first lesson in {}.", HOBBIES),
    ("Which of them is older or more common: {}?", PAIRS),
    ("Name two things that they have in common: {}.", PAIRS),
    ("Write two sentences with these words: {}.", PAIRS),
    ("How can I remember which is which: {}?", PAIRS),
    ("Write a formal letter to {}.", REQUESTS),
    ("What should I keep in mind when I {}?", REQUESTS),
    ("Give me a subject line for an email to {}.", REQUESTS),
    ("Write a note of one sentence to {}.", REQUESTS),
)


def make_questions(rows: int, seed: int = 0) -> Iterator[dict[str, str]]:
    """Yields `id` and `prompt` of `rows` distinct instructions; ConfigError for more than the 800 there are."""
    every = [kind.format(subject) for kind, subjects in KINDS for subject in subjects]
    if not 1 <= rows <= len(every):
        raise ConfigError("--rows", f"must be from 1 to {len(every)}, got {rows}")
    random.Random(seed).shuffle(every)
    for number, prompt in enumerate(every[:rows]):
        yield {"id": f"q{number:04d}", "prompt": prompt}


def make_training_questions(seed: int = 0) -> Iterator[dict[str, str]]:
    """Yields `id` and `prompt` of the 1,120 instructions for training, none of which the demo asks."""
    every = [kind.format(subject) for kind, subjects in TRAINING_KINDS for subject in subjects]
    random.Random(seed).shuffle(every)
    for number, prompt in enumerate(every):
        yield {"id": f"t{number:04d}", "prompt": prompt}
