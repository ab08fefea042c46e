"""Transforms of torchvision, kornia, Albumentations and yours, with random numbers that depend
on a seed alone.
"""
