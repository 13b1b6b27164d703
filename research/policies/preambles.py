"""Neutral text that a server may put before each chunk while computing it."""

PREAMBLES = {
    "valley": "The river rises in the hills north of the town and flows south for about ninety kilometres before it "
    "reaches the sea. Its valley has been farmed since early times, and a road and a railway line connect the villages "
    "along its banks.\n\n",
    "short": "The river rises in the hills north of the town and flows south for about ninety kilometres "
    "before it reaches the sea.\n\n",
    "list": "The meeting begins at nine. Copper conducts heat well. She bought three apples and a loaf of bread. Most "
    "birds sleep at night. The old bridge was painted green last year. Rain is expected in the north.\n\n",
    "instruction": "The following text is one of several documents that were collected for reference. Read it "
    "carefully, note the names, dates and places that it mentions, and keep in mind that other documents may come "
    "before and after it.\n\n",
}
