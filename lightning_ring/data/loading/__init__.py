"""Batches: decoded and cropped by threads of this process, finished on the device."""
