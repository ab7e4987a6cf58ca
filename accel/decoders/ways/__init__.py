"""Other ways to generate than one token of all rows at a time: with a draft, or by a search with beams. Takes a
generation and an open decoder. Gives tokens.
"""
