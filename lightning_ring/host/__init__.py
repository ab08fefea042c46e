"""Facts and settings of the machine that a rank runs on: cores, malloc, file locks, random
generators.
"""
