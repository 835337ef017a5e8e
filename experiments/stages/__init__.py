"""What runs share, one file per stage: text, target, answers, hidden states and prompts.

`cache.py` makes each stage once and finds it again by the key of its configuration and its code.
"""
