"""The pitfalls of 16 bits, each computed in fp16, bf16 and fp32 when it is asked for: ``python -m mpcompare.pitfalls``.

``registry.py`` lists them. To add one is to write a function that computes its lines, and to add an entry to that list.
"""
