"""Lightning Fabric: ``Fabric(strategy="ring")``."""
