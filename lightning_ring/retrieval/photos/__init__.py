"""An index of photographs: embedded by the model of a checkpoint, found again, shown on a page."""
