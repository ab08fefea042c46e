"""A catalogue of procedurally drawn products, plants, animals, vehicles and landmarks, and
photographs of them.
"""
