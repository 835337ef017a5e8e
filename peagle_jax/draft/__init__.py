"""Draft heads: P-EAGLE and EAGLE-3 are one module, run in two ways.

head.py          `HeadConfig` and `DraftHead`, the whole head
fusion.py        aux hidden states of the target -> one vector for each token
placeholders.py  what P-EAGLE reads where tokens do not exist yet; every design of it
draft_vocab.py   a reduced draft vocabulary, and its tables d2t and t2d
init.py          what a head's parameters are before training
"""
