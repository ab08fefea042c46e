"""Samplers whose orders are functions of (seed, epoch, position), the same on any number of
ranks.
"""
