"""The prompts of the real models' goldens: short and long, chat, code, lists and other languages.

A string is completed as it is; a list of messages goes through the model's chat template.
"""

Message = dict[str, str]

CODE = '''def moving_average(values: list[float], width: int) -> list[float]:
    """Average every run of `width` neighbouring values."""
    if width < 1:
        raise ValueError("width must be positive")
'''

LIST = """Things to pack for a week by the sea:

1. Two towels, one of them large
2. Sun cream, factor 30
3. A book of 400 pages
4."""

HARBOUR = """The harbour at Ness was built in 1787 for eleven boats, and for a hundred years it \
never held more than twelve. The twelfth belonged to a widow who refused to sell it, refused to \
sail it, and painted it blue every spring. Fishermen tied up on either side of her boat as they \
would on either side of a rock. When the railway came, the price of herring doubled within two \
seasons, and men who had never owned anything larger than a spade began to order boats from the \
yards in the south. The harbour filled. By the summer of 1891 there were forty hulls inside a wall \
made for eleven, and on a windy night the sound of them grinding together could be heard at the \
church, a mile up the hill.

The council met four times that year about the matter of the blue boat. At the first meeting it \
was agreed that the boat should be moved. At the second it was agreed that nobody present would be \
the one to move it. At the third, the minister read aloud from the founding charter, which gave \
every family of the parish one place at the wall for as long as a member of it should live, and \
said nothing at all of sailing. At the fourth, the widow came herself. She was eighty-three. She \
listened to the speeches with her hands folded, and when the last of them was over she stood up \
and said that she would"""


def ship_log(num_days: int) -> str:
    """A log of numbered days, longer than any attention window or segment of the small models."""
    winds = ["north", "north-east", "east", "south-east", "south", "south-west", "west"]
    seas = ["calm", "slight", "moderate", "rough"]
    lines = [
        f"Day {day}: wind {winds[day * 3 % 7]}, sea {seas[day * day % 4]}, "
        f"{60 + day * 37 % 83} miles made good."
        for day in range(1, num_days + 1)
    ]
    return "\n".join(lines) + f"\nDay {num_days + 1}:"


NAMED_PROMPTS: list[tuple[str, str | list[Message]]] = [
    ("short", "The capital of France is"),
    (
        "question",
        [{"role": "user", "content": "What is the difference between weather and climate?"}],
    ),
    ("code", CODE),
    ("list", LIST),
    ("text", HARBOUR),
    (
        "dialogue",
        [
            {"role": "system", "content": "You answer in one short sentence."},
            {"role": "user", "content": "Why is the sky blue?"},
            {"role": "assistant", "content": "Air scatters blue light more than red light."},
            {"role": "user", "content": "And why is it red in the evening?"},
        ],
    ),
    ("german", "Der alte Müller stand früh auf, öffnete die Tür seiner Mühle und"),
    ("japanese", "日本の四季は、春、夏、秋、冬です。春には"),
    ("json", '{"name": "Ada", "born": 1815, "fields": ["mathematics", "computing"], "friends": ['),
    ("log", ship_log(30)),
]

LOGPROB_PROMPT = (
    "A library is not a luxury but one of the necessities of life, said the old teacher, and then "
    "she closed the door, put the key under the mat, and walked slowly home through the rain."
)
