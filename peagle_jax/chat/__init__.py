"""Conversations: what a chat template makes of them, and which of it the assistant wrote.

rendering.py        a chat template, rendered so that it is known where every message ends up
pieces.py           pieces of messages' texts, with marks around them
trained_spans.py    the assistant's own text in a rendered conversation
encoding.py         documents as token ids, with the tokens that a loss reads
"""
